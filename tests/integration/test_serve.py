"""`pennypod serve` with the project's own playbooks on real local pods: from the webhook to the receipt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from serving import ADMIN, Served, Serving
from workspace import TINY_JOB, Workspace, wait_until

pytestmark = [pytest.mark.pod, pytest.mark.heavy, pytest.mark.xdist_group("serve")]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path)
    job = workspace.root / "group_vars" / "job_tiny.yml"
    job.write_text(TINY_JOB + "webhook_overrides: [tiny_epochs, tiny_exit]\n")
    return workspace


@pytest.fixture
def served(workspace: Workspace) -> Iterator[Serving]:
    serving = Served(workspace, PENNYPOD_ADMIN_TOKEN=ADMIN)
    serving.start()
    yield serving
    serving.close()


def check_succeeded(served: Serving, workspace: Workspace, run: str) -> None:
    status = served.wait_for(run, limit_s=280)
    assert status["outcome"] == "succeeded", json.dumps(status, indent=1) + served.log()
    assert workspace.pods() == []
    document = workspace.document()
    assert document["run"] == run
    assert document["pods_still_billing"] == 0
    (weights,) = [item for item in document["artifacts"] if item["kind"] == "weights"]
    assert (workspace.artifacts / run / weights["path"]).stat().st_size == weights["bytes"]
    receipts = json.loads((workspace.artifacts / run / "receipt.json").read_text())["pods"]
    assert len(receipts) == len(document["attempts"]) == 1


def playbooks_of(run: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PENNYPOD_ORCHESTRATED_RUN") == run and "ansible-playbook" in str(
                process.cmdline()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_from_the_webhook_to_weights_and_receipt(served: Serving, workspace: Workspace) -> None:
    run = served.start_run(overrides={"tiny_epochs": 25})
    served.wait_for(run, stage="watch", limit_s=280)
    wait_until(lambda: "pennypod_runs_watched 1.0" in served.metrics(), 20, "the run waits")
    assert playbooks_of(run) == [], "a training that goes on costs no process"
    page = requests.get(served.url, timeout=10).text
    for shown in (run, "Live pods: 1", "Running: 1", "deadline in"):
        assert shown in page
    served.kill()  # nobody but its guard is there for the pod now
    served.start()
    check_succeeded(served, workspace, run)
    page = requests.get(served.url, timeout=10).text
    for shown in (run, "Nothing bills.", "succeeded", "saved"):
        assert shown in page


def test_killed_while_it_launches_and_again_at_once(served: Serving, workspace: Workspace) -> None:
    run = served.start_run(overrides={"tiny_epochs": 25})
    wait_until(workspace.pods, 200, "a pod is there")
    served.kill()
    assert len(workspace.pods()) == 1
    served.start()
    served.kill()
    served.start()
    check_succeeded(served, workspace, run)


def test_a_cancelled_run_ends_its_pod_whatever_it_does(served: Serving, workspace: Workspace) -> None:
    run = served.start_run(overrides={"tiny_epochs": 600})
    wait_until(workspace.pods, 200, "a pod is there")
    served.post({"action": "train_cancel", "run": run})
    assert served.wait_for(run, limit_s=120)["outcome"] == "cancelled"
    assert workspace.pods() == []


def test_a_training_that_fails_ends_as_failed(served: Serving, workspace: Workspace) -> None:
    run = served.start_run(overrides={"tiny_epochs": 1, "tiny_exit": 3})
    status = served.wait_for(run, limit_s=280)
    assert status["outcome"] == "failed"
    assert "3" in status["reason"]
    assert workspace.pods() == []
