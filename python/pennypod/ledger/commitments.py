"""What is spent and committed, from the ledger's own rows. Floor 1; no I/O.

A run that has rented counts with what its plan may cost at worst until it is closed: its next attempt must not find the
money gone. Whatever has cost more than it was to cost, counts with that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pennypod.ledger.records import AttemptRecord, RunRecord
from pennypod.model.admission import DAY_S, Committed
from pennypod.model.ids import parse_lease
from pennypod.model.money import cost_micros


def committed(
    run: RunRecord, provider: str, runs: Iterable[RunRecord], attempts: Sequence[AttemptRecord], now: float
) -> Committed:
    """For one more pod of `run` at `provider`. `attempts` are those of all `runs`, `run` among them."""
    of_run: dict[str, list[AttemptRecord]] = {}
    for attempt in attempts:
        of_run.setdefault(attempt.run, []).append(attempt)
    others = {other.run: other for other in runs if other.run != run.run and other.run in of_run}
    worst = {name: _worst_of_run(other, of_run[name], now) for name, other in others.items()}
    there = [attempt for attempt in attempts if attempt.provider == provider and not attempt.final]
    return Committed(
        run=sum(attempt.cost_micros(now) for attempt in of_run.get(run.run, ())),
        job=sum(worst[name] for name, other in others.items() if other.job == run.job),
        day=sum(worst[name] for name in _of_today(others, of_run, now)),
        account=sum(worst_of(attempt, now) for attempt in there),
        balance=sum(worst_of(attempt, now) - attempt.cost_micros(now) for attempt in there),
    )


def worst_of(attempt: AttemptRecord, now: float) -> int:
    """What an attempt may come to cost: its admission's figure, or what it has cost by now where that is more."""
    spent = attempt.cost_micros(now)
    if attempt.final:
        return spent
    worst = attempt.worst_case_micros
    if worst is None:
        lease = parse_lease(attempt.lease_name)
        seconds = 0.0 if lease is None else lease.deadline - attempt.intended
        worst = cost_micros(attempt.price_now, seconds)
    return max(spent, worst)


def _worst_of_run(run: RunRecord, attempts: Sequence[AttemptRecord], now: float) -> int:
    worst = sum(worst_of(attempt, now) for attempt in attempts)
    if run.closed is not None or run.fenced_reason is not None:
        return worst  # it rents no more
    return max(worst, run.worst_case_micros or 0)


def _of_today(
    runs: Mapping[str, RunRecord], of_run: Mapping[str, Sequence[AttemptRecord]], now: float
) -> Iterable[str]:
    for name, run in runs.items():
        rented = of_run[name]
        open_now = run.closed is None or any(not attempt.final for attempt in rented)
        if open_now or any(attempt.intended > now - DAY_S for attempt in rented):
            yield name
