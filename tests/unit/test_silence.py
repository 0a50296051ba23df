"""Nobody waits for a provider in silence while a pod may bill."""

from __future__ import annotations

import threading

import pytest
from fakes import FakeClock, FakeProvider, offer
from pennypod.clock import Clock
from pennypod.errors import AuthError, ProviderError, TransientError
from pennypod.model.offer import Order
from pennypod.proof import Proof, Sought
from pennypod.silence import AGAIN_S, FIRST_S, Silence


class NoCalls:
    def claim(self, _provider: str, _pod_id: str) -> float:
        return 0.0


def silence(clock: Clock, since: list[float | None], said: list[str]) -> Silence:
    return Silence("vast", lambda: since[0], said.append, clock)


def test_it_is_said_after_ten_seconds_and_then_each_thirty() -> None:
    clock = FakeClock()
    watch = silence(clock, [clock.now()], [])
    assert watch.words() == ""
    clock.sleep(FIRST_S)
    assert watch.words() == "vast does not answer since 14:40:00 UTC; a pod there may still be billing; trying on"
    assert watch.words() == ""
    clock.sleep(AGAIN_S)
    assert "since 14:40:00 UTC" in watch.words()


def test_an_answer_ends_it() -> None:
    clock = FakeClock()
    since: list[float | None] = [clock.now()]
    watch = silence(clock, since, [])
    clock.sleep(FIRST_S)
    assert watch.words()
    since[0] = None
    assert (watch.words(), watch.words()) == ("vast answers again", "")


def test_it_is_said_while_one_call_is_still_waiting() -> None:
    clock, heard = FakeClock(), threading.Event()
    started = clock.now()
    clock.sleep(FIRST_S)

    def hear(_text: str) -> None:
        heard.set()

    with Silence("vast", lambda: started, hear, clock, tick_s=0.01):
        assert heard.wait(10)


@pytest.fixture
def proof() -> Proof:
    clock = FakeClock()
    provider = FakeProvider(clock)
    pod_id = provider.rent(offer(1), Order("pennypod-x", "stock", 20, "key", clock.now() + 600))
    return Proof(Sought(provider, pod_id, "pennypod-x"), NoCalls(), clock)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fault", "silent"), [(TransientError("refused"), True), (AuthError("no"), False)])
def test_a_destroy_without_an_answer_is_silence_and_a_refusal_is_none(
    proof: Proof, fault: ProviderError, silent: bool
) -> None:
    provider = proof.sought.provider
    assert isinstance(provider, FakeProvider)
    provider.destroy_faults = [fault]
    proof.ask()
    assert (proof.silent_since is not None) is silent
    proof.ask()
    assert proof.silent_since is None
