"""What the modules that work on a pod share: how to reach it, when to stop, how to show progress. Floor 2."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pennypod import processes
from pennypod.clock import SystemClock
from pennypod.errors import FencedError, InputError, PennypodError
from pennypod.guard import ensure_guard, guard_is_alive
from pennypod.ledger import ArtifactRecord, AttemptState, Ledger, open_ledger
from pennypod.model import netdev
from pennypod.model.pod import PodState
from pennypod.providers.registry import open_provider
from pennypod.readmission import Readmission
from pennypod.ssh import Ssh, SshTarget, control_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pennypod.clock import Clock
    from pennypod.events import Events
    from pennypod.ledger import AttemptRecord
    from pennypod.providers.base import Provider
    from pennypod.settings import Settings
    from pennypod.transfer import Fetched, Progress

# The options of every module that works on a pod, next to its own.
POD_OPTIONS: dict[str, Any] = {
    "run": {"type": "str", "required": True},
    "host": {"type": "str", "required": True},
    "port": {"type": "int", "default": 22},
    "user": {"type": "str", "default": "root"},
    "key_file": {"type": "path", "required": True},
    "known_hosts": {"type": "path", "required": True},
    "pod_home": {"type": "str", "default": "/root/pennypod"},
}
ASK_EVERY_S = 1.0
RESTART_PAUSE_S = 60.0  # between two tries to start a guard that does not start: each may take its time
SHOW_EVERY_S = 1.0
_COUNT_S = 10.0


def connect(options: Mapping[str, Any], settings: Settings, clock: Clock) -> Ssh:
    """SSH to the pod that POD_OPTIONS name, over a connection that later tasks share.

    A pod that loses the run's key meanwhile is made to let it in again.
    """
    key_file = Path(options["key_file"])
    return Ssh(
        SshTarget(
            host=options["host"],
            port=options["port"],
            user=options["user"],
            key_file=key_file,
            known_hosts=Path(options["known_hosts"]),
            control_path=control_path(options["host"], options["port"], options["user"], key_file),
        ),
        readmit=Readmission(settings, clock, lambda: _pod_of(settings, options["run"])),
    )


def _pod_of(settings: Settings, run: str) -> tuple[str, str] | None:
    """The provider and the id of the pod that the run has now."""
    with contextlib.closing(open_ledger(settings)) as ledger:
        return next(((a.provider, a.pod_id) for a in ledger.attempts(run) if not a.final and a.pod_id), None)


class Fence:
    """Asks the ledger whether the run is still ours, at most once a second however often it is called.

    Ours means: of the controller that it had when this was made. What a dead controller left running stops by this when
    another one resumes the run.

    A ledger that cannot be asked just now (busy, a database that restarts) is no reason to give a training up: only its
    plain word is. `problem` then says what was wrong last.
    """

    def __init__(self, settings: Settings, run: str, clock: Clock) -> None:
        self._settings = settings
        self._run = run
        self._clock = clock
        self._asked_at = float("-inf")
        self._opened: Ledger | None = None
        self.problem = ""
        self._controller: str | None = None
        try:
            self._controller = self._ledger().run(run).controller
        except PennypodError as exc:
            self.problem = exc.message

    def __call__(self) -> None:
        """Raises FencedError when the run was taken away or closed."""
        now = self._clock.now()
        if 0 <= now - self._asked_at < ASK_EVERY_S:
            return
        self._asked_at = now
        try:
            self._ledger().raise_if_fenced(self._run, self._controller)
        except FencedError:
            raise
        except PennypodError as exc:
            self.problem = exc.message
        else:
            self.problem = ""

    def deadline(self) -> float | None:
        """When the run's pod is destroyed whatever it does, in Unix seconds; None when the ledger cannot say."""
        try:
            return self._ledger().run(self._run).deadline
        except PennypodError as exc:
            self.problem = exc.message
            return None

    def _ledger(self) -> Ledger:
        self._opened = self._opened or open_ledger(self._settings)
        return self._opened


class GuardWatch:
    """Starts the guard anew when it has died under a controller that lives: nobody else would notice in time.

    Without it the pod's lease is not renewed, so its fuse would end a training that is well. Called as often as one
    likes: while the guard lives, that is one look at its lock. A run that was left on purpose has no live controller,
    and another machine's controller has its guard there: both are left alone.
    """

    def __init__(
        self, settings: Settings, run: str, stage: str, events: Events, clock: Clock, warn: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._run = run
        self._stage = stage
        self._events = events
        self._clock = clock
        self._warn = warn
        self._controller: str | None = None
        self._asked_at = float("-inf")
        self._failed_at: float | None = None

    def __call__(self) -> None:
        """Never raises: without a guard the pod still has its fuse, and a sweep finds it."""
        now = self._clock.now()
        if 0 <= now - self._asked_at < ASK_EVERY_S:
            return
        self._asked_at = now
        if self._controller is not None and guard_is_alive(self._settings, self._controller):
            return
        if self._failed_at is not None and 0 <= now - self._failed_at < RESTART_PAUSE_S:
            return
        try:
            self._look()
        except (PennypodError, OSError) as exc:
            self._tell_once(f"the guard has died and cannot be started anew, so only the pod's fuse guards it: {exc}")
            self._failed_at = self._clock.now()

    def _look(self) -> None:
        """Raises GuardError when there is no guard and none can be started."""
        with contextlib.closing(open_ledger(self._settings)) as ledger:
            run = ledger.run(self._run)
        self._controller = run.controller
        if run.closed is not None or run.fenced_reason is not None:
            return
        if not processes.can_judge(run.controller) or not processes.is_alive(run.controller):
            return
        if not guard_is_alive(self._settings, run.controller):
            ensure_guard(self._settings, run.controller)
            self._events.emit(self._stage, "the guard had died and was started anew")
        self._failed_at = None

    def _tell_once(self, text: str) -> None:
        if self._failed_at is None:
            self._events.emit(self._stage, text)
            self._warn(text)


def artifact(fetched: Fetched, kind: str) -> dict[str, Any]:
    """A file that is home, as a module returns it."""
    return {"path": str(fetched.path), "bytes": fetched.bytes, "sha256": fetched.sha256, "kind": kind}


def note_artifacts(settings: Settings, run: str, artifacts: Sequence[Mapping[str, Any]]) -> None:
    """Write in the ledger what is home, as `artifact` tells it. Raises LedgerError; the files are home all the same.

    Raises InputError for a file that is not in the run's artifacts folder.
    """
    with contextlib.closing(open_ledger(settings)) as ledger:
        folder = Path(ledger.run(run).artifacts_dir)
        ledger.record_artifacts([_record(run, folder, item) for item in artifacts])


def _record(run: str, folder: Path, item: Mapping[str, Any]) -> ArtifactRecord:
    path = Path(item["path"])
    try:
        relative = path.relative_to(folder) if path.is_absolute() else path
    except ValueError as exc:
        raise InputError(f"not an artifact of {run}: {exc}") from exc
    return ArtifactRecord(run, str(relative), item["bytes"], item["sha256"], item["kind"])


@contextlib.contextmanager
def counted(settings: Settings, run: str, ssh: Ssh) -> Iterator[None]:
    """Write the pod's traffic down in the ledger, however the work on it ends: some providers charge by the byte.

    The pod's own count is asked for, since it holds what the pod fetched from elsewhere: when the work begins as well,
    so that a pod that is lost during it takes no more than that with it. Where the work has failed, or the pod does not
    tell, what we have moved ourselves is added.
    """
    with ThreadPoolExecutor(1, "count") as beside:  # the work need not wait for it
        first = beside.submit(_count_now, settings, run, ssh)
        sent, fetched = ssh.traffic.sent, ssh.traffic.fetched
        whole = False
        try:
            yield
            first.result()
            whole = _count_now(settings, run, ssh)
        finally:
            if not whole:
                with contextlib.suppress(PennypodError), contextlib.closing(open_ledger(settings)) as ledger:
                    ledger.add_traffic(run, sent=ssh.traffic.sent - sent, fetched=ssh.traffic.fetched - fetched)


def _count_now(settings: Settings, run: str, ssh: Ssh) -> bool:
    """Write down what the pod has received and sent by its own count; whether it has told."""
    told = _count(ssh)
    if told is not None:
        with contextlib.suppress(PennypodError), contextlib.closing(open_ledger(settings)) as ledger:
            ledger.record_traffic(run, sent=told[0], fetched=told[1], at=SystemClock().now())
    return told is not None


def count_last(ledger: Ledger, attempt: AttemptRecord, ssh: Ssh, clock: Clock) -> None:
    """Read a pod's count once more before it is destroyed, where traffic costs money: afterwards nobody can.

    A pod that does not answer is not waited for; its cost is then a lower bound, and said to be one.
    """
    if attempt.ready is None or not attempt.traffic_is_charged:
        return
    whole = _count(ssh)
    if whole is not None:
        with contextlib.suppress(PennypodError):
            ledger.record_traffic(attempt.run, sent=whole[0], fetched=whole[1], at=clock.now())


def _count(ssh: Ssh) -> tuple[int, int] | None:
    """What the pod has received and sent by its own count; None when it does not tell."""
    try:
        told = ssh.run(f"cat {netdev.PATH}", timeout_s=_COUNT_S)
    except PennypodError:
        return None
    return netdev.received_and_sent(told.stdout.decode("ascii", "replace"))


class PodWatch:
    """Asks the run's provider whether its pod is still there; for when SSH does not answer any more."""

    def __init__(self, settings: Settings, run: str) -> None:
        self._settings = settings
        self._run = run
        self._absent = 0

    def __call__(self) -> str:
        """Why no answer can come from the pod any more; empty while it may still answer, or nobody can tell.

        "Not there" has to be heard twice: a provider may leave a pod out of one answer.
        """
        try:
            with contextlib.closing(open_ledger(self._settings)) as ledger:
                attempt = next((a for a in ledger.attempts(self._run) if not a.final and a.pod_id), None)
            if attempt is None or attempt.pod_id is None:
                return ""
            pod = open_provider(attempt.provider, self._settings).pod(attempt.pod_id)
        except PennypodError:
            return ""
        self._absent = self._absent + 1 if pod is None else 0
        if pod is None:
            return f"the pod is gone: {attempt.provider} has it no more" if self._absent > 1 else ""
        if pod.state in (PodState.STOPPED, PodState.FAILED):
            return f"the pod is {pod.state.value}, says {attempt.provider}: {pod.progress or 'no reason given'}"
        return ""


def cause_of_loss(provider: Provider, attempt: AttemptRecord) -> str:
    """What `loss_of` says, with what to do about it."""
    said = loss_of(provider, attempt)
    return f"{said}; start the run again to rent another one" if said else ""


def loss_of(provider: Provider, attempt: AttemptRecord) -> str:
    """What the provider says of a failed run's pod, asked once and before anybody destroys it.

    Empty while it shows the pod running, when it does not answer, and when the pod's end was asked for: then its
    absence is our own doing.
    """
    if attempt.final or attempt.pod_id is None or attempt.state is AttemptState.DESTROYING:
        return ""
    try:
        pod = provider.pod(attempt.pod_id)
    except PennypodError:
        return ""
    name = f"pod {attempt.pod_id[:12]}"
    if pod is None:
        return f"{name} is no longer listed at {provider.name}"
    if pod.state in (PodState.STOPPED, PodState.FAILED):
        return f"{provider.name} shows {name} as {pod.state.value}: {pod.progress or 'no reason given'}"
    return ""


def explained(reason: str, cause: str) -> str:
    """A failure with its cause first: what was noticed is often only that nobody answers any more."""
    return f"{cause} (noticed as: {reason})" if cause else reason


def show_bytes(
    events: Events, stage: str, what: str, clock: Clock, should_stop: Callable[[], None]
) -> Callable[[Progress], None]:
    """A progress callback that shows bytes and rate once a second and lets `should_stop` end the transfer."""
    shown_at = clock.now()

    def on_progress(progress: Progress) -> None:
        nonlocal shown_at
        should_stop()
        if clock.now() - shown_at < SHOW_EVERY_S:
            return
        shown_at = clock.now()
        events.emit(
            stage,
            f"{what}: {progress.bytes_done / 1e6:.1f} of {progress.bytes_total / 1e6:.1f} MB",
            bytes=progress.bytes_done,
            total_bytes=progress.bytes_total,
            rate_bytes_per_s=round(progress.rate_bytes_per_s),
        )

    return on_progress
