"""Where the cents went: the parts cover the pod's life without a gap and add up to the bill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod.model.economics import Part, Span, parts
from pennypod.model.meter import PodMeter

DISK, ALL_IN = 36_000_000, 396_000_000  # micro-dollars per hour: 10,000 and 110,000 a second
POD = PodMeter(ALL_IN, made=100, computing=110, disk_micros_per_h=DISK, ended=200)
STAGES = [
    Span("gate", 115, 118),
    Span("bootstrap", 118, 150),
    Span("training", 152, 190),
    Span("teardown", 190, 203),
]


def test_the_life_of_a_pod_is_cut_at_its_stages() -> None:
    assert parts(POD, [], STAGES, now=500) == [
        Part("pull", 10, 100_000),  # the disk alone
        Part("boot", 5, 550_000),
        Part("gate", 3, 330_000),
        Part("bootstrap", 32, 3_520_000),
        Part("idle", 2, 220_000),
        Part("training", 38, 4_180_000),
        Part("teardown", 10, 1_100_000),  # until the meter stopped
    ]


def test_traffic_and_pods_that_came_to_nothing_are_parts_of_their_own() -> None:
    pod = PodMeter(ALL_IN, made=100, computing=100, ended=110, sent_bytes=2_000_000_000, in_micros_per_gb=5)
    lost = PodMeter(ALL_IN, made=50, computing=60, ended=90)
    assert parts(pod, [lost], [Span("training", 100, 110)], now=500) == [
        Part("training", 10, 1_100_000),
        Part("other pods", 40, 3_300_000),
        Part("traffic", 0.0, 10),
    ]


def test_of_overlapping_stages_the_later_one_counts() -> None:
    both = [Span("bootstrap", 110, 200), Span("dataset", 120, 130)]
    assert [(p.name, p.seconds) for p in parts(POD, [], both, now=500)] == [
        ("pull", 10),
        ("bootstrap", 80),
        ("dataset", 10),
    ]


def test_a_stage_that_began_with_a_pod_before_is_not_told_apart_from_booting() -> None:
    cut = parts(POD, [], [Span("gate", 20, 118), Span("training", 118, 200)], now=500)
    assert [(p.name, p.seconds) for p in cut] == [("pull", 10), ("boot", 8), ("training", 82)]


def test_without_a_pod_nothing_was_spent() -> None:
    assert parts(None, [], STAGES, now=500) == []


times = st.integers(0, 500).map(float)


@given(
    made=times,
    life=times,
    wait=times,
    now=times,
    running=st.booleans(),
    stages=st.lists(st.tuples(st.sampled_from(["gate", "dataset", "training"]), times, times), max_size=6),
    bytes_sent=st.integers(0, 10**12),
    step=st.none() | st.tuples(times, st.integers(0, 10**9)),
)
def test_the_parts_add_up_to_the_bill_and_to_the_life(
    made: float,
    life: float,
    wait: float,
    now: float,
    running: bool,
    stages: list[tuple[str, float, float]],
    bytes_sent: int,
    step: tuple[float, int] | None,
) -> None:
    ended = None if running else made + life
    pod = PodMeter(
        ALL_IN,
        made,
        computing=made + wait,
        disk_micros_per_h=DISK,
        ended=ended,
        sent_bytes=bytes_sent,
        in_micros_per_gb=7,
        steps=() if step is None else ((made + step[0], step[1]),),
    )
    cut = parts(pod, [], [Span(name, a, a + b) for name, a, b in stages], now)
    end = now if ended is None else ended
    if end >= made:
        assert sum(part.micros for part in cut) == pod.micros(now)
        assert sum(part.seconds for part in cut) == pytest.approx(end - made)
    assert all(part.micros >= 0 and part.seconds >= 0 for part in cut)
