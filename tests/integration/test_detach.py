"""`train.yml -e detach=true` and what cron does then: the command leaves, the run comes to its end all the same."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crontabs import Crontab, cron_daemon
from pennypod.ledger import AttemptState, Outcome
from pennypod.monitor import Monitor
from pennypod.providers.registry import all_providers
from workspace import Workspace, wait_until

pytestmark = pytest.mark.pod

LONG = {"tiny_epochs": 600}


class Left:
    """A workspace whose cron is the test's own."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder)
        self.table = Crontab(folder)
        self.path = f"{self.table.path}:{self.workspace.environment['PATH']}"

    def train(self, **extra: object) -> subprocess.CompletedProcess[str]:
        return self.workspace.play(job="tiny", detach="true", env={"PATH": self.path}, **extra)

    def leave(self, **extra: object) -> str:
        """A run that trains on without its command."""
        done = self.train(**extra)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(self.table.lines()) == 1
        return done.stdout.rstrip().splitlines()[-1]

    @property
    def run(self) -> str:
        (record,) = self.workspace.ledger().runs()
        return record.run

    @property
    def monitor(self) -> Monitor:
        return Monitor(self.workspace.settings, self.run)

    def log(self) -> str:
        return self.monitor.log.read_text() if self.monitor.log.exists() else ""

    def finish(self, **extra: object) -> subprocess.CompletedProcess[str]:
        """By hand, at a terminal."""
        command = self.workspace.command(run=self.run, **extra)
        return self.type(["playbooks/finish.yml" if word == "train.yml" else word for word in command])

    def type(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.workspace.root,
            env=self.workspace.environment | {"PATH": self.path},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=200,
        )

    def on_pod(self, *command: str) -> str:
        provider = all_providers(self.workspace.settings, self.workspace.environment)["local"]
        (pod,) = self.workspace.pods()
        told: str = provider.looker.call("exec", pod.pod_id, *command).stdout
        return told

    def end_training(self) -> None:
        """However long it was meant to be: it has now had its last epoch."""
        self.on_pod("touch", "/root/pennypod/out/enough")

        def over() -> bool:
            status = self.on_pod("cat", "/root/pennypod/status.json")
            return '"finished"' in status and '"running"' not in status

        wait_until(over, 60, "the training is over on the pod")

    def nothing_is_left(self) -> None:
        assert self.workspace.pods() == []
        assert self.table.lines() == []
        assert not self.monitor.folder.exists()
        for attempt in self.workspace.ledger().attempts(self.run):
            assert (attempt.state, attempt.receipt is not None) == (AttemptState.GONE, True)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    left = Left(tmp_path)
    with cron_daemon(tmp_path):
        yield left
    provider = all_providers(left.workspace.settings, left.workspace.environment)["local"]
    for pod in left.workspace.pods():  # only after a failed test: whatever it left must not bill on
        provider.destroy(pod.pod_id)


def succeeded(left: Left) -> None:
    document: dict[str, Any] = left.workspace.document()
    assert (document["outcome"], document["pods_still_billing"]) == (Outcome.SUCCEEDED, 0), left.log()
    (weights,) = [item for item in document["artifacts"] if item["kind"] == "weights"]
    home = Path(document["artifacts_dir"]) / weights["path"]
    assert hashlib.sha256(home.read_bytes()).hexdigest() == weights["sha256"]
    left.nothing_is_left()


def test_cron_brings_a_run_home_that_its_command_has_left(left: Left) -> None:
    last = left.leave(**LONG)
    assert last.startswith("pods still billing: 1; ")
    assert f"{left.run} goes on" in last
    assert f"finish.yml -e run={left.run}" in last
    assert left.table.turn() == [0]
    assert "it trains" in left.log()
    assert len(left.workspace.pods()) == len(left.table.lines()) == 1, "a training that goes on is left alone"
    left.end_training()
    assert left.table.turn() == [0], left.log()
    succeeded(left)


@pytest.mark.heavy
def test_a_monitor_that_is_killed_is_followed_by_the_next(left: Left) -> None:
    left.leave(**LONG)
    left.end_training()
    first = left.workspace.ledger().run(left.run).controller
    (command,) = left.table.commands()
    process = left.table.start(command)
    wait_until(lambda: left.workspace.ledger().run(left.run).controller != first, 60, "the run is taken over")
    beside = left.table.start(command)
    assert beside.wait(60) == 0
    assert "nothing to do beside it" in left.log(), "of two at once, one works"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert left.workspace.ledger().run(left.run).closed is None
    assert left.table.turn() == [0], left.log()
    succeeded(left)


@pytest.mark.heavy
def test_a_monitor_whose_pod_is_gone_closes_the_run_and_says_so(left: Left) -> None:
    left.leave(**LONG)
    (pod,) = left.workspace.pods()
    all_providers(left.workspace.settings, left.workspace.environment)["local"].destroy(pod.pod_id)
    assert left.table.turn() != [0]
    assert "its pod is gone" in left.log()
    assert left.workspace.document()["outcome"] == Outcome.FAILED
    left.nothing_is_left()


@pytest.mark.heavy
def test_a_training_that_fails_is_salvaged_and_ended(left: Left) -> None:
    left.leave(tiny_exit=3, **LONG)
    left.end_training()
    assert left.table.turn() != [0]
    document = left.workspace.document()
    assert (document["outcome"], "exit code 3" in document["reason"]) == (Outcome.FAILED, True)
    left.nothing_is_left()


@pytest.mark.heavy
def test_cancelling_ends_it_at_once(left: Left) -> None:
    left.leave(**LONG)
    done = left.finish(cancel="true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert left.workspace.document()["outcome"] == Outcome.CANCELLED
    left.nothing_is_left()


@pytest.mark.parametrize(("missing", "advice"), [("crontab", "apt-get install cron"), ("daemon", "service cron start")])
def test_without_cron_nothing_is_rented(tmp_path: Path, missing: str, advice: str) -> None:
    left = Left(tmp_path)
    if missing == "crontab":
        (left.table.path / "crontab").unlink()
    # Processes of its own: the machine may well have a cron daemon, and so may a container on it.
    alone = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        *(["--map-root-user"] if os.geteuid() else []),
    ]
    done = left.type([*alone, *left.workspace.command(job="tiny", detach="true")])
    assert done.returncode != 0
    (error,) = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    assert advice in error
    assert left.workspace.ledger().runs() == []


def test_a_misspelt_wish_to_leave_is_refused(tmp_path: Path) -> None:
    left = Left(tmp_path)
    done = left.workspace.play(job="tiny", detach="ture", env={"PATH": left.path})
    assert done.returncode != 0
    assert left.workspace.ledger().runs() == []
