"""The life of a run as a durable workflow. Floor 3: DBOS keeps, in its own tables, which steps are over.

launch, watch, finish, destroy, report. A step that a crash interrupts runs again from its start, one that is over does
not; each one copes with that (steps.py). Nothing is awaited in a thread: a run that is watched costs a task and a row.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dbos import DBOS, DBOSConfig, DBOSConfiguredInstance, DBOSPortableJSONSerializer, SetWorkflowID
from sqlalchemy.engine import make_url

from pennypod.ledger.engine import prepare_sqlite_file
from pennypod.orchestrator.steps import BROKEN, TRAINING, Steps
from pennypod.orchestrator.watching import Judge, Verdict, WaitingRoom

# Changes only when the order of the steps does: runs of another version would not be taken up again.
WORKFLOW_VERSION = "1"
_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 300.0
_MOST_SURPRISES = 4
_LOG = logging.getLogger("pennypod.orchestrator")
_Result = TypeVar("_Result")


@DBOS.dbos_class()
class Runs(DBOSConfiguredInstance):
    """The workflow with what its steps need. There is one per process."""

    def __init__(self, steps: Steps, judge: Judge, room: WaitingRoom, *, launches: int, poll_s: float) -> None:
        super().__init__("runs")
        self._steps = steps
        self._judge = judge
        self._room = room
        self._poll_s = poll_s
        # Playbooks are long and many; looks are short. Neither may keep the other waiting.
        self._players = ThreadPoolExecutor(launches, thread_name_prefix="playbook")
        self._lookers = ThreadPoolExecutor(4, thread_name_prefix="look")
        self._enders = ThreadPoolExecutor(8, thread_name_prefix="destroy")

    @DBOS.workflow(name="train", max_recovery_attempts=None)
    async def train(self, run: str) -> str:
        """From the launch to the report, whatever happens between."""
        if await self.launch(run) == TRAINING and await self.watch(run):
            await self.finish(run)
        await self.destroy(run)
        return await self.report(run)

    @DBOS.step(name="launch")
    async def launch(self, run: str) -> str:
        return await self._stubborn(self._players, self._steps.launch, run, most=_MOST_SURPRISES) or BROKEN

    @DBOS.step(name="watch")
    async def watch(self, run: str) -> bool:
        """Until the training is over; whether there may be something to bring home."""
        await self._stubborn(self._lookers, self._begin_watch, run)
        while True:
            verdict = await self._stubborn(self._lookers, self._judge.judge, run)
            if verdict is not None:
                await self._stubborn(self._lookers, self._end_watch, run, verdict)
                return verdict.fetch
            await self._room.wait(run, self._poll_s)

    def _begin_watch(self, run: str) -> None:
        self._steps.enter(run, "watch", "the training goes on")
        self._steps.hold(run)

    def _end_watch(self, run: str, verdict: Verdict) -> None:
        self._steps.tell(run, "watched", verdict.reason)

    @DBOS.step(name="finish")
    async def finish(self, run: str) -> None:
        await self._stubborn(self._players, self._steps.finish, run, most=_MOST_SURPRISES)

    @DBOS.step(name="destroy")
    async def destroy(self, run: str) -> None:
        """Until every pod of the run is proven gone, however long that takes: giving up would cost money."""
        pause = _FIRST_PAUSE_S
        while not await self._stubborn(self._enders, self._steps.destroy, run):
            await asyncio.sleep(pause)
            pause = min(pause * 2, _MAX_PAUSE_S)

    @DBOS.step(name="report")
    async def report(self, run: str) -> str:
        return await self._stubborn(self._enders, self._steps.report, run) or ""

    async def start(self, run: str) -> None:
        """Begin a run's workflow. Begun before, by whomever, it is left as it is."""
        if await DBOS.get_workflow_status_async(run) is None:
            with SetWorkflowID(run):
                await DBOS.start_workflow_async(self.train, run)

    async def _stubborn(
        self, pool: ThreadPoolExecutor, work: Callable[..., _Result], run: str, *args: Any, most: int | None = None
    ) -> _Result | None:
        """`work` in a thread of `pool`, again and again until it raises nothing; None after `most` surprises.

        A full disk, a database that restarts, a mistake of ours: none of it may lose a run that was accepted.
        """
        pause, surprises = _FIRST_PAUSE_S, 0
        while most is None or surprises < most:
            try:
                return await asyncio.get_running_loop().run_in_executor(pool, work, run, *args)
            except Exception:  # noqa: BLE001 - as said above; it is logged
                surprises += 1
                _LOG.exception("run %s: %s went wrong (%d), trying again", run, work.__name__, surprises)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _MAX_PAUSE_S)
        return None


def configure(database_url: str, worker: str) -> None:
    """Set DBOS up, once per process and before `launch`. JSON, not pickle: a database must not be able to run code."""
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite" and url.database:
        prepare_sqlite_file(url.database)
        connection = sqlite3.connect(url.database)
        connection.execute("PRAGMA journal_mode=WAL")  # stays with the file: readers do not stop writers
        connection.close()
    config: DBOSConfig = {
        "name": "pennypod",
        "application_version": WORKFLOW_VERSION,
        "executor_id": worker,
        "system_database_url": database_url,
        "serializer": DBOSPortableJSONSerializer(),
        "max_executor_threads": 16,
        "log_level": "WARNING",
        "enable_otlp": False,
    }
    DBOS(config=config)


def launch() -> None:
    """Begin to carry out; what an earlier process of this worker left is taken up again."""
    DBOS.launch()


def carriers() -> set[str]:
    """The workers that DBOS has put down as carrying something out."""
    pending = DBOS.list_workflows(status="PENDING", load_input=False, load_output=False)
    return {status.executor_id for status in pending if status.executor_id}


def recover(workers: Iterable[str]) -> None:
    """Take up what those, that are gone, have left. DBOS hands each workflow to one of who lives, and asked twice does
    so once; that somebody is gone it only learns from its makers' paid console, or from us."""
    DBOS._recover_pending_workflows(sorted(workers))  # noqa: SLF001 - there is no public name for it
