"""One live pod per run, and no pod without proof of its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from pennypod.errors import (
    AmbiguousError,
    AuthError,
    FencedError,
    GateError,
    GuardError,
    InvalidError,
    LadderExhaustedError,
    NoCapacityError,
    OfferGoneError,
    ProviderError,
    RateLimitedError,
    SshError,
    TransientError,
    UnprovenError,
)
from pennypod.fuse import AFTER_DEADLINE_S, FuseState
from pennypod.ledger import AttemptState, Ledger, RunRecord, open_ledger
from pennypod.model.admission import Caps
from pennypod.model.ids import parse_lease
from pennypod.model.image import RegistryLogin
from pennypod.model.offer import FuseTerms, Offer, Order
from pennypod.model.pod import PodState, SshAddress
from pennypod.rental import RATE_LIMIT_PATIENCE_S, Rental, RentRequest, Report, Tenancy, Terms
from pennypod.report import run_document
from pennypod.settings import Settings

RUN = "demo-1201-abcde"


def quiet(*_args: object, **_numbers: object) -> None:
    return None


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.provider = FakeProvider(self.clock)
        settings = Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
        self.ledger: Ledger = open_ledger(settings)
        self.ledger.open_run(RunRecord(RUN, "demo", "1:1", self.clock.now(), str(tmp_path / "artifacts")))
        self.rental = Rental({"fake": self.provider}, self.ledger, self.clock)
        self.guard_calls = 0

    def rent(self, login: FakeLogin | None = None, offers: int = 3, report: Report = quiet) -> Tenancy:
        return self.rental.rent(self.request(offers), login or FakeLogin(), report, self._guard)

    def request(self, offers: int = 3) -> RentRequest:
        return RentRequest(
            run=RUN,
            offers=[offer(number) for number in range(1, offers + 1)],
            images={"fake": "stock"},
            disk_gb=20,
            deadline=self.clock.now() + 600,
            public_key="ssh-ed25519 AAAA",
            renter="1:1",
        )

    def destroy(self, **options: float) -> None:
        for attempt in self.ledger.attempts(RUN):
            self.rental.destroy(attempt, outcome="done", reason="the run is over", report=quiet, **options)

    def states(self) -> list[AttemptState]:
        return [attempt.state for attempt in self.ledger.attempts(RUN)]

    def _guard(self) -> None:
        self.guard_calls += 1


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


def test_a_rented_pod_carries_its_lease_in_its_name(world: World) -> None:
    tenancy = world.rent()
    lease = parse_lease(tenancy.pod.name)
    assert lease is not None
    assert (lease.run, lease.attempt, lease.deadline) == (RUN, 1, int(world.clock.now() + 600))
    assert world.states() == [AttemptState.READY]


def test_renting_twice_for_one_run_gives_the_same_pod(world: World) -> None:
    first = world.rent()
    second = world.rent()
    assert (second.created, second.pod.pod_id) == (False, first.pod.pod_id)
    assert world.provider.created == [first.pod.pod_id]


def test_a_pod_that_fails_the_gate_is_gone_before_the_next_is_rented(world: World) -> None:
    tenancy = world.rent(FakeLogin(GateError("wrong product")))
    assert tenancy.attempt.machine_id == "machine-2"
    assert world.provider.most_alive == 1
    assert list(world.provider.live) == [tenancy.pod.pod_id]
    first = world.ledger.attempts(RUN)[0]
    assert (first.state, first.outcome, first.reason) == (AttemptState.GONE, "gate_failed", "wrong product")
    assert first.receipt is not None
    assert [record.machine_id for record in world.ledger.quarantined(world.clock.now())] == ["machine-1"]


GOLDEN = f"ghcr.io/me/golden@sha256:{'5' * 64}"


@pytest.mark.parametrize(
    "trouble", [PodState.FAILED, PodState.STARTING, GateError("no torch"), SshError("no sshd"), InvalidError("refused")]
)
def test_an_image_of_ours_that_gave_no_usable_pod_is_not_paid_for_twice(
    world: World, trouble: PodState | GateError | SshError | InvalidError
) -> None:
    if isinstance(trouble, PodState):
        world.provider.starts_as = [trouble]
    elif isinstance(trouble, InvalidError):
        world.provider.rent_faults = [trouble]
    login = FakeLogin(trouble) if isinstance(trouble, (GateError, SshError)) else FakeLogin()
    secret = RegistryLogin("ghcr.io", "pods", "canary-51c7")
    said: list[str] = []
    request = replace(
        world.request(),
        images={"fake": GOLDEN},
        instead={"fake": "stock"},
        logins={"ghcr.io": secret},
    )
    tenancy = world.rental.rent(request, login, lambda _stage, text, **_numbers: said.append(text), world._guard)
    assert [(order.image, order.login) for order in world.provider.orders] == [(GOLDEN, secret), ("stock", None)]
    assert tenancy.image == "stock"
    assert len([text for text in said if text.startswith("warning: the next pods at fake")]) == 1
    assert list(world.provider.live) == [tenancy.pod.pod_id]
    assert not [text for text in said if "canary" in text]


@pytest.mark.parametrize("fault", [NoCapacityError("none left"), OfferGoneError("taken"), TransientError("busy")])
def test_an_image_is_not_blamed_for_a_market(world: World, fault: ProviderError) -> None:
    world.provider.rent_faults = [fault]
    request = replace(world.request(), images={"fake": GOLDEN}, instead={"fake": "stock"})
    assert world.rental.rent(request, FakeLogin(), quiet, world._guard).image == GOLDEN


def test_a_quarantine_ends_after_a_day(world: World) -> None:
    world.rent(FakeLogin(GateError("wrong product")))
    assert world.ledger.quarantined(world.clock.now() + 25 * 3600) == []


@pytest.mark.parametrize("fault", [OfferGoneError("taken"), NoCapacityError("none left"), TransientError("busy")])
def test_a_refused_create_leaves_no_pod_and_the_next_offer_is_tried(
    world: World, fault: OfferGoneError | NoCapacityError | TransientError
) -> None:
    world.provider.rent_faults = [fault]
    assert world.rent().attempt.machine_id == "machine-2"
    assert world.states() == [AttemptState.NEVER, AttemptState.READY]


def test_too_many_calls_cost_a_wait_and_no_rung(world: World) -> None:
    world.provider.rent_faults = [RateLimitedError("too many calls", 7.0), RateLimitedError("too many calls", 1.0)]
    before = world.clock.now()
    tenancy = world.rent()
    assert (tenancy.attempt.machine_id, tenancy.attempt.attempt) == ("machine-1", 3)
    assert world.clock.now() - before == pytest.approx(7 + 4)  # as long as asked, and at least twice the pause before
    assert world.states() == [AttemptState.NEVER, AttemptState.NEVER, AttemptState.READY]
    assert len({attempt.lease_name for attempt in world.ledger.attempts(RUN)}) == 3
    assert world.guard_calls == 3


def test_a_provider_that_asks_for_a_long_wait_loses_the_rung(world: World) -> None:
    world.provider.rent_faults = [RateLimitedError("come back tomorrow", 36_000.0)]
    before = world.clock.now()
    assert world.rent().attempt.machine_id == "machine-2"
    assert world.clock.now() == before
    assert world.ledger.attempts(RUN)[0].outcome == "rate_limited"


def test_the_wait_for_one_offer_has_an_end(world: World) -> None:
    world.provider.rent_faults = [RateLimitedError("too many calls", 1.0) for _ in range(1000)]
    before = world.clock.now()
    with pytest.raises(LadderExhaustedError) as caught:
        world.rent(offers=2)
    assert [rung["code"] for rung in caught.value.details["attempts"]] == ["rate_limited", "rate_limited"]
    assert world.clock.now() - before <= 2 * RATE_LIMIT_PATIENCE_S
    assert world.provider.created == []


def test_whoever_waits_for_a_provider_hears_that_the_run_was_taken_away(world: World) -> None:
    world.provider.rent_faults = [RateLimitedError("too many calls", 60.0)]
    world.clock.on_sleep = lambda: world.ledger.fence(RUN, "the guard is here") and None
    with pytest.raises(FencedError):
        world.rent()
    assert world.provider.created == []


def test_a_wrong_key_ends_the_ladder_at_once(world: World) -> None:
    world.provider.rent_faults = [AuthError("wrong key")]
    with pytest.raises(AuthError):
        world.rent()
    assert world.states() == [AttemptState.NEVER]


def test_a_lost_reply_is_found_by_its_name_and_not_rented_again(world: World) -> None:
    world.provider.lost_replies = 1
    tenancy = world.rent()
    assert world.provider.created == [tenancy.pod.pod_id]
    assert world.states() == [AttemptState.READY]


def test_a_lost_create_that_made_nothing_is_settled_before_the_next_offer(world: World) -> None:
    world.provider.rent_faults = [AmbiguousError("connection reset")]
    before = world.clock.now()
    world.rent()
    assert world.states() == [AttemptState.NEVER, AttemptState.READY]
    assert world.clock.now() - before >= world.provider.timing.listing_lag_s


def test_every_offer_failing_is_one_error_that_names_each_reason(world: World) -> None:
    with pytest.raises(LadderExhaustedError) as caught:
        world.rent(FakeLogin(GateError("no product"), SshError("no login"), GateError("hang")))
    assert [rung["code"] for rung in caught.value.details["attempts"]] == ["gate_failed", "ssh", "gate_failed"]
    assert world.provider.live == {}
    assert world.states() == [AttemptState.GONE] * 3


def test_a_pod_without_progress_is_given_up(world: World) -> None:
    world.provider.starts_as = [PodState.STARTING]
    tenancy = world.rent()
    assert tenancy.attempt.machine_id == "machine-2"
    assert "no progress" in (world.ledger.attempts(RUN)[0].reason or "")


def test_a_pod_in_a_terminal_state_is_given_up_at_once(world: World) -> None:
    world.provider.starts_as = [PodState.FAILED]
    before = world.clock.now()
    world.rent()
    assert world.clock.now() - before < world.provider.timing.start_patience_s


def test_nothing_is_rented_without_a_guard(world: World) -> None:
    def no_guard() -> None:
        raise GuardError("no guard")

    request = RentRequest(RUN, [offer(1)], {}, 20, world.clock.now() + 600, "key", "1:1")
    with pytest.raises(GuardError):
        world.rental.rent(request, FakeLogin(), quiet, no_guard)
    assert world.provider.created == []
    assert world.states() == []


def test_the_guard_is_asked_for_before_every_create(world: World) -> None:
    world.rent(FakeLogin(GateError("bad"), GateError("bad")))
    assert world.guard_calls == 3


def test_a_fenced_run_rents_nothing(world: World) -> None:
    world.ledger.fence(RUN, "the guard took it")
    with pytest.raises(FencedError):
        world.rent()
    assert world.provider.created == []


def test_a_run_fenced_while_its_pod_starts_loses_that_pod(world: World) -> None:
    world.provider.starts_as = [PodState.STARTING]
    world.clock.on_sleep = lambda: world.ledger.fence(RUN, "the controller died")
    with pytest.raises(FencedError):
        world.rent()
    assert world.provider.live == {}
    assert world.states() == [AttemptState.GONE]


def test_a_pod_that_arrives_after_its_attempt_was_given_up_is_destroyed(world: World) -> None:
    rent = world.provider.rent

    def slow_rent(offer: object, order: object) -> str:
        attempt = world.ledger.attempts(RUN)[0]
        world.ledger.record_never(attempt.id, "cancelled", "given up by the guard", world.clock.now())
        return rent(offer, order)  # type: ignore[arg-type]

    world.provider.rent = slow_rent  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        world.rent()
    assert world.provider.live == {}


def test_destroying_gives_a_receipt_with_the_price_of_every_second(world: World) -> None:
    world.rent()
    world.clock.sleep(90)
    world.destroy()
    attempt = world.ledger.attempts(RUN)[0]
    assert attempt.state is AttemptState.GONE
    assert attempt.receipt is not None
    seconds = attempt.receipt["gone_at"] - attempt.receipt["rented_at"]
    assert seconds >= 90
    assert attempt.receipt["cost_micros"] == attempt.estimated_micros == -(-200_000 * seconds // 3600)
    asked = [step["asked"] for step in attempt.receipt["proof"]]
    assert asked == ["destroy", *["is it there", "is it listed"] * 3]
    assert [step["answer"] for step in attempt.receipt["proof"]] == ["accepted", *["absent"] * 6]


def test_the_time_that_proof_takes_is_not_counted_as_billed(world: World) -> None:
    world.rent()
    world.clock.sleep(90)
    world.provider.list_faults = [None, TransientError("502"), None, None, None]
    world.destroy()
    receipt = world.ledger.attempts(RUN)[0].receipt
    assert receipt is not None
    *before, last_destroy = receipt["proof"][:-6]
    assert [step["answer"] for step in receipt["proof"][-6:]] == ["absent"] * 6
    assert last_destroy["asked"] == "destroy"
    assert "absent" in [step["answer"] for step in before]  # an answer of "absent" before an error does not count
    assert receipt["gone_at"] == last_destroy["at"]
    assert receipt["proven_at"] == world.clock.now() > receipt["gone_at"]
    assert receipt["billed_seconds"] == receipt["gone_at"] - receipt["rented_at"]


def test_destroying_twice_keeps_the_first_receipt(world: World) -> None:
    world.rent()
    world.destroy()
    receipt = world.ledger.attempts(RUN)[0].receipt
    world.clock.sleep(10)
    world.destroy()
    assert world.ledger.attempts(RUN)[0].receipt == receipt


def test_an_error_is_never_absence(world: World) -> None:
    world.rent()
    world.provider.list_faults = [None, None, TransientError("502"), None, None]
    world.destroy()
    attempt = world.ledger.attempts(RUN)[0]
    assert attempt.receipt is not None
    answers = [step["answer"] for step in attempt.receipt["proof"]]
    assert answers[-6:] == ["absent"] * 6
    assert any(answer.startswith("transient") for answer in answers)


def test_a_destroy_that_does_nothing_is_repeated_until_it_does(world: World) -> None:
    world.rent()
    world.provider.ignored_destroys = 2
    world.destroy()
    assert world.provider.live == {}
    assert world.states() == [AttemptState.GONE]


def test_an_unproven_destroy_stays_on_the_books(world: World) -> None:
    world.rent()
    world.provider.ignored_destroys = 10_000
    with pytest.raises(UnprovenError):
        world.destroy(patience_s=60)
    assert world.states() == [AttemptState.DESTROYING]
    assert len(world.ledger.pending_attempts()) == 1


def test_no_second_pod_while_the_first_is_not_proven_gone(world: World) -> None:
    world.provider.ignored_destroys = 10_000
    with pytest.raises(UnprovenError):
        world.rent(FakeLogin(GateError("bad")))
    assert len(world.provider.created) == 1


def test_an_intent_left_by_a_crash_is_settled_before_the_next_create(world: World) -> None:
    world.provider.lost_replies = 1

    def die(*_args: object) -> None:
        raise KeyboardInterrupt

    find = world.rental._endings.find_by_name
    world.rental._endings.find_by_name = die  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        world.rent()
    assert world.states() == [AttemptState.INTENT]
    world.rental._endings.find_by_name = find  # type: ignore[method-assign]
    world.rent()
    assert world.provider.most_alive == 1
    assert world.states() == [AttemptState.GONE, AttemptState.READY]


# --- the ladder's bounds ----------------------------------------------------------------------------------------------


def climb(world: World, login: FakeLogin, offers: list[Offer], **limits: Any) -> Tenancy:
    request = RentRequest(
        run=RUN,
        offers=offers,
        images={},
        disk_gb=20,
        deadline=world.clock.now() + 600,
        public_key="ssh-ed25519 AAAA",
        renter="1:1",
        **limits,
    )
    return world.rental.rent(request, login, quiet, lambda: None)


def test_what_failed_attempts_have_cost_counts_towards_the_cap(world: World) -> None:
    """The dear offer would fit the cap alone; after a pod that failed late it does not, and a cheap one still does."""

    class Slow(FakeLogin):
        def check(self, address: SshAddress) -> dict[str, Any]:
            world.clock.sleep(60)
            return super().check(address)

    # Ten minutes: the first costs $0.05 for its minute, nine minutes of the second $0.99 more.
    offers = [offer(1, 3_000_000), offer(2, 6_600_000), offer(3, 600_000)]
    assert climb(world, Slow(GateError("bad")), offers, caps=Caps(run=1_000_000)).attempt.machine_id == "machine-3"
    assert [attempt.machine_id for attempt in world.ledger.attempts(RUN)] == ["machine-1", "machine-3"]


def test_an_offer_over_the_cap_is_passed_over_with_its_reason(world: World) -> None:
    with pytest.raises(LadderExhaustedError) as caught:
        climb(world, FakeLogin(), [offer(1, 6_000_001)], caps=Caps(run=1_000_000))
    (rung,) = caught.value.details["attempts"]
    assert (rung["code"], world.provider.created) == ("over_budget", [])
    assert climb(world, FakeLogin(), [offer(1, 6_000_000)], caps=Caps(run=1_000_000)).created


def test_traffic_counts_towards_the_cap(world: World) -> None:
    with pytest.raises(LadderExhaustedError):
        climb(
            world,
            FakeLogin(),
            [offer(1, 6_000_000)],
            caps=Caps(run=1_000_000),
            terms={"offer-1": Terms(traffic_micros=1)},
        )


def test_an_offer_on_which_the_run_could_not_finish_any_more_is_passed_over(world: World) -> None:
    class Slow(FakeLogin):
        def check(self, address: SshAddress) -> dict[str, Any]:
            world.clock.sleep(300)
            return super().check(address)

    terms = {"offer-1": Terms(600), "offer-2": Terms(400), "offer-3": Terms(200)}
    offers = [offer(1), offer(2), offer(3)]
    tenancy = climb(world, Slow(GateError("bad")), offers, terms=terms)
    assert tenancy.attempt.machine_id == "machine-3"
    assert [attempt.machine_id for attempt in world.ledger.attempts(RUN)] == ["machine-1", "machine-3"]


# --- the fuse ---------------------------------------------------------------------------------------------------------


class FuseLogin(FakeLogin):
    """A pod that says how its fuse is."""

    def __init__(self, armed: bool) -> None:
        super().__init__()
        self._fuse = FuseState(armed, has_key=armed or None, renewable=armed).as_document()

    def check(self, address: SshAddress) -> dict[str, Any]:
        return {**super().check(address), "fuse": self._fuse}


def test_every_pod_is_asked_for_with_a_fuse_for_its_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Order] = []
    rent = world.provider.rent
    monkeypatch.setattr(world.provider, "rent", lambda offer, order: orders.append(order) or rent(offer, order))
    world.rent()
    assert orders[0].fuse == FuseTerms(seconds_left=600, lease_s=0, after_s=AFTER_DEADLINE_S)


@pytest.mark.parametrize("armed", [True, False])
def test_how_the_fuse_is_stands_in_the_ledger_and_the_report(world: World, armed: bool) -> None:
    told: list[str] = []
    tenancy = world.rent(FuseLogin(armed), report=lambda _stage, text, **_n: told.append(text))
    assert tenancy.attempt.fuse is not None
    document = run_document(world.ledger, RUN, world.clock.now())
    assert document["fuse"]["armed"] is armed
    assert document["fuse"]["lease_s"] == 0
    assert any("warning: the pod's own fuse does not run" in line for line in told) is not armed
