"""A controller that dies at every step of a run in turn, in the simulator's own time and with the default settings.

Ghost pods have no SSH, so thousands of runs fit into minutes, and hours of simulated time pass in none. A step is one
call to the provider: the controller dies right before it is sent, or right after its answer came and before it was
acted on. In between it only writes to its ledger. Then one survivor is left: the guard, a sweep with the ledger, or a
sweep on another machine that has only the keys.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from chaos.cells import BACKOFF_S, LISTING_LAG_S, PROVIDERS, Ring
from chaos.verdict import Result
from fakes import FakeLogin
from pennypod.clock import Clock
from pennypod.errors import PennypodError
from pennypod.guard import Guard
from pennypod.ledger import Ledger, RunRecord, open_ledger
from pennypod.model.ids import parse_lease
from pennypod.model.offer import Need
from pennypod.proof import DESTROY_CALLS_PER_HOUR
from pennypod.providers.base import Provider
from pennypod.providers.http import Http, Pacing
from pennypod.providers.runpod import RunpodProvider
from pennypod.providers.vast import SPACING_S, VastProvider
from pennypod.receipts import check_chain
from pennypod.rental import Rental, RentRequest
from pennypod.sentinel import INTERVAL_S, Look, StoppedError, keep_watch, look
from pennypod.settings import Settings
from simulated import KEYS, PUBLIC_KEY, SimulatedClock, Simulator

LEASE_S = 1800.0
WORK_S = 600.0
GUARD_PAUSE_S = 10.0
"""The guard's longest pause between two tries."""
MOST_DEATHS = 24
SURVIVORS = ("guard", "sweep", "sweep elsewhere")
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"


class Dead(BaseException):
    """The controller is no more; no handler of its own sees that."""


@dataclass(slots=True)
class Deathtrap:
    """Counts calls; at call number `at` the caller dies, before it is sent or after it was answered."""

    at: int = 0
    after: bool = False
    calls: int = 0

    def before_call(self) -> None:
        self.calls += 1
        if self.calls == self.at and not self.after:
            raise Dead

    def after_call(self) -> None:
        if self.calls == self.at and self.after:
            raise Dead


class _MortalSession(requests.Session):
    def __init__(self, trap: Deathtrap) -> None:
        super().__init__()
        self._trap = trap

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        self._trap.before_call()
        answer = super().request(*args, **kwargs)
        try:
            self._trap.after_call()
        except Dead:
            answer.close()
            raise
        return answer


@dataclass(frozen=True, slots=True)
class GhostFault:
    """What goes wrong for the run and for its survivors, and how many seconds more than usual that may take.

    With `from_death`, it begins when the controller dies and is over after `lasts_s`. `stride`: a death at every so
    many steps.
    """

    endpoint: str = ""
    fault: str = ""
    lasts_s: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    only: str = ""
    from_death: bool = False
    stride: int = 3


# Named by what happens; `get` is Vast's `show`.
FAULTS: dict[str, GhostFault] = {
    "none": GhostFault(stride=1),
    "create: reply lost": GhostFault("create", "lost_reply"),
    "create: error after it took effect": GhostFault("create", "error_after_commit", options=(("status", 502),)),
    "create: error": GhostFault("create", "error", options=(("status", 500), ("nth", 1))),
    "create: half an answer": GhostFault("create", "malformed"),
    "create: no capacity": GhostFault("create", "no_capacity", options=(("nth", (1, 2)),)),
    "create: too many calls": GhostFault("create", "rate_limited", options=(("nth", 1),)),
    "create: no credit": GhostFault("create", "low_balance", options=(("nth", 1),)),
    "create: offer gone": GhostFault("create", "vanished_offer", options=(("nth", 1),)),
    "create: an error and yet a contract": GhostFault("create", "error_with_id", only="vast"),
    "pod: stuck in loading": GhostFault("create", "stuck_loading", options=(("nth", 1),)),
    "pod: slow to load": GhostFault("create", "slow_loading", options=(("seconds", 120),)),
    "pod: image cannot be pulled": GhostFault("create", "pull_error", options=(("nth", 1),)),
    "pod: starts over and over": GhostFault("create", "restart_loop", options=(("nth", 1),)),
    "pod: exits by itself": GhostFault("create", "exit_after", options=(("seconds", 60),)),
    "pod: taken back": GhostFault("create", "evict_after", options=(("seconds", 60),)),
    "pod: host offline": GhostFault("create", "offline_after", options=(("seconds", 60),)),
    "list: shows a new pod late": GhostFault("create", "list_lag", options=(("seconds", 25),)),
    "list: shows an ended pod on": GhostFault("create", "gone_lag", options=(("seconds", 60),)),
    "list: errors": GhostFault("list", "error", 120, (("status", 503), ("probability", 0.5))),
    "list: half an answer": GhostFault("list", "malformed", 120, (("probability", 0.5),)),
    "list: too many calls": GhostFault("list", "rate_limited", 120, (("probability", 0.5), ("retry_after", 3))),
    "get: errors": GhostFault("get", "error", 120, (("status", 500), ("probability", 0.5))),
    "get: no answer": GhostFault("get", "lost_reply", 120, (("probability", 0.5),)),
    "destroy: success, and nothing happens": GhostFault("destroy", "destroy_noop", 300, (("times", 3),)),
    "destroy: no answer": GhostFault("destroy", "lost_reply", 60, (("times", 3),)),
    "destroy: errors": GhostFault("destroy", "error", 300, (("status", 504), ("times", 12))),
    "destroy: success, and nothing happens, for an hour": GhostFault(
        "destroy", "destroy_noop", 3600, from_death=True, stride=9
    ),
    "everything: no service for ten minutes": GhostFault("*", "error", 600, (("status", 503),), from_death=True),
    "everything: errors now and then": GhostFault("*", "error", 300, (("status", 502), ("probability", 0.25))),
}


@dataclass(frozen=True, slots=True)
class GhostCell:
    """All steps of a run, with one fault, at one provider, for one survivor."""

    fault: str
    provider: str
    survivor: str

    seed: int = 1

    @property
    def name(self) -> str:
        return f"every step / {self.fault} / {self.provider} / {self.survivor}"


def ghost_matrix() -> list[GhostCell]:
    return [
        GhostCell(name, provider, survivor)
        for name, fault in FAULTS.items()
        for provider in PROVIDERS
        for survivor in SURVIVORS
        if fault.only in ("", provider)
    ]


@dataclass(slots=True)
class Death:
    """What one death showed. Seconds are simulated."""

    step: str
    overspend_s: float = 0.0
    overspend_micros: int = 0
    micros_per_s: float = 0.0
    lease_left_s: float = 0.0
    bound_s: float = 0.0
    pods: int = 0
    receipts: int = 0
    problems: list[str] = field(default_factory=list)


def play_ghosts(cell: GhostCell, folder: Path, sim: Simulator) -> Result:
    """All deaths of a cell as one row; its seconds and dollars are the worst death's."""
    deaths = all_deaths(cell, folder, sim)
    worst = max(deaths, key=lambda death: (death.overspend_s, death.bound_s))
    fault = cell.fault if cell.fault != "none" else "no fault"
    row = blank_ghosts(cell)
    row.event, row.moment = f"dies at every step, {fault}", worst.step
    row.lease_left_s, row.bound_s = worst.lease_left_s, worst.bound_s
    row.overspend_s, row.overspend_micros = worst.overspend_s, max(death.overspend_micros for death in deaths)
    row.bound_micros = round(worst.bound_s * max((death.micros_per_s for death in deaths), default=0.0))
    row.pods, row.receipts = sum(death.pods for death in deaths), sum(death.receipts for death in deaths)
    row.open, row.lives = row.pods - row.receipts, len(deaths)
    row.problems = [f"{death.step}: {problem}" for death in deaths for problem in death.problems]
    return row


def blank_ghosts(cell: GhostCell) -> Result:
    ring = Ring.GUARD if cell.survivor == "guard" else Ring.SWEEP
    group = f"controller dies at every step, left: {cell.survivor}"
    row = Result(cell.name, group, "", "", cell.provider, cell.seed, clock="simulated", ring=ring)
    row.to_deadline = cell.survivor != "guard"
    return row


def all_deaths(cell: GhostCell, folder: Path, sim: Simulator) -> list[Death]:
    """One life without a death to count the steps, then one death at each of them; with a fault, at every third."""
    numbers = itertools.count(cell.seed)
    whole = _Life(cell, folder, sim, next(numbers), Deathtrap())
    deaths = [whole.play("no death")]
    # A pod that never comes up is asked for hundreds of times: the same step again and again.
    stride = max(FAULTS[cell.fault].stride, 2 * whole.trap.calls // MOST_DEATHS)
    start = SURVIVORS.index(cell.survivor) % stride
    for at, after in itertools.islice(_steps(whole.trap.calls), start, None, stride):
        life = _Life(cell, folder, sim, next(numbers), Deathtrap(at, after))
        deaths.append(life.play(f"{'after' if after else 'before'} call {at}"))
    return deaths


def _steps(calls: int) -> Iterator[tuple[int, bool]]:
    for at in range(1, calls + 1):
        yield at, False
        yield at, True


class _Timer(SimulatedClock):
    """The simulator's time, and one thing that happens at a moment of it, however long the sleep over that moment."""

    _due = math.inf

    def at(self, moment: float, what: Callable[[], None]) -> None:
        self._due, self._what = moment, what

    def sleep(self, seconds: float) -> None:
        before = self._due - self.now()
        if before <= seconds:
            super().sleep(before)
            self._due = math.inf
            self._what()
            seconds -= before
        super().sleep(seconds)


class _Life:
    """One run with its own ledger, and what comes after it."""

    def __init__(self, cell: GhostCell, folder: Path, sim: Simulator, number: int, trap: Deathtrap) -> None:
        self.cell, self.sim, self.trap = cell, sim, trap
        self.run = f"ghost-0101-{_code(number)}"
        self.chance = random.Random(number)
        self.home = folder / self.run
        self.home.mkdir(parents=True)
        self.clock = _Timer(sim)
        self.deadline = 0.0
        self._reset_faults()

    def _reset_faults(self) -> None:
        self.sim.clear_faults()
        if not FAULTS[self.cell.fault].from_death:
            self._set_fault()

    def _set_fault(self) -> None:
        fault = FAULTS[self.cell.fault]
        if not fault.fault:
            return
        endpoint = "show" if fault.endpoint == "get" and self.cell.provider == "vast" else fault.endpoint
        self.sim.fault(f"{self.cell.provider}.{endpoint}", fault.fault, **dict(fault.options))

    def _providers(self, session: Callable[[], requests.Session]) -> dict[str, Provider]:
        vast = Http("vast", self.sim.url, KEYS["vast"], self.clock, session=session(), pacing=Pacing(SPACING_S))
        runpod = Http("runpod", self.sim.url, KEYS["runpod"], self.clock, session=session())
        found: dict[str, Provider] = {
            "vast": VastProvider(vast, self.clock),
            "runpod": RunpodProvider(runpod, self.clock),
        }
        return {self.cell.provider: found[self.cell.provider]}

    def _ledger(self, home: Path) -> Ledger:
        home.mkdir(exist_ok=True)
        return open_ledger(Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}"))

    def play(self, step: str) -> Death:
        """Live, and leave what is not done to the survivor: after a death, or when the playbook had to give up."""
        try:
            self.live()
        except Dead:
            died_at: float | None = self.clock.now()
        else:
            died_at = self.clock.now() if self._pods(live=True) else None
        if died_at is not None:
            self.survive()
        return self.verdict(step, died_at)

    def live(self) -> None:
        """What the modules of a playbook do, in their order. Raises Dead at its step."""
        ledger = self._ledger(self.home)
        try:
            providers = self._providers(lambda: _MortalSession(self.trap))
            self.deadline = self.clock.now() + LEASE_S
            ledger.open_run(RunRecord(self.run, "ghost", "1:1", self.clock.now(), str(self.home / "artifacts")))
            ledger.set_plan(self.run, deadline=self.deadline, worst_case_micros=1_000_000)
            rental = Rental(providers, ledger, self.clock)
            try:
                self._rent(providers, rental)
                self.clock.sleep(WORK_S)
                reason = "the run is over"
            except PennypodError as exc:
                reason = str(exc)
            for attempt in ledger.attempts(self.run):
                try:
                    rental.destroy(attempt, outcome="done", reason=reason, report=_quiet)
                except PennypodError:
                    break  # the playbook fails here, ends, and leaves the rest to the guard
        finally:
            ledger.close()

    def _rent(self, providers: dict[str, Provider], rental: Rental) -> None:
        need = Need(gpu=("RTX 4090", "RTX 3090", "L4", "A40"))
        offers = sorted(
            providers[self.cell.provider].offers(need), key=lambda offer: (offer.price_micros_per_h, offer.offer_id)
        )
        request = RentRequest(self.run, offers[:4], {}, 20, self.deadline, PUBLIC_KEY, "1:1")
        rental.rent(request, FakeLogin(), _quiet, lambda: None)

    # --- the survivors ------------------------------------------------------------------------------------------------

    def survive(self) -> None:
        """Until no pod of the run is left and everything is on the books, but no longer than the bound and an hour."""
        fault = FAULTS[self.cell.fault]
        if fault.from_death:
            self._set_fault()
            self.clock.at(self.clock.now() + fault.lasts_s, self.sim.clear_faults)
        home = self.home / "elsewhere" if self.cell.survivor == "sweep elsewhere" else self.home
        ledger = self._ledger(home)
        try:
            providers = self._providers(requests.Session)
            limit = self.clock.now() + self._bound_s(self.clock.now()) + 3600.0
            if self.cell.survivor == "guard":
                self._guard(ledger, providers, limit)
            else:
                self._watch(ledger, home, providers, limit)
        finally:
            ledger.close()

    def _watch(self, ledger: Ledger, home: Path, providers: dict[str, Provider], limit: float) -> None:
        """The sentinel's own loop; its timer knows nothing of deadlines, so it begins whenever it begins."""
        settings = Settings(home=home, database_url="")

        def take_look(clock: Clock) -> Look:
            seen = look(providers, lambda: ledger, settings, clock)
            over = clock.now() > self.deadline + LISTING_LAG_S and seen.complete and not self._pods(live=True)
            if over or clock.now() > limit:
                raise StoppedError
            return seen

        self.clock.sleep(self.chance.uniform(0.0, INTERVAL_S))
        keep_watch(take_look, self.clock, INTERVAL_S, _quiet)

    def _guard(self, ledger: Ledger, providers: dict[str, Provider], limit: float) -> None:
        """The guard's own pauses, in simulated time."""
        settings = Settings(home=self.home, database_url="")
        guard = Guard(settings, ledger, Rental(providers, ledger, self.clock), self.clock, _quiet)
        failures = 0
        while self.clock.now() < limit:
            try:
                if not guard.tick("1:1", controller_alive=False):
                    return
            except PennypodError:
                pass
            failures += 1
            self.clock.sleep(min(2.0**failures, GUARD_PAUSE_S))

    # --- what it showed -----------------------------------------------------------------------------------------------

    def _pods(self, *, live: bool = False) -> list[dict[str, Any]]:
        pods = self.sim.live() if live else self.sim.ever()
        return [pod for pod in pods if (lease := parse_lease(pod["name"])) is not None and lease.run == self.run]

    def _bound_s(self, died_at: float) -> float:
        lasts = FAULTS[self.cell.fault].lasts_s
        if self.cell.survivor == "guard":
            return LISTING_LAG_S + BACKOFF_S + lasts
        return max(0.0, self.deadline - died_at) + INTERVAL_S + LISTING_LAG_S + lasts

    def verdict(self, step: str, died_at: float | None) -> Death:
        death = Death(step)
        pods = self._pods()
        death.pods = len(pods)
        for earlier, later in itertools.pairwise(pods):
            if earlier["gone_at"] is None or earlier["gone_at"] > later["created"]:
                death.problems.append(f"two pods at once: {earlier['name']} and {later['name']}")
        if left := self._pods(live=True):
            death.problems.append(f"live in the end: {[pod['name'] for pod in left]}")
        death.micros_per_s = max((_micros_per_s(pod, self.clock.now()) for pod in pods), default=0.0)
        self._read_ledger(death, pods)
        self._count_destroys(death, pods)
        if died_at is None:
            return death
        death.lease_left_s = round(self.deadline - died_at, 1)
        death.bound_s = round(self._bound_s(died_at), 1)
        after = [pod for pod in pods if pod["gone_at"] is None or pod["gone_at"] > died_at]
        if after:
            last = max(pod["gone_at"] or self.clock.now() for pod in after)
            death.overspend_s = round(last - died_at, 1)
            death.overspend_micros = sum(_micros_after(pod, died_at, self.clock.now()) for pod in after)
            if death.overspend_s > death.bound_s:
                death.problems.append(f"{death.overspend_s} s after the death, bound {death.bound_s} s")
        return death

    def _count_destroys(self, death: Death, pods: list[dict[str, Any]]) -> None:
        """Nobody hammers a provider that does nothing, also not several of us together."""
        rows = self.sim.get(f"requests?endpoint={self.cell.provider}.destroy")["requests"]
        for pod in pods:
            times = [row["t"] for row in rows if pod["id"] in row["path"]]
            most = max((sum(0 <= later - first < 3600 for later in times) for first in times), default=0)
            if most > DESTROY_CALLS_PER_HOUR:
                death.problems.append(f"{most} destroy calls for {pod['name']} within an hour")

    def _read_ledger(self, death: Death, pods: list[dict[str, Any]]) -> None:
        """Each pod has a receipt in the chain of the ledger of whoever ended it, or is open on the books of its run."""
        proven: set[str] = set()
        still_open: set[str] = set()
        for home in (self.home, self.home / "elsewhere"):
            if not home.exists():
                continue
            ledger = self._ledger(home)
            name, rows = ledger.receipts()
            death.problems += check_chain(name, rows)
            proven |= {str(receipt["pod_name"]) for _, _, receipt in rows}
            still_open |= {attempt.lease_name for attempt in ledger.pending_attempts()}
            ledger.close()
        names = [str(pod["name"]) for pod in pods]
        death.receipts = len(proven.intersection(names))
        death.problems += [f"no receipt for {name}" for name in names if name not in proven | still_open]
        if (
            self.cell.survivor != "sweep elsewhere"
        ):  # which ends pods, and cannot write into the books of a lost machine
            death.problems += [f"open in the end: {name}" for name in names if name not in proven]


def _micros_after(pod: dict[str, Any], since: float, now: float) -> int:
    """The share of a pod's cost that fell after a moment; its price hardly changes while it is up."""
    return round(_micros_per_s(pod, now) * max(0.0, (pod["gone_at"] or now) - max(since, pod["created"])))


def _micros_per_s(pod: dict[str, Any], now: float) -> float:
    return float(pod["cost_micros"]) / max(1.0, (pod["gone_at"] or now) - pod["created"])


def _code(number: int) -> str:
    digits = ""
    for _ in range(5):
        number, rest = divmod(number, 32)
        digits = _BASE32[rest] + digits
    return digits


def _quiet(*_args: object, **_numbers: object) -> None:
    return None
