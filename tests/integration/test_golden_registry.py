"""A golden image goes to a registry and from there, by its digest, to simulated pods of Vast and RunPod."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import canaries
import pytest
from oci_registry import PASSWORD, USER, oci_registry
from pennypod.golden import GoldenStore
from pennypod.providers.local import LocalProvider
from simulated import Simulator, simulator
from workspace import BIN, Workspace

pytestmark = [pytest.mark.pod, pytest.mark.heavy, pytest.mark.xdist_group("golden")]


@dataclass
class Bakehouse:
    """A workspace whose job `tiny` was baked and pushed to the registry at `host`."""

    workspace: Workspace
    host: str

    @property
    def login(self) -> dict[str, str]:
        return {"PENNYPOD_REGISTRY_LOGIN": f"{USER}:{PASSWORD}@{self.host}"}


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator("--pods", "container", "--speed", "1", "--seed", "11") as running:
        yield running


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bakehouse]:
    workspace = Workspace(tmp_path_factory.mktemp("golden"))
    job = workspace.root / "group_vars" / "job_tiny.yml"
    job.write_text(job.read_text() + "bootstrap_packages: [rsync]\n")
    with oci_registry(tmp_path_factory.mktemp("registry") / "registry") as host:
        house = Bakehouse(workspace, host)
        try:
            done = workspace.play(playbook="bake.yml", job="tiny", registry=f"{host}/me/golden", env=house.login)
            assert done.returncode == 0, done.stdout + done.stderr
            yield house
        finally:
            for golden in GoldenStore(workspace.home).all():
                LocalProvider(workspace.settings, workspace.environment).remove_image(golden.name)


def test_a_push_is_confirmed_by_its_digest_and_can_be_repeated(pushed: Bakehouse) -> None:
    (golden,) = GoldenStore(pushed.workspace.home).all()
    assert re.fullmatch(rf"{re.escape(pushed.host)}/me/golden@sha256:[0-9a-f]{{64}}", golden.remote)
    again = [BIN / "pennypod", "images", "push", golden.name, f"{pushed.host}/me/golden"]
    environment = pushed.workspace.environment | pushed.login
    done = subprocess.run(again, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{golden.remote}\n", "")
    refused = subprocess.run(
        again,
        env=environment | {"PENNYPOD_REGISTRY_LOGIN": f"{USER}:wrong@{pushed.host}"},
        capture_output=True,
        text=True,
    )
    assert refused.returncode != 0
    assert f"{pushed.host} refuses the login of {USER}" in refused.stderr
    assert GoldenStore(pushed.workspace.home).all() == [golden]


@pytest.mark.parametrize("provider", ["vast", "runpod"])
def test_a_pod_elsewhere_pulls_it_by_digest_and_its_bootstrap_changes_nothing(
    pushed: Bakehouse, sim: Simulator, provider: str
) -> None:
    workspace = pushed.workspace
    (golden,) = GoldenStore(workspace.home).all()
    key = canaries.new_key(provider)
    places = {"VAST_URL": sim.url, "RUNPOD_API_BASE_URL": f"{sim.url}/v2", f"{provider.upper()}_API_KEY": key}
    shown = {"ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default"}
    with canaries.Watch([PASSWORD], sim.pid) as watch:
        done = workspace.play(
            job="tiny",
            provider=provider,
            tiny_epochs=1,
            env=places | pushed.login | shown,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    document = max(workspace.documents(), key=lambda document: document["started"])
    assert (document["outcome"], document["provider"], document["pods_still_billing"]) == ("succeeded", provider, 0)
    digest = golden.remote.partition("@")[2]
    assert document["image"] == {"reference": golden.remote, "digest": digest}
    assert [attempt["state"] for attempt in document["attempts"]] == ["gone"]
    tasks = dict(part.partition("\n")[::2] for part in done.stdout.split("\nTASK [")[1:])
    bootstrap = {name: said for name, said in tasks.items() if name.startswith("bootstrap : ")}
    assert bootstrap
    assert [name for name, said in bootstrap.items() if re.search(r"^changed:", said, re.MULTILINE)] == []
    # The login went to the registry and the service's API, and nowhere else.
    assert watch.found == set()
    assert PASSWORD not in done.stdout + done.stderr
    assert canaries.in_files([PASSWORD], [workspace.home, workspace.artifacts]) == []
    assert sim.live() == []


def test_without_a_login_for_its_pods_nothing_is_rented_in_vain(pushed: Bakehouse, sim: Simulator) -> None:
    workspace = pushed.workspace
    (golden,) = GoldenStore(workspace.home).all()
    env = {"VAST_URL": sim.url, "VAST_API_KEY": canaries.new_key("vast")}
    done = workspace.play(job="tiny", provider="vast", tiny_epochs=1, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning: {golden.name} is in {pushed.host}, which lets no pods in" in done.stdout
    document = max(workspace.documents(), key=lambda document: document["started"])
    assert document["image"]["reference"] != golden.remote
    assert len(document["attempts"]) == 1
