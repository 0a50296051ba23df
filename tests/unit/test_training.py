"""What a log line says, how the copy of a log grows, and the watch's verdicts, on a clock that never sleeps."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock
from pennypod.errors import FencedError, SshError, TrainingError, TransferError
from pennypod.events import Events
from pennypod.training.frames import Frame, SshFrames, StreamEndedError, parse_frame
from pennypod.training.log import Epoch, LocalLog, Tally, clean_line, parse_epoch
from pennypod.training.watching import HUNG_S, SILENCE_S, STOP_S, TMUX_GRACE_S, TrainingResult, Watcher, WatchPlan
from pennypod.weights import RemoteFile

RUN = "demo-1201-aaaaa"


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "epoch"),
    [
        ("epoch 3/8", Epoch(3, 8)),
        ("epoch 3/8 loss=0.123 acc=0.9", Epoch(3, 8)),
        ("Epoch [3/8], step 10", Epoch(3, 8)),
        ("Epoch: 3 of 8", Epoch(3, 8)),
        ("INFO EPOCH 3 / 8", Epoch(3, 8)),
        ("[12:00:01] train epoch=3/8", Epoch(3, 8)),
        ("      1/100      2.31G      1.204      3.411      1.267         33        640: 100%|", Epoch(1, 100)),
        ("       2/2         0G      1.204      3.411", Epoch(2, 2)),
        ("Epoch 3: 45%|####", Epoch(3, None)),
        ("epoch=7", Epoch(7, None)),
        ("Epoch 0/10", Epoch(0, 10)),
        ("epoch 9/8", None),
        ("epoch 0/0", None),
        ("Epoch    GPU_mem   box_loss   cls_loss", None),
        ("3 epochs completed in 0.012 hours.", None),
        ("  3/100 [00:01<00:40,  2.2it/s]", None),
        ("images 10/20", None),
        ("lr 0.1/2", None),
        ("saving epochs/3/4", None),
        ("", None),
    ],
)
def test_parse_epoch(line: str, epoch: Epoch | None) -> None:
    assert parse_epoch(line) == epoch


def test_clean_line_has_no_colours_and_no_control_characters() -> None:
    assert clean_line("\x1b[34m\x1b[1mtrain: \x1b[0m\tok\x07\x1b]0;title\x07 \x1b[K\n") == "train:     ok"


def test_tally_keeps_the_last_state_of_a_progress_bar() -> None:
    tally = Tally()
    shown = tally.feed(b"start\n  10%\r  20%\r\x1b[K 100%\nend")
    assert shown == ["start", "  10%", "  20%", " 100%"]
    assert tally.last_lines() == ("start", " 100%", "end")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_tally_does_not_depend_on_how_bytes_arrive(size: int) -> None:
    text = "epoch 1/3 ä\r\nepoch 2/3 ö\r\n10%\r20%\rdone ü\n".encode()
    tally = Tally()
    lines = [line for at in range(0, len(text), size) for line in tally.feed(text[at : at + size])]
    assert [line for line in lines if "%" not in line] == ["epoch 1/3 ä", "epoch 2/3 ö", "done ü"]
    assert tally.last_lines() == ("epoch 1/3 ä", "epoch 2/3 ö", "done ü")
    assert tally.epoch == Epoch(2, 3)


def test_tally_holds_little_of_an_endless_line() -> None:
    tally = Tally()
    for _ in range(1000):
        tally.feed(b"x" * 1000)
    assert len(tally.last_lines()[0]) <= 8192


# --- the copy of the log ----------------------------------------------------------------------------------------------


def test_local_log_goes_on_where_an_earlier_watch_ended(tmp_path: Path) -> None:
    path = tmp_path / "artifacts" / "train.log"
    first = LocalLog(path)
    first.open()
    first.append(b"one\n")
    first.close()
    second = LocalLog(path)
    assert second.open() == b"one\n"
    assert (second.position, second.proof()) == (4, first.proof())
    second.append(b"two\n")
    second.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_local_log_starts_over_without_losing_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    for text in (b"first pod\n", b"second pod\n", b"third pod\n"):
        log = LocalLog(path)
        log.open()
        log.start_over()
        log.append(text)
        log.close()
    assert path.read_bytes() == b"third pod\n"
    assert path.with_name("train.log.2").read_bytes() == b"first pod\n"
    assert path.with_name("train.log.3").read_bytes() == b"second pod\n"


def test_full_disk_here_does_not_end_the_watch(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.symlink_to("/dev/full")
    log = LocalLog(path)
    log.open()
    log.append(b"one\n")
    log.append(b"two\n")
    assert "No space left" in log.problem
    assert log.position == 8, "the pod must not be asked for the same bytes again and again"


# --- frames -----------------------------------------------------------------------------------------------------------


def test_parse_frame_reads_what_the_pod_sends() -> None:
    sent = {
        "t": 5.0,
        "status": {"state": "running", "started": 2.0},
        "supervisor": True,
        "child": True,
        "tmux": None,
        "size": 10,
        "offset": 7,
        "data": base64.b64encode(b"abc").decode(),
        "reset": False,
        "drained": True,
        "end": False,
        "checkpoint": {"path": "/p/out/a.pt", "relative": "a.pt", "bytes": 3, "mtime": 1.5, "sha256": "ab"},
    }
    frame = parse_frame("@pennypod " + json.dumps(sent))
    assert frame is not None
    assert (frame.data, frame.offset, frame.state, frame.elapsed_s) == (b"abc", 7, "running", 3.0)
    assert frame.checkpoint == RemoteFile("/p/out/a.pt", 3, "ab", 1.5, "a.pt")


@pytest.mark.parametrize("line", ["", "Welcome to the pod!", "@pennypod", "@pennypod {", '@pennypod {"t": 1}', "{}"])
def test_parse_frame_ignores_banners_and_half_frames(line: str) -> None:
    assert parse_frame(line) is None


# --- verdicts ---------------------------------------------------------------------------------------------------------


class FakePod:
    """Attachments as lists of steps: a frame, None for silence, a string for a broken line, a callable for an event."""

    def __init__(self, clock: FakeClock, *attachments: list[Any]) -> None:
        self.clock = clock
        self.attachments = list(attachments)
        self.positions: list[int] = []
        self.stopped: list[int] = []
        self.open = 0

    def attach(self, log: LocalLog) -> FakePod:
        self.positions.append(log.position)
        if not self.attachments:
            raise SshError("connection refused")
        self.steps = self.attachments.pop(0)
        self.open += 1
        return self

    def next(self, timeout_s: float) -> Frame | None:
        self.clock.time += min(timeout_s, 1.0)
        step = self.steps.pop(0) if self.steps else "the connection ended"
        if callable(step):
            step = step()
        if isinstance(step, str):
            raise StreamEndedError(step)
        return replace(step, t=self.clock.time) if isinstance(step, Frame) else None

    def close(self) -> None:
        self.open -= 1


RUNNING = {"run": RUN, "state": "running", "supervisor_pid": 4711, "started": 1_764_600_000.0}
FINISHED = {**RUNNING, "state": "finished", "exit_code": 0, "finished": 1_764_600_090.0}
ALIVE = Frame(t=0, status=RUNNING, supervisor=True, child=True, tmux=True)
END = Frame(t=0, status=FINISHED, supervisor=False, child=False, tmux=False, end=True)


def log_frame(text: str, offset: int, frame: Frame = ALIVE) -> Frame:
    return replace(frame, data=text.encode(), offset=offset, size=offset + len(text))


class Watched:
    def __init__(self, tmp_path: Path, *attachments: list[Any], **plan: Any) -> None:
        self.clock = FakeClock()
        self.pod = FakePod(self.clock, *attachments)
        self.folder = tmp_path
        self.stops = 0
        self.should_stop: Callable[[], None] = lambda: None
        self.on_checkpoint: Callable[[RemoteFile], None] | None = None
        self.plan = WatchPlan(run=RUN, log_path=tmp_path / "train.log", **plan)

    def run(self) -> TrainingResult:
        events = Events(self.folder, RUN)
        watcher = Watcher(
            self.plan,
            self.pod.attach,
            self.pod.stopped.append,
            events,
            self.clock,
            self.should_stop,
            self.on_checkpoint,
        )
        try:
            return watcher.run()
        finally:
            assert self.pod.open == 0, "every stream is closed"

    def fails(self, reason: str) -> TrainingError:
        with pytest.raises(TrainingError) as caught:
            self.run()
        assert caught.value.details["reason"] == reason
        return caught.value

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]


def test_exit_code_0_is_the_result(tmp_path: Path) -> None:
    watched = Watched(tmp_path, [log_frame("epoch 1/2\n", 0), log_frame("epoch 2/2\n", 10), replace(END, offset=20)])
    result = watched.run()
    assert (result.exit_code, result.seconds, result.epoch, result.epochs) == (0, 90.0, 2, 2)
    assert (tmp_path / "train.log").read_text() == "epoch 1/2\nepoch 2/2\n"


def test_epochs_are_reported_at_once_and_other_lines_seldom(tmp_path: Path) -> None:
    lines = ["epoch 1/4 loss=2\n", *[f"step {n}\n" for n in range(12)], "epoch 2/4 loss=1\n"]
    frames, offset = [], 0
    for line in lines:
        frames.append(log_frame(line, offset))
        offset += len(line)
    watched = Watched(tmp_path, [*frames, END])
    watched.run()
    texts = [event["text"] for event in watched.events[:-1]]
    assert texts[0] == "epoch 1/4 loss=2"
    assert texts[-1] == "epoch 2/4 loss=1"
    assert 1 <= len(texts) - 2 <= 3, "12 other lines in 12 seconds"
    second = next(event for event in watched.events if event.get("epoch") == 2)
    assert (second["epochs"], second["elapsed_s"], second["eta_s"]) == (4, 14.0, 14.0)


@pytest.mark.parametrize(
    ("ending", "reason", "text"),
    [
        ({"exit_code": 1}, "exit", "exit code 1 after 90 s; last line: boom"),
        ({"exit_code": None, "signal": 9}, "signal", "killed by signal 9 (often: out of memory)"),
        ({"exit_code": 137}, "signal", "killed by signal 9"),
        ({"exit_code": 1, "stopped_by": "SIGHUP"}, "tmux_gone", "tmux session was closed"),
        ({"exit_code": 0, "stopped_by": "SIGTERM"}, "signal", "stopped on the pod by SIGTERM"),
        ({"state": "failed_to_start", "exit_code": None, "error": "no bash"}, "failed_to_start", "no bash"),
        ({"run": "demo-1201-bbbbb"}, "no_status", "demo-1201-bbbbb instead of"),
    ],
)
def test_every_other_end_is_an_error_with_its_reason(
    tmp_path: Path, ending: dict[str, Any], reason: str, text: str
) -> None:
    watched = Watched(tmp_path, [log_frame("boom\n", 0), replace(END, status={**FINISHED, **ending})])
    error = watched.fails(reason)
    assert text in error.message
    assert error.details["last_lines"] == ["boom"]
    assert "\n" not in error.message


def test_full_disk_on_the_pod_shows_the_lines_the_log_lost(tmp_path: Path) -> None:
    status = {**FINISHED, "exit_code": 1, "log_lost_bytes": 30, "tail": "a\nOSError: No space left on device\n"}
    error = Watched(tmp_path, [replace(END, status=status)]).fails("exit")
    assert error.details["last_lines"][-1] == "OSError: No space left on device"
    assert "disk was full" in error.details["warnings"][0]


def test_broken_line_is_taken_up_where_it_ended(tmp_path: Path) -> None:
    watched = Watched(
        tmp_path, [log_frame("epoch 1/2\n", 0), "Broken pipe"], [None, "again"], [log_frame("epoch 2/2\n", 10), END]
    )
    result = watched.run()
    assert watched.pod.positions == [0, 10, 10]
    assert result.reattached == 2
    assert (tmp_path / "train.log").read_text() == "epoch 1/2\nepoch 2/2\n"
    assert "Broken pipe" in watched.events[1]["text"]


def test_bytes_that_are_here_already_are_not_written_twice(tmp_path: Path) -> None:
    watched = Watched(tmp_path, [log_frame("one\n", 0), log_frame("one\n", 0), log_frame("two\n", 4), END])
    watched.run()
    assert (tmp_path / "train.log").read_text() == "one\ntwo\n"


def test_silence_breaks_the_stream(tmp_path: Path) -> None:
    watched = Watched(tmp_path, [ALIVE, *[None] * 40], [END])
    assert watched.run().reattached == 1
    assert f"no word from the pod for {SILENCE_S:g} s" in watched.events[0]["text"]


def test_out_of_reach_for_too_long_is_an_ssh_error(tmp_path: Path) -> None:
    watched = Watched(tmp_path, [ALIVE, "gone"], ssh_patience_s=120)
    before = watched.clock.now()
    with pytest.raises(SshError, match=r"out of reach for 1[2-4][0-9] s"):
        watched.run()
    assert watched.clock.now() - before < 150
    assert len(watched.pod.positions) > 8, "it kept trying"


def test_pod_is_asked_again_after_this_machine_has_slept(tmp_path: Path) -> None:
    def sleep_an_hour() -> None:
        watched.clock.time += 3600

    watched = Watched(tmp_path, [ALIVE, sleep_an_hour, "Broken pipe"], [END], ssh_patience_s=60)
    assert watched.run().reattached == 1


def test_fence_is_asked_every_second_even_while_the_pod_is_out_of_reach(tmp_path: Path) -> None:
    watched = Watched(tmp_path, [ALIVE, None, None, "gone"], ssh_patience_s=60)
    asked: list[float] = []

    def should_stop() -> None:
        asked.append(watched.clock.now())
        if watched.clock.now() > 1_764_600_040:
            raise FencedError("taken away")

    watched.should_stop = should_stop
    with pytest.raises(FencedError):
        watched.run()
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert max(gaps) <= 2.0


def test_gone_supervisor_is_an_error_once_its_log_is_here(tmp_path: Path) -> None:
    gone = replace(ALIVE, supervisor=False, child=False)
    error = Watched(tmp_path, [replace(log_frame("a\n", 0, gone), drained=False), log_frame("b\n", 2, gone)]).fails(
        "supervisor_gone"
    )
    assert error.details["last_lines"] == ["a", "b"]


def test_dead_tmux_is_an_error_unless_the_end_follows(tmp_path: Path) -> None:
    dead = replace(ALIVE, tmux=False)
    assert Watched(tmp_path, [*[dead] * 20, END]).run().exit_code == 0
    unknown = replace(ALIVE, tmux=None)
    assert Watched(tmp_path, [*[unknown] * 100, END]).run().exit_code == 0
    Watched(tmp_path, [dead] * int(TMUX_GRACE_S + 5)).fails("tmux_gone")


def test_gone_trainer_with_a_silent_supervisor_is_an_error(tmp_path: Path) -> None:
    hung = replace(ALIVE, child=False)
    assert Watched(tmp_path, [*[hung] * 20, END]).run().exit_code == 0
    Watched(tmp_path, [hung] * int(HUNG_S + 5)).fails("hung")


def test_frames_that_waited_for_a_checkpoint_prove_nothing_gone(tmp_path: Path) -> None:
    """While a checkpoint comes home the frames queue up: their own times count, not the time of reading."""
    draining = replace(ALIVE, child=False)
    checkpoint = RemoteFile("/p/out/best.pt", 1, "aa", 1.0)
    watched = Watched(tmp_path, [replace(draining, checkpoint=checkpoint), draining, END], stall_s=30)

    def fetch_slowly(_remote: RemoteFile) -> None:
        late = watched.clock.time
        watched.clock.time += 500
        watched.pod.clock = FakeClock(late)  # the frames behind were made while we were away

    watched.on_checkpoint = fetch_slowly
    assert watched.run().exit_code == 0


def test_missing_status_is_an_error(tmp_path: Path) -> None:
    Watched(tmp_path, [replace(ALIVE, status=None)] * 15).fails("no_status")


def test_a_training_taken_up_again_has_been_silent_since_its_last_output(tmp_path: Path) -> None:
    silent = replace(log_frame("one\n", 0), quiet_s=3600.0)
    error = Watched(tmp_path, [silent, *[ALIVE] * 3], stall_s=600).fails("stalled")
    assert "no output for" in error.message
    wrote_lately = replace(log_frame("one\n", 0), quiet_s=500.0)
    assert Watched(tmp_path / "other", [wrote_lately, ALIVE, END], stall_s=600).run().exit_code == 0


def test_stall_counts_what_the_trainer_wrote_not_what_the_disk_took(tmp_path: Path) -> None:
    full = [replace(ALIVE, status={**RUNNING, "output_bytes": n}) for n in range(60)]
    assert Watched(tmp_path, [*full, END], stall_s=20).run().exit_code == 0
    watched = Watched(tmp_path, [log_frame("one\n", 0), *[ALIVE] * 200], stall_s=20)
    error = watched.fails("stalled")
    assert watched.pod.stopped == [4711]
    assert error.message.startswith("the training was stopped: no output for 20 s")


def test_a_stop_leaves_the_trainer_a_moment_for_its_last_lines(tmp_path: Path) -> None:
    last = {**FINISHED, "exit_code": 143, "stopped_by": "SIGTERM"}
    steps = [*[ALIVE] * 12, log_frame("saved\n", 0), replace(END, status=last)]
    watched = Watched(tmp_path, steps, wallclock_deadline=FakeClock().now() + 10)
    error = watched.fails("deadline")
    assert watched.pod.stopped == [4711]
    assert error.details["last_lines"] == ["saved"]
    assert error.details["exit_code"] == 143


def test_trainer_that_ends_by_itself_at_the_deadline_has_succeeded(tmp_path: Path) -> None:
    watched = Watched(tmp_path, [*[ALIVE] * 12, END], wallclock_deadline=FakeClock().now() + 10)
    assert watched.run().exit_code == 0


def test_deadline_holds_when_the_trainer_does_not_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path, [ALIVE] * 300, wallclock_deadline=FakeClock().now() + 10)
    before = watched.clock.now()
    watched.fails("deadline")
    assert watched.clock.now() - before <= 10 + STOP_S + 2


def test_deadline_holds_while_the_pod_is_out_of_reach(tmp_path: Path) -> None:
    watched = Watched(tmp_path, wallclock_deadline=FakeClock().now() + 10)
    watched.fails("deadline")
    assert watched.pod.stopped == []


def test_checkpoints_come_one_at_a_time_and_the_newest_is_not_forgotten(tmp_path: Path) -> None:
    versions = [RemoteFile("/p/out/best.pt", n, f"{n}", float(n)) for n in range(5)]
    frames = [replace(ALIVE, checkpoint=version) for version in versions]
    taken: list[int] = []
    watched = Watched(tmp_path, [*frames, *[ALIVE] * 20, END], checkpoint_every_s=10.0)
    watched.on_checkpoint = lambda remote: taken.append(remote.bytes)
    watched.run()
    assert taken == [0, 4]


def test_checkpoint_that_cannot_come_home_does_not_end_the_training(tmp_path: Path) -> None:
    checkpoint = RemoteFile("/p/out/best.pt", 1, "aa", 1.0, "best.pt")
    watched = Watched(tmp_path, [replace(ALIVE, checkpoint=checkpoint), END])

    def fail(_remote: RemoteFile) -> None:
        raise TransferError("the file changed")

    watched.on_checkpoint = fail
    assert watched.run().exit_code == 0
    assert "best.pt could not be brought home yet: the file changed" in watched.events[0]["text"]


def test_fence_during_a_checkpoint_ends_the_watch(tmp_path: Path) -> None:
    watched = Watched(tmp_path, [replace(ALIVE, checkpoint=RemoteFile("/p/out/best.pt", 1, "aa", 1.0)), END])

    def fenced(_remote: RemoteFile) -> None:
        raise FencedError("taken away")

    watched.on_checkpoint = fenced
    with pytest.raises(FencedError):
        watched.run()


class SlowWords:
    """An ssh whose output ends a moment before it says why."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def fresh(self) -> SlowWords:
        return self

    def popen(self, _command: str) -> subprocess.Popen[bytes]:
        script = "cat >/dev/null; exec >&-; sleep 0.3; echo 'Permission denied (publickey).' >&2; exit 255"
        pipe = subprocess.PIPE
        return subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)

    def readmitted(self, why: str) -> bool:
        self.told.append(why)
        return False


def test_why_a_stream_ended_is_heard_out() -> None:
    ssh = SlowWords()
    frames = SshFrames(ssh, {})  # type: ignore[arg-type]
    with pytest.raises(StreamEndedError, match="Permission denied"):
        frames.next(10)
    frames.close()
    assert ssh.told == ["Permission denied (publickey)."], "so that the key can be let in again"
