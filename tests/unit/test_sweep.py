"""The sweep: ends what is past its deadline, touches nothing else, and never takes silence for absence."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import ADDRESS, FakeClock, FakeProvider, offer
from hypothesis import given
from hypothesis import strategies as st
from pennypod.errors import ProviderError, TransientError
from pennypod.ledger import ArtifactRecord, AttemptState, Outcome, RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.pod import Pod, PodState
from pennypod.rental import Rental
from pennypod.settings import Settings
from pennypod.sweep import DESTROYED, NEVER_EXISTED, UNPROVEN, WOULD_DESTROY, Survey, Swept, survey, sweep
from pennypod.unwatched import close_over

RUN = "demo-1201-abcde"
OTHER = "demo-1201-fghij"


def quiet(*_args: object, **_numbers: object) -> None:
    return None


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.start = self.clock.now()
        self.provider = FakeProvider(self.clock)
        self.providers: dict[str, Any] = {"fake": self.provider}
        self.artifacts = tmp_path / "artifacts"
        self.ledger = open_ledger(Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}"))

    def lease(self, run: str = RUN, in_s: float = -10, attempt: int = 1) -> Lease:
        return Lease(run, attempt, int(self.start + in_s), "aaaaa")

    def pod(self, name: str, pod_id: str = "pod-1") -> str:
        """A pod that is simply there, whatever the ledger says."""
        self.provider.live[pod_id] = Pod(
            provider="fake",
            pod_id=pod_id,
            name=name,
            state=PodState.RUNNING,
            created=self.start - 3600,
            price_micros_per_h=360_000,
            address=ADDRESS,
        )
        return pod_id

    def rented(
        self, in_s: float = -10, run: str = RUN, state: AttemptState = AttemptState.RENTED, seen: bool = True
    ) -> int:
        """An attempt of this ledger, with its pod unless `seen` is false."""
        self.ledger.open_run(RunRecord(run, "demo", "1:1", self.start - 60, str(self.artifacts / run)))
        lease = self.lease(run, in_s)
        attempt = self.ledger.open_attempt(lease, offer(1), renter="1:1", at=self.start - 60)
        pod_id = f"pod-{attempt.id}"
        if state is not AttemptState.INTENT:
            self.ledger.record_pod(attempt.id, pod_id, self.start - 59)
        if state is AttemptState.DESTROYING:
            self.ledger.record_destroying(attempt.id, "succeeded", "the run is over", self.start - 5)
        if seen:
            self.pod(lease.name, pod_id)
        return attempt.id

    def look(self, ahead_s: float = 0, runs: tuple[str, ...] = ()) -> Survey:
        return survey(self.providers, self.ledger, self.clock.now() + ahead_s, runs=runs)

    def sweep(self, *, dry_run: bool = False, ahead_s: float = 0) -> list[Swept]:
        return sweep(
            self.look(ahead_s), self.providers, self.ledger, self.clock, dry_run=dry_run, report=quiet, patience_s=20
        )

    def state(self, run: str = RUN) -> AttemptState:
        return self.ledger.attempts(run)[-1].state


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_overdue_pod_goes_with_an_empty_ledger_and_leaves_no_trace_there(world: World) -> None:
    world.pod(world.lease().name)
    (swept,) = world.sweep()
    assert swept.action == DESTROYED
    assert swept.target.reason == "the deadline passed"
    assert swept.usd == pytest.approx(0.36, abs=0.01)
    assert world.provider.live == {}
    assert world.ledger.runs() == []


def test_an_overdue_pod_of_this_ledger_gets_a_receipt_and_its_run_is_fenced_and_closed(world: World) -> None:
    world.rented()
    (swept,) = world.sweep()
    assert swept.action == DESTROYED
    assert world.provider.live == {}
    (attempt,) = world.ledger.attempts(RUN)
    assert attempt.state is AttemptState.GONE
    assert attempt.receipt is not None
    record = world.ledger.run(RUN)
    assert (record.fenced_reason, record.outcome, record.reason) == (
        "the deadline passed",
        "cancelled",
        "the deadline passed",
    )
    assert (world.artifacts / RUN / "run.json").exists()


def test_the_deadline_second_itself_is_still_in_time(world: World) -> None:
    world.pod(world.lease(in_s=100).name)
    assert [t.run for t in world.look(ahead_s=100).kept] == [RUN]
    assert [t.run for t in world.look(ahead_s=100.5).due] == [RUN]


def test_now_judges_as_of_another_time(world: World) -> None:
    world.rented(in_s=3600)
    assert world.sweep() == []
    assert world.sweep(ahead_s=3599) == []
    assert [s.action for s in world.sweep(ahead_s=3601)] == [DESTROYED]


@given(st.text(max_size=60).filter(lambda text: not text.startswith("pennypod-")))
def test_no_name_without_our_prefix_is_ever_touched(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    world = World(tmp_path_factory.mktemp("sweep"))
    name = world.lease().name
    for number, foreign in enumerate((text, "x" + name, " " + name, name.upper(), "pennypod")):
        world.pod(foreign, f"foreign-{number}")
    world.pod(name, "ours")
    assert [s.target.pod_id for s in world.sweep(ahead_s=10**12)] == ["ours"]
    assert len(world.provider.live) == 5


@given(st.text(max_size=60))
def test_a_name_of_ours_without_a_lease_ends_after_four_hours_without_a_change(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    world = World(tmp_path_factory.mktemp("sweep"))
    for number, cut in enumerate(("pennypod-" + text, world.lease().name[:-2], world.lease().name + text + "-")):
        world.pod(cut, f"cut-{number}")  # made an hour ago
    assert [target.lease for target in world.look(ahead_s=3 * 3600).kept] == [None] * 3
    assert [swept.action for swept in world.sweep(dry_run=True, ahead_s=3 * 3600 + 1)] == [WOULD_DESTROY] * 3
    swept = world.sweep(ahead_s=3 * 3600 + 1)
    assert {(item.action, item.target.deadline) for item in swept} == {(DESTROYED, None)}
    assert world.provider.live == {}


def test_a_change_that_the_provider_shows_makes_an_unreadable_pod_younger(world: World) -> None:
    pod_id = world.pod("pennypod-what-is-this")
    world.provider.live[pod_id] = replace(world.provider.live[pod_id], changed=world.start - 600)
    assert world.look(ahead_s=4 * 3600 - 600).due == []
    (target,) = world.look(ahead_s=4 * 3600 - 599).due
    assert "no lease can be read" in target.reason


def test_an_unreadable_pod_without_any_date_is_spared_only_while_it_is_made(world: World) -> None:
    pod_id = world.pod("pennypod-what-is-this")
    fresh = world.provider.live[pod_id] = replace(world.provider.live[pod_id], created=0.0, state=PodState.STARTING)
    assert world.look().due == []
    world.provider.live[pod_id] = replace(fresh, state=PodState.RUNNING)
    assert len(world.look().due) == 1


def test_a_pod_renamed_by_hand_keeps_the_deadline_that_the_ledger_knows(world: World) -> None:
    world.rented(in_s=8 * 3600)
    (pod,) = world.provider.live.values()
    world.provider.live[pod.pod_id] = replace(pod, name="pennypod-mine")
    assert world.sweep(ahead_s=7 * 3600) == []
    (swept,) = world.sweep(ahead_s=8 * 3600 + 1)
    assert (swept.action, swept.target.run) == (DESTROYED, RUN)
    assert world.state() is AttemptState.GONE


def test_two_unreadable_pods_of_one_name_are_judged_one_by_one(world: World) -> None:
    world.pod("pennypod-twin", "old")
    young = world.pod("pennypod-twin", "young")
    world.provider.live[young] = replace(world.provider.live[young], created=world.start)
    (swept,) = world.sweep(ahead_s=3 * 3600 + 1)
    assert (swept.action, swept.target.pod_id) == (DESTROYED, "old")
    assert list(world.provider.live) == ["young"]


def test_a_sweep_of_one_run_leaves_every_other_one(world: World) -> None:
    world.pod(world.lease(OTHER).name, "pod-8")
    world.pod("pennypod-what-is-this", "pod-9")
    world.rented()
    assert [target.run for target in world.look(runs=(RUN,)).due] == [RUN]
    assert world.look(runs=(RUN,)).kept == []


def test_a_fault_in_one_client_hides_no_other_ones_pods(world: World) -> None:
    class Broken(FakeProvider):
        def pods(self) -> list[Pod]:
            raise KeyError("id")

    world.pod(world.lease().name)
    world.providers = {"broken": Broken(world.clock, "broken"), **world.providers}
    found = world.look()
    assert len(found.due) == 1
    assert "a fault in pennypod: KeyError" in found.unlisted["broken"]


def test_a_dry_run_looks_and_judges_and_destroys_nothing(world: World) -> None:
    world.rented()
    world.pod(world.lease(OTHER).name, "pod-9")
    before = (dict(world.provider.live), world.ledger.attempts(RUN), world.ledger.run(RUN))
    assert {(s.target.run, s.action) for s in world.sweep(dry_run=True)} == {
        (RUN, WOULD_DESTROY),
        (OTHER, WOULD_DESTROY),
    }
    assert (dict(world.provider.live), world.ledger.attempts(RUN), world.ledger.run(RUN)) == before


def test_a_stuck_destroy_is_tried_again_before_the_deadline_and_the_run_keeps_its_own_ending(world: World) -> None:
    world.rented(in_s=600, state=AttemptState.DESTROYING)
    (swept,) = world.sweep()
    assert (swept.action, swept.target.reason) == (DESTROYED, "the run is over")
    assert world.state() is AttemptState.GONE
    # Whoever is just tearing the run down closes it, with the outcome that only it knows.
    assert world.ledger.run(RUN).closed is None
    assert world.ledger.run(RUN).fenced_reason is None


@pytest.mark.parametrize(("in_s", "state"), [(600, AttemptState.DESTROYING), (-10, AttemptState.RENTED)])
def test_an_attempt_that_no_listing_shows_is_proven_gone_too(world: World, in_s: float, state: AttemptState) -> None:
    world.rented(in_s=in_s, state=state, seen=False)
    assert [s.action for s in world.sweep()] == [DESTROYED]
    assert world.state() is AttemptState.GONE


def test_an_overdue_intent_whose_create_made_nothing_is_closed_as_that(world: World) -> None:
    world.rented(state=AttemptState.INTENT, seen=False)
    (swept,) = world.sweep()
    assert (swept.action, swept.usd) == (NEVER_EXISTED, 0.0)
    assert world.state() is AttemptState.NEVER
    assert world.ledger.run(RUN).outcome == Outcome.CANCELLED


def test_an_overdue_intent_whose_create_did_make_a_pod_is_found_by_its_name(world: World) -> None:
    world.rented(state=AttemptState.INTENT)
    assert [s.action for s in world.sweep()] == [DESTROYED]
    assert world.provider.live == {}
    assert world.state() is AttemptState.GONE


def test_a_pod_that_the_ledger_holds_for_gone_is_not_left_to_bill(world: World) -> None:
    attempt = world.rented(in_s=600)
    world.ledger.record_gone(attempt, {"pod_id": "pod-1"}, world.start, 5)
    (swept,) = world.sweep()
    assert (swept.action, swept.target.reason) == (DESTROYED, "the ledger says that it is over, yet it is listed")
    assert world.provider.live == {}
    first, stray = (receipt for _, _, receipt in world.ledger.receipts()[1])
    assert world.ledger.attempts(RUN)[0].receipt == first
    assert stray["pod_id"] == "pod-1"


def test_a_pod_whose_create_arrived_after_it_was_given_up_has_its_receipt_though_the_sweep_dies(world: World) -> None:
    number = world.rented(state=AttemptState.INTENT, seen=False)
    world.ledger.record_never(number, "interrupted", "no such pod", world.start)
    world.pod(world.lease().name, "pod-late")
    destroy = world.provider.destroy

    def destroy_and_die(pod_id: str) -> None:
        destroy(pod_id)
        raise KeyboardInterrupt

    world.provider.destroy = destroy_and_die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.sweep()
    world.provider.destroy = destroy  # type: ignore[method-assign]
    assert (world.state(), world.provider.live) == (AttemptState.DESTROYING, {})
    (swept,) = world.sweep()
    (attempt,) = world.ledger.attempts(RUN)
    assert (swept.action, attempt.state, attempt.pod_id) == (DESTROYED, AttemptState.GONE, "pod-late")
    assert attempt.receipt is not None


def test_two_pods_under_one_lease_both_go(world: World) -> None:
    world.rented()
    world.pod(world.lease().name, "pod-twin")
    assert {s.target.pod_id: s.action for s in world.sweep()} == {"pod-1": DESTROYED, "pod-twin": DESTROYED}
    assert world.provider.live == {}
    assert world.state() is AttemptState.GONE


def test_every_end_is_asked_for_before_the_first_proof_is_waited_for(world: World) -> None:
    for number in range(5):
        world.pod(world.lease(f"demo-1201-{'abcde'[number]}aaaa").name, f"pod-{number}")
    left: list[int] = []
    world.clock.on_sleep = lambda: left.append(len(world.provider.live))
    world.sweep()
    assert left
    assert set(left) == {0}


def test_a_pod_that_will_not_go_stays_on_the_books_and_the_next_is_still_swept(world: World) -> None:
    world.rented()
    world.pod(world.lease(OTHER).name, "pod-9")
    stubborn = world.provider.destroy

    def destroy(pod_id: str) -> None:
        if pod_id == "pod-9":
            stubborn(pod_id)

    world.provider.destroy = destroy  # type: ignore[method-assign]
    actions = {s.target.run: (s.action, bool(s.error)) for s in world.sweep()}
    assert actions == {RUN: (UNPROVEN, True), OTHER: (DESTROYED, False)}
    assert world.state() is AttemptState.DESTROYING
    assert world.ledger.run(RUN).closed is None


def test_a_listing_that_fails_is_told_and_hides_no_other_provider(world: World) -> None:
    world.rented()  # at the provider that will not answer
    other = FakeProvider(world.clock, "other")
    other.live["pod-5"] = replace(world.provider.live["pod-1"], provider="other", name=world.lease(OTHER).name)
    world.providers["other"] = other
    world.provider.list_faults = [TransientError("HTTP 500")] * 99
    found = world.look()
    assert found.unlisted == {"fake": "HTTP 500"}
    assert [(t.provider, t.run) for t in found.due] == [("other", OTHER)]


def test_an_unproven_pod_at_a_provider_that_is_not_configured_is_told(world: World) -> None:
    world.rented()
    world.providers.clear()
    found = world.look()
    assert found.due == []
    assert "not configured here" in found.unlisted["fake"]


def test_a_provider_that_refuses_one_destroy_does_not_stop_the_sweep(world: World) -> None:
    world.pod(world.lease().name)
    world.provider.destroy_faults = [ProviderError("busy"), None]
    assert [s.action for s in world.sweep()] == [DESTROYED]


def test_the_document_says_what_was_done(world: World) -> None:
    world.rented()
    (swept,) = world.sweep()
    assert swept.as_document() == {
        "provider": "fake",
        "pod_id": "pod-1",
        "pod_name": world.lease().name,
        "run": RUN,
        "deadline": world.lease().deadline,
        "reason": "the deadline passed",
        "action": DESTROYED,
        "cost_usd": swept.usd,
        "error": None,
    }


def test_a_pod_that_its_fuse_could_only_stop_is_named_while_it_is_within_its_time(world: World) -> None:
    early, late = world.lease(in_s=600), world.lease(OTHER, in_s=-10)
    for number, lease in enumerate((early, late)):
        pod_id = world.pod(lease.name, f"pod-{number}")
        world.provider.live[pod_id] = replace(world.provider.live[pod_id], state=PodState.STOPPED)
    found = survey(world.providers, world.ledger, world.clock.now())
    assert found.stopped == [early.name]
    assert [target.name for target in found.due] == [late.name]


# --- books that nobody closed -----------------------------------------------------------------------------------------


def gone_before_its_run_was_closed(world: World, outcome: str = "done") -> None:
    """All died between the pod's proof and the run's closing; the deadline is ten seconds away."""
    attempt = world.rented(in_s=10)
    world.ledger.set_plan(RUN, deadline=world.start + 10, worst_case_micros=1)
    rental = Rental(world.providers, world.ledger, world.clock)
    rental.destroy(world.ledger.attempts(RUN)[0], outcome=outcome, reason="the run is over", report=quiet)
    assert world.ledger.attempts(RUN)[0].id == attempt
    assert world.ledger.attempts(RUN)[0].final


def close(world: World, ahead_s: float, *, watched: bool = False, runs: tuple[str, ...] = ()) -> list[str]:
    return close_over(world.ledger, world.start + ahead_s, world.clock.now(), lambda _run: watched, runs)


def test_a_run_that_died_between_proof_and_books_is_closed_after_its_deadline_with_its_receipt(world: World) -> None:
    gone_before_its_run_was_closed(world)
    assert close(world, 10) == [], "a resume may go on with it"
    assert close(world, 11, watched=True) == [], "somebody is about to"
    assert close(world, 11, runs=("demo-1201-other",)) == []
    assert close(world, 11) == [RUN]
    assert close(world, 11) == []
    record = world.ledger.run(RUN)
    assert (record.outcome, record.reason) == ("cancelled", "its command died when its pod was gone already")
    (receipt,) = json.loads((world.artifacts / RUN / "receipt.json").read_text())["pods"]
    assert receipt["pod_name"] == world.lease(in_s=10).name


@pytest.mark.parametrize(("ended", "outcome"), [("done", "succeeded"), ("failed", "cancelled")])
def test_it_has_succeeded_when_its_weights_are_home_and_its_pod_had_done_its_work(
    world: World, ended: str, outcome: str
) -> None:
    gone_before_its_run_was_closed(world, ended)
    world.ledger.start_stage(RUN, "weights", world.start)
    folder = world.artifacts / RUN
    folder.mkdir(parents=True)
    (folder / "best.npz").write_bytes(b"weights")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    world.ledger.record_artifacts([ArtifactRecord(RUN, "best.npz", 7, sha256, "weights")])
    assert close(world, 11) == [RUN]
    assert world.ledger.run(RUN).outcome == outcome
    assert json.loads((folder / "run.json").read_text())["outcome"] == outcome


def test_a_run_with_a_pod_that_is_not_proven_gone_stays_open(world: World) -> None:
    world.rented(in_s=10)
    world.ledger.set_plan(RUN, deadline=world.start + 10, worst_case_micros=1)
    assert close(world, 3600) == []
