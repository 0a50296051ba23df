"""A bake on a rented pod: sealed, pushed by its host, rid of what the host put in, and trained from by its digest."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import canaries
import pytest
import requests
from oci_registry import PASSWORD, USER, oci_registry
from pennypod.fuse import AFTER_DEADLINE_S
from pennypod.golden import GoldenStore
from pennypod.model.ids import parse_lease
from pennypod.providers.local import LocalProvider
from pennypod.providers.local.engine import Engine
from simulated import Simulator, simulator
from workspace import Workspace, wait_until

pytestmark = [pytest.mark.pod, pytest.mark.heavy, pytest.mark.xdist_group("golden")]

TAKEN_OFF = re.compile(
    r"(^|/)(ssh_host_[^/]*|authorized_keys|\.[^/]*_history)$|^root/\.(ssh|cache)/.|^root/pennypod/(?!cache(/|$)|\.wh)."
)


@dataclass
class Bakehouse:
    """A workspace with a job to bake, a registry and a simulated Vast that may push to it."""

    workspace: Workspace
    host: str
    sim: Simulator
    key: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "VAST_URL": self.sim.url,
            "VAST_API_KEY": self.key,
            "PENNYPOD_REGISTRY_SNAPSHOT_LOGIN": f"{USER}:{PASSWORD}@{self.host}",
        }

    def bake(self, **extra: Any) -> Any:
        return self.workspace.play(
            playbook="bake.yml", job="tiny", provider="vast", registry=f"{self.host}/me/golden", env=self.env, **extra
        )

    def get(self, path: str) -> requests.Response:
        kinds = "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"
        url = f"http://{self.host}/v2/me/golden/{path}"
        return requests.get(url, auth=(USER, PASSWORD), headers={"Accept": kinds}, timeout=60)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bakehouse]:
    workspace = Workspace(tmp_path_factory.mktemp("golden"))
    job = workspace.root / "group_vars" / "job_tiny.yml"
    job.write_text(job.read_text() + "bootstrap_packages: [rsync]\n")
    with (
        oci_registry(tmp_path_factory.mktemp("registry") / "registry") as host,
        simulator("--pods", "container", "--speed", "1", "--seed", "12") as sim,
    ):
        yield Bakehouse(workspace, host, sim, canaries.new_key("vast"))


@pytest.fixture(scope="module")
def baked(house: Bakehouse) -> Bakehouse:
    with canaries.Watch([PASSWORD], house.sim.pid) as watch:
        done = house.bake()
    assert done.returncode == 0, done.stdout + done.stderr
    assert watch.found == set(), "the login went to the registry and the service's API, and nowhere else"
    assert PASSWORD not in done.stdout + done.stderr
    return house


def test_a_bake_on_a_rented_pod_ends_like_any_run(baked: Bakehouse) -> None:
    (golden,) = GoldenStore(baked.workspace.home).all()
    document = baked.workspace.documents()[0]
    assert (document["outcome"], document["provider"], document["pods_still_billing"]) == ("succeeded", "vast", 0)
    assert document["reason"] == f"the image is baked: {golden.name}"
    assert re.fullmatch(rf"{re.escape(baked.host)}/me/golden@sha256:[0-9a-f]{{64}}", golden.remote)
    assert "rsync" in golden.debian_packages
    assert "numpy" in golden.python_packages
    assert golden.bytes > golden.layer_bytes > 0
    assert baked.sim.live() == []
    assert canaries.in_files([PASSWORD], [baked.workspace.home, baked.workspace.artifacts]) == []


def test_nothing_of_the_pod_is_in_the_image(baked: Bakehouse) -> None:
    (golden,) = GoldenStore(baked.workspace.home).all()
    public_key = (baked.workspace.home / "runs" / golden.run / "id_ed25519.pub").read_text().split()[1]
    manifest = baked.get(f"manifests/{golden.digest}").json()
    config = baked.get(f"blobs/{manifest['config']['digest']}").text
    private = [public_key, baked.key, PASSWORD, golden.run, "CONTAINER_ID", "CONTAINER_API_KEY", "PENNYPOD_"]
    told = json.loads(config)["config"].pop("Labels")
    assert told["pennypod.golden.name"] == golden.name
    without_labels = json.dumps({**json.loads(config), "config": {**json.loads(config)["config"], "Labels": {}}})
    assert [item for item in private if item in without_labels] == []
    assert any(item.startswith("PATH=") for item in json.loads(config)["config"]["Env"])
    added = manifest["layers"][-1]["digest"]
    names = set()
    with tarfile.open(fileobj=BytesIO(baked.get(f"blobs/{added}").content)) as layer:
        for member in layer:
            names.add(member.name.removeprefix("./"))
            if member.isfile() and member.size < 1_000_000:
                content = layer.extractfile(member).read()  # type: ignore[union-attr]
                assert public_key.encode() not in content, member.name
                assert baked.key.encode() not in content, member.name
    assert "usr/bin/rsync" in names
    assert [name for name in names if TAKEN_OFF.search(name) and "/.wh." not in name] == []
    # The host's own push was of the pod as it was; no tag leads there any more.
    tags = baked.get("tags/list").json()["tags"]
    shown = {tag: hashlib.sha256(baked.get(f"manifests/{tag}").content).hexdigest() for tag in tags}
    assert set(shown.values()) == {golden.digest.removeprefix("sha256:")}


def test_a_run_starts_from_it_and_its_bootstrap_changes_nothing(baked: Bakehouse) -> None:
    (golden,) = GoldenStore(baked.workspace.home).all()
    pull = {"PENNYPOD_REGISTRY_PULL_LOGIN": f"{USER}:{PASSWORD}@{baked.host}"}
    shown = {"ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default"}
    done = baked.workspace.play(job="tiny", provider="vast", tiny_epochs=1, env=baked.env | pull | shown)
    assert done.returncode == 0, done.stdout + done.stderr
    document = max(baked.workspace.documents(), key=lambda document: document["started"])
    assert document["image"] == {"reference": golden.remote, "digest": golden.digest}
    tasks = dict(part.partition("\n")[::2] for part in done.stdout.split("\nTASK [")[1:])
    bootstrap = {name: said for name, said in tasks.items() if name.startswith("bootstrap : ")}
    assert bootstrap
    assert [name for name, said in bootstrap.items() if re.search(r"^changed:", said, re.MULTILINE)] == []
    assert baked.sim.live() == []


def test_without_a_place_or_a_login_nothing_is_rented(house: Bakehouse) -> None:
    before = house.sim.creates()
    env = {name: value for name, value in house.env.items() if "REGISTRY" not in name}
    done = house.workspace.play(
        playbook="bake.yml", job="tiny", provider="vast", registry=f"{house.host}/me/golden", env=env
    )
    assert done.returncode != 0
    assert "set PENNYPOD_REGISTRY_SNAPSHOT_LOGIN=USER:TOKEN@HOST" in done.stdout + done.stderr
    done = house.workspace.play(playbook="bake.yml", job="tiny", provider="vast", env=house.env)
    assert done.returncode != 0
    assert "say where to, with -e registry=HOST/REPO" in done.stdout + done.stderr
    assert house.sim.creates() == before


def lease_left_s(engine: Engine, container: str) -> float:
    """What is left of the lease of a pod's fuse, by the pod's own clock."""
    lease, uptime = engine.check("exec", container, "cat", "/dev/shm/pennypod-lease", "/proc/uptime").split()[:2]
    return float(lease) - float(uptime)


def test_a_bake_that_is_killed_while_its_host_pushes_leaves_no_pod_and_no_image(
    baked: Bakehouse, tmp_path: Path
) -> None:
    known = GoldenStore(baked.workspace.home).all()
    baked.sim.fault("vast.create", "snapshot_lost")
    workspace, log = baked.workspace, tmp_path / "log"
    command = workspace.command(playbook="bake.yml", job="tiny", provider="vast", registry=f"{baked.host}/me/golden")
    with log.open("wb") as file:
        bake = subprocess.Popen(
            command,
            cwd=workspace.root,
            env=workspace.environment | baked.env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    wait_until(lambda: "waiting for the host's push" in log.read_text(), 120, "the host is waited for")
    (pod,) = baked.sim.live()
    run = parse_lease(pod["name"]).run  # type: ignore[union-attr]
    deadline = workspace.ledger().run(run).deadline
    assert deadline is not None
    held_s = lease_left_s(LocalProvider(workspace.settings, workspace.environment).engine, pod["name"])
    assert abs(held_s - (deadline + AFTER_DEADLINE_S - time.time())) < 30, "the lease holds until the run's deadline"
    bake.send_signal(signal.SIGKILL)
    bake.wait(10)
    wait_until(lambda: baked.sim.live() == [], 60, "the pod is gone")
    wait_until(lambda: not workspace.ledger().open_runs(), 60, "the run is closed")
    assert GoldenStore(workspace.home).all() == known
