"""Who is let in next. Floor 3; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Place:
    """A run that waits or runs, as far as limits are concerned."""

    run: str
    job: str
    provider: str
    priority: int = 5
    received: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once: runs in all, per job, per provider. `queue` bounds how many may wait."""

    running: int = 8
    per_job: int = 4
    queue: int = 100
    per_provider: Mapping[str, int] = field(default_factory=dict)

    def for_provider(self, provider: str) -> int:
        return self.per_provider.get(provider, self.running)


def choose(waiting: Sequence[Place], running: Sequence[Place], limits: Limits) -> list[Place]:
    """Those of `waiting` that fit now: higher priority first, then who came first. One that does not fit holds up
    nobody behind it."""
    jobs = Counter(place.job for place in running)
    providers = Counter(place.provider for place in running)
    free = limits.running - len(running)
    chosen = []
    for place in sorted(waiting, key=lambda place: (-place.priority, place.received, place.run)):
        if free <= 0:
            break
        if jobs[place.job] >= limits.per_job or providers[place.provider] >= limits.for_provider(place.provider):
            continue
        chosen.append(place)
        jobs[place.job] += 1
        providers[place.provider] += 1
        free -= 1
    return chosen
