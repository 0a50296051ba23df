"""Following a training to its end: notices what a person at the terminal would notice."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pennypod.errors import PennypodError, SshError, TrainingError
from pennypod.training.frames import SESSION, Frame, Frames, SshFrames, StreamEndedError
from pennypod.training.log import TAIL_LINES, Epoch, LocalLog, Tally, clean_line, parse_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pennypod.clock import Clock
    from pennypod.events import Events
    from pennypod.ssh import Ssh
    from pennypod.weights import RemoteFile

STAGE = "training"
TICK_S = 1.0  # should_stop() is asked at least this often
SILENCE_S = 30.0  # a stream without a frame for so long is dead, whatever TCP says
TMUX_GRACE_S = 30.0  # the supervisor's time to end the trainer after tmux went
HUNG_S = 60.0  # the trainer is gone and its supervisor has not said so
STOP_S = 30.0  # a trainer's time to end after TERM, a little over the supervisor's own patience
QUIET_LINE_S = 5.0  # a log line that is no epoch is shown at most this often
MAX_BACKOFF_S = 15.0
MIN_TRIES = 3


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A training that ended with exit code 0. `seconds` by the pod's clock."""

    exit_code: int
    seconds: float
    last_lines: tuple[str, ...]
    epoch: int | None = None
    epochs: int | None = None
    log_bytes: int = 0
    reattached: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """How to watch. Times in seconds; `wallclock_deadline` in Unix seconds by our clock."""

    run: str
    log_path: Path
    poll_s: float = 2.0
    stall_s: float | None = None
    wallclock_deadline: float | None = None
    ssh_patience_s: float = 300.0
    checkpoint_patterns: tuple[str, ...] = ()
    checkpoint_every_s: float = 15.0
    session: str = SESSION


def watch(
    ssh_factory: Callable[[], Ssh],
    pod_home: str,
    plan: WatchPlan,
    *,
    events: Events,
    clock: Clock,
    should_stop: Callable[[], None],
    on_checkpoint: Callable[[RemoteFile], None] | None = None,
    why_gone: Callable[[], str] = lambda: "",
    out_of_money: Callable[[], str] = lambda: "",
) -> TrainingResult:
    """Follow the training to its end, with its log growing in `plan.log_path`.

    Raises TrainingError (`details["reason"]`: exit, signal, supervisor_gone, tmux_gone, hung, stalled, deadline, money,
    failed_to_start, no_status, pod_gone), SshError when the pod stays out of reach for `ssh_patience_s`, and whatever
    `should_stop` raises. `why_gone` asks the provider when the line is lost: what it answers, unless empty, ends the
    watch at once. `out_of_money` says why no more may be spent, "" while more may. A trainer that stalls, is overdue or
    too dear gets TERM and a few seconds first, so that its files are whole.
    """

    def attach(log: LocalLog) -> Frames:
        options = {
            "home": pod_home,
            "session": plan.session,
            "offset": log.position,
            "before": log.proof(),
            "poll_s": plan.poll_s,
            "check_s": min(5.0, max(0.2, plan.checkpoint_every_s)),
            "patterns": list(plan.checkpoint_patterns) if on_checkpoint else [],
        }
        return SshFrames(ssh_factory(), options)

    def send_term(pid: int) -> None:
        with contextlib.suppress(SshError):  # out of reach: the pod itself is ended next
            ssh_factory().fresh().run(f"kill -TERM {pid}", timeout_s=20)

    def stop(pid: int) -> None:
        # Beside the watch, which must not wait for a login.
        threading.Thread(target=send_term, args=(pid,), daemon=True).start()

    return Watcher(plan, attach, stop, events, clock, should_stop, on_checkpoint, why_gone, out_of_money).run()


@dataclass(slots=True)
class _Stopping:
    reason: str
    message: str
    give_up_at: float


@dataclass(slots=True)
class Watcher:
    """The watch itself, without SSH: frames in, events and a verdict out."""

    plan: WatchPlan
    attach: Callable[[LocalLog], Frames]
    stop_trainer: Callable[[int], None]
    events: Events
    clock: Clock
    should_stop: Callable[[], None]
    on_checkpoint: Callable[[RemoteFile], None] | None = None
    why_gone: Callable[[], str] = lambda: ""
    out_of_money: Callable[[], str] = lambda: ""

    log: LocalLog = field(init=False)
    tally: Tally = field(init=False, default_factory=Tally)
    frame: Frame | None = field(init=False, default=None)
    warnings: list[str] = field(init=False, default_factory=list)
    reattached: int = field(init=False, default=0)
    failures: int = field(init=False, default=0)
    contact_at: float = field(init=False, default=0.0)
    grew_at: float = field(init=False, default=0.0)
    output_bytes: int = field(init=False, default=-1)
    since: dict[str, float] = field(init=False, default_factory=dict)
    shown_at: float = field(init=False, default=0.0)
    shown_epoch: Epoch | None = field(init=False, default=None)
    checkpoint: RemoteFile | None = field(init=False, default=None)
    checkpoint_at: float = field(init=False, default=0.0)
    stopping: _Stopping | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.log = LocalLog(self.plan.log_path)

    def run(self) -> TrainingResult:
        self.tally.feed(self.log.open())
        self.contact_at = self.grew_at = self.clock.now()
        backoff = 0.5
        try:
            while True:
                seen = self.contact_at
                try:
                    return self._attached()
                except (StreamEndedError, SshError) as exc:
                    why = str(exc)
                backoff = 0.5 if self.contact_at > seen else min(backoff * 2, MAX_BACKOFF_S)
                self._after_drop(why, backoff)
        finally:
            self.log.close()

    def _attached(self) -> TrainingResult:
        stream = self.attach(self.log)
        try:
            while True:
                self._check()
                frame = stream.next(TICK_S)
                if frame is not None:
                    self.contact_at = self.clock.now()
                    self.failures = 0
                    result = self._take(frame)
                    if result is not None:
                        return result
                elif self.clock.now() - self.contact_at > SILENCE_S + self.plan.poll_s:
                    raise StreamEndedError(f"no word from the pod for {SILENCE_S:g} s")
        finally:
            stream.close()

    def _after_drop(self, why: str, backoff: float) -> None:
        gone = self.clock.now() - self.contact_at
        self.failures += 1
        if self.failures >= MIN_TRIES and (gone_why := self.why_gone()):
            raise self._error(gone_why, "pod_gone")
        # Not by the clock alone: after this machine has slept, the pod deserves to be asked.
        if gone > self.plan.ssh_patience_s and self.failures >= MIN_TRIES:
            raise SshError(
                f"the pod has been out of reach for {gone:.0f} s ({why}); the training may still run there",
                seconds=round(gone),
                last_lines=list(self.tally.last_lines()),
            )
        self._say(f"connection lost ({why}), attaching again", lost_s=round(gone, 1))
        self.reattached += 1
        until = self.clock.now() + backoff
        while (left := until - self.clock.now()) > 0:
            self._check()
            self.clock.sleep(min(left, TICK_S))

    def _check(self) -> None:
        """What must be noticed whether the pod answers or not."""
        self.should_stop()
        now = self.clock.now()
        deadline = self.plan.wallclock_deadline
        if deadline is not None and now >= deadline and self.stopping is None:
            lost = f" and the pod has been out of reach for {now - self.contact_at:.0f} s" if self.failures else ""
            self._stop("deadline", f"the training was stopped: its wallclock budget is used up{lost}")
        if self.stopping is None and (why := self.out_of_money()):
            self._stop("money", f"the training was stopped for its cost: {why}")
        if self.stopping is not None and now >= self.stopping.give_up_at:
            raise self._error(self.stopping.message, self.stopping.reason)

    def _stop(self, reason: str, message: str) -> None:
        """End the trainer and leave it a moment, so that the log is complete and a checkpoint whole."""
        self._say(message)
        self.stopping = _Stopping(reason, message, self.clock.now() + STOP_S)
        pid = (self.frame.status or {}).get("supervisor_pid") if self.frame else None
        if self.frame is not None and self.frame.supervisor and isinstance(pid, int):
            self.stop_trainer(pid)
        else:
            self.stopping.give_up_at = self.clock.now()

    def _take(self, frame: Frame) -> TrainingResult | None:
        self.frame = frame
        if frame.reset:
            self.log.start_over()
            self.tally = Tally()
        if frame.data and frame.offset == self.log.position:
            healthy = not self.log.problem
            self.log.append(frame.data)
            if self.log.problem and healthy:
                self._warn(f"the log cannot be copied here for now: {self.log.problem}")
            self._report(self.tally.feed(frame.data))
        self._note_growth(frame)
        self._note_checkpoint(frame)
        if frame.end:
            return self._finish(frame.status or {})
        if frame.drained:
            self._judge(frame)
        return None

    def _note_growth(self, frame: Frame) -> None:
        # The supervisor's count too: with a full disk the log stands still while the trainer does not.
        total = max(frame.size, int((frame.status or {}).get("output_bytes") or 0))
        if frame.data or total != self.output_bytes:
            grew_at = self.clock.now() - frame.quiet_s
            # A training that is taken up again may have been silent for long before anybody watched.
            self.grew_at = grew_at if self.output_bytes < 0 else max(self.grew_at, grew_at)
            self.output_bytes = total

    def _note_checkpoint(self, frame: Frame) -> None:
        self.checkpoint = frame.checkpoint or self.checkpoint
        now = self.clock.now()
        if self.checkpoint is None or self.on_checkpoint is None or frame.end or now < self.checkpoint_at:
            return
        remote, self.checkpoint = self.checkpoint, None
        try:
            self.on_checkpoint(remote)
        except PennypodError as exc:
            if exc.code == "fenced":
                raise
            # The next version comes soon, and the weights stage after the training is the one that must succeed.
            self._say(f"{remote.relative or remote.path} could not be brought home yet: {exc}")
        took = self.clock.now() - now
        # Frames had to wait meanwhile: that is no silence of the pod's.
        self.contact_at = self.grew_at = self.clock.now()
        self.checkpoint_at = self.clock.now() + max(self.plan.checkpoint_every_s, 3 * took)

    def _judge(self, frame: Frame) -> None:
        """Whether what is running can still come to an end of its own."""
        status = frame.status or {}
        if self._lasts("no_status", status.get("run") != self.plan.run, 10.0, frame.t):
            raise self._error(f"the pod knows nothing of run {self.plan.run}: its status file is gone", "no_status")
        if frame.state != "running":
            return
        if not frame.supervisor:
            raise self._error(
                "the training died without an exit code: its supervisor is gone (killed, or the pod restarted)",
                "supervisor_gone",
            )
        if self._lasts("tmux", frame.tmux is False, TMUX_GRACE_S, frame.t):
            raise self._error("the tmux server is gone and the training with it", "tmux_gone")
        if self._lasts("hung", not frame.child, HUNG_S, frame.t):
            raise self._error("the trainer is gone and its supervisor does not answer", "hung")
        stall_s = self.plan.stall_s
        if stall_s and self.clock.now() - self.grew_at >= stall_s and self.stopping is None:
            self._stop("stalled", f"the training was stopped: no output for {stall_s:.0f} s")

    def _lasts(self, what: str, true_now: bool, limit_s: float, t: float) -> bool:
        """Whether something has been so for `limit_s` by the pod's clock: frames may have waited for their reader."""
        if not true_now:
            self.since.pop(what, None)
            return False
        return t - self.since.setdefault(what, t) >= limit_s

    def _finish(self, status: dict[str, Any]) -> TrainingResult:
        if status.get("run") != self.plan.run:
            raise self._error(f"the pod trained run {status.get('run')} instead of {self.plan.run}", "no_status")
        code, number = status.get("exit_code"), status.get("signal")
        seconds = float(status.get("finished") or 0) - float(status.get("started") or 0)
        lost = int(status.get("log_lost_bytes") or 0)
        if lost:
            self._warn(f"{lost} bytes of the trainer's output are missing in the log: the pod's disk was full")
        stopped_by = str(status.get("stopped_by") or "")
        if self.stopping is not None and (code != 0 or stopped_by):
            raise self._error(self.stopping.message, self.stopping.reason, seconds, status)
        if status.get("state") == "failed_to_start":
            raise self._error(f"the training command cannot start: {status.get('error')}", "failed_to_start")
        # A person who attached and pressed Ctrl-C wanted what there is; a hang-up or TERM cut the training short.
        if code == 0 and stopped_by in ("", "SIGINT"):
            self._say(f"trainer ended with exit code 0 after {seconds:.0f} s", seconds=round(seconds, 1))
            epoch = self.tally.epoch
            return TrainingResult(
                exit_code=0,
                seconds=seconds,
                last_lines=self.tally.last_lines(),
                epoch=epoch.number if epoch else None,
                epochs=epoch.total if epoch else None,
                log_bytes=self.log.position,
                reattached=self.reattached,
                warnings=tuple(self.warnings),
            )
        raise self._error(*_why_failed(code, number, seconds, stopped_by), seconds, status)

    def _error(
        self, message: str, reason: str, seconds: float | None = None, status: dict[str, Any] | None = None
    ) -> TrainingError:
        status = status or {}
        lines = list(self.tally.last_lines())
        if status.get("log_lost_bytes"):  # the end is not in the log; the supervisor kept it
            lines = [line for raw in str(status.get("tail", "")).splitlines() if (line := clean_line(raw))]
        tail = f"; last line: {lines[-1][:200]}" if lines else "; it wrote nothing"
        where = f"; log: {self.plan.log_path}" if self.log.position and not self.log.problem else ""
        return TrainingError(
            message + tail + where,
            reason=reason,
            exit_code=status.get("exit_code"),
            signal=status.get("signal"),
            seconds=None if seconds is None else round(seconds, 1),
            last_lines=lines[-TAIL_LINES:],
            log=str(self.plan.log_path),
            warnings=list(self.warnings),
        )

    def _report(self, lines: Sequence[str]) -> None:
        for line in lines:
            epoch = parse_epoch(line)
            new_epoch = epoch is not None and epoch != self.shown_epoch
            if not new_epoch and self.clock.now() - self.shown_at < QUIET_LINE_S:
                continue
            self.shown_at = self.clock.now()
            self.shown_epoch = epoch or self.shown_epoch
            self._say(line[:200].strip(), **self._numbers(epoch if new_epoch else None))

    def _numbers(self, epoch: Epoch | None) -> dict[str, Any]:
        elapsed = self.frame.elapsed_s if self.frame else 0.0
        numbers: dict[str, Any] = {"elapsed_s": round(elapsed, 1), "log_bytes": self.log.position}
        if epoch is not None:
            numbers["epoch"] = epoch.number
            if epoch.total is not None:
                numbers["epochs"] = epoch.total
                if epoch.number > 0:
                    numbers["eta_s"] = round(elapsed / epoch.number * (epoch.total - epoch.number), 1)
        return numbers

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self._say(text)

    def _say(self, text: str, **numbers: Any) -> None:
        self.events.emit(STAGE, text, **numbers)


def _why_failed(code: Any, number: Any, seconds: float, stopped_by: str) -> tuple[str, str]:
    after = f"after {seconds:.0f} s"
    if stopped_by == "SIGHUP":
        return f"the tmux session was closed and the training with it {after}", "tmux_gone"
    if stopped_by:
        return f"the training was stopped on the pod by {stopped_by} {after}", "signal"
    killed = number or (code - 128 if isinstance(code, int) and code in (128 + 9, 128 + 15) else None)
    if killed:
        memory = " (often: out of memory)" if killed == 9 else ""
        return f"the trainer was killed by signal {killed}{memory} {after}", "signal"
    return f"the trainer ended with exit code {code} {after}", "exit"
