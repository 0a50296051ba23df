"""What RunPod's v2 takes in the body of a create, an update and an action: closed schemas, in its validator's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], list[str]]
_CUDA = re.compile(r"\d+\.\d+")


def text(minimum: int = 0) -> Check:
    def check(value: Any, path: str) -> list[str]:
        if not isinstance(value, str):
            return [f"{path}: value must be string"]
        return [] if len(value) >= minimum else [f"{path}: length must be >= {minimum}, but got {len(value)}"]

    return check


def integer(minimum: int) -> Check:
    def check(value: Any, path: str) -> list[str]:
        if isinstance(value, bool) or not isinstance(value, int):
            return [f"{path}: value must be integer"]
        return [] if value >= minimum else [f"{path}: value must be >= {minimum}, but got {value}"]

    return check


def flag(value: Any, path: str) -> list[str]:
    return [] if isinstance(value, bool) else [f"{path}: value must be boolean"]


def choice(*words: str) -> Check:
    def check(value: Any, path: str) -> list[str]:
        return [] if value in words else [f"{path}: value must be one of {', '.join(repr(word) for word in words)}"]

    return check


def texts(pattern: re.Pattern[str] | None = None) -> Check:
    def check(value: Any, path: str) -> list[str]:
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            return [f"{path}: value must be array of strings"]
        wrong = [item for item in value if pattern is not None and not pattern.fullmatch(item)]
        return [f"{path}: {item!r} does not match pattern {pattern.pattern!r}" for item in wrong if pattern]

    return check


def cuda(value: Any, path: str) -> list[str]:
    return (
        [] if isinstance(value, str) and _CUDA.fullmatch(value) else [f"{path}: does not match pattern '^\\d+\\.\\d+$'"]
    )


def strings_by_name(value: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path}: value must be object"]
    return [f"{path}.{name}: value must be string" for name, item in value.items() if not isinstance(item, str)]


def nullable(inner: Check) -> Check:
    return lambda value, path: [] if value is None else inner(value, path)


def closed(fields: Mapping[str, Check], required: tuple[str, ...] = ()) -> Check:
    def check(value: Any, path: str) -> list[str]:
        if not isinstance(value, dict):
            return [f"{path}: value must be object"]
        errors = [f"{path}: missing property '{name}'" for name in required if name not in value]
        errors += [f"{path}: additional properties '{name}' not allowed" for name in value if name not in fields]
        for name, item in value.items():
            if name in fields:
                errors += fields[name](item, f"{path}.{name}")
        return errors

    return check


def array(inner: Check, most: int) -> Check:
    def check(value: Any, path: str) -> list[str]:
        if not isinstance(value, list):
            return [f"{path}: value must be array"]
        if len(value) > most:
            return [f"{path}: at most {most} items"]
        return [error for index, item in enumerate(value) for error in inner(item, f"{path}[{index}]")]

    return check


_PERSISTENT = closed({"size": integer(10), "path": text()}, ("size", "path"))
_MOUNTS = closed(
    {
        "persistent": _PERSISTENT,
        "network": array(closed({"volumeId": text(), "path": text()}, ("volumeId", "path")), 1),
    }
)
_GPU = closed(
    {
        "id": text(),
        "count": integer(1),
        "allowedCudaVersions": texts(_CUDA),
        "minCudaVersion": cuda,
        "minRamPerGpu": integer(1),
        "minVcpuCountPerGpu": integer(1),
    },
    ("id",),
)
_CPU = closed({"id": text(1), "vcpuCount": integer(2)}, ("id", "vcpuCount"))
_CONTAINER: dict[str, Check] = {
    "image": text(),
    "args": text(),
    "cmd": texts(),
    "entrypoint": texts(),
    "disk": integer(1),
    "env": strings_by_name,
    "ports": texts(),
    "registry": nullable(text()),
    "mounts": _MOUNTS,
    "name": text(1),
    "globalNetworking": flag,
    "templateId": text(1),
}
CREATE = closed(
    _CONTAINER
    | {
        "cloud": choice("SECURE", "COMMUNITY"),
        "cpu": _CPU,
        "gpu": _GPU,
        "dataCenterIds": texts(),
        "startJupyter": flag,
        "startSsh": flag,
    },
    ("name",),
)
UPDATE = closed(_CONTAINER | {"locked": flag})
_TEMPLATE: dict[str, Check] = {
    **{name: check for name, check in _CONTAINER.items() if name not in ("templateId", "globalNetworking")},
    "mounts": closed({"persistent": _PERSISTENT}),
    "allowedCudaVersions": texts(_CUDA),
    "category": choice("CPU", "NVIDIA", "AMD"),
    "public": flag,
    "serverless": flag,
    "startJupyter": flag,
    "startSsh": flag,
}
CREATE_TEMPLATE = closed(_TEMPLATE, ("name", "image"))
UPDATE_TEMPLATE = closed(_TEMPLATE)
ACTION = closed({"action": choice("start", "stop", "restart", "terminate")}, ("action",))
REGISTRY = closed({name: text(1) for name in ("name", "username", "password")}, ("name", "username", "password"))
SSH_KEYS = closed({"keys": texts(re.compile(r"(ssh|ecdsa|sk)-\S+ \S+( .*)?"))}, ("keys",))
