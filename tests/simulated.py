"""The simulator as a process with a clock that stands still until somebody sleeps, and our own parts on top of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from fakes import FakeLogin
from pennypod.ledger import AttemptRecord, Ledger, RunRecord, open_ledger
from pennypod.model.offer import Need, Offer
from pennypod.providers.base import Provider
from pennypod.providers.http import Http, Pacing
from pennypod.providers.runpod import RunpodProvider
from pennypod.providers.vast import SPACING_S, VastProvider
from pennypod.rental import Rental, RentRequest, Tenancy
from pennypod.settings import Settings
from pennypod.simulator.clock import VirtualClock
from pennypod.simulator.pods import Ghosts
from pennypod.simulator.server import Simulator as Server
from pennypod.simulator.state import Boot, World

RUN = "demo-1201-abcde"
KEYS = {"vast": "canary-vast-7d21", "runpod": "canary-runpod-93ab"}
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0oxLPVh6nQ9xVU1h0Wl9M1s3JzYkq3TnWbBz4sXq1P pennypod"


class Simulator:
    def __init__(self, url: str, pid: int = 0) -> None:
        self.url = url
        self.pid = pid
        self._session = requests.Session()

    def get(self, page: str) -> Any:
        return self._session.get(f"{self.url}/_sim/{page}", timeout=10).json()

    def post(self, page: str, body: Any) -> Any:
        reply = self._session.post(f"{self.url}/_sim/{page}", json=body, timeout=10)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def fault(self, endpoint: str, fault: str, **options: Any) -> None:
        """`endpoint` as the simulator calls it; "vast.get" is what Vast's own clients call "show"."""
        endpoint = "vast.show" if endpoint == "vast.get" else endpoint
        self.post("faults", {"endpoint": endpoint, "fault": fault, **options})

    def clear_faults(self) -> None:
        self._session.delete(f"{self.url}/_sim/faults", timeout=10).raise_for_status()

    def live(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("pods")["live"]
        return found

    def ever(self) -> list[dict[str, Any]]:
        pods = self.get("pods")
        return sorted([*pods["live"], *pods["gone"]], key=lambda pod: pod["created"])

    def creates(self) -> int:
        wanted = (("PUT", "/api/v0/asks/"), ("POST", "/v2/pods"))
        return sum(
            1 for row in self.get("requests")["requests"] if any(_is(row, method, path) for method, path in wanted)
        )


def _is(row: dict[str, Any], method: str, path: str) -> bool:
    return row["method"] == method and str(row["path"]).startswith(path)


class SimulatedClock:
    """The simulator's own time: sleeping is what moves it."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._now = float(simulator.get("clock")["now"])

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now = float(self._simulator.post("clock", {"advance": max(0.001, seconds)})["now"])


@contextmanager
def simulator(*options: str) -> Iterator[Simulator]:
    command = [sys.executable, "-m", "pennypod.simulator", "--port", "0", "--pods", "ghost", "--speed", "0", *options]
    env = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stdout is not None
        yield Simulator(json.loads(process.stdout.readline())["url"], process.pid)
    finally:
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def simulator_within(seed: int) -> Iterator[Simulator]:
    """The same inside this process, where a hundred tests want a fresh one each: no program has to start for it."""
    world = World(VirtualClock(0.0), Ghosts(), seed=seed, market={}, faults=[], boot=Boot(loading_s=20.0))
    server = Server(world)
    server.start()
    try:
        yield Simulator(server.url)
    finally:
        server.stop()


class RentingWorld:
    """Both clients, a ledger and the rental on one simulator."""

    def __init__(self, home: Path, simulator: Simulator) -> None:
        self.simulator = simulator
        self.clock = SimulatedClock(simulator)
        vast = Http("vast", simulator.url, KEYS["vast"], self.clock, pacing=Pacing(SPACING_S))
        runpod = Http("runpod", simulator.url, KEYS["runpod"], self.clock, quiet_s=0.3)
        self.providers: dict[str, Provider] = {
            "vast": VastProvider(vast, self.clock),
            "runpod": RunpodProvider(runpod, self.clock),
        }
        settings = Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}")
        self.ledger: Ledger = open_ledger(settings)
        self.ledger.open_run(RunRecord(RUN, "demo", "1:1", self.clock.now(), str(home)))
        self.rental = Rental(self.providers, self.ledger, self.clock)
        self.lines: list[str] = []

    def offers(self, provider: str, need: Need | None = None) -> list[Offer]:
        found = self.providers[provider].offers(need or Need(gpu=("RTX 4090", "RTX 3090", "L4", "A40")))
        return sorted(found, key=lambda offer: offer.price_micros_per_h)

    def rent(self, offers: list[Offer], login: Any = None, **changes: Any) -> Tenancy:
        values: dict[str, Any] = {
            "run": RUN,
            "offers": offers,
            "images": {},
            "disk_gb": 20,
            "deadline": self.clock.now() + 7200,
            "public_key": PUBLIC_KEY,
            "renter": "1:1",
        }
        request = RentRequest(**(values | changes))
        return self.rental.rent(request, login or FakeLogin(), self._report, lambda: None)

    def end(self, patience_s: float = 300.0) -> None:
        for attempt in self.attempts:
            self.rental.destroy(
                attempt, outcome="done", reason="the run is over", report=self._report, patience_s=patience_s
            )

    @property
    def attempts(self) -> list[AttemptRecord]:
        return list(self.ledger.attempts(RUN))

    def outcomes(self) -> list[str | None]:
        return [attempt.outcome for attempt in self.attempts]

    def _report(self, _stage: str, text: str, **_numbers: Any) -> None:
        self.lines.append(text)
