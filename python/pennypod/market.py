"""Which offer first, and what it may cost at worst. Floor 2: pure arithmetic over offers.

The ladder: the first tier of wishes before the second; with GPU types in order, every offer of the first type before
any of the second, whatever its provider; within a type the regions in order; among equals, and where a job says
"cheapest", the expected cost decides. A ladder has few rungs and a market many offers, so one rung is kept for the best
offer of each tier, type and provider, and only what is left goes to more of the same.

Ranking is by the expected cost of the whole run until the weights are home, not by $/h alone: a cheap machine behind a
slow line can cost more than a dear one. The wallclock budget is a multiple of the optimistic estimate (erratum 8): it
gives the deadline, and the deadline gives the worst-case cost that caps are checked against.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pennypod import gpus
from pennypod.errors import BudgetError, NoCapacityError
from pennypod.ledger.records import QuarantineRecord
from pennypod.model.money import cost_micros, format_usd
from pennypod.model.offer import Offer

DEFAULT_BUDGET_FACTOR = 2.5
SECURE_ONLY_ABOVE_S = 3600.0
DEFAULT_LADDER = ("RTX 4090", "RTX 3090", "RTX A5000", "L4", "A100 PCIe", "H100 PCIe", "H200")
"""Where GPUs are paid for, a job that says nothing about them gets these, in this order: most work per dollar first."""
_BYTES_PER_GB = 1_000_000_000
_WORD = re.compile(r"[^\W_]+")
_DEFAULT_MBPS = 100.0  # what we assume of a line whose speed the provider does not tell


@dataclass(frozen=True, slots=True)
class Estimate:
    """The optimistic view of a run: seconds of boot and training, bytes to move up and down."""

    boot_s: float
    train_s: float
    upload_bytes: int = 0
    fetch_bytes: int = 0
    image_bytes: int = 0

    def seconds_on(self, offer: Offer) -> float:
        """Expected seconds until the weights are home on that offer's line."""
        down = _bytes_per_s(offer.inet_down_mbps)
        up = _bytes_per_s(offer.inet_up_mbps)
        return self.boot_s + self.train_s + (self.image_bytes + self.upload_bytes) / down + self.fetch_bytes / up

    def traffic_micros_on(self, offer: Offer) -> int:
        down_gb = (self.image_bytes + self.upload_bytes) / _BYTES_PER_GB
        up_gb = self.fetch_bytes / _BYTES_PER_GB
        return round(down_gb * offer.traffic_down_micros_per_gb + up_gb * offer.traffic_up_micros_per_gb)


@dataclass(frozen=True, slots=True)
class RankedOffer:
    """`expected_micros` and `worst_case_micros` are for the whole run, traffic included. Tier 2: second choice."""

    offer: Offer
    expected_s: float
    expected_micros: int
    budget_s: float
    worst_case_micros: int
    tier: int = 1


def rank(
    offers: Iterable[Offer],
    estimate: Estimate,
    budget_factor: float = DEFAULT_BUDGET_FACTOR,
    preference: Sequence[str] = (),
    regions: Sequence[str] = (),
) -> list[RankedOffer]:
    """By GPU type in order of `preference`, within a type by region in order, within a region the cheapest run first.

    Without a preference only the cost counts. Types that nobody asked for come last, as one. Equal costs are ordered by
    machine so that the order is stable.
    """
    ranked = [_rate(offer, estimate, budget_factor) for offer in offers]
    rungs = {name: number for number, name in enumerate(preference)}

    def place(rated: RankedOffer) -> tuple[int, int, int, str, str, str]:
        offer = rated.offer
        rung = rungs.get(gpus.canonical(offer.gpu), len(rungs))
        region = _region_rung(offer.region, regions) if preference else 0
        return rung, region, rated.expected_micros, offer.provider, offer.machine_id, offer.offer_id

    return sorted(ranked, key=place)


def _region_rung(place: str, regions: Sequence[str]) -> int:
    """The first of the wished regions that a place is in: "Texas, US" by country or name, "EU-RO-1" by any part."""
    words = set(_WORD.findall(place.casefold()))
    for number, region in enumerate(regions):
        wish = region.strip().casefold()
        if wish in words or (len(wish) > 2 and wish in place.casefold()):
            return number
    return len(regions)


def admission(ranked: Sequence[RankedOffer], *, by_type: bool) -> list[RankedOffer]:
    """Who gets a rung first: the best offer of each tier, of each GPU type if those are in order, and of each provider.

    The rest follows in the order of the ranking. Without this, eight rungs would be eight offers of the first type.
    """

    def gpu_type(rated: RankedOffer) -> str:
        return gpus.canonical(rated.offer.gpu) if by_type else ""

    kinds: tuple[Callable[[RankedOffer], tuple[int, str]], ...] = (
        lambda rated: (rated.tier, ""),
        lambda rated: (rated.tier, gpu_type(rated)),
        lambda rated: (rated.tier, rated.offer.provider),
    )
    firsts: dict[int, RankedOffer] = {}
    for kind in kinds:
        seen = set()
        for number, rated in enumerate(ranked):
            if kind(rated) not in seen:
                seen.add(kind(rated))
                firsts.setdefault(number, rated)
    return [*firsts.values(), *(rated for number, rated in enumerate(ranked) if number not in firsts)]


def _rate(offer: Offer, estimate: Estimate, budget_factor: float) -> RankedOffer:
    seconds = estimate.seconds_on(offer)
    traffic = estimate.traffic_micros_on(offer)
    budget_s = seconds * budget_factor
    return RankedOffer(
        offer=offer,
        expected_s=seconds,
        expected_micros=cost_micros(offer.price_micros_per_h, seconds) + traffic,
        budget_s=budget_s,
        worst_case_micros=cost_micros(offer.price_micros_per_h, budget_s) + traffic,
    )


def without_quarantined(offers: Iterable[Offer], quarantined: Iterable[QuarantineRecord]) -> list[Offer]:
    """Drop machines that failed lately."""
    bad = {(record.provider, record.machine_id) for record in quarantined}
    return [offer for offer in offers if (offer.provider, offer.machine_id) not in bad]


def within_caps(ranked: Sequence[RankedOffer], max_cost_micros: int | None) -> list[RankedOffer]:
    """The offers whose worst case fits the cap.

    Raises NoCapacityError when there is no offer at all and BudgetError when the cheapest one breaks the cap.
    """
    if not ranked:
        raise NoCapacityError("no offer fits: relax the job's pod_* filters or try another provider")
    if max_cost_micros is None:
        return list(ranked)
    fitting = [r for r in ranked if r.worst_case_micros <= max_cost_micros]
    if not fitting:
        cheapest = min(ranked, key=lambda r: r.worst_case_micros)
        raise BudgetError(
            f"the cheapest fit may cost {format_usd(cheapest.worst_case_micros)} at worst"
            f" ({cheapest.budget_s / 60:.0f} min at {format_usd(cheapest.offer.price_micros_per_h)}/h),"
            f" over max_cost_usd {format_usd(max_cost_micros)}: nothing was rented",
            worst_case_micros=cheapest.worst_case_micros,
            max_cost_micros=max_cost_micros,
        )
    return fitting


def within_one_deadline(
    ranked: Sequence[RankedOffer],
    estimate: Estimate,
    max_cost_micros: int | None,
    max_attempts: int,
    admitted: Sequence[RankedOffer] | None = None,
) -> list[RankedOffer]:
    """At most `max_attempts` offers that keep the cap under a deadline that is long enough for each of them, by rank.

    A run has one deadline, so an offer behind a slow line lengthens it for the dear ones too: who comes first in
    `admitted` (see `admission`; the ranking itself where it is not given) wins.
    """
    kept: list[RankedOffer] = []
    for rated in ranked if admitted is None else admitted:
        if len(kept) == max_attempts:
            break
        together = [*kept, rated]
        if max_cost_micros is None or worst_case_micros(together, estimate) <= max_cost_micros:
            kept = together
    chosen = {id(rated) for rated in kept}
    return [rated for rated in ranked if id(rated) in chosen]


def within_time(ranked: Sequence[RankedOffer], estimate: Estimate, left_s: float) -> list[RankedOffer]:
    """The same offers, none with a budget of more than `left_s` seconds: what a run that goes on has left."""
    return [
        replace(
            rated,
            budget_s=left_s,
            worst_case_micros=cost_micros(rated.offer.price_micros_per_h, left_s)
            + estimate.traffic_micros_on(rated.offer),
        )
        if rated.budget_s > left_s
        else rated
        for rated in ranked
    ]


def worst_case_micros(ranked: Sequence[RankedOffer], estimate: Estimate) -> int:
    """What any one of the offers costs at most when it is ended at their common deadline."""
    deadline_s = max(r.budget_s for r in ranked)
    return max(
        cost_micros(r.offer.price_micros_per_h, deadline_s) + estimate.traffic_micros_on(r.offer) for r in ranked
    )


def _bytes_per_s(mbps: float | None) -> float:
    return (mbps or _DEFAULT_MBPS) * 1_000_000 / 8
