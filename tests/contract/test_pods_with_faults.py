"""Pods that are up and yet not right, with real containers, real SSH and the real acceptance check.

Each fault states its right end: the pod is taken after all, or the rung is lost with the reason; no pod is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pennypod.acceptance import GateOptions, PodLogin, run_key
from pennypod.clock import SystemClock
from pennypod.errors import LadderExhaustedError
from pennypod.ledger import AttemptState, RunRecord, open_ledger
from pennypod.model.offer import Need
from pennypod.providers.base import Provider
from pennypod.providers.http import Http
from pennypod.providers.runpod import TIMING as RUNPOD_TIMING
from pennypod.providers.runpod import RunpodProvider
from pennypod.providers.vast import TIMING as VAST_TIMING
from pennypod.providers.vast import VastProvider
from pennypod.rental import Rental, RentRequest, Tenancy
from pennypod.settings import Settings
from simulated import KEYS, RUN, Simulator, simulator
from workspace import REPOSITORY

pytestmark = [pytest.mark.heavy, pytest.mark.pod, pytest.mark.timeout(900), pytest.mark.xdist_group("simulator_pods")]


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator("--pods", "container", "--speed", "1", "--seed", "17") as running:
        yield running


class Renting:
    """One provider's client in real time, with short waits, and everything that looks at a pod as it is in a run."""

    def __init__(self, sim: Simulator, home: Path, provider: str) -> None:
        home.mkdir(mode=0o700)
        shared = REPOSITORY / ".cache" / "tests-home"
        shared.mkdir(parents=True, exist_ok=True)
        (home / "cache").symlink_to(shared)
        self.sim = sim
        self.name = provider
        self.clock = SystemClock()
        self.settings = Settings(home, f"sqlite:///{home / 'ledger.sqlite3'}")
        self.ledger = open_ledger(self.settings)
        self.ledger.open_run(RunRecord(RUN, "demo", "1:1", self.clock.now(), str(home)))

    def rent(self, limit_s: float) -> Tenancy:
        quick = {"listing_lag_s": 2.0, "absence_spacing_s": 0.3, "poll_s": 0.3, "start_limit_s": limit_s}
        http = Http(self.name, self.sim.url, KEYS[self.name], self.clock, quiet_s=0.3)
        client: Provider = (
            VastProvider(http, self.clock, timing=replace(VAST_TIMING, **quick))
            if self.name == "vast"
            else RunpodProvider(http, self.clock, timing=replace(RUNPOD_TIMING, **quick))
        )
        self.rental = Rental({self.name: client}, self.ledger, self.clock)
        gate = GateOptions(device="auto", allow_no_torch=True)
        login = PodLogin(self.settings, RUN, gate, self.clock, on_wait=lambda _why: None)
        request = RentRequest(
            run=RUN,
            offers=sorted(client.offers(Need(gpu=("RTX 4090",))), key=lambda offer: offer.price_micros_per_h)[:1],
            images={},
            disk_gb=10,
            deadline=self.clock.now() + 1800,
            public_key=run_key(self.settings, RUN)[1],
            renter="1:1",
        )
        return self.rental.rent(request, login, lambda *_a, **_k: None, lambda: None)

    def close(self) -> None:
        for attempt in self.ledger.attempts(RUN):
            self.rental.destroy(attempt, outcome="done", reason="the test is over", report=lambda *_a, **_k: None)
        assert all(attempt.final for attempt in self.ledger.attempts(RUN))
        self.ledger.close()
        assert self.sim.live() == []


@pytest.fixture
def renting(sim: Simulator, tmp_path: Path, provider: str) -> Iterator[Renting]:
    renting = Renting(sim, tmp_path / "home", provider)
    yield renting
    renting.close()


@pytest.mark.parametrize(
    ("provider", "fault", "options"),
    [
        ("vast", "wrong_port", {"seconds": 3}),
        ("vast", "direct_blocked", {}),
        ("runpod", "sshd_late", {"seconds": 4}),
        ("vast", "key_missing", {}),  # our own start script has let the key in
    ],
)
def test_a_pod_that_can_be_entered_in_the_end_is_taken(
    renting: Renting, provider: str, fault: str, options: dict[str, float]
) -> None:
    renting.sim.fault(f"{provider}.create", fault, times=1, **options)
    tenancy = renting.rent(limit_s=120)
    assert [attempt.state for attempt in renting.ledger.attempts(RUN)] == [AttemptState.READY]
    assert tenancy.gate["ok"] is True
    assert len(renting.sim.live()) == 1


@pytest.mark.parametrize(
    ("provider", "fault", "outcome", "words", "limit_s"),
    [
        ("runpod", "bad_gpu", "gate_failed", "GPU is lost", 120),
        ("vast", "bad_gpu", "gate_failed", "GPU is lost", 120),
        ("runpod", "key_missing", "ssh", "Permission denied", 15),
        ("runpod", "no_sshd", "ssh", "no login within", 15),
    ],
)
def test_a_pod_that_is_no_good_costs_its_rung_and_says_why(
    renting: Renting, provider: str, fault: str, outcome: str, words: str, limit_s: float
) -> None:
    renting.sim.fault(f"{provider}.create", fault, times=1)
    with pytest.raises(LadderExhaustedError):
        renting.rent(limit_s)
    (attempt,) = renting.ledger.attempts(RUN)
    assert (attempt.state, attempt.outcome) == (AttemptState.GONE, outcome)
    assert words in (attempt.reason or "")
    assert renting.sim.live() == []
    now = renting.clock.now()
    quarantined = [record.machine_id for record in renting.ledger.quarantined(now)]
    # Vast's machine is known and left alone; RunPod chooses another one by itself.
    assert quarantined == ([attempt.machine_id] if (provider, fault) == ("vast", "bad_gpu") else [])
