"""Whole lifecycles of both clients on the simulator, through the rental, with what goes wrong in the field.

Each fault states its right end: the run has a pod, on this rung or another, or fails with the reason; there is never a
second live pod, and none is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from fakes import FakeLogin
from pennypod.errors import (
    AuthError,
    FundsError,
    GateError,
    LadderExhaustedError,
    ProviderError,
    RateLimitedError,
    SshError,
    UnprovenError,
)
from pennypod.ledger import AttemptState
from pennypod.model.ids import Lease, parse_lease
from pennypod.model.money import micros_to_usd
from pennypod.model.offer import Need, Order
from pennypod.model.pod import PodState, SshAddress
from pennypod.providers.base import HearsPriceRequests, TellsReach
from simulated import KEYS, PUBLIC_KEY, RUN, RentingWorld, Simulator, simulator_within

BOTH = pytest.mark.parametrize("provider", ["vast", "runpod"])


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with simulator_within(seed=7) as running:
        yield running


@pytest.fixture
def market(tmp_path: Path, sim: Simulator) -> Iterator[RentingWorld]:
    """Both clients, where a test may hold many pods at once."""
    world = RentingWorld(tmp_path, sim)
    yield world
    world.ledger.close()
    no_key_outside_a_header(sim)


@pytest.fixture
def world(market: RentingWorld) -> Iterator[RentingWorld]:
    """One run, which must never have two pods."""
    yield market
    never_two_at_once(market.simulator)


def never_two_at_once(sim: Simulator) -> None:
    for first, second in pairwise(sim.ever()):
        assert first["gone_at"] is not None, "a pod was left behind while another one was rented"
        assert first["gone_at"] <= second["created"], "two pods were alive at once"


def no_key_outside_a_header(sim: Simulator) -> None:
    for row in sim.get("requests")["requests"]:
        shown = json.dumps({name: value for name, value in row.items() if name != "headers"})
        assert not any(key in shown for key in KEYS.values())


def gone_for_good(world: RentingWorld) -> None:
    """The run is over: nothing lives, every attempt is settled, and what bore an id has its receipt."""
    world.end()
    assert world.simulator.live() == []
    assert all(attempt.final for attempt in world.attempts)
    assert len(world.simulator.ever()) == sum(1 for attempt in world.attempts if attempt.receipt)


# --- the plain loop ---------------------------------------------------------------------------------------------------


@BOTH
def test_a_pod_is_found_rented_waited_for_and_proven_gone(world: RentingWorld, provider: str) -> None:
    offers = world.offers(provider)
    tenancy = world.rent(offers)
    assert world.attempts[0].state is AttemptState.READY
    assert tenancy.pod.state is PodState.RUNNING
    assert tenancy.address in tenancy.pod.addresses
    (live,) = world.simulator.live()
    lease = parse_lease(live["name"])
    assert (live["name"], live["id"]) == (tenancy.pod.name, tenancy.pod.pod_id)
    assert lease is not None
    assert lease.run == RUN
    assert tenancy.pod.gpu == offers[0].gpu
    assert world.rental.existing(RUN) is not None
    gone_for_good(world)


def account_call(world: RentingWorld, provider: str, method: str, path: str, body: Any = None) -> Any:
    """As somebody does by hand who has the account's key."""
    headers = {"Authorization": f"Bearer {KEYS[provider]}"}
    reply = requests.request(method, world.simulator.url + path, json=body, headers=headers, timeout=10)
    assert reply.ok, reply.text
    return reply.json()


@BOTH
def test_a_template_of_the_account_brings_the_image_and_its_environment(world: RentingWorld, provider: str) -> None:
    template: dict[str, Any] = {"name": "detector", "image": "me/golden:v3"}
    if provider == "vast":
        made = account_call(world, provider, "POST", "/api/v0/template/", template | {"env": "-e TEMPLATE=kept"})
        number = made["template"]["hash_id"]
    else:
        number = account_call(world, provider, "POST", "/v2/templates", template | {"env": {"TEMPLATE": "kept"}})["id"]
    images = {provider: f"template:{number}"}
    tenancy = world.rent(world.offers(provider), images=images, env={"OURS": "too"})
    assert tenancy.image == images[provider]
    if provider == "vast":
        row = account_call(world, provider, "GET", f"/api/v0/instances/{tenancy.pod.pod_id}/")["instances"]
        image, env = row["image_uuid"], dict(row["extra_env"])
    else:
        row = account_call(world, provider, "GET", f"/v2/pods/{tenancy.pod.pod_id}")
        image, env = row["image"], row["env"]
    assert (image, env["TEMPLATE"], env["OURS"]) == ("me/golden:v3", "kept", "too")
    gone_for_good(world)


@BOTH
def test_a_template_that_is_not_there_rents_nothing_and_is_named(world: RentingWorld, provider: str) -> None:
    with pytest.raises(LadderExhaustedError, match="template"):
        world.rent(world.offers(provider)[:2], images={provider: "template:4e17788f74f075dd"})
    assert world.simulator.ever() == []


@BOTH
def test_the_price_of_an_offer_is_what_the_meter_charges(world: RentingWorld, provider: str) -> None:
    offer = world.offers(provider, Need(gpu=("RTX 4090",), disk_gb=20))[0]
    world.rent([offer])
    (live,) = world.simulator.live()
    assert live["rate_micros_per_h"] == pytest.approx(offer.price_micros_per_h, rel=0.001)
    gone_for_good(world)


@BOTH
def test_the_bill_of_an_hour_agrees_with_the_estimate(world: RentingWorld, provider: str) -> None:
    world.rent(world.offers(provider))
    world.clock.sleep(3600)
    gone_for_good(world)
    (attempt,) = world.attempts
    (row,) = world.simulator.get("meter")["pods"]
    assert attempt.estimated_micros == pytest.approx(row["micros"], rel=0.02)


def test_a_hosts_wish_for_more_is_seen_and_refused_and_the_price_stays(world: RentingWorld) -> None:
    tenancy = world.rent(world.offers("vast"))
    vast = world.providers["vast"]
    assert isinstance(vast, HearsPriceRequests)
    assert vast.price_requests() == []
    before = world.simulator.live()[0]["rate_micros_per_h"]
    world.simulator.post("price_request", {"id": tenancy.pod.pod_id, "usd_per_h": 4.0})
    (request,) = vast.price_requests()
    assert request.pod_id == tenancy.pod.pod_id
    assert 4_000_000 < request.asked_micros_per_h < 4_100_000, "the GPUs' new price, and the disk's old one"
    for _ in range(2):  # also one that was answered already
        vast.refuse_price(request.request_id)
    assert vast.price_requests() == []
    assert world.simulator.live()[0]["rate_micros_per_h"] == before
    gone_for_good(world)


def test_both_providers_are_one_market(world: RentingWorld) -> None:
    need = Need(gpu=("RTX 4090",))
    both = sorted(world.offers("vast", need) + world.offers("runpod", need), key=lambda offer: offer.price_micros_per_h)
    assert {offer.provider for offer in both} == {"vast", "runpod"}
    assert {offer.gpu for offer in both} == {"RTX 4090"}
    tenancy = world.rent(both)
    assert tenancy.attempt.provider == both[0].provider
    gone_for_good(world)


@BOTH
def test_filters_hold(world: RentingWorld, provider: str) -> None:
    cap = 500_000
    found = world.offers(provider, Need(gpu_ram_gb=24, secure=True, max_price_micros_per_h=cap, disk_gb=100))
    assert found
    for offer in found:
        assert offer.secure
        assert offer.gpu_ram_gb is not None
        assert offer.gpu_ram_gb >= 24
        assert offer.price_micros_per_h <= cap
        assert offer.disk_gb >= 100


def test_the_search_language_reaches_the_market(world: RentingWorld) -> None:
    found = world.offers("vast", Need(vast_query="gpu_name=RTX_3090 reliability>0.9 gpu_ram>=24 inet_down>100"))
    assert found
    assert {offer.gpu for offer in found} == {"RTX 3090"}
    assert all(offer.reliability and offer.reliability > 0.9 for offer in found)


def test_every_instance_is_listed_over_all_pages(market: RentingWorld) -> None:
    vast = market.providers["vast"]
    made = set()
    for number, offer in enumerate(market.offers("vast", Need(vast_query="verified=any"))[:30]):
        lease = Lease(RUN, number, int(market.clock.now() + 600), "abcde")
        made.add(vast.rent(offer, Order(lease.name, "", 8, PUBLIC_KEY, lease.deadline)))
    assert len(made) > 25
    assert {pod.pod_id for pod in vast.pods()} == made
    for pod_id in made:
        vast.destroy(pod_id)
        assert vast.pod(pod_id) is None
    assert vast.pods() == []
    assert market.simulator.live() == []


# --- creates that go wrong --------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "fault",
    [
        {"fault": "lost_reply"},
        {"fault": "error_after_commit", "status": 500},
        {"fault": "error_after_commit", "status": 503},
        {"fault": "malformed"},
    ],
    ids=lambda fault: "-".join(str(value) for value in fault.values()),
)
def test_a_create_whose_answer_is_lost_is_found_by_its_name(
    world: RentingWorld, provider: str, fault: dict[str, Any]
) -> None:
    world.simulator.fault(f"{provider}.create", nth=1, **fault)
    tenancy = world.rent(world.offers(provider))
    assert tenancy.attempt.attempt == 1
    assert world.simulator.creates() == 1
    assert len(world.simulator.ever()) == 1
    gone_for_good(world)


@BOTH
def test_a_lost_create_is_found_though_the_listing_lags(world: RentingWorld, provider: str) -> None:
    world.simulator.fault(f"{provider}.create", "lost_reply", nth=1)
    world.simulator.fault(f"{provider}.create", "list_lag", nth=1, seconds=20)
    assert world.rent(world.offers(provider)).attempt.attempt == 1
    assert len(world.simulator.ever()) == 1
    gone_for_good(world)


def test_a_lost_create_is_found_though_a_page_is_short(world: RentingWorld) -> None:
    world.simulator.fault("vast.create", "lost_reply", nth=1)
    world.simulator.fault("vast.list", "short_page", nth=1)
    assert world.rent(world.offers("vast")).attempt.attempt == 1
    gone_for_good(world)


@BOTH
@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_create_that_failed_without_effect_is_settled_before_the_next_rung(
    world: RentingWorld, provider: str, status: int
) -> None:
    world.simulator.fault(f"{provider}.create", "error", nth=1, status=status)
    before = world.clock.now()
    assert world.rent(world.offers(provider)).attempt.attempt == 2
    assert world.outcomes()[0] == "ambiguous"
    assert world.clock.now() - before >= world.providers[provider].timing.listing_lag_s
    assert len(world.simulator.ever()) == 1
    gone_for_good(world)


@pytest.mark.parametrize(
    ("provider", "fault", "outcome"),
    [
        ("vast", {"fault": "vanished_offer", "status": 404}, "offer_gone"),
        ("vast", {"fault": "vanished_offer", "status": 410}, "offer_gone"),
        ("vast", {"fault": "no_capacity"}, None),
        ("runpod", {"fault": "no_capacity"}, "no_capacity"),
    ],
)
def test_a_refused_create_goes_to_the_next_rung(
    world: RentingWorld, provider: str, fault: dict[str, Any], outcome: str | None
) -> None:
    world.simulator.fault(f"{provider}.create", nth=1, **fault)
    assert world.rent(world.offers(provider)).attempt.attempt == 2
    if outcome:
        assert world.outcomes()[0] == outcome
    assert len(world.simulator.ever()) == 1
    gone_for_good(world)


@BOTH
@pytest.mark.parametrize("told", [{}, {"retry_after": 9}], ids=["no-time-told", "retry-after"])
def test_a_create_refused_for_too_many_calls_waits_and_takes_the_same_offer(
    world: RentingWorld, provider: str, told: dict[str, Any]
) -> None:
    world.simulator.fault(f"{provider}.create", "rate_limited", nth=[1, 2], **told)
    offers, before = world.offers(provider), world.clock.now()
    tenancy = world.rent(offers)
    assert tenancy.attempt.machine_id == offers[0].machine_id
    assert world.outcomes() == ["rate_limited", "rate_limited", None]
    assert world.clock.now() - before >= 2 * told.get("retry_after", 1)
    assert len({attempt.lease_name for attempt in world.attempts}) == 3
    assert len(world.simulator.ever()) == 1
    gone_for_good(world)


@pytest.mark.parametrize(("provider", "other"), [("vast", "runpod"), ("runpod", "vast")])
def test_a_provider_that_wants_hours_of_quiet_makes_room_for_the_other(
    world: RentingWorld, provider: str, other: str
) -> None:
    world.simulator.fault(f"{provider}.create", "rate_limited", retry_after=7200)
    tenancy = world.rent([*world.offers(provider)[:2], *world.offers(other)[:1]])
    assert tenancy.attempt.provider == other
    assert world.outcomes() == ["rate_limited", "rate_limited", None]
    assert world.simulator.creates() == 2, "it is not asked again before its time"
    gone_for_good(world)


@BOTH
def test_a_create_that_is_answered_late_is_no_second_create(world: RentingWorld, provider: str) -> None:
    world.simulator.fault(f"{provider}.create", "slow", nth=1, seconds=0.3)
    assert world.rent(world.offers(provider)).attempt.attempt == 1
    assert world.simulator.creates() == 1
    gone_for_good(world)


@BOTH
def test_a_create_that_runs_into_a_time_limit_is_settled_before_the_next_rung(
    world: RentingWorld, provider: str
) -> None:
    world.simulator.fault(f"{provider}.create", "timeout", nth=1, seconds=0.1, status=504)
    assert world.rent(world.offers(provider)).attempt.attempt == 2
    assert world.outcomes()[0] == "ambiguous"
    assert len(world.simulator.ever()) == 1
    gone_for_good(world)


def test_a_pool_that_is_not_for_the_key_costs_one_rung(world: RentingWorld) -> None:
    world.simulator.fault("runpod.create", "forbidden", nth=1)
    assert world.rent(world.offers("runpod")).attempt.attempt == 2
    assert world.outcomes()[0] == "invalid"
    gone_for_good(world)


@pytest.mark.parametrize(("provider", "html"), [("vast", False), ("runpod", True)])
def test_a_key_that_may_not_rent_at_all_ends_the_ladder(world: RentingWorld, provider: str, html: bool) -> None:
    world.simulator.fault(f"{provider}.create", "forbidden", html=html)
    with pytest.raises(AuthError):
        world.rent(world.offers(provider))
    assert world.simulator.creates() == 1
    assert world.simulator.ever() == []


def test_an_instance_that_a_failed_create_left_is_ours_and_is_destroyed(world: RentingWorld) -> None:
    world.simulator.fault("vast.create", "error_with_id", nth=1)
    assert world.rent(world.offers("vast")).attempt.attempt == 2
    left, kept = world.simulator.ever()
    assert left["gone_at"] is not None
    assert kept["gone_at"] is None
    assert world.attempts[0].pod_id == left["id"]
    gone_for_good(world)


@BOTH
@pytest.mark.parametrize(("fault", "error"), [("low_balance", FundsError), ("auth", AuthError)])
def test_no_money_and_a_wrong_key_end_the_ladder_at_once(
    world: RentingWorld, provider: str, fault: str, error: type[ProviderError]
) -> None:
    offers = world.offers(provider)
    world.simulator.fault(f"{provider}.create", fault)
    with pytest.raises(error):
        world.rent(offers)
    assert world.simulator.creates() == 1
    assert world.simulator.ever() == []
    gone_for_good(world)


# --- pods that do not come up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "fault"),
    [
        ("vast", {"fault": "stuck_loading"}),
        ("vast", {"fault": "pull_error"}),
        ("vast", {"fault": "restart_loop"}),
        ("runpod", {"fault": "stuck_loading"}),
        ("runpod", {"fault": "pull_error"}),
        ("runpod", {"fault": "restart_loop"}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["fault"],
)
def test_a_pod_that_does_not_come_up_makes_room_for_the_next(
    world: RentingWorld, provider: str, fault: dict[str, Any]
) -> None:
    world.simulator.fault(f"{provider}.create", nth=1, **fault)
    before = world.clock.now()
    assert world.rent(world.offers(provider)).attempt.attempt == 2
    assert world.outcomes()[0] == "not_ready"
    timing = world.providers[provider].timing
    assert world.clock.now() - before < 2 * timing.start_limit_s
    gone_for_good(world)


@BOTH
@pytest.mark.parametrize(
    ("fault", "said"), [("pull_error", "manifest unknown"), ("restart_loop", "failed to create task for container")]
)
def test_the_reason_for_a_lost_rung_is_what_the_pods_log_says(
    world: RentingWorld, provider: str, fault: str, said: str
) -> None:
    world.simulator.fault(f"{provider}.create", fault, nth=1)
    world.rent(world.offers(provider))
    assert said in (world.attempts[0].reason or "")
    gone_for_good(world)


@BOTH
def test_a_log_that_cannot_be_read_keeps_no_pod_alive(world: RentingWorld, provider: str) -> None:
    world.simulator.fault(f"{provider}.create", "restart_loop", nth=1)
    world.simulator.fault(f"{provider}.logs", "error", status=500)
    assert world.rent(world.offers(provider)).attempt.attempt == 2
    assert "its log says" not in (world.attempts[0].reason or "")
    gone_for_good(world)


@BOTH
def test_an_image_that_loads_slowly_is_waited_for(world: RentingWorld, provider: str) -> None:
    world.simulator.fault(f"{provider}.create", "slow_loading", nth=1, seconds=500)
    assert world.rent(world.offers(provider)).attempt.attempt == 1
    gone_for_good(world)


class SlowLogin(FakeLogin):
    """Still trying to get in when something happens to the first pod; quick with the next one."""

    def __init__(self, world: RentingWorld) -> None:
        super().__init__()
        self._world = world
        self._first = True

    def log_in(
        self, addresses: Callable[[], Sequence[SshAddress]], host_keys: Sequence[str], limit_s: float
    ) -> SshAddress:
        if self._first:
            self._first = False
            addresses()
            self._world.clock.sleep(60)
        return super().log_in(addresses, host_keys, limit_s)


@pytest.mark.parametrize(
    ("provider", "fault", "said"),
    [
        ("vast", "exit_after", "stopped"),
        ("runpod", "exit_after", "stopped"),
        ("vast", "evict_after", "stopped"),
        ("runpod", "evict_after", "vanished"),
        ("vast", "offline_after", "failed"),
    ],
)
def test_a_pod_that_is_lost_while_it_is_entered_makes_room_for_the_next(
    world: RentingWorld, provider: str, fault: str, said: str
) -> None:
    world.simulator.fault(f"{provider}.create", fault, nth=1, seconds=10)
    assert world.rent(world.offers(provider), SlowLogin(world)).attempt.attempt == 2
    assert world.outcomes()[0] == "not_ready"
    assert said in (world.attempts[0].reason or "")
    gone_for_good(world)


def test_a_broken_image_is_noticed_long_before_patience_ends(world: RentingWorld) -> None:
    world.simulator.fault("vast.create", "pull_error", nth=1)
    before = world.clock.now()
    world.rent(world.offers("vast"))
    assert world.clock.now() - before < world.providers["vast"].timing.start_patience_s
    gone_for_good(world)


@BOTH
@pytest.mark.parametrize("verdict", [GateError("bad GPU"), SshError("nobody answers")], ids=["gate", "ssh"])
def test_a_pod_that_fails_the_check_is_gone_before_the_next(
    world: RentingWorld, provider: str, verdict: GateError | SshError
) -> None:
    assert world.rent(world.offers(provider), FakeLogin(verdict)).attempt.attempt == 2
    assert world.outcomes()[0] == verdict.code
    gone_for_good(world)


@BOTH
def test_when_no_rung_holds_nothing_is_left(world: RentingWorld, provider: str) -> None:
    world.simulator.fault(f"{provider}.create", "stuck_loading")
    with pytest.raises(LadderExhaustedError) as caught:
        world.rent(world.offers(provider)[:2])
    assert [rung["code"] for rung in caught.value.details["attempts"]] == ["not_ready", "not_ready"]
    gone_for_good(world)


# --- destroys that do not destroy -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "fault",
    [
        {"endpoint": "destroy", "fault": "destroy_noop", "times": 2},
        {"endpoint": "destroy", "fault": "error", "status": 500, "times": 7},
        {"endpoint": "destroy", "fault": "lost_reply", "times": 1},
        {"endpoint": "destroy", "fault": "auth", "times": 1},
        {"endpoint": "get", "fault": "auth", "times": 2},
        {"endpoint": "list", "fault": "auth", "times": 2},
        {"endpoint": "list", "fault": "error", "status": 502, "times": 6},
        {"endpoint": "list", "fault": "malformed", "times": 2},
    ],
    ids=lambda fault: f"{fault['endpoint']}-{fault['fault']}",
)
def test_an_end_is_proven_through_every_fault(world: RentingWorld, provider: str, fault: dict[str, Any]) -> None:
    world.rent(world.offers(provider))
    rule = dict(fault)
    world.simulator.fault(f"{provider}.{rule.pop('endpoint')}", **rule)
    gone_for_good(world)
    (attempt,) = world.attempts
    assert attempt.receipt is not None
    views = ["is it there", "is it listed", "is it paid for"]
    last = attempt.receipt["proof"][-3 * world.providers[provider].timing.absence_checks :]
    assert [step["asked"] for step in last] == views * 3
    assert {step["answer"] for step in last} == {"absent"}
    assert attempt.receipt["gone_at"] >= world.simulator.ever()[0]["gone_at"]


def test_an_instance_that_is_still_shown_is_not_gone(world: RentingWorld) -> None:
    world.simulator.fault("vast.create", "gone_lag", nth=1, seconds=40)
    world.rent(world.offers("vast"))
    before = world.clock.now()
    gone_for_good(world)
    assert world.clock.now() - before >= 40


@BOTH
def test_a_destroy_that_never_works_is_never_called_done(world: RentingWorld, provider: str) -> None:
    world.rent(world.offers(provider))
    world.simulator.fault(f"{provider}.destroy", "destroy_noop")
    with pytest.raises(UnprovenError, match="may still be billing"):
        world.end(patience_s=60)
    assert len(world.simulator.live()) == 1
    assert not world.attempts[0].final
    world.simulator._session.delete(f"{world.simulator.url}/_sim/faults", timeout=10)
    gone_for_good(world)


@BOTH
@pytest.mark.parametrize("fault", ["auth", "forbidden", "malformed"])
def test_a_listing_that_fails_is_never_empty(world: RentingWorld, provider: str, fault: str) -> None:
    world.rent(world.offers(provider))
    world.simulator.fault(f"{provider}.list", fault)
    with pytest.raises(ProviderError):
        world.providers[provider].pods()
    world.simulator._session.delete(f"{world.simulator.url}/_sim/faults", timeout=10)
    gone_for_good(world)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_the_daily_search_quota_is_told_with_its_hours(world: RentingWorld) -> None:
    world.simulator.fault("vast.search", "search_quota")
    with pytest.raises(RateLimitedError) as caught:
        world.offers("vast")
    assert caught.value.retry_after_s > 600


@BOTH
def test_our_pace_is_never_too_fast(world: RentingWorld, provider: str) -> None:
    world.rent(world.offers(provider), FakeLogin(GateError("bad GPU")))
    gone_for_good(world)
    statuses = [row["status"] for row in world.simulator.get("requests")["requests"]]
    assert 429 not in statuses


@BOTH
def test_the_balance_is_read(world: RentingWorld, provider: str) -> None:
    world.simulator.post("balance", {"provider": provider, "usd": 12.5})
    balance = world.providers[provider].balance_micros()
    assert balance is not None
    assert micros_to_usd(balance) == pytest.approx(12.5, abs=0.01)


# --- what the key may do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "endpoint", "what"),
    [
        ("vast", "search", "searches the market"),
        ("vast", "list", "sees instances"),
        ("vast", "charges", "sees the bill"),
        ("runpod", "gpus", "sees GPU types"),
        ("runpod", "list", "sees pods"),
        ("runpod", "billing", "sees the bill"),
    ],
)
def test_the_scope_that_a_key_lacks_is_found_by_calls_that_change_nothing(
    world: RentingWorld, provider: str, endpoint: str, what: str
) -> None:
    client = world.providers[provider]
    assert isinstance(client, TellsReach)
    assert [item.allowed for item in client.reach()] == [True, True, True]
    world.simulator.fault(f"{provider}.{endpoint}", "forbidden")
    assert [item.what for item in client.reach() if item.allowed is False] == [what]
    assert world.simulator.ever() == []
