"""Answers in the shape that Vast.ai's API was recorded to give, and what its specification allows to send."""

from __future__ import annotations

from typing import Any

# PUT /api/v0/asks/{id}/: field and JSON type. `env` is specified as text; guides and official client send a dict.
CREATE_FIELDS: dict[str, type | tuple[type, ...]] = {
    "client_id": str,
    "image": str,
    "template_hash_id": str,
    "label": str,
    "disk": (int, float),
    "runtype": str,
    "target_state": str,
    "price": (int, float),
    "env": dict,
    "cancel_unavail": bool,
    "vm": bool,
    "onstart": str,
    "args": list,
    "args_str": str,
    "use_jupyter_lab": bool,
    "jupyter_dir": str,
    "python_utf8": bool,
    "lang_utf8": bool,
    "force": bool,
    "user": str,
    "image_login": str,
    "volume_info": dict,
}
SEARCH_OPERATORS = {"eq", "neq", "gt", "gte", "lt", "lte", "in", "notin"}
SEARCH_PLAIN = {"order", "type", "limit", "allocated_storage"}


def offer_row(number: int = 4242, **changes: Any) -> dict[str, Any]:
    return {
        "id": number,
        "ask_contract_id": number,
        "machine_id": 12,
        "host_id": 7,
        "gpu_name": "RTX 4090",
        "num_gpus": 1,
        "gpu_ram": 24564,
        "cuda_max_good": 12.8,
        "driver_version": "570.86.15",
        "disk_space": 214.7,
        "dph_base": 0.3,
        "dph_total": 0.3041667,
        "storage_cost": 0.15,
        "inet_up": 512.4,
        "inet_down": 873.1,
        "inet_up_cost": 0.02,
        "inet_down_cost": 0.01,
        "reliability2": 0.9941,
        "verification": "verified",
        "rentable": True,
        "rented": False,
        "external": False,
        "geolocation": "Texas, US",
        "direct_port_count": 100,
        "end_date": 1_900_000_000.0,
        "is_bid": False,
        **changes,
    }


def instance_row(number: int = 5678, label: str | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "id": number,
        "label": label,
        "actual_status": "running",
        "intended_status": "running",
        "cur_state": "running",
        "next_state": "running",
        "status_msg": "success, running pytorch/pytorch_2.8.0/ssh\n",
        "machine_id": 12,
        "host_id": 7,
        "gpu_name": "RTX 4090",
        "num_gpus": 1,
        "start_date": 1764600000.25,
        "image_uuid": "pytorch/pytorch:2.8.0",
        "public_ipaddr": "192.0.2.45 \n",
        "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "20000"}, {"HostIp": "::", "HostPort": "20000"}]},
        "ssh_host": "ssh5.vast.ai",
        "ssh_port": 10600,
        "dph_total": 0.3041667,
        "geolocation": "Texas, US",
        "extra_env": [["A", "b"]],
        "local_ipaddrs": "10.0.0.5 172.17.0.2 \n",
        "disk_usage": -1,
        "gpu_util": None,
        **changes,
    }


def starting(message: str | None = None, **changes: Any) -> dict[str, Any]:
    """What changes while an instance is on its way up."""
    return {
        "actual_status": "loading",
        "status_msg": message,
        "ports": None,
        "public_ipaddr": "192.0.2.45",
        **changes,
    }
