"""A webhook's run falls from region to region, from GPU type to GPU type and between the clouds, and tells of it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, Serving
from simulated import KEYS, Simulator, simulator
from workspace import TINY_JOB, Workspace

pytestmark = [pytest.mark.pod, pytest.mark.heavy, pytest.mark.timeout(600)]

GOOD = {"num_gpus": 1, "cuda_max_good": 13.0, "reliability": 0.99, "verified": True, "datacenter": True, "taken": 0}
MARKET = {
    "vast": {
        "machines": [
            {**GOOD, "gpu_name": gpu, "dph_per_gpu": price, "geolocation": place}
            for gpu, price in (("RTX 4090", 0.30), ("RTX 3090", 0.15))
            for place in ("Texas, US", "Hesse, DE")
        ]
    },
    "runpod": {
        "gpus": [
            {"id": f"NVIDIA GeForce {gpu}", "secure": price, "community": 0, "centers": {"US-TX-3": 4, "EU-RO-1": 4}}
            for gpu, price in (("RTX 4090", 0.69), ("RTX 3090", 0.46))
        ]
    },
}
REGIONS = ["US", "EU", "DE"]


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    file = tmp_path / "market.json"
    file.write_text(json.dumps(MARKET))
    with simulator("--pods", "container", "--speed", "1", "--seed", "11", "--market", str(file)) as running:
        yield running


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path)
    job = TINY_JOB.replace("pod_gpu: cheapest", "pod_gpu: [RTX 4090, RTX 3090]") + "webhook_overrides: []\n"
    (workspace.root / "group_vars" / "job_tiny.yml").write_text(job)
    return workspace


@pytest.fixture
def served(workspace: Workspace, sim: Simulator) -> Iterator[Serving]:
    served = Served(
        workspace,
        "poll_s: 2\nprovider: auto",
        VAST_API_KEY=KEYS["vast"],
        VAST_URL=sim.url,
        RUNPOD_API_KEY=KEYS["runpod"],
        RUNPOD_API_BASE_URL=f"{sim.url}/v2",
    )
    served.start()
    yield served
    served.close()


def test_a_run_without_capacity_goes_through_regions_types_and_clouds(
    served: Serving, workspace: Workspace, sim: Simulator
) -> None:
    sim.fault("vast.create", "vanished_offer", status=410)
    sim.fault("runpod.create", "no_capacity", where={"gpu": "NVIDIA GeForce RTX 4090"})
    sim.fault("runpod.create", "no_capacity", where={"region": "US-TX-3"})
    run = served.start_run(region=REGIONS)
    status = served.wait_for(run, limit_s=400)
    assert status["outcome"] == "succeeded", json.dumps(status, indent=1) + served.log()
    attempts = workspace.document()["attempts"]
    *refused, last = [(a["gpu"], a["provider"], a["region"], a["outcome"]) for a in attempts]
    assert refused == [
        ("RTX 4090", "vast", "Texas, US", "offer_gone"),
        ("RTX 4090", "runpod", "US-TX-3", "no_capacity"),
        ("RTX 4090", "runpod", "EU-RO-1", "no_capacity"),
        ("RTX 4090", "vast", "Hesse, DE", "offer_gone"),
        ("RTX 3090", "vast", "Texas, US", "offer_gone"),
        ("RTX 3090", "runpod", "US-TX-3", "no_capacity"),
    ]
    assert last == ("RTX 3090", "runpod", "EU-RO-1", "done")
    assert [pod["name"] for pod in sim.ever()] == [attempts[-1]["pod_name"]], "one pod, and only one, was ever made"
    assert sim.live() == []
    page = html.unescape(served.http.get(served.url, timeout=30).text)
    for attempt in attempts[:-1]:
        shown = f"{attempt['gpu']} on {attempt['provider']}/{attempt['machine_id']} ({attempt['region']}): "
        assert f"{shown}{attempt['outcome']}, {attempt['reason']}" in page
