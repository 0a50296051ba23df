"""Rate limits: a token bucket per caller. Floor 3; pure, the time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MOST_CALLERS = 4096


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` at once, then `per_second`."""

    burst: float
    per_second: float


class Buckets:
    """One bucket per caller. The longest unused is forgotten first, so that memory stays bounded."""

    def __init__(self, rate: Rate, most_callers: int = _MOST_CALLERS) -> None:
        self._rate = rate
        self._most = most_callers
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, now: float) -> float:
        """Take one. Returns 0.0 when there was one, else the seconds until there is."""
        level, at = self._levels.pop(caller, (self._rate.burst, now))
        level = min(self._rate.burst, level + max(0.0, now - at) * self._rate.per_second)
        wait = 0.0 if level >= 1 else (1 - level) / self._rate.per_second
        self._levels[caller] = (level - 1 if level >= 1 else level, now)
        while len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return wait
