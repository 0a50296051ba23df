"""What a pod's meter has counted, as far as anybody but the provider can know. Floor 0.

Providers charge in three parts: the disk from the create to the destroy (where it is charged apart), the computing from
the moment the container runs, and traffic by the byte. When the container began to run is known only between two looks;
the earlier one counts, so that we are over the invoice rather than under it. A price holds until a look shows another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction

from pennypod.model.money import SECONDS_PER_HOUR

_BYTES_PER_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PodMeter:
    """Times in Unix seconds, money in micro-dollars.

    `price_micros_per_h` is all-in while the pod computes; `disk_micros_per_h` is the part of it that is charged since
    `made` already. `computing` is the earliest moment at which the rest may have begun, `ended` when the meter stopped.
    `sent_bytes` to the pod and `fetched_bytes` from it are charged besides, per GB. `steps` are later all-in prices,
    each with the moment since when it holds, in order.
    """

    price_micros_per_h: int
    made: float
    computing: float
    disk_micros_per_h: int = 0
    ended: float | None = None
    sent_bytes: int = 0
    fetched_bytes: int = 0
    in_micros_per_gb: int = 0
    out_micros_per_gb: int = 0
    steps: tuple[tuple[float, int], ...] = ()

    def seconds(self, now: float) -> float:
        """For how long the pod has been charged for computing."""
        return max(0.0, self._end(now) - self.computing)

    def parts(self, now: float) -> dict[str, int]:
        """Micro-dollars by kind: `compute`, `disk`, `traffic`; each rounded up, so their sum may exceed `micros`."""
        return {kind: math.ceil(exact) for kind, exact in self._exact(now).items()}

    def micros(self, now: float) -> int:
        """All that the pod has cost by `now`, rounded up once: a meter never rounds in our favour."""
        return math.ceil(sum(self._exact(now).values()))

    def _exact(self, now: float) -> dict[str, Fraction]:
        end = self._end(now)
        disk = _exact_micros(self._disk(self.price_micros_per_h), end - self.made)
        spans = [(price - self._disk(price), until - since) for since, until, price in self._spans(end)]
        compute = sum((_exact_micros(price, seconds) for price, seconds in spans), start=Fraction(0))
        bytes_times_price = self.sent_bytes * self.in_micros_per_gb + self.fetched_bytes * self.out_micros_per_gb
        return {"compute": compute, "disk": disk, "traffic": Fraction(bytes_times_price, _BYTES_PER_GB)}

    @property
    def price_now(self) -> int:
        """The price that the last look has shown."""
        return int(self.steps[-1][1]) if self.steps else self.price_micros_per_h

    def _end(self, now: float) -> float:
        return now if self.ended is None else self.ended

    def _disk(self, price: int) -> int:
        """A price below that of its own disk would be a provider's odd answer, not a gift."""
        return min(self.disk_micros_per_h, price)

    def _spans(self, end: float) -> Iterator[tuple[float, float, int]]:
        """(since, until, all-in price) over the time of computing."""
        prices = [(self.made, self.price_micros_per_h), *self.steps]
        for number, (at, price) in enumerate(prices):
            until = prices[number + 1][0] if number + 1 < len(prices) else end
            since, until = max(at, self.computing), min(until, end)
            if since < until:
                yield since, until, int(price)


def uncounted_words(since: float | None) -> str:
    """What goes behind a cost that lacks traffic: since the last count at `since`, or all of it."""
    moment = "" if since is None else f" since {datetime.fromtimestamp(since, UTC):%H:%M} UTC"
    return f" and its traffic{moment}, which it could no longer tell"


def _exact_micros(micros_per_h: int, seconds: float) -> Fraction:
    return micros_per_h * Fraction(repr(max(0.0, seconds))) / SECONDS_PER_HOUR
