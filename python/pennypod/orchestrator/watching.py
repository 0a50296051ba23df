"""Is a training over? Floor 3: the ledger, the orchestrator's tables and one short SSH session are its outside things.

A run that waits is an entry in a dict and a row in a table: no process, no thread. Every `poll_s` seconds somebody from
a small pool of threads looks; a callback or a cancellation makes that look happen at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass

from pennypod.acceptance import run_target
from pennypod.clock import Clock
from pennypod.errors import PennypodError
from pennypod.ledger import AttemptRecord, Ledger
from pennypod.model.pod import PodState, SshAddress
from pennypod.orchestrator.store import Store
from pennypod.providers.base import Provider
from pennypod.settings import Settings
from pennypod.ssh import Ssh
from pennypod.training import look

POD_HOME = "/root/pennypod"
# A training is fetched so many seconds before its pod's deadline, whatever it says.
RESERVE_S = 120.0


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
        self, settings: Settings, ledger: Ledger, store: Store, providers: Mapping[str, Provider], clock: Clock
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._store = store
        self._providers = providers
        self._clock = clock
        self._absent: dict[str, int] = {}

    def judge(self, run: str) -> Verdict | None:
        """Why the watch is over, or None while the training goes on. Being unable to look is no verdict."""
        request = self._store.request(run)
        if request.cancel_requested is not None:
            return Verdict(request.cancel_reason or "cancelled", fetch=False)
        record = self._ledger.run(run)
        if record.closed is not None or record.fenced_reason is not None:
            return Verdict(record.reason or record.fenced_reason or "the run was closed", fetch=False)
        said = self._store.called_back(run)
        if said is not None:
            return Verdict(f"the training has called back: {said}")
        if record.deadline is not None and self._clock.now() > record.deadline - RESERVE_S:
            return Verdict("the deadline is near")
        return self._look_at_pod(run)

    def _look_at_pod(self, run: str) -> Verdict | None:
        attempt = next((a for a in self._ledger.attempts(run) if not a.final), None)
        if attempt is None:
            return Verdict("no pod is left", fetch=False)
        if attempt.ssh_host is None or attempt.ssh_port is None:
            return None
        address = SshAddress(attempt.ssh_host, attempt.ssh_port, attempt.ssh_user or "root")
        try:
            state = look(Ssh(run_target(self._settings, run, address)), POD_HOME).state
        except PennypodError:
            gone = self._why_gone(attempt)
            return Verdict(gone, fetch=False) if gone else None
        return Verdict(f"the training is over: {state}") if state in ("finished", "failed_to_start") else None

    def _why_gone(self, attempt: AttemptRecord) -> str:
        """Why no answer can come from the pod any more, says its provider; empty while one may still come.

        "Not there" has to be heard twice: a provider may leave a pod out of one answer.
        """
        provider = self._providers.get(attempt.provider)
        if provider is None or attempt.pod_id is None:
            return ""
        try:
            pod = provider.pod(attempt.pod_id)
        except PennypodError:
            return ""
        if pod is None:
            self._absent[attempt.lease_name] = self._absent.get(attempt.lease_name, 0) + 1
            return f"the pod is gone: {attempt.provider} has it no more" if self._absent[attempt.lease_name] > 1 else ""
        self._absent.pop(attempt.lease_name, None)
        if pod.state in (PodState.STOPPED, PodState.FAILED):
            return f"the pod is {pod.state.value}, says {attempt.provider}: {pod.progress or 'no reason given'}"
        return ""
