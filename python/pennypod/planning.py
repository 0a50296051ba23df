"""From a job's wishes to a plan: ranked offers, a deadline and the worst-case cost. Floor 2: asks providers for offers.

Nothing here rents. A plan that breaks a cap is an error before anything is spent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pennypod import gpus
from pennypod.errors import InputError, NoCapacityError, ProviderError
from pennypod.ledger import QuarantineRecord
from pennypod.market import (
    DEFAULT_LADDER,
    SECURE_ONLY_ABOVE_S,
    Estimate,
    RankedOffer,
    rank,
    within_caps,
    within_one_deadline,
    without_quarantined,
    worst_case_micros,
)
from pennypod.model.money import micros_to_usd, usd_to_micros
from pennypod.model.offer import Need, Offer
from pennypod.providers.base import Provider
from pennypod.providers.registry import LOCAL
from pennypod.rental import Terms


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_cost_micros` caps the worst case of one run; `max_attempts` how many offers may be tried."""

    budget_factor: float
    max_attempts: int
    max_cost_micros: int | None = None
    allow_community: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Offers in the order to try them, and what each one's traffic costs. `deadline_s` counts from now.

    The worst case holds for any of the offers.
    """

    offers: tuple[RankedOffer, ...]
    deadline_s: float
    worst_case_micros: int
    traffic_micros: tuple[int, ...]
    notes: tuple[str, ...] = ()


def make_plan(
    providers: Mapping[str, Provider],
    need: Need,
    estimate: Estimate,
    limits: Limits,
    quarantined: Sequence[QuarantineRecord] = (),
) -> Plan:
    """Ask every provider, rank, check caps.

    Raises InputError for limits that make no sense, NoCapacityError when nothing fits, BudgetError when the cheapest
    fit breaks the cap, and the provider's own error when not one provider could be asked.
    """
    _check(need, limits)
    notes: list[str] = []
    if _longer_than_an_hour(estimate, limits) and not limits.allow_community and not need.secure:
        need = replace(need, secure=True)
        notes.append("may bill over an hour: secure offers only (allow_community: true lifts this)")
    preference = _ladder(providers, need, notes)
    offers = _ask(providers, need, preference, notes)
    fit = without_quarantined(offers, quarantined)
    if len(fit) < len(offers):
        notes.append(f"{len(offers) - len(fit)} offers left out: their machines failed lately")
    if offers and not fit:
        machines = ", ".join(sorted({f"{o.provider}/{o.machine_id}" for o in offers}))
        raise NoCapacityError(f"every machine on offer failed lately and is in quarantine: {machines}")
    ranked = within_caps(rank(fit, estimate, limits.budget_factor, preference), limits.max_cost_micros)
    chosen = within_one_deadline(ranked, estimate, limits.max_cost_micros, limits.max_attempts)
    return Plan(
        offers=tuple(chosen),
        deadline_s=max(r.budget_s for r in chosen),
        worst_case_micros=worst_case_micros(chosen, estimate),
        traffic_micros=tuple(estimate.traffic_micros_on(r.offer) for r in chosen),
        notes=tuple(notes),
    )


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan for JSON: dollars and seconds for people, plus each offer whole, as `offer_from` reads it back."""
    return {
        "offers": [
            {
                "provider": r.offer.provider,
                "machine_id": r.offer.machine_id,
                "gpu": r.offer.gpu,
                "gpu_count": r.offer.gpu_count,
                "price_usd_per_h": micros_to_usd(r.offer.price_micros_per_h),
                "expected_s": round(r.expected_s, 1),
                "expected_usd": micros_to_usd(r.expected_micros),
                "worst_case_usd": micros_to_usd(r.worst_case_micros),
                "traffic_usd": micros_to_usd(traffic),
                "offer": asdict(r.offer),
            }
            for r, traffic in zip(plan.offers, plan.traffic_micros, strict=True)
        ],
        "deadline_s": round(plan.deadline_s, 1),
        "worst_case_usd": micros_to_usd(plan.worst_case_micros),
        "notes": list(plan.notes),
    }


def offer_from(document: Mapping[str, Any]) -> Offer:
    """An offer as `plan_document` wrote it. Raises InputError when it is something else."""
    try:
        return Offer(**document["offer"])
    except (KeyError, TypeError) as exc:
        raise InputError(f"not an offer of gpu_offer_info: {exc}") from exc


def terms_from(document: Mapping[str, Any]) -> Terms:
    """How long an offer of `plan_document` is expected to be needed, and what its traffic costs."""
    try:
        return Terms(float(document.get("expected_s") or 0.0), usd_to_micros(document.get("traffic_usd") or 0))
    except (TypeError, ValueError) as exc:
        raise InputError(f"not an offer of gpu_offer_info: {exc}") from exc


def _ladder(providers: Mapping[str, Provider], need: Need, notes: list[str]) -> tuple[str, ...]:
    """The GPU types in the order to try them; empty when only the cost counts."""
    if need.gpu:
        return gpus.wanted(need.gpu)
    # Local pods have the GPU that they have, and a Vast.ai query may have made the choice.
    if set(providers) <= {LOCAL} or "gpu_name" in need.vast_query:
        return ()
    notes.append(f"pod_gpu says nothing, so these are tried in order: {', '.join(DEFAULT_LADDER)}")
    return DEFAULT_LADDER


def _check(need: Need, limits: Limits) -> None:
    if limits.max_attempts < 1:
        raise InputError("max_attempts must be at least 1")
    if limits.budget_factor < 1:
        raise InputError("budget_factor must be at least 1: the optimistic estimate is never enough")
    if need.gpu_count < 1 or need.disk_gb <= 0:
        raise InputError("gpu_count must be at least 1 and disk_gb above 0")


def _longer_than_an_hour(estimate: Estimate, limits: Limits) -> bool:
    return (estimate.boot_s + estimate.train_s) * limits.budget_factor > SECURE_ONLY_ABOVE_S


def _ask(providers: Mapping[str, Provider], need: Need, preference: tuple[str, ...], notes: list[str]) -> list[Offer]:
    """Offers of all providers; one that cannot be asked is noted, unless it is the only one."""
    if not gpus.wanted(need.gpu):
        need = replace(need, gpu=())  # "cheapest" is a word of ours, not a GPU
    laddered = need if need.gpu else replace(need, gpu=preference)
    offers: list[Offer] = []
    failure: ProviderError | None = None
    answered = 0
    for name, provider in providers.items():
        try:
            offers += provider.offers(need if name == LOCAL else laddered)
            answered += 1
        except ProviderError as exc:
            failure = exc
            notes.append(f"{name} could not be asked: {exc}")
    if answered == 0 and failure is not None:
        raise failure
    return offers
