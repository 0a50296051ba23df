"""The ladder falls through GPU types and providers, and a pod is found again, on both simulated APIs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from fakes import FakeLogin
from pennypod.errors import NotReadyError
from pennypod.ledger import AttemptState, RunRecord
from pennypod.market import Estimate
from pennypod.model.ids import Lease
from pennypod.model.image import RegistryLogin
from pennypod.model.offer import Need, Order
from pennypod.model.pod import PodState
from pennypod.planning import Limits, Plan, make_plan
from simulated import KEYS, PUBLIC_KEY, RUN, RentingWorld, simulator

PRIVATE = "{registries: {ghcr.io: {user: pods, password: canary-51c7}}}"


@pytest.fixture
def private_world(tmp_path: Path) -> Iterator[RentingWorld]:
    (tmp_path / "market.yml").write_text(PRIVATE)
    with simulator("--seed", "11", "--market", str(tmp_path / "market.yml")) as running:
        world = RentingWorld(tmp_path, running)
        yield world
        world.ledger.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RentingWorld]:
    with simulator("--seed", "11") as running:
        world = RentingWorld(tmp_path, running)
        yield world
        world.ledger.close()


def plan(world: RentingWorld, *gpus: str) -> Plan:
    return make_plan(world.providers, Need(gpu=gpus), Estimate(60, 600), Limits(budget_factor=2.5, max_attempts=40))


def test_the_ladder_falls_through_types_and_providers_with_a_reason_for_each_rung(world: RentingWorld) -> None:
    made = plan(world, "RTX 4090", "RTX 3090")
    types = [r.offer.gpu for r in made.offers]
    assert types == sorted(types, key=["RTX 4090", "RTX 3090"].index)
    # The first offer of each type at each provider: a short ladder over all of them.
    firsts = {(r.offer.gpu, r.offer.provider): r.offer for r in reversed(made.offers)}
    ladder = [r.offer for r in made.offers if firsts[r.offer.gpu, r.offer.provider] is r.offer]
    assert [offer.gpu for offer in ladder] == ["RTX 4090"] * 2 + ["RTX 3090"] * 2
    assert {offer.provider for offer in ladder[:2]} == {"vast", "runpod"}
    third, last = ladder[2].provider, ladder[3].provider
    world.simulator.fault(f"{third}.create", "no_capacity")
    world.simulator.fault(f"{last}.create", "no_capacity", nth=1)
    tenancy = world.rent(ladder)
    assert (tenancy.attempt.provider, tenancy.attempt.gpu) == (last, "RTX 3090")
    lost = world.attempts[:-1]
    assert len(lost) == 3
    assert all(attempt.state is AttemptState.NEVER and attempt.outcome and attempt.reason for attempt in lost)
    assert len(world.simulator.live()) == 1
    world.end()
    assert world.simulator.live() == []


GOLDEN = f"ghcr.io/me/golden@sha256:{'5' * 64}"


@pytest.mark.parametrize("provider", ["vast", "runpod"])
def test_a_login_opens_a_private_registry_and_without_it_the_next_rung_is_the_stock_image(
    private_world: RentingWorld, provider: str
) -> None:
    world, login = private_world, RegistryLogin("ghcr.io", "pods", "canary-51c7")
    offers = world.offers(provider)[:3]
    choice = {"images": {provider: GOLDEN}, "instead": {provider: ""}}
    began = world.clock.now()
    tenancy = world.rent(offers, **choice)
    lost = world.ledger.attempts(RUN)[0]
    assert (lost.state, lost.outcome) == (AttemptState.GONE, "not_ready")
    assert "no basic auth credentials" in (lost.reason or "")
    assert (tenancy.image, tenancy.attempt.attempt) == ("", 2)
    limit = world.providers[provider].timing.start_limit_s
    assert world.clock.now() - began < limit + 120
    assert len(world.simulator.live()) == 1
    world.end()
    world.lines.clear()
    world.ledger.open_run(RunRecord("demo-1201-bbbbb", "demo", "1:1", world.clock.now(), ""))
    tenancy = world.rent(world.offers(provider)[:1], run="demo-1201-bbbbb", logins={"ghcr.io": login}, **choice)
    assert tenancy.image == GOLDEN
    assert not [line for line in world.lines if "canary" in line]


@pytest.mark.parametrize("provider", ["vast", "runpod"])
def test_a_pod_is_found_again_by_its_lease(world: RentingWorld, provider: str) -> None:
    first = world.rent(world.offers(provider)[:1])
    world.ledger.take_over(RUN, "2:2", lambda _process: False)
    found = world.rental.resume(RUN, PUBLIC_KEY, FakeLogin(), lambda *_a, **_k: None, pinned=[], limit_s=60)
    assert (found.pod.pod_id, found.created) == (first.pod.pod_id, False)
    assert world.simulator.creates() == 1
    world.end()
    assert world.simulator.live() == []
    with pytest.raises(NotReadyError):
        world.rental.resume(RUN, PUBLIC_KEY, FakeLogin(), lambda *_a, **_k: None, pinned=[], limit_s=60)


@pytest.mark.parametrize("provider", ["vast", "runpod"])
def test_a_pod_whose_create_call_was_never_heard_of_again_is_resumed_too(world: RentingWorld, provider: str) -> None:
    """The controller died after the create call and before it wrote the id down."""
    offer = world.offers(provider)[0]
    lease = Lease(RUN, 1, int(world.clock.now()) + 7200, "abcde")
    world.ledger.open_attempt(lease, offer, renter="1:1", at=world.clock.now())
    order = Order(lease.name, "", 20, PUBLIC_KEY, lease.deadline)
    pod_id = world.providers[provider].rent(replace(offer), order)
    found = world.rental.resume(RUN, PUBLIC_KEY, FakeLogin(), lambda *_a, **_k: None, pinned=[], limit_s=60)
    assert (found.pod.pod_id, found.gate) == (pod_id, {"ok": True})
    assert [attempt.state for attempt in world.attempts] == [AttemptState.READY]
    world.end()
    assert world.simulator.live() == []


def stop(world: RentingWorld, provider: str, pod_id: str) -> None:
    """As its host or an empty account would: somebody else than us stops it."""
    headers = {"Authorization": f"Bearer {KEYS[provider]}"}
    if provider == "vast":
        requests.put(
            f"{world.simulator.url}/api/v0/instances/{pod_id}/", json={"state": "stopped"}, headers=headers, timeout=10
        )
    else:
        url = f"{world.simulator.url}/v2/pods/{pod_id}/action"
        requests.post(url, json={"action": "stop"}, headers=headers, timeout=10)


def test_a_stopped_pod_whose_disk_is_kept_is_started_again(world: RentingWorld) -> None:
    first = world.rent(world.offers("vast")[:1])
    stop(world, "vast", first.pod.pod_id)
    world.ledger.take_over(RUN, "2:2", lambda _process: False)
    found = world.rental.resume(RUN, PUBLIC_KEY, FakeLogin(), lambda *_a, **_k: None, pinned=[], limit_s=60)
    assert (found.pod.pod_id, found.pod.state) == (first.pod.pod_id, PodState.RUNNING)
    assert world.simulator.creates() == 1
    world.end()
    assert world.simulator.live() == []


def test_a_stopped_pod_whose_disk_is_wiped_is_nothing_to_go_on_with(world: RentingWorld) -> None:
    first = world.rent(world.offers("runpod")[:1])
    stop(world, "runpod", first.pod.pod_id)
    world.ledger.take_over(RUN, "2:2", lambda _process: False)
    with pytest.raises(NotReadyError, match="stopped"):
        world.rental.resume(RUN, PUBLIC_KEY, FakeLogin(), lambda *_a, **_k: None, pinned=[], limit_s=60)
    assert [pod["stage"] for pod in world.simulator.live()] == ["exited"]
    world.end()
    assert world.simulator.live() == []
