"""Two books of one pod: what the simulated provider charges, and what our ledger says it has cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pennypod.errors import LadderExhaustedError
from simulated import RentingWorld, Simulator, simulator


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with simulator("--seed", "5") as running:
        yield running


@pytest.fixture
def world(tmp_path: Path, sim: Simulator) -> RentingWorld:
    return RentingWorld(tmp_path, sim)


def charged(world: RentingWorld) -> dict[str, dict[str, Any]]:
    """The simulator's meter by the pod's name."""
    return {pod["name"]: pod for pod in world.simulator.get("meter")["pods"]}


@pytest.mark.parametrize("provider", ["vast", "runpod"])
@pytest.mark.parametrize("trains_s", [60, 600])
def test_they_agree_within_one_percent(world: RentingWorld, provider: str, trains_s: int) -> None:
    world.rent(world.offers(provider)[:3])
    world.clock.sleep(trains_s)
    world.end()
    (attempt,) = world.attempts
    (meter,) = charged(world).values()
    assert attempt.receipt is not None
    assert attempt.receipt["cost_micros"] == attempt.estimated_micros == attempt.cost_micros(world.clock.now())
    assert attempt.estimated_micros == pytest.approx(meter["micros"], rel=0.01)
    assert attempt.estimated_micros >= meter["micros"] - 1, "if they differ, ours is the higher one"
    assert world.simulator.live() == []


@pytest.mark.parametrize("provider", ["vast", "runpod"])
def test_a_long_pull_costs_what_the_provider_charges_for_it(world: RentingWorld, provider: str) -> None:
    world.simulator.fault(f"{provider}.create", "slow_loading", seconds=240)
    world.rent(world.offers(provider)[:1])
    world.clock.sleep(60)
    world.end()
    (attempt,) = world.attempts
    (meter,) = charged(world).values()
    assert attempt.estimated_micros == pytest.approx(meter["micros"], rel=0.01)


def test_a_pod_that_never_ran_cost_its_disk(world: RentingWorld) -> None:
    world.simulator.fault("vast.create", "stuck_loading")
    with pytest.raises(LadderExhaustedError):
        world.rent(world.offers("vast")[:1])
    (attempt,) = world.attempts
    (meter,) = charged(world).values()
    assert "gpu" not in meter["by_kind"]
    assert attempt.meter is not None
    assert attempt.meter.parts(0)["disk"] == pytest.approx(meter["by_kind"]["disk"], rel=0.01)
    # Between the last look that showed it loading and its destroy it might have run: a poll's worth is ours to doubt.
    assert attempt.billed_seconds(0) < 15


def test_a_price_that_moved_between_search_and_rent_is_the_one_that_counts(world: RentingWorld) -> None:
    offers = world.offers("vast")[:1]
    world.clock.sleep(1200)  # prices move every ten minutes
    world.rent(offers)
    world.clock.sleep(120)
    world.end()
    (attempt,) = world.attempts
    (meter,) = charged(world).values()
    assert attempt.price_micros_per_h != offers[0].price_micros_per_h
    assert attempt.estimated_micros == pytest.approx(meter["micros"], rel=0.01)
