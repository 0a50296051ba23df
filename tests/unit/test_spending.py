"""The money wall: a run stops while the end of its pod can still be paid for, whatever its pod costs by then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeClock, FakeProvider, offer
from pennypod.errors import AuthError, TransientError
from pennypod.ledger import Ledger, RunRecord, open_ledger
from pennypod.model.admission import Asked, Caps
from pennypod.model.ids import Lease
from pennypod.model.offer import Order
from pennypod.model.pod import SshAddress
from pennypod.providers.base import PriceRequest
from pennypod.settings import Settings
from pennypod.spending import LOOK_EVERY_S, MoneyWatch, used_up

RUN = "demo-1201-abcde"
PRICE = 3_600_000  # a thousand micro-dollars a second


class Hosts(FakeProvider):
    """A provider whose hosts ask for more."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.asked: dict[str, PriceRequest] = {}
        self.refused: list[str] = []

    def price_requests(self) -> list[PriceRequest]:
        return list(self.asked.values())

    def refuse_price(self, request_id: str) -> None:
        self.refused.append(self.asked.pop(request_id).request_id)


class World:
    def __init__(self, home: Path, *, cap: int | None = 1_000_000, price_cap: int | None = None) -> None:
        self.clock = FakeClock()
        self.provider = Hosts(self.clock)
        self.ledger: Ledger = open_ledger(Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}"))
        self.ledger.open_run(RunRecord(RUN, "demo", "1:1", self.clock.now(), str(home)))
        lease = Lease(RUN, 1, int(self.clock.now()) + 900, "aaaaa")
        asked = Asked(900_000, Caps(run=cap, price=price_cap))
        attempt = self.ledger.open_attempt(lease, offer(1, PRICE), renter="1:1", at=self.clock.now(), asked=asked)
        self.pod_id = self.provider.rent(offer(1, PRICE), Order(lease.name, "", 20, "key", lease.deadline))
        self.ledger.record_pod(attempt.id, self.pod_id, self.clock.now())
        self.ledger.record_look(attempt.id, computing=True, since=self.clock.now(), at=self.clock.now())
        self.ledger.record_ready(attempt.id, SshAddress("127.0.0.1", 22), self.clock.now())
        self.said: list[str] = []
        self.watch = MoneyWatch(
            RUN, self.ledger, self.provider, self.clock, lambda _s, text, **_n: self.said.append(text), reserve_s=60
        )

    def after(self, seconds: float) -> str:
        self.clock.sleep(seconds)
        self.watch()
        self.watch.settle()
        self.clock.sleep(1)
        return self.watch()

    def ask_for(self, price: int) -> None:
        self.provider.live[self.pod_id] = replace(self.provider.live[self.pod_id], price_micros_per_h=price)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


def test_it_stops_while_the_reserve_can_still_be_paid_for(world: World) -> None:
    assert world.after(900) == ""
    assert "it has cost $0.94" in world.after(40)
    assert world.watch.seconds_left() == pytest.approx(58, abs=1)


def test_a_price_that_rises_moves_the_wall_and_is_told(world: World) -> None:
    assert world.after(300) == ""
    world.ask_for(3 * PRICE)
    assert world.after(LOOK_EVERY_S) == ""
    assert any("asks $10.8000/h" in line for line in world.said)
    (attempt,) = world.ledger.attempts(RUN)
    assert attempt.price_now == 3 * PRICE
    # $0.30 at the old price, then $0.003 every second: the reserve of 60 s begins 173 s after the rise, not 640.
    assert world.after(100) == ""
    assert world.after(60) != ""


def test_without_a_cap_there_is_no_wall(tmp_path: Path) -> None:
    world = World(tmp_path, cap=None)
    assert world.after(100_000) == ""
    assert world.watch.seconds_left() is None


def test_a_price_above_the_cap_ends_the_run_whatever_is_left(tmp_path: Path) -> None:
    world = World(tmp_path, cap=None, price_cap=PRICE)
    assert world.after(10) == ""
    world.ask_for(2 * PRICE)
    assert "over max_price_usd_per_h" in world.after(LOOK_EVERY_S)


def test_a_provider_that_does_not_answer_changes_nothing(world: World) -> None:
    world.ask_for(10 * PRICE)
    world.provider.pod = _down  # type: ignore[method-assign, assignment]
    assert world.after(LOOK_EVERY_S) == ""


def _down(_pod_id: str) -> None:
    raise TransientError("502")


def test_a_host_that_asks_for_more_than_the_highest_price_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, cap=None, price_cap=2 * PRICE)
    world.provider.asked["r1"] = PriceRequest("r1", world.pod_id, 3 * PRICE)
    world.provider.asked["r2"] = PriceRequest("r2", "somebody-elses-pod", 9 * PRICE)
    assert world.after(10) == ""
    assert world.provider.refused == ["r1"]
    assert [line for line in world.said if "refused" in line and "$10.8000/h" in line and "$7.2000/h" in line]


def test_a_host_that_asks_for_more_than_the_caps_leave_until_the_deadline_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, cap=1_000_000)
    world.ledger.set_plan(RUN, deadline=world.clock.now() + 900, worst_case_micros=900_000)
    world.clock.sleep(100)  # $0.90 is left for 800 s: $4.05/h, and not more
    for number, price in (("dear", 4_100_000), ("cheap", 4_000_000)):
        world.provider.asked[number] = PriceRequest(number, world.pod_id, price)
    assert world.after(0) == ""
    assert world.provider.refused == ["dear"]


def test_what_the_caps_allow_is_told_once_and_left_to_its_owner(world: World) -> None:
    world.provider.asked["r1"] = PriceRequest("r1", world.pod_id, PRICE + 1)
    for _ in range(3):
        world.after(LOOK_EVERY_S)
    assert world.provider.refused == []
    assert len([line for line in world.said if "accept it yourself" in line]) == 1


def test_a_key_that_may_not_see_the_requests_changes_nothing(world: World) -> None:
    world.provider.price_requests = _no_right  # type: ignore[method-assign]
    world.ask_for(3 * PRICE)
    assert world.after(LOOK_EVERY_S) == ""
    assert world.ledger.attempts(RUN)[0].price_now == 3 * PRICE


def _no_right() -> list[PriceRequest]:
    raise AuthError("403")


def test_a_run_whose_pod_is_gone_has_no_wall_any_more(world: World) -> None:
    world.clock.sleep(2000)
    (attempt,) = world.ledger.attempts(RUN)
    assert used_up([attempt], world.clock.now(), 0) != ""
    world.ledger.record_gone(attempt.id, {}, world.clock.now(), 0)
    assert used_up(world.ledger.attempts(RUN), world.clock.now(), 0) == ""
