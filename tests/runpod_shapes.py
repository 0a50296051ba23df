"""Answers in the shape that RunPod's REST v2 specifies and was recorded to give, and what it allows to send."""

from __future__ import annotations

from typing import Any

# POST /v2/pods: the request is closed, any other field is answered 422.
CREATE_FIELDS: dict[str, type] = {
    "name": str,
    "image": str,
    "gpu": dict,
    "cpu": dict,
    "cloud": str,
    "dataCenterIds": list,
    "disk": int,
    "mounts": dict,
    "ports": list,
    "env": dict,
    "args": str,
    "registry": str,
    "startSsh": bool,
    "startJupyter": bool,
    "globalNetworking": bool,
    "templateId": str,
}
GPU_FIELDS: dict[str, type] = {"id": str, "count": int, "allowedCudaVersions": list, "minCudaVersion": str}
NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)


def problem(status: int, detail: str, *errors: str) -> dict[str, Any]:
    return {"title": "Trouble", "status": status, "detail": detail, **({"errors": list(errors)} if errors else {})}


def gpu_type(gpu_id: str = "NVIDIA GeForce RTX 4090", **changes: Any) -> dict[str, Any]:
    return {
        "id": gpu_id,
        "name": gpu_id.removeprefix("NVIDIA GeForce "),
        "pool": "ADA_24",
        "manufacturer": "NVIDIA",
        "memory": 24,
        "secure": True,
        "community": True,
        "price": {"secure": 0.69, "community": 0.34},
        "maxCount": {"secure": 8, "community": 4},
        "availability": "HIGH",
        "dataCenters": [
            {"id": "EU-RO-1", "name": "EU-RO-1", "availability": "HIGH"},
            {"id": "US-TX-3", "name": "US-TX-3", "availability": "LOW"},
            {"id": "EU-SE-1", "name": "EU-SE-1", "availability": "NONE"},
        ],
        "cudaVersions": [{"version": "12.8", "available": True}],
        **changes,
    }


def pod_row(pod_id: str = "k3f9q2abcd1234", name: str = "somebody", **changes: Any) -> dict[str, Any]:
    return {
        "id": pod_id,
        "name": name,
        "status": "RUNNING",
        "actions": ["stop", "restart", "terminate"],
        "image": "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
        "args": "",
        "disk": 20,
        "mounts": {},
        "ports": ["22/tcp"],
        "env": None,
        "registry": None,
        "cloud": "SECURE",
        "dataCenterId": "EU-RO-1",
        "cudaVersion": "12.8",
        "ssh": {
            "proxy": {"host": "ssh.runpod.io", "port": 22, "username": "k3f9q2abcd1234-64411f", "command": "ssh ..."},
            "direct": {"host": "203.0.113.7", "port": 10341, "username": "root", "command": "ssh ..."},
        },
        "template": None,
        "cost": 0.692778,
        "locked": False,
        "runtime": {
            "uptime": 12,
            "gpus": [{"util": 0, "memoryUtil": 0}],
            "ports": [
                {"private": 19123, "public": None, "type": "http", "ip": "100.65.1.2"},
                {"private": 22, "public": 10341, "type": "tcp", "ip": "203.0.113.7"},
            ],
        },
        "createdAt": "2026-08-20T06:16:19.436Z",
        "startedAt": "2026-08-20T06:16:49Z",
        "globalNetworking": {"enabled": False},
        "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1, "vcpuCount": 16, "memory": 62},
        **changes,
    }


def fresh(**changes: Any) -> dict[str, Any]:
    """What changes while nobody can log in yet, whatever the status says."""
    ssh = {"proxy": pod_row()["ssh"]["proxy"], "direct": None}
    return {"ssh": ssh, "runtime": None, "startedAt": None, **changes}
