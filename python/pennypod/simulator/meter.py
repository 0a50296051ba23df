"""What pods cost, exact to the micro-dollar. Pure.

Rates are whole nano-dollars per hour and times whole microseconds, so that sums are integers and never drift; only a
total that somebody asks for is rounded, half up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

NANOS_PER_USD = 1_000_000_000
HOURS_PER_MONTH = 720
"""Both providers' disk prices are per GB and month; Vast's own samples show that its month has 30 days."""

_US_PER_S = 1_000_000
_UNITS_PER_MICRO = 1000 * 3600 * _US_PER_S


def nanos(usd: float | str | Fraction) -> int:
    """Dollars as whole nano-dollars."""
    exact = Fraction(str(usd)) if not isinstance(usd, Fraction) else usd
    return round(exact * NANOS_PER_USD)


def disk_rate(usd_per_gb_month: float, gb: float) -> int:
    """Nano-dollars per hour of a disk."""
    return nanos(Fraction(str(usd_per_gb_month)) * Fraction(str(gb)) / HOURS_PER_MONTH)


def micros_of_rate(rate: int) -> int:
    """An hourly rate in micro-dollars."""
    return (2 * rate + 1000) // 2000


def microseconds(seconds: float) -> int:
    return round(seconds * _US_PER_S)


def micros(units: int) -> int:
    """Micro-dollars, half up."""
    return (2 * units + _UNITS_PER_MICRO) // (2 * _UNITS_PER_MICRO)


@dataclass(slots=True)
class Segment:
    """A stretch of time at one rate; `end` is None while it lasts. Times in microseconds."""

    kind: str
    rate: int
    start: int
    end: int | None = None

    def units(self, start: int, end: int) -> int:
        last = end if self.end is None else min(self.end, end)
        return self.rate * max(0, last - max(self.start, start))

    def seconds(self, until: int) -> float:
        return max(0, (until if self.end is None else min(self.end, until)) - self.start) / _US_PER_S


class Tab:
    """What one account owes, kept up to date as rates change: no walk over thousands of pods to know a balance."""

    def __init__(self) -> None:
        self.rate = 0
        self._since = 0
        self._units = 0

    def change(self, delta: int, at: int) -> None:
        self._units = self.units(at)
        self._since = max(self._since, at)
        self.rate += delta

    def add(self, units: int) -> None:
        self._units += units

    def units(self, at: int) -> int:
        return self._units + self.rate * max(0, at - self._since)

    def micros(self, at: float) -> int:
        return micros(self.units(microseconds(at)))


@dataclass(slots=True)
class Meter:
    """The meter of one pod. Kinds are independent: "gpu" and "disk" run side by side."""

    tab: Tab
    segments: list[Segment] = field(default_factory=list)
    extra: dict[str, int] = field(default_factory=dict)

    def set_rate(self, kind: str, rate: int, at: float) -> None:
        """From `at` on, `kind` costs `rate` nano-dollars per hour; 0 stops it."""
        moment = microseconds(at)
        running = next((item for item in self.segments if item.kind == kind and item.end is None), None)
        if running is not None:
            if running.rate == rate:
                return
            running.end = max(moment, running.start)
            self.tab.change(-running.rate, running.end)
        if rate:
            self.segments.append(Segment(kind, rate, moment))
            self.tab.change(rate, moment)

    def stop(self, at: float) -> None:
        for kind in {item.kind for item in self.segments}:
            self.set_rate(kind, 0, at)

    def add_bytes(self, kind: str, count: int, usd_per_gb: float) -> None:
        """Traffic: charged at once, per byte."""
        units = round(Fraction(str(usd_per_gb)) * count * 1_000_000 * _UNITS_PER_MICRO / 1_000_000_000)
        self.extra[kind] = self.extra.get(kind, 0) + units
        self.tab.add(units)

    @property
    def rate(self) -> int:
        """Nano-dollars per hour right now."""
        return sum(item.rate for item in self.segments if item.end is None)

    def kinds(self) -> Iterator[str]:
        seen = dict.fromkeys(item.kind for item in self.segments)
        yield from seen
        yield from (kind for kind in self.extra if kind not in seen)

    def micros(self, at: float, kind: str | None = None, since: float = 0.0) -> int:
        """What was charged from `since` to `at`. Traffic has no time of its own and counts whenever asked."""
        start, end = microseconds(since), microseconds(at)
        units = sum(item.units(start, end) for item in self.segments if kind in (None, item.kind))
        units += sum(amount for name, amount in self.extra.items() if kind in (None, name))
        return micros(units)

    def seconds(self, kind: str, at: float) -> float:
        """For how long `kind` was charged."""
        return sum(item.seconds(microseconds(at)) for item in self.segments if item.kind == kind)
