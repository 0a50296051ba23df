"""Ranking by the cost of the whole run, worst cases and caps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import offer
from hypothesis import given
from hypothesis import strategies as st
from pennypod.errors import BudgetError, NoCapacityError
from pennypod.ledger import QuarantineRecord
from pennypod.market import Estimate, rank, within_caps, without_quarantined
from pennypod.model.money import cost_micros
from pennypod.model.offer import Offer

GB = 1_000_000_000
HOUR = Estimate(boot_s=60, train_s=3540)

offers = st.lists(
    st.builds(
        lambda number, price, down, up, traffic: replace(
            offer(number, price),
            inet_down_mbps=down,
            inet_up_mbps=up,
            traffic_down_micros_per_gb=traffic,
        ),
        st.integers(1, 50),
        st.integers(1, 5_000_000),
        st.none() | st.floats(1, 10_000),
        st.none() | st.floats(1, 10_000),
        st.integers(0, 100_000),
    ),
    max_size=12,
    unique_by=lambda o: o.offer_id,
)
estimates = st.builds(
    Estimate,
    boot_s=st.floats(0, 600),
    train_s=st.floats(1, 10_000),
    upload_bytes=st.integers(0, 50 * GB),
    fetch_bytes=st.integers(0, 5 * GB),
    image_bytes=st.integers(0, 20 * GB),
)


@given(offers, estimates, st.floats(1, 4))
def test_the_order_is_by_expected_cost_and_does_not_depend_on_the_listing(
    listed: list[Offer], estimate: Estimate, factor: float
) -> None:
    ranked = rank(listed, estimate, factor)
    costs = [r.expected_micros for r in ranked]
    assert costs == sorted(costs)
    assert [r.offer for r in rank(reversed(listed), estimate, factor)] == [r.offer for r in ranked]
    assert all(r.worst_case_micros >= r.expected_micros for r in ranked)


def test_a_cheap_machine_on_a_slow_line_loses_to_a_dear_one_on_a_fast_line() -> None:
    slow = replace(offer(1, 100_000), inet_down_mbps=20.0)
    fast = replace(offer(2, 200_000), inet_down_mbps=2_000.0)
    estimate = Estimate(boot_s=0, train_s=600, image_bytes=20 * GB)
    assert [r.offer.offer_id for r in rank([slow, fast], estimate)] == ["offer-2", "offer-1"]
    # 20 GB at 20 Mbit/s are 8000 s, at 2 Gbit/s 80 s.
    assert [round(r.expected_s) for r in rank([slow, fast], estimate)] == [680, 8600]


def test_traffic_is_counted_once_and_not_multiplied_by_the_budget() -> None:
    dear_line = replace(offer(1, 0), traffic_down_micros_per_gb=10_000, traffic_up_micros_per_gb=20_000)
    (ranked,) = rank([dear_line], Estimate(boot_s=0, train_s=60, upload_bytes=3 * GB, fetch_bytes=GB), 2.5)
    assert ranked.expected_micros == ranked.worst_case_micros == 50_000


def test_the_worst_case_is_the_whole_budget_at_the_full_price() -> None:
    (ranked,) = rank([offer(1, 1_000_000)], HOUR, 2.5)
    assert ranked.budget_s == 2.5 * 3600
    assert ranked.worst_case_micros == cost_micros(1_000_000, 9000) == 2_500_000


def test_a_line_of_unknown_speed_is_taken_for_a_hundred_megabits() -> None:
    (ranked,) = rank([offer(1)], Estimate(boot_s=0, train_s=0, upload_bytes=GB))
    assert ranked.expected_s == pytest.approx(80.0)


def test_only_the_machine_that_failed_is_left_out() -> None:
    bad = QuarantineRecord("fake", "machine-2", at=0, until=1, reason="wrong result")
    elsewhere = QuarantineRecord("other", "machine-1", at=0, until=1, reason="same name, another provider")
    kept = without_quarantined([offer(1), offer(2), offer(3)], [bad, elsewhere])
    assert [o.machine_id for o in kept] == ["machine-1", "machine-3"]


def test_no_offer_at_all_is_not_a_broken_cap() -> None:
    with pytest.raises(NoCapacityError):
        within_caps([], 1)


def test_a_cap_keeps_what_fits_even_at_its_very_edge() -> None:
    ranked = rank([offer(1, 1_000_000), offer(2, 2_000_000)], HOUR, 1.0)
    assert within_caps(ranked, None) == ranked
    assert [r.offer.offer_id for r in within_caps(ranked, 1_000_000)] == ["offer-1"]


def test_a_broken_cap_says_what_the_cheapest_would_cost() -> None:
    ranked = rank([offer(1, 3_000_000), offer(2, 2_000_000)], HOUR, 2.0)
    with pytest.raises(BudgetError) as caught:
        within_caps(ranked, 3_999_999)
    assert caught.value.code == "over_budget"
    assert caught.value.details == {"worst_case_micros": 4_000_000, "max_cost_micros": 3_999_999}
    assert "nothing was rented" in str(caught.value)
