"""A key of another account sees no pod of ours: its "not there" proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from pennypod.errors import AmbiguousError, TransientError, UnprovenError
from pennypod.ledger import AttemptState, Ledger, RunRecord, open_ledger
from pennypod.model.account import Account, mark
from pennypod.model.ids import Lease
from pennypod.receipts import content_problems
from pennypod.rental import Rental, RentRequest
from pennypod.settings import Settings

RUN = "demo-1201-abcde"
KEY, OTHER_KEY = "key-of-the-one-that-rents", "key-of-somebody-else"


def quiet(*_args: object, **_numbers: object) -> None:
    return None


class Cloud(FakeProvider):
    """Shows each account its own pods only. `told` is whether a key may read whose it is."""

    def __init__(self, clock: FakeClock, key: str, holder: str, *, told: bool = True) -> None:
        super().__init__(clock)
        self._key, self._holder, self._told = key, holder, told
        self.asked = 0

    def key_mark(self) -> str:
        return mark(self.name, self._key)

    def holder(self) -> str | None:
        self.asked += 1
        return self._holder if self._told else None

    def with_key(self, key: str, holder: str, *, told: bool = True) -> Cloud:
        """The same cloud seen with another key."""
        seen = Cloud(self._clock, key, holder, told=told)
        if holder == self._holder:
            seen.live = self.live
        return seen


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.cloud = Cloud(self.clock, KEY, "1001")
        settings = Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
        self.ledger: Ledger = open_ledger(settings)
        self.ledger.open_run(RunRecord(RUN, "demo", "1:1", self.clock.now(), str(tmp_path / "artifacts")))

    def rent(self) -> None:
        request = RentRequest(RUN, [offer(1)], {}, 20, self.clock.now() + 600, "ssh-ed25519 AAAA", renter="1:1")
        Rental({"fake": self.cloud}, self.ledger, self.clock).rent(request, FakeLogin(), quiet, lambda: None)

    def destroy(self, cloud: FakeProvider) -> None:
        [attempt] = self.ledger.attempts(RUN)
        Rental({"fake": cloud}, self.ledger, self.clock).destroy(attempt, outcome="done", reason="over", report=quiet)

    @property
    def state(self) -> AttemptState:
        [attempt] = self.ledger.attempts(RUN)
        return attempt.state


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


def test_the_ledger_and_the_receipt_say_which_account_rented_and_never_the_key(world: World, tmp_path: Path) -> None:
    world.rent()
    world.destroy(world.cloud)
    [attempt] = world.ledger.attempts(RUN)
    assert attempt.account == {"key": mark("fake", KEY), "holder": "1001"}
    assert attempt.receipt is not None
    assert attempt.receipt["account"] == "1001"
    assert content_problems(attempt.receipt) == []
    world.ledger.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize("told", [True, False])
def test_another_accounts_key_proves_nothing(world: World, told: bool) -> None:
    world.rent()
    with pytest.raises(UnprovenError, match=r"by account 1001, and the key in use is .*may still be billing"):
        world.destroy(world.cloud.with_key(OTHER_KEY, "2002", told=told))
    assert world.state not in (AttemptState.GONE, AttemptState.NEVER)
    assert len(world.cloud.live) == 1
    world.destroy(world.cloud)
    assert world.state is AttemptState.GONE


def test_nor_does_it_say_that_a_lost_create_made_nothing(world: World) -> None:
    world.cloud.lost_replies = 1
    world.cloud.list_faults = [TransientError("502")] * 100
    with pytest.raises((AmbiguousError, UnprovenError)):
        world.rent()
    world.cloud.list_faults.clear()
    [attempt] = world.ledger.attempts(RUN)
    stranger = world.cloud.with_key(OTHER_KEY, "2002")
    with pytest.raises(UnprovenError, match="what was rented as pennypod-demo"):
        world.destroy(stranger)
    with pytest.raises(UnprovenError):
        Rental({"fake": stranger}, world.ledger, world.clock).settle(attempt)
    assert world.state is AttemptState.INTENT
    world.destroy(world.cloud)
    assert world.state is AttemptState.GONE


def test_another_key_of_the_same_account_will_do(world: World) -> None:
    world.rent()
    world.destroy(world.cloud.with_key(OTHER_KEY, "1001"))
    assert world.state is AttemptState.GONE


def test_a_key_that_may_not_read_whose_it_is_will_do_while_it_is_shown_the_pod(world: World) -> None:
    world.rent()
    world.destroy(world.cloud.with_key(OTHER_KEY, "1001", told=False))
    assert world.state is AttemptState.GONE


def test_with_the_key_that_rented_nobody_is_asked_whose_it_is(world: World) -> None:
    world.rent()
    asked = world.cloud.asked
    world.destroy(world.cloud)
    assert world.cloud.asked == asked == 1


def test_an_attempt_of_a_former_version_is_judged_by_whatever_key_there_is(world: World) -> None:
    lease = Lease(RUN, 1, int(world.clock.now()) + 600, "abcde")
    attempt = world.ledger.open_attempt(lease, offer(1), renter="1:1", at=world.clock.now())
    world.ledger.record_pod(attempt.id, "pod-1", world.clock.now())
    assert world.ledger.attempt(attempt.id).account is None
    world.destroy(world.cloud)
    assert world.state is AttemptState.GONE


def test_accounts_are_told_apart_by_their_id_alone() -> None:
    mine = Account("a", "1001")
    assert mine.is_same(Account("a")) is True
    assert mine.is_same(Account("b", "1001")) is True
    assert mine.is_same(Account("b", "2002")) is False
    assert mine.is_same(Account("b")) is None
