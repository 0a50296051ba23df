"""How Vast shows an instance, its charges and its logs. Pure."""

from __future__ import annotations

from typing import Any

from pennypod.simulator.meter import disk_rate, micros_of_rate
from pennypod.simulator.pulling import path_of
from pennypod.simulator.state import Account, Pod, Stage, World
from pennypod.simulator.vast_search import machine_fields, prices, storage_per_hour

CLOSED_PORT = 1
_LAYERS = ("6414378b6477", "a8b1c5f80c2d", "9dbb4d1c4a55", "1b7e2a0f6f0e", "c3d1f5a9be07", "04cf2bb5f3a1")
_STUCK_AT = 0.31
_RUNTYPES = {
    "ssh": "ssh ssh_proxy",
    "ssh_proxy": "ssh ssh_proxy",
    "ssh_direct": "ssh ssh_direc ssh_proxy",
    "ssh_direc ssh_proxy": "ssh ssh_direc ssh_proxy",
    "jupyter": "jupyter ssh ssh_proxy",
    "jupyter_proxy": "jupyter ssh ssh_proxy",
    "jupyter_direct": "jupyter ssh ssh_direc ssh_proxy",
}


def runtype_of(asked: str) -> str:
    return _RUNTYPES.get(asked, asked)


def has_ssh(runtype: str) -> bool:
    return runtype != "args"


def is_direct(runtype: str) -> bool:
    return "direc" in runtype


def actual_status(pod: Pod) -> str | None:
    if pod.stage is Stage.PROVISIONING:
        return None
    words = {Stage.LOADING: "loading", Stage.RUNNING: "running", Stage.EXITED: "exited", Stage.OFFLINE: "offline"}
    return words.get(pod.stage, "exited")


def status_msg(pod: Pod, now: float) -> str | None:
    if pod.message:
        return pod.message
    if pod.stage is Stage.RUNNING:
        return f"success, running {pod.image.replace(':', '_')}/ssh"
    if pod.stage is not Stage.LOADING:
        return None
    share = min(0.99, (now - pod.stage_since) / max(pod.boot_s, 0.001))
    if "stuck_loading" in pod.faults:
        share = min(share, _STUCK_AT)
    layer = _LAYERS[int(share * len(_LAYERS))]
    if share < 0.1:
        return f"{layer}: Pulling from {path_of(pod.image)}"
    if pod.details.get("cached"):
        return f"Status: Image is up to date for {pod.image}"
    return f"{layer}: {'Downloading' if share < 0.7 else 'Extracting'} {share:.0%}"


def ports(pod: Pod, now: float) -> dict[str, list[dict[str, str]]] | None:
    """Docker's shape, HostPort a string; nothing before it runs, and nothing for a proxy-only instance."""
    if pod.stage is not Stage.RUNNING or pod.address is None:
        return None
    shown = {}
    if is_direct(pod.details["runtype"]):
        port = CLOSED_PORT if _address_is_wrong(pod, now) or "direct_blocked" in pod.faults else pod.address[1]
        shown["22/tcp"] = [{"HostIp": "0.0.0.0", "HostPort": str(port)}, {"HostIp": "::", "HostPort": str(port)}]  # noqa: S104
    for number, name in enumerate(pod.ports):
        inside = name.split(":")[-1]
        inside = inside if "/" in inside else f"{inside}/tcp"
        shown.setdefault(inside, [{"HostIp": "0.0.0.0", "HostPort": str(40000 + number)}])  # noqa: S104
    return shown


def _address_is_wrong(pod: Pod, now: float) -> bool:
    wrong_s = pod.fault_seconds("wrong_port", 20.0)
    return wrong_s is not None and pod.up_since is not None and now < pod.up_since + wrong_s


def instance_row(pod: Pod, now: float) -> dict[str, Any]:
    """One instance as both the listing and the single look show it."""
    machine, running = pod.machine, pod.stage is Stage.RUNNING
    base = float(pod.details["dph_base"])
    storage = storage_per_hour(machine, pod.disk_gb)
    runtype, template = pod.details["runtype"], pod.details.get("template")
    host = pod.address[0] if pod.address else machine.ipaddr
    proxy = _proxy(pod, now)
    flops = round(machine.dlperf * pod.gpus * 0.55, 6)
    held = "running" if pod.holds_gpus else "stopped"
    row = machine_fields(machine, pod.gpus, now)
    for name in ("gpu_ids", "gpu_total_ram", "logo", "vericode", "gpu_max_power", "gpu_max_temp"):
        row.pop(name, None)
    return row | {
        "id": int(pod.id),
        "bundle_id": pod.details["ask"],
        "actual_status": actual_status(pod),
        "cur_state": held,
        "next_state": pod.wanted,
        "intended_status": pod.wanted,
        "status_msg": status_msg(pod, now),
        "label": pod.name or None,
        "template_id": template.number if template else None,
        "template_hash_id": template.hash_id if template else None,
        "template_name": template.fields["name"] if template else None,
        "image_uuid": pod.image,
        "image_args": pod.details.get("args") or [],
        "image_runtype": runtype_of(runtype),
        "extra_env": [[name, value] for name, value in pod.env.items()] + [[f"-p {port}", "1"] for port in pod.ports],
        "onstart": pod.command or None,
        "jupyter_token": pod.api_key[:32],
        "public_ipaddr": host,
        "local_ipaddrs": "10.0.0.5 172.17.0.2 \n",
        "ssh_host": proxy[0],
        "ssh_idx": "4",
        "ssh_port": proxy[1],
        "machine_dir_ssh_port": 21000 + int(pod.id) % 1000,
        "direct_port_start": 40000 if running else -1,
        "direct_port_end": 40063 if running else -1,
        "ports": ports(pod, now),
        "start_date": pod.created,
        "end_date": pod.created + machine.duration_s,
        "duration": max(0.0, pod.created + machine.duration_s - now),
        "uptime_mins": (now - pod.up_since) / 60 if pod.up_since is not None else None,
        "cpu_util": 4.2 if running else 0.0,
        "gpu_util": 0.0 if running else None,
        "gpu_temp": 41.0 if running else None,
        "mem_limit": 64.0 if running else None,
        "mem_usage": 1.1 if running else None,
        "vmem_usage": 0.5 if running else None,
        "disk_space": float(pod.disk_gb),
        "disk_usage": 1.7 if running else -1.0,
        "disk_util": 1.7 if running else -1.0,
        "is_bid": bool(pod.details.get("is_bid")),
        "min_bid": round(base * 0.6, 6),
        "dph_base": base,
        "dph_total": round(base + storage, 9),
        "storage_total_cost": round(storage, 9),
        "search": prices(base, storage),
        "instance": prices(base if running else 0.0, storage),
        "score": None,
        "dlperf": None,
        "dlperf_per_dphtotal": None,
        "flops_per_dphtotal": round(flops / (base + storage), 6),
        "total_flops": flops,
        "rentable": True,
        "vram_costperhour": round(base / max(machine.gpu_ram, 1), 9),
        "credit_balance": None,
        "credit_discount": None,
        "credit_discount_max": None,
        "client_run_time": 1.0,
        "host_run_time": 2592000.0,
        "time_remaining": "",
        "time_remaining_isbid": "",
        "volume_info": [],
    }


def _proxy(pod: Pod, now: float) -> tuple[str, int]:
    """Container pods are reached at their own port whichever way; a ghost shows what a gateway would look like."""
    if pod.address is not None and pod.address[0].startswith("127."):
        return pod.address[0], CLOSED_PORT if _address_is_wrong(pod, now) else pod.address[1]
    return f"ssh{int(pod.id) % 9 + 1}.vast.ai", 10000 + int(pod.id) % 50000


def spend_rate(world: World, account: Account) -> dict[str, Any]:
    mine = [pod for pod in world.pods["vast"].values() if pod.account is account]
    gpu = sum(item.rate for pod in mine for item in pod.meter.segments if item.end is None and item.kind == "gpu")
    disk = sum(
        disk_rate(pod.machine.storage_cost, pod.disk_gb)
        for pod in mine
        for item in pod.meter.segments
        if item.end is None and item.kind == "disk"
    )
    return {
        "success": True,
        "gpu_cost_per_hour": micros_of_rate(gpu) / 1e6,
        "container_storage_cost_per_hour": micros_of_rate(disk) / 1e6,
        "volume_storage_cost_per_hour": 0,
        "has_active_resources": bool(mine),
    }


def charge_rows(world: World, account: Account, start: float, end: float, now: float) -> list[dict[str, Any]]:
    """One row per instance that cost something in the time asked for; amounts have three decimals, as the service's."""
    names = {"gpu": "GPU", "disk": "Storage", "bwd": "Download", "bwu": "Upload"}
    rows = []
    for pod in world.all_pods():
        last = pod.gone_at if pod.gone_at is not None else now
        if pod.account is not account or pod.created > end or last < start:
            continue
        until = min(last, end)
        items: list[dict[str, Any]] = [
            {
                "start": int(max(pod.created, start)),
                "end": int(until),
                "type": kind,
                "description": f"Instance {pod.id} {names.get(kind, kind)} charge",
                "amount": round(pod.meter.micros(until, kind, start) / 1e6, 3),
                "source": None,
                "metadata": {},
                "items": [],
            }
            for kind in pod.meter.kinds()
        ]
        rows.append(
            {
                "start": int(max(pod.created, start)),
                "end": int(until),
                "type": "instance",
                "source": f"instance-{pod.id}",
                "description": f"Instance {pod.id} charges",
                "amount": round(pod.meter.micros(until, None, start) / 1e6, 3),
                "metadata": {"label": pod.name},
                "items": items,
            }
        )
    return rows
