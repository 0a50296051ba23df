"""A simulator with many pods of ours at one provider, and the commands that list them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from pennypod.model.ids import Lease
from simulated import KEYS, Simulator, simulator
from workspace import REPOSITORY

COUNT = 1000
GPU = "NVIDIA L4"


@contextmanager
def crowded(folder: Path, provider: str) -> Iterator[Simulator]:
    """A simulator with a thousand pods of ours at one provider."""
    machines = [{"gpu_name": "L4", "num_gpus": 1}] * COUNT if provider == "vast" else []
    market = {
        "vast": {"machines": machines},
        "runpod": {"gpus": [{"id": GPU, "secure": 0.4, "stock": COUNT}]},
        "accounts": {provider: [{"credit_usd": 1e6}]},
    }
    (folder / "market.json").write_text(json.dumps(market))
    with simulator("--market", str(folder / "market.json")) as sim:
        call = requests.Session()
        call.headers["Authorization"] = f"Bearer {KEYS[provider]}"
        if provider == "vast":
            search = {"num_gpus": {"eq": 1}, "limit": COUNT}
            offers = call.post(f"{sim.url}/api/v0/bundles/", json=search).json()["offers"]
            for number, offer in enumerate(offers):
                body = {"image": "an/image", "disk": 8, "label": lease(number), "runtype": "ssh_direct"}
                assert call.put(f"{sim.url}/api/v0/asks/{offer['id']}/", json=body).json()["success"]
        else:
            for number in range(COUNT):
                body = {"name": lease(number), "image": "runpod/x", "gpu": {"id": GPU, "count": 1}, "ports": ["22/tcp"]}
                assert call.post(f"{sim.url}/v2/pods", json=body).status_code == 201
        assert len(sim.live()) == COUNT
        yield sim


def lease(number: int) -> str:
    letters = "".join("abcdefghijklmnopqrstuvwxyz234567"[number >> shift & 31] for shift in (20, 15, 10, 5, 0))
    return Lease(f"many-1201-{letters}", 1, 1_900_000_000, "abcde").name


def environment(sim: Simulator, provider: str, home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VAST_", "RUNPOD_"))}
    address = {"vast": {"VAST_URL": sim.url}, "runpod": {"RUNPOD_API_BASE_URL": sim.url}}[provider]
    key = {f"{provider.upper()}_API_KEY": KEYS[provider]}
    return {**kept, **address, **key, "PENNYPOD_HOME": str(home), "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")}
