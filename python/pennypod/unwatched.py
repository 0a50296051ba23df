"""Open runs that nobody ends any more: past their deadline, or with command and guard dead. Floor 2: the process table.

The ledger calls a run open until somebody closes it. When all who could are dead, that word is worth nothing, while the
pod may go on billing: whoever shows the run must say so. A run whose pods are all proven gone needs no more than its
closing, which may be what they died before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pennypod import processes
from pennypod.guard import guard_is_alive
from pennypod.ledger import AttemptRecord, Ledger, Outcome, RunRecord
from pennypod.model.ids import parse_lease
from pennypod.report import close_with_results, had_its_weights
from pennypod.settings import Settings

OVERDUE_AFTER_S = 120.0
"""A guard or sweep that begins at the deadline has to destroy and to prove; that is no reason for alarm yet."""

DIED_BEFORE_CLOSING = "its command died when its pod was gone already"


@dataclass(frozen=True, slots=True)
class Neglect:
    """`state` is "overdue" or "unwatched", `advice` what to do about it, in one line."""

    state: str
    advice: str


def neglect(
    run: RunRecord, attempts: Sequence[AttemptRecord], now: float, watched: Callable[[RunRecord], bool]
) -> Neglect | None:
    """What is wrong with an open run whose pod is not proven gone; None while somebody sees to it, or is trusted to.

    `watched` says whether the run's command or its guard lives. A run that may outlive its command
    (`keep_on_disconnect`, as a detached one does) is judged by its deadline alone.
    """
    pending = [attempt for attempt in attempts if not attempt.final]
    if run.closed is not None or not pending:
        return None
    deadlines = [lease.deadline for a in pending if (lease := parse_lease(a.lease_name)) is not None]
    if any(now > deadline + OVERDUE_AFTER_S for deadline in deadlines):
        return Neglect("overdue", "its deadline has passed and its pod is not proven gone: `pennypod sweep` ends it")
    if run.keep_on_disconnect or watched(run):
        return None
    minutes = max(1, math.ceil((max(deadlines, default=now) - now) / 60) + 1)
    return Neglect(
        "unwatched",
        "its command and its guard are dead and its pod is not proven gone:"
        f" `ansible-playbook playbooks/resume.yml -e run={run.run}` goes on with it,"
        f" `pennypod sweep --run {run.run} --now +{minutes}m` ends it",
    )


def somebody_watches(settings: Settings, run: RunRecord) -> bool:
    """Whether the run's command or its guard lives. Another machine's are taken to: only its deadline tells here."""
    return processes.is_alive(run.controller) or guard_is_alive(settings, run.controller)


def close_over(
    ledger: Ledger,
    judged_at: float,
    now: float,
    watched: Callable[[RunRecord], bool],
    runs: Collection[str] = (),
) -> list[str]:
    """Close the open runs of which nothing is left, and write their results; their ids. With `runs`, only of those.

    Every pod proven gone, command and guard dead, the deadline past (until then a resume may go on with it): they died
    between the last proof and the books. It has succeeded when its weights are home and its pod had done its work.
    """
    closed = []
    for run in ledger.open_runs():
        over = run.closed is None and run.deadline is not None and run.deadline < judged_at
        if not over or (runs and run.run not in runs):
            continue
        attempts = ledger.attempts(run.run)
        if not attempts or not all(attempt.final for attempt in attempts) or watched(run):
            continue
        done = attempts[-1].outcome == "done" and had_its_weights(ledger, run.run)
        outcome, reason = (Outcome.SUCCEEDED, "") if done else (Outcome.CANCELLED, DIED_BEFORE_CLOSING)
        if close_with_results(ledger, run.run, outcome, reason, now):
            closed.append(run.run)
    return closed
