"""The ledger's rows as values. Floor 1; no I/O."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pennypod.model.meter import PodMeter


class AttemptState(StrEnum):
    """One attempt to rent. Only GONE and NEVER are final; anything else may be billing."""

    INTENT = "intent"  # journalled before the create call
    RENTED = "rented"  # the pod's id is known
    READY = "ready"  # logged in and accepted
    DESTROYING = "destroying"  # its end was asked for, not proven
    GONE = "gone"  # proven absent
    NEVER = "never"  # proven that no pod came of the create call


FINAL_STATES = (AttemptState.GONE, AttemptState.NEVER)


class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class WeightsState(StrEnum):
    """What had become of the newest checkpoint when its pod went."""

    HOME = "home"  # it was home before
    ESCROWED = "escrowed"  # brought home just before the destroy
    LOST = "lost"  # whatever the pod had that was newer than what is home, if anything is
    NONE = "none"  # there was none


@dataclass(frozen=True, slots=True)
class WeightsAtEnd:
    """`path` (relative to the artifacts folder) is the checkpoint that is home, `age_s` how old it was at the end.

    `epoch` is the last one that the log here speaks of.
    """

    state: WeightsState
    reason: str
    path: str | None = None
    age_s: float | None = None
    epoch: int | None = None

    def as_document(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}


STAGES = ("plan", "rent", "gate", "bootstrap", "dataset", "training", "weights", "teardown")


@dataclass(frozen=True, slots=True)
class RunRecord:
    run: str
    job: str
    controller: str
    created: float
    artifacts_dir: str
    deadline: float | None = None
    worst_case_micros: int | None = None
    keep_on_disconnect: bool = False
    fenced_reason: str | None = None
    outcome: str | None = None
    reason: str | None = None
    closed: float | None = None
    verdict: str | None = None
    verdict_note: str | None = None
    weights_at_end: dict[str, Any] | None = None


TRAFFIC_SLACK_S = 15.0
"""A count of bytes this old still counts as the last one: the work has ended, and the end is being asked for."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    id: int
    run: str
    attempt: int
    lease_name: str
    provider: str
    offer_id: str
    machine_id: str
    gpu: str
    gpu_count: int
    price_micros_per_h: int
    renter: str
    state: AttemptState
    intended: float
    pod_id: str | None = None
    rented: float | None = None
    ready: float | None = None
    ssh_host: str | None = None
    ssh_port: int | None = None
    ssh_user: str | None = None
    host_key: str | None = None  # "attested" by the provider, or "accept-new": the first one that was met
    destroy_requested: float | None = None
    gone: float | None = None
    outcome: str | None = None
    reason: str | None = None
    estimated_micros: int | None = None
    invoiced_micros: int | None = None
    receipt: dict[str, Any] | None = None
    disk_micros_per_h: int | None = None
    traffic_in_micros_per_gb: int | None = None
    traffic_out_micros_per_gb: int | None = None
    computing_from: float | None = None  # not before this, by what the provider has shown
    computing_seen: float | None = None  # when it was first seen running; from then on `computing_from` stands
    price_steps: list[list[float]] | None = None  # [since, all-in micro-dollars per hour]
    sent_bytes: int | None = None
    fetched_bytes: int | None = None
    lease_s: float | None = None  # what one renewal of its fuse's lease is worth; 0 or None: nobody renews
    fuse: dict[str, Any] | None = None  # what the pod said about its fuse, see `fuse.FuseState`
    image: dict[str, Any] | None = None  # what it was started from: reference, and digest where that is known
    worst_case_micros: int | None = None  # when it was admitted
    allowance_micros: int | None = None  # what the whole run may cost under the caps it was admitted under
    price_cap_micros_per_h: int | None = None
    traffic_counted: float | None = None  # when the pod's own count of its bytes was read last
    account: dict[str, Any] | None = None  # with whose key it was asked for, see `model.account`
    dataset: dict[str, Any] | None = None  # how its data set came to it, see `pulling.Way`
    isolation: dict[str, Any] | None = None  # what it may talk to, see `isolation.Isolation`; None: nobody asked
    region: str | None = None  # as its offer told it; "" or None: it told none

    @property
    def final(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def meter(self) -> PodMeter | None:
        """What is known of the pod's meter; None while there is no pod, and when none ever came of it."""
        if self.state is AttemptState.NEVER or self.rented is None:
            return None
        return PodMeter(
            price_micros_per_h=self.price_micros_per_h,
            made=self.intended,  # the create call: the provider's own clock starts no earlier
            computing=self.intended if self.computing_from is None else self.computing_from,
            disk_micros_per_h=self.disk_micros_per_h or 0,
            ended=self.gone,
            sent_bytes=self.sent_bytes or 0,
            fetched_bytes=self.fetched_bytes or 0,
            in_micros_per_gb=self.traffic_in_micros_per_gb or 0,
            out_micros_per_gb=self.traffic_out_micros_per_gb or 0,
            steps=tuple((since, int(price)) for since, price in self.price_steps or ()),
        )

    @property
    def price_now(self) -> int:
        """The all-in price per hour that the provider has shown last, in micro-dollars."""
        return int(self.price_steps[-1][1]) if self.price_steps else self.price_micros_per_h

    def billed_seconds(self, now: float) -> float:
        """For how long the pod has been charged for computing."""
        return 0.0 if self.meter is None else self.meter.seconds(now)

    def cost_micros(self, now: float) -> int:
        """What the attempt has cost by `now`: computing, disk and traffic."""
        return 0 if self.meter is None else self.meter.micros(now)

    @property
    def traffic_is_charged(self) -> bool:
        """Whether bytes cost money on this pod; also when nobody wrote down what they cost."""
        return self.traffic_in_micros_per_gb != 0 or self.traffic_out_micros_per_gb != 0

    def traffic_known(self, now: float) -> bool:
        """Whether `cost_micros` holds all traffic that is charged for; if not, it is what the pod cost at least.

        No work has moved anything on a pod that was never accepted.
        """
        if self.meter is None or self.ready is None or not self.traffic_is_charged:
            return True
        end = now if self.destroy_requested is None else self.destroy_requested
        return self.traffic_counted is not None and self.traffic_counted >= end - TRAFFIC_SLACK_S


@dataclass(frozen=True, slots=True)
class PassedOverRecord:
    """An offer that was not even asked for, and why. `code` is the error's."""

    run: str
    at: float
    provider: str
    offer_id: str
    machine_id: str
    gpu: str
    price_micros_per_h: int
    code: str
    reason: str
    region: str | None = None


@dataclass(frozen=True, slots=True)
class StageRecord:
    run: str
    stage: str
    started: float
    finished: float | None


@dataclass(frozen=True, slots=True)
class ArtifactRecord:
    """A file that came home. `kind` is "weights", "log", "extra"; `path` is relative to the run's artifacts folder."""

    run: str
    path: str
    bytes: int
    sha256: str
    kind: str


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    provider: str
    machine_id: str
    at: float
    until: float
    reason: str
