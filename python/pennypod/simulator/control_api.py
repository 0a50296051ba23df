"""/_sim: the simulator's own controls, for tests and for people. Nothing here exists at a provider."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from pennypod.errors import InputError
from pennypod.simulator.dispatch import Outcome
from pennypod.simulator.state import VAST, Pod, World
from pennypod.simulator.vast_prices import PriceRequests
from pennypod.simulator.wire import Reply, Request

KEPT_REQUESTS = 20_000
_SECRET_NAMES = ("password", "token", "secret", "api_key", "image_login", "login_pass")


class ControlApi:
    """Answers under the world's lock, like the providers' look-alikes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: deque[dict[str, Any]] = deque(maxlen=KEPT_REQUESTS)

    def handle(self, request: Request) -> Reply:
        self.world.tick()
        pages = {
            ("GET", "pods"): self._pods,
            ("GET", "clock"): self._clock,
            ("POST", "clock"): self._set_clock,
            ("GET", "faults"): self._faults,
            ("POST", "faults"): self._add_faults,
            ("DELETE", "faults"): self._clear_faults,
            ("GET", "meter"): self._meter,
            ("GET", "requests"): self._requests,
            ("DELETE", "requests"): self._forget_requests,
            ("POST", "balance"): self._set_balance,
            ("POST", "price"): self._set_price,
            ("POST", "price_request"): self._ask_price,
            ("POST", "evict"): self._evict,
        }
        name = request.path.removeprefix("/_sim").strip("/")
        page = pages.get((request.method, name))
        if page is None:
            known = sorted({f"{method} /_sim/{page}" for method, page in pages})
            return Reply(404, {"error": "no such control", "known": known})
        try:
            return page(request)
        except (InputError, KeyError, TypeError, ValueError) as exc:
            return Reply(400, {"error": str(exc)})

    # --- pods and money -----------------------------------------------------------------------------------------------

    def _pods(self, _request: Request) -> Reply:
        now = self.world.clock.now()
        rows = [self._pod(pod, now) for pod in self.world.all_pods()]
        live = [row for row in rows if row["gone_at"] is None]
        gone = [row for row in rows if row["gone_at"] is not None]
        return Reply(200, {"live": live, "gone": gone, "counts": {"live": len(live), "gone": len(gone)}})

    def _pod(self, pod: Pod, now: float) -> dict[str, Any]:
        until = pod.gone_at if pod.gone_at is not None else now
        return {
            "provider": pod.provider,
            "id": pod.id,
            "name": pod.name,
            "stage": pod.stage,
            "wanted": pod.wanted,
            "gpu": getattr(pod.machine, "gpu_name", None) or getattr(pod.machine, "id", None),
            "gpu_count": pod.gpus,
            "machine_id": getattr(pod.machine, "machine_id", None) or pod.details.get("machine_id"),
            "created": pod.created,
            "gone_at": pod.gone_at,
            "gone_why": pod.gone_why,
            "address": None if pod.address is None else {"host": pod.address[0], "port": pod.address[1]},
            "rate_micros_per_h": round(pod.meter.rate / 1000),
            "cost_micros": pod.meter.micros(until),
            "faults": sorted(pod.faults),
            "failure": pod.failure,
            "history": [{"t": at, "what": what} for at, what in pod.history],
        }

    def _meter(self, _request: Request) -> Reply:
        now = self.world.clock.now()
        rows = []
        for pod in self.world.all_pods():
            until = pod.gone_at if pod.gone_at is not None else now
            rows.append(
                {
                    "provider": pod.provider,
                    "id": pod.id,
                    "name": pod.name,
                    "live": pod.alive,
                    "micros": pod.meter.micros(until),
                    "by_kind": {kind: pod.meter.micros(until, kind) for kind in pod.meter.kinds()},
                    "seconds": {kind: pod.meter.seconds(kind, until) for kind in pod.meter.kinds()},
                }
            )
        accounts = [
            {
                "provider": account.provider,
                "email": account.email,
                "spent_micros": account.tab.micros(now),
                "balance_micros": account.balance(now),
                "rate_micros_per_h": round(account.tab.rate / 1000),
            }
            for account in self.world.accounts()
        ]
        return Reply(
            200, {"now": now, "pods": rows, "accounts": accounts, "total_micros": sum(row["micros"] for row in rows)}
        )

    def _set_balance(self, request: Request) -> Reply:
        """{"provider": "vast", "usd": 0.01}: what is left on the (first) account from now on."""
        body = _object(request)
        account = self.world.account(str(body["provider"]))
        now = self.world.clock.now()
        account.credit = round(float(body["usd"]) * 1_000_000) + account.tab.micros(now)
        return Reply(200, {"provider": account.provider, "balance_micros": account.balance(now)})

    def _set_price(self, request: Request) -> Reply:
        """{"id": "...", "usd_per_h": 0.9}: what a live pod's GPUs cost from now on, its disk apart."""
        body = _object(request)
        pod = self._live(str(body["id"]))
        self.world.set_price(pod, float(body["usd_per_h"]))
        return Reply(200, {"id": pod.id, "rate_micros_per_h": round(pod.meter.rate / 1000)})

    def _ask_price(self, request: Request) -> Reply:
        """{"id": "...", "usd_per_h": 0.9}: the host of a live Vast pod asks for more and waits for an answer."""
        body = _object(request)
        pod = self._live(str(body["id"]))
        if pod.provider != VAST:
            raise InputError("only Vast's hosts can ask for another price")
        return Reply(200, {"id": pod.id, "request": PriceRequests(self.world).ask(pod, float(body["usd_per_h"]))})

    def _evict(self, request: Request) -> Reply:
        """{"id": "..."}: the provider takes a live pod back, now."""
        pod = self._live(str(_object(request)["id"]))
        self.world.evict(pod)
        return Reply(200, {"id": pod.id, "stage": pod.stage})

    def _live(self, pod_id: str) -> Pod:
        pod = next((pod for pod in self.world.all_pods() if pod.id == pod_id and pod.alive), None)
        if pod is None:
            raise InputError(f"there is no live pod {pod_id}")
        return pod

    # --- time ---------------------------------------------------------------------------------------------------------

    def _clock(self, _request: Request) -> Reply:
        return Reply(200, {"now": self.world.clock.now(), "speed": self.world.clock.speed})

    def _set_clock(self, request: Request) -> Reply:
        """{"advance": seconds} and/or {"speed": factor}."""
        body = _object(request)
        if not set(body) <= {"advance", "speed"} or not body:
            raise InputError("give advance (seconds) or speed (factor)")
        if "speed" in body:
            self.world.clock.set_speed(float(body["speed"]))
        if "advance" in body:
            self.world.clock.advance(float(body["advance"]))
        self.world.tick()
        return self._clock(request)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _faults(self, _request: Request) -> Reply:
        return Reply(200, {"faults": [rule.as_document() for rule in self.world.faults.rules]})

    def _add_faults(self, request: Request) -> Reply:
        """One rule, a list of rules, or {"faults": [rules]}."""
        body = request.json()
        if isinstance(body, dict):
            body = body.get("faults", [body])
        added = self.world.faults.add(body)
        return Reply(200, {"added": [rule.as_document() for rule in added]})

    def _clear_faults(self, request: Request) -> Reply:
        only = request.get("id")
        return Reply(200, {"removed": self.world.faults.clear(int(only) if only else None)})

    # --- what was asked -----------------------------------------------------------------------------------------------

    def log(self, request: Request, outcome: Outcome, real_time: float) -> None:
        """One line per call to a provider; never the key, nor a body that may hold one."""
        self.requests.append(
            {
                "t": self.world.clock.now(),
                "real_t": real_time,
                "method": request.method,
                "path": request.path,
                "query": {name: ["***"] if name == "api_key" else values for name, values in request.query.items()},
                "endpoint": outcome.endpoint,
                "status": None if outcome.drop else outcome.reply.status,
                "faults": outcome.struck,
                "user_agent": request.headers.get("user-agent", ""),
                "key_in": _key_in(request),
                "body": _scrubbed(request),
            }
        )

    def _requests(self, request: Request) -> Reply:
        endpoint, tail = request.get("endpoint"), int(request.get("tail") or KEPT_REQUESTS)
        rows = [row for row in self.requests if not endpoint or row["endpoint"] == endpoint]
        return Reply(200, {"requests": rows[-tail:], "count": len(rows)})

    def _forget_requests(self, _request: Request) -> Reply:
        count = len(self.requests)
        self.requests.clear()
        return Reply(200, {"removed": count})


def _object(request: Request) -> Mapping[str, Any]:
    body = request.json()
    if not isinstance(body, dict):
        raise InputError("the body is a JSON object")
    return body


def _key_in(request: Request) -> str:
    """Where the key came: in the header as it should, in the URL, or nowhere."""
    if request.get("api_key"):
        return "url"
    return "header" if request.bearer else ""


def _scrubbed(request: Request) -> Any:
    """The body with every value that may be secret left out."""
    try:
        body = request.json()
    except ValueError:
        return f"<{len(request.body)} bytes>"
    key = request.bearer

    def clean(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {item: clean(inner, item) for item, inner in value.items()}
        if isinstance(value, list):
            return [clean(inner) for inner in value]
        secret = any(word in name.lower() for word in _SECRET_NAMES)
        if isinstance(value, str) and (secret or (key and key in value)):
            return "***"
        return value

    return clean(body)
