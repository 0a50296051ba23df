"""What is worth saving when a pod has to go: its newest whole checkpoint, within a bounded, priced grace. Floor 2.

The usual end of a run has its weights at home already. This is for the other ends: the command was killed, the deadline
is near, the weights stage failed. Whoever ends the pod then (the guard, the teardown, a sweep) lets `Escrow.release` go
first. It touches the pod over SSH, the run's own folders and the ledger; it never raises, for a pod must end whatever
is wrong with its weights, and it never takes longer than the grace, for then money wins and the loss is written down.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pennypod.acceptance import run_target
from pennypod.clock import Clock
from pennypod.errors import PennypodError, SourceChangedError, TransferError
from pennypod.files import write_atomically
from pennypod.ledger import ArtifactRecord, AttemptRecord, AttemptState, Ledger, RunRecord, WeightsAtEnd, WeightsState
from pennypod.model.pod import SshAddress
from pennypod.settings import Settings
from pennypod.ssh import Ssh, SshTarget
from pennypod.training import last_epoch
from pennypod.transfer import BUSY, Fetched, Progress
from pennypod.weights import (
    LOG_NAME,
    RemoteFile,
    already_here,
    bring_home,
    brought_home,
    find_files,
    weights_target,
)

if TYPE_CHECKING:
    from pennypod.ending import Report

PLAN_FILE = "escrow.json"
GRACE_S = 60.0
GRACE_MICROS = 50_000
ANSWER_S = 5.0
"""A pod that does not let us in within this is taken for dead: it bills while we knock."""

_AGAIN_S = 0.5
_AT_ONCE = 16  # pods looked after at the same time

Bring = Callable[[Ssh, RemoteFile, Path, Callable[[Progress], None]], Fetched]
"""Moves one checkpoint to safety and returns the verified file. Home is `bring_to_artifacts`; a store is another."""


@dataclass(frozen=True, slots=True)
class EscrowPlan:
    """What a training leaves for whoever has to end its pod: where its checkpoints are, what saving one may cost."""

    pod_home: str
    patterns: tuple[str, ...]
    grace_s: float = GRACE_S
    grace_micros: int = GRACE_MICROS

    def limit_s(self, price_micros_per_h: int) -> float:
        """The grace in seconds at that price: whichever of the two bounds is reached first."""
        if price_micros_per_h <= 0:
            return self.grace_s
        return min(self.grace_s, self.grace_micros * 3600 / price_micros_per_h)


def write_plan(run_dir: Path, plan: EscrowPlan) -> None:
    """Written before the training is started, so that no started training is without one."""
    write_atomically(run_dir / PLAN_FILE, json.dumps(asdict(plan)) + "\n")


def read_plan(run_dir: Path) -> EscrowPlan | None:
    """The run's plan, None when no training of it was ever started from this machine."""
    try:
        found = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
        return EscrowPlan(
            pod_home=str(found["pod_home"]),
            patterns=tuple(str(pattern) for pattern in found["patterns"]),
            grace_s=float(found["grace_s"]),
            grace_micros=int(found["grace_micros"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Saved:
    """How it ended for one pod's weights, and the verified file that is here, if there is one."""

    end: WeightsAtEnd
    file: Fetched | None


class Escrow:
    """Lets pods go when their weights are safe, or when saving them has had its time."""

    def __init__(self, settings: Settings, ledger: Ledger, clock: Clock, *, bring: Bring | None = None) -> None:
        self._settings = settings
        self._ledger = ledger
        self._clock = clock
        self._bring = bring or bring_to_artifacts

    def reserve_s(self, run: str) -> float:
        """Seconds that the run's pod should keep before its deadline for its weights; 0 when nothing is to be saved."""
        found = [task for attempt in self._ledger.attempts(run) if (task := self._task(attempt)) is not None]
        return max((task.limit_s for task in found), default=0.0)

    def release(self, attempts: Sequence[AttemptRecord], report: Report) -> Iterator[AttemptRecord]:
        """Every attempt, each as soon as its pod may be destroyed: those with nothing to save at once.

        The pods are looked after side by side, so that a slow one keeps no other billing. Who asks for a pod's end
        before it asks for the next attempt keeps none of them longer than its own grace.
        """
        tasks = [(attempt, self._task(attempt)) for attempt in attempts]
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            running: dict[Future[Saved], tuple[AttemptRecord, _Task]] = {}
            for attempt, task in tasks:
                if task is not None:
                    text = f"its weights are not home: looking for the newest checkpoint, {task.limit_s:.0f} s at most"
                    report("weights", f"{attempt.run}: {text}")
                    running[pool.submit(task.save)] = (attempt, task)
            yield from (attempt for attempt, task in tasks if task is None)
            for future in as_completed(running):
                attempt, task = running[future]
                fault = future.exception()
                saved = task.lost(f"a fault in pennypod: {fault!r}") if fault is not None else future.result()
                self._write_down(attempt.run, task, saved, report)
                yield attempt

    def _task(self, attempt: AttemptRecord) -> _Task | None:
        """What is to be done for an attempt's weights; None when nothing is or nothing can be."""
        if attempt.state is not AttemptState.READY or attempt.ssh_host is None or attempt.ssh_port is None:
            return None
        plan = read_plan(self._settings.runs_dir / attempt.run)
        if plan is None or not plan.patterns:
            return None
        run = self._ledger.run(attempt.run)
        if run.weights_at_end is not None or self._are_home(run):
            return None
        address = SshAddress(attempt.ssh_host, attempt.ssh_port, attempt.ssh_user or "root")
        target = run_target(self._settings, attempt.run, address)
        limit_s = plan.limit_s(attempt.price_micros_per_h)
        return _Task(target, plan, Path(run.artifacts_dir), limit_s, self._clock, self._bring)

    def _are_home(self, run: RunRecord) -> bool:
        """Whether the stage of the weights, or the salvage of a failed training, has done it. Cheap: no hash."""
        found = [item for item in self._ledger.artifacts(run.run) if item.kind == "weights"]
        with contextlib.suppress(OSError):
            return bool(found) and all(
                (Path(run.artifacts_dir) / item.path).stat().st_size == item.bytes for item in found
            )
        return False

    def _write_down(self, run: str, task: _Task, saved: Saved, report: Report) -> None:
        report("weights", f"{run}: weights {saved.end.state.value}: {saved.end.reason}")
        try:
            if saved.file is not None:
                path = str(saved.file.path.relative_to(task.artifacts_dir))
                record = ArtifactRecord(run, path, saved.file.bytes, saved.file.sha256, "weights")
                self._ledger.record_artifacts([record])
            self._ledger.record_weights_at_end(run, saved.end)
        except PennypodError as exc:  # what is home is home; the pod's end must not wait for the ledger
            report("weights", f"{run}: that could not be written down: {exc}")


@dataclass(frozen=True, slots=True)
class _Task:
    """One pod's weights."""

    target: SshTarget
    plan: EscrowPlan
    artifacts_dir: Path
    limit_s: float
    clock: Clock
    bring: Bring

    def save(self) -> Saved:
        if self.limit_s <= 0:
            return self.lost("no grace is allowed for it")
        if not self.target.key_file.is_file():
            return self.lost("the run's SSH key is not on this machine")
        ssh = TimedSsh(self.target, self.limit_s)
        try:
            return self._save(ssh)
        except (PennypodError, OSError) as exc:
            over = f"not within the grace of {self.limit_s:.0f} s: " if ssh.is_over else ""
            return self.lost(f"{over}{exc}")
        finally:
            ssh.end()

    def _save(self, ssh: TimedSsh) -> Saved:
        ssh.run_checked("true", timeout_s=min(ANSWER_S, self.limit_s))
        while True:
            found = find_files(
                ssh, self.plan.pod_home, self.plan.patterns, best=True, deep=True, timeout_s=self.limit_s
            )
            if not found.files:
                return self._nothing_there([f"{Path(bad.path).name}: {bad.why}" for bad in found.rejected[:3]])
            remote = found.files[0]
            here = already_here(weights_target(remote, self.artifacts_dir), remote)
            if here is not None:
                return self._saved(WeightsState.HOME, "the newest checkpoint on the pod was home before", remote, here)
            try:
                fetched = self.bring(ssh, remote, self.artifacts_dir, ssh.keep_time)
            except TransferError as exc:
                if not isinstance(exc, SourceChangedError) and exc.details.get("reason") != BUSY:
                    raise
                # The trainer has written a newer one meanwhile, or a process that is being ended still fetches it.
                ssh.keep_time()
                self.clock.sleep(_AGAIN_S)
                continue
            return self._saved(WeightsState.ESCROWED, "brought home before the pod was destroyed", remote, fetched)

    def _nothing_there(self, rejected: Sequence[str]) -> Saved:
        before = brought_home(self.artifacts_dir)
        if before is not None:
            return self._saved(WeightsState.HOME, "the pod has none any more, this copy was home before", *before)
        why = f" ({'; '.join(rejected)})" if rejected else ""
        end = WeightsAtEnd(WeightsState.NONE, f"the trainer had left no whole checkpoint{why}", epoch=self._epoch())
        return Saved(end, None)

    def lost(self, why: str) -> Saved:
        """What the pod may have had is lost; an older copy that is home is better than nothing."""
        before = brought_home(self.artifacts_dir)
        if before is None:
            end = WeightsAtEnd(WeightsState.LOST, f"{why}; no checkpoint is home", epoch=self._epoch())
            return Saved(end, None)
        return self._saved(WeightsState.LOST, f"{why}; an older checkpoint is home", *before)

    def _saved(self, state: WeightsState, reason: str, remote: RemoteFile, file: Fetched) -> Saved:
        age = round(max(0.0, self.clock.now() - remote.mtime), 1)
        path = str(file.path.relative_to(self.artifacts_dir))
        return Saved(WeightsAtEnd(state, reason, path=path, age_s=age, epoch=self._epoch()), file)

    def _epoch(self) -> int | None:
        return last_epoch(self.artifacts_dir / LOG_NAME)


class TimedSsh(Ssh):
    """Logs in anew for each command, and ends whatever still runs when its time is over."""

    def __init__(self, target: SshTarget, limit_s: float) -> None:
        super().__init__(Ssh(target).fresh().target)
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()
        self._timer = threading.Timer(limit_s, self.end)
        self._timer.daemon = True
        self._timer.start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def popen(self, remote: str) -> subprocess.Popen[bytes]:
        with self._lock:
            self.keep_time()
            process = super().popen(remote)
            self._processes.append(process)
            return process

    def keep_time(self, _progress: Progress | None = None) -> None:
        """Raises SshError when the time is over."""
        if self.is_over:
            raise self.error("the time is over")

    def end(self) -> None:
        """Whoever waits for one of the commands meets the end of its pipe."""
        self._timer.cancel()
        self._over.set()
        with self._lock:
            for process in self._processes:
                if process.poll() is None:
                    process.kill()


def bring_to_artifacts(
    ssh: Ssh, remote: RemoteFile, artifacts_dir: Path, on_progress: Callable[[Progress], None]
) -> Fetched:
    """The `Bring` that needs nothing but this machine."""
    return bring_home(ssh, remote, artifacts_dir, on_progress=on_progress, early=True)
