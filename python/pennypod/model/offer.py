"""What a job needs and what a provider offers. Floor 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pennypod.model.image import RegistryLogin


@dataclass(frozen=True, slots=True)
class Need:
    """What a job asks of a machine; the one filter language for all providers.

    `gpu` is a list of choices in order of preference; empty means any. Sizes in GB, bandwidth in Mbit/s, price in
    micro-dollars per hour. None means "no limit". `vast_query` is more of the same in Vast's own search language; other
    providers do not read it.
    """

    gpu: tuple[str, ...] = ()
    gpu_count: int = 1
    gpu_ram_gb: float | None = None
    reliability: float | None = None
    inet_down_mbps: float | None = None
    inet_up_mbps: float | None = None
    disk_gb: float = 20.0
    cuda_min: float | None = None
    region: tuple[str, ...] = ()
    secure: bool = False
    max_price_micros_per_h: int | None = None
    vast_query: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """Something rentable now. `price_micros_per_h` is all-in for the disk that was asked: GPU plus disk, no traffic.

    `disk_micros_per_h` is the part of it that is charged from the create to the destroy, whether the pod computes or
    not; 0 where the disk is charged only while it does. Traffic: "down" is to the pod, "up" is from it.

    `pooled` means that the provider chooses the machine at the create: `machine_id` then names the pool, and one bad
    machine says nothing about the next one.
    """

    provider: str
    offer_id: str
    machine_id: str
    gpu: str
    gpu_count: int
    price_micros_per_h: int
    disk_gb: float
    secure: bool = False
    region: str = ""
    gpu_ram_gb: float | None = None
    reliability: float | None = None
    inet_down_mbps: float | None = None
    inet_up_mbps: float | None = None
    traffic_down_micros_per_gb: int = 0
    traffic_up_micros_per_gb: int = 0
    details: dict[str, Any] = field(default_factory=dict, compare=False)
    pooled: bool = False
    disk_micros_per_h: int = 0


def located(machine_id: str, region: str | None) -> str:
    """Where a machine is, for people: "4711 (Texas, US)"."""
    return f"{machine_id} ({region})" if region else machine_id


def place(document: Mapping[str, Any]) -> str:
    """The same with its provider, of an offer or attempt as a plan or run.json has it: "vast/4711 (Texas, US)"."""
    return f"{document['provider']}/{located(document['machine_id'], document.get('region'))}"


@dataclass(frozen=True, slots=True)
class FuseTerms:
    """When a pod's fuse fires, next to the deadline itself: whole seconds, counted from the start of the pod.

    `seconds_left` to the deadline by our clock, since a pod's may be wrong. `lease_s` after the last renewal; 0 means
    that nobody renews and only the deadline counts. At the deadline the fuse waits `after_s` more: whoever has a ledger
    and can save weights comes first.
    """

    seconds_left: int
    lease_s: int = 0
    after_s: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of a provider in one create call. `name` is the lease; `public_key` the run's own SSH key.

    `fuse` puts a fuse on the pod that ends it when nobody else does (`pennypod.fuse`). `login` is who may pull `image`,
    None where anybody may.
    """

    name: str
    image: str
    disk_gb: float
    public_key: str
    deadline: int
    env: dict[str, str] = field(default_factory=dict)
    fuse: FuseTerms | None = None
    login: RegistryLogin | None = None
