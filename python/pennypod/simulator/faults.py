"""What goes wrong, and when: rules by endpoint, nth call or probability, repeatable by seed. Pure.

A rule: {"endpoint": "vast.create", "fault": "lost_reply", "nth": 1, ...}. `endpoint` may hold wildcards. Which calls it
meets: `nth` (a number or a list, counted over the calls of that rule), `after` (all calls after so many) or
`probability`; with none of them, every call. `times` bounds how often it strikes. `where` narrows it to requests that
carry these values ({"machine_id": 12}, {"gpu": "RTX 4090"}, {"region": "EU-RO-1"}, {"pod": "17000001"}, {"key": "pod"}
for a pod's own key). Everything else is a parameter of the fault.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pennypod.errors import InputError
from pennypod.simulator.chance import draw

CALL_FAULTS = {
    "lost_reply": "the call takes effect, then the connection is cut without an answer",
    "error_after_commit": "the call takes effect and answers `status` (500)",
    "error": "the call does nothing and answers `status` (500)",
    "timeout": "the call does nothing and answers after `seconds` (real time)",
    "slow": "the call takes effect and answers after `seconds` (real time)",
    "rate_limited": "429, with Retry-After when `retry_after` is given",
    "search_quota": "Vast's daily quota: 429 with a Retry-After of hours",
    "auth": "a bad key as the provider says it: Vast a 404 `auth_error`, RunPod 401",
    "forbidden": "403; `html: true` for Cloudflare's page",
    "malformed": "the answer is cut in half",
    "error_with_id": "the create answers success:false, but the contract exists, stopped",
    "vanished_offer": "the offer is gone (`status` 404 or 410)",
    "no_capacity": "nothing free, though the listing shows it",
    "low_balance": "refused for lack of credit",
    "destroy_noop": "destroy says success and does nothing",
    "short_page": "the listing leaves out its last `drop` rows (1) without a word",
}
POD_FAULTS = {
    "stuck_loading": "it never leaves loading",
    "slow_loading": "the image takes `seconds` longer",
    "pull_error": "the image cannot be pulled",
    "wrong_port": "for `seconds` (20) the address names a port where nobody listens",
    "direct_blocked": "the direct port is closed for ever; only the proxy answers (Vast)",
    "sshd_late": "sshd starts `seconds` (20) after the address is shown",
    "no_sshd": "running, and sshd never starts",
    "key_missing": "nobody's key is in authorized_keys",
    "keys_lost_after": "authorized_keys is emptied `seconds` after it came up; what was attached is still listed",
    "snapshot_lost": "a snapshot is accepted and never pushed",
    "bad_gpu": "nvidia-smi fails as it does on a dead card",
    "exit_after": "the container exits `seconds` after it came up",
    "evict_after": "the provider takes the pod back `seconds` after it came up",
    "offline_after": "the host goes offline `seconds` after it came up",
    "restart_loop": "it starts over and over and never comes up",
    "list_lag": "for `seconds` (30) the new pod is in no listing",
    "gone_lag": "for `seconds` (30) after its end the pod is still listed",
    "timer_noop": "accepted for completeness: neither provider's own timers act",
}
_VAST = (
    "search create list legacy_list show update destroy reboot bid snapshot ssh keys logs log_file user charges"
    " prices spend_rate invoices templates"
)
_RUNPOD = "gpus datacenters create list get update action destroy logs keys billing registries templates graphql"
ENDPOINTS = tuple(f"{api}.{name}" for api, names in (("vast", _VAST), ("runpod", _RUNPOD)) for name in names.split())
"""What a rule can name: the endpoints of both APIs' routes."""

_CREATES = ("vast.create", "runpod.create")
_OWN = frozenset(("endpoint", "fault", "nth", "after", "probability", "times", "where", "id", "calls", "struck"))
_ids = itertools.count(1)


@dataclass(slots=True)
class Rule:
    endpoint: str
    fault: str
    nth: tuple[int, ...] = ()
    after: int | None = None
    probability: float | None = None
    times: int | None = None
    where: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    id: int = field(default_factory=lambda: next(_ids))
    calls: int = 0
    struck: int = 0

    def strikes(self, endpoint: str, facts: Mapping[str, Any], seed: int, position: int) -> bool:
        """Count this call and say whether the rule meets it. `position` makes chance repeatable, whatever the id."""
        if not fnmatch.fnmatchcase(endpoint, self.endpoint):
            return False
        if any(str(facts.get(name)) != str(value) for name, value in self.where.items()):
            return False
        self.calls += 1
        hit = self._meets(seed, position) and (self.times is None or self.struck < self.times)
        self.struck += hit
        return hit

    def _meets(self, seed: int, position: int) -> bool:
        if self.nth:
            return self.calls in self.nth
        if self.after is not None and self.calls <= self.after:
            return False
        if self.probability is not None:
            return draw(seed, "fault", position, self.calls) < self.probability
        return True

    def seconds(self, default: float) -> float:
        return float(self.options.get("seconds", default))

    def as_document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"id": self.id, "endpoint": self.endpoint, "fault": self.fault}
        if self.nth:
            document["nth"] = list(self.nth)
        for name in ("after", "probability", "times"):
            if getattr(self, name) is not None:
                document[name] = getattr(self, name)
        if self.where:
            document["where"] = self.where
        return document | self.options | {"calls": self.calls, "struck": self.struck}


class Faults:
    """The rules in force."""

    def __init__(self, seed: int, rules: Iterable[Mapping[str, Any]] = ()) -> None:
        self.seed = seed
        self.rules: list[Rule] = [parse_rule(rule) for rule in rules]

    def add(self, rules: Iterable[Mapping[str, Any]]) -> list[Rule]:
        """All or none of them."""
        parsed = [parse_rule(rule) for rule in rules]
        self.rules += parsed
        return parsed

    def clear(self, rule_id: int | None = None) -> int:
        before = len(self.rules)
        self.rules = [] if rule_id is None else [rule for rule in self.rules if rule.id != rule_id]
        return before - len(self.rules)

    def meet(self, endpoint: str, facts: Mapping[str, Any]) -> list[Rule]:
        """The rules that strike this call."""
        return [rule for position, rule in enumerate(self.rules) if rule.strikes(endpoint, facts, self.seed, position)]


def parse_rule(raw: Mapping[str, Any]) -> Rule:
    """Raises InputError that names what is wrong with the rule."""
    if not isinstance(raw, Mapping):
        raise InputError(f"a fault is an object with endpoint and fault, not {raw!r}")
    fault = str(raw.get("fault", ""))
    if fault not in CALL_FAULTS and fault not in POD_FAULTS:
        raise InputError(f"there is no fault {fault!r}: use one of {', '.join([*CALL_FAULTS, *POD_FAULTS])}")
    endpoint = str(raw.get("endpoint") or ("*.create" if fault in POD_FAULTS else ""))
    if not endpoint:
        raise InputError(f"fault {fault}: endpoint is missing, like vast.create or runpod.*")
    if not any(fnmatch.fnmatchcase(name, endpoint) for name in ENDPOINTS):
        raise InputError(f"fault {fault}: there is no endpoint {endpoint!r}: use one of {', '.join(ENDPOINTS)}")
    if fault in POD_FAULTS and not any(fnmatch.fnmatchcase(name, endpoint) for name in _CREATES):
        raise InputError(f"fault {fault} belongs to a pod: its endpoint is vast.create, runpod.create or *.create")
    try:
        nth = raw.get("nth", ())
        numbers = tuple(int(number) for number in (nth if isinstance(nth, (list, tuple)) else [nth]))
        rule = Rule(
            endpoint=endpoint,
            fault=fault,
            nth=numbers,
            after=None if raw.get("after") is None else int(raw["after"]),
            probability=None if raw.get("probability") is None else float(raw["probability"]),
            times=None if raw.get("times") is None else int(raw["times"]),
            where=dict(raw.get("where") or {}),
            options={name: value for name, value in raw.items() if name not in _OWN},
        )
        rule.seconds(0)
        int(rule.options.get("status", 500))
    except (TypeError, ValueError) as exc:
        raise InputError(f"fault {fault}: {exc}") from exc
    return rule
