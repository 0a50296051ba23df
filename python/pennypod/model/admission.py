"""Whether one more pod may be rented for the money there is. Floor 0: arithmetic over what is spent and committed.

What counts is the worst case: the price to the run's deadline, and traffic. Everything open counts with its worst case,
too, so runs that are admitted at the same time cannot break together a cap that each of them keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pennypod.errors import BudgetError
from pennypod.model.money import format_usd

DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits in micro-dollars, None for none: over this run; over all runs of its job; over all runs of the last 24
    hours; over what may be open at one provider at a time. `price` is the highest all-in price per hour.
    """

    run: int | None = None
    job: int | None = None
    day: int | None = None
    account: int | None = None
    price: int | None = None


NO_CAPS = Caps()
NAMES = {
    "run": "max_cost_usd",
    "job": "max_cost_usd_per_job",
    "day": "max_cost_usd_per_day",
    "account": "max_cost_usd_account",
    "balance": "the balance",
}
_ADVICE = {
    "run": "raise it, shorten pod_train_minutes, or take a cheaper GPU",
    "job": "raise it, or end a run of this job",
    "day": "raise it, or wait: what was rented over a day ago no longer counts",
    "account": "raise it, or end a run there; `ansible-inventory --graph` shows what is open",
    "balance": "add credit at the provider, or end a run there",
}
_OTHERS = {
    "run": "earlier attempts have cost",
    "job": "runs of this job have cost or may cost",
    "day": "the runs of the last 24 hours have cost or may cost",
    "account": "open pods there may cost",
    "balance": "open pods there may still take",
}


@dataclass(frozen=True, slots=True)
class Committed:
    """What is spent or may yet be, in micro-dollars, under each cap: without the pod that is asked for.

    `run` is what the run itself has spent; `job`, `day` and `account` are the others'. `balance` is what the open pods
    of the provider may still take out of it.
    """

    run: int = 0
    job: int = 0
    day: int = 0
    account: int = 0
    balance: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """One more pod: what it may cost at worst, under which caps, and what its provider has left for us, if it tells."""

    worst_micros: int
    caps: Caps = NO_CAPS
    balance_micros: int | None = None


def admit(asked: Asked, committed: Committed) -> int | None:
    """What the run may cost in all, earlier attempts included, without breaking any cap; None when nothing limits it.

    Raises BudgetError that names the cap, what is committed under it, and what to do.
    """
    allowances = []
    for name, cap in _limits(asked).items():
        others = 0 if name == "run" else int(getattr(committed, name))
        # What the run has spent counts under the caps over time; from an account and its balance it is gone already.
        own = 0 if name in ("account", "balance") else committed.run
        if others + own + asked.worst_micros > cap:
            raise _refusal(name, cap, others + own, asked.worst_micros)
        allowances.append(cap - others + committed.run - own)
    return min(allowances, default=None)


def _limits(asked: Asked) -> dict[str, int]:
    limits = {field.name: getattr(asked.caps, field.name) for field in fields(Caps) if field.name != "price"}
    limits["balance"] = asked.balance_micros
    return {name: limit for name, limit in limits.items() if limit is not None}


def _refusal(name: str, cap: int, taken: int, worst: int) -> BudgetError:
    before = f"{_OTHERS[name]} {format_usd(taken)}, and " if taken else ""
    return BudgetError(
        f"it would break {NAMES[name]} ({format_usd(cap)}): {before}this pod may cost {format_usd(worst)} at worst;"
        f" {_ADVICE[name]}",
        cap=NAMES[name],
        cap_micros=cap,
        committed_micros=taken,
        worst_case_micros=worst,
    )
