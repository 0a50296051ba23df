"""Ring 1: whatever kills ansible-playbook, at whatever moment, no container is left ten seconds later.

A checkpoint that is on its way home then gets its grace on top: see test_weights_at_a_kill.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pennypod.ledger import AttemptState, Outcome
from workspace import Workspace, wait_until

BOUND_S = 10.0
GRACE_S = 60.0
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
STAGES = ["rent", "bootstrap", "dataset", "training", "weights", "teardown"]
ANY = "any"
SEED = int(os.environ.get("PENNYPOD_CHAOS_SEED", random.randrange(10**6)))


def chosen_cases() -> list[Any]:
    """KILL in the four stages that matter most; with HEAVY=1 all stages, and each other signal in a random one.

    Every signal in every stage is the crash matrix's business: make chaos.
    """
    quick = [(stage, signal.SIGKILL) for stage in ("rent", "dataset", "training", "weights")]
    rest = [(stage, signal.SIGKILL) for stage in ("bootstrap", "teardown")]
    rest += [(ANY, number) for number in SIGNALS if number is not signal.SIGKILL]
    return quick + [pytest.param(*case, marks=pytest.mark.heavy) for case in rest]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@contextlib.contextmanager
def playing(workspace: Workspace, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The playbook, with a data set that takes its time."""
    dataset = workspace.add_data("large", files=60, size=1_000_000)
    with workspace.playing(job="tiny", tiny_epochs=4, dataset=dataset, log=log) as process:
        yield process


@pytest.mark.pod
@pytest.mark.parametrize(("stage", "number"), chosen_cases(), ids=lambda value: getattr(value, "name", value))
def test_no_pod_outlives_its_controller(
    workspace: Workspace, stage: str, number: signal.Signals, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    if stage == ANY:  # chosen here and not while collecting, where every worker would choose for itself
        stage = random.Random(f"{SEED} {number}").choice(STAGES)
    record_property("seed", SEED)
    record_property("stage", stage)
    log = tmp_path / "playbook.log"
    with playing(workspace, log) as process:
        reach(workspace, stage, process, log)
        os.kill(process.pid, number)
        process.wait(timeout=20)
        bound_s = BOUND_S + (GRACE_S if stage == "weights" else 0)
        seconds = wait_until(lambda: nothing_left(workspace), bound_s, f"no container after {number.name} in {stage}")
        record_property("seconds_to_zero", round(seconds, 2))
    (run,) = workspace.ledger().runs()
    wait_until(lambda: workspace.ledger().run(run.run).closed is not None, 20, "the run is closed")
    run = workspace.ledger().run(run.run)
    if run.outcome != Outcome.SUCCEEDED:  # a kill in the last moment of the teardown comes too late to cancel anything
        assert run.outcome == Outcome.CANCELLED
        assert "ended before the run was over" in (run.reason or "")
    assert all(attempt.final for attempt in workspace.ledger().attempts(run.run))
    assert all(a.receipt for a in workspace.ledger().attempts(run.run) if a.state is AttemptState.GONE)


def workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The forks of ansible-playbook that run a module just now."""
    with contextlib.suppress(psutil.NoSuchProcess):  # one that ends between two looks
        return [child for child in psutil.Process(process.pid).children() if child.children()]
    return []


def reach(workspace: Workspace, stage: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the run is in the middle of a stage."""

    def inside() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        runs = workspace.ledger().runs()
        if not runs:
            return False
        if stage == "rent":  # the moment that matters: the create call is under way or has just been answered
            return bool(workspace.ledger().attempts(runs[0].run))
        started = {record.stage for record in workspace.ledger().stages(runs[0].run)}
        return stage in started

    wait_until(inside, 120, f"the run reaches {stage}")


def nothing_left(workspace: Workspace) -> bool:
    return not workspace.pods() and all(
        attempt.final for run in workspace.ledger().runs() for attempt in workspace.ledger().attempts(run.run)
    )


@pytest.mark.pod
@pytest.mark.heavy
@pytest.mark.parametrize("victims", ["worker", "worker and module"])
def test_a_killed_worker_ends_the_run_and_its_pod(workspace: Workspace, victims: str, tmp_path: Path) -> None:
    """Ansible's strategy `free` never notices a dead worker by itself: the pod would bill until its deadline."""
    log = tmp_path / "playbook.log"
    with playing(workspace, log) as process:
        reach(workspace, "training", process, log)
        wait_until(lambda: workers(process), 20, "a worker is at work")
        (worker,) = workers(process)
        doomed = [worker, *(worker.children(recursive=True) if victims != "worker" else [])]
        for victim in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait(timeout=30)
        wait_until(lambda: nothing_left(workspace), BOUND_S, "no container after the worker was killed")
    assert process.returncode != 0
    assert "worker of Ansible was killed" in log.read_text()
