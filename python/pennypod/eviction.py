"""A pod that its provider has taken away: may its run go on on another one? Floor 2: ledger and providers, passed in.

Nothing is rented here. What this finds is proven gone by the caller first, under the outcome LOST, and only then may
another pod be asked for: the ledger refuses that before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pennypod.ledger import AttemptRecord, AttemptState, Ledger
from pennypod.podwork import loss_of
from pennypod.providers.base import Provider

LOST = "lost"
"""The outcome of an attempt whose accepted pod was taken away; the ledger counts them, whoever goes on with the run."""


@dataclass(frozen=True, slots=True)
class Found:
    """`again` says whether the run may rent once more, `why` in words; `said` is what has become of its pod.

    `lost` is the attempt whose pod was taken away, if one was; its number is what `after` of the next look excludes.
    """

    again: bool
    why: str
    said: str = ""
    lost: AttemptRecord | None = None


def look_for_loss(
    ledger: Ledger, providers: Mapping[str, Provider], run: str, *, most: int, after: int, now: float
) -> Found:
    """Whether the run has lost an accepted pod later than attempt `after`, at most `most` of them in its whole life.

    A pod that its provider still shows running was not taken away: then the training has failed by itself, and would
    again. Raises nothing for a provider that does not answer: that is no loss.
    """
    record, attempts = ledger.run(run), ledger.attempts(run)
    if record.closed is not None or record.fenced_reason is not None:
        return Found(False, f"the run was stopped: {record.fenced_reason or record.reason or 'it is over'}")
    accepted = [attempt for attempt in attempts if attempt.ready is not None]
    if not accepted or accepted[-1].attempt <= after or accepted[-1].id != attempts[-1].id:
        return Found(False, "no pod was taken away since")
    last = accepted[-1]
    said = _what_became_of(last, providers.get(last.provider))
    if not said:
        return Found(False, "its pod was not taken away")
    count = len({attempt.attempt for attempt in accepted if attempt.outcome == LOST} | {last.attempt})
    if count > most:
        return Found(False, f"{said}; that was loss {count} of this run, and max_evictions is {most}", said, last)
    if record.deadline is not None and now >= record.deadline:
        return Found(False, f"{said}; the run's deadline is over", said, last)
    return Found(True, f"{said}; going on on another pod (loss {count} of at most {most})", said, last)


def _what_became_of(attempt: AttemptRecord, provider: Provider | None) -> str:
    """How a pod was lost; empty when it was not. A look before this one may have died half-way or at its end."""
    if attempt.outcome == LOST and (attempt.final or attempt.state is AttemptState.DESTROYING):
        return attempt.reason or "its pod was taken away"
    return "" if provider is None else loss_of(provider, attempt)
