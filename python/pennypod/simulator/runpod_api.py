"""RunPod's REST v2, and v1 as it is now: 410. GraphQL is in `runpod_graphql`."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from pennypod.model.image import RegistryLogin, registry_of
from pennypod.simulator import runpod_schema as schema
from pennypod.simulator.dispatch import Call, Route, route
from pennypod.simulator.faults import Rule
from pennypod.simulator.market import center_rows
from pennypod.simulator.meter import nanos
from pennypod.simulator.runpod_rows import BUCKETS, bill, gpu_row, pod_row, status
from pennypod.simulator.runpod_templates import Templates
from pennypod.simulator.runpod_wire import MAX_BODY, body_of, credential_of, problem, whole_account
from pennypod.simulator.state import RUNPOD, Credential, Identity, Pod, Stage, World, runpod_disk
from pennypod.simulator.wire import Refusal, Reply, Request

NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
NO_MONEY = "Your account balance is too low to rent a pod"
NO_FREE_GPU = "There are not enough free GPUs on the host machine to start this pod."
DEFAULT_DISK_GB = 20
DEFAULT_PAGE = 100
CPU_USD_PER_VCPU = 0.03
_QUOTAS = (("minute", 200, 60), ("hour", 7200, 3600), ("day", 100_000, 86400))
_LOG_SOURCES = ("system", "container")
_LOG_OPEN_S = 300.0
CLOUDFLARE_PAGE = b"<!DOCTYPE html><html><body>error code: 1010</body></html>"


class RunpodApi:
    provider = RUNPOD
    spacing: Mapping[str, float] = {}

    def __init__(self, world: World) -> None:
        self.world = world
        self.templates = Templates(world)
        one, template = r"/v2/pods/(?P<id>[^/]+)", r"/v2/templates/(?P<template>[^/]+)"
        self.routes: tuple[Route, ...] = (
            route("GET", r"/v2/pods", "runpod.list", self.listing),
            route("POST", r"/v2/pods", "runpod.create", self.create),
            route("GET", one, "runpod.get", self.show),
            route("PATCH", one, "runpod.update", self.update),
            route("DELETE", one, "runpod.destroy", self.destroy),
            route("POST", one + "/action", "runpod.action", self.action),
            route("GET", one + "/logs", "runpod.logs", self.logs),
            route("GET", r"/v2/catalog/gpus", "runpod.gpus", self.gpus),
            route("GET", r"/v2/catalog/gpus/(?P<gpu>.+)", "runpod.gpus", self.gpu),
            route("GET", r"/v2/catalog/datacenters", "runpod.datacenters", self.centers),
            route("GET", r"/v2/account/ssh-keys", "runpod.keys", self.keys),
            route("PUT", r"/v2/account/ssh-keys", "runpod.keys", self.set_keys),
            route("GET", r"/v2/billing/pods", "runpod.billing", self.billing),
            route("GET", r"/v2/templates", "runpod.templates", self.templates.listing),
            route("POST", r"/v2/templates", "runpod.templates", self.templates.create),
            route("GET", template, "runpod.templates", self.templates.show),
            route("PATCH", template, "runpod.templates", self.templates.update),
            route("DELETE", template, "runpod.templates", self.templates.delete),
            route("GET", r"/v2/registries", "runpod.registries", self.registries),
            route("POST", r"/v2/registries", "runpod.registries", self.keep_registry),
            route("GET", r"/v2/registries/(?P<registry>[^/]+)", "runpod.registries", self.registry),
            route("DELETE", r"/v2/registries/(?P<registry>[^/]+)", "runpod.registries", self.forget_registry),
        )

    # --- the frame ----------------------------------------------------------------------------------------------------

    def key_of(self, request: Request) -> str:
        return request.bearer

    def unauthorized(self, request: Request) -> Reply:
        if len(request.body) > MAX_BODY:
            return problem(413, "request body too large")
        return problem(401, "invalid api key" if request.bearer else "missing bearer token")

    def no_route(self, request: Request, allowed: list[str]) -> Reply:
        if request.path.startswith("/v1"):
            return Reply(
                410, {"error": "This API version has been retired. Use https://api.runpod.io/v2.", "status": 410}
            )
        if allowed:
            return problem(405, "method not allowed").with_headers({"Allow": ", ".join(allowed)})
        return problem(404, "resource not found")

    def too_frequent(self, threshold: float) -> Reply:
        return problem(429, "rate limit exceeded for window minute").with_headers({"Retry-After": str(int(threshold))})

    def finish(self, reply: Reply) -> Reply:
        headers = {"x-request-id": secrets.token_hex(16)}
        if reply.status not in (401, 410):
            headers["RateLimit"] = ", ".join(f'"{name}";r={quota - 1};t={window}' for name, quota, window in _QUOTAS)
            headers["RateLimit-Policy"] = ", ".join(f'"{name}";q={quota};w={window}' for name, quota, window in _QUOTAS)
        return reply.with_headers(headers)

    def facts(self, endpoint: str, match: Mapping[str, str], request: Request) -> dict[str, Any]:
        facts: dict[str, Any] = {"method": request.method}
        if "id" in match:
            facts["pod"] = match["id"]
        if endpoint == "runpod.create":
            try:
                body = request.json()
                facts |= {"gpu": body["gpu"]["id"], "cloud": body.get("cloud", "SECURE")}
                facts["region"] = ",".join(body.get("dataCenterIds", ()))
            except (KeyError, TypeError, ValueError):
                pass
        return facts

    def fault_reply(self, rule: Rule, _call: Call) -> Reply:
        code = int(rule.options.get("status", 500))
        if rule.fault == "forbidden":
            if rule.options.get("html"):
                return Reply(403, CLOUDFLARE_PAGE, content_type="text/html; charset=UTF-8")
            return problem(403, "forbidden")
        if rule.fault in ("rate_limited", "search_quota"):
            reply = problem(429, "rate limit exceeded for window minute")
            after = rule.options.get("retry_after")
            return reply if after is None else reply.with_headers({"Retry-After": str(after)})
        fixed = {
            "auth": (401, "invalid api key"),
            "low_balance": (402, NO_MONEY),
            "no_capacity": (400, NO_CAPACITY),
            "vanished_offer": (400, NO_CAPACITY),
        }
        return problem(
            *fixed.get(rule.fault, (code, "Something went wrong. Please try again later or contact support."))
        )

    # --- pods ---------------------------------------------------------------------------------------------------------

    def listing(self, call: Call) -> Reply:
        """Unknown query parameters are ignored, as the service ignores them."""
        whole_account(call)
        pods = sorted(self.world.listing(RUNPOD, call.identity), key=lambda pod: (pod.created, pod.id))
        try:
            limit = int(call.request.get("limit") or self.world.options.get("runpod_page", DEFAULT_PAGE))
            cursor = call.request.get("cursor")
            skip = int(base64.urlsafe_b64decode(cursor).decode()) if cursor else 0
        except ValueError:
            return problem(400, "limit or cursor is not valid")
        limit = max(1, limit)
        page, more = pods[skip : skip + limit], skip + limit < len(pods)
        short = call.rule("short_page")
        if short is not None:
            page = page[: -int(short.options.get("drop", 1))]
        now = self.world.clock.now()
        following = base64.urlsafe_b64encode(str(skip + limit).encode()).decode() if more else None
        rows = [pod_row(pod, now, with_env=False) for pod in page]
        return Reply(200, {"pods": rows, "pagination": {"nextCursor": following, "hasNextPage": more}})

    def create(self, call: Call) -> Reply:
        whole_account(call)
        body = body_of(call, schema.CREATE)
        gpu_wish, cpu_wish = body.get("gpu"), body.get("cpu")
        if "image" not in body and "templateId" not in body:
            raise Refusal(problem(422, "Request validation failed.", ["$: missing property 'image'"]))
        if (gpu_wish is None) == (cpu_wish is None):
            return problem(400, "exactly one of gpu and cpu must be given")
        body = self.templates.filled(call, body)
        gpu_wish = body.get("gpu")
        if body.get("registry") is not None:
            credential_of(call, body["registry"])
        if call.identity.account.balance(self.world.clock.now()) <= 0:
            return problem(402, NO_MONEY)
        if gpu_wish is None:
            return self._rent(call, body, None, "US-TX-3")
        if gpu_wish.get("allowedCudaVersions") and gpu_wish.get("minCudaVersion"):
            return problem(400, "allowedCudaVersions and minCudaVersion cannot both be set")
        cloud = body.get("cloud", "SECURE")
        gpu = self.world.runpod.gpus.get(gpu_wish["id"])
        # Seen live: without a count the scheduler finds nothing, whatever the documented default.
        count = gpu_wish.get("count")
        fits = None if gpu is None else _cuda_of(gpu.cuda, gpu_wish)
        if gpu is None or count is None or fits is None:
            return problem(400, NO_CAPACITY)
        center = self.world.runpod.take(gpu, cloud, count, body.get("dataCenterIds"))
        if center is None:
            return problem(400, NO_CAPACITY)
        return self._rent(call, body, gpu, center, cuda=fits)

    def _rent(self, call: Call, body: Mapping[str, Any], gpu: Any, center: str, cuda: str | None = None) -> Reply:
        mounts = dict(body.get("mounts") or {})
        cloud = body.get("cloud", "SECURE")
        count = body["gpu"]["count"] if gpu is not None else 0
        price = self.world.runpod.price(gpu, cloud, self.world.clock.now()) * count if gpu is not None else 0.0
        if gpu is None:
            price = CPU_USD_PER_VCPU * body["cpu"]["vcpuCount"]
        env = dict(body.get("env") or {})
        account_keys = "\n".join(key["public_key"] for key in call.identity.account.ssh_keys)
        if body.get("startSsh") and account_keys:
            env.setdefault("PUBLIC_KEY", account_keys)
        text = env.get("PUBLIC_KEY") or env.get("SSH_PUBLIC_KEY") or ""
        details: dict[str, Any] = {
            "cloud": cloud,
            "center": center,
            "cuda": cuda,
            "rate": round(price, 9),
            "args": body.get("args", ""),
            "mounts": mounts,
            "registry": body.get("registry"),
            "template": body.get("templateId"),
            "volume_gb": (mounts.get("persistent") or {}).get("size", 0),
            "global_networking": body.get("globalNetworking", False),
            "start_ssh": bool(body.get("startSsh")),
        }
        details |= {name: body[name] for name in ("cmd", "entrypoint", "cpu") if name in body}
        pod = self.world.rent_runpod(
            call.identity.account,
            gpu,
            struck=call.pod_rules,
            name=body["name"],
            image=body.get("image", ""),
            disk_gb=float(body.get("disk", DEFAULT_DISK_GB)),
            env=env,
            ports=list(body.get("ports") or []),
            keys=[{"public_key": line} for line in text.splitlines() if line.strip()],
            command=_command(body),
            gpus=count,
            details=details,
            login=self._login(call, body),
        )
        pod.details["full_rate"] = nanos(str(pod.details["rate"])) + runpod_disk(pod, True)
        return Reply(201, pod_row(pod, self.world.clock.now()))

    def _login(self, call: Call, body: Mapping[str, Any]) -> RegistryLogin | None:
        """A credential names no registry: it is good for whichever the image is in."""
        if body.get("registry") is None:
            return None
        kept = credential_of(call, body["registry"])
        return RegistryLogin(registry_of(str(body.get("image", ""))), kept.user, kept.password)

    def registries(self, call: Call) -> Reply:
        whole_account(call)
        rows = [{"id": kept.id, "name": kept.name} for kept in call.identity.account.registries]
        return Reply(200, {"registries": rows})

    def registry(self, call: Call) -> Reply:
        whole_account(call)
        kept = credential_of(call, call.match["registry"])
        return Reply(200, {"id": kept.id, "name": kept.name})

    def keep_registry(self, call: Call) -> Reply:
        """Names need not be unique. What is kept is not looked at: a wrong password shows when a pod pulls."""
        whole_account(call)
        body = body_of(call, schema.REGISTRY)
        kept = Credential(f"reg_{secrets.token_hex(4)}", body["name"], body["username"], body["password"])
        call.identity.account.registries.append(kept)
        return Reply(201, {"id": kept.id, "name": kept.name})

    def forget_registry(self, call: Call) -> Reply:
        whole_account(call)
        kept = credential_of(call, call.match["registry"])
        pods = self.world.listing(RUNPOD, call.identity)
        if any(pod.alive and pod.details.get("registry") == kept.id for pod in pods):
            return problem(400, "registry credential is in use by a pod and cannot be deleted")
        call.identity.account.registries.remove(kept)
        return Reply(204)

    def show(self, call: Call) -> Reply:
        pod = self.world.find(RUNPOD, call.match["id"], call.identity)
        if pod is None:
            late = [item for item in self.world.listing(RUNPOD, call.identity) if item.id == call.match["id"]]
            if not late:
                return problem(404, "pod not found")
            pod = late[0]
        return Reply(200, pod_row(pod, self.world.clock.now()))

    def update(self, call: Call) -> Reply:
        """PATCH: the container is made anew with what changed."""
        whole_account(call)
        pod = self._need(call)
        body = body_of(call, schema.UPDATE)
        pod.name = body.get("name", pod.name)
        pod.image = body.get("image", pod.image)
        pod.env = dict(body.get("env", pod.env))
        pod.ports = list(body.get("ports", pod.ports))
        pod.disk_gb = float(body.get("disk", pod.disk_gb))
        pod.details["locked"] = body.get("locked", pod.details.get("locked", False))
        if set(body) - {"name", "locked"} and pod.stage is Stage.RUNNING:
            self.world.restart(pod)
        return Reply(200, pod_row(pod, self.world.clock.now()))

    def destroy(self, call: Call) -> Reply:
        pod = self._need(call)
        if call.rule("destroy_noop") is None:
            self.world.destroy(pod)
        return Reply(204)

    def action(self, call: Call) -> Reply:
        pod = self._need(call)
        verb = body_of(call, schema.ACTION)["action"]
        if verb == "terminate":
            return self.destroy(call)
        allowed = pod_row(pod, self.world.clock.now())["actions"]
        if verb not in allowed:
            return problem(409, f"cannot {verb} a pod that is {status(pod)}")
        if verb == "stop":
            self.world.stop(pod)
        elif verb == "restart":
            self.world.restart(pod)
        elif not self.world.start(pod):
            self.world.stop(pod)
            return problem(400, NO_FREE_GPU)
        return Reply(200, pod_row(pod, self.world.clock.now()))

    def logs(self, call: Call) -> Reply:
        """Server-sent events: what there is, then a stream that stays open and says nothing more."""
        pod = self._need(call)
        try:
            tail = min(5000, max(0, int(call.request.get("tail", "100"))))
        except ValueError:
            return problem(400, "tail is not a number")
        wanted = call.request.get("source")
        if wanted not in ("", *_LOG_SOURCES):
            return problem(400, "source must be container or system")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.world.clock.now()))
        lines = [
            (source, line)
            for source in _LOG_SOURCES
            if wanted in ("", source)
            for line in (pod.log if source == "system" else self.world.backend.logs(pod, tail))
        ]
        events = [
            f'id: {stamp}/{number:012}\ndata: {{"source":"{source}","line":{_quoted(line)},"ts":"{stamp}"}}\n\n'
            for number, (source, line) in enumerate(lines[-tail:] if tail else [])
        ]
        reply = Reply(200, "".join(events).encode(), content_type="text/event-stream", open_s=_LOG_OPEN_S)
        return reply.with_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    # --- catalogue ----------------------------------------------------------------------------------------------------

    def gpus(self, call: Call) -> Reply:
        query, now = self._catalog_query(call), self.world.clock.now()
        return Reply(
            200, {"gpus": [gpu_row(self.world.runpod, gpu, now, query) for gpu in self.world.runpod.gpus.values()]}
        )

    def gpu(self, call: Call) -> Reply:
        gpu = self.world.runpod.gpus.get(unquote(call.match["gpu"]))
        if gpu is None:
            return problem(404, "resource not found")
        return Reply(200, gpu_row(self.world.runpod, gpu, self.world.clock.now(), self._catalog_query(call)))

    def _catalog_query(self, call: Call) -> dict[str, Any]:
        get = call.request.get
        include = [part for part in get("include").split(",") if part]
        if bool(include) != bool(get("product")):
            raise Refusal(problem(400, "include and product must be given together"))
        if include not in ([], ["AVAILABILITY"]) or (
            get("product") and get("product") not in ("POD", "SERVERLESS", "CLUSTER")
        ):
            raise Refusal(problem(400, "include or product has an unknown value"))
        cloud = get("cloud") or "SECURE"
        if cloud not in ("SECURE", "COMMUNITY"):
            raise Refusal(problem(400, "cloud must be SECURE or COMMUNITY"))
        exact, floor = get("cudaVersions"), get("minCudaVersion")
        if exact and floor:
            raise Refusal(problem(400, "cudaVersions and minCudaVersion cannot both be given"))
        wanted: Callable[[str], bool] | None = None
        try:
            count = int(get("count") or 1)
            if exact:
                wanted = exact.split(",").__contains__
            elif floor:
                lowest = float(floor)
                wanted = lambda version: float(version) >= lowest  # noqa: E731
        except ValueError:
            raise Refusal(problem(400, "count or minCudaVersion is not a number")) from None
        return {"availability": "AVAILABILITY" in include, "cloud": cloud, "count": count, "cuda": wanted}

    def centers(self, call: Call) -> Reply:
        include = call.request.get("include").split(",")
        rows = center_rows()
        if "GPU_AVAILABILITY" in include:
            for row in rows:
                row["gpuAvailability"] = [
                    {"id": gpu.id, "name": gpu.name, "availability": level["availability"]}
                    for gpu in self.world.runpod.gpus.values()
                    for level in self.world.runpod.centers(gpu, "SECURE")
                    if level["id"] == row["id"]
                ]
        return Reply(200, {"dataCenters": rows})

    # --- account ------------------------------------------------------------------------------------------------------

    def keys(self, call: Call) -> Reply:
        whole_account(call)
        return Reply(200, {"keys": [key["public_key"] for key in call.identity.account.ssh_keys]})

    def set_keys(self, call: Call) -> Reply:
        """PUT replaces the whole set; pods that run keep what they have."""
        whole_account(call)
        lines = body_of(call, schema.SSH_KEYS)["keys"]
        call.identity.account.ssh_keys = [{"id": number, "public_key": line} for number, line in enumerate(lines)]
        return Reply(200, {"keys": lines})

    def billing(self, call: Call) -> Reply:
        whole_account(call)
        bucket = call.request.get("bucketSize") or "day"
        if bucket not in BUCKETS:
            return problem(400, f"bucketSize must be one of {', '.join(BUCKETS)}")
        now = self.world.clock.now()
        last, given = call.request.get("lastN"), (call.request.get("startTime"), call.request.get("endTime"))
        if last and any(given):
            return problem(400, "lastN cannot be combined with startTime or endTime")
        try:
            start, end = _window(last, given, now, BUCKETS[bucket])
        except ValueError:
            return problem(400, "startTime, endTime or lastN is not valid")
        return Reply(200, bill(self.world, call.identity.account, start, end, bucket, call.request.get("podId")))

    # --- who may what -------------------------------------------------------------------------------------------------

    def _need(self, call: Call) -> Pod:
        pod = self.world.find(RUNPOD, call.match["id"], call.identity)
        if pod is None:
            raise Refusal(problem(404, "pod not found"))
        return pod


def may_see(identity: Identity, pod: Pod | None) -> bool:
    return pod is not None and identity.may_touch(pod)


def _cuda_of(versions: tuple[str, ...], wish: Mapping[str, Any]) -> str | None:
    """The host's CUDA that satisfies the wish, None when no host does. A list is exact equality, no floor."""
    allowed, floor = wish.get("allowedCudaVersions"), wish.get("minCudaVersion")
    fits = [v for v in versions if (not allowed or v in allowed) and (not floor or float(v) >= float(floor))]
    return fits[-1] if fits else None


def _command(body: Mapping[str, Any]) -> str:
    """What the container runs instead of the image's own start, as one shell text; "" for the image's own."""
    if body.get("args"):
        return str(body["args"])
    words = [*(body.get("entrypoint") or []), *(body.get("cmd") or [])]
    if not words:
        return ""
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def _window(last: str, given: tuple[str, str], now: float, width: float) -> tuple[float, float]:
    from datetime import datetime

    if last:
        return now - int(last) * width, now
    start, end = (datetime.fromisoformat(text).timestamp() if text else None for text in given)
    return (start if start is not None else now - 30 * 86400.0, end if end is not None else now)


def _quoted(line: str) -> str:
    import json

    return json.dumps(line, ensure_ascii=False)
