"""The simulated market: searching, prices, determinism by seed; and the meter's arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod import vastquery
from pennypod.errors import InputError
from pennypod.simulator.clock import VirtualClock
from pennypod.simulator.market import RunpodMarket, VastMarket
from pennypod.simulator.meter import Meter, Tab, disk_rate, nanos
from pennypod.simulator.vast_search import BadQueryError, search

T0 = 1_796_000_000.0


def find(market: VastMarket, text: str = "", **extra: Any) -> list[dict[str, Any]]:
    return search(market, {**vastquery.parse(text), "limit": 10_000, **extra}, T0)


def test_the_same_seed_gives_the_same_market_whoever_asks_first() -> None:
    one, two = VastMarket(5, {}), VastMarket(5, {})
    find(two, "gpu_name=H100_SXM")
    assert find(one) == find(two)
    assert find(one) != find(VastMarket(6, {}))


def test_prices_drift_with_time_and_not_within_a_slot() -> None:
    market = VastMarket(5, {})
    machine = market.machines[0]
    slots = [market.price(machine, T0 + 600 * step) for step in range(50)]
    assert len(set(slots)) > 40
    assert all(abs(price / machine.dph_per_gpu - 1) <= 0.0801 for price in slots)
    still = VastMarket(5, {"drift": 0})
    assert {still.price(machine, T0 + 600 * step) for step in range(50)} == {machine.dph_per_gpu}


def test_an_offer_is_good_for_one_rental() -> None:
    market = VastMarket(5, {})
    row = find(market, "num_gpus=1")[0]
    offer, known = market.find(row["id"], T0)
    assert known
    assert offer is not None
    market.take(offer)
    assert market.find(row["id"], T0) == (None, True)
    assert row["id"] not in {other["id"] for other in find(market)}
    market.release(offer.machine.machine_id, 1)
    assert row["id"] not in {other["id"] for other in find(market)}, "the same slice comes back under another id"
    assert market.find(1, T0) == (None, False)


def test_the_official_search_language_finds_what_it_says() -> None:
    market = VastMarket(5, {})
    rows = find(market, "gpu_name=RTX_3090 reliability>0.95 inet_down>200 disk_space>60 gpu_ram>=24")
    assert rows
    for row in rows:
        assert row["gpu_name"] == "RTX 3090"
        assert row["reliability"] > 0.95
        assert row["inet_down"] > 200
        assert row["disk_space"] > 60
        assert row["gpu_ram"] >= 24000
    everything = find(market)
    wanted = [row["id"] for row in everything if row["gpu_name"] == "RTX 3090" and row["reliability"] > 0.95]
    assert {row["id"] for row in find(market, "gpu_name=RTX_3090 reliability>0.95")} == set(wanted)
    assert {row["gpu_name"] for row in find(market, "gpu_name in [A40,L4]")} == {"A40", "L4"}
    assert "A40" not in {row["gpu_name"] for row in find(market, "gpu_name notin [A40,L4]")}
    assert {row["verified"] for row in find(market, "verified=false")} == {False}
    assert {row["geolocation"][-2:] for row in find(market, "geolocation in [US,CA]")} == {"US", "CA"}


def test_numbers_may_come_as_texts_and_rented_is_no_filter() -> None:
    market = VastMarket(5, {})
    as_text = find(market, reliability={"gt": "0.98"}, num_gpus={"eq": "2"})
    assert as_text == find(market, reliability={"gt": 0.98}, num_gpus={"eq": 2})
    assert as_text
    assert find(market, rented={"eq": True}) == find(market)


def test_the_price_holds_the_disk_that_was_named() -> None:
    market = VastMarket(5, {"drift": 0, "machines": [{"dph_per_gpu": 0.4, "num_gpus": 1, "storage_cost": 0.144}]})
    for disk, total in ((None, 0.4016), (5.0, 0.401), (100, 0.42)):
        extra = {} if disk is None else {"allocated_storage": disk}
        assert find(market, **extra)[0]["dph_total"] == pytest.approx(total, abs=1e-9)


def test_order_and_limit() -> None:
    market = VastMarket(5, {})
    prices = [row["dph_total"] for row in find(market, order=[["dph_total", "asc"]])]
    assert prices == sorted(prices)
    assert [row["score"] for row in find(market)] == sorted((row["score"] for row in find(market)), reverse=True)
    assert len(search(market, {"limit": 7}, T0)) == 7
    two = [
        (row["num_gpus"], row["dph_total"]) for row in find(market, order=[["num_gpus", "desc"], ["dph_total", "asc"]])
    ]
    assert two == sorted(two, key=lambda pair: (-pair[0], pair[1]))


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"gpu_name": "RTX 3090"}, "q.gpu_name: Input should be a valid dictionary"),
        ({"reliability": {"gt": "high"}}, "q.reliability"),
        ({"reliability": {"above": 1}}, "q.reliability.above"),
        ({"type": "gift"}, "q.type"),
        ({"order": "dph_total"}, "q.order"),
        ({"limit": "all"}, "q.limit"),
    ],
)
def test_a_query_the_server_does_not_take(query: dict[str, Any], says: str) -> None:
    with pytest.raises(BadQueryError, match=says):
        search(VastMarket(5, {}), query, T0)


def test_a_market_file_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(InputError, match="dph"):
        VastMarket(5, {"machines": [{"gpu_name": "RTX 4090", "dph": 1}]})
    with pytest.raises(InputError, match="price"):
        RunpodMarket(5, {"gpus": [{"id": "NVIDIA A40", "price": 1}]})


def test_runpod_stock_is_taken_and_given_back() -> None:
    market = RunpodMarket(5, {"gpus": [{"id": "NVIDIA A40", "secure": 0.4, "community": 0.2, "stock": 3}]})
    gpu = market.gpus["NVIDIA A40"]
    assert market.level(gpu, "SECURE") == "MEDIUM"
    center = market.take(gpu, "SECURE", 2, None)
    assert center is not None
    assert market.level(gpu, "SECURE") == "LOW"
    assert market.level(gpu, "SECURE", 2) == "NONE"
    assert market.take(gpu, "SECURE", 2, None) is None
    assert market.take(gpu, "SECURE", 1, ["EU-RO-1"]) is None, "data centers are enforced"
    market.release(gpu.id, "SECURE", 2, center)
    assert market.take(gpu, "SECURE", 3, [center]) == center
    assert market.take(gpu, "COMMUNITY", 5, None) is None, "more than one community pod may have"


# --- money ------------------------------------------------------------------------------------------------------------


def test_rates_are_exact() -> None:
    assert nanos("0.1") == 100_000_000
    assert nanos(0.1 + 0.2) == 300_000_000
    assert disk_rate(0.15, 10.08) == 2_100_000  # Vast's own sample: 0.0021 $/h


def test_a_meter_counts_to_the_micro_dollar() -> None:
    meter = Meter(Tab())
    meter.set_rate("gpu", nanos("0.36"), 1000.0)
    assert meter.micros(1000.01) == 1
    assert meter.micros(1010.0) == 1000
    meter.set_rate("gpu", nanos("0.72"), 1010.0)
    meter.stop(1020.0)
    assert meter.micros(9999.0) == 3000
    assert meter.seconds("gpu", 9999.0) == 20.0
    assert meter.micros(1015.0, "gpu", 1010.0) == 1000


def test_traffic_is_charged_per_byte() -> None:
    tab = Tab()
    meter = Meter(tab)
    meter.add_bytes("bwd", 1_500_000_000, 0.01)
    assert meter.micros(0) == 15_000
    assert tab.micros(0) == 15_000


@given(st.lists(st.tuples(st.integers(0, 5_000_000_000), st.integers(0, 100_000)), min_size=1, max_size=20))
def test_the_tab_is_the_sum_of_its_meters_whatever_the_rates_do(changes: list[tuple[int, int]]) -> None:
    tab = Tab()
    meters = [Meter(tab), Meter(tab)]
    at = 1_000.0
    for number, (rate, milliseconds) in enumerate(changes):
        at += milliseconds / 1000
        meters[number % 2].set_rate("gpu" if number % 3 else "disk", rate, at)
    end = at + 3600
    assert abs(tab.micros(end) - sum(meter.micros(end) for meter in meters)) <= 1


def test_virtual_time() -> None:
    real = [10.0]
    clock = VirtualClock(2.0, start=100.0, real=lambda: real[0])
    real[0] = 15.0
    assert clock.now() == 110.0
    clock.set_speed(0)
    real[0] = 99.0
    assert clock.now() == 110.0
    clock.advance(5)
    assert clock.now() == 115.0
    for bad in (-1.0, 1e9):
        with pytest.raises(ValueError, match="speed"):
            clock.set_speed(bad)
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1)
