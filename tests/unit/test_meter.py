"""What a pod has cost: computing, disk, traffic, prices that move; and how looks at it narrow its start down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fakes import offer
from hypothesis import given
from hypothesis import strategies as st
from pennypod.ledger import AttemptRecord, Ledger, PassedOverRecord, RunRecord, open_ledger
from pennypod.metering import MeterReader, pause_s
from pennypod.model.ids import Lease
from pennypod.model.meter import PodMeter, uncounted_words
from pennypod.model.money import cost_micros
from pennypod.model.netdev import received_and_sent
from pennypod.model.pod import Pod, PodState
from pennypod.settings import Settings

NOW = 1_764_600_000.0
RUN = "demo-1201-abcde"
HOUR = 3600.0


def test_the_disk_counts_from_the_create_and_the_rest_from_the_container_on() -> None:
    meter = PodMeter(410_000, made=NOW, computing=NOW + HOUR, disk_micros_per_h=10_000)
    assert meter.parts(NOW + HOUR) == {"compute": 0, "disk": 10_000, "traffic": 0}
    assert meter.parts(NOW + 2 * HOUR) == {"compute": 400_000, "disk": 20_000, "traffic": 0}
    assert meter.seconds(NOW + 2 * HOUR) == HOUR


def test_an_end_stops_every_part() -> None:
    meter = PodMeter(360_000, made=NOW, computing=NOW, ended=NOW + 10, sent_bytes=7, in_micros_per_gb=10**9)
    assert meter.micros(NOW + 9999) == 1007
    assert replace(meter, ended=NOW - 5).micros(NOW) == 7


def test_a_price_holds_until_the_next_one() -> None:
    meter = PodMeter(360_000, made=NOW, computing=NOW, steps=((NOW + 100, 720_000), (NOW + 200, 180_000)))
    assert meter.micros(NOW + 100) == 10_000
    assert meter.micros(NOW + 200) == 30_000
    assert meter.micros(NOW + 300) == 35_000
    assert (meter.price_now, replace(meter, steps=()).price_now) == (180_000, 360_000)


prices = st.integers(0, 50_000_000)
spans = st.integers(0, 100_000)


@given(prices, st.lists(st.tuples(spans, prices), max_size=4), spans, spans, prices)
def test_it_never_runs_backwards_and_never_costs_more_than_the_dearest_price_all_along(
    price: int, later: list[tuple[int, int]], wait: int, run: int, disk: int
) -> None:
    steps, at = [], NOW
    for gap, step in later:
        at += gap
        steps.append((at, step))
    meter = PodMeter(price, made=NOW, computing=NOW + wait, disk_micros_per_h=min(disk, price), steps=tuple(steps))
    end = NOW + wait + run
    assert meter.micros(end) <= meter.micros(end + 1)
    dearest = max(price, *(step for _, step in steps)) if steps else price
    assert meter.micros(end) <= cost_micros(dearest + meter.disk_micros_per_h, wait + run) + len(steps) + 2


def test_through_json_it_is_the_same() -> None:
    meter = PodMeter(360_000, made=NOW, computing=NOW, steps=((NOW + 100, 720_000),))
    assert PodMeter(**asdict(meter) | {"steps": [[NOW + 100, 720_000]]}).micros(NOW + 200) == meter.micros(NOW + 200)


def test_traffic_is_charged_by_the_byte() -> None:
    meter = PodMeter(0, made=NOW, computing=NOW, sent_bytes=1_500_000_000, in_micros_per_gb=10_000)
    assert meter.parts(NOW) == {"compute": 0, "disk": 0, "traffic": 15_000}
    assert replace(meter, fetched_bytes=1, out_micros_per_gb=1).micros(NOW) == 15_001


def test_the_sum_is_rounded_once() -> None:
    meter = PodMeter(3_600, made=NOW, computing=NOW + 0.1, disk_micros_per_h=1_800, sent_bytes=1, in_micros_per_gb=1)
    assert meter.parts(NOW + 0.2) == {"compute": 1, "disk": 1, "traffic": 1}
    assert meter.micros(NOW + 0.2) == 1


# --- looks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = open_ledger(Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}"))
    ledger.open_run(RunRecord(RUN, "demo", "1:1", NOW, str(tmp_path)))
    yield ledger
    ledger.close()


@pytest.fixture
def attempt(ledger: Ledger) -> AttemptRecord:
    made = ledger.open_attempt(Lease(RUN, 1, int(NOW) + 600, "aaaaa"), offer(1, 360_000), renter="1:1", at=NOW)
    ledger.record_pod(made.id, "pod-1", NOW + 1)
    return ledger.attempts(RUN)[0]


class Looks:
    """A reader and what it has said."""

    def __init__(self, ledger: Ledger, attempt: AttemptRecord) -> None:
        self.said: list[str] = []
        self.reader = MeterReader(ledger, attempt, lambda _stage, text, **_numbers: self.said.append(text))

    def look(self, at: float, state: PodState, *, price: int = 360_000, since: float | None = None) -> AttemptRecord:
        pod = Pod("fake", "pod-1", "x", state, NOW, price, computing_since=since)
        self.reader.note(pod, at, at)
        return self.reader.attempt


def test_computing_counts_from_the_last_look_that_said_not_yet(ledger: Ledger, attempt: AttemptRecord) -> None:
    looks = Looks(ledger, attempt)
    assert attempt.billed_seconds(NOW + 60) == 60, "nobody has looked: the create call counts"
    looks.look(NOW + 2, PodState.STARTING)
    looks.look(NOW + 7, PodState.STARTING)
    looks.look(NOW + 12, PodState.RUNNING)
    (after,) = ledger.attempts(RUN)
    assert (after.computing_from, after.computing_seen) == (NOW + 7, NOW + 12)
    assert after.cost_micros(NOW + 67) == cost_micros(360_000, 60)


@pytest.mark.parametrize(
    ("told", "counted"),
    [(NOW + 9.5, NOW + 9.5), (NOW + 3, NOW + 7), (NOW + 99, NOW + 12), (None, NOW + 7)],
    ids=["between the looks", "before them", "after them", "not told"],
)
def test_what_a_provider_tells_may_only_narrow_the_gap(
    ledger: Ledger, attempt: AttemptRecord, told: float | None, counted: float
) -> None:
    looks = Looks(ledger, attempt)
    looks.look(NOW + 7, PodState.STARTING)
    assert looks.look(NOW + 12, PodState.RUNNING, since=told).computing_from == counted


def test_a_pod_that_was_seen_running_stays_so(ledger: Ledger, attempt: AttemptRecord) -> None:
    looks = Looks(ledger, attempt)
    looks.look(NOW + 5, PodState.RUNNING)
    looks.look(NOW + 50, PodState.STARTING)
    assert looks.look(NOW + 55, PodState.RUNNING).computing_from == NOW


@pytest.mark.parametrize("state", [PodState.STOPPED, PodState.FAILED])
def test_one_that_stopped_between_two_looks_may_have_computed(
    ledger: Ledger, attempt: AttemptRecord, state: PodState
) -> None:
    looks = Looks(ledger, attempt)
    looks.look(NOW + 5, PodState.STARTING)
    assert looks.look(NOW + 10, state).computing_from == NOW + 5


def test_the_price_of_the_pod_itself_replaces_the_offers(ledger: Ledger, attempt: AttemptRecord) -> None:
    looks = Looks(ledger, attempt)
    looks.look(NOW + 5, PodState.RUNNING, price=372_000)
    (after,) = ledger.attempts(RUN)
    assert (after.price_micros_per_h, after.price_steps) == (372_000, None)
    assert len(looks.said) == 1
    assert "$0.3720/h" in looks.said[0]


def test_a_later_rise_counts_since_the_look_before_it_and_a_fall_from_its_own(
    ledger: Ledger, attempt: AttemptRecord
) -> None:
    looks = Looks(ledger, attempt)
    looks.look(NOW + 5, PodState.RUNNING)
    looks.look(NOW + 65, PodState.RUNNING)
    looks.look(NOW + 125, PodState.RUNNING, price=720_000)
    looks.look(NOW + 185, PodState.RUNNING, price=360_000)
    (after,) = ledger.attempts(RUN)
    assert after.price_steps == [[NOW + 65, 720_000], [NOW + 185, 360_000]]
    assert after.price_now == 360_000


def test_a_pod_that_does_not_compute_may_say_that_it_costs_nothing(ledger: Ledger, attempt: AttemptRecord) -> None:
    looks = Looks(ledger, attempt)
    looks.look(NOW + 1, PodState.STARTING, price=0)
    looks.look(NOW + 2, PodState.STARTING, price=5_000)
    assert looks.look(NOW + 5, PodState.RUNNING).price_now == 360_000
    assert looks.said == []


def test_the_first_looks_follow_each_other_quickly() -> None:
    assert pause_s(0, 5, running=False) == 0.25
    assert pause_s(10, 5, running=False) == 2
    assert pause_s(600, 5, running=False) == 5
    assert pause_s(0, 5, running=True) == 5
    assert pause_s(0, 0.2, running=False) == 0.2


# --- what else the ledger keeps ---------------------------------------------------------------------------------------


def test_traffic_adds_up_on_the_pod_that_is_there(ledger: Ledger, attempt: AttemptRecord) -> None:
    ledger.add_traffic(RUN, sent=1000, fetched=10)
    ledger.add_traffic(RUN, sent=500, fetched=0)
    (after,) = ledger.attempts(RUN)
    assert (after.sent_bytes, after.fetched_bytes) == (1500, 10)
    ledger.record_traffic(RUN, sent=9000, fetched=5, at=NOW)  # by the pod's own count
    (after,) = ledger.attempts(RUN)
    assert (after.sent_bytes, after.fetched_bytes) == (9000, 10)
    ledger.record_gone(attempt.id, {}, NOW + 60, 0)
    ledger.add_traffic(RUN, sent=1, fetched=1)
    assert ledger.attempts(RUN)[0].sent_bytes == 9000


def test_traffic_is_known_only_by_a_count_at_the_end(ledger: Ledger, attempt: AttemptRecord) -> None:
    def now() -> AttemptRecord:
        return replace(ledger.attempts(RUN)[0], ready=NOW, traffic_in_micros_per_gb=5, destroy_requested=NOW + 100)

    assert not now().traffic_known(NOW + 200)
    ledger.record_traffic(RUN, sent=9, fetched=5, at=NOW + 20)
    ledger.add_traffic(RUN, sent=9, fetched=5)
    assert not now().traffic_known(NOW + 200)
    ledger.record_traffic(RUN, sent=20, fetched=20, at=NOW + 99)
    assert now().traffic_known(NOW + 9999)


def test_traffic_that_costs_nothing_or_was_never_made_is_no_gap(ledger: Ledger, attempt: AttemptRecord) -> None:
    (record,) = ledger.attempts(RUN)
    charged = replace(record, ready=NOW, traffic_in_micros_per_gb=0, traffic_out_micros_per_gb=7)
    assert not charged.traffic_known(NOW)
    assert replace(charged, ready=None).traffic_known(NOW)
    assert replace(charged, traffic_out_micros_per_gb=0).traffic_known(NOW)
    assert not replace(charged, traffic_in_micros_per_gb=None, traffic_out_micros_per_gb=None).traffic_known(NOW)


def test_the_last_count_is_named_where_a_cost_lacks_traffic() -> None:
    assert uncounted_words(None) == " and its traffic, which it could no longer tell"
    assert uncounted_words(NOW) == " and its traffic since 14:40 UTC, which it could no longer tell"


NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier comp
    lo:  999      9    0    0    0     0          0         0      999       9    0    0    0     0       0          0
  eth0: 1000     10    0    0    0     0          0         0      200       2    0    0    0     0       0          0
  eth1:   24      1    0    0    0     0          0         0        1       1    0    0    0     0       0          0
"""


def test_a_machines_own_count_leaves_out_what_stayed_inside() -> None:
    assert received_and_sent(NET_DEV) == (1024, 201)
    assert received_and_sent("cat: /proc/net/dev: No such file or directory") is None
    assert received_and_sent("") is None


def test_offers_that_were_passed_over_are_kept_in_order(ledger: Ledger) -> None:
    first = PassedOverRecord(RUN, NOW, "fake", "o-1", "m-1", "CPU", 200_000, "over_budget", "too dear")
    second = replace(first, offer_id="o-2", reason="too late")
    for record in (first, second):
        ledger.record_passed_over(record)
    assert ledger.passed_over(RUN) == [first, second]
