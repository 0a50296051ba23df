"""Destroys pods and proves that they are gone. Floor 2: provider, ledger and clock are passed in.

Absence is several spaced answers of "not there" in every view that the provider has: the single look, the full listing,
and what the account spends. An error is never absence, neither is a listing that contradicts itself, and either starts
the count again. Until then the destroy call is repeated: with growing pauses, a random part in each, and a cap per hour
that all processes with one ledger share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pennypod.clock import Clock
from pennypod.errors import PennypodError, TransientError, UnprovenError
from pennypod.ledger import Ledger, LedgerError
from pennypod.model.money import format_usd
from pennypod.model.pod import Pod
from pennypod.providers.base import Provider, TellsSpend
from pennypod.receipts import ABSENT, ACCEPTED, DESTROY, LISTING, LOOK, NOT_TOLD, SPENDING, SPENDS, STILL

DESTROY_CALLS_PER_HOUR = 150
"""Never more destroy calls for one pod within an hour, whoever makes them."""

LONGEST_PAUSE_S = 30.0
"""The longest pause between two destroy calls: an API that comes back ends the pod within this and one round trip."""

Answer = TypeVar("Answer")

_FIRST_PAUSE_S = 2.0
_LONGEST_LOOK_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Sought:
    """What has to be gone. `price_micros_per_h` is 0 where nobody knows it; `since` is no later than its beginning."""

    provider: Provider
    pod_id: str
    name: str
    price_micros_per_h: int = 0
    since: float = 0.0


class DestroyCalls:
    """When a pod may be destroyed again. Shared through the ledger; where that fails, kept in this process alone."""

    def __init__(self, ledger: Ledger, clock: Clock, *, chance: Callable[[], float] = random.random) -> None:
        self._ledger = ledger
        self._clock = clock
        self._chance = chance
        self._own: dict[tuple[str, str], list[float]] = {}
        self._jitter: dict[tuple[str, str], float] = {}

    def claim(self, provider: str, pod_id: str) -> float:
        """0 when the caller may call now, which is then on record; else the seconds until somebody may."""
        key, now = (provider, pod_id), self._clock.now()
        jitter = self._jitter.setdefault(key, self._chance())

        def wait_s(calls: Sequence[float], now: float) -> float:
            return pause_before_next(calls, now, jitter)

        try:
            wait = self._ledger.claim_destroy(provider, pod_id, now, wait_s)
        except LedgerError:
            # Whatever became of the ledger: it must not keep a pod alive.
            calls = self._own[key] = [min(at, now) for at in self._own.get(key, ())]
            wait = wait_s(calls, now)
            if wait <= 0:
                calls.append(now)
        if wait <= 0:
            del self._jitter[key]
        return wait


def pause_before_next(calls: Sequence[float], now: float, jitter: float) -> float:
    """Seconds until the next destroy call, from the times of those before, in their order, none after `now`.

    `jitter` of 0 to 1 takes up to a sixth off the pause, so that clients do not march in step; even then only a clock
    that jumps gets near the cap.
    """
    recent = [at for at in calls if now - 3600 < at]
    if not recent:
        return 0.0
    pause = min(LONGEST_PAUSE_S, _FIRST_PAUSE_S * float(2 ** min(len(recent) - 1, 10))) * (1.0 - jitter / 6)
    wait = recent[-1] + pause - now
    if len(recent) >= DESTROY_CALLS_PER_HOUR:
        wait = max(wait, recent[-DESTROY_CALLS_PER_HOUR] + 3600 - now)
    return max(0.0, wait)


@dataclass(slots=True)
class Proof:
    """The way to one pod's end, round by round. `steps` is what was asked and answered; `due` when to go on.

    `silent_since` is when the first call was made that got no answer, None since one did.
    """

    sought: Sought
    calls: DestroyCalls
    clock: Clock
    due: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)
    silent_since: float | None = None
    _absent: int = 0
    _wait: float = 0.0
    _ahead: float = 0.0

    @property
    def complete(self) -> bool:
        return self._absent >= self.sought.provider.timing.absence_checks

    @property
    def absence(self) -> dict[str, Any]:
        """How absence is established here, as a receipt claims it."""
        timing = self.sought.provider.timing
        views = [LOOK, LISTING, *([SPENDING] if isinstance(self.sought.provider, TellsSpend) else [])]
        return {"checks": timing.absence_checks, "spacing_s": timing.absence_spacing_s, "views": views}

    @property
    def last_answer(self) -> str:
        return str(self.steps[-1]["answer"]) if self.steps else "nothing was asked yet"

    def advance(self) -> bool:
        """One round: ask for the end where that is due, then look in every view. Returns whether absence is proven."""
        if self.complete:
            return True
        timing = self.sought.provider.timing
        pause = self.ask() if self._absent == 0 else 0.0
        if self._look_everywhere():
            self._absent += 1
            self._wait = 0.0
            self.due = self.clock.now() + timing.absence_spacing_s
            return self.complete
        self._absent = 0
        longest = max(timing.absence_spacing_s, _LONGEST_LOOK_PAUSE_S)
        self._wait = min(longest, max(timing.absence_spacing_s, self._wait * 1.5))
        self.due = self.clock.now() + (min(self._wait, pause) if pause > 0 else self._wait)
        return False

    def unproven(self, patience_s: float) -> UnprovenError:
        pod_id, provider = self.sought.pod_id, self.sought.provider.name
        answers = [step["answer"] for step in self.steps if step["answer"] not in (ACCEPTED, ABSENT)]
        return UnprovenError(
            f"pod {pod_id} ({provider}) is not proven gone after {patience_s:.0f} s"
            f" ({answers[-1] if answers else self.last_answer}):"
            " it may still be billing; the guard keeps trying, `pennypod sweep` repeats it",
            pod_id=pod_id,
            provider=provider,
        )

    def ask(self) -> float:
        """Make the destroy call if it is due; the seconds until it is."""
        wait = self.calls.claim(self.sought.provider.name, self.sought.pod_id)
        if wait > 0:
            if not self.steps:
                self._note(DESTROY, f"asked for just before; again in {wait:.0f} s at the earliest")
            return wait
        try:
            self._heard(lambda: self.sought.provider.destroy(self.sought.pod_id))
            answer = ACCEPTED
        except Exception as exc:  # noqa: BLE001 - the next pod must not bill on for a fault of ours with this one
            answer = _said(exc)
        self._note(DESTROY, answer)
        return 0.0

    def _heard(self, call: Callable[[], Answer]) -> Answer:
        """The answer of a call; a refusal is one, too."""
        if self.silent_since is None:
            self.silent_since = self.clock.now()
        try:
            answer = call()
        except TransientError:
            raise
        except Exception:
            self.silent_since = None
            raise
        self.silent_since = None
        return answer

    def _look_everywhere(self) -> bool:
        provider, pod_id = self.sought.provider, self.sought.pod_id
        asked = LOOK
        try:
            if self._heard(lambda: provider.pod(pod_id)) is not None:
                return self._note(LOOK, f"{STILL} there")
            self._note(LOOK, ABSENT)
            asked = LISTING
            pods = self._heard(provider.pods)
            if any(pod.pod_id == pod_id or pod.name == self.sought.name for pod in pods):
                return self._note(LISTING, f"{STILL} listed")
            self._note(LISTING, ABSENT)
        except Exception as exc:  # noqa: BLE001 - whatever it was, it is no absence
            return self._note(asked, _said(exc))
        return self._look_at_spending(pods) if isinstance(provider, TellsSpend) else True

    def _look_at_spending(self, pods: Sequence[Pod]) -> bool:
        assert isinstance(self.sought.provider, TellsSpend)
        try:
            spending = self._heard(self.sought.provider.spend_micros_per_h)
        except Exception as exc:  # noqa: BLE001 - see above
            return self._note(SPENDING, _said(exc))
        if spending is None:
            self._note(SPENDING, f"{NOT_TOLD}: the account's spending is not shown to this key")
            return True
        listed = sum(pod.price_micros_per_h for pod in pods if pod.billing)
        if is_unexplained(spending, listed, self.sought.price_micros_per_h):
            left = format_usd(spending - listed)
            return self._note(SPENDING, f"{SPENDS} {left}/h that no listed pod explains")
        self._note(SPENDING, ABSENT)
        return True

    def _note(self, asked: str, answer: str) -> bool:
        """Write an answer down; always False, for callers that return what it means. Times never go back."""
        now = self.clock.now() + self._ahead
        last = self.steps[-1]["at"] if self.steps else self.sought.since
        if now < last:  # the clock was set back, so nobody knows how long the last pause was
            self._ahead += last - now
            self._absent = 0
            now = last
        self.steps.append({"at": now, "asked": asked, "answer": answer})
        return False


def prove_all(proofs: Sequence[Proof], clock: Clock, patience_s: float) -> None:
    """Take all proofs forward, each at its own pace, until all are complete or `patience_s` is over.

    Every end is asked for before any is waited for: the last pod in the row bills meanwhile.
    """
    started = clock.now()
    for proof in proofs:
        proof.ask()
    while True:
        for proof in proofs:
            if not proof.complete and not clock.now() < proof.due < clock.now() + 3600:
                proof.advance()
        waiting = [proof.due for proof in proofs if not proof.complete]
        # A clock that was set back ends the patience, too: without it, it might last for hours.
        if not waiting or not 0 <= clock.now() - started <= patience_s:
            return
        clock.sleep(min(60.0, max(0.0, min(waiting) - clock.now())))


def _said(exc: Exception) -> str:
    if isinstance(exc, PennypodError):
        return f"{exc.code}: {exc}"
    return f"a fault in pennypod: {type(exc).__name__}: {exc}"


def is_unexplained(spending: int, listed: int, price: int) -> bool:
    """Whether an account spends so much more than its listed pods cost that a pod of `price` may still be among it.

    All in micro-dollars per hour. Half the price leaves room for what else accounts pay for (volumes), a twentieth of
    the rest for prices that listings and bills round differently.
    """
    return price > 0 and spending - listed >= max(price // 2, listed // 20)
