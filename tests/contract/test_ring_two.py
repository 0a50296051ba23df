"""Ring 2 from a machine that knows nothing: an empty state folder, API keys, and the real command in a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from pennypod.clock import SystemClock
from pennypod.model.ids import Lease
from pennypod.model.offer import Need, Order
from pennypod.providers.base import Provider
from pennypod.providers.http import Http
from pennypod.providers.runpod import RunpodProvider
from pennypod.providers.vast import VastProvider
from simulated import KEYS, PUBLIC_KEY, Simulator, simulator
from workspace import wait_until

PENNYPOD = str(Path(sys.executable).parent / "pennypod")
pytestmark = pytest.mark.heavy  # proofs of absence take their time on either cloud
# Answers like an engine that has no containers, so that no pod of this machine is seen, let alone ended.
NO_PODS_HERE = """\
#!/bin/sh
case $1 in
info) echo '{"host": {}, "version": {"Version": "4.9.9"}}' ;;
ps) echo '[]' ;;
*) echo "Error: not in this test" >&2; exit 125 ;;
esac
"""


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with simulator("--seed", "7", "--speed", "10") as running:
        yield running


@pytest.fixture
def environment(sim: Simulator, tmp_path: Path) -> dict[str, str]:
    engine = tmp_path / "podman"
    engine.write_text(NO_PODS_HERE)
    engine.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return kept | {
        "PENNYPOD_HOME": str(tmp_path / "home"),
        "PENNYPOD_ENGINE": str(engine),
        "VAST_API_KEY": KEYS["vast"],
        "VAST_URL": sim.url,
        "RUNPOD_API_KEY": KEYS["runpod"],
        "RUNPOD_API_BASE_URL": f"{sim.url}/v2",
    }


class Clouds:
    """Pods as somebody else has rented them."""

    def __init__(self, sim: Simulator) -> None:
        self._url = sim.url
        clock = SystemClock()
        self.providers: dict[str, Provider] = {
            "vast": VastProvider(Http("vast", sim.url, KEYS["vast"], clock), clock),
            "runpod": RunpodProvider(Http("runpod", sim.url, KEYS["runpod"], clock), clock),
        }

    def rent(self, provider: str, name: str) -> str:
        offer = self.providers[provider].offers(Need(gpu=("RTX 4090", "RTX 3090", "L4", "A40")))[0]
        deadline = int(time.time()) + 600
        return self.providers[provider].rent(offer, Order(name, "", 20, PUBLIC_KEY, deadline))

    def rename(self, pod_id: str, name: str) -> str:
        """What anybody may do in Vast's console."""
        url, headers = f"{self._url}/api/v0/instances/{pod_id}/", {"Authorization": f"Bearer {KEYS['vast']}"}
        requests.put(url, json={"label": name}, headers=headers, timeout=10).raise_for_status()
        return pod_id


def lease(run: str, in_s: int) -> str:
    return Lease(run, 1, int(time.time()) + in_s, "aaaaa").name


def test_with_keys_alone_it_ends_what_is_overdue_and_nothing_else(sim: Simulator, environment: dict[str, str]) -> None:
    clouds = Clouds(sim)
    late = [clouds.rent("vast", lease("late-1201-aaaaa", -60)), clouds.rent("runpod", lease("late-1201-bbbbb", -60))]
    kept = [
        clouds.rent("vast", lease("demo-1201-ccccc", 36_000)),
        clouds.rename(clouds.rent("vast", lease("demo-1201-ddddd", 36_000)), "pennypod-of-an-unknown-kind"),
        clouds.rename(clouds.rent("vast", lease("demo-1201-eeeee", 36_000)), "x" + lease("late-1201-eeeee", -60)),
    ]

    def sweep(*options: str) -> dict[str, Any]:
        done = subprocess.run(
            [PENNYPOD, "sweep", "--json", *options], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["not_listed"] == {}
        return document

    dry = sweep("--dry-run")
    assert {pod["pod_id"] for pod in dry["pods"]} == set(late)
    assert len(sim.live()) == 5
    swept = sweep()
    assert [pod["pod_name"] for pod in swept["pods"]] == [pod["pod_name"] for pod in dry["pods"]]
    assert {pod["action"] for pod in swept["pods"]} == {"destroyed"}
    assert {str(pod["id"]) for pod in sim.live()} == set(kept)
    ahead = sweep("--now", "+5h")
    assert [pod["pod_name"] for pod in ahead["pods"]] == ["pennypod-of-an-unknown-kind"]
    assert {str(pod["id"]) for pod in sim.live()} == {kept[0], kept[2]}


def test_a_sentinel_outlives_an_outage_and_ends_cleanly(
    sim: Simulator, environment: dict[str, str], tmp_path: Path
) -> None:
    Clouds(sim).rent("vast", lease("late-1201-aaaaa", -60))
    sim.fault("vast.list", "forbidden")
    log = tmp_path / "sentinel.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [PENNYPOD, "sentinel", "--interval", "1s"], env=environment, stdout=file, stderr=file
        )
    try:
        wait_until(lambda: log.read_text().count("vast cannot be looked at") > 1, 60, "it has looked twice, in vain")
        assert process.poll() is None
        second = subprocess.run([PENNYPOD, "sentinel", "--once"], env=environment, capture_output=True, text=True)
        assert (second.returncode, "another sentinel" in second.stderr) == (1, True)
        sim.clear_faults()
        wait_until(lambda: not sim.live(), 60, "the overdue pod is ended after the outage")
        wait_until(lambda: "1 destroyed" in log.read_text(), 60, "it is proven gone, in the log too")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
    lines = log.read_text().splitlines()
    assert lines[-1].endswith("told to end")
    assert not any(key in log.read_text() for key in KEYS.values())
