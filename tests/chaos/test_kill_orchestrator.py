"""Whatever kills the orchestrator, and whenever: every accepted run ends, once, with no pod left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal import MOMENTS
from serving import Rehearsal, check_ended_once
from workspace import wait_until

# The rest of the moments are tried with HEAVY=1.
ALWAYS = ("created", "finishing", "gone")


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    made = Rehearsal(tmp_path, "poll_s: 0.5")
    yield made
    made.close()


@pytest.mark.parametrize(
    "moment", [moment if moment in ALWAYS else pytest.param(moment, marks=pytest.mark.heavy) for moment in MOMENTS]
)
def test_killed_at_any_moment_and_started_again(rehearsal: Rehearsal, moment: str) -> None:
    rehearsal.die_at(moment)
    rehearsal.start()
    run = rehearsal.start_run()
    wait_until(lambda: rehearsal.has_ended() or _called_back(rehearsal, run), 30, f"the server dies at {moment}")
    wait_until(rehearsal.has_ended, 30, f"the server dies at {moment}")
    rehearsal.start()
    wait_until(lambda: _called_back(rehearsal, run), 60, "the run can be told to end")
    check_ended_once(rehearsal, run)


def _called_back(rehearsal: Rehearsal, run: str) -> bool:
    """Say that the training has succeeded as soon as it is watched; whether the run has got so far, or over it."""
    try:
        status = rehearsal.status(run)
        if status["stage"] == "watch":
            rehearsal.call_back(run, "success")
        return status["stage"] not in ("admit", "launch")
    except OSError:
        return False  # killed just now


@pytest.mark.heavy
@pytest.mark.parametrize("stage", ["admit", "watch"])
def test_killed_again_and_again(rehearsal: Rehearsal, stage: str) -> None:
    rehearsal.start()
    run = rehearsal.start_run()
    for _ in range(3):
        if stage == "watch":
            rehearsal.wait_for(run, stage="watch")
        rehearsal.kill()
        rehearsal.start()
    wait_until(lambda: _called_back(rehearsal, run), 60, "the run can be told to end")
    check_ended_once(rehearsal, run)


def test_a_stop_by_the_service_manager_is_no_different(rehearsal: Rehearsal) -> None:
    rehearsal.start()
    run = rehearsal.start_run()
    rehearsal.wait_for(run, stage="watch")
    assert rehearsal.terminate() == 0
    assert len(rehearsal.pods()) == 1, "a training is not ended because its orchestrator is updated"
    rehearsal.start()
    rehearsal.call_back(run, "success")
    check_ended_once(rehearsal, run)


@pytest.mark.heavy
def test_many_wait_at_once_and_all_are_there_after_a_kill(rehearsal: Rehearsal) -> None:
    (rehearsal.root / "serve.yml").write_text("poll_s: 600\nlimits: {running: 30, per_job: 30}")
    rehearsal.start()
    runs = [rehearsal.start_run() for _ in range(30)]
    for run in runs:
        rehearsal.wait_for(run, stage="watch")
    rehearsal.kill()
    rehearsal.start()
    wait_until(lambda: "pennypod_runs_watched 30.0" in rehearsal.metrics(), 60, "all are watched again")
    for run in runs:
        rehearsal.call_back(run, "success")
    for run in runs:
        assert rehearsal.wait_for(run)["outcome"] == "succeeded"
    assert rehearsal.pods() == []
    assert len(rehearsal.created()) == 30
