"""Vast.ai's requests and answers, under /api/v0 and /api/v1. Shapes and texts follow the facts in docs/simulator.md."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pennypod.model.image import HUB, RegistryLogin
from pennypod.simulator.dispatch import Call, Route, route
from pennypod.simulator.faults import Rule
from pennypod.simulator.market import VastOffer
from pennypod.simulator.pulling import login_of_vast
from pennypod.simulator.state import VAST, Account, Pod, Stage, World
from pennypod.simulator.vast_prices import PriceRequests
from pennypod.simulator.vast_rows import charge_rows, has_ssh, instance_row, is_direct, spend_rate
from pennypod.simulator.vast_search import BadQueryError, matches, search, select
from pennypod.simulator.vast_templates import Template, Templates
from pennypod.simulator.vast_wire import body_of, failure, query_json, whole_account
from pennypod.simulator.wire import Refusal, Reply, Request

PAGE = 25
MIN_DISK_GB = 8.0
BULK = 64
_MAX_START_TEXT = 4096
_MAX_LABEL_CREATE, _MAX_LABEL = 256, 1024
_LOG_READY_S = 0.5
_RUNTYPES = frozenset(
    (
        *("ssh", "jupyter", "args", "ssh_proxy", "ssh_direct", "jupyter_proxy", "jupyter_direct"),
        *("ssh_direc ssh_proxy", "jupyter_proxy ssh_proxy", "jupyter_direc ssh_direc ssh_proxy"),
    )
)
_STORED = frozenset(
    (
        *("id", "label", "actual_status", "intended_status", "cur_state", "gpu_name", "verification", "machine_id"),
        *("host_id", "image_uuid", "start_date", "geolocation", "template_id", "template_hash_id", "is_bid"),
    )
)
_KEY_TEXT = re.compile(r"(ssh-\S+|ecdsa-\S+|sk-\S+) \S+.*")


class VastApi:
    provider = VAST
    spacing: Mapping[str, float] = {
        "vast.search": 2.0,
        "vast.create": 4.5,
        "vast.list": 1.0,
        "vast.show": 2.0,
        "vast.update": 1.0,
        "vast.destroy": 3.0,
        "vast.ssh": 2.0,
        "vast.keys": 1.0,
        "vast.prices": 2.0,
        "vast.user": 2.0,
        "vast.charges": 1.0,
        "vast.spend_rate": 2.0,
        "vast.legacy_list": 20.0,
    }

    def __init__(self, world: World) -> None:
        self.world = world
        self.prices = PriceRequests(world)
        self.templates = Templates(world)
        self._logs: dict[str, tuple[float, str]] = {}
        one = r"/api/v0/instances/(?P<id>[^/]+)/?"
        self.routes: tuple[Route, ...] = (
            route("POST", r"/api/v0/bundles/?", "vast.search", self.search_post, needs_key=False),
            route("GET", r"/api/v0/bundles/?", "vast.search", self.search_get, needs_key=False),
            route("PUT", r"/api/v0/search/asks/?", "vast.search", self.search_asks, needs_key=False),
            route("POST", r"/api/v0/asks/bulk/?", "vast.create", self.create_many),
            route("PUT", r"/api/v0/asks/(?P<id>[^/]+)/?", "vast.create", self.create),
            route("PUT", r"/api/v0/launch_instance/?", "vast.create", self.launch),
            route("GET", r"/api/v1/instances/?", "vast.list", self.listing),
            route("GET", r"/api/v0/instances/?", "vast.legacy_list", self.legacy_listing),
            route("DELETE", r"/api/v0/instances/?", "vast.destroy", self.destroy_many),
            route("PUT", r"/api/v0/instances/?", "vast.update", self.update_many),
            route("PUT", r"/api/v0/instances/request_logs/(?P<id>[^/]+)/?", "vast.logs", self.request_logs),
            route("PUT", r"/api/v0/instances/reboot/(?P<id>[^/]+)/?", "vast.reboot", self.reboot),
            route("PUT", r"/api/v0/instances/recycle/(?P<id>[^/]+)/?", "vast.reboot", self.reboot),
            route("PUT", r"/api/v0/instances/bid_price/(?P<id>[^/]+)/?", "vast.bid", self.change_bid),
            route("POST", r"/api/v0/instances/take_snapshot/(?P<id>[^/]+)/?", "vast.snapshot", self.snapshot),
            route("POST", r"/api/v0/instances/(?P<id>[^/]+)/ssh/?", "vast.ssh", self.attach_key),
            route("GET", r"/api/v0/instances/(?P<id>[^/]+)/ssh/?", "vast.ssh", self.attached_keys),
            route("DELETE", r"/api/v0/instances/(?P<id>[^/]+)/ssh/(?P<key>[^/]+)/?", "vast.ssh", self.detach_key),
            route("GET", r"/api/v0/instances/pending-price-increases/?", "vast.prices", self.prices.listing),
            route("PUT", r"/api/v0/instances/accept-price-increase/?", "vast.prices", self.prices.accept),
            route("PUT", r"/api/v0/instances/reject-price-increase/?", "vast.prices", self.prices.reject),
            route("GET", r"/api/v0/template/?", "vast.templates", self.templates.listing),
            route("POST", r"/api/v0/template/?", "vast.templates", self.templates.create),
            route("PUT", r"/api/v[01]/template/?", "vast.templates", self.templates.edit),
            route("DELETE", r"/api/v0/template/?", "vast.templates", self.templates.delete),
            route("GET", one, "vast.show", self.show),
            route("PUT", one, "vast.update", self.update),
            route("DELETE", one, "vast.destroy", self.destroy),
            route("GET", r"/api/v0/ssh/?", "vast.keys", self.account_keys),
            route("POST", r"/api/v0/ssh/?", "vast.keys", self.add_account_key),
            route("PUT", r"/api/v0/ssh/(?P<id>\d+)/?", "vast.keys", self.change_account_key),
            route("DELETE", r"/api/v0/ssh/(?P<id>\d+)/?", "vast.keys", self.drop_account_key),
            route("GET", r"/api/v0/users/current/?", "vast.user", self.user),
            route("GET", r"/api/v0/users/spend-rate/?", "vast.spend_rate", self.spend),
            route("GET", r"/api/v0/charges/?", "vast.charges", self.charges),
            route("GET", r"/api/v1/invoices/?", "vast.invoices", self.invoices),
            route("GET", r"/_sim/vast-logs/(?P<token>[0-9a-f]+)\.log", "vast.log_file", self.log_file, needs_key=False),
        )

    # --- the frame ----------------------------------------------------------------------------------------------------

    def key_of(self, request: Request) -> str:
        return request.bearer or request.get("api_key")

    def unauthorized(self, request: Request) -> Reply:
        """A wrong key looks like a missing thing, no key like a missing login."""
        if self.key_of(request):
            return failure(404, "auth_error", "Invalid user key")
        return failure(403, "auth_error", "This action requires login.")

    def no_route(self, request: Request, allowed: list[str]) -> Reply:
        if allowed:
            return failure(405, "method_not_allowed", f"{request.method} is not allowed here").with_headers(
                {"Allow": ", ".join(allowed)}
            )
        return failure(404, "not_found", f"{request.path} is not an endpoint")

    def too_frequent(self, threshold: float) -> Reply:
        return Reply(429, {"detail": f"API requests too frequent: endpoint threshold={threshold}"})

    def finish(self, reply: Reply) -> Reply:
        return reply

    def facts(self, endpoint: str, match: Mapping[str, str], request: Request) -> dict[str, Any]:
        facts: dict[str, Any] = {"method": request.method}
        number = match.get("id", "")
        if endpoint == "vast.create" and number.isdigit():
            offer, _known = self.world.vast.find(int(number), self.world.clock.now())
            if offer is not None:
                machine = offer.machine
                facts |= {"machine_id": machine.machine_id, "gpu": machine.gpu_name, "offer": number}
                facts["region"] = machine.geolocation
        elif number:
            facts["pod"] = number
        return facts

    def fault_reply(self, rule: Rule, call: Call) -> Reply:
        ask = {"ask_id": call.match["id"]} if call.endpoint == "vast.create" and "id" in call.match else {}
        status = int(rule.options.get("status", 500))
        if rule.fault == "rate_limited":
            reply = Reply(429, {"detail": "API requests too frequent"})
            after = rule.options.get("retry_after")
            return reply if after is None else reply.with_headers({"Retry-After": str(after)})
        if rule.fault == "search_quota":
            reply = failure(429, "search_quota_exceeded", "Daily search quota exceeded")
            return reply.with_headers(
                {"Retry-After": "36000", "X-RateLimit-Reset": str(int(self.world.clock.now()) + 36000)}
            )
        if rule.fault == "auth":
            return failure(404, "auth_error", "Invalid user key")
        if rule.fault == "forbidden":
            return failure(403, "auth_error", "This action requires login.")
        if rule.fault == "low_balance":
            return failure(400, "invalid_args", "error 400/3700: You lack credit, see the billing page.", **ask)
        if rule.fault in ("vanished_offer", "no_capacity"):
            return self._gone(
                call, 404 if status == 404 or (rule.fault == "vanished_offer" and status == 500) else 410, rule
            )
        return Reply(status, {"detail": "Internal Server Error"} if status == 500 else {"detail": f"HTTP {status}"})

    def _gone(self, call: Call, status: int, rule: Rule | None = None) -> Reply:
        number = call.match.get("id", "")
        if rule is not None and rule.fault == "vanished_offer" and number.isdigit():
            offer, _ = self.world.vast.find(int(number), self.world.clock.now())
            if offer is not None:
                offer.machine.generation += 1  # somebody else has it: the next search shows other ids
        words = "no longer available" if status == 410 else "not available"
        msg = f"error {status}/3603: no_such_ask Instance type by id {number} is {words}."
        return failure(status, "no_such_ask", msg, ask_id=number)

    # --- searching ----------------------------------------------------------------------------------------------------

    def _search(self, query: Any, columns: Any = None) -> Reply:
        if not isinstance(query, dict):
            return failure(400, "bad_request", "q: Input should be a valid dictionary")
        try:
            rows = search(self.world.vast, query, self.world.clock.now())
        except BadQueryError as exc:
            return failure(400, "bad_request", str(exc))
        return Reply(200, {"offers": select(rows, columns)})

    def search_post(self, call: Call) -> Reply:
        return self._search(body_of(call))

    def search_get(self, call: Call) -> Reply:
        return self._search(query_json(call, "q", {}), query_json(call, "select_cols", None))

    def search_asks(self, call: Call) -> Reply:
        body = body_of(call)
        return self._search(body.get("q", {}), body.get("select_cols"))

    # --- renting ------------------------------------------------------------------------------------------------------

    def create(self, call: Call) -> Reply:
        """PUT /asks/{id}/: exactly one contract, or none, or one that never ran (which is billed for its disk)."""
        number = call.match["id"]
        whole_account(call)
        if not number.isdigit():
            return failure(400, "invalid_args", f"error 400: {number!r} is no offer id", ask_id=number)
        body, template = self.templates.filled(call.identity.account, body_of(call), number)
        values = self._order(body, template, number, call.identity.account)
        now = self.world.clock.now()
        offer, known = self.world.vast.find(int(number), now)
        if offer is not None:
            return self._contract(call, offer, body, values)
        if not known:
            return self._gone(call, 404)
        lost = self.world.vast.gone(int(number), now)
        if body.get("cancel_unavail", body.get("price") is None) or lost is None:
            return self._gone(call, 410)
        pod = self.world.rent_vast(call.identity.account, lost, stopped=True, struck=call.pod_rules, **values)
        return Reply(200, {"success": False, "new_contract": int(pod.id), "instance_api_key": pod.api_key})

    def _contract(self, call: Call, offer: VastOffer, body: Mapping[str, Any], values: dict[str, Any]) -> Reply:
        account = call.identity.account
        if values["disk_gb"] > offer.machine.disk_space:
            return failure(
                400, "invalid_args", f"disk {values['disk_gb']} exceeds what offer {offer.id} has", ask_id=offer.id
            )
        price = body.get("price")
        if price is not None:
            if price < round(offer.dph_base * 0.6, 6):
                return failure(400, "invalid_price", f"bid {price} is below the minimum", ask_id=offer.id)
            offer = VastOffer(offer.id, offer.machine, offer.gpus, float(price), offer.generation, offer.now)
        failed = call.rule("error_with_id")
        stopped = body.get("target_state") == "stopped" or failed is not None
        pod = self.world.rent_vast(account, offer, stopped=stopped, struck=call.pod_rules, **values)
        answer = {"success": True, "new_contract": int(pod.id), "instance_api_key": pod.api_key}
        if failed is not None:
            answer |= {"success": False, "error": "resources_unavailable", "msg": "Required resources are unavailable."}
        return Reply(200, answer)

    def _order(
        self, body: Mapping[str, Any], template: Template | None, number: str, account: Account
    ) -> dict[str, Any]:
        """The body of a create as the values of a pod. Raises Refusal."""

        def refuse(msg: str, code: str = "invalid_args") -> Refusal:
            return Refusal(failure(400, code, f"error 400: {msg}", ask_id=number))

        image = body.get("image")
        runtype = body.get("runtype") or ("args" if body.get("args") or body.get("args_str") else "ssh")
        env = body.get("env") or {}
        if not image:
            raise refuse("image is missing")
        if not isinstance(image, str) or len(image) > 1024:
            raise refuse("image is a string of at most 1024 characters")
        if runtype not in _RUNTYPES:
            raise refuse(f"runtype {runtype!r} is unknown")
        if body.get("runtype") and body.get("use_ssh"):
            raise refuse("runtype and use_ssh cannot both be set")
        if not isinstance(env, dict):
            raise refuse("env is an object")
        if len(json.dumps(env)) > 32768 or any(len(str(value)) > 256 for value in env.values()):
            raise refuse("env is too large")
        if len(str(body.get("label") or "")) > _MAX_LABEL_CREATE:
            raise refuse("label is too long", "label_too_long")
        texts = (
            str(body.get("onstart") or ""),
            str(body.get("args_str") or ""),
            " ".join(map(str, body.get("args") or [])),
        )
        if sum(map(len, texts)) > _MAX_START_TEXT:
            raise refuse(f"onstart and args are longer than {_MAX_START_TEXT}")
        price = body.get("price")
        if price is not None and (not isinstance(price, (int, float)) or not 0.001 <= price <= 128):
            raise refuse("price must be from 0.001 to 128", "invalid_price")
        if account.balance(self.world.clock.now()) <= 0:
            raise refuse("You lack credit, see the billing page.")
        return {
            "name": str(body.get("label") or ""),
            "image": image,
            "disk_gb": self._disk(body, refuse),
            "env": {str(name): str(value) for name, value in env.items() if not str(name).startswith("-")},
            "ports": [str(name)[3:].strip() for name in env if str(name).startswith("-p ")],
            "keys": [dict(key) for key in account.ssh_keys] if has_ssh(str(runtype)) else [],
            "command": texts[0],
            "login": login_of_vast(str(body.get("image_login") or ""), image),
            "details": {
                "runtype": str(runtype),
                "direct": is_direct(str(runtype)),
                "args": body.get("args") or [],
                "template": template,
                "is_bid": price is not None,
            },
        }

    @staticmethod
    def _disk(body: Mapping[str, Any], refuse: Callable[[str], Refusal]) -> float:
        try:
            disk = float(body.get("disk") if body.get("disk") is not None else 10.0)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise refuse("disk is a number") from None
        if disk < MIN_DISK_GB:
            raise refuse(f"disk must be at least {MIN_DISK_GB:g}")
        return disk

    def create_many(self, call: Call) -> Reply:
        body = body_of(call)
        ids = body.get("ids")
        if not isinstance(ids, list) or not 0 < len(ids) <= BULK:
            return failure(400, "invalid_args", f"ids is a list of 1 to {BULK} offers")
        results: list[dict[str, Any]] = []
        for number in ids:
            single = Call(call.request, call.endpoint, {"id": str(number)}, call.identity, call.rules)
            try:
                answer = self.create(single).body
            except Refusal as refusal:
                answer = refusal.reply.body
            made = {"ask_id": number, "success": answer["success"]}
            if "new_contract" in answer:
                made |= {"new_contract": answer["new_contract"], "state": "running" if answer["success"] else "stopped"}
            else:
                made |= {"error": answer["error"], "msg": answer["msg"]}
            results.append(made)
        good = sum(1 for item in results if item["success"])
        summary = {
            "success": good > 0,
            "results": results,
            "created": good,
            "failed": len(results) - good,
            "elapsed": 0.1,
        }
        return Reply(200 if good else 400, summary)

    def launch(self, call: Call) -> Reply:
        """Search and rent in one call: the first offer of the query's order, or none."""
        body = body_of(call)
        try:
            found = search(self.world.vast, body.get("q") or {}, self.world.clock.now())
        except BadQueryError as exc:
            return failure(400, "bad_request", str(exc))
        if not found:
            return Reply(200, {"success": False, "error": "offer_not_found", "message": "No offers match the query."})
        return self.create(Call(call.request, call.endpoint, {"id": str(found[0]["id"])}, call.identity, call.rules))

    # --- looking ------------------------------------------------------------------------------------------------------

    def listing(self, call: Call) -> Reply:
        """GET /api/v1/instances/: pages of 25, filters on stored columns only."""
        whole_account(call)
        filters = query_json(call, "select_filters", {})
        if not isinstance(filters, dict) or set(filters) - _STORED:
            return failure(
                400, "invalid_request", f"select_filters: cannot filter by {', '.join(set(filters) - _STORED)}"
            )
        pods = self.world.listing(VAST, call.identity)
        try:
            rows = [pod for pod in pods if self._passes(pod, filters)]
            rows.sort(key=_order_key(query_json(call, "order_by", None)))
        except BadQueryError as exc:
            return failure(400, "invalid_request", str(exc))
        try:
            limit = int(call.request.get("limit", str(PAGE)))
            first = _position(call.request.get("after_token"), rows)
        except ValueError:
            return failure(400, "invalid_token", "after_token or limit is not valid")
        limit = 5 if limit <= 0 else min(limit, PAGE)
        page = rows[first : first + limit]
        more = first + limit < len(rows)
        token = _token(page[-1]) if more and page else None
        short = call.rule("short_page")
        if short is not None:
            page = page[: -int(short.options.get("drop", 1))]
        now = self.world.clock.now()
        shown = select([instance_row(pod, now) for pod in page], query_json(call, "select_cols", None))
        return Reply(
            200,
            {
                "success": True,
                "instances_found": len(shown),
                "total_instances": len(pods),
                "label_counts": _label_counts(pods),
                "instances": shown,
                "next_token": token,
            },
        )

    def _passes(self, pod: Pod, filters: Mapping[str, Any]) -> bool:
        if not filters:
            return True
        if any(not isinstance(wish, dict) for wish in filters.values()):
            raise BadQueryError("select_filters: each filter is an object")
        row = instance_row(pod, self.world.clock.now())
        row["label"] = row["label"] or ""
        return all(matches(row, name, wish) for name, wish in filters.items())

    def legacy_listing(self, _call: Call) -> Reply:
        return failure(410, "deprecated_endpoint", "/api/v0/instances/ is deprecated. Use /api/v1/instances/ instead.")

    def show(self, call: Call) -> Reply:
        """An unknown or destroyed id is no error: `instances` is null."""
        pod = self._find(call)
        if pod is None:
            late = [item for item in self.world.listing(VAST, call.identity) if item.id == call.match["id"]]
            pod = late[0] if late else None
        return Reply(200, {"instances": instance_row(pod, self.world.clock.now()) if pod else None})

    # --- acting -------------------------------------------------------------------------------------------------------

    def destroy(self, call: Call) -> Reply:
        pod = self._need(call)
        if call.rule("destroy_noop") is None:
            self.world.destroy(pod)
        return Reply(200, {"success": True})

    def destroy_many(self, call: Call) -> Reply:
        whole_account(call)
        ids = body_of(call).get("instance_ids")
        if not isinstance(ids, list) or not ids:
            return failure(400, "invalid_args", "instance_ids is a list of ids")
        mine = [pod for number in ids if (pod := self.world.find(VAST, str(number), call.identity)) is not None]
        if not mine:
            return failure(404, "instances_not_found", "None of the instances was found.")
        if call.rule("destroy_noop") is None:
            for pod in mine:
                self.world.destroy(pod)
        return Reply(200, {"success": True})

    def update(self, call: Call) -> Reply:
        """PUT /instances/{id}/: a label, or stop and start."""
        pod, body = self._need(call), body_of(call)
        if "label" in body:
            whole_account(call)
            label = str(body["label"] or "")
            if len(label) > _MAX_LABEL:
                return failure(400, "label_too_long", f"a label has at most {_MAX_LABEL} characters")
            pod.name = label
        state = body.get("state")
        if state is None:
            return Reply(200, {"success": True})
        if state not in ("running", "stopped"):
            return failure(400, "invalid_args", f"state {state!r} is unknown")
        return self._set_state(pod, state)

    def _set_state(self, pod: Pod, state: str) -> Reply:
        if state == "stopped":
            self.world.stop(pod)
            return Reply(200, {"success": True})
        if pod.account.balance(self.world.clock.now()) <= 0:
            return failure(400, "missing_billing", "You lack credit, see the billing page.")
        if not self.world.start(pod):
            msg = "Required resources are currently unavailable, state change queued."
            return failure(200, "resources_unavailable", msg)
        return Reply(200, {"success": True})

    def update_many(self, call: Call) -> Reply:
        whole_account(call)
        body = body_of(call)
        ids, state = body.get("ids"), body.get("state")
        if not isinstance(ids, list) or not 0 < len(ids) <= BULK or state not in ("running", "stopped"):
            return failure(400, "invalid_args", f"ids is a list of 1 to {BULK}, state running or stopped")
        for number in ids:
            pod = self.world.find(VAST, str(number), call.identity)
            if pod is not None:
                self._set_state(pod, state)
        return Reply(200, {"success": True})

    def reboot(self, call: Call) -> Reply:
        whole_account(call)
        pod = self._need(call)
        if pod.stage is not Stage.RUNNING:
            return failure(200, "invalid_id", f"Instance {pod.id} is not running.")
        self.world.restart(pod)
        return Reply(200, {"success": True})

    def change_bid(self, call: Call) -> Reply:
        whole_account(call)
        pod = self._need(call)
        if not pod.details.get("is_bid"):
            return failure(400, "invalid_args", "This is an on-demand contract.")
        return Reply(200, {"success": True})

    def snapshot(self, call: Call) -> Reply:
        """Accepted at once; whether the host could push is told nowhere."""
        whole_account(call)
        pod, body = self._need(call), body_of(call)
        repository = str(body.get("personal_repo") or "")
        if not repository:
            return failure(400, "invalid_args", "personal_repo is missing")
        registry = str(body.get("container_registry") or HUB)
        user, password = (str(body.get(f"docker_login_{name}") or "") for name in ("user", "pass"))
        login = RegistryLogin(registry, user, password) if user else None
        self.world.snapshot(pod, f"{registry}/{repository}", login)
        return Reply(200, {"success": True, "msg": "Snapshot request accepted."})

    # --- logs ---------------------------------------------------------------------------------------------------------

    def request_logs(self, call: Call) -> Reply:
        """The answer names a place that needs no key and is not there at once."""
        whole_account(call)
        pod, body = self._need(call), body_of(call)
        try:
            tail = int(body.get("tail") or 1000)
        except (TypeError, ValueError):
            return failure(400, "invalid_args", "tail is a number")
        lines = pod.log if str(body.get("daemon_logs", "")).lower() == "true" else self.world.backend.logs(pod, tail)
        if body.get("filter"):
            lines = [line for line in lines if str(body["filter"]) in line]
        token = base64.b16encode(f"{pod.id}-{len(self._logs)}".encode()).decode().lower()
        self._logs[token] = (self.world.clock.now() + _LOG_READY_S, "\n".join(lines[-tail:]) + "\n")
        place = f"http://{call.request.headers.get('host', 'localhost')}/_sim/vast-logs/{token}.log"
        return Reply(200, {"success": True, "result_url": place, "msg": "Logs requested."})

    def log_file(self, call: Call) -> Reply:
        ready, text = self._logs.get(call.match["token"], (0.0, None))
        if text is None or self.world.clock.now() < ready:
            denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            return Reply(403, denied, content_type="application/xml")
        return Reply(200, text.encode(), content_type="text/plain")

    # --- keys ---------------------------------------------------------------------------------------------------------

    def account_keys(self, call: Call) -> Reply:
        whole_account(call)
        return Reply(200, [self._key_row(call, key) for key in call.identity.account.ssh_keys])

    @staticmethod
    def _key_row(call: Call, key: Mapping[str, Any]) -> dict[str, Any]:
        return {"user_id": call.identity.account.user_id, "deleted_at": None} | dict(key) | {"key": key["public_key"]}

    def add_account_key(self, call: Call) -> Reply:
        whole_account(call)
        text, account = self._key_text(call), call.identity.account
        key = {"id": account.next_key_id, "public_key": text, "created_at": "2026-01-01T00:00:00"}
        account.next_key_id += 1
        account.ssh_keys.append(key)
        return Reply(200, {"success": True, "key": self._key_row(call, key)})

    def change_account_key(self, call: Call) -> Reply:
        key = self._account_key(call)
        key["public_key"] = self._key_text(call)
        return Reply(200, {"success": True, "key": self._key_row(call, key)})

    def drop_account_key(self, call: Call) -> Reply:
        call.identity.account.ssh_keys.remove(self._account_key(call))
        return Reply(200, {"success": True})

    def _account_key(self, call: Call) -> dict[str, Any]:
        whole_account(call)
        for key in call.identity.account.ssh_keys:
            if str(key["id"]) == call.match["id"]:
                return key
        raise Refusal(failure(400, "no_ssh_key", "SSH key not found."))

    @staticmethod
    def _key_text(call: Call) -> str:
        text = str(body_of(call).get("ssh_key") or "").strip()
        if not _KEY_TEXT.fullmatch(text):
            raise Refusal(failure(400, "no_ssh_key", "No valid SSH key provided."))
        return text

    def attach_key(self, call: Call) -> Reply:
        whole_account(call)
        pod, text = self._need(call), self._key_text(call)
        if any(key["public_key"] == text for key in pod.keys):
            return failure(200, "duplicate_ssh_key", "SSH key already associated with instance.")
        key = {"id": 900 + len(pod.keys), "public_key": text, "created_at": "2026-01-01T00:00:00"}
        pod.keys.append(key)
        self.world.keys_changed(pod)
        return Reply(200, {"success": True, "msg": "SSH key added to instance.", "key": json.dumps(key)})

    def attached_keys(self, call: Call) -> Reply:
        whole_account(call)
        return Reply(200, {"success": True, "ssh_keys": json.dumps(self._need(call).keys)})

    def detach_key(self, call: Call) -> Reply:
        whole_account(call)
        pod = self._need(call)
        kept = [key for key in pod.keys if str(key["id"]) != call.match["key"]]
        if len(kept) == len(pod.keys):
            return failure(200, "no_ssh_key", "SSH key not associated with instance.")
        pod.keys = kept
        self.world.keys_changed(pod)
        return Reply(200, {"success": True, "msg": "SSH key removed from instance."})

    # --- money --------------------------------------------------------------------------------------------------------

    def user(self, call: Call) -> Reply:
        whole_account(call)
        account = call.identity.account
        credit = account.balance(self.world.clock.now()) / 1e6
        keys = account.ssh_keys
        return Reply(
            200,
            {
                "id": account.user_id,
                "email": account.email,
                "username": account.email.partition("@")[0],
                "fullname": None,
                "credit": credit,
                "balance": 0,
                "balance_threshold": 0.0,
                "balance_threshold_enabled": False,
                "key_id": 1,
                "ssh_key": keys[0]["public_key"] if keys else None,
                "sid": "simulated",
                "can_pay": True,
                "has_billing": True,
                "has_payout": False,
                "billaddress_country": None,
                "billaddress_city": None,
                "paid_verified": 1,
                "paid_expected": 0,
                "host_only": False,
                "user": None,
                "got_signup_credit": 0,
            },
        )

    def spend(self, call: Call) -> Reply:
        whole_account(call)
        return Reply(200, spend_rate(self.world, call.identity.account))

    def charges(self, call: Call) -> Reply:
        whole_account(call)
        filters = query_json(call, "select_filters", {})
        day = filters.get("day") if isinstance(filters, dict) else None
        try:
            start, end = float(day["gte"]), float(day["lte"])  # type: ignore[index]
            limit = min(500, max(1, int(call.request.get("limit", "100"))))
            skip = int(base64.b64decode(call.request.get("after_token")) or b"0")
        except (KeyError, TypeError, ValueError):
            return failure(400, "invalid_args", "select_filters.day needs gte and lte")
        rows = charge_rows(self.world, call.identity.account, start, end, self.world.clock.now())
        if call.request.get("latest_first", "true").lower() != "false":
            rows.reverse()
        page = rows[skip : skip + limit]
        more = skip + limit < len(rows)
        token = base64.b64encode(str(skip + limit).encode()).decode() if more else None
        return Reply(
            200, {"success": True, "count": len(page), "total": len(rows), "results": page, "next_token": token}
        )

    def invoices(self, call: Call) -> Reply:
        whole_account(call)
        account = call.identity.account
        row: dict[str, Any] = {
            "start": round(self.world.started, 1),
            "end": None,
            "type": "credit",
            "source": "stripe",
            "description": "Manual Billing from MASTERCARD ...0000",
            "amount": -account.credit / 1e6,
            "metadata": {"invoice_id": 1, "service": "stripe_payments"},
            "items": [],
        }
        return Reply(200, {"success": True, "count": 1, "total": 1, "results": [row], "next_token": None})

    # --- who may what -------------------------------------------------------------------------------------------------

    def _find(self, call: Call) -> Pod | None:
        number = call.match["id"]
        if not number.isdigit():
            raise Refusal(failure(400, "invalid_args", f"{number!r} is no instance id"))
        return self.world.find(VAST, number, call.identity)

    def _need(self, call: Call) -> Pod:
        pod = self._find(call)
        if pod is None:
            raise Refusal(failure(404, "no_such_instance", f"Instance {call.match['id']} not found."))
        return pod


def _order_key(order: Any) -> Callable[[Pod], Any]:
    first = order[0] if isinstance(order, list) and order and isinstance(order[0], dict) else {}
    sign = -1 if str(first.get("dir", "asc")).lower() == "desc" else 1
    column = first.get("col", "id")
    if column == "start_date":
        return lambda pod: (sign * pod.created, int(pod.id))
    if column == "label":
        return lambda pod: (pod.name, int(pod.id))
    return lambda pod: sign * int(pod.id)


def _token(pod: Pod) -> str:
    return base64.b64encode(json.dumps({"values": {"id": int(pod.id)}}).encode()).decode()


def _position(token: str, rows: list[Pod]) -> int:
    """Where the page after `token` starts. Raises ValueError for a token that is not ours."""
    if not token:
        return 0
    try:
        last = str(json.loads(base64.b64decode(token, validate=True))["values"]["id"])
    except (KeyError, TypeError) as exc:
        raise ValueError(token) from exc
    known = [pod.id for pod in rows]
    if last in known:
        return known.index(last) + 1
    return sum(1 for number in known if int(number) < int(last))


def _label_counts(pods: list[Pod]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for pod in pods:
        counts[pod.name] = counts.get(pod.name, 0) + 1
    return counts
