"""What a receipt says of one pod, and what must agree in it. Pure.

A receipt is the proof that one pod is gone: the lease it was rented under, every question and answer of its end with
the time, price and total. `absence` claims how absence was established; the last steps of `proof` must bear it out.
Times are Unix seconds, money is in micro-dollars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from typing import Any

from pennypod.model.ids import parse_lease
from pennypod.model.meter import PodMeter
from pennypod.model.money import micros_to_usd

DESTROY, LOOK, LISTING, SPENDING = "destroy", "is it there", "is it listed", "is it paid for"
"""What is asked."""

ACCEPTED, ABSENT, NOT_TOLD, STILL, SPENDS = "accepted", "absent", "not told", "still", "the account spends"
"""Answers, or how they begin. NOT_TOLD is said of a view that this key may not see; STILL and SPENDS show the pod."""

LEAST_CHECKS = 2
_SLACK_S = 0.001

_TEXTS = ("run", "provider", "pod_id", "pod_name", "machine_id", "gpu", "reason")
_NUMBERS = ("price_usd_per_h", "rented_at", "gone_at", "proven_at", "billed_seconds")
_WHOLE = ("cost_micros",)
_SINCE_LATER = {"traffic_known": bool, "account": str}
"""What receipts did not say at first: whether the meter holds all traffic, or `cost_micros` is a lower bound; and with
whose account the pod was rented and looked for."""

_PARTS = ("meter", "absence", "proof", "chain", "seal")


def meter_document(meter: PodMeter) -> dict[str, Any]:
    """What a meter counted, as a receipt tells it: prices, beginnings, bytes. Its end is the receipt's `gone_at`."""
    document = asdict(meter)
    del document["ended"]
    return {**document, "steps": [list(step) for step in meter.steps]}


def total_micros(receipt: Mapping[str, Any]) -> int:
    """What the pod has cost by its receipt: every price times its time, and traffic, rounded up."""
    return _meter(receipt).micros(float(receipt["gone_at"]))


def billed_seconds(receipt: Mapping[str, Any]) -> float:
    """For how long it was charged for computing, by its receipt."""
    return round(_meter(receipt).seconds(float(receipt["gone_at"])), 3)


def _meter(receipt: Mapping[str, Any]) -> PodMeter:
    told = receipt["meter"]
    return PodMeter(**{**told, "steps": tuple((since, price) for since, price in told["steps"])})


def _is_meter(meter: Any) -> bool:
    times, steps = ("made", "computing"), ("steps",)
    wanted = {item.name for item in fields(PodMeter)} - {"ended"}
    return (
        isinstance(meter, dict)
        and set(meter) == wanted
        and all(_is_number(meter[name]) for name in times)
        and all(_is_whole(meter[name]) for name in wanted - {*times, *steps})
        and isinstance(meter["steps"], list)
        and all(
            isinstance(step, list) and len(step) == 2 and _is_number(step[0]) and _is_whole(step[1])
            for step in meter["steps"]
        )
    )


def gone_since(steps: Sequence[Mapping[str, Any]]) -> float:
    """When the meter stopped, by `steps` that end with answers of absence: at the last destroy that was accepted.

    Unless the pod was seen after that: then the first answer of absence since counts. Errors tell nothing.
    """
    since = float(steps[-1]["at"])
    for step in reversed(steps):
        answer = str(step["answer"])
        if step["asked"] == DESTROY and answer == ACCEPTED:
            return float(step["at"])
        if answer.startswith((STILL, SPENDS)):
            break
        if answer == ABSENT:
            since = float(step["at"])
    return since


def content_problems(receipt: Mapping[str, Any]) -> list[str]:
    """What does not hold in a receipt's own words; empty when all does."""
    found = _shape_problems(receipt)
    if found:
        return found
    proof = receipt["proof"]
    times = [step["at"] for step in proof]
    if times != sorted(times):
        found.append("the times of its proof go back")
    if not (receipt["rented_at"] <= times[0] and receipt["gone_at"] <= receipt["proven_at"] == times[-1]):
        found.append("its times contradict each other")
    found += _absence_problems(receipt["absence"], proof)
    if not any(step["asked"] == DESTROY for step in proof):
        found.append("nobody asked for the end of the pod")
    if receipt["gone_at"] != gone_since(proof):
        found.append("gone_at is not the moment that its proof shows")
    if receipt["billed_seconds"] != billed_seconds(receipt):
        found.append("billed_seconds is not the time that its meter counted")
    if receipt["meter"]["made"] != receipt["rented_at"]:
        found.append("its meter did not start when it was rented")
    if receipt["price_usd_per_h"] != micros_to_usd(_meter(receipt).price_now):
        found.append("it tells two prices")
    if receipt["cost_micros"] != total_micros(receipt):
        found.append(f"its total is not price times time, which is {total_micros(receipt)} micro-dollars")
    lease = parse_lease(receipt["pod_name"])
    if lease is not None and lease.run != receipt["run"]:
        found.append("the run in the pod's name is another one")
    return found


def _shape_problems(receipt: Mapping[str, Any]) -> list[str]:
    wanted = {*_TEXTS, *_NUMBERS, *_WHOLE, *_PARTS}
    found = [f"it does not say {name}" for name in sorted(wanted - set(receipt))]
    found += [f"it says {name}, which no receipt does" for name in sorted(set(receipt) - wanted - set(_SINCE_LATER))]
    if found:
        return found
    found += [f"{name} is no text" for name in _TEXTS if not isinstance(receipt[name], str)]
    found += [f"{name} is no number" for name in _NUMBERS if not _is_number(receipt[name])]
    found += [f"{name} is no whole number" for name in _WHOLE if not _is_whole(receipt[name])]
    found += [
        f"{name} is {'no text' if kind is str else 'neither true nor false'}"
        for name, kind in _SINCE_LATER.items()
        if name in receipt and not isinstance(receipt[name], kind)
    ]
    if not _is_meter(receipt["meter"]):
        found.append("it does not say what the meter counted")
    proof, absence = receipt["proof"], receipt["absence"]
    if not isinstance(proof, list) or not proof or not all(_is_step(step) for step in proof):
        found.append("its proof is no list of questions and answers")
    if not (
        isinstance(absence, dict)
        and set(absence) == {"checks", "spacing_s", "views"}
        and _is_whole(absence["checks"])
        and _is_number(absence["spacing_s"])
        and isinstance(absence["views"], list)
    ):
        found.append("it does not say how absence was established")
    return found


def _is_step(step: Any) -> bool:
    return (
        isinstance(step, dict)
        and set(step) == {"at", "asked", "answer"}
        and _is_number(step["at"])
        and step["asked"] in (DESTROY, LOOK, LISTING, SPENDING)
        and isinstance(step["answer"], str)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _absence_problems(absence: Mapping[str, Any], proof: Sequence[Mapping[str, Any]]) -> list[str]:
    checks, views = absence["checks"], absence["views"]
    if checks < LEAST_CHECKS or views not in ([LOOK, LISTING], [LOOK, LISTING, SPENDING]):
        return [f"absence needs {LEAST_CHECKS} checks in every view, it claims {checks} in {views}"]
    wanted = checks * len(views)
    last = proof[-wanted:]
    if [step["asked"] for step in last] != views * checks:
        return [f"it claims {checks} checks in {len(views)} views, and its proof does not end with them"]
    if not all(_is_absence(step) for step in last):
        return ["its proof does not end with answers of absence"]
    begins = [last[number * len(views)]["at"] for number in range(checks)]
    if any(later - earlier < absence["spacing_s"] - _SLACK_S for earlier, later in pairwise(begins)):
        return [f"its checks are less than {absence['spacing_s']} s apart"]
    return []


def _is_absence(step: Mapping[str, Any]) -> bool:
    answer = str(step["answer"])
    return answer == ABSENT or (step["asked"] == SPENDING and answer.startswith(NOT_TOLD))
