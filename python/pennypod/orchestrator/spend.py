"""What was spent, what is being spent, and what leaving a machine on would have cost. Floor 3; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pennypod.ledger import AttemptRecord, AttemptState
from pennypod.model.meter import PodMeter
from pennypod.model.money import cost_micros


@dataclass(frozen=True, slots=True)
class Spend:
    """Micro-dollars. `always_on` is what one machine at this month's mean price would have cost since the month began,
    had it been left on; None while nothing was rented this month."""

    today: int
    month: int
    burn_per_h: int
    always_on: int | None

    @property
    def saved(self) -> int | None:
        return None if self.always_on is None else self.always_on - self.month

    @property
    def saved_share(self) -> float | None:
        return None if not self.always_on else 1 - self.month / self.always_on


def day_start(now: float) -> float:
    """Midnight UTC."""
    return datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()


def month_start(now: float) -> float:
    return datetime.fromtimestamp(day_start(now), UTC).replace(day=1).timestamp()


def spend(attempts: Sequence[AttemptRecord], now: float) -> Spend:
    """From the attempts that billed since the month began."""
    began = month_start(now)
    meters = [attempt.meter for attempt in attempts if attempt.meter is not None]
    month = sum(_between(meter, began, now) for meter in meters)
    hours = [(meter, _seconds(meter, began, now)) for meter in meters]
    seconds = sum(billed for _, billed in hours)
    mean_price = round(sum(meter.price_now * billed for meter, billed in hours) / seconds) if seconds else None
    return Spend(
        today=sum(_between(meter, day_start(now), now) for meter in meters),
        month=month,
        burn_per_h=sum(attempt.price_now for attempt in attempts if is_billing(attempt)),
        always_on=None if mean_price is None else cost_micros(mean_price, now - began),
    )


def is_billing(attempt: AttemptRecord) -> bool:
    """Whether its meter runs, or may."""
    return not attempt.final and attempt.state is not AttemptState.INTENT


def _between(meter: PodMeter, since: float, now: float) -> int:
    """Micro-dollars since then; traffic counts as of its end."""
    before = 0
    if meter.made < since:
        before = replace(meter, ended=min(since, _end(meter, now)), sent_bytes=0, fetched_bytes=0).micros(now)
    return max(0, meter.micros(now) - before)


def _seconds(meter: PodMeter, since: float, now: float) -> float:
    return max(0.0, _end(meter, now) - max(meter.computing, since))


def _end(meter: PodMeter, now: float) -> float:
    return now if meter.ended is None else min(meter.ended, now)
