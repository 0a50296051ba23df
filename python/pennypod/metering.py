"""Reading a pod's meter from what its provider shows. Floor 2: writes to the ledger, asks nobody.

No provider tells when its meter began. What it shows is a state, in some cases a price and an uptime; each look narrows
the moment down. See `model.meter` for what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable

from pennypod.ledger import AttemptRecord, Ledger
from pennypod.model.money import format_usd, micros_to_usd
from pennypod.model.pod import Pod, PodState

_FIRST_LOOK_S = 0.25
_LOOK_EVERY = 0.2  # of the time waited so far: what is not known of the meter's start stays small beside the wait

Report = Callable[..., None]


class MeterReader:
    """Takes in the looks at one attempt's pod, in order. `attempt` is the ledger's row as of the last one."""

    def __init__(self, ledger: Ledger, attempt: AttemptRecord, report: Report) -> None:
        self._ledger = ledger
        self._report = report
        self._looked: float | None = None
        self._by_offer = attempt.ready is None
        self.attempt = attempt

    def note(self, pod: Pod, asked: float, answered: float) -> None:
        """`pod` as its provider has shown it at some moment between the two."""
        self._note_state(pod, asked, answered)
        self._note_price(pod, asked)
        self._looked = asked

    def _note_state(self, pod: Pod, asked: float, answered: float) -> None:
        attempt = self.attempt
        if attempt.computing_seen is not None:
            return
        if pod.state is PodState.STARTING:
            self.attempt = self._ledger.record_look(attempt.id, computing=False, since=asked, at=answered)
            return
        # Running now, or it has run and stopped between two looks. What the provider says of its uptime may only make
        # the gap between the two looks smaller.
        known = attempt.intended if attempt.computing_from is None else attempt.computing_from
        since = known if pod.computing_since is None else min(max(known, pod.computing_since), answered)
        self.attempt = self._ledger.record_look(attempt.id, computing=True, since=since, at=answered)

    def _note_price(self, pod: Pod, at: float) -> None:
        price, before = pod.price_micros_per_h, self.attempt.price_now
        running = pod.state is PodState.RUNNING
        # A pod that does not compute may show what it costs just then, or nothing.
        if price > 0 and (running or price > before):
            # Until the first look at it running, the price on record is the offer's, and this one has held all along.
            # Later, a dearer one may hold since the look before this one.
            dearer_since = at if self._looked is None else self._looked
            since = self.attempt.intended if self._by_offer else (dearer_since if price > before else at)
            self.attempt = self._ledger.record_price(self.attempt.id, price, since)
        self._by_offer = self._by_offer and not running
        if price > before + before // 1000:
            self._report(
                "rent",
                f"{pod.provider} asks {format_usd(price)}/h for pod {pod.pod_id[:12]}, not {format_usd(before)}/h",
                usd_per_h=micros_to_usd(price),
            )


def pause_s(waited_s: float, poll_s: float, *, running: bool) -> float:
    """How long to wait before the next look at a starting pod.

    Until it is seen running, its meter may begin between two looks, so the first ones follow each other quickly.
    """
    return poll_s if running else min(poll_s, max(_FIRST_LOOK_S, _LOOK_EVERY * waited_s))
