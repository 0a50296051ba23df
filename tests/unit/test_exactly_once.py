"""One live pod per run, whatever happens between any two steps: a state machine over a provider that misbehaves.

Every call of a provider or of the ledger, and every pause, is a point at which the process may die (it then does
nothing any more, not even clean up) or at which somebody else may act: another controller, the guard, a sweep. The
provider loses answers, fails after it has done what was asked, and shows new pods late; the actors' clock jumps.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fakes import ADDRESS, FakeLogin, offer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pennypod.errors import AmbiguousError, NoCapacityError, NotReadyError, PennypodError, TransientError
from pennypod.guard import Guard
from pennypod.ledger import AttemptRecord, AttemptState, Ledger, Outcome, RunRecord, open_ledger
from pennypod.model.ids import Lease, parse_lease
from pennypod.model.offer import Need, Offer, Order
from pennypod.model.pod import Pod, PodState
from pennypod.providers.base import Timing
from pennypod.receipts import check_chain, content_problems
from pennypod.rental import Rental, RentRequest
from pennypod.settings import Settings
from pennypod.sweep import survey, sweep

RUN = "demo-1201-abcde"
FOREIGN = "somebody-else"
LAG_S = 4.0
LIFE_S = 20_000.0


class Dead(BaseException):
    """The process was killed. No handler of ours catches it, and nothing it would still do reaches the world."""


def quiet(*_args: object, **_numbers: object) -> None:
    return None


class Time:
    """What really passes, and what the actors' clock shows of it."""

    def __init__(self) -> None:
        self.true = 0.0
        self.shift = 1_764_600_000.0

    def now(self) -> float:
        return self.true + self.shift

    def sleep(self, seconds: float) -> None:
        self.true += max(seconds, 0.001)


class Vendor:
    """Pods in a dict, faults by name. It notices by itself when one run has two pods."""

    name = "fake"
    timing = Timing(
        listing_lag_s=LAG_S, absence_checks=3, absence_spacing_s=1, poll_s=1, start_patience_s=30, start_limit_s=60
    )

    def __init__(self, time: Time) -> None:
        self.time = time
        self.live: dict[str, Pod] = {}
        self.shown_from: dict[str, float] = {}
        self.ever: list[str] = []
        self.faults: dict[str, list[str]] = {"rent": [], "list": [], "get": [], "destroy": []}

    def offers(self, need: Need) -> list[Offer]:
        raise NotImplementedError

    def prepare(self, image: str, on_progress: Callable[[str], None]) -> None:
        raise NotImplementedError

    def rent(self, offer: Offer, order: Order) -> str:
        fault = self._fault("rent")
        if fault == "refused":
            raise NoCapacityError("none left")
        if fault == "lost request":
            raise AmbiguousError("no answer")
        twins = [pod.name for pod in self.live.values() if run_of(pod) == RUN]
        assert not twins, f"a second pod was rented while {twins} lived"
        pod_id = f"pod-{len(self.ever) + 1}"
        self.live[pod_id] = Pod("fake", pod_id, order.name, PodState.RUNNING, self.time.now(), 200_000, address=ADDRESS)
        self.shown_from[pod_id] = self.time.true + (LAG_S - 0.5 if fault.startswith("late") else 0.0)
        self.ever.append(pod_id)
        if fault in ("lost reply", "late and lost"):
            raise AmbiguousError("the answer was lost")
        return pod_id

    def pods(self) -> list[Pod]:
        if self._fault("list"):
            raise TransientError("502")
        return [pod for pod_id, pod in self.live.items() if self.shown_from[pod_id] <= self.time.true]

    def pod(self, pod_id: str) -> Pod | None:
        if self._fault("get"):
            raise TransientError("502")
        return self.live.get(pod_id)

    def destroy(self, pod_id: str) -> None:
        pod = self.live.get(pod_id)
        assert pod is None or parse_lease(pod.name) is not None, f"{pod.name} is not ours"
        fault = self._fault("destroy")
        if fault == "error":
            raise TransientError("500")
        if fault != "nothing done":
            self.live.pop(pod_id, None)
        if fault == "lost reply":
            raise TransientError("the answer was lost")

    def host_keys(self, *_args: str) -> list[str]:
        return []

    def balance_micros(self) -> int | None:
        return None

    def _fault(self, call: str) -> str:
        return self.faults[call].pop(0) if self.faults[call] else ""


def run_of(pod: Pod) -> str | None:
    lease = parse_lease(pod.name)
    return None if lease is None else lease.run


Moment = int | str
"""A step by its number, or the one before the first call of that name."""


class Process:
    """One process: what it calls goes through here, so that it can die, or others can act, at any of its steps."""

    def __init__(
        self, dies_at: Moment | None = None, meanwhile: Callable[[], None] | None = None, at: Moment = 0
    ) -> None:
        self.step = 0
        self.dead = False
        self._dies_at = dies_at
        self._meanwhile = meanwhile
        self._at = at

    def point(self, before: str = "") -> None:
        if self.dead:
            raise Dead
        self.step += 1
        now = (self.step, before)
        if self._meanwhile is not None and self._at in now:
            act, self._meanwhile = self._meanwhile, None
            act()
        if self._dies_at in now:
            self.dead = True
            raise Dead

    def through(self, inner: Any) -> Any:
        return _Through(self, inner)


class _Through:
    def __init__(self, process: Process, inner: Any) -> None:
        self._process = process
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._process.point(before=name)
            answer = found(*args, **kwargs)
            self._process.point()
            return answer

        return call


class Books:
    """The ledger, and a note of whatever it lets happen that must never happen."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.wrong: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def open_attempt(self, lease: Lease, offer: Offer, **options: Any) -> AttemptRecord:
        run = self._ledger.run(lease.run)
        attempt = self._ledger.open_attempt(lease, offer, **options)
        if run.fenced_reason is not None or run.closed is not None:
            self.wrong.append(f"{lease.name} was rented for a run that had been taken away: {run.fenced_reason}")
        if options["controller"] != run.controller:
            self.wrong.append(f"{lease.name} was rented by {options['controller']} for a run of {run.controller}")
        return attempt

    def take_over(self, run: str, controller: str, alive: Callable[[str], bool]) -> RunRecord:
        under_way = (AttemptState.INTENT, AttemptState.RENTED)
        renters = [item.renter for item in self._ledger.attempts(run) if item.state in under_way and alive(item.renter)]
        before = self._ledger.take_over(run, controller, alive)
        if renters:
            self.wrong.append(f"{controller} took the run over while {renters} rented for it")
        return before


class NoWeights:
    """Nothing to save, nothing to renew."""

    def reserve_s(self, _run: str) -> float:
        return 0.0

    def release(self, attempts: Sequence[AttemptRecord], _report: object) -> Sequence[AttemptRecord]:
        return attempts

    def look_after(self, *_args: object, **_options: object) -> None:
        return None


CREATE_FAULTS = ["refused", "lost request", "lost reply", "late", "late and lost"]
CALLS = st.sampled_from(
    ["attempts", "open_attempt", "rent", "record_pod", "pod", "record_ready", "destroy", "record_gone"]
)
POINTS = st.one_of(st.none(), st.integers(1, 100), CALLS)
MOMENTS = st.one_of(st.integers(1, 60), CALLS)
INTERRUPTIONS = st.sampled_from(["none", "guard", "sweep", "take over", "rent as well", "jump"])


class ExactlyOnce(RuleBasedStateMachine):
    """Controllers of one run come, die and are followed by others; the guard and sweeps do their work or die, too."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where the system has such a folder: a thousand keys and reports are written and synced.
        self.folder = TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        home = Path(self.folder.name)
        self.settings = Settings(home=home, database_url="sqlite://")
        self.ledger: Ledger = open_ledger(self.settings)
        self.elsewhere: Ledger = open_ledger(Settings(home / "elsewhere", "sqlite://"))
        self.time = Time()
        self.vendor = Vendor(self.time)
        self.numbers = itertools.count(1)
        self.alive: set[str] = set()
        self.workers: set[str] = set()
        self.books: Any = Books(self.ledger)
        self.vendor.live["foreign"] = Pod("fake", "foreign", FOREIGN, PodState.RUNNING, self.time.now(), 200_000)
        self.vendor.shown_from["foreign"] = 0.0

    @initialize(
        keep=st.sampled_from([False, False, True]),
        fault=st.sampled_from(["", *CREATE_FAULTS]),
        dies_at=st.one_of(st.none(), POINTS),
        # Above all: a create call that is answered after its run was given up.
        meanwhile=st.one_of(st.just("guard"), INTERRUPTIONS),
        at=st.one_of(st.just("rent"), MOMENTS),
    )
    def begin(self, keep: bool, fault: str, dies_at: Moment | None, meanwhile: str, at: Moment) -> None:
        first = self.new_controller()
        record = RunRecord(RUN, "demo", first, self.time.now(), self.folder.name, keep_on_disconnect=keep)
        self.ledger.open_run(record)
        self.deadline = self.time.now() + LIFE_S
        self.ledger.set_plan(RUN, deadline=self.deadline, worst_case_micros=1)
        if fault:
            self.the_next_create_goes_wrong(fault)
        process = Process(dies_at, self.interruption(meanwhile, first), at)
        self.live_or_die(first, process, lambda: self.rent(process, first))

    def teardown(self) -> None:
        """Whatever has happened: after the faults and the deadline, everything is gone and proven."""
        try:
            self.alive.clear()
            assert not self.workers
            for faults in self.vendor.faults.values():
                faults.clear()
            self.time.shift += max(0.0, self.deadline - self.time.now()) + LIFE_S
            for _ in range(4):
                self.guard(Process())
                self.sweep(Process(), self.ledger)
                self.time.sleep(60)
            assert list(self.vendor.live) == ["foreign"]
            attempts = self.ledger.attempts(RUN)
            assert all(attempt.final for attempt in attempts)
            proven = [receipt for ledger in (self.ledger, self.elsewhere) for _, _, receipt in ledger.receipts()[1]]
            assert {receipt["pod_id"] for receipt in proven} >= set(self.vendor.ever)
            assert [content_problems(receipt) for receipt in proven] == [[]] * len(proven)
            for ledger in (self.ledger, self.elsewhere):
                assert check_chain(*ledger.receipts()) == []
            assert self.ledger.run(RUN).closed is not None
        finally:
            self.ledger.close()
            self.elsewhere.close()
            self.folder.cleanup()

    # --- what holds at any time -----------------------------------------------------------------------------------

    @invariant()
    def what_is_called_gone_is_gone(self) -> None:
        for attempt in self.ledger.attempts(RUN):
            if attempt.state is AttemptState.GONE:
                assert attempt.pod_id not in self.vendor.live
                assert attempt.receipt is not None

    @invariant()
    def nothing_was_let_happen_that_must_not(self) -> None:
        assert not self.books.wrong, self.books.wrong

    @invariant()
    def nobody_elses_pod_is_touched(self) -> None:
        assert "foreign" in self.vendor.live

    @invariant()
    def at_most_one_attempt_may_bill(self) -> None:
        assert sum(not attempt.final for attempt in self.ledger.attempts(RUN)) <= 1

    # --- what goes wrong ------------------------------------------------------------------------------------------

    @rule(fault=st.sampled_from(CREATE_FAULTS))
    def the_next_create_goes_wrong(self, fault: str) -> None:
        self.vendor.faults["rent"].append(fault)

    @rule(fault=st.sampled_from(["error", "nothing done", "lost reply"]), times=st.integers(1, 30))
    def the_next_destroys_go_wrong(self, fault: str, times: int) -> None:
        self.vendor.faults["destroy"] += [fault] * times

    @rule(call=st.sampled_from(["list", "get"]), times=st.integers(1, 12))
    def the_next_looks_go_wrong(self, call: str, times: int) -> None:
        self.vendor.faults[call] += ["error"] * times

    @rule(seconds=st.sampled_from([-7200.0, -30.0, 30.0, 900.0]))
    def the_clock_is_set(self, seconds: float) -> None:
        self.time.shift += seconds

    @rule(seconds=st.sampled_from([1.0, 20.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.time.sleep(seconds)

    # --- who acts -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), dies_at=POINTS, meanwhile=INTERRUPTIONS, at=MOMENTS)
    def a_controller_rents(self, data: st.DataObject, dies_at: Moment | None, meanwhile: str, at: Moment) -> None:
        controller = data.draw(st.sampled_from(sorted(self.alive)))
        process = Process(dies_at, self.interruption(meanwhile, controller), at)
        self.live_or_die(controller, process, lambda: self.rent(process, controller))

    @rule(dies_at=POINTS, meanwhile=INTERRUPTIONS, at=MOMENTS)
    def another_controller_resumes(self, dies_at: Moment | None, meanwhile: str, at: Moment) -> None:
        controller = self.new_controller()
        process = Process(dies_at, self.interruption(meanwhile, controller), at)
        self.live_or_die(controller, process, lambda: self.resume(process, controller))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), dies_at=POINTS, meanwhile=INTERRUPTIONS, at=MOMENTS)
    def a_controller_tears_down(self, data: st.DataObject, dies_at: Moment | None, meanwhile: str, at: Moment) -> None:
        controller = data.draw(st.sampled_from(sorted(self.alive)))
        process = Process(dies_at, self.interruption(meanwhile, controller), at)
        self.live_or_die(controller, process, lambda: self.tear_down(process, controller))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_controller_is_killed(self, data: st.DataObject) -> None:
        self.alive.discard(data.draw(st.sampled_from(sorted(self.alive))))

    @rule(dies_at=POINTS)
    def the_guard_looks(self, dies_at: Moment | None) -> None:
        self.until_dead(lambda: self.guard(Process(dies_at)))

    @rule(dies_at=POINTS, here=st.booleans())
    def somebody_sweeps(self, dies_at: Moment | None, here: bool) -> None:
        self.until_dead(lambda: self.sweep(Process(dies_at), self.ledger if here else self.elsewhere))

    # --- how ------------------------------------------------------------------------------------------------------

    def new_controller(self) -> str:
        controller = f"{next(self.numbers)}:1"
        self.alive.add(controller)
        return controller

    def interruption(self, kind: str, controller: str) -> Callable[[], None] | None:
        """What somebody else does between two steps of a controller. A process that is interrupted has not died."""

        def take_over() -> None:
            # The command has died, and a worker of it that rents may have outlived it.
            self.alive.discard(controller)
            other = self.new_controller()
            process = Process()
            self.live_or_die(other, process, lambda: self.resume(process, other))

        def guard() -> None:
            # Its controller's command has died, while the worker that rents is still inside a call.
            command_died = self.ledger.run(RUN).controller == controller
            self.guard(Process(), dead={controller} if command_died else set())

        def rent_as_well() -> None:
            # The same order, carried out twice at once.
            with contextlib.suppress(PennypodError):
                self.rent(Process(), controller)

        def jump() -> None:
            self.time.shift += 900

        acts: dict[str, Callable[[], None]] = {
            "guard": guard,
            "sweep": lambda: self.sweep(Process(), self.elsewhere),
            "take over": take_over,
            "rent as well": rent_as_well,
            "jump": jump,
        }
        return acts.get(kind)

    def live_or_die(self, controller: str, process: Process, act: Callable[[], None]) -> None:
        before = len(self.vendor.ever)
        self.until_dead(act)
        if process.dead:
            self.alive.discard(controller)
        else:
            self.has_answered_for(self.vendor.ever[before:])

    def has_answered_for(self, made: Sequence[str]) -> None:
        """Whoever rents and lives leaves no pod that is not on the books: not even one that came too late."""
        on_books = {attempt.pod_id or attempt.lease_name for attempt in self.ledger.pending_attempts()}
        for pod in (self.vendor.live[pod_id] for pod_id in made if pod_id in self.vendor.live):
            assert {pod.pod_id, pod.name} & on_books, f"{pod.name} was left alone"

    def until_dead(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(Dead, PennypodError):
            act()

    def rental(self, process: Process) -> Rental:
        providers, through = {"fake": process.through(self.vendor)}, process.through(self.books)
        # Their names are not those of this machine's processes, so the machine must not be asked whether they live.
        return Rental(providers, through, process.through(self.time), alive=self.lives)

    def lives(self, name: str) -> bool:
        return name in self.alive | self.workers

    def rent(self, process: Process, controller: str) -> None:
        """By a worker of the controller's, as Ansible forks one for each task; it may outlive the command."""
        worker = f"{next(self.numbers)}:1"
        request = RentRequest(
            RUN,
            [offer(1), offer(2)],
            {},
            20,
            self.deadline,
            "key",
            renter=worker,
            controller=controller,
        )
        self.workers.add(worker)
        try:
            self.rental(process).rent(request, FakeLogin(), quiet, process.point)
        finally:
            self.workers.discard(worker)

    def resume(self, process: Process, controller: str) -> None:
        process.through(self.books).take_over(RUN, controller, self.lives)
        try:
            self.rental(process).resume(RUN, "key", FakeLogin(), quiet, pinned=[], limit_s=60)
        except NotReadyError:
            self.rent(process, controller)

    def tear_down(self, process: Process, controller: str) -> None:
        self.ledger.raise_if_fenced(RUN, controller)
        ledger = process.through(self.books)
        for attempt in ledger.attempts(RUN):
            self.rental(process).destroy(attempt, outcome="done", reason="over", report=quiet, patience_s=20)
        ledger.close_run(RUN, Outcome.SUCCEEDED, "over", self.time.now())

    def guard(self, process: Process, dead: set[str] | None = None) -> None:
        nothing: Any = NoWeights()
        guard = Guard(
            self.settings,
            process.through(self.books),
            self.rental(process),
            process.through(self.time),
            quiet,
            escrow=nothing,
            renewals=nothing,
        )
        controller = self.ledger.run(RUN).controller
        guard.tick(controller, controller in self.alive and controller not in (dead or set()))

    def sweep(self, process: Process, ledger: Ledger) -> None:
        providers: Any = {"fake": process.through(self.vendor)}
        through, clock = process.through(ledger), process.through(self.time)
        found = survey(providers, through, clock.now())
        sweep(found, providers, through, clock, dry_run=False, report=quiet, patience_s=20)


EXAMPLES = int(os.environ.get("PENNYPOD_EXAMPLES", "60"))
ExactlyOnce.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
# Many examples need more than the five minutes that the suite allows a test.
TestExactlyOnce = pytest.mark.timeout(300 + 5 * EXAMPLES)(ExactlyOnce.TestCase)


def test_the_machine_would_notice_a_second_pod() -> None:
    """A rule test is first seen to fail on a bad sample."""
    vendor = Vendor(Time())
    order = Order(Lease(RUN, 1, 1, "aaaaa").name, "", 1, "key", 1, {})
    vendor.rent(offer(1), order)
    try:
        vendor.rent(offer(1), order)
    except AssertionError:
        return
    raise AssertionError("it was not noticed")
