"""The guard ends what its controller leaves behind, and nothing else."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from pennypod import podwork, processes
from pennypod.errors import GuardError, TransientError
from pennypod.events import EVENTS_FILE, Events
from pennypod.guard import Guard, ensure_guard, guard_is_alive, watch
from pennypod.ledger import AttemptRecord, AttemptState, Outcome, RunRecord, open_ledger
from pennypod.model.admission import Caps
from pennypod.model.ids import Lease
from pennypod.podwork import GuardWatch
from pennypod.rental import Rental, RentRequest
from pennypod.settings import Settings

CONTROLLER = "4194304:1"  # above the largest pid there can be
RUN = "demo-1201-abcde"


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.provider = FakeProvider(self.clock)
        self.settings = Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
        self.ledger = open_ledger(self.settings)
        self.rental = Rental({"fake": self.provider}, self.ledger, self.clock)
        self.lines: list[str] = []
        self.guard = Guard(self.settings, self.ledger, self.rental, self.clock, self.lines.append)
        self.artifacts = tmp_path / "artifacts"

    def open_run(self, run: str = RUN, *, controller: str = CONTROLLER, keep: bool = False) -> None:
        record = RunRecord(run, "demo", controller, self.clock.now(), str(self.artifacts / run))
        self.ledger.open_run(replace(record, keep_on_disconnect=keep))

    def rent(self, run: str = RUN, seconds: float = 600) -> None:
        deadline = self.clock.now() + seconds
        self.ledger.set_plan(run, deadline=deadline, worst_case_micros=1)
        request = RentRequest(run, [offer(1)], {}, 20, deadline, "key", renter=CONTROLLER)
        self.rental.rent(request, FakeLogin(), lambda *_a, **_k: None, lambda: None)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_live_controller_keeps_its_pod(world: World) -> None:
    world.open_run()
    world.rent()
    assert world.guard.tick(CONTROLLER, controller_alive=True) is True
    assert len(world.provider.live) == 1


def test_a_dead_controller_loses_its_pod_and_the_ledger_says_why(world: World) -> None:
    world.open_run()
    world.rent()
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False
    assert world.provider.live == {}
    run = world.ledger.run(RUN)
    assert run.outcome == Outcome.CANCELLED
    assert "ended before the run was over" in (run.reason or "")
    document = json.loads((world.artifacts / RUN / "run.json").read_text())
    assert (document["outcome"], document["pods_still_billing"]) == ("cancelled", 0)


def test_a_bakes_image_goes_after_its_pod_and_is_asked_for_again_until_it_is_gone(world: World) -> None:
    world.open_run()
    world.rent()
    live: list[int] = []

    def unbake(run: str) -> None:
        assert run == RUN
        live.append(len(world.provider.live))
        if len(live) == 1:
            raise TransientError("the engine is busy")

    guard = Guard(world.settings, world.ledger, world.rental, world.clock, world.lines.append, unbake=unbake)
    assert guard.tick(CONTROLLER, controller_alive=False) is True
    assert world.ledger.run(RUN).closed is None
    assert guard.tick(CONTROLLER, controller_alive=False) is False
    assert (live, world.ledger.run(RUN).outcome) == ([0, 0], Outcome.CANCELLED)


def write_protect(world: World, *, full: bool) -> None:
    """Let every write to the ledger fail, or work again. By another process: this one may open the file only once."""
    tables = ("runs", "attempts", "destroy_calls", "receipts")
    script = "".join(
        f"CREATE TRIGGER full_{table}_{verb} BEFORE {verb} ON {table}"
        " BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END;"
        if full
        else f"DROP TRIGGER full_{table}_{verb};"
        for table in tables
        for verb in ("INSERT", "UPDATE")
    )
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, str(world.settings.home / "ledger.sqlite3"), script], check=True)


def test_a_full_disk_keeps_no_pod_alive_and_the_receipt_follows(world: World) -> None:
    world.open_run()
    world.rent()
    write_protect(world, full=True)
    assert world.guard.tick(CONTROLLER, controller_alive=False) is True, "it is not over before it is written down"
    assert world.provider.live == {}
    assert any("disk is full" in line for line in world.lines)
    [attempt] = world.ledger.attempts(RUN)
    assert attempt.receipt is None
    write_protect(world, full=False)
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False
    [attempt] = world.ledger.attempts(RUN)
    assert attempt.state is AttemptState.GONE
    assert attempt.receipt is not None
    assert world.ledger.run(RUN).outcome == Outcome.CANCELLED


class Noted:
    """Renewals that only note which attempts they were shown."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        self.to_the_end = False

    def look_after(self, attempts: Iterable[AttemptRecord], deadline: float, *, to_the_end: bool) -> None:
        self.to_the_end = to_the_end
        self.shown += [attempt.id for attempt in attempts]


def renewing(world: World) -> Noted:
    noted = Noted()
    world.guard = Guard(
        world.settings,
        world.ledger,
        world.rental,
        world.clock,
        world.lines.append,
        renewals=noted,  # type: ignore[arg-type]
    )
    return noted


@pytest.mark.parametrize("keep", [False, True])
def test_the_leases_of_a_run_that_may_live_are_renewed(world: World, keep: bool) -> None:
    world.open_run(keep=keep)
    world.rent()
    noted = renewing(world)
    world.guard.tick(CONTROLLER, controller_alive=not keep)
    assert noted.shown == [1]
    assert noted.to_the_end is keep


def test_no_lease_is_renewed_for_a_run_that_was_taken_away_or_is_over(world: World) -> None:
    world.open_run()
    world.rent()
    noted = renewing(world)
    world.ledger.fence(RUN, "somebody said so")
    world.guard.tick(CONTROLLER, controller_alive=True)
    world.clock.sleep(700)  # the deadline has passed
    world.guard.tick(CONTROLLER, controller_alive=True)
    assert noted.shown == []


def test_another_controllers_pod_is_left_alone(world: World) -> None:
    world.open_run(controller="4194304:2")
    world.rent()
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False
    assert len(world.provider.live) == 1


def test_the_deadline_ends_a_pod_whose_controller_lives(world: World) -> None:
    world.open_run()
    world.rent(seconds=600)
    world.clock.sleep(601)
    world.guard.tick(CONTROLLER, controller_alive=True)
    assert world.provider.live == {}
    assert world.ledger.run(RUN).reason == "the deadline passed"


def test_a_run_that_has_used_up_its_caps_is_ended_though_its_controller_lives(world: World) -> None:
    world.open_run()
    deadline = world.clock.now() + 600
    request = RentRequest(RUN, [offer(1, 360_000)], {}, 20, deadline, "key", renter=CONTROLLER, caps=Caps(run=60_000))
    world.rental.rent(request, FakeLogin(), lambda *_a, **_k: None, lambda: None)
    (attempt,) = world.ledger.attempts(RUN)
    world.ledger.record_price(attempt.id, 3_600_000, world.clock.now())
    world.clock.sleep(59)
    assert world.guard.tick(CONTROLLER, controller_alive=True) is True
    world.clock.sleep(2)
    world.guard.tick(CONTROLLER, controller_alive=True)
    assert world.provider.live == {}
    assert "its money is used up" in (world.ledger.run(RUN).reason or "")


def test_a_run_that_asked_for_it_outlives_its_controller_until_its_deadline(world: World) -> None:
    world.open_run(keep=True)
    world.rent(seconds=600)
    assert world.guard.tick(CONTROLLER, controller_alive=False) is True
    assert len(world.provider.live) == 1
    world.clock.sleep(601)
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False
    assert world.provider.live == {}


def test_a_create_whose_id_was_never_recorded_is_found_by_its_name(world: World) -> None:
    world.open_run()
    lease = Lease(RUN, 1, int(world.clock.now() + 600), "abcde")
    world.ledger.open_attempt(lease, offer(1), renter=CONTROLLER, at=world.clock.now())
    world.provider.rent(offer(1), _order(lease.name))
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False
    assert world.provider.live == {}
    assert world.ledger.attempts(RUN)[0].state is AttemptState.GONE


def test_an_intent_that_made_nothing_is_closed(world: World) -> None:
    world.open_run()
    lease = Lease(RUN, 1, int(world.clock.now() + 600), "abcde")
    world.ledger.open_attempt(lease, offer(1), renter=CONTROLLER, at=world.clock.now())
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False
    assert world.ledger.attempts(RUN)[0].state is AttemptState.NEVER


def test_the_guard_does_not_stop_before_the_end_is_proven(world: World) -> None:
    world.open_run()
    world.rent()
    world.provider.ignored_destroys = 10_000
    assert world.guard.tick(CONTROLLER, controller_alive=False) is True
    assert world.ledger.run(RUN).closed is None
    world.provider.ignored_destroys = 0
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False
    assert world.provider.live == {}


def test_an_api_that_is_down_only_delays_the_end(world: World) -> None:
    world.open_run()
    world.rent()
    world.provider.destroy_faults = [TransientError("502")] * 1000
    assert world.guard.tick(CONTROLLER, controller_alive=False) is True
    world.provider.destroy_faults = []
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False


def test_a_guard_whose_controller_died_before_it_was_watched_pauses_between_its_tries(world: World) -> None:
    """There is no pidfd to wait on then; without a pause it would ask the provider as fast as it can."""
    world.open_run()
    world.rent()
    times: list[float] = []

    class Failing(Guard):
        def tick(self, controller: str, controller_alive: bool) -> bool:
            times.append(world.clock.now())
            assert not controller_alive
            return len(times) < 6

    guard = Failing(world.settings, world.ledger, world.rental, world.clock, world.lines.append)
    watch(guard, CONTROLLER, world.clock, world.lines.append)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses == pytest.approx([2, 4, 8, 10, 10])


def test_a_finished_run_gives_the_guard_nothing_to_do(world: World) -> None:
    world.open_run()
    world.rent()
    for attempt in world.ledger.attempts(RUN):
        world.rental.destroy(attempt, outcome="done", reason="over", report=lambda *_a, **_k: None)
    world.ledger.close_run(RUN, Outcome.SUCCEEDED, "", world.clock.now())
    assert world.guard.tick(CONTROLLER, controller_alive=False) is False
    assert world.ledger.run(RUN).outcome == Outcome.SUCCEEDED


def _order(name: str):  # type: ignore[no-untyped-def]
    from pennypod.model.offer import Order

    return Order(name=name, image="", disk_gb=20, public_key="", deadline=0)


# --- a guard that dies before its controller --------------------------------------------------------------------------


class Stage:
    """A stage that works on a pod, with the controller of its run: this process."""

    def __init__(self, world: World, controller: str) -> None:
        self.world = world
        world.open_run(controller=controller)
        world.rent()
        run_dir = world.settings.run_dir(RUN)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.file = run_dir / EVENTS_FILE
        self.warnings: list[str] = []
        self.look = GuardWatch(world.settings, RUN, "training", Events(run_dir, RUN), world.clock, self.warnings.append)

    def poll(self, seconds: float = 2) -> None:
        self.world.clock.sleep(seconds)
        self.look()

    @property
    def said(self) -> list[str]:
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        return [json.loads(line)["text"] for line in lines]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The controllers that a guard was asked for; none comes of it."""
    asked: list[str] = []
    monkeypatch.setattr(podwork, "ensure_guard", lambda _settings, controller: asked.append(controller))
    return asked


def test_a_guard_that_was_killed_under_a_living_controller_is_started_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENNYPOD_HOME", str(world.settings.home))
    monkeypatch.setenv("PENNYPOD_DATABASE_URL", world.settings.database_url)
    controller = processes.own_identity()
    stage = Stage(world, controller)
    ensure_guard(world.settings, controller)
    stage.poll()
    assert stage.said == [], "its guard lives"
    pids = []
    try:
        pids.append(end_guard(controller))
        assert not guard_is_alive(world.settings, controller)
        stage.poll()
        assert guard_is_alive(world.settings, controller)
    finally:
        pids.append(end_guard(controller))
    assert pids[0] != pids[1]
    assert (stage.said, stage.warnings) == (["the guard had died and was started anew"], [])


def end_guard(controller: str) -> int:
    """Kill the guard of that controller, which is a child of ours, and take note of its end."""
    [guard] = [child for child in psutil.Process().children() if controller in child.cmdline()]
    guard.kill()
    guard.wait(10)
    return guard.pid


def test_a_guard_that_cannot_be_started_is_told_once_and_tried_again_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, tries = Stage(world, processes.own_identity()), []

    def refuse(_settings: Settings, controller: str) -> None:
        tries.append(controller)
        raise GuardError("the guard did not start: see the log")

    monkeypatch.setattr(podwork, "ensure_guard", refuse)
    for _ in range(5):
        stage.poll()
    assert len(tries) == 1
    stage.poll(podwork.RESTART_PAUSE_S)
    assert len(tries) == 2
    assert len(stage.warnings) == 1
    assert "cannot be started anew" in stage.warnings[0]
    assert stage.said == stage.warnings


@pytest.mark.parametrize("state", ["left on purpose", "elsewhere", "fenced", "closed"])
def test_no_guard_is_started_for_a_run_that_has_none_by_right(world: World, starts: list[str], state: str) -> None:
    own = processes.own_identity()
    elsewhere = f"{own.rpartition(':')[0]}:00000000.00000000.1"
    stage = Stage(world, {"left on purpose": CONTROLLER, "elsewhere": elsewhere}.get(state, own))
    if state == "fenced":
        world.ledger.fence(RUN, "the deadline passed")
    if state == "closed":
        world.ledger.close_run(RUN, Outcome.FAILED, "no luck", world.clock.now())
    stage.poll()
    assert (starts, stage.said, stage.warnings) == ([], [], [])


def test_who_asks_for_a_guard_is_not_taken_for_one(world: World) -> None:
    world.settings.guards_dir.mkdir(parents=True)
    path = world.settings.guards_dir / "1-1.lock"
    path.touch()
    with path.open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert guard_is_alive(world.settings, "1:1") is False, "two that ask do not see each other"


def test_a_file_in_the_place_of_the_guards_folder_is_named(world: World) -> None:
    world.settings.guards_dir.write_text("in the way")
    assert not guard_is_alive(world.settings, processes.own_identity())
    with pytest.raises(GuardError, match="move away what is in its place") as caught:
        ensure_guard(world.settings, processes.own_identity())
    assert str(world.settings.guards_dir) in caught.value.message


def test_a_home_that_cannot_hold_the_guards_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "guards").symlink_to(tmp_path / "nowhere")
    with pytest.raises(GuardError, match=r"guards' folder .* cannot be made"):
        ensure_guard(Settings(home=tmp_path, database_url="sqlite://"), processes.own_identity())
