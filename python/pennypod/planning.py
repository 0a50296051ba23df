"""From a job's wishes to a plan: ranked offers, a deadline and the worst-case cost. Floor 2: asks providers for offers.

Nothing here rents. A plan that breaks a cap is an error before anything is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pennypod import gpus
from pennypod.errors import BudgetError, InputError, NoCapacityError, ProviderError
from pennypod.ledger import AttemptRecord, QuarantineRecord
from pennypod.market import (
    DEFAULT_LADDER,
    SECURE_ONLY_ABOVE_S,
    Estimate,
    RankedOffer,
    admission,
    rank,
    within_caps,
    within_one_deadline,
    within_time,
    without_quarantined,
    worst_case_micros,
)
from pennypod.model.admission import NAMES, Caps
from pennypod.model.money import cap_micros, format_usd, micros_to_usd, usd_to_micros
from pennypod.model.offer import Need, Offer
from pennypod.providers.base import Provider
from pennypod.providers.registry import LOCAL
from pennypod.rental import Terms

SECONDARY_WISHES = (
    "gpu",
    "gpu_ram_gb",
    "reliability",
    "inet_down_mbps",
    "inet_up_mbps",
    "cuda_min",
    "region",
    "secure",
    "vast_query",
)
_SAID = {"true": True, "yes": True, "false": False, "no": False}


Admit = Callable[[str, int], int | None]
"""Provider and worst case in micro-dollars to what the run may cost in all; raises BudgetError. `admission.admit`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_cost_micros` caps the worst case of one run; `max_attempts` how many offers may be tried.

    `left_s` is the time to the deadline of a run that has one already: no later pod of it gets more.
    """

    budget_factor: float
    max_attempts: int
    max_cost_micros: int | None = None
    allow_community: bool = False
    left_s: float | None = None


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
    secondary: Mapping[str, Any] | None = None,
    admit: Admit = lambda _provider, _worst_micros: None,
) -> Plan:
    """Ask every provider, rank, check caps. `secondary` are the wishes of a second tier, see `secondary_need`.

    `admit` judges by the caps that the run shares with others.

    Raises InputError for limits that make no sense, NoCapacityError when nothing fits, BudgetError when the cheapest
    fit breaks the cap, and the provider's own error when not one provider could be asked.
    """
    notes: list[str] = []
    needs = [need, *([secondary_need(need, secondary)] if secondary else [])]
    ranked: list[RankedOffer] = []
    by_type = False
    for tier, wished in enumerate(needs, start=1):
        found, preference = _tier(providers, wished, estimate, limits, quarantined, notes, required=tier == len(needs))
        known = {(rated.offer.provider, rated.offer.offer_id) for rated in ranked}
        found = [rated for rated in found if (rated.offer.provider, rated.offer.offer_id) not in known]
        ranked += [replace(rated, tier=tier) for rated in found]
        by_type = by_type or bool(preference)
        if tier > 1:
            notes.append(f"second choice: {len(found)} more offers when none of the first is to be had")
    if not ranked and need.max_price_micros_per_h is not None:
        cheapest = _cheapest_above_the_cap(providers, needs, estimate, limits, quarantined)
        if cheapest is not None:
            raise NoCapacityError(
                f"no offer fits: the cheapest that fits otherwise asks {format_usd(cheapest.price_micros_per_h)}/h,"
                f" over max_price_usd_per_h ({format_usd(need.max_price_micros_per_h)}): nothing was rented",
                cheapest_micros_per_h=cheapest.price_micros_per_h,
                max_price_micros_per_h=need.max_price_micros_per_h,
            )
    fitting, most = _admitted(within_caps(ranked, limits.max_cost_micros), limits.max_cost_micros, admit)
    chosen = within_one_deadline(fitting, estimate, most, limits.max_attempts, admission(fitting, by_type=by_type))
    return Plan(
        offers=tuple(chosen),
        deadline_s=max(r.budget_s for r in chosen),
        worst_case_micros=worst_case_micros(chosen, estimate),
        traffic_micros=tuple(estimate.traffic_micros_on(r.offer) for r in chosen),
        notes=tuple(notes),
    )


def _cheapest_above_the_cap(
    providers: Mapping[str, Provider],
    needs: Sequence[Need],
    estimate: Estimate,
    limits: Limits,
    quarantined: Sequence[QuarantineRecord],
) -> Offer | None:
    """The cheapest offer that only its price rules out. None when there is none, or when nobody answers any more."""
    offers: list[Offer] = []
    for need in needs:
        free = replace(need, max_price_micros_per_h=None)
        try:
            found, _ = _tier(providers, free, estimate, limits, quarantined, [], required=False)
        except ProviderError:  # the plan has failed already: this is only about how to say it
            continue
        offers += [rated.offer for rated in found]
    return min(offers, key=lambda offer: offer.price_micros_per_h, default=None)


def _tier(
    providers: Mapping[str, Provider],
    need: Need,
    estimate: Estimate,
    limits: Limits,
    quarantined: Sequence[QuarantineRecord],
    notes: list[str],
    *,
    required: bool,
) -> tuple[list[RankedOffer], tuple[str, ...]]:
    """The ranked offers for one tier of wishes, and its GPU types in order. Not `required`: another tier may do."""
    _check(need, limits)
    if _longer_than_an_hour(estimate, limits) and not limits.allow_community and not need.secure:
        need = replace(need, secure=True)
        note = "may bill over an hour: secure offers only (allow_community: true lifts this)"
        if note not in notes:
            notes.append(note)
    preference = _ladder(providers, need, notes)
    offers = _ask(providers, need, preference, notes)
    fit = without_quarantined(offers, quarantined)
    if len(fit) < len(offers):
        notes.append(f"{len(offers) - len(fit)} offers left out: their machines failed lately")
    if offers and not fit and required:
        machines = ", ".join(sorted({f"{o.provider}/{o.machine_id}" for o in offers}))
        raise NoCapacityError(f"every machine on offer failed lately and is in quarantine: {machines}")
    ranked = rank(fit, estimate, limits.budget_factor, preference, need.region)
    return ranked if limits.left_s is None else within_time(ranked, estimate, limits.left_s), preference


def secondary_need(need: Need, wishes: Mapping[str, Any]) -> Need:
    """A job's wishes with some of them replaced, for when nothing that fits the first ones is to be had.

    Raises InputError for what is no wish of a second tier; how much disk and what price a run takes is no matter of it.
    """
    unknown = sorted(set(wishes) - set(SECONDARY_WISHES))
    if unknown:
        raise InputError(f"secondary: there is no {', '.join(unknown)}: use {', '.join(SECONDARY_WISHES)}")
    return replace(need, **{name: _wish(name, value) for name, value in wishes.items()})


def _wish(name: str, value: Any) -> Any:
    """A wish as `Need` holds it. Raises InputError."""
    try:
        if name in ("gpu", "region"):
            return (value,) if isinstance(value, str) else tuple(str(item) for item in value or ())
        if name == "vast_query":
            return str(value or "")
        if name == "secure":
            return _SAID[str(value).casefold()]
        return None if value is None else float(value)
    except (KeyError, TypeError, ValueError) as exc:
        raise InputError(f"secondary: {value!r} is no value for {name}") from exc


def _admitted(
    ranked: Sequence[RankedOffer], max_cost_micros: int | None, admit: Admit
) -> tuple[list[RankedOffer], int | None]:
    """The offers that keep the caps shared with other runs, and the most that the run may cost under any cap."""
    fitting: list[RankedOffer] = []
    refusals: list[BudgetError] = []
    allowances: list[int | None] = [max_cost_micros]
    for rated in ranked:
        try:
            allowances.append(admit(rated.offer.provider, rated.worst_case_micros))
        except BudgetError as exc:
            refusals.append(exc)
        else:
            fitting.append(rated)
    if refusals and not fitting:
        raise BudgetError(f"nothing was rented: {refusals[0].message}", **refusals[0].details)
    return fitting, min((limit for limit in allowances if limit is not None), default=None)


def held(caps: Caps, attempts: Sequence[AttemptRecord]) -> Caps:
    """The caps for one more pod of a run that has had one: what that was admitted under holds on, whoever asks now.

    A run that goes on elsewhere is the same run; its caps may be lowered on the way, never raised or forgotten.
    """
    accepted = [attempt for attempt in attempts if attempt.ready is not None]
    return replace(
        caps,
        run=_least(caps.run, *(attempt.allowance_micros for attempt in accepted)),
        price=_least(caps.price, *(attempt.price_cap_micros_per_h for attempt in accepted)),
    )


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def caps_from(options: Mapping[str, Any]) -> Caps:
    """The caps among a module's options, dollars as the user writes them. Raises InputError for one that is none."""

    def micros(name: str) -> int | None:
        usd = options.get(name)
        try:
            return None if usd is None else cap_micros(name, usd)
        except ValueError as exc:
            raise InputError(str(exc)) from exc

    return Caps(
        run=micros(NAMES["run"]),
        job=micros(NAMES["job"]),
        day=micros(NAMES["day"]),
        account=micros(NAMES["account"]),
        price=micros("max_price_usd_per_h"),
    )


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan for JSON: dollars and seconds for people, plus each offer whole, as `offer_from` reads it back."""
    return {
        "offers": [
            {
                "provider": r.offer.provider,
                "machine_id": r.offer.machine_id,
                "region": r.offer.region,
                "gpu": r.offer.gpu,
                "gpu_count": r.offer.gpu_count,
                "tier": r.tier,
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
