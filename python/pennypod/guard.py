"""Ring 1: a detached process that destroys a run's pods when the command that rented them dies. Floor 2.

Ansible's `always:` does not run on Ctrl-C, TERM, HUP or KILL, so the guarantee cannot live in a playbook. The guard
is started before the first create, holds a pidfd of the controlling process (a pid can be reused, a pidfd cannot),
lives in its own session, inherits no descriptor and logs to a file. There is one guard per controller, not per pod; it
holds a lock for as long as it lives, and that lock is how others know that it is there.

When the controller ends, whatever its runs still hold is taken away from them (fenced), destroyed and proven gone. A
normal end leaves nothing to do. Where a training's newest checkpoint is not home yet, it gets a bounded, priced grace
before the destroy (`escrow`); an image that a bake has begun is taken away after it (`golden`). All pods of a
controller are looked after side by side. `keep_on_disconnect` makes the guard stand down until the run's deadline. A
run that another controller has taken over meanwhile is no longer this guard's: fencing and taking over exclude each
other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pennypod import processes
from pennypod.clock import Clock, SystemClock
from pennypod.ending import Ending
from pennypod.errors import GuardError, PennypodError
from pennypod.escrow import Escrow
from pennypod.golden import unbake
from pennypod.ledger import AttemptRecord, Ledger, LedgerError, Outcome, RunRecord, open_ledger
from pennypod.providers.registry import all_providers
from pennypod.renewals import Renewals
from pennypod.rental import Rental
from pennypod.report import write_results
from pennypod.settings import Settings, load_settings
from pennypod.spending import used_up

_TICK_S = 1.0
_READY_LIMIT_S = 20.0
_LOCK_TRIES, _LOCK_PAUSE_S = 5, 0.05
_MAX_BACKOFF_S = 10.0  # destroy calls have a pace of their own; this is how soon a healed API is noticed
_DESTROY_PATIENCE_S = 30.0

Log = Callable[[str], None]


# --- the side of those who need a guard -------------------------------------------------------------------------------


def ensure_guard(settings: Settings, controller: str) -> None:
    """Start the controller's guard unless it is there. Returns once it watches; raises GuardError when it does not."""
    if not processes.is_alive(controller):
        raise GuardError("the command that started this run has ended: renting nothing")
    if guard_is_alive(settings, controller):
        return
    try:
        settings.guards_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        what = f"the guards' folder {settings.guards_dir} cannot be made or used ({exc.strerror})"
        raise GuardError(f"{what}: move away what is in its place or give it room; nothing was rented") from exc
    read_end, write_end = os.pipe()
    try:
        with _log_path(settings, controller).open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "pennypod.guard", controller, str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C and a closed terminal reach the controller's group, not this one
                pass_fds=(write_end,),
            )
    except OSError as exc:
        os.close(read_end)
        raise GuardError(f"the guard cannot be started: {exc}") from exc
    finally:
        os.close(write_end)
    with os.fdopen(read_end, "rb") as ready:
        readable, _, _ = select.select([ready], [], [], _READY_LIMIT_S)
        if not readable or ready.read(5) != b"ready":
            raise GuardError(f"the guard did not start: see {_log_path(settings, controller)}")


def guard_is_alive(settings: Settings, controller: str) -> bool:
    """Whether a guard of that controller holds its lock."""
    path = _lock_path(settings, controller)
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that ask must not see each other
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True


# --- the guard itself -------------------------------------------------------------------------------------------------


class Guard:
    """The guard's decisions, apart from processes and pidfds so that tests can drive them."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        rental: Rental,
        clock: Clock,
        log: Log,
        escrow: Escrow | None = None,
        renewals: Renewals | None = None,
        unbake: Callable[[str], None] = lambda _run: None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._rental = rental
        self._clock = clock
        self._log = log
        self._escrow = escrow or Escrow(settings, ledger, clock)
        self._renewals = renewals or Renewals(settings, clock, log)
        self._unbake = unbake

    def tick(self, controller: str, controller_alive: bool) -> bool:
        """Look once at every open run of the controller. Returns whether there is still something to watch."""
        pending = False
        due: list[tuple[RunRecord, str]] = []
        for run in self._ledger.open_runs(controller):
            reason = self._reason_to_end(run, controller_alive)
            if reason is None:
                pending = True
                self._renew(run)
            elif self._take_away(run, reason):
                due.append((run, reason))
        return not self._end(due) or pending

    def _reason_to_end(self, run: RunRecord, controller_alive: bool) -> str | None:
        if run.deadline is not None and self._clock.now() > run.deadline:
            return "the deadline passed"
        if run.deadline is not None and self._clock.now() > run.deadline - self._reserve_s(run, controller_alive):
            return "the deadline is near, and the command that would bring the weights home does not run"
        broke = used_up(self._ledger.attempts(run.run), self._clock.now(), self._reserve_s(run, controller_alive))
        if broke:
            return f"its money is used up: {broke}"
        if run.closed is not None and (controller_alive or run.keep_on_disconnect):
            return None if controller_alive else "the run is closed"
        if not controller_alive and not run.keep_on_disconnect:
            pid = processes.pid_of(run.controller)
            return f"the controlling command (pid {pid}) ended before the run was over"
        return None

    def _renew(self, run: RunRecord) -> None:
        """Tell the run's pod that somebody watches over it, while the ledger lets the run have one."""
        if run.closed is None and run.fenced_reason is None and run.deadline is not None:
            self._renewals.look_after(self._ledger.attempts(run.run), run.deadline, to_the_end=run.keep_on_disconnect)

    def _reserve_s(self, run: RunRecord, controller_alive: bool) -> float:
        """A command that runs keeps time for its weights itself; for one that does not, the guard does."""
        if controller_alive and not processes.is_suspended(run.controller):
            return 0.0
        return self._escrow.reserve_s(run.run)

    def _take_away(self, run: RunRecord, reason: str) -> bool:
        """Fence the run, so that nobody else works on it. Returns whether it is ours to end."""
        try:
            ours = self._ledger.fence(run.run, reason, controller=run.controller)
        except LedgerError as exc:
            # Nobody else can take over or rent, either, while nothing can be written; the pod must not bill for that.
            self._log(f"{run.run}: ending it, though that cannot be written down: {exc}")
            ours = True
        if not ours:
            self._log(f"{run.run}: taken over by another command, which has its own guard")
            return False
        if run.fenced_reason is None:
            self._log(f"{run.run}: {reason}")
        return True

    def _end(self, due: Sequence[tuple[RunRecord, str]]) -> bool:
        """Prove every pod of fenced runs gone, side by side, and close those runs. Returns whether all that is done.

        What weights can be saved are saved first; each pod is asked to end the moment that it may.
        """
        attempts = [
            (attempt, reason) for run, reason in due for attempt in self._ledger.attempts(run.run) if not attempt.final
        ]
        results = self._rental.destroy_all(
            [Ending(attempt, "cancelled", reason) for attempt, reason in attempts],
            self._report,
            patience_s=_DESTROY_PATIENCE_S,
            release=self._escrow.release,
        )
        left = set()
        for (attempt, _), ended in zip(attempts, results, strict=True):
            if ended.error is not None:
                self._log(f"{attempt.lease_name}: not proven gone: {ended.error}")
            # The renter may still be inside its create call: only a dead one, or one that has seen the fence, is over.
            if ended.error is not None or self._renter_may_still_create(attempt):
                left.add(attempt.run)
        for run, reason in due:
            if run.run in left or not self._no_half_image(run.run):
                left.add(run.run)
                continue
            self._ledger.close_run(run.run, Outcome.CANCELLED, reason, self._clock.now())
            with contextlib.suppress(OSError):
                write_results(self._ledger, run.run, self._clock.now())
            self._log(f"{run.run}: closed, nothing left")
        return not left

    def _no_half_image(self, run: str) -> bool:
        """Take away what a bake that was cut off has left. Its pod is gone by now: that comes first."""
        try:
            self._unbake(run)
        except PennypodError as exc:
            self._log(f"{run}: its image is still there: {exc}")
            return False
        return True

    def _renter_may_still_create(self, attempt: AttemptRecord) -> bool:
        current = self._ledger.attempt(attempt.id)
        return current.pod_id is None and processes.is_alive(attempt.renter)

    def _report(self, stage: str, text: str, **_numbers: object) -> None:
        self._log(f"{stage}: {text}")


def watch(guard: Guard, controller: str, clock: Clock, log: Log) -> None:
    """Until nothing of the controller is left: wait for its end or the next tick, whichever comes first."""
    with _pidfd(processes.pid_of(controller)) as fd:
        failures = 0
        while True:
            alive = _wait_alive(fd, controller, _TICK_S if failures == 0 else min(2.0**failures, _MAX_BACKOFF_S), clock)
            try:
                pending = guard.tick(controller, alive)
                failures = failures + 1 if pending and not alive else 0
            except PennypodError as exc:
                log(f"will try again: {exc}")
                pending, failures = True, failures + 1
            except Exception:  # noqa: BLE001 - a guard must outlive every surprise; it writes it down and goes on
                log(traceback.format_exc())
                pending, failures = True, failures + 1
            if not alive and not pending:
                return


def _wait_alive(fd: int | None, controller: str, seconds: float, clock: Clock) -> bool:
    if fd is None or not processes.is_alive(controller):
        # Nothing will wake us any more: the pause between two tries has to be slept.
        clock.sleep(min(seconds, _MAX_BACKOFF_S) if seconds > _TICK_S else 0.2)
        return False
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return not poller.poll(seconds * 1000)


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _locked(lock: IO[bytes], clock: Clock) -> bool:
    """Take the guard's lock. One who only asks holds it for a moment too; a guard holds it for good."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        clock.sleep(_LOCK_PAUSE_S)
    return False


def _lock_path(settings: Settings, controller: str) -> Path:
    return settings.guards_dir / f"{controller.replace(':', '-')}.lock"


def _log_path(settings: Settings, controller: str) -> Path:
    return settings.guards_dir / f"{controller.replace(':', '-')}.log"


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk takes the words, never the guard
        os.write(sys.stdout.fileno(), f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}\n".encode())


def main(controller: str, ready_fd: int) -> None:
    """The guard process: take the lock, say ready, watch until nothing is left."""
    settings = load_settings()
    clock = SystemClock()
    with _lock_path(settings, controller).open("wb") as lock:
        if not _locked(lock, clock):
            os.write(ready_fd, b"ready")  # another guard of the same controller was quicker
            return
        ledger = open_ledger(settings)
        providers = all_providers(settings)
        rental = Rental(providers, ledger, clock)
        os.write(ready_fd, b"ready")
        os.close(ready_fd)
        _log(f"guarding {controller}")
        guard = Guard(settings, ledger, rental, clock, _log, unbake=lambda run: unbake(settings, providers, clock, run))
        watch(guard, controller, clock, _log)
        _log("nothing left to guard")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
