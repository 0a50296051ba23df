"""Calls to a simulator in this process, as a client makes them: its pods are ghosts and its clock stands still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
from pennypod.simulator.clock import VirtualClock
from pennypod.simulator.pods import Ghosts
from pennypod.simulator.server import Simulator
from pennypod.simulator.state import Boot, World

KEY = "canary-8f31"
GPU = "NVIDIA GeForce RTX 4090"


class Caller:
    def __init__(self, simulator: Simulator) -> None:
        self.url = simulator.url
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {KEY}"

    def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> requests.Response:
        return self.session.request(method, self.url + path, json=body, timeout=10, **options)

    def ok(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        reply = self(method, path, body, **options)
        assert reply.ok, reply.text
        return reply.json() if reply.content else None

    def later(self, seconds: float) -> None:
        self.ok("POST", "/_sim/clock", {"advance": seconds})
        self.ok("POST", "/_sim/clock", {"advance": 0.001})

    def fault(self, endpoint: str, fault: str, **options: Any) -> None:
        self.ok("POST", "/_sim/faults", {"endpoint": endpoint, "fault": fault, **options})

    def offer(self, **filters: Any) -> int:
        query = {"num_gpus": {"eq": 1}, "order": [["dph_total", "asc"]], "limit": 1, **filters}
        return int(self.ok("POST", "/api/v0/bundles/", query)["offers"][0]["id"])

    def vast(self, **extra: Any) -> int:
        body = {"client_id": "me", "image": "an/image:1", "disk": 20, "label": "pennypod-x", "runtype": "ssh_direct"}
        return int(self.ok("PUT", f"/api/v0/asks/{self.offer()}/", body | extra)["new_contract"])

    def instance(self, number: int) -> Any:
        return self.ok("GET", f"/api/v0/instances/{number}/?owner=me")["instances"]

    def runpod(self, **extra: Any) -> requests.Response:
        body = {"name": "pennypod-x", "image": "runpod/pytorch:1", "gpu": {"id": GPU, "count": 1}, "ports": ["22/tcp"]}
        return self("POST", "/v2/pods", body | extra)

    def live(self) -> list[Any]:
        found: list[Any] = self.ok("GET", "/_sim/pods")["live"]
        return found


@contextmanager
def simulator_calls(**market: Any) -> Iterator[Caller]:
    """`market` is more of the market file."""
    with_stock = {"runpod": {"gpus": [{"id": GPU, "secure": 0.69, "community": 0.34, "stock": 1000}]}}
    world = World(VirtualClock(0), Ghosts(), seed=4, market=with_stock | market, boot=Boot(1, 10))
    simulator = Simulator(world)
    simulator.start()
    yield Caller(simulator)
    simulator.stop()
