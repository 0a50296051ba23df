"""`ansible-playbook train.yml` from the repository's root, on real local pods: what it promises and how it says no."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pennypod.ledger import STAGES, Outcome
from pennypod.providers.registry import all_providers
from workspace import BIN, REPOSITORY, Workspace, wait_until

pytestmark = pytest.mark.pod


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    assert workspace.pods() == []


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The distinct error lines a user sees."""
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]


def check_success(document: dict[str, Any]) -> None:
    assert document["outcome"] == Outcome.SUCCEEDED
    assert document["pods_still_billing"] == 0
    assert list(document["stages"]) == list(STAGES)
    assert all(seconds > 0 for seconds in document["stages"].values())
    assert 0 < document["cost_usd"] <= document["worst_case_usd"]
    (weights,) = [item for item in document["artifacts"] if item["kind"] == "weights"]
    home = Path(document["artifacts_dir"]) / weights["path"]
    assert (home.stat().st_size, sha256(home)) == (weights["bytes"], weights["sha256"])
    assert (document["fuse"]["armed"], document["fuse"]["has_key"]) == (True, True)


def test_the_demo_trains_and_leaves_nothing_behind(workspace: Workspace) -> None:
    done = workspace.play(job="demo")
    assert done.returncode == 0, done.stdout + done.stderr
    document = workspace.document()
    check_success(document)
    assert "epoch 8/8" in (Path(document["artifacts_dir"]) / "train.log").read_text()
    assert done.stdout.rstrip().endswith("pods still billing: 0")
    for said in (*STAGES, document["run"], "epoch 8/8", "sha256"):
        assert said in done.stdout
    (weights,) = [item for item in document["artifacts"] if item["kind"] == "weights"]
    assert zipfile.is_zipfile(Path(document["artifacts_dir"]) / weights["path"])
    receipt = json.loads((Path(document["artifacts_dir"]) / "receipt.json").read_text())
    (pod,) = receipt["pods"]
    assert [step["answer"] for step in pod["proof"]][-2:] == ["absent", "absent"]
    graph = subprocess.run(
        [BIN / "ansible-inventory", "--graph", "billing"],
        cwd=workspace.root,
        env=workspace.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert document["run"] not in graph.stdout


def test_two_runs_of_one_job_do_not_disturb_each_other(workspace: Workspace) -> None:
    done = workspace.play(job="tiny,tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = workspace.documents()
    for document in (first, second):
        check_success(document)
    assert first["run"] != second["run"]
    assert first["attempts"][0]["pod_id"] != second["attempts"][0]["pod_id"]
    # They overlapped: the second pod was rented before the first was gone.
    rented = [json.loads((Path(d["artifacts_dir"]) / "receipt.json").read_text())["pods"][0] for d in (first, second)]
    assert max(pod["rented_at"] for pod in rented) < min(pod["gone_at"] for pod in rented)


@pytest.mark.heavy
def test_two_commands_at_once_do_not_disturb_each_other(workspace: Workspace, tmp_path: Path) -> None:
    started = [workspace.start(job="tiny", log=tmp_path / f"{number}.log") for number in (1, 2)]
    codes = [process.wait(timeout=250) for process in started]
    assert codes == [0, 0], "".join((tmp_path / f"{number}.log").read_text() for number in (1, 2))
    first, second = workspace.documents()
    check_success(first)
    check_success(second)


@pytest.mark.heavy
def test_one_failing_arm_does_not_harm_the_other(workspace: Workspace) -> None:
    bad = (workspace.root / "group_vars" / "job_tiny.yml").read_text().replace("default(0)", "default(3)")
    (workspace.root / "group_vars" / "job_unlucky.yml").write_text(bad)
    done = workspace.play(job="tiny,unlucky")
    assert done.returncode != 0
    assert {d["job"]: d["outcome"] for d in workspace.documents()} == {"tiny": "succeeded", "unlucky": "failed"}


def test_a_plan_rents_nothing(workspace: Workspace) -> None:
    done = workspace.play(job="tiny", plan_only="true")
    assert done.returncode == 0, done.stdout + done.stderr
    document = workspace.document()
    assert (document["attempts"], document["outcome"]) == ([], "cancelled")
    assert "worst case $" in done.stdout
    assert "lost" not in done.stdout, "where there was no pod no checkpoint was lost"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"max_cost_usd": "0.0001"}, "over max_cost_usd"),
        ({"max_cost_usd_per_day": "0.0001"}, "it would break max_cost_usd_per_day"),
        ({"max_price_usd_per_h": "0.01"}, "no offer fits"),
        ({"dataset": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"job": "nonesuch"}, "known jobs are"),
        ({"plan_only": "yess"}, "yess"),
        ({"max_cost_usd": "abc"}, "max_cost_usd"),
        ({"training_stall_minutes": "abc"}, "training_stall_minutes must be a number"),
        ({"bootstrap_numpy": "new"}, "bootstrap_numpy must be one of: auto"),
        ({"job": "No-Such"}, "lower-case"),
        ({"job": ""}, "job=NAME"),
    ],
    ids=["cost", "day", "price", "dataset", "job", "plan-only", "cost-word", "stall", "numpy", "job-name", "no-job"],
)
def test_wrong_input_is_one_line_and_rents_nothing(workspace: Workspace, extra: dict[str, str], said: str) -> None:
    done = workspace.play(**({"job": "tiny"} | extra))
    assert done.returncode != 0
    (line,) = errors(done)
    assert said in line
    for run in workspace.ledger().runs():
        assert workspace.ledger().attempts(run.run) == []
        assert run.outcome == Outcome.FAILED
        assert said in (run.reason or "")


def test_a_data_set_that_was_named_is_never_made(workspace: Workspace) -> None:
    """The demo makes its own where there is none; a misspelt path is no wish for that."""
    missing = workspace.root / "data" / "misspelt"
    done = workspace.play(job="demo", dataset=missing)
    assert done.returncode != 0
    (line,) = errors(done)
    assert str(missing) in line
    assert not missing.exists()
    assert workspace.document()["attempts"] == []


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"max_cost": "0.01"}, "did you mean max_cost_usd?"),
        ({"max_cost_usd": "-1"}, "max_cost_usd is -1: give a number of dollars"),
        ({"provider": "vats"}, "there is no provider 'vats'"),
        ({"provider": "vast"}, "VAST_API_KEY is not set"),
        ({"job": "elsewhere"}, "there is no provider 'lunar'"),
    ],
    ids=["typo", "cap", "provider", "key", "job-file"],
)
def test_what_is_wrong_at_first_sight_opens_no_run(workspace: Workspace, extra: dict[str, str], said: str) -> None:
    job = (workspace.root / "group_vars" / "job_tiny.yml").read_text()
    (workspace.root / "group_vars" / "job_elsewhere.yml").write_text(f"{job}pod_provider: lunar\n")
    chosen = {"provider": ""} if extra.get("job") else {}
    done = workspace.play(**({"job": "tiny"} | chosen | extra))
    assert done.returncode != 0
    (line,) = errors(done)
    assert said in line
    assert workspace.ledger().runs() == []


def test_check_mode_rents_nothing_and_opens_no_run(workspace: Workspace) -> None:
    done = workspace.play("--check", job="tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert workspace.ledger().runs() == []


@pytest.mark.heavy
def test_a_run_that_its_deadline_ends_is_no_success(workspace: Workspace) -> None:
    tight = json.dumps({"pod_boot_minutes": 0.1, "pod_train_minutes": 0.1, "training_reserve_s": 0})
    done = workspace.play("-e", tight, job="tiny", tiny_epochs=120)
    assert done.returncode != 0
    assert workspace.document()["outcome"] in ("cancelled", "failed")


@pytest.mark.heavy
def test_a_pod_that_is_taken_away_in_mid_training_is_said_to_be_gone(workspace: Workspace, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = workspace.start(job="tiny", tiny_epochs=100, log=log)
    wait_until(lambda: "/100" in log.read_text(), 120, "the training runs")
    started = time.monotonic()
    for pod in workspace.pods():
        all_providers(workspace.settings, workspace.environment)["local"].destroy(pod.pod_id)
    assert process.wait(timeout=100) != 0
    assert time.monotonic() - started < 60
    assert "the pod is gone" in (workspace.document()["reason"] or ""), log.read_text()


@pytest.mark.heavy
def test_a_malformed_job_file_names_its_line(workspace: Workspace) -> None:
    (workspace.root / "group_vars" / "job_odd.yml").write_text("training_command: x\nnumbers: [1, 2\n")
    done = workspace.play(job="odd")
    assert done.returncode != 0
    (line,) = errors(done)
    assert "job_odd.yml, line 3" in line


@pytest.mark.heavy
def test_a_wrong_type_in_a_job_file_is_one_line(workspace: Workspace) -> None:
    job = workspace.root / "group_vars" / "job_tiny.yml"
    job.write_text(job.read_text() + "pod_gpu_count: many\n")
    done = workspace.play(job="tiny")
    assert done.returncode != 0
    (line,) = errors(done)
    assert "pod_gpu_count" in line
    assert workspace.document()["attempts"] == []


@pytest.mark.heavy
def test_no_container_engine_is_one_line(workspace: Workspace, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "ssh", "ssh-keygen", "tar", "python3", "env", "cat", "rm", "mkdir", "chmod", "echo"):
        found = shutil.which(name)
        assert found, name
        (tools / name).symlink_to(found)
    done = workspace.play(job="tiny", env={"PATH": f"{BIN}:{tools}"})
    assert done.returncode != 0
    (line,) = errors(done)
    assert "podman" in line


@pytest.mark.heavy
def test_a_taken_port_is_one_line(workspace: Workspace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = workspace.play(job="tiny", env={"PENNYPOD_LOCAL_SSH_PORT": str(port)})
    assert done.returncode != 0
    (line,) = errors(done)
    assert str(port) in line
    assert workspace.document()["outcome"] == "failed"


def test_a_trainer_that_fails_is_one_line_with_its_last_words(workspace: Workspace) -> None:
    done = workspace.play(job="tiny", tiny_exit=1, tiny_epochs=1)
    assert done.returncode != 0
    (line,) = errors(done)
    assert "out of luck" in line
    document = workspace.document()
    assert (document["outcome"], document["pods_still_billing"]) == ("failed", 0)
    assert "out of luck" in document["reason"]
    assert (Path(document["artifacts_dir"]) / "train.log").exists()


def test_a_trainer_that_writes_no_weights_is_one_line(workspace: Workspace) -> None:
    job = workspace.root / "group_vars" / "job_tiny.yml"
    job.write_text(job.read_text() + "training_env: {TINY_NO_WEIGHTS: 'yes'}\n")
    done = workspace.play(job="tiny", tiny_epochs=1)
    assert done.returncode != 0
    (line,) = errors(done)
    assert "best.npz" in line
    assert workspace.document()["outcome"] == "failed"


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk is made with a small tmpfs, which needs root")
def test_a_full_disk_here_is_one_line_and_leaves_no_pod(workspace: Workspace, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=True)
    try:
        done = workspace.play(job="tiny", tiny_epochs=1, artifacts_dir=small)
        assert done.returncode != 0
        (line,) = errors(done)
        assert "room" in line or "space" in line or "full" in line
        (run,) = workspace.ledger().runs()
        assert run.outcome == Outcome.FAILED
        assert all(attempt.final for attempt in workspace.ledger().attempts(run.run))
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.heavy
@pytest.mark.timeout(3000)
def test_the_fdi_smoke_run_brings_a_loadable_detector_home(workspace: Workspace, tmp_path: Path) -> None:
    sample = tmp_path / "sample"
    script = REPOSITORY / "python" / "trainers" / "make_sample_data.py"
    subprocess.run([sys.executable, script, "yolo", sample], check=True)
    command = workspace.command(job="fdi", smoke="true", dataset=sample)
    done = subprocess.run(
        command, cwd=workspace.root, env=workspace.environment, capture_output=True, text=True, timeout=2900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = workspace.document()
    check_success(document)
    (weights,) = [item for item in document["artifacts"] if item["kind"] == "weights"]
    with zipfile.ZipFile(Path(document["artifacts_dir"]) / weights["path"]) as file:
        assert file.testzip() is None
        assert any(name.endswith("data.pkl") for name in file.namelist())
    # The trainer itself loads best.pt again for its last validation, and says what it scores.
    log = (Path(document["artifacts_dir"]) / "train.log").read_text()
    assert "best.pt" in log
