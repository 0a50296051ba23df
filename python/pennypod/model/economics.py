"""Where the seconds and the cents of a run went, part by part. Floor 0; no I/O.

The pod's life is cut where its stages begin and end. What no stage covers is `pull` until the container runs, `boot`
until the first stage, and `idle` later on. The money of a part is the difference of the meter's readings at its ends:
the parts add up to the bill, to the micro-dollar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pennypod.model.meter import PodMeter

PULL, BOOT, IDLE, TRAFFIC, OTHER_PODS = "pull", "boot", "idle", "traffic", "other pods"
"""What is no stage: waiting for the image and the login, time nobody used, bytes, and pods that came to nothing."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stage from `begin` to `end`, Unix seconds."""

    stage: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Part:
    """`seconds` of the pods' lives and what they cost, in micro-dollars."""

    name: str
    seconds: float
    micros: int


def parts(pod: PodMeter | None, others: Iterable[PodMeter], stages: Sequence[Span], now: float) -> list[Part]:
    """The parts in order of time, those of nothing left out.

    `pod` is the one that served the run, `others` are those that were rented before it and given back.
    """
    found: dict[str, Part] = {}
    if pod is not None:
        for name, begin, end in _cut(pod, stages, now):
            _add(found, name, end - begin, _without_traffic(pod, end) - _without_traffic(pod, begin))
    for other in others:
        _add(found, OTHER_PODS, _end(other, now) - other.made, other.micros(now))
    if pod is not None:
        _add(found, TRAFFIC, 0.0, pod.micros(now) - _without_traffic(pod, _end(pod, now)))
    return list(found.values())


def _cut(pod: PodMeter, stages: Sequence[Span], now: float) -> Iterable[tuple[str, float, float]]:
    """The pod's life in pieces that touch each other: (name, begin, end)."""
    # A stage that began before the pod belongs to one before it up to an unknown moment, so its end alone is told.
    own = [span for span in stages if span.begin >= pod.made]
    last = _end(pod, now)
    moments = {pod.made, last, pod.computing, *(at for span in own for at in (span.begin, span.end))}
    marks = sorted(at for at in moments if pod.made <= at <= last)
    first = min((span.begin for span in own), default=last)
    for begin, end in pairwise(marks):
        running = [span for span in own if span.begin <= begin and end <= span.end]
        if running:
            yield max(running, key=lambda span: span.begin).stage, begin, end
        elif begin < pod.computing:
            yield PULL, begin, end
        else:
            yield (BOOT if begin < first else IDLE), begin, end


def _add(found: dict[str, Part], name: str, seconds: float, micros: int) -> None:
    if seconds > 0 or micros > 0:
        known = found.get(name, Part(name, 0.0, 0))
        found[name] = replace(known, seconds=known.seconds + max(0.0, seconds), micros=known.micros + micros)


def _end(pod: PodMeter, now: float) -> float:
    return max(pod.made, now if pod.ended is None else pod.ended)


def _without_traffic(pod: PodMeter, at: float) -> int:
    """The reading at a moment of the pod's life."""
    end = at if pod.ended is None else min(at, pod.ended)
    return replace(pod, ended=end, sent_bytes=0, fetched_bytes=0).micros(end)
