"""`playbooks/offers.yml`: the ladder of a job, asked of every provider, with nothing rented and no run opened."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from workspace import Workspace

pytestmark = pytest.mark.pod


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def offers(workspace: Workspace, **extra: object) -> subprocess.CompletedProcess[str]:
    command = ["playbooks/offers.yml" if word == "train.yml" else word for word in workspace.command(**extra)]
    return subprocess.run(
        command,
        cwd=workspace.root,
        env=workspace.environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def test_the_ladder_is_shown_and_nothing_is_rented(workspace: Workspace) -> None:
    done = offers(workspace, job="tiny,demo")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if line in ("tiny", "demo")) == ["demo", "tiny"], "whichever answered first"
    rungs = [[cell.strip() for cell in line.split("│")] for line in lines if "│ local" in line]
    assert [cells[3] for cells in rungs] == ["local-1", "local-2", "local-3", "local-4"] * 2
    assert done.stdout.count("worst case $") == 2
    assert (workspace.ledger().runs(), workspace.pods()) == ([], [])
    assert not workspace.artifacts.exists()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"job": "nonesuch"}, "known jobs are"),
        ({}, "which job?"),
        ({"job": "tiny", "max_cost_usd": "0.0001"}, "over max_cost_usd"),
    ],
    ids=["unknown", "none", "cap"],
)
def test_what_cannot_be_planned_is_one_line(workspace: Workspace, extra: dict[str, str], said: str) -> None:
    done = offers(workspace, **extra)
    assert done.returncode != 0
    (error,) = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    assert said in error
