"""Vast's search: filters, order, limit, and what an offer looks like. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pennypod.simulator.market import SERVER_DISK_GB, Machine, VastMarket, VastOffer, driver_of
from pennypod.simulator.meter import HOURS_PER_MONTH

DEFAULT_LIMIT = 64
_NO_FILTERS = frozenset(("order", "type", "limit", "allocated_storage", "rented", "target_reliability", "select_cols"))
_TYPES = {"on-demand": False, "ondemand": False, "reserved": False, "bid": True, "interruptible": True}


class BadQueryError(ValueError):
    """The server's own words about a query it does not take."""


def search(market: VastMarket, query: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """The offers that a query finds, in its order. Raises BadQueryError."""
    kind = query.get("type", "on-demand")
    if kind not in _TYPES:
        raise BadQueryError(f"q.type: Input should be 'on-demand', 'bid' or 'reserved', not {kind!r}")
    filters = {name: value for name, value in query.items() if name not in _NO_FILTERS}
    wrong = [name for name, value in filters.items() if not isinstance(value, Mapping)]
    if wrong:
        raise BadQueryError("; ".join(f"q.{name}: Input should be a valid dictionary" for name in wrong))
    disk = _number(query.get("allocated_storage", SERVER_DISK_GB), "allocated_storage")
    rows = [offer_row(offer, disk, is_bid=_TYPES[kind]) for offer in market.offers(now)]
    rows = [row for row in rows if all(matches(row, name, wish) for name, wish in filters.items())]
    _sort(rows, query.get("order") or [["score", "desc"]])
    limit = int(_number(query.get("limit", DEFAULT_LIMIT), "limit"))
    return rows[: max(0, limit)]


def matches(row: Mapping[str, Any], name: str, wish: Mapping[str, Any]) -> bool:
    """Whether a row passes one filter; a field that no row has filters nothing (a guess: see docs/simulator.md)."""
    if name == "driver_version":
        name = "driver_vers"  # clients send 535.86.05 as 535086005
    if name not in row:
        return True
    return all(_holds(row[name], operator, value, name) for operator, value in wish.items())


def _holds(have: Any, operator: str, value: Any, name: str) -> bool:
    if operator in ("in", "notin"):
        values = value if isinstance(value, list) else [value]
        found = any(_same(have, item) for item in values)
        return found if operator == "in" else not found
    if operator in ("eq", "neq"):
        return _same(have, value) == (operator == "eq")
    if operator not in ("gt", "gte", "lt", "lte"):
        raise BadQueryError(f"q.{name}.{operator}: Extra inputs are not permitted")
    if have is None:
        return False
    left, right = _number(have, name), _number(value, name)
    return {"gt": left > right, "gte": left >= right, "lt": left < right, "lte": left <= right}[operator]


def _same(have: Any, value: Any) -> bool:
    """Equality as a server that coerces has it: "1" is 1, "true" is true; a country code is the end of a place."""
    if have is None or value is None:
        return have is None and value is None
    if isinstance(have, bool):
        return have == (value if isinstance(value, bool) else str(value).lower() in ("true", "1"))
    if isinstance(have, (int, float)):
        try:
            return abs(float(have) - float(value)) < 1e-9
        except (TypeError, ValueError):
            return False
    return bool(have == value) or str(have).endswith(f", {value}")


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadQueryError(f"q.{name}: Input should be a valid number, unable to parse {value!r}") from None


def _sort(rows: list[dict[str, Any]], order: Any) -> None:
    """Later keys first: each sort keeps the order of the one before."""
    try:
        pairs = [(str(name), str(direction)) for name, direction in order]
    except (TypeError, ValueError):
        raise BadQueryError("q.order: Input should be a list of [field, direction]") from None
    for name, direction in reversed(pairs):
        rows.sort(key=lambda row: _sortable(row.get(name)), reverse=direction.lower() == "desc")


def _sortable(value: Any) -> tuple[int, float, str]:
    if value is None:
        return (0, 0.0, "")
    return (1, float(value), "") if isinstance(value, (int, float)) else (2, 0.0, str(value))


def storage_per_hour(machine: Machine, disk_gb: float) -> float:
    return machine.storage_cost * disk_gb / HOURS_PER_MONTH


def prices(base: float, storage: float) -> dict[str, float]:
    total = round(base + storage, 6)
    return {
        "gpuCostPerHour": base,
        "diskHour": round(storage, 6),
        "totalHour": total,
        "discountTotalHour": 0,
        "discountedTotalPerHour": total,
    }


def offer_row(offer: VastOffer, disk_gb: float, *, is_bid: bool = False) -> dict[str, Any]:
    """An offer as the search shows it, priced with the disk that was named."""
    machine = offer.machine
    min_bid = round(offer.dph_base * 0.6, 6)
    base = min_bid if is_bid else offer.dph_base
    storage = storage_per_hour(machine, disk_gb)
    total = round(base + storage, 9)
    dlperf = round(machine.dlperf * offer.gpus, 3)
    return machine_fields(machine, offer.gpus, offer.now) | {
        "id": offer.id,
        "ask_contract_id": offer.id,
        "bundle_id": offer.id + 7,
        "bundled_results": None,
        "dph_base": base,
        "dph_total": total,
        "discounted_dph_total": total,
        "discount_rate": None,
        "storage_total_cost": round(storage, 9),
        "min_bid": min_bid,
        "is_bid": is_bid,
        "search": prices(base, storage),
        "instance": prices(base, storage),
        "score": round(dlperf / total * machine.reliability, 6),
        "dlperf": dlperf,
        "dlperf_per_dphtotal": round(dlperf / total, 6),
        "flops_per_dphtotal": round(dlperf * 0.55 / total, 6),
        "total_flops": round(dlperf * 0.55, 6),
        "verified": machine.verified,
        "datacenter": machine.datacenter,
        "rentable": True,
        "rented": False,
        "expected_reliability": machine.reliability,
        "avail_vol_ask_id": None,
        "avail_vol_size": None,
        "avail_vol_dph": None,
        "resource_type": "gpu",
        "vms_enabled": False,
    }


def machine_fields(machine: Machine, gpus: int, now: float) -> dict[str, Any]:
    """What offers and instances both say about the host."""
    share = gpus / machine.num_gpus
    driver = driver_of(machine.cuda_max_good)
    return {
        "machine_id": machine.machine_id,
        "host_id": machine.host_id,
        "gpu_name": machine.gpu_name,
        "num_gpus": gpus,
        "gpu_ram": machine.gpu_ram,
        "gpu_total_ram": machine.gpu_ram * gpus,
        "gpu_totalram": machine.gpu_ram * gpus,
        "gpu_frac": round(share, 4),
        "gpu_arch": "nvidia",
        "gpu_lanes": 16,
        "gpu_mem_bw": machine.gpu_mem_bw,
        "gpu_max_power": float(machine.watts),
        "gpu_max_temp": 90.0,
        "gpu_display_active": False,
        "gpu_ids": list(range(gpus)),
        "bw_nvlink": 0.0,
        "compute_cap": machine.compute_cap,
        "cuda_max_good": machine.cuda_max_good,
        "driver_version": driver,
        "driver_vers": int("".join(part.zfill(3) for part in driver.split("."))),
        "cpu_arch": "amd64",
        "cpu_cores": machine.cpu_cores,
        "cpu_cores_effective": round(machine.cpu_cores * share, 1),
        "cpu_ghz": 3.4,
        "cpu_name": machine.cpu_name,
        "cpu_ram": machine.cpu_ram,
        "has_avx": 1,
        "mobo_name": "ROMED8-2T",
        "os_version": "22.04",
        "pci_gen": 4.0,
        "pcie_bw": 24.6,
        "disk_space": machine.disk_space,
        "disk_bw": machine.disk_bw,
        "disk_name": machine.disk_name,
        "storage_cost": machine.storage_cost,
        "inet_up": machine.inet_up,
        "inet_down": machine.inet_down,
        "inet_up_cost": machine.inet_up_cost,
        "inet_down_cost": machine.inet_down_cost,
        "internet_up_cost_per_tb": round(machine.inet_up_cost * 1000, 6),
        "internet_down_cost_per_tb": round(machine.inet_down_cost * 1000, 6),
        "duration": machine.duration_s,
        "start_date": round(now, 3),
        "end_date": round(now + machine.duration_s, 3),
        "reliability": machine.reliability,
        "reliability2": machine.reliability,
        "direct_port_count": machine.direct_port_count,
        "verification": "verified" if machine.verified else "unverified",
        "external": machine.external,
        "static_ip": machine.static_ip,
        "hosting_type": 1 if machine.datacenter else 0,
        "geolocation": machine.geolocation,
        "country_code": machine.geolocation[-2:],
        "public_ipaddr": machine.ipaddr,
        "cluster_id": None,
        "logo": "/static/logos/vastai_small2.png",
        "webpage": None,
        "vericode": 1 if machine.verified else 0,
    }


def select(rows: Iterable[Mapping[str, Any]], columns: Any) -> list[Mapping[str, Any]]:
    """The columns that were asked for; ["*"] and nothing mean all."""
    if not isinstance(columns, list) or "*" in columns or not columns:
        return list(rows)
    return [{name: row[name] for name in columns if name in row} for row in rows]
