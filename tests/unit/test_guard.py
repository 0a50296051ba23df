"""The guard ends what its controller leaves behind, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from pennypod.errors import TransientError
from pennypod.guard import Guard, watch
from pennypod.ledger import AttemptRecord, AttemptState, Outcome, RunRecord, open_ledger
from pennypod.model.admission import Caps
from pennypod.model.ids import Lease
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
