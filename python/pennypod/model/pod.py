"""One rented machine as its provider shows it. Floor 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class PodState(StrEnum):
    """Our words for every provider's states; the waiting table is in terms of these."""

    STARTING = "starting"  # made, not usable yet; patience applies
    RUNNING = "running"  # the provider calls it up; SSH may still be closed
    STOPPED = "stopped"  # not computing, may still bill for its disk
    FAILED = "failed"  # will not become usable on its own


@dataclass(frozen=True, slots=True)
class SshAddress:
    host: str
    port: int
    user: str = "root"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod in its provider's listing. `created` is Unix seconds; money in micro-dollars per hour.

    `progress` is free text that changes while the pod is being made (an image pull); `address` is known once SSH is.
    `other_addresses` lead to the same sshd by another way (a proxy), to be tried when the first one does not answer.
    `changed` is the last change of state that the provider puts a date to, 0 where it does not.
    `computing_since` is when the container began to run, by our own clock; None where the provider does not tell.
    """

    provider: str
    pod_id: str
    name: str
    state: PodState
    created: float
    price_micros_per_h: int
    machine_id: str = ""
    gpu: str = ""
    gpu_count: int = 1
    address: SshAddress | None = None
    progress: str = ""
    details: dict[str, Any] = field(default_factory=dict, compare=False)
    other_addresses: tuple[SshAddress, ...] = ()
    changed: float = 0.0
    computing_since: float | None = None

    @property
    def addresses(self) -> tuple[SshAddress, ...]:
        """Every way in, the best first; empty while there is none."""
        return () if self.address is None else (self.address, *self.other_addresses)

    @property
    def billing(self) -> bool:
        """Whether the meter runs at the full price; a stopped pod may still bill for its disk."""
        return self.state is not PodState.STOPPED
