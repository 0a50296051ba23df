"""May a run whose pod was taken away go on on another one: after a real loss only, so many times, within its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from pennypod.errors import BudgetError, FencedError, LadderExhaustedError, TransientError, UnprovenError
from pennypod.eviction import LOST, Found, look_for_loss
from pennypod.ledger import Outcome, RunRecord, open_ledger
from pennypod.market import Estimate
from pennypod.model.admission import Caps
from pennypod.model.offer import Need
from pennypod.model.pod import PodState
from pennypod.planning import Limits, held, make_plan
from pennypod.rental import Rental, RentRequest
from pennypod.settings import Settings

RUN = "demo-1201-abcde"
LIFE_S = 3600


class World:
    """A run with pods at one provider, which takes them away when a test says so."""

    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.provider = FakeProvider(self.clock)
        self.ledger = open_ledger(Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}"))
        self.ledger.open_run(RunRecord(RUN, "demo", "1:1", self.clock.now(), str(home)))
        self.deadline = self.clock.now() + LIFE_S
        self.ledger.set_plan(RUN, deadline=self.deadline, worst_case_micros=0)
        self.rental = Rental({"fake": self.provider}, self.ledger, self.clock)

    def rent(self, caps: Caps | None = None, *, login: FakeLogin | None = None, price: int = 200_000) -> None:
        request = RentRequest(
            run=RUN,
            offers=[offer(1, price)],
            images={},
            disk_gb=20,
            deadline=self.deadline,
            public_key="key",
            renter="1:1",
            caps=held(caps or Caps(), self.ledger.attempts(RUN)),
        )
        self.rental.rent(request, login or FakeLogin(), lambda *_a, **_k: None, lambda: None)

    def look(self, *, most: int = 2, after: int = 0) -> Found:
        providers = {"fake": self.provider}
        return look_for_loss(self.ledger, providers, RUN, most=most, after=after, now=self.clock.now())

    def clear(self, found: Found) -> None:
        assert found.lost is not None
        self.rental.destroy(found.lost, outcome=LOST, reason=found.said, report=lambda *_a, **_k: None)

    def lose(self, *, most: int = 2) -> Found:
        self.provider.live.clear()
        found = self.look(most=most)
        if found.again:
            self.clear(found)
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_pod_that_was_taken_away_makes_room_for_another(world: World, stopped: bool) -> None:
    world.rent()
    if stopped:
        pod = world.provider.live["pod-1"]
        world.provider.live["pod-1"] = replace(pod, state=PodState.STOPPED, progress="evicted")
    else:
        world.provider.live.clear()
    found = world.look()
    assert found.again, found.why
    assert "pod-1" in found.why
    world.clear(found)
    world.rent()
    first, second = world.ledger.attempts(RUN)
    assert (first.outcome, first.reason, first.final, second.final) == (LOST, found.said, True, False)
    assert first.receipt is not None
    assert world.provider.most_alive == 1


def test_the_ledger_refuses_another_pod_before_the_lost_one_is_proven_gone(world: World) -> None:
    world.rent()
    pod = world.provider.live["pod-1"]
    world.provider.live["pod-1"] = replace(pod, state=PodState.STOPPED, progress="evicted")
    world.provider.ignored_destroys = 10_000
    found = world.look()
    with pytest.raises(UnprovenError):
        world.clear(found)
    with pytest.raises((FencedError, UnprovenError)):
        world.rent()
    assert world.provider.created == ["pod-1"]
    assert world.look().again, "the next look goes on with the same loss"


def test_a_training_that_failed_by_itself_gets_no_other_pod(world: World) -> None:
    world.rent()
    assert world.look() == Found(False, "its pod was not taken away")


def test_a_provider_that_does_not_answer_tells_of_no_loss(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(_pod_id: str) -> None:
        raise TransientError("no answer")

    world.rent()
    monkeypatch.setattr(world.provider, "pod", no_answer)
    assert not world.look().again


def test_a_run_that_never_had_a_pod_has_lost_none(world: World) -> None:
    assert not world.look().again


def test_a_pod_that_we_have_ended_was_not_taken_away(world: World) -> None:
    world.rent()
    (attempt,) = world.ledger.attempts(RUN)
    world.rental.destroy(attempt, outcome="done", reason="cancelled", report=lambda *_a, **_k: None)
    assert not world.look().again


def test_losses_are_counted_over_the_whole_run_whoever_looks(world: World) -> None:
    for number in (1, 2):
        world.rent()
        assert f"loss {number} of at most 2" in world.lose().why
    world.rent()
    found = world.lose()
    assert (found.again, found.why.split("; ")[1]) == (False, "that was loss 3 of this run, and max_evictions is 2")
    assert len(world.provider.created) == 3


def test_without_any_allowed_loss_the_first_one_is_the_end(world: World) -> None:
    world.rent()
    assert not world.lose(most=0).again


def test_one_loss_is_one_reason_to_rent_and_no_more(world: World) -> None:
    """A ladder that is exhausted after a loss must not be walked for ever."""
    world.rent()
    found = world.lose()
    assert found.lost is not None
    assert world.look().again, "who took the run over in between rents in its place"
    assert not world.look(after=found.lost.attempt).again


def test_a_rung_that_failed_after_the_loss_is_no_loss_of_its_own(world: World) -> None:
    world.rent()
    world.lose()
    world.provider.starts_as.append(PodState.FAILED)
    with pytest.raises(LadderExhaustedError):
        world.rent()
    assert not world.look().again


def test_a_run_that_was_stopped_gets_nothing_any_more(world: World) -> None:
    world.rent()
    world.provider.live.clear()
    world.ledger.fence(RUN, "cancelled")
    assert not world.look().again
    world.ledger.close_run(RUN, Outcome.CANCELLED, "cancelled", world.clock.now())
    assert not world.look().again


def test_after_its_deadline_a_run_gets_nothing_any_more(world: World) -> None:
    world.rent()
    world.provider.live.clear()
    world.clock.sleep(LIFE_S)
    assert not world.look().again


def test_the_cap_of_the_first_pod_holds_for_the_second_though_nobody_names_it_again(world: World) -> None:
    world.rent(Caps(run=250_000, price=400_000))
    world.clock.sleep(LIFE_S / 2)
    world.lose()
    with pytest.raises(LadderExhaustedError, match="max_cost_usd"):
        world.rent(price=390_000)  # $0.10 spent and $0.195 to come
    assert [record.code for record in world.ledger.passed_over(RUN)] == [BudgetError.code]
    world.rent(price=200_000)
    assert world.provider.created == ["pod-1", "pod-2"]


def test_caps_may_be_lowered_on_the_way_and_not_raised(world: World) -> None:
    world.rent(Caps(run=250_000, price=400_000))
    attempts = world.ledger.attempts(RUN)
    assert held(Caps(run=900_000, price=900_000), attempts) == Caps(run=250_000, price=400_000)
    assert held(Caps(run=210_000, day=1), attempts) == Caps(run=210_000, day=1, price=400_000)


def test_a_plan_for_the_rest_of_a_run_costs_no_more_than_the_rest(world: World) -> None:
    estimate = Estimate(boot_s=60, train_s=540)
    whole = make_plan({"fake": world.provider}, Need(), estimate, Limits(2.5, 8))
    rest = make_plan({"fake": world.provider}, Need(), estimate, Limits(2.5, 8, left_s=700))
    assert (whole.deadline_s, rest.deadline_s) == (1500, 700)
    assert rest.worst_case_micros < whole.worst_case_micros
