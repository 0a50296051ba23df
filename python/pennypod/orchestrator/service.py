"""The orchestrator at work: takes deliveries, lets runs in, carries them out, tells. Floor 3.

One event loop (the web server's) runs everything; what blocks is done in threads. The service is made to crash: every
promise is on disk before it is given, so stopping it is no different from killing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import IO

from pennypod import processes
from pennypod.callbacks import token_digest
from pennypod.clock import Clock, SystemClock
from pennypod.errors import InputError
from pennypod.ledger import Ledger, open_ledger
from pennypod.model.ids import new_run_id
from pennypod.orchestrator import workflow
from pennypod.orchestrator.batching import Batches
from pennypod.orchestrator.config import Config
from pennypod.orchestrator.limits import Buckets
from pennypod.orchestrator.notices import Notices
from pennypod.orchestrator.payload import Callback, JobCatalog, TrainCancel, TrainStart
from pennypod.orchestrator.playbooks import AnsiblePlaybooks, Playbooks
from pennypod.orchestrator.problems import ProblemError
from pennypod.orchestrator.signing import Delivery
from pennypod.orchestrator.steps import Steps
from pennypod.orchestrator.store import RUNNING, Start, Taken, open_store
from pennypod.orchestrator.watching import Judge, WaitingRoom
from pennypod.providers.base import Provider
from pennypod.providers.registry import all_providers
from pennypod.settings import Settings

LOCAL_WORKER = "local"
_TICK_S = 1.0
_BREATH_S = 0.1  # many deliveries at once are let in together
_NOTICES_S = 2.0
_HOUSEKEEPING_S = 600.0
_BEATS = 6  # within the time after which one that is silent is given up
_LOG = logging.getLogger("pennypod.orchestrator")


class Service:
    """Made before the server starts; `start` is called in its event loop. There is no stopping it: see server.py."""

    def __init__(
        self,
        config: Config,
        settings: Settings,
        *,
        clock: Clock | None = None,
        ledger: Ledger | None = None,
        playbooks: Playbooks | None = None,
        providers: Mapping[str, Provider] | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`end` ends the process at once; it is called when the other orchestrators have given this one up."""
        self.shared = settings.ledger_file is None
        # One orchestrator per SQLite home: a restart finds what the process before has left under the same name.
        self.worker = processes.own_identity() if self.shared else LOCAL_WORKER
        self.config = config
        self.settings = settings
        self.clock = clock or SystemClock()
        self.limits = config.limits
        self.ledger = ledger or open_ledger(settings)
        self.store = open_store(_database(settings, "orchestrator"))
        self.providers = all_providers(settings) if providers is None else providers
        self.catalog = JobCatalog(config.root / "group_vars", frozenset(config.file.jobs))
        self.notices = Notices(self.config, self.store, self.clock)
        self.room = WaitingRoom()
        self.starts = Buckets(config.file.limits.as_rate())
        self._desk: Batches[Start, Taken] = Batches(
            lambda starts: self.store.take_starts(starts, self.limits, self.clock.now())
        )
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[bool]] = set()
        self._lock: IO[bytes] | None = None
        self._end = end
        self._heard = 0
        self._told: set[str] = set()
        self._beaten = self._steady_since = 0.0
        self.ticked_at = 0.0
        judge = Judge(settings, self.ledger, self.store, self.providers, self.clock, self.catalog.variables)
        self.steps = Steps(
            settings=settings,
            store=self.store,
            ledger=self.ledger,
            providers=self.providers,
            playbooks=playbooks or AnsiblePlaybooks(settings, config.root),
            notices=self.notices,
            is_training=judge.is_training,
            clock=self.clock,
            artifacts_dir=config.file.artifacts_dir or str(config.root / "artifacts"),
            public_url=(config.file.public_url or "").rstrip("/"),
        )
        self.runs = workflow.Runs(self.steps, judge, self.room, launches=self.limits.running, poll_s=config.file.poll_s)

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises InputError when another orchestrator already works on this home."""
        if not self.shared:
            self._lock = _lock(self.settings)
        else:
            # Before anything is carried out in this name: work of somebody who has never been seen is nobody's.
            await self._beat()
        workflow.configure(_database(self.settings, "workflows"), self.worker)
        self._heard, _ = await asyncio.to_thread(self.store.wakes_since, 0)
        workflow.launch()
        for run in await asyncio.to_thread(self.store.running_of, self.worker):
            await self.runs.start(run)
        loops: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self._tick, _TICK_S),
            (self._send_notices, _NOTICES_S),
            (self._housekeep, _HOUSEKEEPING_S),
        ]
        if self.shared:
            loops.append((self._keep_company, self.config.file.silent_s / _BEATS))
        for work, every_s in loops:
            self._tasks.append(asyncio.create_task(self._forever(work, every_s), name=work.__name__))

    async def _forever(self, work: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            try:
                await work()
            except Exception:  # noqa: BLE001 - the loops outlive every surprise; it is logged and tried again
                _LOG.exception("%s went wrong, trying again", work.__name__)
            if work == self._tick:
                await asyncio.sleep(_BREATH_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), every_s)
                self._wake.clear()
            else:
                await asyncio.sleep(every_s)

    async def _tick(self) -> None:
        """Let in who fits, pass on what was said to runs, notice what has happened to them."""
        now = self.clock.now()
        for run in await asyncio.to_thread(self.store.admit, self.limits, self.worker, now):
            await self.runs.start(run)
        heard, woken = await asyncio.to_thread(self.store.wakes_since, self._heard)
        self._heard = heard
        await asyncio.to_thread(self._observe)
        for run in woken:
            self.room.wake(run)
        self.ticked_at = now

    def _observe(self) -> None:
        running = self.store.requests(RUNNING)
        self._told.intersection_update(request.run for request in running)
        for request in running:
            if request.cancel_requested is not None:
                self.steps.cancel(request.run, request.cancel_reason or "cancelled")
            if request.run not in self._told:
                self.steps.tell_progress(request.run)
            if request.stage == "watch":  # its pod is ready: there is no more to tell until it ends
                self._told.add(request.run)

    async def _send_notices(self) -> None:
        await asyncio.to_thread(self.notices.send_due)

    async def _housekeep(self) -> None:
        await asyncio.to_thread(self.store.forget_old_deliveries, self.clock.now())

    # --- those who share the work -------------------------------------------------------------------------------------

    async def _keep_company(self) -> None:
        """Say that we live; take over from orchestrators that do not."""
        await self._beat()
        carriers = await asyncio.to_thread(workflow.carriers)  # first: who appears later is not taken for gone
        gone = await asyncio.to_thread(
            self.store.give_up, self.worker, self._patience_s(), self.clock.now(), _has_ended_here
        )
        if gone:
            _LOG.warning("taking over from %s", ", ".join(gone))
        runs, living = await asyncio.to_thread(self.store.take_ownerless, self.worker)
        if carriers - living:
            await asyncio.to_thread(workflow.recover, carriers - living)
        for run in runs:
            await self.runs.start(run)

    async def _beat(self) -> None:
        if not await asyncio.to_thread(self.store.beat, self.worker, self.clock.now()):
            _LOG.error("the other orchestrators have given this one up: ending, its runs are theirs now")
            self._end(1)
        now = self.clock.now()
        if now - self._beaten > self.config.file.silent_s / 2:
            self._steady_since = now
        self._beaten = now

    def _patience_s(self) -> float:
        """Who could not be heard itself a while ago, since the database was away say, judges nobody's silence yet."""
        silent_s = self.config.file.silent_s
        return silent_s if self._beaten - self._steady_since >= silent_s else math.inf

    # --- what the web server asks for ---------------------------------------------------------------------------------

    async def take(self, delivery: Delivery, wish: TrainStart | TrainCancel) -> Taken:
        """Accept a checked delivery. What it asks for is on disk when this returns. Raises ProblemError."""
        now = self.clock.now()
        if isinstance(wish, TrainCancel):
            taken = await asyncio.to_thread(self.store.take_cancel, delivery, wish.run, job=wish.job, now=now)
        else:
            wait_s = self.starts.take(delivery.source, now)
            if wait_s:
                raise ProblemError("rate_limited", "too many starts from this source", retry_after_s=wait_s)
            order = self.catalog.order(wish)
            taken = await self._desk.put(
                Start(
                    delivery,
                    order,
                    new_run=lambda: new_run_id(order.job, now, secrets.randbelow),
                    provider=self.config.file.provider,
                )
            )
        self._wake.set()
        return taken

    async def check_callback_token(self, run: str, token: str) -> None:
        """Raises ProblemError token_invalid, also for a run that is over or not here: who guesses learns nothing."""
        try:
            request = await asyncio.to_thread(self.store.request, run)
            wanted = request.callback_token if request.state == RUNNING else ""
        except ProblemError:
            wanted = ""
        if not wanted or not secrets.compare_digest(token_digest(token), wanted):
            raise ProblemError("token_invalid", "this token is not that of this run")

    async def take_callback(self, run: str, callback: Callback) -> None:
        """Write down what the training side says of its own run, and look at the run at once."""
        words = ", ".join(f"{name}={value}" for name, value in callback.data.items())
        await asyncio.to_thread(self.store.record_callback, run, callback.event, words, self.clock.now())
        self._wake.set()

    async def cancel(self, run: str, reason: str) -> None:
        await asyncio.to_thread(self.store.cancel, run, reason, self.clock.now())
        self._wake.set()

    async def destroy(self, run: str, reason: str) -> None:
        """End a run's pods: by its workflow, or here when a command has started it. Raises ProblemError."""
        try:
            await self.cancel(run, reason)
        except ProblemError as problem:
            if problem.code not in ("unknown_run", "run_over"):
                raise
            if not await asyncio.to_thread(self.steps.is_known, run):
                raise
            task = asyncio.create_task(asyncio.to_thread(self.steps.end_pods, run, reason))
            self._errands.add(task)
            task.add_done_callback(self._errands.discard)

    def is_ready(self) -> bool:
        return bool(self._tasks) and self.clock.now() - self.ticked_at < 30 * _TICK_S


def _has_ended_here(worker: str) -> bool:
    """Whether that is a process of this machine which has ended: nobody has to wait for its silence."""
    return processes.can_judge(worker) and not processes.is_alive(worker)


def _database(settings: Settings, name: str) -> str:
    """Beside the ledger: in the same server's database, or in a file of its own in the home."""
    if settings.ledger_file is None:
        return settings.database_url
    return f"sqlite:///{settings.home / name}.sqlite3"


def _lock(settings: Settings) -> IO[bytes]:
    """Held for as long as the process lives."""
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = (settings.home / "serve.lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        file.close()
        raise InputError(
            f"another pennypod serve works on {settings.home}: stop it, or share a PostgreSQL database"
            " (PENNYPOD_DATABASE_URL) between the two"
        ) from exc
    return file
