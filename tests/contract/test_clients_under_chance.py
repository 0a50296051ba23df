"""Runs with faults by chance, many at once: whatever happens, one pod at a time and none left in the end."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from fakes import FakeLogin
from pennypod.errors import GateError, PennypodError, SshError, UnprovenError
from simulated import RentingWorld, simulator

CALL_FAULTS = [
    ("create", {"fault": "lost_reply"}),
    ("create", {"fault": "error_after_commit", "status": 502}),
    ("create", {"fault": "error", "status": 500}),
    ("create", {"fault": "no_capacity"}),
    ("create", {"fault": "rate_limited"}),
    ("create", {"fault": "malformed"}),
    ("list", {"fault": "error", "status": 503}),
    ("list", {"fault": "malformed"}),
    ("list", {"fault": "rate_limited", "retry_after": 3}),
    ("list", {"fault": "lost_reply"}),
    ("get", {"fault": "error", "status": 500}),
    ("get", {"fault": "lost_reply"}),
    ("destroy", {"fault": "destroy_noop"}),
    ("destroy", {"fault": "lost_reply"}),
    ("destroy", {"fault": "error", "status": 504}),
]
POD_FAULTS = [
    {"fault": "stuck_loading"},
    {"fault": "list_lag", "seconds": 20},
    {"fault": "gone_lag", "seconds": 20},
    {"fault": "pull_error"},
]


@pytest.mark.parametrize("provider", ["vast", "runpod"])
@pytest.mark.parametrize("seed", range(6))
def test_one_pod_at_a_time_and_none_left(tmp_path: Path, provider: str, seed: int) -> None:
    chance = random.Random(seed)
    with simulator("--seed", str(seed)) as sim:
        world = RentingWorld(tmp_path, sim)
        offers = world.offers(provider)[:6]
        for endpoint, fault in chance.sample(CALL_FAULTS, 6):
            sim.fault(f"{provider}.{endpoint}", probability=0.3, **fault)
        for fault in chance.sample(POD_FAULTS, 2):
            sim.fault(f"{provider}.create", probability=0.5, **fault)
        if provider == "vast":
            sim.fault("vast.create", "error_with_id", probability=0.2)
        verdicts = [chance.choice([None, GateError("bad"), SshError("shut")]) for _ in range(6)]
        try:
            world.rent(offers, FakeLogin(*verdicts))
        except UnprovenError:
            assert not all(attempt.final for attempt in world.attempts)
        except PennypodError as exc:
            world.lines.append(f"the end: {exc.code}")
        pods = sim.ever()
        for first, second in pairwise(pods):
            assert first["gone_at"] is not None
            assert first["gone_at"] <= second["created"]
        world.end(patience_s=3600)
        assert sim.live() == []
        assert all(attempt.final for attempt in world.attempts)
        assert {pod["id"] for pod in pods} == {attempt.pod_id for attempt in world.attempts if attempt.receipt}
        world.ledger.close()
