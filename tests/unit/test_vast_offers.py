"""What is asked of Vast's market, and what an answer is worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from pennypod.errors import (
    AuthError,
    FundsError,
    InputError,
    InvalidError,
    ProviderError,
    RateLimitedError,
    TransientError,
)
from pennypod.model.offer import Need
from pennypod.providers.http import Http
from pennypod.providers.vast import SPACING_S, VastProvider, search_body
from scripted_api import KEY, Answer, ScriptedApi, scripted_api
from vast_shapes import SEARCH_OPERATORS, SEARCH_PLAIN, offer_row

SEARCH = "POST /api/v0/bundles/"


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as api:
        yield api


@pytest.fixture
def vast(api: ScriptedApi) -> VastProvider:
    clock = FakeClock()
    return VastProvider(Http("vast", api.url, KEY, clock), clock)


def rows(*found: dict[str, Any]) -> Answer:
    return Answer(200, {"offers": list(found)})


def body_of(need: Need) -> dict[str, Any]:
    body = search_body(need)
    assert body is not None
    return body


# --- the question -----------------------------------------------------------------------------------------------------


def test_a_plain_need_asks_for_verified_machines_cheapest_first_at_our_disk_size(
    api: ScriptedApi, vast: VastProvider
) -> None:
    api.on(SEARCH, rows())
    assert vast.offers(Need(disk_gb=40)) == []
    (asked,) = api.asked
    assert asked.body == {
        "verified": {"eq": True},
        "external": {"eq": False},
        "rentable": {"eq": True},
        "num_gpus": {"eq": 1},
        "direct_port_count": {"gte": 1},
        "disk_space": {"gte": 40.0},
        "order": [["dph_total", "asc"]],
        "type": "on-demand",
        "limit": 64,
        "allocated_storage": 40.0,
    }


def test_every_wish_becomes_a_filter_in_vasts_units() -> None:
    body = body_of(
        Need(
            gpu=("RTX 4090", "H100"),
            gpu_count=2,
            gpu_ram_gb=24,
            reliability=0.98,
            inet_down_mbps=200,
            inet_up_mbps=100,
            disk_gb=60,
            cuda_min=12.4,
            region=("us", "CA"),
            secure=True,
            max_price_micros_per_h=500_000,
        )
    )
    assert body["gpu_name"] == {"in": ["RTX 4090", "H100 SXM", "H100 PCIE", "H100 NVL"]}
    assert body["num_gpus"] == {"eq": 2}
    assert body["gpu_ram"] == {"gte": 24000}
    assert body["reliability"] == {"gte": 0.98}
    assert body["inet_down"] == {"gte": 200}
    assert body["inet_up"] == {"gte": 100}
    assert body["cuda_max_good"] == {"gte": 12.4}
    assert body["geolocation"] == {"in": ["US", "CA"]}
    assert body["datacenter"] == {"eq": True}
    assert body["dph_total"] == {"lte": 0.5}
    assert body["allocated_storage"] == 60


def test_vast_rents_no_disk_below_eight_gigabytes() -> None:
    assert body_of(Need(disk_gb=3))["allocated_storage"] == 8
    assert body_of(Need(disk_gb=20.2))["allocated_storage"] == 21


def test_a_gpu_that_vast_does_not_have_is_not_asked_for(api: ScriptedApi, vast: VastProvider) -> None:
    assert vast.offers(Need(gpu=("MI300X",))) == []
    assert api.asked == []


def test_the_jobs_own_query_is_added_to_its_wishes() -> None:
    body = body_of(Need(gpu=("RTX 3090",), disk_gb=20, vast_query="dlperf>20 gpu_ram>=24 disk_space>60 verified=any"))
    assert body["gpu_name"] == {"in": ["RTX 3090"]}
    assert body["dlperf"] == {"gt": "20"}
    assert body["gpu_ram"] == {"gte": 24000.0}
    assert body["disk_space"] == {"gte": 20.0, "gt": "60"}
    assert "verified" not in body


def test_the_jobs_own_query_chooses_the_gpus() -> None:
    body = body_of(Need(gpu=("RTX 3090",), vast_query="gpu_name=RTX_4090 num_gpus in [1,2]"))
    assert body["gpu_name"] == {"eq": "RTX 4090"}
    assert body["num_gpus"] == {"in": ["1", "2"]}


def test_no_query_lifts_the_price_cap_or_the_secure_rule() -> None:
    for query in ("datacenter=any dph=any", "datacenter=false dph<=9"):
        body = body_of(Need(secure=True, max_price_micros_per_h=400_000, vast_query=query))
        assert body["datacenter"] == {"eq": True}
        assert body["dph_total"] == {"lte": 0.4}
    tighter = Need(max_price_micros_per_h=400_000, vast_query="dph<=0.2")
    assert body_of(tighter)["dph_total"] == {"lte": 0.2}


def test_a_query_that_cannot_be_read_is_the_users_error(api: ScriptedApi, vast: VastProvider) -> None:
    with pytest.raises(InputError):
        vast.offers(Need(vast_query="gpu_ram>=lots"))
    assert api.asked == []


@given(
    st.builds(
        Need,
        gpu=st.lists(st.sampled_from(["RTX 4090", "H100", "any", "New Card"])).map(tuple),
        gpu_count=st.integers(1, 8),
        gpu_ram_gb=st.none() | st.floats(1, 200),
        reliability=st.none() | st.floats(0, 1),
        disk_gb=st.floats(0.1, 5000),
        cuda_min=st.none() | st.floats(11, 13),
        region=st.lists(st.sampled_from(["US", "Texas"])).map(tuple),
        secure=st.booleans(),
        max_price_micros_per_h=st.none() | st.integers(1, 10**8),
    )
)
def test_every_filter_is_an_object_of_known_operators(need: Need) -> None:
    body = body_of(need)
    for name, wish in body.items():
        if name not in SEARCH_PLAIN:
            assert isinstance(wish, dict), name
            assert wish, name
            assert set(wish) <= SEARCH_OPERATORS, name
    assert isinstance(body["limit"], int)
    assert body["disk_space"]["gte"] == body["allocated_storage"] >= need.disk_gb


# --- the answer -------------------------------------------------------------------------------------------------------


def test_an_offer_is_told_in_our_words(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(SEARCH, rows(offer_row()))
    (offer,) = vast.offers(Need(disk_gb=20))
    assert (offer.provider, offer.offer_id, offer.machine_id) == ("vast", "4242", "12")
    assert (offer.gpu, offer.gpu_count, offer.gpu_ram_gb) == ("RTX 4090", 1, 24.564)
    assert offer.price_micros_per_h == 304_167
    assert (offer.inet_down_mbps, offer.inet_up_mbps) == (873.1, 512.4)
    assert (offer.traffic_down_micros_per_gb, offer.traffic_up_micros_per_gb) == (10_000, 20_000)
    assert (offer.reliability, offer.region, offer.secure, offer.pooled) == (0.9941, "Texas, US", False, False)
    assert (offer.disk_gb, offer.details["host_id"], offer.details["cuda_max_good"]) == (20, 7, 12.8)


def test_the_price_is_for_our_disk_even_when_the_search_priced_another(api: ScriptedApi, vast: VastProvider) -> None:
    """storage $/h = storage_cost x GB / 720, as two samples of the specification compute it."""
    api.on(SEARCH, rows(offer_row(dph_base=0.3, dph_total=0.301, storage_cost=0.15)))
    (offer,) = vast.offers(Need(disk_gb=100))
    assert offer.price_micros_per_h == 300_000 + round(0.15 * 100 / 720 * 1e6)


@pytest.mark.parametrize(
    "changes",
    [
        {"rented": True},
        {"rentable": False},
        {"dph_total": None},
        {"dph_total": 0},
        {"machine_id": None},
        {"id": None, "ask_contract_id": None},
        {"num_gpus": 1, "dph_total": 0.9},
        {"geolocation": "Hanoi, VN"},
    ],
)
def test_what_cannot_be_rented_or_does_not_fit_is_left_out(
    api: ScriptedApi, vast: VastProvider, changes: dict[str, Any]
) -> None:
    api.on(SEARCH, rows(offer_row(1, machine_id=11) | changes, offer_row(2)))
    need = Need(region=("US",), max_price_micros_per_h=500_000)
    assert [offer.offer_id for offer in vast.offers(need)] == ["2"]


def test_a_machine_is_offered_once_at_its_lowest_price(api: ScriptedApi, vast: VastProvider) -> None:
    dear, cheap = offer_row(1, dph_total=0.5), offer_row(2, dph_total=0.4)
    api.on(SEARCH, rows(dear, dear, cheap, offer_row(3, machine_id=13), offer_row(4, num_gpus=2, dph_total=0.9)))
    assert [offer.offer_id for offer in vast.offers(Need())] == ["2", "3", "4"]


@pytest.mark.parametrize(("region", "fits"), [("Texas", True), ("TX", False), ("us", True), ("California", False)])
def test_a_region_is_a_country_or_part_of_a_place(
    api: ScriptedApi, vast: VastProvider, region: str, fits: bool
) -> None:
    api.on(SEARCH, rows(offer_row()))
    assert bool(vast.offers(Need(region=(region,)))) is fits


@pytest.mark.parametrize("answer", [Answer(200, {}), Answer(200, {"offers": None}), Answer(200, [])])
def test_a_strange_answer_is_never_an_empty_market(api: ScriptedApi, vast: VastProvider, answer: Answer) -> None:
    api.on(SEARCH, answer)
    with pytest.raises(TransientError):
        vast.offers(Need())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(404, {"success": False, "error": "auth_error", "msg": "Invalid user key"}), AuthError),
        (Answer(403, {"success": False, "error": "auth_error", "msg": "This action requires login."}), AuthError),
        (Answer(401, {"msg": "Invalid user key"}), AuthError),
        (Answer(404, {"msg": "Session expired. Please log in again."}), AuthError),
        (
            Answer(400, {"success": False, "error": "bad_request", "msg": "q.gpu_name: Input should be a valid"}),
            InvalidError,
        ),
        (Answer(200, {"success": False, "error": "missing_billing", "msg": "You lack credit"}), FundsError),
        (Answer(410, {"success": False, "error": "deprecated_endpoint", "msg": "use another"}), InvalidError),
        (Answer(429, {"detail": "API requests too frequent: endpoint threshold=2.0"}), RateLimitedError),
    ],
    ids=lambda value: str(getattr(value, "status", "")) or getattr(value, "code", ""),
)
def test_each_refusal_has_its_error(
    api: ScriptedApi, vast: VastProvider, answer: Answer, error: type[ProviderError]
) -> None:
    api.on(SEARCH, answer)
    with pytest.raises(error) as caught:
        vast.offers(Need())
    assert type(caught.value) is error


def test_the_daily_quota_is_told_with_its_hours_and_not_asked_again(api: ScriptedApi, vast: VastProvider) -> None:
    body = {"success": False, "error": "search_quota_exceeded", "msg": "daily search quota exceeded"}
    api.on(SEARCH, Answer(429, body, {"Retry-After": "27000", "X-RateLimit-Reset": "1764633600"}))
    with pytest.raises(RateLimitedError) as caught:
        vast.offers(Need())
    assert (caught.value.retry_after_s, len(api.asked)) == (27000, 1)


def test_every_spacing_covers_what_the_service_enforces() -> None:
    enforced = {"search": 2, "create": 4.5, "list": 1, "get": 2, "destroy": 3, "ssh": 2, "user": 2, "charges": 1}
    assert all(SPACING_S[endpoint] > seconds for endpoint, seconds in enforced.items())
