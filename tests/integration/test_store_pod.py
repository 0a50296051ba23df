"""A real pod keeps its checkpoints in the embedded store, which it reaches from its container, without a key for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pennypod.store import Checkpoints, open_bucket
from pod_bucket import pod_bucket
from workspace import Workspace

pytest.importorskip("boto3", reason="the store extra is not installed")
pytestmark = [pytest.mark.pod, pytest.mark.heavy, pytest.mark.xdist_group("store")]

# Keeps two checkpoints, waits until the second one is there, and tells all that it can see of its surroundings.
TRAINER = (
    "mkdir -p runs/x; for e in 1 2; do echo state $e > runs/x/last; echo epoch $e/2;"
    ' $PENNYPOD_CHECKPOINT_HOOK $e "$PWD/runs/x" last; done;'
    " for i in $(seq 300); do grep -qs '\"kept_epoch\": 2' ../store/state.json && break; sleep 0.1; done;"
    " cat ../store/log; env; cat /proc/1/environ | tr '\\0' '\\n';"
    ' sh "$PENNYPOD_CODE/train.sh" 1 0'
)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    assert workspace.pods() == []


def test_a_container_pod_keeps_its_checkpoints(workspace: Workspace) -> None:
    with pod_bucket(workspace.settings, workspace.home) as server:
        done = workspace.play(
            "-e", json.dumps({"training_command": TRAINER}), job="tiny", checkpoint_store="true", smoke="true"
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (document,) = workspace.documents()
        data = document["dataset"]
        assert (data["by"], data["pulled_files"], data["ssh_bytes"], data["why"]) == ("bucket", data["files"], 0, "")
        log = (workspace.artifacts / document["run"] / "train.log").read_text()
        assert "epoch 2 is kept" in log
        newest = Checkpoints(open_bucket(server.config), document["run"]).newest()
        assert newest is not None
        assert (newest.slot.attempt, newest.marker.epoch) == (1, 2)
        for secret in (server.config.secret_key, server.config.access_key):
            assert secret not in log + done.stdout + done.stderr
        assert "X-Amz-Signature" not in log + done.stdout + done.stderr


def test_the_second_run_uploads_nothing(workspace: Workspace) -> None:
    def data_of(**extra: object) -> tuple[dict[str, Any], str]:
        before = {document["run"] for document in workspace.documents()}
        done = workspace.play(job="tiny", dataset_store="true", smoke="true", tiny_epochs=1, **extra)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (document,) = [one for one in workspace.documents() if one["run"] not in before]
        found: dict[str, Any] = document["dataset"]
        assert found["files"] == 20
        return found, done.stdout + done.stderr

    with pod_bucket(workspace.settings, workspace.home) as server:
        first, _ = data_of()
        assert (first["by"], first["pulled_files"], first["ssh_bytes"]) == ("bucket", 20, 0)
        assert first["sent_bytes"] == first["bucket_bytes"] > 20 * 2000
        second, said = data_of()
        assert (second["name"], second["pulled_files"], second["sent_bytes"]) == (first["name"], 20, 0)
        assert server.config.secret_key not in said
