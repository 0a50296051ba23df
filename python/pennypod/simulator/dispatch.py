"""From a request to an answer: route, caller, faults before and after, in the order a real service would have them.

The world's lock is held by whoever calls. Time that passes and connections that break are only named in the Outcome;
the server does them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pennypod.simulator.faults import CALL_FAULTS, Rule
from pennypod.simulator.state import Identity, World
from pennypod.simulator.wire import Refusal, Reply, Request

_BEFORE = (
    "error",
    "timeout",
    "rate_limited",
    "search_quota",
    "auth",
    "forbidden",
    "vanished_offer",
    "no_capacity",
    "low_balance",
)


@dataclass(slots=True)
class Call:
    """A request on its way through a handler."""

    request: Request
    endpoint: str
    match: Mapping[str, str]
    identity: Identity
    rules: list[Rule] = field(default_factory=list)

    def rule(self, fault: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.fault == fault), None)

    @property
    def pod_rules(self) -> list[Rule]:
        return [rule for rule in self.rules if rule.fault not in CALL_FAULTS]


Handler = Callable[[Call], Reply]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    pattern: re.Pattern[str]
    endpoint: str
    handler: Handler
    needs_key: bool = True


def route(method: str, pattern: str, endpoint: str, handler: Handler, *, needs_key: bool = True) -> Route:
    return Route(method, re.compile(pattern), endpoint, handler, needs_key)


class Api(Protocol):
    """What a provider's look-alike tells the dispatcher."""

    provider: str
    routes: tuple[Route, ...]
    spacing: Mapping[str, float]

    def key_of(self, request: Request) -> str: ...
    def unauthorized(self, request: Request) -> Reply: ...
    def no_route(self, request: Request, allowed: list[str]) -> Reply: ...
    def too_frequent(self, threshold: float) -> Reply: ...
    def fault_reply(self, rule: Rule, call: Call) -> Reply: ...
    def facts(self, endpoint: str, match: Mapping[str, str], request: Request) -> dict[str, Any]: ...
    def finish(self, reply: Reply) -> Reply: ...


@dataclass(slots=True)
class Outcome:
    """What to do with the connection: wait, then answer, or cut it. `cut_body` sends only half of the answer."""

    endpoint: str
    reply: Reply
    struck: list[str] = field(default_factory=list)
    drop: bool = False
    delay_s: float = 0.0
    cut_body: bool = False


class Dispatcher:
    def __init__(self, world: World, api: Api, *, real: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._api = api
        self._real = real
        self._last: dict[tuple[str, str], float] = {}

    def handle(self, request: Request) -> Outcome:
        self._world.tick()
        found, match, allowed = self._route(request)
        if found is None:
            return Outcome(f"{self._api.provider}.unknown", self._api.finish(self._api.no_route(request, allowed)))
        outcome = self._answer(found, match, request)
        self._api.finish(outcome.reply)
        return outcome

    def _route(self, request: Request) -> tuple[Route | None, dict[str, str], list[str]]:
        allowed = []
        for item in self._api.routes:
            match = item.pattern.fullmatch(request.path)
            if match is None:
                continue
            if item.method == request.method:
                return item, match.groupdict(), []
            allowed.append(item.method)
        return None, {}, allowed

    def _answer(self, found: Route, match: dict[str, str], request: Request) -> Outcome:
        api, endpoint = self._api, found.endpoint
        key = api.key_of(request)
        identity = self._world.identify(api.provider, key)
        if identity is None:
            if found.needs_key:
                return Outcome(endpoint, api.unauthorized(request))
            identity = Identity(self._world.account(api.provider))
        wait = self._spacing(endpoint, key)
        if wait:
            return Outcome(endpoint, api.too_frequent(wait))
        facts = {**api.facts(endpoint, match, request), "key": "account" if identity.pod is None else "pod"}
        rules = self._world.faults.meet(endpoint, facts)
        call = Call(request, endpoint, match, identity, rules)
        outcome = Outcome(endpoint, Reply(200), [rule.fault for rule in rules])
        early = next((rule for rule in rules if rule.fault in _BEFORE), None)
        if early is not None:
            outcome.reply = api.fault_reply(early, call)
            outcome.delay_s = early.seconds(120.0) if early.fault == "timeout" else 0.0
            return outcome
        try:
            outcome.reply = found.handler(call)
        except Refusal as refusal:
            outcome.reply = refusal.reply
        self._afterwards(call, outcome)
        return outcome

    def _afterwards(self, call: Call, outcome: Outcome) -> None:
        broken = call.rule("error_after_commit")
        if broken is not None:
            outcome.reply = self._api.fault_reply(broken, call)
        slow = call.rule("slow")
        outcome.delay_s = slow.seconds(5.0) if slow is not None else 0.0
        outcome.drop = call.rule("lost_reply") is not None
        outcome.cut_body = call.rule("malformed") is not None

    def _spacing(self, endpoint: str, key: str) -> float:
        """The threshold that this call breaks, 0 when none; off unless the market file asks for `rate_limits`."""
        threshold = self._api.spacing.get(endpoint, 0.0) if self._world.options.get("rate_limits") else 0.0
        if not threshold:
            return 0.0
        now, last = self._real(), self._last.get((endpoint, key))
        if last is not None and now - last < threshold:
            return threshold
        self._last[endpoint, key] = now
        return 0.0
