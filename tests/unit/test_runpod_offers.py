"""RunPod's catalogue as offers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeClock
from pennypod.errors import AuthError, InvalidError, ProviderError, TransientError
from pennypod.model.offer import Need, Offer
from pennypod.providers.http import Http
from pennypod.providers.runpod import RunpodProvider, base_address, catalogue_query
from runpod_shapes import gpu_type, problem
from scripted_api import KEY, Answer, ScriptedApi, scripted_api

CATALOGUE = "GET /v2/catalog/gpus"


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as api:
        yield api


@pytest.fixture
def runpod(api: ScriptedApi) -> RunpodProvider:
    clock = FakeClock()
    return RunpodProvider(Http("runpod", api.url, KEY, clock), clock)


def types(*found: dict[str, Any]) -> Answer:
    return Answer(200, {"gpus": list(found)})


def secure_of(offers: list[Offer]) -> list[str]:
    return [offer.gpu for offer in offers if offer.secure]


def test_both_clouds_are_asked_for_price_and_stock(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CATALOGUE, types())
    assert runpod.offers(Need(gpu_count=2, cuda_min=12.8)) == []
    common = {"include": "AVAILABILITY", "product": "POD", "count": "2", "minCudaVersion": "12.8"}
    assert [asked.query for asked in api.asked] == [common | {"cloud": "SECURE"}, common | {"cloud": "COMMUNITY"}]


def test_a_type_is_an_offer_in_each_cloud_at_its_own_price(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CATALOGUE, types(gpu_type()))
    secure, community = runpod.offers(Need(disk_gb=72))
    disk = 72 * 0.10 / 720
    assert (secure.secure, secure.price_micros_per_h) == (True, round((0.69 + disk) * 1e6))
    assert (community.secure, community.price_micros_per_h) == (False, round((0.34 + disk) * 1e6))
    assert (secure.gpu, secure.gpu_ram_gb, secure.pooled) == ("RTX 4090", 24, True)
    assert secure.details["gpu_id"] == "NVIDIA GeForce RTX 4090"
    assert secure.offer_id != community.offer_id


def test_the_price_counts_every_gpu(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CATALOGUE, types(gpu_type()))
    assert runpod.offers(Need(gpu_count=4, disk_gb=72))[0].price_micros_per_h == 2_770_000


@pytest.mark.parametrize(
    "changes",
    [
        {"secure": False, "price": {"secure": 0, "community": 0.3}},
        {"secure": False},  # a price is shown all the same
        {"price": {"secure": 0, "community": 0.3}},
        {"availability": "NONE"},
        {"maxCount": {"secure": 1, "community": 4}},
        {"memory": 16},
        {"id": "unknown"},
        {"manufacturer": "AMD", "id": "AMD Instinct MI300X OAM"},
        {"price": {"secure": 2.0, "community": 0.3}},
    ],
)
def test_what_is_not_there_or_does_not_fit_is_left_out(
    api: ScriptedApi, runpod: RunpodProvider, changes: dict[str, Any]
) -> None:
    api.on(CATALOGUE, types(gpu_type(**changes), gpu_type("NVIDIA L4")))
    need = Need(gpu_count=2, gpu_ram_gb=24, max_price_micros_per_h=1_500_000)
    assert secure_of(runpod.offers(need)) == ["L4"]


def test_only_wanted_types_are_offered_and_amd_only_by_name(api: ScriptedApi, runpod: RunpodProvider) -> None:
    amd = gpu_type("AMD Instinct MI300X OAM", manufacturer="AMD")
    api.on(CATALOGUE, types(gpu_type(), gpu_type("NVIDIA H100 80GB HBM3"), gpu_type("NVIDIA H100 NVL"), amd))
    assert secure_of(runpod.offers(Need(gpu=("H100",)))) == ["H100 SXM", "H100 NVL"]
    assert secure_of(runpod.offers(Need(gpu=("MI300X",)))) == ["MI300X"]
    assert "MI300X" not in secure_of(runpod.offers(Need()))


def test_a_type_of_tomorrow_is_offered_by_its_own_name(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CATALOGUE, types(gpu_type("NVIDIA Rubin R100")))
    assert secure_of(runpod.offers(Need(gpu=("NVIDIA Rubin R100",)))) == ["NVIDIA Rubin R100"]


def test_secure_only_does_not_look_at_the_community(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CATALOGUE, types(gpu_type()))
    assert [offer.secure for offer in runpod.offers(Need(secure=True))] == [True]
    assert [asked.query["cloud"] for asked in api.asked] == ["SECURE"]


@pytest.mark.parametrize("wish", [{"reliability": 0.99}, {"inet_down_mbps": 200}, {"inet_up_mbps": 100}])
def test_what_runpod_does_not_tell_is_believed_of_a_data_centre_only(
    api: ScriptedApi, runpod: RunpodProvider, wish: dict[str, float]
) -> None:
    api.on(CATALOGUE, types(gpu_type()))
    assert [offer.secure for offer in runpod.offers(Need(**wish))] == [True]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("region", "centres"),
    [
        (("EU",), ["EU-RO-1"]),  # the Swedish one has no stock
        (("RO",), ["EU-RO-1"]),
        (("US-TX-3",), ["US-TX-3"]),
        (("us", "ro"), ["US-TX-3"]),
    ],
)
def test_a_region_narrows_the_data_centres(
    api: ScriptedApi, runpod: RunpodProvider, region: tuple[str, ...], centres: list[str]
) -> None:
    api.on(CATALOGUE, types(gpu_type()))
    offer = runpod.offers(Need(region=region))[0]
    assert offer.details["data_centers"] == centres
    assert runpod.offers(Need(region=("JP",))) == []


def test_each_region_is_a_rung_of_its_own(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CATALOGUE, types(gpu_type()))
    offers = runpod.offers(Need(region=("us", "SE", "EU", "RO"), secure=True))
    assert [(offer.region, offer.details["data_centers"]) for offer in offers] == [
        ("US-TX-3", ["US-TX-3"]),  # none is left in Sweden, and what two wishes share is the first one's
        ("EU-RO-1", ["EU-RO-1"]),
    ]
    assert len({offer.offer_id for offer in offers}) == 2
    assert len({offer.machine_id for offer in offers}) == 1


def test_countries_are_asked_for_as_such() -> None:
    assert catalogue_query(Need(region=("us", "RO")), "SECURE")["countryCodes"] == "US,RO"
    assert "countryCodes" not in catalogue_query(Need(region=("EU-RO-1", "RO")), "SECURE")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(401, problem(401, "missing bearer token")), AuthError),
        (Answer(403, problem(403, "no permission")), AuthError),
        (Answer(403, "error code: 1010"), AuthError),
        (Answer(410, {"error": "gone"}), InvalidError),
        (Answer(400, problem(400, "include and product must come together")), InvalidError),
        (Answer(200, {}), TransientError),
        (Answer(200, "null"), TransientError),
        (Answer(503, problem(503, "x")), TransientError),
    ],
)
def test_each_refusal_has_its_error(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer, error: type[ProviderError]
) -> None:
    api.on(CATALOGUE, answer)
    with pytest.raises(error) as caught:
        runpod.offers(Need())
    assert type(caught.value) is error


def test_the_retired_api_says_what_to_change(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CATALOGUE, Answer(410, {"error": "rest v1 is retired"}))
    with pytest.raises(InvalidError, match="RUNPOD_API_BASE_URL, REST v2 is needed"):
        runpod.offers(Need())


@pytest.mark.parametrize("tail", ["", "/", "/v2", "/v2/", "/v1", "/graphql"])
def test_an_address_may_name_a_version(tail: str) -> None:
    assert base_address(f"https://api.runpod.io{tail}") == "https://api.runpod.io"
