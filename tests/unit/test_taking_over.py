"""Resuming: a run changes hands once, only from the dead, and the pod that is found again is the run's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from pennypod.errors import FencedError, GateError, InputError, NotReadyError, SshError
from pennypod.guard import Guard
from pennypod.ledger import AttemptRecord, AttemptState, Ledger, Outcome, RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.offer import Order
from pennypod.model.pod import PodState, SshAddress
from pennypod.podwork import Fence
from pennypod.rental import Rental, RentRequest, Tenancy
from pennypod.settings import Settings
from pennypod.ssh import pinned_host_keys, trust_host_keys

RUN = "demo-1201-abcde"
FIRST, SECOND, THIRD = "4194304:1", "4194304:2", "4194304:3"  # above the largest pid there can be


def quiet(*_args: object, **_numbers: object) -> None:
    return None


def nobody(_process: str) -> bool:
    return False


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.provider = FakeProvider(self.clock)
        self.settings = Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
        self.ledger: Ledger = open_ledger(self.settings)
        self.rental = Rental({"fake": self.provider}, self.ledger, self.clock)
        record = RunRecord(RUN, "demo", FIRST, self.clock.now(), str(tmp_path / "artifacts"))
        self.ledger.open_run(replace(record, keep_on_disconnect=True))

    def rent(self, *, controller: str | None = FIRST) -> Tenancy:
        deadline = self.clock.now() + 600
        self.ledger.set_plan(RUN, deadline=deadline, worst_case_micros=1)
        request = RentRequest(RUN, [offer(1)], {}, 20, deadline, "key", renter=FIRST, controller=controller)
        return self.rental.rent(request, FakeLogin(), quiet, lambda: None)

    def intend(self) -> tuple[AttemptRecord, str]:
        """A rent that died between its journal entry and its create call's answer."""
        lease = Lease(RUN, 1, int(self.clock.now() + 600), "abcde")
        return self.ledger.open_attempt(lease, offer(1), renter=FIRST, at=self.clock.now()), lease.name

    def resume(self, login: FakeLogin | None = None) -> Tenancy:
        return self.rental.resume(RUN, "key", login or FakeLogin(), quiet, pinned=[], limit_s=60)

    def guard(self) -> Guard:
        return Guard(self.settings, self.ledger, self.rental, self.clock, lambda _text: None)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_a_run_is_taken_over_from_the_dead_and_says_who_had_it(world: World) -> None:
    before = world.ledger.take_over(RUN, SECOND, nobody)
    assert before.controller == FIRST
    after = world.ledger.run(RUN)
    assert (after.controller, after.keep_on_disconnect) == (SECOND, True)
    assert [run.run for run in world.ledger.open_runs(SECOND)] == [RUN]
    assert world.ledger.open_runs(FIRST) == []


@pytest.mark.parametrize("keep", [True, False])
def test_taking_over_may_change_what_a_disconnect_means(world: World, keep: bool) -> None:
    world.ledger.take_over(RUN, SECOND, nobody, keep_on_disconnect=keep)
    assert world.ledger.run(RUN).keep_on_disconnect is keep


def test_a_live_controller_keeps_its_run(world: World) -> None:
    with pytest.raises(FencedError, match="still being worked on by process 4194304"):
        world.ledger.take_over(RUN, SECOND, lambda process: process == FIRST)
    assert world.ledger.run(RUN).controller == FIRST


def test_taking_over_again_is_no_change_though_the_controller_lives(world: World) -> None:
    world.ledger.take_over(RUN, SECOND, nobody)
    assert world.ledger.take_over(RUN, SECOND, lambda _process: True).controller == SECOND


def test_of_two_one_gets_it(world: World) -> None:
    def alive(process: str) -> bool:
        return process != FIRST

    world.ledger.take_over(RUN, SECOND, alive)
    with pytest.raises(FencedError):
        world.ledger.take_over(RUN, THIRD, alive)
    assert world.ledger.run(RUN).controller == SECOND


@pytest.mark.parametrize("ended", ["fenced", "closed"])
def test_what_is_over_is_not_taken_over(world: World, ended: str) -> None:
    if ended == "fenced":
        world.ledger.fence(RUN, "the deadline passed")
    else:
        world.ledger.close_run(RUN, Outcome.FAILED, "no luck", world.clock.now())
    with pytest.raises(FencedError):
        world.ledger.take_over(RUN, SECOND, nobody)
    assert world.ledger.run(RUN).controller == FIRST


def test_nothing_is_taken_over_from_a_rent_that_goes_on(world: World) -> None:
    attempt, _ = world.intend()
    for state in (AttemptState.INTENT, AttemptState.RENTED):
        if state is AttemptState.RENTED:
            world.ledger.record_pod(attempt.id, "pod-1", world.clock.now())
        calls = iter([False, True])  # the controller is dead, its rent is not
        with pytest.raises(FencedError, match="still being rented for"):
            world.ledger.take_over(RUN, SECOND, lambda _process, calls=calls: next(calls))  # type: ignore[misc]
    world.ledger.record_ready(attempt.id, SshAddress("h", 1), world.clock.now())
    answers = iter([False])  # a pod that is ready is nobody's rent any more: its renter is not asked about
    world.ledger.take_over(RUN, SECOND, lambda _process: next(answers))


def test_an_unknown_run_is_an_input_error(world: World) -> None:
    with pytest.raises(InputError):
        world.ledger.take_over("demo-1201-zzzzz", SECOND, nobody)


# --- a run whose id somebody else has chosen -------------------------------------------------------------------------


def chosen(world: World, run: str = "demo-1201-zzzzz", job: str = "demo", controller: str = SECOND) -> RunRecord:
    return RunRecord(run, job, controller, world.clock.now(), "artifacts", keep_on_disconnect=True)


def test_asked_for_twice_a_chosen_id_is_one_run_of_the_later_command(world: World) -> None:
    assert world.ledger.open_or_adopt_run(chosen(world, controller=SECOND), nobody)
    assert not world.ledger.open_or_adopt_run(chosen(world, controller=THIRD), nobody)
    assert world.ledger.run("demo-1201-zzzzz").controller == THIRD
    assert len(world.ledger.runs()) == 2


def test_a_chosen_run_that_was_closed_as_abandoned_is_opened_again(world: World) -> None:
    world.ledger.open_or_adopt_run(chosen(world), nobody)
    assert "demo-1201-zzzzz" in world.ledger.close_abandoned(nobody, world.clock.now())
    world.ledger.open_or_adopt_run(chosen(world, controller=THIRD), nobody)
    run = world.ledger.run("demo-1201-zzzzz")
    assert (run.closed, run.outcome, run.fenced_reason, run.controller) == (None, None, None, THIRD)
    world.ledger.raise_if_fenced(run.run, THIRD)


def test_a_chosen_run_is_not_taken_from_a_live_command(world: World) -> None:
    world.ledger.open_or_adopt_run(chosen(world), nobody)
    with pytest.raises(FencedError, match="worked on by process"):
        world.ledger.open_or_adopt_run(chosen(world, controller=THIRD), lambda process: process == SECOND)


@pytest.mark.parametrize("ended", ["fenced", "closed"])
def test_a_chosen_run_that_is_over_stays_over(world: World, ended: str) -> None:
    world.ledger.open_or_adopt_run(chosen(world), nobody)
    if ended == "fenced":
        world.ledger.fence("demo-1201-zzzzz", "cancelled")
    else:
        world.ledger.close_run("demo-1201-zzzzz", Outcome.SUCCEEDED, "done", world.clock.now())
    with pytest.raises(FencedError):
        world.ledger.open_or_adopt_run(chosen(world, controller=THIRD), nobody)


def test_a_chosen_run_that_has_rented_is_resumed_and_not_started_again(world: World) -> None:
    world.intend()
    with pytest.raises(FencedError, match="has rented before"):
        world.ledger.open_or_adopt_run(chosen(world, run=RUN), nobody)


def test_a_chosen_run_whose_tries_came_to_nothing_may_be_started_again(world: World) -> None:
    attempt, _ = world.intend()
    assert not world.rental.settle(attempt)
    assert world.ledger.attempts(RUN)[0].state is AttemptState.NEVER
    assert not world.ledger.open_or_adopt_run(chosen(world, run=RUN), nobody)


def test_a_create_that_nobody_saw_answered_is_settled_by_the_pods_name(world: World) -> None:
    attempt, name = world.intend()
    world.provider.rent(offer(1), Order(name, "", 20, "key", 0))
    assert world.rental.settle(attempt)
    assert world.ledger.attempts(RUN)[0].pod_id == "pod-1"
    assert list(world.provider.live) == ["pod-1"]


def test_a_chosen_id_of_another_job_is_refused(world: World) -> None:
    with pytest.raises(InputError, match="is one of job demo"):
        world.ledger.open_or_adopt_run(chosen(world, run=RUN, job="fdi"), nobody)


# --- what the dead controller has left behind -----------------------------------------------------------------------


def test_a_fence_in_the_name_of_the_old_controller_does_not_hit_the_new_one(world: World) -> None:
    world.ledger.take_over(RUN, SECOND, nobody)
    assert world.ledger.fence(RUN, "the controlling command ended", controller=FIRST) is False
    world.ledger.raise_if_fenced(RUN, SECOND)
    assert world.ledger.fence(RUN, "the deadline passed", controller=SECOND) is True
    with pytest.raises(FencedError, match="deadline"):
        world.ledger.raise_if_fenced(RUN, SECOND)


@pytest.mark.parametrize("keep", [True, False])
def test_a_slow_guard_of_the_old_controller_leaves_a_resumed_run_alone(world: World, keep: bool) -> None:
    """It has read the run as its own, and another controller takes it over before it acts."""
    world.rent()
    read = world.ledger.open_runs

    def slow(controller: str | None = None) -> list[RunRecord]:
        runs = read(controller)
        world.ledger.take_over(RUN, SECOND, nobody)
        return [replace(run, keep_on_disconnect=keep, deadline=0.0 if keep else run.deadline) for run in runs]

    world.ledger.open_runs = slow  # type: ignore[method-assign]
    assert world.guard().tick(FIRST, controller_alive=False) is False, "nothing of its own is left"
    assert len(world.provider.live) == 1
    assert world.ledger.run(RUN).fenced_reason is None


def test_the_new_controllers_guard_holds_the_deadline(world: World) -> None:
    world.rent()
    world.ledger.take_over(RUN, SECOND, nobody)
    assert world.guard().tick(SECOND, controller_alive=True) is True
    world.clock.sleep(601)
    world.guard().tick(FIRST, controller_alive=False)
    assert len(world.provider.live) == 1, "the old guard has no say any more"
    world.guard().tick(SECOND, controller_alive=True)
    assert world.provider.live == {}
    assert world.ledger.run(RUN).reason == "the deadline passed"


def test_work_that_the_old_controller_left_running_stops(world: World) -> None:
    fence = Fence(world.settings, RUN, world.clock)
    fence()
    world.ledger.take_over(RUN, SECOND, nobody)
    world.clock.sleep(1)
    with pytest.raises(FencedError, match="taken over"):
        fence()
    Fence(world.settings, RUN, world.clock)()


def test_a_rent_that_the_old_controller_left_running_rents_nothing_more(world: World) -> None:
    world.ledger.take_over(RUN, SECOND, nobody)
    with pytest.raises(FencedError, match="taken over"):
        world.rent(controller=FIRST)
    assert world.provider.created == []
    assert world.ledger.attempts(RUN) == []


# --- finding the pod again --------------------------------------------------------------------------------------------


def test_the_same_pod_is_found_and_not_checked_again(world: World) -> None:
    first = world.rent()
    found = world.resume(FakeLogin(None, GateError("must not be asked")))
    assert (found.pod.pod_id, found.created) == (first.pod.pod_id, False)
    assert world.provider.created == [first.pod.pod_id]


def test_an_address_that_has_moved_is_written_down(world: World) -> None:
    pod = world.rent().pod
    moved = SshAddress("10.0.0.9", 40000)
    world.provider.live[pod.pod_id] = replace(pod, address=moved)
    assert world.resume().address == moved
    (attempt,) = world.ledger.attempts(RUN)
    assert (attempt.ssh_host, attempt.ssh_port, attempt.state) == ("10.0.0.9", 40000, AttemptState.READY)


def test_a_pod_whose_id_was_never_recorded_is_found_by_its_lease_and_checked(world: World) -> None:
    _, name = world.intend()
    pod_id = world.provider.rent(offer(1), Order(name, "", 20, "key", 0))
    found = world.resume()
    assert (found.pod.pod_id, found.gate) == (pod_id, {"ok": True})
    (attempt,) = world.ledger.attempts(RUN)
    assert (attempt.pod_id, attempt.state) == (pod_id, AttemptState.READY)


def test_a_pod_that_was_never_accepted_can_fail_the_gate(world: World) -> None:
    attempt, name = world.intend()
    world.ledger.record_pod(attempt.id, world.provider.rent(offer(1), Order(name, "", 20, "key", 0)), 1.0)
    with pytest.raises(GateError):
        world.resume(FakeLogin(GateError("wrong product")))


@pytest.mark.parametrize(
    ("what", "said"),
    [("vanished", "any more"), ("failed", "failed"), ("stopped", "stopped"), ("destroying", "asked for"), ("", "none")],
)
def test_without_a_pod_there_is_nothing_to_resume(world: World, what: str, said: str) -> None:
    if what:
        tenancy = world.rent()
        pod_id = tenancy.pod.pod_id
        if what == "vanished":
            world.provider.live.clear()
        elif what == "destroying":
            world.ledger.record_destroying(tenancy.attempt.id, "done", "the run is over", world.clock.now())
        else:
            world.provider.live[pod_id] = replace(tenancy.pod, state=PodState(what))
    with pytest.raises(NotReadyError, match=said):
        world.resume()


def test_a_pod_that_lets_nobody_in_is_an_error_and_stays_on_the_books(world: World) -> None:
    world.rent()
    with pytest.raises(SshError):
        world.resume(FakeLogin(SshError("no login")))
    assert [attempt.final for attempt in world.ledger.attempts(RUN)] == [False]


def test_pinned_host_keys_are_read_back_for_that_address_only(tmp_path: Path) -> None:
    known_hosts = tmp_path / "known_hosts"
    assert pinned_host_keys(known_hosts, "h", 22) == []
    trust_host_keys(known_hosts, "h", 22, ["ssh-ed25519 AAAA"])
    trust_host_keys(known_hosts, "h", 2222, ["ssh-ed25519 BBBB comment", "ssh-rsa CCCC"])
    assert pinned_host_keys(known_hosts, "H", 2222) == ["ssh-ed25519 BBBB", "ssh-rsa CCCC"]
    assert pinned_host_keys(known_hosts, "h", 22) == ["ssh-ed25519 AAAA"]
