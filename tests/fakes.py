"""Stand-ins for the outside world: a clock that never sleeps and a provider with scripted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pennypod.errors import AmbiguousError, GateError, ProviderError, SshError
from pennypod.model.offer import Need, Offer, Order
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.providers.base import Timing

ADDRESS = SshAddress("127.0.0.1", 2222)


class FakeClock:
    """Sleeping moves the time and calls `on_sleep`, so that other actors can act meanwhile."""

    def __init__(self, now: float = 1_764_600_000.0) -> None:
        self.time = now
        self.on_sleep: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(seconds, 0.001)
        self.on_sleep()


class FakeProvider:
    """Pods in a dict. Faults are lists consumed call by call: an exception is raised, None lets the call through."""

    def __init__(self, clock: FakeClock, name: str = "fake") -> None:
        self.name = name
        self.timing = Timing(
            listing_lag_s=4,
            absence_checks=3,
            absence_spacing_s=1,
            poll_s=1,
            start_patience_s=30,
            start_limit_s=60,
        )
        self._clock = clock
        self.live: dict[str, Pod] = {}
        self.created: list[str] = []
        self.orders: list[Order] = []
        self.rent_faults: list[ProviderError | None] = []
        self.lost_replies = 0
        self.destroy_faults: list[ProviderError | None] = []
        self.ignored_destroys = 0
        self.list_faults: list[ProviderError | None] = []
        self.starts_as: list[Pod | PodState] = []
        self.most_alive = 0
        self.balance: int | None = None
        self.balance_faults: list[ProviderError | None] = []
        self.dearer = 1.0  # what a pod costs, as a multiple of its offer

    def offers(self, need: Need) -> list[Offer]:
        return [offer(number) for number in range(1, 4)]

    def prepare(self, image: str, on_progress: Callable[[str], None]) -> None:
        return None

    def rent(self, offer: Offer, order: Order) -> str:
        self.orders.append(order)
        _raise_next(self.rent_faults)
        pod_id = f"pod-{len(self.created) + 1}"
        state = self.starts_as.pop(0) if self.starts_as else PodState.RUNNING
        assert isinstance(state, PodState)
        self.live[pod_id] = Pod(
            provider=self.name,
            pod_id=pod_id,
            name=order.name,
            state=state,
            created=self._clock.now(),
            price_micros_per_h=round(offer.price_micros_per_h * self.dearer),
            machine_id=offer.machine_id,
            address=ADDRESS if state is PodState.RUNNING else None,
        )
        self.created.append(pod_id)
        self.most_alive = max(self.most_alive, len(self.live))
        if self.lost_replies:
            self.lost_replies -= 1
            raise AmbiguousError("the reply was lost")
        return pod_id

    def pods(self) -> list[Pod]:
        _raise_next(self.list_faults)
        return list(self.live.values())

    def pod(self, pod_id: str) -> Pod | None:
        return self.live.get(pod_id)

    def destroy(self, pod_id: str) -> None:
        _raise_next(self.destroy_faults)
        if self.ignored_destroys:
            self.ignored_destroys -= 1
            return
        self.live.pop(pod_id, None)

    def host_keys(self, pod_id: str, name: str) -> list[str]:
        return []

    def balance_micros(self) -> int | None:
        _raise_next(self.balance_faults)
        return self.balance


class FakeLogin:
    """Logs in at once unless told otherwise; `verdicts` are consumed pod by pod."""

    def __init__(self, *verdicts: GateError | SshError | None) -> None:
        self._verdicts = list(verdicts)

    def log_in(
        self, addresses: Callable[[], Sequence[SshAddress]], host_keys: Sequence[str], limit_s: float
    ) -> SshAddress:
        ways_in = addresses()
        if self._verdicts and isinstance(self._verdicts[0], SshError):
            raise self._verdicts.pop(0)  # type: ignore[misc]
        return ways_in[0]

    def host_key(self, address: SshAddress, ask: Callable[[], Sequence[str]], patience_s: float) -> str:
        return "accept-new"

    def check(self, address: SshAddress) -> dict[str, Any]:
        verdict = self._verdicts.pop(0) if self._verdicts else None
        if verdict is not None:
            raise verdict
        return {"ok": True}


def offer(number: int, price_micros_per_h: int = 200_000, provider: str = "fake") -> Offer:
    return Offer(
        provider=provider,
        offer_id=f"offer-{number}",
        machine_id=f"machine-{number}",
        gpu="CPU",
        gpu_count=1,
        price_micros_per_h=price_micros_per_h,
        disk_gb=20,
    )


def _raise_next(faults: list[ProviderError | None]) -> None:
    if faults:
        fault = faults.pop(0)
        if fault is not None:
            raise fault
