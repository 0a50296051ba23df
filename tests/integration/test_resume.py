"""`playbooks/resume.yml`: the command that trained is dead, its pod is not. One pod, one run, one who works on it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pennypod import processes
from pennypod.guard import guard_is_alive
from pennypod.ledger import STAGES, AttemptState, Outcome
from pennypod.providers.registry import all_providers
from workspace import Workspace, wait_until

pytestmark = pytest.mark.pod

LONG = {"tiny_epochs": 18}


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    assert workspace.pods() == []


@pytest.fixture
def processes_to_end() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


class Broken:
    """A run whose command was killed at a chosen moment, and what can be done about it."""

    def __init__(self, workspace: Workspace, log: Path) -> None:
        self.workspace = workspace
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def run(self) -> str:
        (record,) = self.workspace.ledger().runs()
        return record.run

    def start(self, **extra: object) -> subprocess.Popen[bytes]:
        values = {"job": "tiny", "keep_on_disconnect": "true"} | extra
        self.process = self.workspace.start(log=self.log, **values)
        return self.process

    def kill_when(self, condition: Callable[[], Any], what: str) -> None:
        assert self.process is not None
        process = self.process

        def ready() -> bool:
            assert process.poll() is None, self.log.read_text()[-3000:]
            return bool(self.workspace.ledger().runs()) and bool(condition())

        wait_until(ready, 120, what)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=20)

    def trains(self) -> bool:
        log = self.workspace.artifacts / self.run / "train.log"
        return log.is_file() and "epoch 2/" in log.read_text()

    def reached(self, stage: str) -> bool:
        return stage in {record.stage for record in self.workspace.ledger().stages(self.run)}

    def command(self, **extra: object) -> list[str]:
        command = self.workspace.command(**({"run": self.run} | extra))
        return ["playbooks/resume.yml" if word == "train.yml" else word for word in command]

    def resume(self, **extra: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(**extra),
            cwd=self.workspace.root,
            env=self.workspace.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=280,
        )

    def pod_id(self) -> str:
        (pod,) = self.workspace.pods()
        return pod.pod_id


@pytest.fixture
def broken(workspace: Workspace, tmp_path: Path, processes_to_end: list[subprocess.Popen[bytes]]) -> Iterator[Broken]:
    broken = Broken(workspace, tmp_path / "first.log")
    yield broken
    if broken.process is not None:
        processes_to_end.append(broken.process)
    provider = all_providers(workspace.settings, workspace.environment)["local"]
    for pod in workspace.pods():  # only after a failed test: whatever it left must not bill on
        provider.destroy(pod.pod_id)


def check_success(workspace: Workspace, pod_id: str) -> dict[str, Any]:
    document = workspace.document()
    assert (document["outcome"], document["pods_still_billing"]) == (Outcome.SUCCEEDED, 0)
    assert [attempt["pod_id"] for attempt in document["attempts"]] == [pod_id]
    assert list(document["stages"]) == list(STAGES)
    (weights,) = [item for item in document["artifacts"] if item["kind"] == "weights"]
    home = Path(document["artifacts_dir"]) / weights["path"]
    assert hashlib.sha256(home.read_bytes()).hexdigest() == weights["sha256"]
    return document


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]


def test_a_training_goes_on_under_a_new_controller(broken: Broken, workspace: Workspace) -> None:
    broken.start(**LONG)
    broken.kill_when(broken.trains, "the training runs")
    pod_id = broken.pod_id()
    first = workspace.ledger().run(broken.run).controller
    assert guard_is_alive(workspace.settings, first), "it stands down, it does not leave"
    done = broken.resume(**LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    document = check_success(workspace, pod_id)
    assert workspace.ledger().run(broken.run).controller != first
    log = (Path(document["artifacts_dir"]) / "train.log").read_text()
    assert log.count("epoch 1/18") == 1, "it was followed, not started again"
    assert "epoch 18/18" in log
    assert done.stdout.rstrip().endswith("pods still billing: 0")
    wait_until(lambda: not guard_is_alive(workspace.settings, first), 20, "the first guard has nothing left to guard")


def test_a_broken_upload_is_finished(broken: Broken, workspace: Workspace) -> None:
    dataset = workspace.add_data("large", files=60, size=1_000_000)
    broken.start(dataset=dataset)
    broken.kill_when(lambda: broken.reached("dataset"), "the upload runs")
    pod_id = broken.pod_id()
    done = broken.resume()  # it remembers which data set
    assert done.returncode == 0, done.stdout + done.stderr
    check_success(workspace, pod_id)
    events = (workspace.settings.run_dir(broken.run) / "events.jsonl").read_text()
    resumed = events.partition("its first command has died")[2]
    assert "all 61 verified on the pod" in resumed, "the sixty files of the data set and the trainer"


@pytest.mark.heavy
def test_a_training_that_ended_meanwhile_brings_its_weights_home(broken: Broken, workspace: Workspace) -> None:
    broken.start(tiny_epochs=4)
    broken.kill_when(broken.trains, "the training runs")
    pod_id = broken.pod_id()
    provider = all_providers(workspace.settings, workspace.environment)["local"]

    def over() -> bool:
        status = provider.engine.call("exec", pod_id, "cat", "/root/pennypod/status.json").stdout
        return '"finished"' in status and '"running"' not in status

    wait_until(over, 60, "the training is over on the pod")
    done = broken.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    check_success(workspace, pod_id)


def test_a_run_that_died_in_its_teardown_has_succeeded_all_the_same(broken: Broken, workspace: Workspace) -> None:
    broken.start()
    broken.kill_when(lambda: broken.reached("teardown"), "the teardown begins")
    (attempt,) = workspace.ledger().attempts(broken.run)
    done = broken.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    check_success(workspace, attempt.pod_id or "")


def test_a_run_whose_pod_is_gone_is_closed_and_says_so(broken: Broken, workspace: Workspace) -> None:
    broken.start(**LONG)
    broken.kill_when(broken.trains, "the training runs")
    all_providers(workspace.settings, workspace.environment)["local"].destroy(broken.pod_id())
    done = broken.resume()
    assert done.returncode != 0
    first, last = errors(done)
    assert "no pod to go on with" in first
    assert "is no longer listed" in last
    document = workspace.document()
    assert (document["outcome"], document["pods_still_billing"]) == (Outcome.FAILED, 0)
    assert "no pod to go on with" in document["reason"]
    (attempt,) = workspace.ledger().attempts(broken.run)
    assert (attempt.state, attempt.receipt is not None) == (AttemptState.GONE, True)
    again = broken.resume()
    assert again.returncode != 0
    assert "already closed" in errors(again)[0]


def test_a_run_whose_controller_lives_is_left_alone(broken: Broken, workspace: Workspace) -> None:
    process = broken.start(tiny_epochs=12)
    wait_until(lambda: workspace.ledger().runs() and broken.trains(), 120, "the training runs")
    done = broken.resume()
    assert done.returncode != 0
    (error,) = errors(done)
    assert "still being worked on" in error
    assert process.wait(timeout=120) == 0, broken.log.read_text()[-3000:]
    assert workspace.document()["outcome"] == Outcome.SUCCEEDED


def test_of_two_resumes_at_once_one_works(
    broken: Broken, workspace: Workspace, tmp_path: Path, processes_to_end: list[subprocess.Popen[bytes]]
) -> None:
    broken.start(**LONG)
    broken.kill_when(broken.trains, "the training runs")
    pod_id = broken.pod_id()
    logs = [tmp_path / "second.log", tmp_path / "third.log"]
    for log in logs:
        with log.open("wb") as file:
            processes_to_end.append(
                subprocess.Popen(
                    broken.command(),
                    cwd=workspace.root,
                    env=workspace.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )
    codes = [process.wait(timeout=250) for process in processes_to_end]
    texts = [log.read_text() for log in logs]
    assert sorted(code == 0 for code in codes) == [False, True], "\n".join(texts)
    refused = texts[codes.index(0) ^ 1]
    assert "still being worked on" in refused
    check_success(workspace, pod_id)


@pytest.mark.heavy
def test_a_resumed_run_that_is_killed_again_ends_when_it_was_told_to(
    broken: Broken, workspace: Workspace, tmp_path: Path, processes_to_end: list[subprocess.Popen[bytes]]
) -> None:
    broken.start(**LONG)
    broken.kill_when(broken.trains, "the training runs")
    first = workspace.ledger().run(broken.run).controller
    with (tmp_path / "second.log").open("wb") as file:
        second = subprocess.Popen(
            broken.command(keep_on_disconnect="false"),
            cwd=workspace.root,
            env=workspace.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    processes_to_end.append(second)
    wait_until(lambda: workspace.ledger().run(broken.run).controller != first, 60, "the run is taken over")
    assert processes.pid_of(workspace.ledger().run(broken.run).controller) == second.pid
    os.kill(second.pid, signal.SIGKILL)
    second.wait(timeout=20)
    wait_until(lambda: not workspace.pods(), 15, "the second guard has ended the pod")
    wait_until(lambda: workspace.ledger().run(broken.run).closed is not None, 20, "the run is closed")
    assert workspace.ledger().run(broken.run).outcome == Outcome.CANCELLED
