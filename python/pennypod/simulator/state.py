"""Accounts, pods and their lives, driven by virtual time. Pure but for the backend, which is told what to do.

A pod's life is a row of stages; each change is an event with its own time, and `tick` applies what is due in order, so
that the meter is exact however rarely anybody looks. The provider's own words for a stage are the APIs' business.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from pennypod.errors import InputError
from pennypod.model.image import RegistryLogin, registry_of
from pennypod.simulator.chance import text as draw_text
from pennypod.simulator.clock import VirtualClock
from pennypod.simulator.faults import Faults, Rule
from pennypod.simulator.market import CatalogueGpu, RunpodMarket, VastMarket, VastOffer
from pennypod.simulator.meter import Meter, Tab, disk_rate, nanos
from pennypod.simulator.pulling import not_found, private_registries, refused

VAST, RUNPOD = "vast", "runpod"
RUNPOD_DISK_USD = 0.10
RUNPOD_VOLUME_STOPPED_USD = 0.20
_REFUSED_KEYS = ("bad", "invalid", "revoked", "wrong")
_POD_ID = "abcdefghijklmnopqrstuvwxyz0123456789"
_LOOP_S = 17.0
_CREATE_RETRY_S = 0.2


class Stage(StrEnum):
    PROVISIONING = "provisioning"
    LOADING = "loading"
    RUNNING = "running"
    EXITED = "exited"
    OFFLINE = "offline"
    SCHEDULING = "scheduling"  # wants to start, its GPUs are taken
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Credential:
    """What RunPod keeps of a registry login, and never tells again but for its id and name."""

    id: str
    name: str
    user: str
    password: str = field(repr=False)


@dataclass(slots=True)
class Account:
    """Money and keys at one provider. `credit` in micro-dollars is what was paid in."""

    provider: str
    key: str
    user_id: int
    email: str
    credit: int
    tab: Tab = field(default_factory=Tab)
    ssh_keys: list[dict[str, Any]] = field(default_factory=list)
    next_key_id: int = 1
    registries: list[Credential] = field(default_factory=list)

    def balance(self, now: float) -> int:
        return self.credit - self.tab.micros(now)


@dataclass(slots=True, eq=False)
class Pod:
    """One rented machine. Times are virtual Unix seconds; `address` is known once the backend has made it."""

    provider: str
    id: str
    name: str
    account: Account
    image: str
    disk_gb: float
    created: float
    api_key: str
    meter: Meter
    env: dict[str, str] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)
    keys: list[dict[str, Any]] = field(default_factory=list)
    command: str = ""
    gpus: int = 1
    details: dict[str, Any] = field(default_factory=dict)
    machine: Any = None
    stage: Stage = Stage.PROVISIONING
    stage_since: float = 0.0
    wanted: str = "running"
    message: str = ""
    up_since: float | None = None
    boot_s: float = 0.0
    holds_gpus: bool = False
    address: tuple[str, int] | None = None
    up: bool = False
    failure: str = ""
    pull_failure: str = ""
    login: RegistryLogin | None = None
    life: int = 0
    gone_at: float | None = None
    gone_why: str = ""
    hidden_until: float = 0.0
    shown_until: float = 0.0
    faults: dict[str, Rule] = field(default_factory=dict)
    history: list[tuple[float, str]] = field(default_factory=list)
    moved: Callable[[int, int], None] = lambda _received, _sent: None
    log: list[str] = field(default_factory=list)
    orders: deque[Callable[[], None]] = field(default_factory=deque)  # what the backend is still to be told
    turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def alive(self) -> bool:
        return self.stage is not Stage.GONE

    def fault_seconds(self, name: str, default: float) -> float | None:
        rule = self.faults.get(name)
        return None if rule is None else rule.seconds(default)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is asking: an account, or one pod with its own key."""

    account: Account
    pod: Pod | None = None

    def may_touch(self, pod: Pod) -> bool:
        return pod.account is self.account and (self.pod is None or self.pod is pod)


class Backend(Protocol):
    """What a pod is made of. Called without the world's lock, one call at a time for each pod; slow calls are fine.

    Tells `pod.moved` how many bytes a container has received and sent before that ends.
    """

    def create(self, pod: Pod) -> None: ...
    def stop(self, pod: Pod) -> None: ...
    def start(self, pod: Pod) -> None: ...
    def destroy(self, pod: Pod) -> None: ...
    def set_keys(self, pod: Pod) -> None: ...
    def lose_keys(self, pod: Pod) -> None: ...
    def snapshot(self, pod: Pod, to: str, login: RegistryLogin | None) -> None: ...
    def logs(self, pod: Pod, tail: int) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Boot:
    """Seconds a pod spends before it is up: until a machine has it, and with its image.

    `cached_s` instead of `loading_s` where the host has had that image before; None makes no difference.
    """

    assign_s: float = 1.0
    loading_s: float = 3.0
    cached_s: float | None = None


class World:
    """Everything there is. Callers hold `lock` while they use it, and run what `take_jobs` hands out after."""

    def __init__(
        self,
        clock: VirtualClock,
        backend: Backend,
        *,
        seed: int = 0,
        market: Mapping[str, Any] | None = None,
        faults: Iterable[Mapping[str, Any]] = (),
        boot: Boot | None = None,
    ) -> None:
        spec = dict(market or {})
        self.seed = int(spec.get("seed", seed))
        self.clock = clock
        self.started = clock.now()
        self.backend = backend
        self.lock = threading.RLock()
        self.vast = VastMarket(self.seed, spec.get("vast") or {})
        self.runpod = RunpodMarket(self.seed, spec.get("runpod") or {})
        self.faults = Faults(self.seed, faults)
        self.options: dict[str, Any] = dict(spec.get("options") or {})
        self._private = private_registries(spec)
        self._images_of: dict[str, set[str]] = {}
        self.pods: dict[str, dict[str, Pod]] = {VAST: {}, RUNPOD: {}}
        self._gone: dict[str, dict[str, Pod]] = {VAST: {}, RUNPOD: {}}
        self._boot = {provider: _boot(spec, provider, boot or Boot()) for provider in (VAST, RUNPOD)}
        self._accounts = {provider: _accounts(spec, provider) for provider in (VAST, RUNPOD)}
        self._pod_keys: dict[str, Pod] = {}
        self._events: list[tuple[float, int, str, Pod, int]] = []
        self._order = itertools.count()
        self._made = 0
        self._told: list[Pod] = []
        self._queue: list[Pod] = []

    # --- who ----------------------------------------------------------------------------------------------------------

    def identify(self, provider: str, key: str) -> Identity | None:
        """Any key is good unless the market file names accounts, or the key says of itself that it is not."""
        pod = self._pod_keys.get(key)
        if pod is not None:
            return Identity(pod.account, pod) if pod.provider == provider and pod.alive else None
        accounts = self._accounts[provider]
        if any(account.key for account in accounts):
            return next((Identity(account) for account in accounts if account.key == key), None)
        return None if not key or key.lower().startswith(_REFUSED_KEYS) else Identity(accounts[0])

    def account(self, provider: str) -> Account:
        return self._accounts[provider][0]

    def accounts(self) -> list[Account]:
        return [account for accounts in self._accounts.values() for account in accounts]

    # --- making pods --------------------------------------------------------------------------------------------------

    def rent_vast(
        self, account: Account, offer: VastOffer, *, stopped: bool = False, struck: Iterable[Rule] = (), **values: Any
    ) -> Pod:
        """A contract on an offer. `stopped` makes one that never ran: its disk is billed all the same."""
        self._made += 1
        pod = self._pod(VAST, str(17_000_000 + self.seed % 1000 * 1000 + self._made), account, struck, values)
        pod.machine, pod.gpus = offer.machine, offer.gpus
        pod.details |= {"dph_base": offer.dph_base, "storage_cost": offer.machine.storage_cost, "ask": offer.id}
        pod.meter.set_rate("disk", disk_rate(offer.machine.storage_cost, pod.disk_gb), pod.created)
        if stopped:
            self.vast.release(offer.machine.machine_id, 0)
            pod.wanted = "stopped"
            self._enter(pod, Stage.EXITED, pod.created)
        else:
            self.vast.take(offer)
            pod.holds_gpus = True
            self._launch(pod)
        return pod

    def rent_runpod(
        self, account: Account, gpu: CatalogueGpu | None, *, struck: Iterable[Rule] = (), **values: Any
    ) -> Pod:
        self._made += 1
        pod_id = draw_text(_POD_ID, 14, self.seed, "runpod pod", self._made)
        pod = self._pod(RUNPOD, pod_id, account, struck, values)
        pod.machine = gpu
        pod.holds_gpus = gpu is not None
        pod.details["machine_id"] = draw_text(
            _POD_ID, 12, self.seed, "runpod machine", pod.details.get("center"), self._made
        )
        self._launch(pod)
        return pod

    def _pod(self, provider: str, pod_id: str, account: Account, struck: Iterable[Rule], values: dict[str, Any]) -> Pod:
        now = self.clock.now()
        pod = Pod(
            provider=provider,
            id=pod_id,
            account=account,
            created=now,
            api_key=secrets.token_hex(32) if provider == VAST else f"rpa_{secrets.token_hex(20).upper()}",
            meter=Meter(account.tab),
            **values,
        )
        pod.moved = lambda received, sent: self._charge_traffic(pod, received, sent)
        pod.faults = {rule.fault: rule for rule in struck}
        pod.hidden_until = now + (pod.fault_seconds("list_lag", 30.0) or 0.0)
        pod.history.append((now, pod.stage))
        pod.stage_since = now
        self.pods[provider][pod_id] = pod
        self._pod_keys[pod.api_key] = pod
        return pod

    def _launch(self, pod: Pod) -> None:
        boot = self._boot[pod.provider]
        cached = boot.cached_s is not None and pod.image in self._images_of.get(_host_of(pod), set())
        pod.details["cached"] = cached
        pod.boot_s = boot.cached_s if cached and boot.cached_s is not None else boot.loading_s
        pod.boot_s += pod.fault_seconds("slow_loading", 600.0) or 0.0
        self._at(pod.created + boot.assign_s, "load", pod)
        self._later(pod, lambda: self.backend.create(pod))

    # --- what is asked of a pod ---------------------------------------------------------------------------------------

    def find(self, provider: str, pod_id: str, identity: Identity) -> Pod | None:
        """A pod this caller may see by its id."""
        pod = self.pods[provider].get(pod_id)
        return pod if pod is not None and identity.may_touch(pod) else None

    def listing(self, provider: str, identity: Identity) -> list[Pod]:
        """What the listing shows: late for new pods and for ended ones, where a fault says so."""
        now = self.clock.now()
        shown = [pod for pod in self.pods[provider].values() if identity.may_touch(pod) and pod.hidden_until <= now]
        late = self._gone[provider].values()
        return shown + [pod for pod in late if pod.shown_until > now and identity.may_touch(pod)]

    def destroy(self, pod: Pod, why: str = "destroyed") -> None:
        now = self.clock.now()
        self._end_gpus(pod)
        pod.meter.stop(now)
        pod.gone_at, pod.gone_why = now, why
        pod.shown_until = now + (pod.fault_seconds("gone_lag", 30.0) or 0.0)
        self._enter(pod, Stage.GONE, now)
        del self.pods[pod.provider][pod.id]
        self._gone[pod.provider][pod.id] = pod
        self._later(pod, lambda: self.backend.destroy(pod))

    def stop(self, pod: Pod, at: float | None = None) -> None:
        at = self.clock.now() if at is None else at
        pod.wanted = "stopped"
        if pod.stage is Stage.EXITED:
            return
        self._end_gpus(pod)
        self._enter(pod, Stage.EXITED, at)
        self._later(pod, lambda: self.backend.stop(pod))

    def start(self, pod: Pod) -> bool:
        """False when the machine has no free GPU any more: the pod then waits for one."""
        now = self.clock.now()
        pod.wanted = "running"
        if pod.stage not in (Stage.EXITED, Stage.SCHEDULING):
            return True
        if not self._retake_gpus(pod):
            if pod.stage is not Stage.SCHEDULING:
                self._enter(pod, Stage.SCHEDULING, now)
                self._queue.append(pod)
            return False
        self._enter(pod, Stage.LOADING, now)
        pod.boot_s = min(pod.boot_s, 2.0)
        self._at(now + pod.boot_s, "up", pod)
        self._later(pod, lambda: self.backend.start(pod))
        return True

    def evict(self, pod: Pod, at: float | None = None) -> None:
        """The provider takes the pod back: Vast stops it and keeps its disk, at RunPod it is simply gone."""
        if pod.provider == RUNPOD:
            self.destroy(pod, "evicted")
        else:
            self.stop(pod, at)

    def restart(self, pod: Pod) -> None:
        self.stop(pod)
        self.start(pod)

    def set_price(self, pod: Pod, usd_per_h: float) -> None:
        """From now on the pod's GPUs cost another price, as when a host asks for more and gets it."""
        if usd_per_h < 0:
            raise InputError("a price is never negative")
        if pod.provider == VAST:
            pod.details["dph_base"] = usd_per_h
        else:
            pod.details["rate"] = usd_per_h
            pod.details["full_rate"] = nanos(str(usd_per_h)) + runpod_disk(pod, True)
        if any(item.kind == "gpu" and item.end is None for item in pod.meter.segments):
            pod.meter.set_rate("gpu", nanos(str(usd_per_h)), self.clock.now())

    def snapshot(self, pod: Pod, to: str, login: RegistryLogin | None) -> None:
        """The host makes an image of the pod and pushes it, unless it has the fault of never doing so."""
        pod.history.append((self.clock.now(), "snapshot"))
        if "snapshot_lost" not in pod.faults:
            self._later(pod, lambda: self.backend.snapshot(pod, to, login))

    def keys_changed(self, pod: Pod) -> None:
        self._later(pod, lambda: self.backend.set_keys(pod))

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Apply everything that is due by now."""
        now = self.clock.now()
        while self._events and self._events[0][0] <= now:
            at, _, what, pod, life = heapq.heappop(self._events)
            if pod.life == life and pod.alive:
                self._happen(what, pod, at)
        waiting, self._queue = self._queue, []
        self._queue = [pod for pod in waiting if pod.stage is Stage.SCHEDULING and not self.start(pod)]
        for account in self.accounts():
            if account.tab.rate and account.balance(now) <= 0:
                self._out_of_money(account)

    def take_jobs(self) -> list[Callable[[], None]]:
        """What the backend is to be told, a job for each pod. Any thread may run it, at any time, after the lock."""
        told, self._told = self._told, []
        return [partial(_carry_out, pod) for pod in dict.fromkeys(told)]

    def _later(self, pod: Pod, order: Callable[[], None]) -> None:
        pod.orders.append(order)
        self._told.append(pod)

    def _at(self, when: float, what: str, pod: Pod) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, pod, pod.life))

    def _happen(self, what: str, pod: Pod, at: float) -> None:
        if what == "load":
            self._enter(pod, Stage.LOADING, at)
            wanted = self._private.get(registry_of(pod.image))
            if wanted is not None and pod.login != wanted:
                pod.pull_failure = refused(pod.image, pod.login)
            if pod.pull_failure or "pull_error" in pod.faults:
                self._at(at + pod.boot_s / 2, "pull_error", pod)
            elif "stuck_loading" not in pod.faults:
                self._at(at + pod.boot_s, "up", pod)
        elif what == "up":
            self._come_up(pod, at)
        elif what == "pull_error":
            self._fail_pull(pod, at)
        elif what == "lose_keys":
            pod.history.append((at, "lose_keys"))
            self._later(pod, lambda: self.backend.lose_keys(pod))
        elif what == "exit":
            self._end_gpus(pod, keep=True)
            self._enter(pod, Stage.EXITED, at)
            self._later(pod, lambda: self.backend.stop(pod))
        elif what == "offline":
            self._enter(pod, Stage.OFFLINE, at)
            self._later(pod, lambda: self.backend.stop(pod))
        elif what == "evict":
            self.evict(pod, at)

    def _fail_pull(self, pod: Pod, at: float) -> None:
        """As seen at Vast: the intention flips, the container stays in loading. RunPod goes on saying RUNNING."""
        pod.message = pod.pull_failure or not_found(pod.image)
        pod.wanted = "stopped" if pod.provider == VAST else pod.wanted
        pod.history.append((at, "pull_error"))
        pod.log.append(pod.message)

    def _come_up(self, pod: Pod, at: float) -> None:
        if pod.pull_failure:
            self._fail_pull(pod, at)
        elif pod.failure:
            pod.message = pod.failure
            self._end_gpus(pod, keep=True)
            self._enter(pod, Stage.EXITED, at)
        elif "restart_loop" in pod.faults:
            pod.message = "Error response from daemon: failed to create task for container: exit status 1"
            pod.history.append((at, "restart"))
            pod.log.append(pod.message)
            self._at(at + _LOOP_S, "up", pod)
        elif not pod.up:
            # The backend is still at it; virtual time may run far ahead of it.
            self._at(self.clock.now() + _CREATE_RETRY_S * max(1.0, self.clock.speed), "up", pod)
        else:
            self._enter(pod, Stage.RUNNING, at)
            self._images_of.setdefault(_host_of(pod), set()).add(pod.image)
            for fault, what, default in (
                ("exit_after", "exit", 5.0),
                ("evict_after", "evict", 5.0),
                ("offline_after", "offline", 5.0),
                ("keys_lost_after", "lose_keys", 5.0),
            ):
                seconds = pod.fault_seconds(fault, default)
                if seconds is not None:
                    self._at(at + seconds, what, pod)
                    del pod.faults[fault]

    def _enter(self, pod: Pod, stage: Stage, at: float) -> None:
        """A new stage, with the meter set as the provider would."""
        if stage in (Stage.EXITED, Stage.OFFLINE, Stage.GONE):
            pod.life += 1  # whatever was due for the life that ends here is void
        pod.stage, pod.stage_since = stage, at
        pod.history.append((at, stage))
        pod.up_since = at if stage is Stage.RUNNING else None
        if stage is Stage.RUNNING:
            pod.message = ""
        if stage is Stage.GONE:
            return
        if pod.provider == VAST:
            gpu = nanos(str(pod.details["dph_base"])) if stage is Stage.RUNNING else 0
            disk = 0 if stage is Stage.OFFLINE else disk_rate(pod.details["storage_cost"], pod.disk_gb)
            pod.meter.set_rate("gpu", gpu, at)
            pod.meter.set_rate("disk", disk, at)
        else:
            busy = stage in (Stage.LOADING, Stage.RUNNING)
            pod.meter.set_rate("gpu", nanos(str(pod.details["rate"])) if busy else 0, at)
            pod.meter.set_rate("disk", runpod_disk(pod, busy), at)

    def _end_gpus(self, pod: Pod, keep: bool = False) -> None:
        """Give the GPUs back, or only say that they compute no more: an exited container still holds its machine."""
        if not pod.holds_gpus or keep:
            return
        pod.holds_gpus = False
        if pod.provider == VAST:
            self.vast.release(pod.machine.machine_id, pod.gpus)
        else:
            self.runpod.release(pod.machine.id, pod.details["cloud"], pod.gpus, pod.details["center"])

    def _retake_gpus(self, pod: Pod) -> bool:
        if pod.holds_gpus or pod.machine is None:
            return True
        if pod.provider == VAST:
            if pod.machine.free < pod.gpus:
                return False
            pod.machine.taken += pod.gpus
            pod.machine.generation += 1
        elif self.runpod.take(pod.machine, pod.details["cloud"], pod.gpus, _center_of(pod)) is None:
            return False
        pod.holds_gpus = True
        return True

    def _charge_traffic(self, pod: Pod, received: int, sent: int) -> None:
        """Vast charges every byte both ways, in any state; RunPod none. Called by the backend, without the lock."""
        if pod.provider != VAST:
            return
        with self.lock:
            pod.meter.add_bytes("bwd", received, pod.machine.inet_down_cost)
            pod.meter.add_bytes("bwu", sent, pod.machine.inet_up_cost)

    def _out_of_money(self, account: Account) -> None:
        """Vast stops everything and keeps the disks; RunPod ends pods for good."""
        for pod in list(self.pods[account.provider].values()):
            if pod.account is not account:
                continue
            if account.provider == RUNPOD:
                self.destroy(pod, "no credit")
            elif pod.stage is not Stage.EXITED:
                self.stop(pod)

    # --- for /_sim ----------------------------------------------------------------------------------------------------

    def all_pods(self) -> list[Pod]:
        kept = [*self.pods.values(), *self._gone.values()]
        return sorted((pod for pods in kept for pod in pods.values()), key=lambda pod: (pod.created, pod.id))


def _carry_out(pod: Pod) -> None:
    """A pod's orders in the order in which they were given, whichever of two threads comes first."""
    with pod.turn:
        while pod.orders:
            pod.orders.popleft()()


def runpod_disk(pod: Pod, busy: bool) -> int:
    """Container disk while it runs; a persistent volume always, at double the price while it does not."""
    volume = float(pod.details.get("volume_gb") or 0)
    if busy:
        return disk_rate(RUNPOD_DISK_USD, pod.disk_gb + volume)
    return disk_rate(RUNPOD_VOLUME_STOPPED_USD, volume)


def _host_of(pod: Pod) -> str:
    """Who keeps images for the next pod: Vast's machine, and at RunPod whoever has that type in that place."""
    if pod.provider == VAST:
        return f"vast/{pod.machine.machine_id}"
    return f"runpod/{pod.details.get('center')}/{pod.machine.id if pod.machine is not None else 'cpu'}"


def _center_of(pod: Pod) -> list[str] | None:
    return [pod.details["center"]] if pod.details["cloud"] == "SECURE" else None


def _boot(spec: Mapping[str, Any], provider: str, default: Boot) -> Boot:
    given = dict((spec.get("boot") or {}).get(provider) or {})
    try:
        assign_s, loading_s = (float(given.get(name, getattr(default, name))) for name in ("assign_s", "loading_s"))
        cached = given.get("cached_s", default.cached_s)
        return Boot(assign_s, loading_s, None if cached is None else float(cached))
    except (TypeError, ValueError) as exc:
        raise InputError(f"market file: boot.{provider} holds assign_s, loading_s and cached_s in seconds") from exc


def _accounts(spec: Mapping[str, Any], provider: str) -> list[Account]:
    given = (spec.get("accounts") or {}).get(provider) or [{}]
    made = []
    for number, item in enumerate(given):
        credit = round(float(item.get("credit_usd", 100.0)) * 1_000_000)
        email = str(item.get("email", "someone@example.com"))
        account = Account(provider, str(item.get("key", "")), 4000 + number, email, credit)
        for key in item.get("ssh_keys") or []:
            account.ssh_keys.append(
                {"id": account.next_key_id, "public_key": str(key), "created_at": "2026-01-01T00:00:00"}
            )
            account.next_key_id += 1
        made.append(account)
    return made
