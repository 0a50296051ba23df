"""The money wall of a run that works: notices in time that what it may cost is nearly used up. Floor 2.

Reads the ledger, and asks the provider now and then what the pod costs, beside the caller: an API that does not answer
holds nothing up. A host may ask for more than it did; the price on record then moves, and the wall with it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from pennypod.errors import PennypodError
from pennypod.ledger import AttemptRecord, Ledger
from pennypod.metering import MeterReader
from pennypod.model.money import cost_micros, format_usd, micros_to_usd
from pennypod.model.pod import Pod
from pennypod.providers.base import HearsPriceRequests, PriceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pennypod.clock import Clock
    from pennypod.providers.base import Provider

LOOK_EVERY_S = 30.0
ASK_EVERY_S = 1.0


def spent_micros(attempts: Sequence[AttemptRecord], now: float) -> int:
    """What all attempts of a run have cost together."""
    return sum(attempt.cost_micros(now) for attempt in attempts)


def allowance_micros(attempts: Sequence[AttemptRecord]) -> int | None:
    """What the run may cost in all, by its latest admission; None when no cap was set."""
    return attempts[-1].allowance_micros if attempts else None


def used_up(attempts: Sequence[AttemptRecord], now: float, reserve_s: float) -> str:
    """Why the run has to stop now so that `reserve_s` more of its pod can still be paid for; "" while it need not."""
    allowance = allowance_micros(attempts)
    if allowance is None or all(attempt.final for attempt in attempts):
        return ""
    spent = spent_micros(attempts, now)
    if spent + cost_micros(attempts[-1].price_now, reserve_s) < allowance:
        return ""
    return f"it has cost {format_usd(spent)} of the {format_usd(allowance)} that its caps leave"


def too_dear(attempt: AttemptRecord) -> str:
    """Why the pod's present price is not to be paid; "" when it is. A thousandth is left for rounding."""
    price, cap = attempt.price_now, attempt.price_cap_micros_per_h
    if cap is None or price <= cap + cap // 1000:
        return ""
    return f"{attempt.provider} asks {format_usd(price)}/h now, over max_price_usd_per_h ({format_usd(cap)})"


def beyond_means(attempts: Sequence[AttemptRecord], deadline: float, now: float) -> str:
    """Why the run's pod, at its present price, may cost more by its deadline than the caps leave; "" when not."""
    allowance = allowance_micros(attempts)
    worst = spent_micros(attempts, now) + cost_micros(attempts[-1].price_now, deadline - now)
    if allowance is None or worst <= allowance + allowance // 1000 + len(attempts) + 1:
        return ""
    price = format_usd(attempts[-1].price_now)
    return f"at {price}/h the run may cost {format_usd(worst)}, and its caps leave {format_usd(allowance)}"


def payable_micros_per_h(attempts: Sequence[AttemptRecord], deadline: float | None, now: float) -> int | None:
    """The most that the run's pod may cost per hour from now to its deadline; None where no cap says."""
    limits = [] if attempts[-1].price_cap_micros_per_h is None else [attempts[-1].price_cap_micros_per_h]
    allowance = allowance_micros(attempts)
    if allowance is not None and deadline is not None and deadline > now:
        limits.append(max(0, int((allowance - spent_micros(attempts, now)) * 3600 / (deadline - now))))
    return min(limits, default=None)


class MoneyWatch:
    """Called as often as one likes: why the run has to stop for money, "" while it need not."""

    def __init__(
        self, run: str, ledger: Ledger, provider: Provider, clock: Clock, report: Callable[..., None], reserve_s: float
    ) -> None:
        self._run = run
        self._ledger = ledger
        self._provider = provider
        self._clock = clock
        self._report = report
        self._reserve_s = reserve_s
        self._asked_at = self._looked_at = float("-inf")
        self._said = ""
        self._seen: tuple[Pod, float, float] | None = None
        self._looking: threading.Thread | None = None
        self._answered: set[str] = set()  # price requests: each is told of once
        self._reader: MeterReader | None = None

    def __call__(self) -> str:
        now = self._clock.now()
        if 0 <= now - self._asked_at < ASK_EVERY_S:
            return self._said
        self._asked_at = now
        with contextlib.suppress(PennypodError):  # a ledger that is busy: asked again in a second
            self._said = self._judge(now)
        return self._said

    def _judge(self, now: float) -> str:
        attempts = self._ledger.attempts(self._run)
        if not attempts or attempts[-1].final or attempts[-1].pod_id is None:
            return ""
        attempt = self._take_in(attempts[-1])
        deadline = self._ledger.run(self._run).deadline
        self._look_again(attempt.pod_id or "", payable_micros_per_h([*attempts[:-1], attempt], deadline, now), now)
        return too_dear(attempt) or used_up([*attempts[:-1], attempt], now, self._reserve_s)

    def _take_in(self, attempt: AttemptRecord) -> AttemptRecord:
        """The last look, if one has come in since."""
        seen, self._seen = self._seen, None
        if seen is None:
            return attempt
        if self._reader is None or self._reader.attempt.id != attempt.id:
            self._reader = MeterReader(self._ledger, attempt, self._report)
        self._reader.attempt = attempt
        self._reader.note(*seen)
        return self._reader.attempt

    def _look_again(self, pod_id: str, payable: int | None, now: float) -> None:
        if 0 <= now - self._looked_at < LOOK_EVERY_S or (self._looking is not None and self._looking.is_alive()):
            return
        self._looked_at = now
        self._looking = threading.Thread(target=self._look, args=(pod_id, payable), daemon=True)
        self._looking.start()

    def _look(self, pod_id: str, payable: int | None) -> None:
        asked = self._clock.now()
        with contextlib.suppress(PennypodError):
            pod = self._provider.pod(pod_id)
            if pod is not None:
                self._seen = (pod, asked, self._clock.now())
        with contextlib.suppress(PennypodError):  # a key need not have the right to see or answer them
            if isinstance(self._provider, HearsPriceRequests):
                for request in self._provider.price_requests():
                    if request.pod_id == pod_id and request.request_id not in self._answered:
                        self._answer(self._provider, request, payable)

    def _answer(self, provider: HearsPriceRequests, request: PriceRequest, payable: int | None) -> None:
        """Refuse what the caps do not allow. Nothing is ever accepted here: unanswered, the price stays as it is."""
        asked = format_usd(request.asked_micros_per_h)
        text = f"the host asks for {asked}/h; unanswered, the price stays: accept it yourself if the pod is worth it"
        if payable is not None and request.asked_micros_per_h > payable:
            provider.refuse_price(request.request_id)
            text = f"the host asked for {asked}/h: refused, the run's caps allow {format_usd(payable)}/h"
        self._answered.add(request.request_id)
        self._report("money", text, usd_per_h=micros_to_usd(request.asked_micros_per_h))

    def seconds_left(self) -> float | None:
        """For how long the pod can still be paid for; None where nothing limits it, or nobody knows."""
        with contextlib.suppress(PennypodError):
            attempts = self._ledger.attempts(self._run)
            allowance = allowance_micros(attempts)
            if allowance is not None and attempts[-1].price_now > 0:
                left = allowance - spent_micros(attempts, self._clock.now())
                return max(0.0, left * 3600 / attempts[-1].price_now)
        return None

    def settle(self) -> None:
        """Wait for a look that is under way; for tests and for whoever wants the last word."""
        if self._looking is not None:
            self._looking.join()
