"""The CI examples, as they stand in the repository, against a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import SECRET, Rehearsal
from workspace import REPOSITORY, wait_until

EXAMPLES = REPOSITORY / "examples" / "ci"
SCRIPT = "train-and-wait.sh"
# What the two systems would put in place of their own expressions.
GITHUB = {"${{ github.sha }}": "c0ffee", "${{ github.run_id }}": "7", "${{ github.run_attempt }}": "1"}
GITLAB = {"CI_COMMIT_SHA": "c0ffee", "CI_JOB_ID": "9"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    rehearsal = Rehearsal(tmp_path_factory.mktemp("ci"), "poll_s: 0.5")
    rehearsal.write_job("demo", "webhook_overrides: [smoke]")
    rehearsal.start()
    yield rehearsal
    rehearsal.close()


def shell(served: Rehearsal, command: str, where: Path, **more: str) -> subprocess.Popen[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "PENNYPOD_URL": served.url,
        "PENNYPOD_WEBHOOK_SECRET": SECRET,
        "PENNYPOD_POLL_S": "0.2",
        **more,
    }
    return subprocess.Popen(
        ["sh", "-euc", command], cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(served: Rehearsal, running: subprocess.Popen[str], event: str = "success") -> tuple[str, str]:
    """Let the training of the run that was asked for end; the run, and what the script has said."""
    before = {entry["run"] for entry in served.journal("launch")}
    wait_until(lambda: {entry["run"] for entry in served.journal("launch")} - before, 60, "a run is launched")
    (run,) = {entry["run"] for entry in served.journal("launch")} - before
    served.wait_for(run, stage="watch")
    if event == "cancel":
        served.post({"action": "train_cancel", "run": run})
    else:
        served.call_back(run, event)
    said, _ = running.communicate(timeout=60)
    return run, said


def github_command() -> str:
    workflow = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text())
    (job,) = workflow["jobs"].values()
    command = str(job["steps"][-1]["run"])
    for expression, value in GITHUB.items():
        command = command.replace(expression, value)
    return command


def gitlab_command() -> str:
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text())
    return "\n".join(document["train"]["script"])


def test_github_actions(served: Rehearsal, tmp_path: Path) -> None:
    (tmp_path / ".github").mkdir()
    shutil.copy(EXAMPLES / SCRIPT, tmp_path / ".github")
    running = shell(served, github_command(), tmp_path)
    run, said = finish(served, running)
    assert running.returncode == 0, said
    assert f"{run}: succeeded" in said


def test_gitlab_ci(served: Rehearsal, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / SCRIPT, tmp_path)
    running = shell(served, gitlab_command(), tmp_path, **GITLAB)
    run, said = finish(served, running)
    assert running.returncode == 0, said
    assert f"{run}: succeeded" in said


def test_a_run_that_does_not_succeed_fails_the_job(served: Rehearsal) -> None:
    running = shell(served, f"""sh {SCRIPT} '{{"action": "train_start", "job": "tiny"}}'""", EXAMPLES)
    _, said = finish(served, running, "cancel")
    assert running.returncode == 1
    assert "cancelled by pennypod" in said


def test_what_is_not_accepted_fails_the_job_at_once(served: Rehearsal) -> None:
    for secret, payload, why in (
        ("wrong", '{"action": "train_start", "job": "tiny"}', "signature_invalid"),
        (SECRET, '{"action": "train_start", "job": "nosuch"}', "unknown_job"),
    ):
        running = shell(served, f"sh {SCRIPT} '{payload}'", EXAMPLES, PENNYPOD_WEBHOOK_SECRET=secret)
        said, _ = running.communicate(timeout=60)
        assert running.returncode == 2
        assert why in said
