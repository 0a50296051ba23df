"""Whatever kills ansible-playbook in mid-training, the newest checkpoint is at home before the pod is gone."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pennypod.ledger import Outcome
from workspace import Workspace, wait_until

BOUND_S = 10.0
GRACE_S = 30.0
# A checkpoint each second, each one a file of its own, and a half-written one that is always the newest.
TRAINER = """\
mkdir -p runs/tiny/half
for epoch in $(seq 1 600); do
  python3 -c "
import os, sys, zipfile
folder = f'runs/tiny/{sys.argv[1]}'
os.makedirs(folder)
with zipfile.ZipFile(f'{folder}/part', 'w') as file:
    file.writestr('w.npy', os.urandom(300000))
os.rename(f'{folder}/part', f'{folder}/best.npz')
whole = open(f'{folder}/best.npz', 'rb').read()
open('runs/tiny/half/best.npz', 'wb').write(whole[:-30])
" "$epoch"
  echo "epoch $epoch/600 loss 0.5"
  sleep 1
done
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path)
    (made.root / "code" / "train.sh").write_text(TRAINER)
    return made


@contextmanager
def training(workspace: Workspace, log: Path, **extra: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The playbook in mid-training, with a checkpoint on its pod and none at home."""
    with workspace.playing(job="tiny", weights_early="false", log=log, **extra) as process:
        wait_until(lambda: process.poll() is not None or "epoch 2/600" in trained(workspace), 120, "the second epoch")
        assert process.poll() is None, log.read_text()[-3000:]
        assert not list(workspace.artifacts.glob("*/weights/*"))
        yield process


def trained(workspace: Workspace) -> str:
    return "".join(path.read_text() for path in workspace.artifacts.glob("*/train.log"))


def ended(workspace: Workspace, limit_s: float, record_property: pytest.RecordProperty) -> dict[str, Any]:
    """run.json once no pod is left and the run is closed."""
    seconds = wait_until(lambda: not workspace.pods(), limit_s, "no container is left")
    record_property("seconds_to_zero", round(seconds, 2))
    (run,) = workspace.ledger().runs()
    wait_until(lambda: workspace.ledger().run(run.run).closed is not None, 20, "the run is closed")
    wait_until(lambda: list(workspace.artifacts.glob("*/run.json")), 5, "run.json is written")
    document = workspace.document()
    assert (document["outcome"], document["pods_still_billing"]) == (Outcome.CANCELLED, 0)
    return document


@pytest.mark.pod
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.heavy)])
def test_the_newest_whole_checkpoint_is_home(
    workspace: Workspace, number: signal.Signals, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    with training(workspace, tmp_path / "playbook.log", escrow_grace_s=GRACE_S) as process:
        killed = time.time()
        os.kill(process.pid, number)
        process.wait(timeout=20)
        document = ended(workspace, BOUND_S + GRACE_S, record_property)
    end = document["weights_at_end"]
    assert end["state"] == "escrowed", end
    (weights,) = [item for item in document["artifacts"] if item["kind"] == "weights"]
    content = Path(document["artifacts_dir"], weights["path"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == weights["sha256"]
    assert len(content) > 300_000, "the half-written one came"
    assert end["epoch"] >= 2
    assert end["age_s"] < time.time() - killed + 3, "an old one came"


@pytest.mark.pod
@pytest.mark.heavy
def test_no_grace_destroys_at_once_and_the_loss_is_stated(
    workspace: Workspace, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    with training(workspace, tmp_path / "playbook.log", escrow_grace_s=0) as process:
        process.kill()
        process.wait(timeout=20)
        document = ended(workspace, BOUND_S, record_property)
    assert document["weights_at_end"]["state"] == "lost"
    assert not [item for item in document["artifacts"] if item["kind"] == "weights"]


@pytest.mark.pod
@pytest.mark.heavy
def test_a_failure_after_the_training_brings_the_checkpoint_home_in_the_teardown(
    workspace: Workspace, tmp_path: Path
) -> None:
    done = workspace.play(job="tiny", weights_early="false", training_wallclock_minutes=0.1, training_salvage_s=0)
    assert done.returncode != 0
    document = workspace.document()
    assert (document["outcome"], document["pods_still_billing"]) == (Outcome.FAILED, 0)
    assert document["weights_at_end"]["state"] == "escrowed", document["weights_at_end"]
    assert "checkpoint  brought home before the pod was destroyed" in done.stdout
