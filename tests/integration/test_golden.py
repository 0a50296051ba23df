"""`bake.yml` on real local pods: an image without secrets, runs that start from it, nothing left of one cut off."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pennypod.golden import GoldenStore
from pennypod.providers.local import LocalProvider
from pennypod.providers.local.saving import RUN_LABEL, tags
from workspace import BIN, Workspace, wait_until

pytestmark = [pytest.mark.pod, pytest.mark.heavy, pytest.mark.xdist_group("golden")]

# What no layer may hold, whatever a later one hides.
FORBIDDEN = re.compile(
    r"(^|/)(ssh_host_[^/]*|authorized_keys|\.[^/]*_history|pennypod_sshd_config|pennypod_key_of)$"
    r"|^root/(\.ssh|\.cache)/.|^root/pennypod/(?!cache(/|$)).|^var/cache/apt/archives/.*\.deb$|^var/lib/apt/lists/.*_Packages"
)


def add_job(workspace: Workspace, weights: bytes = b"weights" * 1000) -> None:
    """The tiny job with something to install and something to fetch."""
    file = workspace.root / "yolo.pt"
    file.write_bytes(weights)
    wanted = {"url": f"file://{file}", "sha256": hashlib.sha256(weights).hexdigest(), "dest": "yolo.pt"}
    more = f"bootstrap_packages: [rsync]\nbootstrap_base_weights: [{json.dumps(wanted)}]\n"
    tiny = (workspace.root / "group_vars" / "job_tiny.yml").read_text()
    (workspace.root / "group_vars" / "job_baked.yml").write_text(tiny + more)


def provider_of(workspace: Workspace) -> LocalProvider:
    return LocalProvider(workspace.settings, workspace.environment)


def images_of(workspace: Workspace, run: str) -> list[str]:
    engine = provider_of(workspace).engine
    return engine.check("images", "--all", "--quiet", "--filter", f"label={RUN_LABEL}={run}").split()


def forget_images(workspace: Workspace) -> None:
    for golden in GoldenStore(workspace.home).all():
        provider_of(workspace).remove_image(golden.name)


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace whose job `baked` was baked once."""
    workspace = Workspace(tmp_path_factory.mktemp("golden"))
    add_job(workspace)
    try:
        done = workspace.play(playbook="bake.yml", job="baked")
        assert done.returncode == 0, done.stdout + done.stderr
        yield workspace
        assert workspace.pods() == []
    finally:
        forget_images(workspace)


def test_a_bake_ends_like_any_run_and_shows_its_image(baked: Workspace) -> None:
    document = baked.documents()[0]
    (golden,) = GoldenStore(baked.home).all()
    assert (document["outcome"], document["pods_still_billing"]) == ("succeeded", 0)
    assert document["reason"] == f"the image is baked: {golden.name}"
    assert re.fullmatch(r"golden-baked-v\d+", golden.name)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", golden.digest)
    assert "rsync" in golden.debian_packages
    assert "numpy" in golden.python_packages
    assert golden.bytes > golden.layer_bytes > 0
    shown = subprocess.run(
        [BIN / "pennypod", "images", "--json"], env=baked.environment, capture_output=True, text=True, check=True
    )
    assert json.loads(shown.stdout) == [{**golden.as_document(), "there": True}]


def test_a_run_starts_from_it_and_its_bootstrap_changes_nothing(baked: Workspace) -> None:
    (golden,) = GoldenStore(baked.home).all()
    done = baked.play(job="baked", tiny_epochs=1, env={"ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default"})
    assert done.returncode == 0, done.stdout + done.stderr
    document = newest(baked)
    assert document["outcome"] == "succeeded"
    assert document["image"] == {"reference": golden.reference, "digest": golden.digest}
    assert happened(baked, "rent", f"starting from {golden.name}")
    tasks = dict(part.partition("\n")[::2] for part in done.stdout.split("\nTASK [")[1:])
    bootstrap = {name: said for name, said in tasks.items() if name.startswith("bootstrap : ")}
    assert len([name for name in bootstrap if "state of all eight errata" in name]) == 1
    assert [name for name, said in bootstrap.items() if re.search(r"^changed:", said, re.MULTILINE)] == []


def newest(workspace: Workspace) -> dict[str, Any]:
    return max(workspace.documents(), key=lambda document: document["started"])


def test_without_its_image_a_run_says_so_and_bootstraps(baked: Workspace) -> None:
    (golden,) = GoldenStore(baked.home).all()
    engine = provider_of(baked).engine
    kept = f"localhost/pennypod-kept-by-a-test:{golden.run}"
    engine.check("tag", golden.reference, kept)
    engine.check("rmi", golden.reference)
    try:
        done = baked.play(job="baked", tiny_epochs=1)
    finally:
        engine.check("tag", kept, golden.reference)
        engine.check("rmi", kept)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning: {golden.name} is missing on the engine" in done.stdout
    assert newest(baked)["image"] == {"reference": "stock", "digest": None}


def test_no_layer_of_it_holds_a_secret(baked: Workspace, tmp_path: Path) -> None:
    (golden,) = GoldenStore(baked.home).all()
    archive = tmp_path / "image.tar"
    provider_of(baked).engine.check("save", "-o", str(archive), golden.reference, timeout_s=280)
    public_key = (baked.home / "runs" / golden.run / "id_ed25519.pub").read_text().split()[1]
    lease = f"pennypod-{golden.run}"
    names: set[str] = set()
    with tarfile.open(archive) as tar:
        (about,) = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = tar.extractfile(about["Config"]).read().decode()  # type: ignore[union-attr]
        assert not re.search(f"{re.escape(public_key)}|{lease}|PENNYPOD_", config)
        for layer in about["Layers"]:
            raw = tar.extractfile(layer)
            assert raw is not None
            with tarfile.open(fileobj=raw) as files:
                for member in files:
                    names.add(member.name.removeprefix("./"))
                    if member.isfile() and member.size < 1_000_000:
                        content = files.extractfile(member).read()  # type: ignore[union-attr]
                        assert public_key.encode() not in content, member.name
                        assert lease.encode() not in content, member.name
    assert "usr/bin/rsync" in names
    assert "root/pennypod/cache/yolo.pt" in names
    assert [name for name in sorted(names) if FORBIDDEN.search(name)] == []


def test_two_bakes_at_once_get_two_versions(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    try:
        done = workspace.play(playbook="bake.yml", job="tiny,tiny")
        assert done.returncode == 0, done.stdout + done.stderr
        first, second = GoldenStore(workspace.home).all()
        assert second.version == first.version + 1
        assert {first.name, second.name} <= set(tags(provider_of(workspace).engine))
        pruned = subprocess.run(
            [BIN / "pennypod", "images", "prune"], env=workspace.environment, capture_output=True, text=True, check=True
        )
        assert pruned.stdout == f"removed {first.name}\n"
        assert GoldenStore(workspace.home).all() == [second]
    finally:
        forget_images(workspace)


MOMENTS = [
    (signal.SIGKILL, "bootstrap", "changed files of the pod"),
    (signal.SIGINT, "bootstrap", "saving image"),
    (signal.SIGKILL, "bootstrap", "is made after"),
]


@pytest.mark.parametrize(("how", "stage", "said"), MOMENTS)
def test_a_bake_that_is_cut_off_leaves_nothing(tmp_path: Path, how: signal.Signals, stage: str, said: str) -> None:
    workspace = Workspace(tmp_path)
    log = tmp_path / "log"
    with workspace.playing(log=log, playbook="bake.yml", job="tiny") as process:
        wait_until(lambda: happened(workspace, stage, said), 200, f"{stage}: {said}")
        os.kill(process.pid, how)
        process.wait(timeout=60)
        (run,) = workspace.ledger().runs()
        wait_until(lambda: workspace.ledger().run(run.run).closed is not None, 90, "the guard has closed the bake")
    assert workspace.pods() == []
    # The module that was saving may see the end of its run later than the guard.
    wait_until(lambda: images_of(workspace, run.run) == [], 60, "no image")
    assert GoldenStore(workspace.home).all() == []
    engine = provider_of(workspace).engine
    assert [row for row in engine.list_containers() if run.run in row["name"]] == []
    assert workspace.ledger().run(run.run).outcome == "cancelled"


def happened(workspace: Workspace, stage: str, said: str) -> bool:
    events: list[dict[str, Any]] = []
    for file in (workspace.home / "runs").glob("*/events.jsonl"):
        events += [json.loads(line) for line in file.read_text().splitlines()]
    return any(event["stage"] == stage and said in event["text"] for event in events)
