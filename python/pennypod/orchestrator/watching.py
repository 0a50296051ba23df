"""Is a training over? Floor 3: the ledger, the orchestrator's tables and one short SSH session are its outside things.

A run that waits is an entry in a dict and a row in a table: no process, no thread. Every `poll_s` seconds somebody from
a small pool of threads looks; a callback or a cancellation makes that look happen at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pennypod import monitor
from pennypod.acceptance import run_target
from pennypod.clock import Clock
from pennypod.ledger import Ledger, RunRecord
from pennypod.model.ids import job_of_run
from pennypod.model.pod import SshAddress
from pennypod.monitor import Lookout, Next, judge
from pennypod.orchestrator.store import Store
from pennypod.providers.base import Provider
from pennypod.settings import Settings
from pennypod.ssh import Ssh
from pennypod.training import Frame, look

# A training is fetched so many seconds before its pod's deadline, whatever it says.
RESERVE_S = 180.0
DEFAULT_STALL_MINUTES = 30  # as in the role `training`


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a run need not be watched any longer. `fetch` says whether there may be something to bring home."""

    reason: str
    fetch: bool = True


class WaitingRoom:
    """Where runs wait between two looks. Used from one event loop only."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wake(self, run: str) -> None:
        if run in self._waiting:
            self._waiting[run].set()

    async def wait(self, run: str, seconds: float) -> None:
        """Until somebody wakes the run, or the time is over; a little random, so that not all look at once."""
        event = self._waiting.setdefault(run, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
        self._waiting.pop(run, None)


class Judge:
    """Looks at one run, once. Safe to use from several threads."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        store: Store,
        providers: Mapping[str, Provider],
        clock: Clock,
        job_of: Callable[[str], Mapping[str, Any]],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._store = store
        self._providers = providers
        self._clock = clock
        self._job_of = job_of

    def judge(self, run: str) -> Verdict | None:
        """Why the watch is over, or None while the training goes on. Being unable to look is no verdict."""
        request = self._store.request(run)
        if request.cancel_requested is not None:
            return Verdict(request.cancel_reason or "cancelled", fetch=False)
        record = self._ledger.run(run)
        said = self._store.called_back(run)
        if said is not None:
            return Verdict(f"the training has called back: {said}")
        if record.deadline is not None and self._clock.now() > record.deadline - RESERVE_S:
            return Verdict("the deadline is near")
        return self._look_at_pod(run)

    def is_training(self, run: str) -> bool:
        """Whether the run's training is seen to go on, on its pod, by itself."""
        seen: list[Frame] = []
        return self._look(run, seen).next is Next.WAIT and bool(seen)

    def _look_at_pod(self, run: str) -> Verdict | None:
        seen: list[Frame] = []
        found = self._look(run, seen)
        if found.next is Next.WAIT and seen:
            found = judge(seen[0], run, self._stall_s(run))
        if found.next is Next.WAIT:
            return None
        return Verdict(found.why, fetch=found.next is Next.FINISH)

    def _look(self, run: str, seen: list[Frame]) -> monitor.Verdict:
        def see(_record: RunRecord, address: SshAddress, pod_home: str) -> Frame:
            seen.append(look(Ssh(run_target(self._settings, run, address)), pod_home))
            return seen[0]

        # Its controller is this very process, and that is no reason not to look.
        lookout = Lookout(self._settings, self._ledger, self._providers, self._clock, alive=lambda _who: False, see=see)
        return lookout.look(run)

    def _stall_s(self, run: str) -> float:
        minutes = self._job_of(job_of_run(run)).get("training_stall_minutes", DEFAULT_STALL_MINUTES)
        return float(minutes) * 60 if isinstance(minutes, int | float) else DEFAULT_STALL_MINUTES * 60.0
