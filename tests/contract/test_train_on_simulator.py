"""The whole loop on simulated clouds: real pods, real SSH, the vendors' own shapes, and no key where none belongs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pennypod.ledger import Outcome
from simulated import KEYS, Simulator, simulator
from workspace import Workspace

pytestmark = pytest.mark.pod


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator("--pods", "container", "--speed", "1", "--seed", "11") as running:
        yield running


@pytest.fixture
def cloud(tmp_path: Path, sim: Simulator) -> Workspace:
    return Workspace(tmp_path)


def keys(sim: Simulator) -> dict[str, str]:
    return {
        "VAST_API_KEY": KEYS["vast"],
        "VAST_URL": sim.url,
        "RUNPOD_API_KEY": KEYS["runpod"],
        "RUNPOD_API_BASE_URL": f"{sim.url}/v2",
    }


@pytest.mark.parametrize("provider", ["auto", pytest.param("runpod", marks=pytest.mark.heavy)])
def test_a_job_trains_on_a_simulated_cloud(cloud: Workspace, sim: Simulator, provider: str) -> None:
    done = cloud.play(job="tiny", provider=provider, env=keys(sim))
    assert done.returncode == 0, done.stdout + done.stderr
    document = cloud.document()
    assert (document["outcome"], document["pods_still_billing"]) == (Outcome.SUCCEEDED, 0)
    assert document["provider"] in ("vast", "runpod")
    assert sim.live() == []
    meter = {pod["name"]: pod["micros"] for pod in sim.get("meter")["pods"]}
    for attempt in document["attempts"]:
        # Our estimate counts every second from the create call to the proof, so it may only be the higher one.
        assert meter[attempt["pod_name"]] <= attempt["cost_usd"] * 1e6 + 1
    no_key_at_rest(cloud)
    said = done.stdout + done.stderr
    assert not [key for key in KEYS.values() if key in said]


def no_key_at_rest(workspace: Workspace) -> None:
    """No file of the run, ledger and logs included, holds a key."""
    places = [workspace.home, workspace.artifacts]
    for path in (file for place in places for file in place.rglob("*") if file.is_file()):
        content = path.read_bytes()
        for key in KEYS.values():
            assert key.encode() not in content, path
