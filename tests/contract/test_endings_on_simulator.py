"""The end of a pod at an API that does not do what it says, on both simulated providers, with the simulator's clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pennypod.errors import UnprovenError
from pennypod.guard import Guard
from pennypod.ledger import AttemptState
from pennypod.proof import DESTROY_CALLS_PER_HOUR
from pennypod.settings import Settings
from pennypod.sweep import UNPROVEN, survey, sweep
from simulated import RentingWorld, simulator

BOTH_NAMES = ["vast", "runpod"]
BOTH = pytest.mark.parametrize("provider", BOTH_NAMES)
HOUR_S = 3600


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RentingWorld]:
    with simulator("--seed", "7") as running:
        world = RentingWorld(tmp_path, running)
        yield world
        world.ledger.close()


def destroy_calls(world: RentingWorld) -> list[float]:
    """When the simulator was asked to destroy, by its own clock."""
    rows = [row for name in BOTH_NAMES for row in world.simulator.get(f"requests?endpoint={name}.destroy")["requests"]]
    return [row["t"] for row in rows]


def most_within_an_hour(times: list[float]) -> int:
    return max(sum(begin <= at < begin + HOUR_S for at in times) for begin in times)


@BOTH
def test_a_destroy_that_does_nothing_for_an_hour_is_never_called_gone(world: RentingWorld, provider: str) -> None:
    """Through the teardown, the guard and sweeps from elsewhere, all at once; the end comes soon after the fault's."""
    tenancy = world.rent(world.offers(provider))
    world.simulator.fault(f"{provider}.destroy", "destroy_noop")
    begun = world.clock.now()
    with pytest.raises(UnprovenError):
        world.end(patience_s=120)
    guard = Guard(Settings(Path(), ""), world.ledger, world.rental, world.clock, world.lines.append)
    quiet: Any = lambda *_a, **_k: None  # noqa: E731
    while world.clock.now() - begun < HOUR_S:
        assert guard.tick("1:1", controller_alive=False)
        world.clock.sleep(10)
        found = survey(world.providers, world.ledger, world.clock.now())
        (swept,) = sweep(found, world.providers, world.ledger, world.clock, dry_run=False, report=quiet, patience_s=20)
        assert swept.action == UNPROVEN
        assert [attempt.state for attempt in world.attempts] == [AttemptState.DESTROYING]
    assert most_within_an_hour(destroy_calls(world)) <= DESTROY_CALLS_PER_HOUR
    assert len(destroy_calls(world)) > DESTROY_CALLS_PER_HOUR / 2, "it was given up"

    world.simulator.clear_faults()
    healed = world.clock.now()
    while guard.tick("1:1", controller_alive=False):
        world.clock.sleep(10)
    (pod,) = world.simulator.ever()
    assert pod["id"] == tenancy.pod.pod_id
    assert pod["gone_at"] - healed < 60
    assert world.attempts[0].receipt is not None
    assert most_within_an_hour(destroy_calls(world)) <= DESTROY_CALLS_PER_HOUR


@BOTH
@pytest.mark.parametrize("fault", ["error", "rate_limited", "lost_reply"])
def test_an_api_that_only_fails_for_an_hour_is_not_hammered(world: RentingWorld, provider: str, fault: str) -> None:
    world.rent(world.offers(provider))
    world.simulator.fault(f"{provider}.destroy", fault)
    if fault == "lost_reply":  # the call works, and nobody can see that it did
        world.simulator.fault(f"{provider}.get", "error", status=503)
    with pytest.raises(UnprovenError):
        world.end(patience_s=HOUR_S)
    assert most_within_an_hour(destroy_calls(world)) <= DESTROY_CALLS_PER_HOUR
