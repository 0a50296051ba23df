"""Ring 1 renews the lease of ring 3: for pods that may live, in time, and never at the price of its other work."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeClock
from pennypod.errors import PennypodError, SshError
from pennypod.fuse import AFTER_DEADLINE_S
from pennypod.ledger import AttemptRecord, AttemptState
from pennypod.renewals import Renewals
from pennypod.settings import Settings

LEASE_S = 3600.0


def attempt(**changes: object) -> AttemptRecord:
    record = AttemptRecord(
        id=1,
        run="demo-1201-abcde",
        attempt=1,
        lease_name="pennypod-demo-1201-abcde-a1-tssb3kq-nq4z7m",
        provider="fake",
        offer_id="o",
        machine_id="m",
        gpu="CPU",
        gpu_count=1,
        price_micros_per_h=200_000,
        renter="1:1",
        state=AttemptState.READY,
        intended=0.0,
        ssh_host="127.0.0.1",
        ssh_port=22,
        lease_s=LEASE_S,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.lines: list[str] = []
        self.sent: list[tuple[int, float]] = []
        self.fault: PennypodError | None = None
        self.gate = threading.Event()
        self.gate.set()
        settings = Settings(home=tmp_path, database_url="sqlite://")
        self.renewals = Renewals(settings, self.clock, self.lines.append, send=self._send)
        self.deadline = self.clock.now() + 86_400

    def _send(self, attempt: AttemptRecord, seconds: float) -> None:
        self.gate.wait(10)
        if self.fault is not None:
            raise self.fault
        self.sent.append((attempt.id, seconds))

    def look(self, *attempts: AttemptRecord, after_s: float = 0.0) -> list[tuple[int, float]]:
        """What is sent by one look, `after_s` from now."""
        self.clock.sleep(after_s)
        before = len(self.sent)
        self.renewals.look_after(attempts, self.deadline)
        self.renewals.wait()
        return self.sent[before:]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_lease_is_renewed_at_once_and_then_every_quarter_of_it(world: World) -> None:
    assert world.look(attempt()) == [(1, LEASE_S)]
    assert world.look(attempt(), after_s=LEASE_S / 4 - 10) == []
    assert world.look(attempt(), after_s=20) == [(1, LEASE_S)]


@pytest.mark.parametrize(
    "changes",
    [{"state": state} for state in AttemptState if state is not AttemptState.READY]
    + [{"lease_s": 0.0}, {"lease_s": None}],
    ids=str,
)
def test_only_accepted_pods_that_have_a_lease_are_told(world: World, changes: dict[str, object]) -> None:
    assert world.look(attempt(**changes)) == []


def test_no_lease_reaches_beyond_the_runs_deadline(world: World) -> None:
    world.deadline = world.clock.now() + 100
    ((_, seconds),) = world.look(attempt())
    assert seconds == pytest.approx(100 + AFTER_DEADLINE_S, abs=0.1)
    assert world.look(attempt(), after_s=1000) == []


def test_a_run_that_is_left_alone_gets_a_lease_for_all_its_time(world: World) -> None:
    world.renewals.look_after([attempt()], world.deadline, to_the_end=True)
    world.renewals.wait()
    ((_, seconds),) = world.sent
    assert seconds == pytest.approx(86_400 + AFTER_DEADLINE_S, abs=1)


def test_a_word_that_does_not_arrive_is_said_again_soon_and_told_once(world: World) -> None:
    world.fault = SshError("no route")
    assert world.look(attempt()) == []
    assert world.look(attempt(), after_s=31) == []
    assert [line for line in world.lines if "could not be renewed" in line] == world.lines[:1]
    world.fault = None
    assert world.look(attempt(), after_s=31) == [(1, LEASE_S)]
    assert "renewed again" in world.lines[-1]


def test_a_pod_that_does_not_answer_keeps_nobody_waiting(world: World) -> None:
    world.gate.clear()
    world.renewals.look_after([attempt()], world.deadline)
    world.clock.sleep(LEASE_S)
    world.renewals.look_after([attempt(), attempt(id=2)], world.deadline)  # returns although nothing is answered
    assert world.sent == []
    world.gate.set()
    world.renewals.wait()
    assert sorted(number for number, _ in world.sent) == [1, 2]  # one word under way at a time for each pod
