"""A pod that was taken away: whoever knows why is asked, and the run's reason says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeClock, FakeProvider, offer
from pennypod.errors import TransientError
from pennypod.ledger import AttemptRecord, AttemptState
from pennypod.model.offer import Order
from pennypod.model.pod import PodState
from pennypod.podwork import cause_of_loss, explained


class World:
    """One rented pod."""

    def __init__(self) -> None:
        clock = FakeClock()
        self.provider = FakeProvider(clock)
        pod_id = self.provider.rent(offer(1), Order("pennypod-x", "stock", 20, "key", clock.now() + 600))
        self.attempt = AttemptRecord(
            id=1,
            run="demo-1201-abcde",
            attempt=1,
            lease_name="pennypod-x",
            provider="fake",
            offer_id="1",
            machine_id="machine-1",
            gpu="CPU",
            gpu_count=1,
            price_micros_per_h=200_000,
            renter="1:1",
            state=AttemptState.READY,
            intended=clock.now(),
            pod_id=pod_id,
            rented=clock.now(),
        )

    def show(self, state: PodState, progress: str = "") -> None:
        self.provider.live["pod-1"] = replace(self.provider.live["pod-1"], state=state, progress=progress)

    def cause(self) -> str:
        return cause_of_loss(self.provider, self.attempt)


@pytest.mark.parametrize(
    ("state", "progress", "said"),
    [
        (PodState.STOPPED, "exited evicted", "fake shows pod pod-1 as stopped: exited evicted; "),
        (PodState.FAILED, "offline", "fake shows pod pod-1 as failed: offline; "),
        (PodState.FAILED, "", "fake shows pod pod-1 as failed: no reason given; "),
    ],
)
def test_what_the_provider_shows_is_the_cause(state: PodState, progress: str, said: str) -> None:
    world = World()
    world.show(state, progress)
    assert world.cause() == said + "start the run again to rent another one"
    assert explained("Connection refused", world.cause()) == f"{world.cause()} (noticed as: Connection refused)"


def test_a_pod_that_is_no_longer_listed_is_said_to_be() -> None:
    world = World()
    world.provider.live.clear()
    assert world.cause().startswith("pod pod-1 is no longer listed at fake; ")


def test_a_pod_that_runs_is_the_cause_of_nothing() -> None:
    assert World().cause() == ""
    assert explained("pip could not install x", "") == "pip could not install x"


def test_absence_after_our_own_destroy_is_no_cause() -> None:
    world = World()
    world.provider.live.clear()
    world.attempt = replace(world.attempt, state=AttemptState.DESTROYING)
    assert world.cause() == ""


def test_a_provider_that_does_not_answer_keeps_no_pod_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(_pod_id: str) -> None:
        raise TransientError("no answer")

    world = World()
    monkeypatch.setattr(world.provider, "pod", no_answer)
    assert world.cause() == ""
