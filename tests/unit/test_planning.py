"""From a job's wishes to a ladder: which offers, in which order, and never one that breaks the cap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes import FakeClock, FakeProvider, offer
from hypothesis import given
from hypothesis import strategies as st
from pennypod import gpus
from pennypod.errors import BudgetError, InputError, NoCapacityError, TransientError
from pennypod.ledger import QuarantineRecord
from pennypod.market import DEFAULT_LADDER, Estimate, rank, within_one_deadline, worst_case_micros
from pennypod.model.offer import Need, Offer
from pennypod.planning import Limits, Plan, make_plan, offer_from, plan_document, terms_from

TEN_MINUTES = Estimate(boot_s=60, train_s=540)
LIMITS = Limits(budget_factor=2.5, max_attempts=8)


class Market(FakeProvider):
    """Offers by GPU type, as a provider that honours the wish for one."""

    def __init__(self, name: str, *offers: Offer) -> None:
        super().__init__(FakeClock(), name)
        self.on_offer = [replace(item, provider=name) for item in offers]
        self.asked: list[Need] = []

    def offers(self, need: Need) -> list[Offer]:
        self.asked.append(need)
        wanted = gpus.wanted(need.gpu)
        return [item for item in self.on_offer if not wanted or item.gpu in wanted]


def card(number: int, gpu: str, dollars: float, **changes: object) -> Offer:
    return replace(offer(number, round(dollars * 1_000_000)), gpu=gpu, **changes)  # type: ignore[arg-type]


def plan(need: Need, *markets: Market, limits: Limits = LIMITS, estimate: Estimate = TEN_MINUTES) -> Plan:
    return make_plan({market.name: market for market in markets}, need, estimate, limits)


def ladder(made: Plan) -> list[tuple[str, str, str]]:
    return [(r.offer.gpu, r.offer.provider, r.offer.machine_id) for r in made.offers]


VAST = Market(
    "vast",
    card(1, "RTX 4090", 0.40, region="DE"),
    card(2, "RTX 4090", 0.35, region="US"),
    card(3, "RTX 3090", 0.20),
    card(4, "H100 SXM", 2.00),
    card(5, "RTX 3060", 0.05),
)
RUNPOD = Market("runpod", card(6, "RTX 4090", 0.38), card(7, "RTX 3090", 0.22), card(8, "A100 PCIe", 1.10))


def test_a_list_means_every_offer_of_the_first_type_before_any_of_the_second() -> None:
    made = plan(Need(gpu=("RTX 4090", "RTX 3090")), VAST, RUNPOD)
    assert ladder(made) == [
        ("RTX 4090", "vast", "machine-2"),
        ("RTX 4090", "runpod", "machine-6"),
        ("RTX 4090", "vast", "machine-1"),
        ("RTX 3090", "vast", "machine-3"),
        ("RTX 3090", "runpod", "machine-7"),
    ]


def test_names_of_any_provider_and_families_make_a_ladder_too() -> None:
    made = plan(Need(gpu=("nvidia geforce rtx 3090", "H100")), VAST, RUNPOD)
    assert [gpu for gpu, _, _ in ladder(made)] == ["RTX 3090", "RTX 3090", "H100 SXM"]


@pytest.mark.parametrize("word", ["cheapest", "Cheapest", "any"])
def test_cheapest_means_any_type_by_cost(word: str) -> None:
    made = plan(Need(gpu=(word,)), VAST, RUNPOD)
    prices = [r.offer.price_micros_per_h for r in made.offers]
    assert prices == sorted(prices)
    assert made.offers[0].offer.gpu == "RTX 3060"
    assert VAST.asked[-1].gpu == ()


def test_a_job_that_says_nothing_gets_seven_types_in_order() -> None:
    assert len(DEFAULT_LADDER) == len(set(DEFAULT_LADDER)) == 7
    made = plan(Need(), VAST, RUNPOD)
    assert [gpu for gpu, _, _ in ladder(made)] == ["RTX 4090"] * 3 + ["RTX 3090"] * 2 + ["A100 PCIe"]
    assert VAST.asked[-1].gpu == DEFAULT_LADDER
    assert any(", ".join(DEFAULT_LADDER) in note for note in made.notes)


def test_local_pods_have_what_they_have() -> None:
    local = Market("local", card(1, "CPU", 0.2), card(2, "CPU", 0.21))
    assert len(plan(Need(), local).offers) == 2
    assert (local.asked[-1].gpu, plan(Need(), local).notes) == ((), ())
    plan(Need(gpu=("cheapest",)), local)
    assert local.asked[-1].gpu == (), "it would say that a CPU stands in for a thing called cheapest"


def test_a_query_that_chooses_the_gpu_has_no_ladder_put_over_it() -> None:
    made = plan(Need(vast_query="gpu_name=RTX_3060"), VAST)
    assert made.offers[0].offer.gpu == "RTX 3060"
    assert made.notes == ()


def test_the_ladder_falls_through_a_provider_that_cannot_be_asked() -> None:
    class Down(Market):
        def offers(self, need: Need) -> list[Offer]:
            raise TransientError("502")

    made = plan(Need(gpu=("RTX 3090",)), Down("vast"), RUNPOD)
    assert ladder(made) == [("RTX 3090", "runpod", "machine-7")]
    assert made.notes == ("vast could not be asked: 502",)
    with pytest.raises(TransientError):
        plan(Need(), Down("vast"))


def test_the_ladder_is_as_long_as_it_may_be() -> None:
    made = plan(Need(gpu=("RTX 4090", "RTX 3090")), VAST, RUNPOD, limits=replace(LIMITS, max_attempts=4))
    assert [gpu for gpu, _, _ in ladder(made)] == ["RTX 4090"] * 3 + ["RTX 3090"]
    with pytest.raises(InputError):
        plan(Need(), VAST, limits=replace(LIMITS, max_attempts=0))


def test_a_preferred_type_that_breaks_the_cap_is_skipped_and_not_the_end() -> None:
    # 10 minutes with a factor of 2.5 at $2.00/h are $0.83, at $0.20/h $0.08.
    limits = replace(LIMITS, max_cost_micros=100_000)
    made = plan(Need(gpu=("H100", "RTX 3090")), VAST, limits=limits)
    assert [gpu for gpu, _, _ in ladder(made)] == ["RTX 3090"]
    with pytest.raises(BudgetError):
        plan(Need(gpu=("H100",)), VAST, limits=limits)


def test_a_machine_in_quarantine_is_no_rung() -> None:
    bad = QuarantineRecord("vast", "machine-2", at=0, until=1, reason="wrong product")
    made = make_plan({"vast": VAST}, Need(gpu=("RTX 4090",)), TEN_MINUTES, LIMITS, [bad])
    assert [machine for _, _, machine in ladder(made)] == ["machine-1"]
    with pytest.raises(NoCapacityError, match="quarantine"):
        make_plan({"vast": VAST}, Need(gpu=("H100 SXM",)), TEN_MINUTES, LIMITS, [replace(bad, machine_id="machine-4")])


def test_a_slow_line_far_down_the_ladder_does_not_lift_the_worst_case_over_the_cap() -> None:
    """A run has one deadline, and the slow offer would lengthen it for the dear one."""
    heavy = Estimate(boot_s=60, train_s=540, upload_bytes=5_000_000_000)
    fast = card(1, "RTX 4090", 0.40, inet_down_mbps=1000.0)
    slow = card(2, "RTX 3090", 0.02, inet_down_mbps=10.0)
    limits = replace(LIMITS, max_cost_micros=200_000)
    made = plan(Need(gpu=("RTX 4090", "RTX 3090")), Market("vast", fast, slow), limits=limits, estimate=heavy)
    assert [gpu for gpu, _, _ in ladder(made)] == ["RTX 4090"]
    assert made.worst_case_micros <= 200_000
    without_cap = plan(Need(gpu=("RTX 4090", "RTX 3090")), Market("vast", fast, slow), estimate=heavy)
    assert len(without_cap.offers) == 2
    assert without_cap.worst_case_micros > 200_000


@given(
    st.lists(
        st.tuples(st.integers(1, 5_000_000), st.floats(5, 10_000), st.integers(0, 50_000)), min_size=1, max_size=12
    ),
    st.integers(1, 3_000_000),
    st.integers(1, 8),
)
def test_no_ladder_ever_breaks_the_cap(machines: Sequence[tuple[int, float, int]], cap: int, max_attempts: int) -> None:
    offers = [
        replace(offer(number, price), inet_down_mbps=mbps, traffic_down_micros_per_gb=traffic)
        for number, (price, mbps, traffic) in enumerate(machines)
    ]
    estimate = Estimate(boot_s=60, train_s=600, upload_bytes=2_000_000_000)
    ranked = [r for r in rank(offers, estimate, 2.5) if r.worst_case_micros <= cap]
    kept = within_one_deadline(ranked, estimate, cap, max_attempts)
    assert len(kept) <= max_attempts
    assert kept[:1] == ranked[:1], "the best that fits is always a rung"
    assert not kept or worst_case_micros(kept, estimate) <= cap
    assert [ranked.index(r) for r in kept] == sorted(ranked.index(r) for r in kept)


def test_a_plan_survives_json() -> None:
    estimate = replace(TEN_MINUTES, fetch_bytes=1_000_000_000)
    market = Market("vast", card(1, "RTX 4090", 0.4, traffic_up_micros_per_gb=20_000))
    made = plan(Need(gpu=("RTX 4090",)), market, estimate=estimate)
    (document,) = plan_document(made)["offers"]
    assert offer_from(document) == made.offers[0].offer
    assert terms_from(document).traffic_micros == 20_000
    assert terms_from(document).expected_s == pytest.approx(made.offers[0].expected_s, abs=0.1)
    with pytest.raises(InputError):
        terms_from({"expected_s": "soon"})


# --- how few rungs are spread over many offers ------------------------------------------------------------------------


CROWD = Market(
    "vast",
    *(card(number, "RTX 4090", 0.30 + number / 1000) for number in range(40)),
    *(card(100 + number, "RTX 3090", 0.15 + number / 1000) for number in range(40)),
    card(200, "H200", 3.50),
)
OTHER = Market("runpod", card(300, "RTX 4090", 0.69))


def test_a_crowd_of_the_first_type_leaves_a_rung_for_each_other_type_and_provider() -> None:
    made = plan(Need(gpu=("RTX 4090", "RTX 3090", "H200")), CROWD, OTHER)
    rungs = [(gpu, provider) for gpu, provider, _ in ladder(made)]
    assert len(rungs) == LIMITS.max_attempts
    assert rungs == [("RTX 4090", "vast")] * 5 + [("RTX 4090", "runpod"), ("RTX 3090", "vast"), ("H200", "vast")]


def test_all_seven_types_of_the_default_ladder_are_reached() -> None:
    cards = (card(10 * rung + number, name, 1) for rung, name in enumerate(DEFAULT_LADDER) for number in range(9))
    made = plan(Need(), Market("vast", *cards))
    assert list(dict.fromkeys(gpu for gpu, _, _ in ladder(made))) == list(DEFAULT_LADDER)
    assert len(made.offers) == LIMITS.max_attempts


def test_cheapest_spreads_over_providers_and_not_over_types() -> None:
    made = plan(Need(gpu=("cheapest",)), CROWD, OTHER)
    assert [(gpu, provider) for gpu, provider, _ in ladder(made)] == [("RTX 3090", "vast")] * 7 + [
        ("RTX 4090", "runpod")
    ]


def test_one_attempt_is_the_best_offer() -> None:
    made = plan(Need(gpu=("RTX 4090", "RTX 3090")), CROWD, OTHER, limits=replace(LIMITS, max_attempts=1))
    assert ladder(made) == [("RTX 4090", "vast", "machine-0")]


def test_regions_are_tried_in_order_within_a_type() -> None:
    market = Market(
        "vast",
        card(1, "RTX 4090", 0.30, region="Texas, US"),
        card(2, "RTX 4090", 0.50, region="Hesse, DE"),
        card(3, "RTX 4090", 0.40, region="Bavaria, DE"),
        card(4, "RTX 3090", 0.10, region="Hesse, DE"),
    )
    pools = Market("runpod", card(5, "RTX 4090", 0.45, region="EU-RO-1,US-TX-3"))
    made = plan(Need(gpu=("RTX 4090", "RTX 3090"), region=("DE", "EU", "US")), market, pools)
    assert [machine for _, _, machine in ladder(made)] == [f"machine-{number}" for number in (3, 2, 5, 1, 4)]
    cheapest = plan(Need(gpu=("cheapest",), region=("DE", "US")), market)
    assert [machine for _, _, machine in ladder(cheapest)] == [f"machine-{number}" for number in (4, 1, 3, 2)]


# --- the second tier --------------------------------------------------------------------------------------------------


def second(need: Need, wishes: dict[str, object], *markets: Market, limits: Limits = LIMITS) -> Plan:
    return make_plan({market.name: market for market in markets}, need, TEN_MINUTES, limits, secondary=wishes)


def test_the_second_tier_comes_after_every_rung_of_the_first() -> None:
    made = second(Need(gpu=("RTX 4090",), region=("US",)), {"gpu": ["RTX 3090", "H200"], "region": []}, CROWD, OTHER)
    rungs = [(rated.tier, rated.offer.gpu) for rated in made.offers]
    assert rungs == [(1, "RTX 4090")] * 6 + [(2, "RTX 3090"), (2, "H200")]
    assert CROWD.asked[-1] == Need(gpu=("RTX 3090", "H200"))
    assert [item["tier"] for item in plan_document(made)["offers"]] == [rated.tier for rated in made.offers]


def test_an_offer_of_the_first_tier_is_not_a_rung_twice() -> None:
    made = second(Need(gpu=("RTX 3090",)), {"gpu": "cheapest"}, VAST)
    assert [machine for _, _, machine in ladder(made)] == [f"machine-{number}" for number in (3, 5, 2, 1, 4)]


def test_the_second_tier_is_enough_when_the_first_has_no_offer() -> None:
    made = second(Need(gpu=("B200",)), {"gpu": ["RTX 3090"]}, VAST)
    assert [(rated.tier, rated.offer.gpu) for rated in made.offers] == [(2, "RTX 3090")]


def test_caps_and_the_secure_rule_hold_for_the_second_tier_too() -> None:
    limits = replace(LIMITS, max_cost_micros=200_000)
    assert {gpu for gpu, _, _ in ladder(second(Need(gpu=("RTX 3090",)), {"gpu": ["H100"]}, VAST, limits=limits))} == {
        "RTX 3090"
    }
    market = Market("vast", card(1, "RTX 4090", 0.4))
    hours = Estimate(boot_s=60, train_s=7200)
    make_plan({"vast": market}, Need(gpu=("RTX 3090",)), hours, LIMITS, secondary={"gpu": ["RTX 4090"]})
    assert [need.secure for need in market.asked] == [True, True]


@pytest.mark.parametrize("wishes", [{"disk_gb": 10}, {"reliability": "much"}, {"secure": "perhaps"}, {"gpus": []}])
def test_a_wish_that_is_none_is_refused(wishes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="secondary"):
        second(Need(), wishes, VAST)


# --- nothing fits -----------------------------------------------------------------------------------------------------


class Capped(Market):
    """A market that honours the cap on the price as well."""

    def offers(self, need: Need) -> list[Offer]:
        cap = need.max_price_micros_per_h
        return [item for item in super().offers(need) if cap is None or item.price_micros_per_h <= cap]


def test_a_price_cap_that_rules_everything_out_is_named_with_the_cheapest_price() -> None:
    market = Capped("vast", card(1, "RTX 4090", 0.40), card(2, "RTX 4090", 0.35), card(3, "H100 SXM", 0.05))
    with pytest.raises(NoCapacityError, match=r"asks \$0\.35\S*/h, over max_price_usd_per_h \(\$0\.01\S*\)") as caught:
        plan(Need(gpu=("RTX 4090",), max_price_micros_per_h=10_000), market)
    assert "pod_*" not in caught.value.message


def test_a_price_cap_is_not_blamed_for_what_nobody_offers_at_any_price() -> None:
    with pytest.raises(NoCapacityError, match=r"relax the job's pod_\* filters"):
        plan(Need(gpu=("L40S",), max_price_micros_per_h=10_000), Capped("vast", card(1, "RTX 4090", 0.40)))
