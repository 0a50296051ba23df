"""A real pod calls the orchestrator back: its end is acted on at once, and its token is left nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import canaries
import pytest
import requests
from loopback_sshd import free_port
from pennypod.callbacks import read_access
from pennypod.providers.registry import all_providers
from pod_bucket import pod_bridge
from serving import ADMIN, Served, Serving
from tcp_proxy import CuttingProxy
from workspace import TINY_JOB, Workspace, wait_until

pytestmark = [pytest.mark.pod, pytest.mark.heavy, pytest.mark.timeout(600), pytest.mark.xdist_group("serve")]

# The last line of its log is when the trainer ended, by the clock of this machine.
TIMED = 'training_command: sh "$PENNYPOD_CODE/train.sh" 12 0 && date +%s.%N\n'


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    command = next(line for line in TINY_JOB.splitlines() if line.startswith("training_command"))
    job = TINY_JOB.replace(command + "\n", TIMED) + "webhook_overrides: []\n"
    (workspace.root / "group_vars" / "job_tiny.yml").write_text(job)
    yield workspace
    for pod in workspace.pods():  # of a test that has failed
        all_providers(workspace.settings)["local"].destroy(pod.pod_id)


@pytest.fixture
def outside(workspace: Workspace) -> Iterator[str]:
    """This machine's address as its pods find it."""
    with pod_bridge(workspace.settings) as address:
        yield address


@pytest.fixture
def served(workspace: Workspace, outside: str) -> Iterator[Serving]:
    port = free_port()
    config = f"poll_s: 900\nprovider: local\npublic_url: http://{outside}:{port}"
    serving = Served(workspace, config, PENNYPOD_ADMIN_TOKEN=ADMIN)
    serving.port = port
    serving.start()
    yield serving
    serving.close()


def test_a_pod_that_calls_back_is_fetched_and_destroyed_at_once(
    served: Serving, workspace: Workspace, outside: str
) -> None:
    # As a reverse proxy does it: the orchestrator itself listens on loopback only.
    with CuttingProxy(served.port, host=outside, listen=served.port, cuts=0):
        run = served.start_run()
        wait_until(workspace.pods, 200, "a pod is there")
        folder = workspace.home / "runs" / run
        access = read_access(folder)
        assert access is not None
        places = [workspace.home, workspace.artifacts, served.log_file]
        # Kept for whoever starts the training, and for its owner only; else there is its hash.
        assert canaries.in_files([access.token], places, allowed=[folder / "callback.json"]) == []
        served.wait_for(run, stage="watch", limit_s=250)
        assert canaries.in_process_arguments([access.token]) == set()
        assert canaries.in_texts([access.token], served.shown(run)) == []
        status = served.wait_for(run, limit_s=250)
    assert status["outcome"] == "succeeded", status
    told = [entry for entry in status["timeline"] if entry["kind"] == "callback"]
    names = [entry["name"] for entry in told]
    assert (names[0], names[-1]) == ("started", "success")
    assert set(names[1:-1]) == {"epoch"}
    assert told[-2]["text"] == "epoch=12, epochs=12"

    trainer_ended = float((workspace.artifacts / run / "train.log").read_text().split()[-1])
    watch, finish = [entry["at"] for entry in status["timeline"] if entry["name"] in ("watch", "finish")]
    (attempt,) = workspace.ledger().attempts(run)
    assert attempt.gone is not None
    print(f"after the trainer's end: finish {finish - trainer_ended:.1f} s, gone {attempt.gone - trainer_ended:.1f} s")
    assert finish - max(watch, told[-1]["at"]) < 10, "the next look would have been in a quarter of an hour"

    again = requests.post(
        access.url.replace(outside, "127.0.0.1"),
        json={"event": "success"},
        headers={"Authorization": f"Bearer {access.token}"},
        timeout=10,
    )
    assert (again.status_code, again.json()["code"]) == (401, "token_invalid")
    assert canaries.in_files([access.token], places) == []
    assert canaries.in_texts([access.token], served.shown(run)) == []
