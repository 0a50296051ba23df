"""How RunPod's REST v2 shows pods, the catalogue and the bill. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pennypod.simulator.market import CatalogueGpu, RunpodMarket
from pennypod.simulator.meter import micros_of_rate
from pennypod.simulator.state import RUNPOD, Account, Pod, Stage, World

CLOSED_PORT = 1
_ACTIONS = {
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "TERMINATED": [],
}
BUCKETS = {"hour": 3600.0, "day": 86400.0, "week": 7 * 86400.0, "month": 30 * 86400.0, "year": 365 * 86400.0}


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status(pod: Pod) -> str:
    """RUNNING is said as soon as a machine has the pod, while the image still pulls."""
    if pod.stage is Stage.EXITED:
        return "EXITED" if pod.wanted == "stopped" or not pod.failure else "ERROR"
    words = {Stage.PROVISIONING: "PROVISIONING", Stage.OFFLINE: "ERROR", Stage.GONE: "TERMINATED"}
    return words.get(pod.stage, "RUNNING")


def ssh_port(pod: Pod, now: float) -> int | None:
    """The public port of 22/tcp, None when it has none: not asked for, or not up yet."""
    if pod.stage is not Stage.RUNNING or pod.address is None or "22/tcp" not in pod.ports:
        return None
    wrong_s = pod.fault_seconds("wrong_port", 20.0)
    if wrong_s is not None and pod.up_since is not None and now < pod.up_since + wrong_s:
        return CLOSED_PORT
    return pod.address[1]


def pod_row(pod: Pod, now: float, *, with_env: bool = True) -> dict[str, Any]:
    said, details = status(pod), pod.details
    row: dict[str, Any] = {
        "id": pod.id,
        "name": pod.name,
        "status": said,
        "actions": _ACTIONS[said],
        "image": pod.image,
        "args": details.get("args", ""),
        "disk": int(pod.disk_gb),
        "mounts": details.get("mounts", {}),
        "ports": list(pod.ports),
        "env": dict(pod.env) if with_env else None,
        "registry": details.get("registry"),
        "cloud": details["cloud"],
        "dataCenterId": None if pod.stage is Stage.PROVISIONING else details.get("center"),
        "cudaVersion": details.get("cuda"),
        "ssh": _ssh(pod, now),
        "template": None,
        "cost": micros_of_rate(details["full_rate"]) / 1e6,
        "locked": bool(details.get("locked")),
        "runtime": _runtime(pod, now),
        "createdAt": moment(pod.created),
        "startedAt": None if pod.up_since is None else moment(pod.up_since),
        "globalNetworking": {"enabled": bool(details.get("global_networking"))},
    }
    for name in ("cmd", "entrypoint"):
        if name in details:
            row[name] = details[name]
    if pod.machine is not None:
        row["gpu"] = {"id": pod.machine.id, "count": pod.gpus, "vcpuCount": 8 * pod.gpus, "memory": 62 * pod.gpus}
    else:
        row["cpu"] = details["cpu"] | {"memory": 2 * details["cpu"]["vcpuCount"]}
    return row


def _ssh(pod: Pod, now: float) -> dict[str, Any]:
    proxy = None
    if pod.stage is not Stage.PROVISIONING:
        user = f"{pod.id}-{pod.details['machine_id'][:8].encode().hex()[:8]}"
        proxy = {"host": "ssh.runpod.io", "port": 22, "username": user, "command": f"ssh {user}@ssh.runpod.io"}
    port = ssh_port(pod, now)
    direct = None
    if port is not None and pod.address is not None:
        host = pod.address[0]
        direct = {"host": host, "port": port, "username": "root", "command": f"ssh root@{host} -p {port}"}
    return {"proxy": proxy, "direct": direct}


def _runtime(pod: Pod, now: float) -> dict[str, Any] | None:
    if pod.stage is not Stage.RUNNING or pod.up_since is None or pod.address is None:
        return None
    # As recorded from the service: an internal entry that nobody asked for stands beside the mapped port.
    mapped: list[dict[str, Any]] = [{"private": 19123, "public": None, "type": "http", "ip": "100.65.12.34"}]
    port = ssh_port(pod, now)
    if port is not None:
        mapped.append({"private": 22, "public": port, "type": "tcp", "ip": pod.address[0]})
    return {
        "uptime": int(now - pod.up_since),
        "gpus": [{"util": 0, "memoryUtil": 0} for _ in range(pod.gpus if pod.machine else 0)],
        "cpu": {"util": 1},
        "memory": {"util": 2},
        "ports": mapped,
    }


def gpu_row(market: RunpodMarket, gpu: CatalogueGpu, now: float, query: Mapping[str, Any]) -> dict[str, Any]:
    """A GPU type; with `availability` in the query also its stock."""
    row: dict[str, Any] = {
        "id": gpu.id,
        "name": gpu.name,
        "pool": gpu.pool,
        "manufacturer": gpu.manufacturer,
        "memory": gpu.memory,
        "secure": gpu.offered("SECURE"),
        "community": gpu.offered("COMMUNITY"),
        "price": {cloud.lower(): market.price(gpu, cloud, now) for cloud in ("SECURE", "COMMUNITY")},
        "maxCount": {"secure": gpu.max_secure, "community": gpu.max_community},
    }
    if query.get("availability"):
        cloud, count = query["cloud"], query["count"]
        wanted = query.get("cuda")
        fits = wanted is None or any(wanted(version) for version in gpu.cuda)
        row["availability"] = market.level(gpu, cloud, count) if fits else "NONE"
        centers = market.centers(gpu, cloud) if fits else []
        if centers:
            row["dataCenters"] = centers
        row["cudaVersions"] = [{"version": version, "available": row["availability"] != "NONE"} for version in gpu.cuda]
    return row


def bill(world: World, account: Account, start: float, end: float, bucket: str, pod_id: str) -> dict[str, Any]:
    """Records per pod and bucket of time, and their totals."""
    width, now = BUCKETS[bucket], world.clock.now()
    records, pods = [], set()
    totals = {"totalAmount": 0, "gpuAmount": 0, "cpuAmount": 0, "diskAmount": 0}
    for pod in world.all_pods():
        if pod.provider != RUNPOD or pod.account is not account or (pod_id and pod.id != pod_id):
            continue
        first = max(start, pod.created)
        slot = first - first % width
        last = min(end, pod.gone_at if pod.gone_at is not None else now)
        while slot < last:
            since, until = max(slot, start), min(slot + width, last)
            work, disk = (pod.meter.micros(until, kind, since) for kind in ("gpu", "disk"))
            amounts = {
                "totalAmount": work + disk,
                "gpuAmount": work if pod.machine is not None else 0,
                "cpuAmount": 0 if pod.machine is not None else work,
                "diskAmount": disk,
            }
            if amounts["totalAmount"]:
                pods.add(pod.id)
                for name, amount in amounts.items():
                    totals[name] += amount
                records.append(
                    {"startTime": moment(slot), "endTime": moment(slot + width), "podId": pod.id}
                    | {name: amount / 1e6 for name, amount in amounts.items()}
                )
            slot += width
    query = {"startTime": moment(start), "endTime": moment(end), "bucketSize": bucket, "podId": pod_id or None}
    return {
        "records": records,
        "metadata": {
            "query": query,
            "recordCount": len(records),
            "uniquePodCount": len(pods),
            "totals": {name: amount / 1e6 for name, amount in totals.items()},
        },
    }
