"""Training over a real sshd and a real tmux: started once, watched to its end, whatever breaks on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback_sshd import LoopbackSshd, wait_until
from pennypod.clock import SystemClock
from pennypod.errors import FencedError, InputError, SshError, TrainingError
from pennypod.events import Events
from pennypod.training import TrainingResult, WatchPlan, launch, look, watch
from pennypod.weights import RemoteFile

RUN = "demo-1201-aaaaa"
# A trainer that waits for the test's word: `go` in its folder lets it take the next step.
STEPS = "step() { while [ ! -e go$1 ]; do sleep 0.02; done; }"


@dataclass
class Pod:
    """A pod home behind the loopback sshd, and what a watch of it reported."""

    sshd: LoopbackSshd
    home: Path
    artifacts: Path
    plan: WatchPlan
    checkpoints: list[RemoteFile] = field(default_factory=list)
    fenced: threading.Event = field(default_factory=threading.Event)

    def start(self, command: str, run: str = RUN, **env: str) -> bool:
        return launch(self.sshd.ssh(), str(self.home), command, env, run=run).launched

    def watch(self, on_checkpoint: Callable[[RemoteFile], None] | None = None, **changes: Any) -> TrainingResult:
        return watch(
            self.sshd.ssh,
            str(self.home),
            replace(self.plan, **changes),
            events=Events(self.artifacts, RUN),
            clock=SystemClock(),
            should_stop=self.should_stop,
            on_checkpoint=on_checkpoint,
        )

    def should_stop(self) -> None:
        if self.fenced.is_set():
            raise FencedError("the run was taken away")

    def go(self, step: int = 1) -> None:
        (self.home / "out" / f"go{step}").touch()

    @property
    def log(self) -> str:
        path = self.plan.log_path
        return path.read_text() if path.exists() else ""

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / "status.json").read_text())
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.artifacts / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def in_background(self, **changes: Any) -> Background:
        return Background(lambda: self.watch(**changes))


class Background:
    """A watch in a thread of its own, so that the test can break things meanwhile."""

    def __init__(self, work: Callable[[], TrainingResult]) -> None:
        self.result: TrainingResult | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], TrainingResult]) -> None:
        try:
            self.result = work()
        except Exception as exc:  # noqa: BLE001 - handed to the test
            self.error = exc

    def finish(self, limit_s: float = 30.0) -> TrainingResult:
        self.thread.join(limit_s)
        assert not self.thread.is_alive(), "the watch did not end"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


@pytest.fixture
def pod(sshd: LoopbackSshd, tmp_path: Path) -> Pod:
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    plan = WatchPlan(run=RUN, log_path=artifacts / "train.log", poll_s=0.5, checkpoint_every_s=0.0)
    return Pod(sshd, tmp_path / "pennypod", artifacts, plan)


def test_a_training_is_launched_watched_and_its_log_is_here(pod: Pod) -> None:
    command = "for n in 1 2 3; do echo epoch $n/3 loss=0.$n; sleep 0.1; done; echo $GREETING"
    assert pod.start(command, GREETING='it\'s "done" $HOME') is True
    result = pod.watch()
    assert result.exit_code == 0
    assert (result.epoch, result.epochs) == (3, 3)
    assert result.last_lines[-1] == 'it\'s "done" $HOME'
    assert pod.plan.log_path.read_bytes() == (pod.home / "train.log").read_bytes()
    assert result.seconds > 0
    epochs = [event["epoch"] for event in pod.events if "epoch" in event]
    assert epochs == [1, 2, 3]
    assert pod.status["exit_code"] == 0


def test_launched_twice_it_runs_once(pod: Pod) -> None:
    command = f"{STEPS}; echo started >> starts; step 1"
    assert pod.start(command) is True
    assert pod.start(command) is False, "while it runs"
    pod.go()
    assert pod.watch().exit_code == 0
    assert pod.start(command) is False, "after it has finished"
    assert pod.watch().exit_code == 0, "a finished training can be looked at again"
    assert (pod.home / "out" / "starts").read_text() == "started\n"


def test_launched_at_the_same_moment_it_runs_once(pod: Pod) -> None:
    command = f"{STEPS}; echo started >> starts; step 1"
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(pod.start(command))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False, False, True]
    pod.go()
    assert pod.watch().exit_code == 0
    assert (pod.home / "out" / "starts").read_text() == "started\n"


def test_session_lives_on_when_every_connection_has_ended(pod: Pod) -> None:
    assert pod.start(f"{STEPS}; echo here; step 1") is True
    pod.sshd.drop_sessions()
    frame = look(pod.sshd.ssh(), str(pod.home))
    assert (frame.supervisor, frame.child, frame.tmux, frame.state) == (True, True, True, "running")
    assert "here" in pod.sshd.tmux("capture-pane", "-p", "-t", "pennypod").stdout, "tmux attach shows the output"


def test_exit_code_1_is_an_error_that_shows_the_last_lines(pod: Pod) -> None:
    pod.start("echo Traceback; echo 'ValueError: no such folder'; exit 1")
    with pytest.raises(TrainingError, match=r"exit code 1 .*ValueError: no such folder.*train\.log") as caught:
        pod.watch()
    details = caught.value.details
    assert (details["reason"], details["exit_code"]) == ("exit", 1)
    assert details["last_lines"] == ["Traceback", "ValueError: no such folder"]
    assert pod.log == "Traceback\nValueError: no such folder\n"


def test_killed_trainer_is_noticed(pod: Pod) -> None:
    pod.start("echo training; exec sleep 300")
    watching = pod.in_background()
    wait_until("the log is here", lambda: "training" in pod.log)
    psutil.Process(pod.status["pid"]).kill()
    with pytest.raises(TrainingError, match="signal 9") as caught:
        watching.finish()
    assert (caught.value.details["reason"], caught.value.details["signal"]) == ("signal", 9)


def test_killed_supervisor_is_noticed(pod: Pod) -> None:
    pod.start("echo training; exec sleep 300")
    watching = pod.in_background()
    wait_until("the log is here", lambda: "training" in pod.log)
    trainer = psutil.Process(pod.status["pid"])
    psutil.Process(pod.status["supervisor_pid"]).kill()
    try:
        with pytest.raises(TrainingError, match="without an exit code") as caught:
            watching.finish()
        assert caught.value.details["reason"] == "supervisor_gone"
    finally:
        trainer.kill()


@pytest.mark.parametrize("killed", ["kill-session", "SIGKILL"])
def test_dead_tmux_is_noticed_and_the_trainer_ended(pod: Pod, killed: str) -> None:
    pod.start("echo training; exec sleep 300")
    watching = pod.in_background()
    wait_until("the log is here", lambda: "training" in pod.log)
    trainer = psutil.Process(pod.status["pid"])
    if killed == "SIGKILL":
        server = pod.sshd.tmux("display-message", "-p", "-t", "pennypod", "#{pid}").stdout
        psutil.Process(int(server)).kill()
    else:
        pod.sshd.tmux(killed, "-t", "pennypod")
    with pytest.raises(TrainingError, match="tmux") as caught:
        watching.finish()
    assert caught.value.details["reason"] == "tmux_gone"
    wait_until("the trainer is gone", lambda: not trainer.is_running())


def test_stalled_log_ends_the_training(pod: Pod) -> None:
    pod.start("trap 'echo saved; exit 0' TERM; echo training; while :; do sleep 0.05; done")
    with pytest.raises(TrainingError, match="no output for 1 s") as caught:
        pod.watch(stall_s=1.0)
    assert caught.value.details["reason"] == "stalled"
    assert pod.log.endswith("saved\n"), "the trainer had its moment, and the log is complete"


def test_deadline_ends_the_training(pod: Pod) -> None:
    pod.start("trap 'echo saved; exit 3' TERM; echo training; while :; do echo step; sleep 0.05; done")
    with pytest.raises(TrainingError, match="budget is used up") as caught:
        pod.watch(wallclock_deadline=time.time() + 1.0)
    assert caught.value.details["reason"] == "deadline"
    assert pod.log.endswith("saved\n")


def test_fenced_watch_stops_at_once_and_touches_nothing(pod: Pod) -> None:
    pod.start("echo training; exec sleep 300")
    watching = pod.in_background()
    wait_until("the log is here", lambda: "training" in pod.log)
    before = time.monotonic()
    pod.fenced.set()
    with pytest.raises(FencedError):
        watching.finish()
    assert time.monotonic() - before < 2
    assert psutil.Process(pod.status["pid"]).is_running()


def test_dropped_connection_is_taken_up_again_without_a_lost_byte(pod: Pod) -> None:
    pod.start(f"{STEPS}; for n in 1 2 3 4; do echo epoch $n/4; step $n; done; seq 20000")
    watching = pod.in_background()
    for step in (1, 2, 3):
        wait_until(f"epoch {step} is here", lambda: f"epoch {step}/4" in pod.log)  # noqa: B023
        assert pod.sshd.drop_sessions() > 0
        pod.go(step)
    pod.go(4)
    result = watching.finish()
    assert result.reattached >= 1
    assert pod.plan.log_path.read_bytes() == (pod.home / "train.log").read_bytes()
    assert [event["epoch"] for event in pod.events if "epoch" in event] == [1, 2, 3, 4]


def test_pod_out_of_reach_is_an_ssh_error_after_the_patience(pod: Pod) -> None:
    pod.start("echo training; exec sleep 300")
    watching = pod.in_background(ssh_patience_s=1.0)
    wait_until("the log is here", lambda: "training" in pod.log)
    pod.sshd.vanish()
    with pytest.raises(SshError, match="out of reach") as caught:
        watching.finish()
    assert caught.value.details["last_lines"] == ["training"]


def test_log_of_an_earlier_pod_is_kept_aside(pod: Pod) -> None:
    pod.plan.log_path.write_text("epoch 1/9 on another pod\n")
    pod.start("echo a longer line than the other pod had; echo epoch 1/2")
    assert pod.watch().epochs == 2
    assert pod.log == "a longer line than the other pod had\nepoch 1/2\n"
    assert pod.plan.log_path.with_name("train.log.1").read_text() == "epoch 1/9 on another pod\n"


def test_checkpoints_are_reported_while_the_training_runs(pod: Pod) -> None:
    write = 'python3 -c \'import sys, zipfile; zipfile.ZipFile(sys.argv[1], "w").writestr("data.pkl", sys.argv[2])\''
    pod.start(f"{STEPS}; mkdir -p runs/a; for n in 1 2; do {write} runs/a/best.pt $n; echo epoch $n/2; step $n; done")
    watching = pod.in_background(on_checkpoint=pod.checkpoints.append, checkpoint_patterns=("**/best.pt",))
    for step in (1, 2):
        wait_until(f"checkpoint {step} is reported", lambda: len(pod.checkpoints) == step)  # noqa: B023
        assert pod.checkpoints[-1].path == str(pod.home / "out/runs/a/best.pt")
        pod.go(step)
    assert watching.finish().exit_code == 0
    assert pod.checkpoints[0].sha256 != pod.checkpoints[1].sha256


def test_a_busy_pod_refuses_a_second_run(pod: Pod) -> None:
    pod.start("exec sleep 300")
    with pytest.raises(TrainingError, match="one pod trains one run") as caught:
        pod.start("true", run="demo-1201-bbbbb")
    assert caught.value.details["reason"] == "busy"


def test_what_cannot_be_launched_is_refused_before_anything_is_touched(pod: Pod) -> None:
    with pytest.raises(InputError, match="training_command is empty"):
        pod.start("  ")
    with pytest.raises(InputError, match="not usable as an environment variable"):
        launch(pod.sshd.ssh(), str(pod.home), "true", {"A B": "1"}, run=RUN)
    assert not pod.home.exists()
