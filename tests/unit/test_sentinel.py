"""The watch: it looks on time, outlives every fault, leaves a heartbeat, and is alone in its state folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from fakes import ADDRESS, FakeClock, FakeProvider
from pennypod.clock import Clock
from pennypod.errors import AuthError, TransientError
from pennypod.ledger import Ledger, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.pod import Pod, PodState
from pennypod.sentinel import (
    Look,
    Manner,
    SentinelError,
    StoppableClock,
    is_on_watch,
    keep_watch,
    last_look,
    look,
    only_one,
)
from pennypod.settings import Settings

RUN = "demo-1201-abcde"


class World:
    """A sentinel that is told to stop after some looks."""

    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.provider = FakeProvider(self.clock)
        self.providers: dict[str, Any] = {"fake": self.provider}
        self.settings = Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}")
        self.stop = threading.Event()
        self.lines: list[str] = []
        self.looked_at: list[float] = []
        self._ledger: Ledger | None = None

    def ledger(self) -> Ledger:
        self._ledger = self._ledger or open_ledger(self.settings)
        return self._ledger

    def pod(self, in_s: float = -10) -> str:
        name = Lease(RUN, 1, int(self.clock.now() + in_s), "aaaaa").name
        created = self.clock.now() - 3600
        self.provider.live["pod-1"] = Pod("fake", "pod-1", name, PodState.RUNNING, created, 360_000, address=ADDRESS)
        return name

    def look(self, clock: Clock | None = None, **manner: Any) -> Look:
        return look(self.providers, self.ledger, self.settings, clock or self.clock, Manner(patience_s=20, **manner))

    def watch(self, looks: int, interval_s: float = 300) -> None:
        start = self.clock.now()

        def take_look(clock: Clock) -> Look:
            self.looked_at.append(round(clock.now() - start))
            if len(self.looked_at) == looks:
                self.stop.set()
            return self.look(clock)

        keep_watch(take_look, StoppableClock(self.clock, self.stop), interval_s, self.lines.append)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "home")


def test_it_looks_once_an_interval_and_says_one_line_each_time(world: World) -> None:
    world.watch(looks=3)
    assert world.looked_at == [0, 300, 600]
    assert world.lines == ["0 due, 0 destroyed, 0 within their time"] * 3


def test_it_ends_what_becomes_due_between_two_looks(world: World) -> None:
    name = world.pod(in_s=100)
    world.watch(looks=3)
    assert world.provider.live == {}
    assert "1 within their time" in world.lines[0]
    assert f"destroyed {name} (the deadline passed, $" in world.lines[1]


def test_a_provider_that_cannot_be_listed_is_asked_again_within_a_minute(world: World) -> None:
    world.pod()
    world.provider.list_faults = [TransientError("fake: HTTP 502"), AuthError("fake: HTTP 401")]
    world.watch(looks=4)
    assert world.looked_at[:3] == [0, 60, 120]
    assert "fake cannot be looked at: fake: HTTP 502" in world.lines[0]
    assert "fake cannot be looked at: fake: HTTP 401" in world.lines[1]
    assert "1 destroyed" in world.lines[2]
    assert world.provider.live == {}


def test_a_destroy_that_does_nothing_is_never_called_gone_and_is_tried_again(world: World) -> None:
    name = world.pod()
    world.provider.ignored_destroys = 20
    world.watch(looks=3)
    assert [line for line in world.lines if "destroyed pennypod" in line] == []
    assert all(f"NOT PROVEN GONE {name}" in line for line in world.lines[:2])
    assert world.looked_at[1] <= 60


def test_it_outlives_a_fault_of_its_own(world: World) -> None:
    calls = []

    def take_look(_clock: Clock) -> Look:
        calls.append(1)
        if len(calls) == 3:
            world.stop.set()
        raise RuntimeError("line one\nline two")

    keep_watch(take_look, StoppableClock(world.clock, world.stop), 300, world.lines.append)
    assert len(calls) == 3
    assert world.lines == ["the look failed, will look again: RuntimeError: line one line two"] * 3


def test_told_to_stop_it_ends_between_two_questions_with_the_destroy_already_asked_for(world: World) -> None:
    world.pod()
    world.provider.ignored_destroys = 1
    world.clock.on_sleep = world.stop.set
    world.watch(looks=99)
    assert world.looked_at == [0]
    assert world.lines == []
    assert world.provider.ignored_destroys == 0
    assert last_look(world.settings) is None, "a look that was cut short is none"


def test_a_look_leaves_a_heartbeat_that_says_how_it_went(world: World) -> None:
    assert last_look(world.settings) is None
    world.look()
    beat = last_look(world.settings)
    assert beat is not None
    assert (beat.at, beat.complete, beat.not_listed) == (world.clock.now(), True, [])
    world.provider.list_faults = [TransientError("no")]
    world.look()
    beat = last_look(world.settings)
    assert beat is not None
    assert (beat.complete, beat.not_listed) == (False, ["fake"])
    assert [path.name for path in (world.settings.home / "sentinel").iterdir()] == ["heartbeat.json"]


@pytest.mark.parametrize("manner", [{"dry_run": True}, {"ahead_s": 60}, {"runs": (RUN,)}])
def test_a_look_that_others_cannot_rely_on_leaves_none(world: World, manner: dict[str, Any]) -> None:
    world.look(**manner)
    assert last_look(world.settings) is None


def test_a_heartbeat_that_cannot_be_read_is_none(world: World) -> None:
    world.look()
    for text in ("", "[]", '{"at": 1, "more": 2}'):
        (world.settings.home / "sentinel" / "heartbeat.json").write_text(text)
        assert last_look(world.settings) is None


def test_a_state_folder_that_cannot_be_used_keeps_no_pod_alive(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    world = World(tmp_path / "home")
    world.pod()
    seen = world.look()
    assert [item.action for item in seen.swept] == ["destroyed"]
    assert "sweeping by the pods' names alone" in seen.warning


def test_there_is_one_sentinel_at_a_time_in_a_state_folder(world: World, tmp_path: Path) -> None:
    assert not is_on_watch(world.settings)
    with only_one(world.settings):
        assert is_on_watch(world.settings)
        with pytest.raises(SentinelError, match="another sentinel"), only_one(world.settings):
            pass
        with only_one(Settings(tmp_path / "other", "sqlite://")):
            pass
    assert not is_on_watch(world.settings)
    with only_one(world.settings):
        pass
