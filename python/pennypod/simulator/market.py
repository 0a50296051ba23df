"""What can be rented: Vast machines cut into offers, RunPod's catalogue with its stock. Pure; from a file and a seed.

A market file (YAML or JSON) may hold any of:

    vast:    {count: 60, drift: 0.08, machines: [{gpu_name: RTX 4090, num_gpus: 1, dph_per_gpu: 0.31, ...}]}
    runpod:  {drift: 0.0, gpus: [{id: NVIDIA GeForce RTX 4090, secure: 0.69, community: 0.34, stock: 12, ...}]}

`machines` and `gpus` replace what would be generated; a field that is left out gets a generated value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pennypod.errors import InputError
from pennypod.simulator.chance import between, draw, pick

SLOT_S = 600.0
"""Prices and stock move once in this time."""
SERVER_DISK_GB = 8.0
"""The disk Vast prices a search for that does not say `allocated_storage`."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One GPU type: Vast's name, RunPod's id, display name and pool, and plausible prices per GPU and hour."""

    vast: str
    runpod: str
    name: str
    pool: str
    ram_mb: int
    vast_price: float
    secure: float
    community: float
    compute_cap: int
    dlperf: float
    bandwidth: float
    watts: int


GPU_KINDS = (
    GpuKind("RTX 3060", "", "RTX 3060", "", 12288, 0.06, 0, 0, 860, 13, 360, 170),
    GpuKind("RTX 3090", "NVIDIA GeForce RTX 3090", "RTX 3090", "ADA_24", 24576, 0.17, 0.46, 0.22, 860, 32, 936, 350),
    GpuKind("RTX 4090", "NVIDIA GeForce RTX 4090", "RTX 4090", "ADA_24", 24564, 0.34, 0.69, 0.39, 890, 75, 1008, 450),
    GpuKind(
        "RTX 5090", "NVIDIA GeForce RTX 5090", "RTX 5090", "ADA_32_PRO", 32607, 0.45, 0.94, 0.69, 1200, 110, 1792, 575
    ),
    GpuKind("RTX A4000", "NVIDIA RTX A4000", "RTX A4000", "AMPERE_16", 16376, 0.10, 0.25, 0.17, 860, 20, 448, 140),
    GpuKind("RTX A5000", "NVIDIA RTX A5000", "RTX A5000", "AMPERE_24", 24564, 0.18, 0.27, 0.16, 860, 30, 768, 230),
    GpuKind("RTX A6000", "NVIDIA RTX A6000", "RTX A6000", "AMPERE_48", 49140, 0.37, 0.36, 0.25, 860, 37, 768, 300),
    GpuKind("A40", "NVIDIA A40", "A40", "AMPERE_48", 46068, 0.32, 0.35, 0.20, 860, 36, 696, 300),
    GpuKind("L4", "NVIDIA L4", "L4", "ADA_24", 23034, 0.28, 0.39, 0, 890, 24, 300, 72),
    GpuKind("L40S", "NVIDIA L40S", "L40S", "ADA_48_PRO", 46068, 0.56, 1.09, 0.79, 890, 62, 864, 350),
    GpuKind(
        "RTX 6000Ada",
        "NVIDIA RTX 6000 Ada Generation",
        "RTX 6000 Ada",
        "ADA_48_PRO",
        49140,
        0.60,
        0.77,
        0.74,
        890,
        66,
        960,
        300,
    ),
    GpuKind(
        "A100 PCIE", "NVIDIA A100 80GB PCIe", "A100 PCIe", "AMPERE_80", 81920, 0.75, 1.39, 1.19, 800, 70, 1555, 300
    ),
    GpuKind("A100 SXM4", "NVIDIA A100-SXM4-80GB", "A100 SXM", "AMPERE_80", 81920, 0.82, 1.59, 0, 800, 78, 2039, 400),
    GpuKind("H100 PCIE", "NVIDIA H100 PCIe", "H100 PCIe", "ADA_80_PRO", 81559, 1.75, 2.39, 1.99, 900, 140, 2000, 350),
    GpuKind("H100 SXM", "NVIDIA H100 80GB HBM3", "H100 SXM", "HOPPER_80", 81559, 1.87, 3.29, 2.69, 900, 180, 3350, 700),
    GpuKind("H100 NVL", "NVIDIA H100 NVL", "H100 NVL", "HOPPER_94", 95830, 1.92, 3.07, 2.59, 900, 170, 3938, 400),
    GpuKind("H200", "NVIDIA H200", "H200 SXM", "HOPPER_141", 143771, 2.29, 3.99, 0, 900, 210, 4800, 700),
    GpuKind("B200", "NVIDIA B200", "B200", "BLACKWELL_180", 183359, 3.20, 5.98, 0, 1000, 340, 8000, 1000),
)
_VAST_PLACES = (
    "Texas, US", "California, US", "Washington, US", "Quebec, CA", "Sweden, SE", "Czechia, CZ", "Germany, DE",
    "France, FR", "Norway, NO", "Japan, JP", "Taiwan, TW", "Bulgaria, BG", "Poland, PL", "United Kingdom, GB",
)  # fmt: skip
_CENTERS = {
    "US-TX-3": "US Texas 3",
    "US-CA-2": "US California 2",
    "US-KS-2": "US Kansas 2",
    "EU-RO-1": "EU Romania 1",
    "EU-SE-1": "EU Sweden 1",
    "EUR-IS-1": "EUR Iceland 1",
    "CA-MTL-1": "CA Montreal 1",
}
_REGIONS = {
    "US": "NORTH_AMERICA",
    "CA": "NORTH_AMERICA",
    "EU": "EUROPE",
    "EUR": "EUROPE",
}
_CUDA = ("12.4", "12.6", "12.8", "13.0")
_DRIVERS = {12.4: "550.127.05", 12.6: "560.35.03", 12.8: "570.153.02", 13.0: "580.65.06"}
_CPUS = ("AMD EPYC 7502 32-Core Processor", "Xeon® Gold 6226R", "AMD Ryzen 9 5950X", "AMD EPYC 9354 32-Core Processor")
_DISKS = ("Samsung SSD 990 PRO", "WD_BLACK SN850X", "KINGSTON SKC3000", "INTEL SSDPE2KX040T8")


@dataclass(slots=True)
class Machine:
    """One host on Vast. Prices in dollars per GPU and hour; bandwidth in Mbit/s, traffic in dollars per GB."""

    machine_id: int
    gpu_name: str
    num_gpus: int
    dph_per_gpu: float
    host_id: int = 0
    gpu_ram: int = 24576
    storage_cost: float = 0.15
    inet_up: float = 500.0
    inet_down: float = 500.0
    inet_up_cost: float = 0.004
    inet_down_cost: float = 0.004
    reliability: float = 0.99
    cuda_max_good: float = 12.4
    disk_space: float = 500.0
    disk_bw: float = 3000.0
    geolocation: str = "Texas, US"
    verified: bool = True
    datacenter: bool = False
    static_ip: bool = True
    direct_port_count: int = 100
    cpu_cores: int = 32
    cpu_ram: int = 128000
    cpu_name: str = _CPUS[0]
    disk_name: str = _DISKS[0]
    compute_cap: int = 860
    dlperf: float = 30.0
    gpu_mem_bw: float = 900.0
    watts: int = 300
    duration_s: float = 30 * 86400.0
    ipaddr: str = "203.0.113.1"
    external: bool = False
    taken: int = 0
    generation: int = 0

    @property
    def free(self) -> int:
        return self.num_gpus - self.taken


@dataclass(frozen=True, slots=True)
class VastOffer:
    """A slice of a machine at a moment's price. The id is good for one rental."""

    id: int
    machine: Machine
    gpus: int
    dph_base: float
    generation: int
    now: float


class VastMarket:
    """Machines, and the offers they make."""

    def __init__(self, seed: int, spec: Mapping[str, Any]) -> None:
        self.seed = seed
        self.drift = float(spec.get("drift", 0.08))
        given = spec.get("machines")
        if given is None:
            self.machines = [self._generated(number) for number in range(int(spec.get("count", 60)))]
        else:
            self.machines = [self._given(number, dict(item)) for number, item in enumerate(given)]
        self.by_id = {machine.machine_id: machine for machine in self.machines}
        self._shown: dict[int, tuple[int, int, int]] = {}

    def _generated(self, number: int) -> Machine:
        kind = GPU_KINDS[number % len(GPU_KINDS)]
        return self._machine(number, kind, {})

    def _given(self, number: int, fields_given: dict[str, Any]) -> Machine:
        name = str(fields_given.get("gpu_name", "RTX 4090")).replace("_", " ")
        kind = next((item for item in GPU_KINDS if item.vast == name), GPU_KINDS[2])
        return self._machine(number, kind, fields_given | {"gpu_name": name})

    def _machine(self, number: int, kind: GpuKind, given: Mapping[str, Any]) -> Machine:
        seed, key = self.seed, ("vast machine", number)
        big = kind.vast_price > 0.7
        gpus = pick((1, 2, 4, 8) if not big else (2, 4, 8), seed, *key, "gpus")
        cuda = float(pick(_CUDA, seed, *key, "cuda"))
        machine_id = 10_000 + number * 37 + int(draw(seed, *key, "id") * 37)
        values: dict[str, Any] = {
            "machine_id": machine_id,
            "host_id": 50_000 + number // 3,
            "gpu_name": kind.vast,
            "num_gpus": gpus,
            "dph_per_gpu": round(kind.vast_price * between(0.85, 1.45, seed, *key, "price"), 4),
            "gpu_ram": kind.ram_mb,
            "storage_cost": round(between(0.08, 0.25, seed, *key, "storage"), 3),
            "inet_up": round(between(60, 1800, seed, *key, "up"), 1),
            "inet_down": round(between(80, 3500, seed, *key, "down"), 1),
            "inet_up_cost": round(between(0, 0.02, seed, *key, "upcost"), 4),
            "inet_down_cost": round(between(0, 0.015, seed, *key, "downcost"), 4),
            "reliability": round(between(0.93, 0.9995, seed, *key, "reliability"), 7),
            "cuda_max_good": cuda,
            "disk_space": round(between(60, 2500, seed, *key, "disk"), 1),
            "disk_bw": round(between(800, 6500, seed, *key, "diskbw"), 1),
            "geolocation": pick(_VAST_PLACES, seed, *key, "place"),
            "verified": draw(seed, *key, "verified") < 0.85,
            "datacenter": draw(seed, *key, "dc") < (0.8 if big else 0.3),
            "static_ip": draw(seed, *key, "static") < 0.8,
            "direct_port_count": int(between(2, 500, seed, *key, "ports")),
            "cpu_cores": pick((16, 32, 64, 128), seed, *key, "cores"),
            "cpu_ram": pick((64_000, 128_000, 257_000, 515_000), seed, *key, "ram"),
            "cpu_name": pick(_CPUS, seed, *key, "cpu"),
            "disk_name": pick(_DISKS, seed, *key, "diskname"),
            "compute_cap": kind.compute_cap,
            "dlperf": round(kind.dlperf * between(0.9, 1.05, seed, *key, "dlperf"), 2),
            "gpu_mem_bw": kind.bandwidth,
            "watts": kind.watts,
            "duration_s": round(between(2, 180, seed, *key, "duration") * 86400, 1),
            "ipaddr": f"203.0.113.{number % 250 + 1}",
        }
        known = {item.name for item in fields(Machine)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise InputError(f"market file: a vast machine has no field {', '.join(unknown)}")
        return Machine(**(values | _cast(given, values, "vast machine")))

    def price(self, machine: Machine, now: float) -> float:
        """Dollars per GPU and hour: the machine's own price, a little up or down."""
        if not self.drift:
            return machine.dph_per_gpu
        slot = int(now // SLOT_S)
        move = between(-self.drift, self.drift, self.seed, "vast price", machine.machine_id, slot)
        return round(machine.dph_per_gpu * (1 + move), 6)

    def offers(self, now: float) -> Iterator[VastOffer]:
        """Every machine offers its free GPUs in slices of 1, 2, 4, ... and as a whole."""
        for machine in self.machines:
            for gpus in _slices(machine.free):
                yield self._offer(machine, gpus, now)

    def _offer(self, machine: Machine, gpus: int, now: float) -> VastOffer:
        # Hashed from what it stands for, so that a seed gives the same ids whoever asks first.
        number = draw(self.seed, "ask", machine.machine_id, gpus, machine.generation)
        offer_id = 20_000_000 + int(number * 20_000_000)
        self._shown[offer_id] = (machine.machine_id, gpus, machine.generation)
        base = round(self.price(machine, now) * gpus, 6)
        return VastOffer(offer_id, machine, gpus, base, machine.generation, now)

    def find(self, offer_id: int, now: float) -> tuple[VastOffer | None, bool]:
        """The offer if it can be rented now, and whether it ever existed."""
        if offer_id not in self._shown:
            for _ in self.offers(now):
                pass  # an id may come from another run with the same seed
        shown = self._shown.get(offer_id)
        if shown is None:
            return None, False
        machine = self.by_id[shown[0]]
        offer = VastOffer(offer_id, machine, shown[1], round(self.price(machine, now) * shown[1], 6), shown[2], now)
        alive = machine.generation == shown[2] and machine.free >= shown[1]
        return (offer if alive else None), True

    def gone(self, offer_id: int, now: float) -> VastOffer | None:
        """An offer that was taken, as it was: a create without cancel_unavail still makes a stopped contract of it."""
        shown = self._shown.get(offer_id)
        if shown is None:
            return None
        machine = self.by_id[shown[0]]
        return VastOffer(offer_id, machine, shown[1], round(self.price(machine, now) * shown[1], 6), shown[2], now)

    def take(self, offer: VastOffer) -> None:
        offer.machine.taken += offer.gpus
        offer.machine.generation += 1

    def release(self, machine_id: int, gpus: int) -> None:
        machine = self.by_id.get(machine_id)
        if machine is not None:
            machine.taken = max(0, machine.taken - gpus)
            machine.generation += 1


def _cast(given: Mapping[str, Any], like: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The given fields with numbers as numbers. Raises InputError."""
    made = dict(given)
    for name, value in given.items():
        kind = type(like.get(name))
        if kind not in (int, float):
            continue
        try:
            made[name] = kind(value)
        except (TypeError, ValueError):
            raise InputError(f"market file: {name} of a {what} is a number, not {value!r}") from None
    return made


def _slices(free: int) -> list[int]:
    sizes = [size for size in (1, 2, 4, 8) if size <= free]
    return sizes if not free or free in sizes else [*sizes, free]


@dataclass(slots=True)
class CatalogueGpu:
    """One RunPod GPU type. `stock` is how many GPUs are free per cloud, spread over its data centers."""

    id: str
    name: str
    memory: int
    secure: float
    community: float
    pool: str | None = None
    manufacturer: str = "NVIDIA"
    max_secure: int = 8
    max_community: int = 4
    cuda: tuple[str, ...] = ("12.6", "12.8")
    centers: dict[str, int] = field(default_factory=dict)
    community_stock: int = 0

    def price(self, cloud: str) -> float:
        return self.secure if cloud == "SECURE" else self.community

    def offered(self, cloud: str) -> bool:
        return self.price(cloud) > 0

    def max_count(self, cloud: str) -> int:
        return self.max_secure if cloud == "SECURE" else self.max_community


class RunpodMarket:
    """The catalogue and its stock."""

    def __init__(self, seed: int, spec: Mapping[str, Any]) -> None:
        self.seed = seed
        self.drift = float(spec.get("drift", 0.0))
        given = spec.get("gpus")
        kinds = [kind for kind in GPU_KINDS if kind.runpod]
        if given is None:
            self.gpus = {kind.runpod: self._gpu(kind, {}) for kind in kinds}
        else:
            self.gpus = {}
            for item in given:
                kind = next((known for known in kinds if known.runpod == item.get("id")), kinds[1])
                self.gpus[str(item["id"])] = self._gpu(kind, dict(item))

    def _gpu(self, kind: GpuKind, given: dict[str, Any]) -> CatalogueGpu:
        seed, key = self.seed, ("runpod gpu", given.get("id", kind.runpod))
        first = int(draw(seed, *key, "cuda") * 2)
        centers = {
            name: int(between(0, 14, seed, *key, name)) for name in _CENTERS if draw(seed, *key, "in", name) < 0.6
        }
        stock = given.pop("stock", None)
        values: dict[str, Any] = {
            "id": kind.runpod,
            "name": kind.name,
            "memory": round(kind.ram_mb / 1024),
            "secure": kind.secure,
            "community": kind.community,
            "pool": kind.pool or None,
            "cuda": _CUDA[first : first + 3],
            "centers": centers,
            "community_stock": int(between(0, 12, seed, *key, "community")),
        }
        if stock is not None:
            values |= {"centers": {next(iter(_CENTERS)): int(stock)}, "community_stock": int(stock)}
        if "cuda" in given:
            given["cuda"] = tuple(str(version) for version in given["cuda"])
        unknown = sorted(set(given) - {item.name for item in fields(CatalogueGpu)})
        if unknown:
            raise InputError(f"market file: a runpod gpu has no field {', '.join(unknown)}")
        return CatalogueGpu(**(values | _cast(given, values, "runpod gpu")))

    def price(self, gpu: CatalogueGpu, cloud: str, now: float) -> float:
        """Dollars per GPU and hour; list prices move only when the market file says so."""
        price = gpu.price(cloud)
        if not self.drift or not price:
            return price
        slot = int(now // SLOT_S)
        return round(price * (1 + between(-self.drift, self.drift, self.seed, "runpod price", gpu.id, cloud, slot)), 4)

    def level(self, gpu: CatalogueGpu, cloud: str, count: int = 1) -> str:
        """NONE, LOW, MEDIUM or HIGH, as the catalogue says it for `count` GPUs in one pod."""
        if not gpu.offered(cloud) or count > gpu.max_count(cloud):
            return "NONE"
        if cloud == "SECURE":
            return _level(sum(free for free in gpu.centers.values() if free >= count))
        return _level(gpu.community_stock if gpu.community_stock >= count else 0)

    def centers(self, gpu: CatalogueGpu, cloud: str) -> list[dict[str, str]]:
        if not gpu.offered(cloud) or cloud != "SECURE":
            return []
        return [
            {"id": name, "name": _CENTERS.get(name, name), "availability": _level(free)}
            for name, free in gpu.centers.items()
        ]

    def take(self, gpu: CatalogueGpu, cloud: str, count: int, wanted: list[str] | None) -> str | None:
        """Take GPUs and say in which data center; None when nothing fits."""
        if not gpu.offered(cloud) or count > gpu.max_count(cloud):
            return None
        if cloud == "COMMUNITY":
            if wanted or gpu.community_stock < count:
                return None  # data centers are Secure Cloud only, and the ids are enforced
            gpu.community_stock -= count
            return "US-CA-2"
        fits = [name for name, free in gpu.centers.items() if free >= count and (not wanted or name in wanted)]
        if not fits:
            return None
        gpu.centers[fits[0]] -= count
        return fits[0]

    def release(self, gpu_id: str, cloud: str, count: int, center: str) -> None:
        gpu = self.gpus.get(gpu_id)
        if gpu is None:
            return
        if cloud == "COMMUNITY":
            gpu.community_stock += count
        else:
            gpu.centers[center] = gpu.centers.get(center, 0) + count


def center_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "name": text,
            "region": _REGIONS[name.split("-")[0]],
            "globalNetwork": True,
            "networkVolumeTypes": ["STANDARD"],
            "compliance": [],
        }
        for name, text in _CENTERS.items()
    ]


def driver_of(cuda: float) -> str:
    return _DRIVERS.get(cuda, "550.127.05")


def _level(free: int) -> str:
    return "NONE" if free <= 0 else "LOW" if free <= 2 else "MEDIUM" if free <= 8 else "HIGH"
