"""Proof of absence, and the pace at which a pod's end is asked for."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from fakes import FakeClock, FakeProvider
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pennypod.errors import AuthError, TransientError
from pennypod.ledger import Ledger, LedgerError, open_ledger
from pennypod.model.pod import Pod, PodState
from pennypod.proof import (
    DESTROY_CALLS_PER_HOUR,
    LONGEST_PAUSE_S,
    DestroyCalls,
    Proof,
    Sought,
    is_unexplained,
    pause_before_next,
    prove_all,
)
from pennypod.receipts import DESTROY, gone_since
from pennypod.settings import Settings

PRICE = 200_000


class SpendingProvider(FakeProvider):
    """Says what the account spends as well; `told` overrides it, an exception is raised."""

    told: list[int | Exception | None]

    def spend_micros_per_h(self) -> int | None:
        if getattr(self, "told", None):
            answer = self.told.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return sum(pod.price_micros_per_h for pod in self.live.values())


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.provider = SpendingProvider(self.clock)
        self.ledger = open_ledger(Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}"))
        self.destroyed: list[float] = []
        destroy = self.provider.destroy

        def counted(pod_id: str) -> None:
            self.destroyed.append(self.clock.now())
            destroy(pod_id)

        self.provider.destroy = counted  # type: ignore[method-assign]

    def pod(self, pod_id: str = "pod-1", price: int = PRICE) -> None:
        made = Pod("fake", pod_id, f"name of {pod_id}", PodState.RUNNING, self.clock.now(), price)
        self.provider.live[pod_id] = made

    def proof(self, pod_id: str = "pod-1", ledger: Ledger | None = None) -> Proof:
        sought = Sought(self.provider, pod_id, f"name of {pod_id}", PRICE, since=self.clock.now())
        return Proof(sought, DestroyCalls(ledger or self.ledger, self.clock), self.clock)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --- absence ----------------------------------------------------------------------------------------------------------


def test_absence_is_spaced_answers_from_every_view(world: World) -> None:
    world.pod()
    proof = world.proof()
    prove_all([proof], world.clock, 60)
    views = ["is it there", "is it listed", "is it paid for"]
    assert [step["asked"] for step in proof.steps] == [DESTROY, *views * 3]
    assert {step["answer"] for step in proof.steps[1:]} == {"absent"}
    looks = [step["at"] for step in proof.steps if step["asked"] == "is it there"]
    assert all(later - earlier >= 1 for earlier, later in pairwise(looks))


@pytest.mark.parametrize("position", [1, 2, 3])
def test_spending_that_no_pod_explains_starts_the_count_again(world: World, position: int) -> None:
    world.pod()
    world.provider.told = [0] * (position - 1) + [PRICE]
    proof = world.proof()
    prove_all([proof], world.clock, 60)
    assert proof.complete
    answers = [step["answer"] for step in proof.steps]
    (seen,) = (place for place, answer in enumerate(answers) if "no listed pod explains" in answer)
    assert answers[seen + 1 :].count("absent") == 9


def test_spending_that_never_falls_is_never_absence(world: World) -> None:
    world.pod()
    world.provider.told = [PRICE] * 10_000
    proof = world.proof()
    prove_all([proof], world.clock, 600)
    assert not proof.complete
    assert "the account spends $0.2000/h" in str(proof.unproven(600))


def test_an_account_whose_spending_is_not_told_has_two_views(world: World) -> None:
    world.pod()
    world.provider.told = [None] * 3
    proof = world.proof()
    prove_all([proof], world.clock, 60)
    assert proof.complete
    assert sum(step["answer"].startswith("not told") for step in proof.steps) == 3


def test_an_error_in_the_view_of_spending_is_not_absence(world: World) -> None:
    world.pod()
    world.provider.told = [TransientError("502")] * 5
    proof = world.proof()
    prove_all([proof], world.clock, 60)
    assert [step["answer"] for step in proof.steps].count("transient: 502") == 5
    assert proof.complete


def test_what_other_pods_cost_does_not_stand_in_the_way(world: World) -> None:
    world.pod()
    world.pod("somebody-else's", price=3_000_000)
    proof = world.proof()
    prove_all([proof], world.clock, 60)
    assert proof.complete
    assert list(world.provider.live) == ["somebody-else's"]


@pytest.mark.parametrize(
    ("spending", "listed", "price", "left"),
    [
        (PRICE, 0, PRICE, True),
        (0, 0, PRICE, False),
        (50_000, 0, PRICE, False),  # a volume, say
        (100_000, 0, PRICE, True),
        (20_500_000, 20_000_000, PRICE, False),  # big pods, billed a little differently than listed
        (21_000_000, 20_000_000, 1_000_000, True),
        (PRICE, 0, 0, False),  # nobody knows what it would cost
    ],
)
def test_what_counts_as_spending_without_an_explanation(spending: int, listed: int, price: int, left: bool) -> None:
    assert is_unexplained(spending, listed, price) is left


def test_times_in_a_proof_never_go_back(world: World) -> None:
    world.pod()
    world.provider.ignored_destroys = 2
    jumps = iter([0, 0, -4000, 0, 7000, -9000])

    def jump() -> None:
        world.clock.time += next(jumps, 0)

    world.clock.on_sleep = jump
    proof = world.proof()
    for _ in range(50):
        prove_all([proof], world.clock, 60)
    assert proof.complete
    times = [step["at"] for step in proof.steps]
    assert times == sorted(times)
    assert times[0] >= proof.sought.since
    looks = [step["at"] for step in proof.steps if step["asked"] == "is it there"][-3:]
    assert all(later - earlier >= 1 for earlier, later in pairwise(looks))


def steps(*answers: str) -> list[dict[str, object]]:
    asked = {"accepted": DESTROY, "refused": DESTROY}
    return [{"at": at, "asked": asked.get(a, "is it there"), "answer": a} for at, a in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "since"),
    [
        (["accepted", "absent", "absent"], 0),
        (["accepted", "transient: 502", "absent", "absent"], 0),
        (["accepted", "still there", "absent", "absent"], 2),
        (["accepted", "still there", "accepted", "absent", "absent"], 2),
        (["accepted", "absent", "the account spends $1/h", "absent", "absent"], 3),
        (["refused", "absent", "absent"], 1),
        (["refused", "absent", "transient: 502", "absent"], 1),
    ],
)
def test_the_meter_stopped_at_the_last_end_that_was_accepted(answers: list[str], since: float) -> None:
    assert gone_since(steps(*answers)) == since


# --- the pace ---------------------------------------------------------------------------------------------------------


def test_a_destroy_that_does_nothing_for_an_hour_is_never_called_gone_and_never_hammered(world: World) -> None:
    world.pod()
    world.provider.ignored_destroys = 10_000
    begun = world.clock.now()
    proof = world.proof()
    while world.clock.now() - begun < 3600:
        prove_all([proof], world.clock, 30)
        assert not proof.complete
    assert within_cap(world.destroyed)
    assert len(world.destroyed) > 100
    healed = world.clock.now()
    world.provider.ignored_destroys = 0
    prove_all([proof], world.clock, 60)
    assert proof.complete
    assert "pod-1" not in world.provider.live
    assert world.destroyed[-1] - healed <= LONGEST_PAUSE_S


def within_cap(times: list[float]) -> bool:
    return all(
        sum(begin <= at < begin + 3600 for at in times) <= DESTROY_CALLS_PER_HOUR for begin in times
    )  # a window is fullest where it begins with a call


def test_several_processes_share_one_pace(world: World) -> None:
    world.pod()
    world.provider.ignored_destroys = 10_000
    begun = world.clock.now()
    proofs = [world.proof() for _ in range(5)]
    while world.clock.now() - begun < 3600:
        prove_all(proofs, world.clock, 30)
    assert within_cap(world.destroyed)
    assert all(later - earlier >= 25 for earlier, later in pairwise(world.destroyed[6:]))


def test_a_process_that_starts_in_the_middle_keeps_the_pace_and_says_so(world: World) -> None:
    world.pod()
    world.provider.ignored_destroys = 1
    first = world.proof()
    first.ask()
    second = world.proof()
    second.ask()
    assert len(world.destroyed) == 1
    assert second.steps[0]["answer"].startswith("asked for just before")


def test_the_ends_of_all_are_asked_for_before_any_is_waited_for(world: World) -> None:
    order: list[str] = []
    for number in range(3):
        world.pod(f"pod-{number}")
    look = world.provider.pod
    world.provider.pod = lambda pod_id: (order.append("look"), look(pod_id))[1]  # type: ignore[method-assign, func-returns-value]
    destroy = world.provider.destroy
    world.provider.destroy = lambda pod_id: (order.append("destroy"), destroy(pod_id))[1]  # type: ignore[method-assign, func-returns-value]
    proofs = [world.proof(f"pod-{number}") for number in range(3)]
    prove_all(proofs, world.clock, 60)
    assert order[:4] == ["destroy", "destroy", "destroy", "look"]
    assert all(proof.complete for proof in proofs)


def test_a_broken_ledger_keeps_no_pod_alive_and_the_pace_stays(world: World) -> None:
    class Broken:
        def claim_destroy(self, *_args: object) -> float:
            raise LedgerError("disk full")

    world.pod()
    world.provider.ignored_destroys = 10_000
    proof = world.proof(ledger=Broken())  # type: ignore[arg-type]
    begun = world.clock.now()
    while world.clock.now() - begun < 7200:
        prove_all([proof], world.clock, 60)
    assert within_cap(world.destroyed)
    world.provider.ignored_destroys = 0
    prove_all([proof], world.clock, 60)
    assert proof.complete


def test_a_refused_destroy_is_asked_again_and_looked_for(world: World) -> None:
    world.pod()
    world.provider.destroy_faults = [AuthError("no"), TransientError("500")]
    proof = world.proof()
    prove_all([proof], world.clock, 60)
    assert [step["answer"] for step in proof.steps if step["asked"] == DESTROY] == [
        "auth: no",
        "transient: 500",
        "accepted",
    ]


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(-5000, 5000), max_size=30), st.booleans())
@example(0, [3598.0, 1.0], True)  # the first call leaves the hour while the pause after the second is waited for
def test_no_clock_that_jumps_stops_the_calls_or_lets_them_run_hot(
    seed: int, jumps: list[float], ledger_works: bool
) -> None:
    """No two calls are closer than the shortest pause, and none is put off for longer than the longest."""

    class Broken:
        def claim_destroy(self, *_args: object) -> float:
            raise LedgerError("disk full")

    clock = FakeClock()
    ledger = open_ledger(Settings(Path(), "sqlite://")) if ledger_works else Broken()
    calls = DestroyCalls(ledger, clock, chance=random.Random(seed).random)  # type: ignore[arg-type]
    assert calls.claim("fake", "pod-1") == 0
    last = clock.time

    def claim() -> float:
        nonlocal last
        last = min(last, clock.time)  # a clock that was set back
        wait = calls.claim("fake", "pod-1")
        if wait == 0:
            assert clock.time - last >= 2.0 * 5 / 6 - 1e-5
            last = clock.time
        return wait

    for number, jump in enumerate(jumps, start=1):
        clock.time += jump
        wait = claim()
        assert wait <= LONGEST_PAUSE_S
        if wait > 0:
            clock.time += wait / 2
            early = claim()
            clock.time += wait / 2 + 1e-5  # floats: a sum may fall short of what it was made from
            assert early == 0 or claim() == 0
        claim()  # at once: allowed only when the pause since the last one is over
        assert calls.claim("fake", f"another pod {number}") == 0


def test_the_cap_holds_when_the_pause_does_not(world: World) -> None:
    now = world.clock.now()
    calls = [now - 3600 + number for number in range(DESTROY_CALLS_PER_HOUR + 1)]
    assert pause_before_next(calls, now, 0.5) == pytest.approx(1)
    assert pause_before_next(calls[: DESTROY_CALLS_PER_HOUR - 1], now, 0.5) == 0
