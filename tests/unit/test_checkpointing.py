"""A pod's URLs are replaced in time, never outlive the run, and no fault of the store reaches the training."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fakes import FakeClock
from pennypod.checkpointing import LEASE_S, CheckpointKeeper, Terms, terms_of
from pennypod.errors import SshError, StoreError
from pennypod.ssh import Completed
from pennypod.store import Marker, Slot, UrlPlan
from pennypod.store.checkpoints import Kept


class FakeCheckpoints:
    def __init__(self) -> None:
        self.lifetimes: list[float] = []
        self.fault: Exception | None = None
        self.pruned = 0
        self.found: Kept | None = None

    def plan(self, attempt: int, now: float, lifetime: float, *, resume: bool = False) -> UrlPlan:
        if self.fault:
            raise self.fault
        self.lifetimes.append(lifetime)
        return UrlPlan(now + lifetime, ())

    def newest(self) -> Kept | None:
        return self.found

    def prune(self) -> int:
        self.pruned += 1
        return 0


class FakeSsh:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.answer: dict[str, Any] = {"restored": True, "why": ""}
        self.fault: Exception | None = None

    def fresh(self) -> FakeSsh:
        return self

    def run_checked(self, remote: str, *, stdin: bytes, timeout_s: float) -> None:
        if self.fault:
            raise self.fault
        self.written.append(stdin)

    def run(self, remote: str, *, timeout_s: float) -> Completed:
        if "slow" in self.answer:
            raise SshError("no answer within 600 s")
        return Completed(0, b"noise\n@pennypod " + json.dumps(self.answer).encode() + b"\n", b"")


class Scene:
    def __init__(self, terms: Terms) -> None:
        self.clock, self.checkpoints, self.ssh = FakeClock(), FakeCheckpoints(), FakeSsh()
        self.said: list[str] = []
        self.keeper = CheckpointKeeper(
            self.checkpoints,  # type: ignore[arg-type]
            self.ssh,  # type: ignore[arg-type]
            "/pod home",
            terms,
            self.clock,
            self.said.append,
        )

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.time += seconds
        self.keeper()
        self.keeper.wait()


def test_urls_are_replaced_after_a_quarter_of_the_lease() -> None:
    scene = Scene(Terms(lease_s=400.0))
    assert "/pod home/store" in scene.keeper.prepare()["PENNYPOD_CHECKPOINT_HOOK"]
    for _ in range(99):
        scene.tick(1)
    assert scene.checkpoints.lifetimes == [400.0]
    scene.tick(1)
    assert scene.checkpoints.lifetimes == [400.0, 400.0]
    assert scene.checkpoints.pruned == 1


def test_urls_never_outlive_the_run() -> None:
    scene = Scene(Terms(lease_s=400.0, deadline=FakeClock().now() + 150))
    scene.keeper.prepare()
    for _ in range(300):
        scene.tick(1)
    assert scene.checkpoints.lifetimes[0] == 150.0
    assert all(
        later < earlier
        for earlier, later in zip(scene.checkpoints.lifetimes, scene.checkpoints.lifetimes[1:], strict=False)
    )
    assert sum(scene.checkpoints.lifetimes) < 150 * 4 + 10


@pytest.mark.parametrize("fault", [StoreError("the store is away"), SshError("no line")])
def test_a_fault_is_told_once_and_tried_again(fault: Exception) -> None:
    scene = Scene(Terms(lease_s=400.0))
    scene.keeper.prepare()
    scene.checkpoints.fault = fault if isinstance(fault, StoreError) else None
    scene.ssh.fault = fault if isinstance(fault, SshError) else None
    for _ in range(20):
        scene.tick(30)
    assert scene.said == [f"checkpoints may not be kept for now: {fault}"]
    scene.checkpoints.fault = scene.ssh.fault = None
    scene.tick(30)
    assert scene.said[1:] == ["checkpoints are kept again"]


def test_a_call_does_not_wait_for_a_slow_pod() -> None:
    scene = Scene(Terms(lease_s=400.0))
    scene.ssh.run_checked = lambda *_args, **_named: time.sleep(0.5)  # type: ignore[method-assign, assignment]
    started = time.monotonic()
    for _ in range(100):
        scene.keeper()
    assert time.monotonic() - started < 0.4
    scene.keeper.wait()
    assert len(scene.checkpoints.lifetimes) == 1


def test_a_training_goes_on_from_the_newest_checkpoint() -> None:
    scene = Scene(Terms(attempt=2))
    scene.checkpoints.found = Kept(Slot(1, 7), Marker(10, "ab" * 32, 7))
    assert scene.keeper.prepare()["PENNYPOD_RESUME_FROM"] == "/pod home/store/resume"
    assert scene.keeper.resumed_epoch == 7


@pytest.mark.parametrize(
    ("answer", "says"),
    [({"restored": False, "why": "the store answers 403"}, "403"), ({"slow": True}, "within 600 s"), ({}, "no answer")],
)
def test_a_checkpoint_that_cannot_be_fetched_lets_the_training_begin_anew(answer: dict[str, Any], says: str) -> None:
    scene = Scene(Terms(attempt=2))
    scene.checkpoints.found = Kept(Slot(1, 7), Marker(10, "ab" * 32, 7))
    scene.ssh.answer = answer
    assert "PENNYPOD_RESUME_FROM" not in scene.keeper.prepare()
    assert scene.keeper.resumed_epoch is None
    assert says in scene.said[0]


def test_where_nobody_stays_the_urls_hold_to_the_deadline() -> None:
    assert terms_of(None, 5000.0, watched=True) == Terms(0, LEASE_S, 5000.0)
    assert terms_of(None, 5000.0, watched=False) == Terms(0, float("inf"), 5000.0)
