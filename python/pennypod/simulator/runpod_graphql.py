"""RunPod's GraphQL while it lives: the balance, GPU types, and what the SDK does with pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pennypod.simulator.dispatch import Call, Dispatcher, Outcome, Route, route
from pennypod.simulator.faults import Rule
from pennypod.simulator.graphql import Field, ParseError, ValidationError, parse, shape
from pennypod.simulator.market import CatalogueGpu, center_rows
from pennypod.simulator.meter import micros_of_rate, nanos
from pennypod.simulator.runpod_api import NO_FREE_GPU, NO_MONEY, RunpodApi
from pennypod.simulator.runpod_rows import moment, ssh_port
from pennypod.simulator.state import RUNPOD, Identity, Pod, Stage, World, runpod_disk
from pennypod.simulator.wire import Reply, Request

NO_INSTANCES = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
_NULL_PRICES = (
    *("clusterPrice", "oneWeekPrice", "oneMonthPrice", "threeMonthPrice", "sixMonthPrice", "oneYearPrice"),
    *("communitySpotPrice", "secureSpotPrice", "throughput"),
)
_CLOUDS: dict[bool | None, tuple[str, ...]] = {True: ("SECURE",), False: ("COMMUNITY",), None: ("SECURE", "COMMUNITY")}
_NO_KEY_NEEDED = frozenset(("gpuTypes", "dataCenters"))


class GraphqlError(Exception):
    """An error in the service's own words, with HTTP 200."""

    def __init__(self, message: str, code: str = "RUNPOD") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class GraphqlApi(RunpodApi):
    """One route; everything else of the frame is REST's."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.routes: tuple[Route, ...] = (
            route("POST", r"/graphql/?", "runpod.graphql", self.execute, needs_key=False),
        )
        self._dispatcher = Dispatcher(world, self)

    def handle(self, request: Request) -> Outcome:
        return self._dispatcher.handle(request)

    def key_of(self, request: Request) -> str:
        return request.bearer or request.get("api_key")

    def finish(self, reply: Reply) -> Reply:
        return reply

    def facts(self, _endpoint: str, _match: Mapping[str, str], request: Request) -> dict[str, Any]:
        try:
            body = request.json()
            names = [item.name for item in parse(str(body["query"]), body.get("variables")).selection]
        except (KeyError, TypeError, ValueError):
            return {}
        return {"field": names[0] if names else ""}

    def fault_reply(self, rule: Rule, _call: Call) -> Reply:
        texts = {"low_balance": NO_MONEY, "no_capacity": NO_INSTANCES}
        if rule.fault in texts:
            return _failed([GraphqlError(texts[rule.fault])], {})
        return super().fault_reply(rule, _call)

    def execute(self, call: Call) -> Reply:
        try:
            body = call.request.json()
            operation = parse(str(body["query"]), body.get("variables"))
        except (KeyError, TypeError, ValueError) as exc:
            return _refused(str(exc) if isinstance(exc, ParseError) else "POST body missing.", "GRAPHQL_PARSE_FAILED")
        known = bool(self.key_of(call.request)) and self.world.identify(RUNPOD, self.key_of(call.request)) is not None
        resolvers = self._queries() if operation.kind == "query" else self._mutations()
        data: dict[str, Any] = {}
        errors: list[GraphqlError] = []
        for wanted in operation.selection:
            if wanted.name not in resolvers:
                kind = operation.kind.capitalize()
                return _refused(f'Cannot query field "{wanted.name}" on type "{kind}".', "GRAPHQL_VALIDATION_FAILED")
            if not known and wanted.name not in _NO_KEY_NEEDED:
                data[wanted.alias] = None
                errors.append(GraphqlError("Unauthorized"))
                continue
            try:
                found = resolvers[wanted.name](call.identity, wanted.arguments)
                data[wanted.alias] = shape(found, wanted.selection, _type_of(wanted))
            except ValidationError as exc:
                return _refused(str(exc), "GRAPHQL_VALIDATION_FAILED")
            except GraphqlError as exc:
                data[wanted.alias] = None
                errors.append(exc)
        return _failed(errors, data) if errors else Reply(200, {"data": data})

    # --- queries ------------------------------------------------------------------------------------------------------

    def _queries(self) -> dict[str, Any]:
        return {
            "gpuTypes": self._gpu_types,
            "dataCenters": lambda _identity, _arguments: [
                {"id": row["id"], "name": row["name"], "location": row["region"]} for row in center_rows()
            ],
            "myself": self._myself,
            "pod": self._pod_query,
        }

    def _gpu_types(self, _identity: Identity, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        only = (arguments.get("input") or {}).get("id")
        return [self._gpu(gpu) for gpu in self.world.runpod.gpus.values() if only in (None, gpu.id)]

    def _gpu(self, gpu: CatalogueGpu) -> dict[str, Any]:
        market, now = self.world.runpod, self.world.clock.now()
        secure, community = market.price(gpu, "SECURE", now), market.price(gpu, "COMMUNITY", now)

        def lowest(arguments: Mapping[str, Any]) -> dict[str, Any]:
            wish = arguments.get("input") or {}
            clouds = _CLOUDS[wish.get("secureCloud")]
            count = wish.get("gpuCount") or 1
            levels = {cloud: market.level(gpu, cloud, count) for cloud in clouds}
            free = [market.price(gpu, cloud, now) for cloud, level in levels.items() if level != "NONE"]
            best = max(levels.values(), key=["NONE", "LOW", "MEDIUM", "HIGH"].index)
            return {
                "gpuName": gpu.name,
                "gpuTypeId": gpu.id,
                "minimumBidPrice": None,
                "uninterruptablePrice": min(free) if free else None,
                "stockStatus": best.capitalize() if free else None,
                "minMemory": 31,
                "minVcpu": 6,
                "maxUnreservedGpuCount": gpu.max_secure,
                "availableGpuCounts": [1, 2, 4] if free else [],
                "gpuTypeCudaVersions": [
                    {"cudaVersion": version, "availability": "AVAILABLE" if free else "UNAVAILABLE"}
                    for version in gpu.cuda
                ],
            }

        row: dict[str, Any] = dict.fromkeys(_NULL_PRICES)
        return row | {
            "id": gpu.id,
            "displayName": gpu.name,
            "manufacturer": gpu.manufacturer.capitalize() if gpu.manufacturer != "NVIDIA" else "Nvidia",
            "memoryInGb": gpu.memory,
            "cudaCores": 0,
            "secureCloud": secure > 0,
            "communityCloud": community > 0,
            "securePrice": secure or None,
            "communityPrice": community or None,
            "maxGpuCount": max(gpu.max_secure, gpu.max_community),
            "maxGpuCountSecureCloud": gpu.max_secure,
            "maxGpuCountCommunityCloud": gpu.max_community,
            "minPodGpuCount": 1,
            "nodeGroupGpuSizes": [],
            "nodeGroupDatacenters": [],
            "lowestPrice": lowest,
        }

    def _myself(self, identity: Identity, _arguments: Mapping[str, Any]) -> dict[str, Any]:
        if identity.pod is not None:
            raise GraphqlError("Unauthorized")
        account, now = identity.account, self.world.clock.now()
        return {
            "id": f"user_{account.user_id}",
            "email": account.email,
            "pubKey": "\n".join(key["public_key"] for key in account.ssh_keys),
            "clientBalance": account.balance(now) / 1e6,
            "minBalance": 0.0,
            "currentSpendPerHr": micros_of_rate(account.tab.rate) / 1e6,
            "spendLimit": 80,
            "pods": lambda _a: [self._pod(pod) for pod in self.world.listing(RUNPOD, identity)],
            "networkVolumes": [],
            "podTemplates": [],
        }

    def _pod_query(self, identity: Identity, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        pod = self.world.find(RUNPOD, str((arguments.get("input") or {}).get("podId")), identity)
        return None if pod is None else self._pod(pod)

    def _pod(self, pod: Pod) -> dict[str, Any]:
        now = self.world.clock.now()
        center = pod.details.get("center")
        return {
            "id": pod.id,
            "name": pod.name,
            "imageName": pod.image,
            "podType": "RESERVED",
            "desiredStatus": "EXITED" if pod.stage is Stage.EXITED else "RUNNING",
            "lastStatusChange": f"Rented by User: {moment(pod.created)}",
            "lastStartedAt": None if pod.up_since is None else moment(pod.up_since),
            "createdAt": moment(pod.created),
            "costPerHr": micros_of_rate(pod.details["full_rate"]) / 1e6,
            "gpuCount": pod.gpus,
            "vcpuCount": 8 * max(1, pod.gpus),
            "memoryInGb": 62 * max(1, pod.gpus),
            "containerDiskInGb": int(pod.disk_gb),
            "volumeInGb": int(pod.details.get("volume_gb") or 0),
            "volumeMountPath": pod.details.get("volume_path", "/runpod-volume"),
            "env": [f"{name}={value}" for name, value in pod.env.items()],
            "ports": ",".join(pod.ports),
            "port": None,
            "dockerArgs": pod.details.get("args", ""),
            "dockerId": None,
            "templateId": None,
            "uptimeSeconds": 0,  # always, at the service too
            "machineId": pod.details["machine_id"],
            "machine": {
                "podHostId": f"{pod.id}-64411eb2",
                "gpuDisplayName": pod.machine.name if pod.machine is not None else None,
                "gpuTypeId": pod.machine.id if pod.machine is not None else None,
                "location": str(center or "").partition("-")[0],
                "dataCenterId": center,
                "secureCloud": pod.details["cloud"] == "SECURE",
            },
            "runtime": self._runtime(pod, now),
        }

    @staticmethod
    def _runtime(pod: Pod, now: float) -> dict[str, Any] | None:
        if pod.stage is not Stage.RUNNING or pod.up_since is None or pod.address is None:
            return None
        port = ssh_port(pod, now)
        ports = [] if port is None else [
            {"ip": pod.address[0], "isIpPublic": True, "privatePort": 22, "publicPort": port, "type": "tcp"}
        ]  # fmt: skip
        return {
            "uptimeInSeconds": int(now - pod.up_since),
            "ports": ports,
            "gpus": [
                {"id": f"GPU-{number}", "gpuUtilPercent": 0, "memoryUtilPercent": 0} for number in range(pod.gpus)
            ],
            "container": {"cpuPercent": 1, "memoryPercent": 2},
        }

    # --- mutations ----------------------------------------------------------------------------------------------------

    def _mutations(self) -> dict[str, Any]:
        return {
            "podFindAndDeployOnDemand": self._deploy,
            "podStop": self._stop,
            "podResume": self._resume,
            "podTerminate": self._terminate,
            "updateUserSettings": self._settings,
        }

    def _deploy(self, identity: Identity, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """podFindAndDeployOnDemand; stopAfter and terminateAfter are taken and never acted on, as at the service."""
        wish = dict(arguments.get("input") or {})
        if identity.pod is not None:
            raise GraphqlError("Unauthorized")
        if identity.account.balance(self.world.clock.now()) <= 0:
            raise GraphqlError(NO_MONEY + ". Please add funds to your account.")
        wanted = wish.get("gpuTypeIdList") or [wish.get("gpuTypeId")]
        cloud_type = str(wish.get("cloudType") or "ALL")
        clouds = ("COMMUNITY", "SECURE") if cloud_type == "ALL" else (cloud_type,)
        count = int(wish.get("gpuCount") or 1)
        centers = [wish["dataCenterId"]] if wish.get("dataCenterId") else None
        for gpu_id in wanted:
            gpu = self.world.runpod.gpus.get(str(gpu_id))
            for cloud in clouds:
                center = None if gpu is None else self.world.runpod.take(gpu, cloud, count, centers)
                if gpu is not None and center is not None:
                    return self._pod(self._made(identity, wish, gpu, cloud, center, count))
        raise GraphqlError(NO_INSTANCES)

    def _made(
        self, identity: Identity, wish: Mapping[str, Any], gpu: CatalogueGpu, cloud: str, center: str, count: int
    ) -> Pod:
        env = {str(item["key"]): str(item["value"]) for item in wish.get("env") or []}
        account_keys = "\n".join(key["public_key"] for key in identity.account.ssh_keys)
        if wish.get("startSsh") and account_keys:
            env.setdefault("PUBLIC_KEY", account_keys)
        price = self.world.runpod.price(gpu, cloud, self.world.clock.now()) * count
        pod = self.world.rent_runpod(
            identity.account,
            gpu,
            name=str(wish.get("name") or "my pod"),
            image=str(wish.get("imageName") or ""),
            disk_gb=float(wish.get("containerDiskInGb") or 50),
            env=env,
            ports=[part for part in str(wish.get("ports") or "").split(",") if part],
            keys=[{"public_key": line} for line in env.get("PUBLIC_KEY", "").splitlines() if line.strip()],
            command=str(wish.get("dockerArgs") or ""),
            gpus=count,
            details={
                "cloud": cloud,
                "center": center,
                "cuda": gpu.cuda[-1],
                "rate": round(price, 9),
                "args": str(wish.get("dockerArgs") or ""),
                "volume_gb": float(wish.get("volumeInGb") or 0),
                "volume_path": wish.get("volumeMountPath") or "/runpod-volume",
                "start_ssh": bool(wish.get("startSsh")),
            },
        )
        pod.details["full_rate"] = nanos(str(pod.details["rate"])) + runpod_disk(pod, True)
        return pod

    def _mine(self, identity: Identity, arguments: Mapping[str, Any]) -> Pod:
        pod = self.world.find(RUNPOD, str((arguments.get("input") or {}).get("podId")), identity)
        if pod is None:
            raise GraphqlError("pod not found")
        return pod

    def _stop(self, identity: Identity, arguments: Mapping[str, Any]) -> dict[str, Any]:
        pod = self._mine(identity, arguments)
        self.world.stop(pod)
        return self._pod(pod)

    def _resume(self, identity: Identity, arguments: Mapping[str, Any]) -> dict[str, Any]:
        pod = self._mine(identity, arguments)
        if not self.world.start(pod):
            self.world.stop(pod)
            raise GraphqlError(NO_FREE_GPU)
        return self._pod(pod)

    def _terminate(self, identity: Identity, arguments: Mapping[str, Any]) -> None:
        self.world.destroy(self._mine(identity, arguments))

    def _settings(self, identity: Identity, arguments: Mapping[str, Any]) -> dict[str, Any]:
        lines = str((arguments.get("input") or {}).get("pubKey") or "").splitlines()
        identity.account.ssh_keys = [{"id": number, "public_key": line} for number, line in enumerate(lines) if line]
        return self._myself(identity, {})


def _type_of(wanted: Field) -> str:
    return {"gpuTypes": "GpuType", "myself": "User", "dataCenters": "DataCenter"}.get(wanted.name, "Pod")


def _refused(message: str, code: str) -> Reply:
    return Reply(400, {"errors": [{"message": message, "extensions": {"code": code}}]})


def _failed(errors: list[GraphqlError], data: Mapping[str, Any]) -> Reply:
    names = list(data) or [""]
    rows = [
        {"message": error.message, "path": [names[min(index, len(names) - 1)]], "extensions": {"code": error.code}}
        for index, error in enumerate(errors)
    ]
    return Reply(200, {"errors": rows, "data": dict(data)})
