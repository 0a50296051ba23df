"""A whole orchestrator without containers: real server, real tables, real ledger; playbooks and pods are rehearsed.

Run as a program it serves until it is killed. Pods are files, so that they outlive the server as real pods do. The
first process that comes to the moment which the file `die_at` names kills itself (SIGKILL). With REHEARSAL_PLACE=<name>
it is on a machine of its own, as far as it can be told by a process's identity.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fakes import FakeClock, FakeLogin, FakeProvider, offer
from pennypod import processes
from pennypod.clock import SystemClock
from pennypod.errors import BudgetError, PennypodError
from pennypod.ledger import Ledger, Outcome, RunRecord, open_ledger
from pennypod.model.offer import Offer, Order
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.orchestrator import server
from pennypod.orchestrator.config import load_config
from pennypod.orchestrator.playbooks import Played
from pennypod.orchestrator.service import Service
from pennypod.providers.base import Timing
from pennypod.rental import Rental, RentRequest
from pennypod.settings import Settings, load_settings

DEADLINE_S = 3600
# Every moment at which a rehearsal can be killed, in the order of a run.
MOMENTS = (
    "launching",
    "opened",
    "intended",
    "created",
    "ready",
    "finishing",
    "fetched",
    "destroying",
    "gone",
    "closed",
)


class Killer:
    """Kills this process at the wanted moment: once, of all processes that share the folder."""

    def __init__(self, folder: Path) -> None:
        self._wanted = folder / "die_at"

    def at(self, moment: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._wanted.read_text() == moment:
                self._wanted.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


class FolderProvider(FakeProvider):
    """Pods as files in a folder: `created.log` has every create there ever was."""

    def __init__(self, folder: Path, killer: Killer) -> None:
        super().__init__(FakeClock())
        self.timing = Timing(
            listing_lag_s=0.2,
            absence_checks=2,
            absence_spacing_s=0.05,
            poll_s=0.05,
            start_patience_s=5,
            start_limit_s=10,
        )
        self._pods = folder / "pods"
        self._pods.mkdir(parents=True, exist_ok=True)
        self._log = folder / "created.log"
        self._killer = killer

    def rent(self, offer: Offer, order: Order) -> str:
        self._killer.at("intended")
        pod_id = f"pod-{time.time_ns()}"
        (self._pods / pod_id).write_text(json.dumps({"name": order.name, "created": time.time()}))
        with self._log.open("a") as log:
            log.write(f"{order.name}\n")
        self._killer.at("created")
        return pod_id

    def pods(self) -> list[Pod]:
        return [pod for path in sorted(self._pods.iterdir()) if (pod := self.pod(path.name)) is not None]

    def pod(self, pod_id: str) -> Pod | None:
        try:
            known = json.loads((self._pods / pod_id).read_text())
        except FileNotFoundError:
            return None
        return Pod("fake", pod_id, known["name"], PodState.RUNNING, known["created"], 200_000, address=ADDRESS)

    def destroy(self, pod_id: str) -> None:
        self._killer.at("destroying")
        (self._pods / pod_id).unlink(missing_ok=True)
        self._killer.at("gone")


# Nobody listens there: the rehearsed trainings are over when they call back.
ADDRESS = SshAddress("127.0.0.1", 9)


class RehearsedPlaybooks:
    """What train.yml and resume.yml do to the ledger and to pods, in the same order, within this process."""

    def __init__(self, settings: Settings, ledger: Ledger, provider: FolderProvider, folder: Path, killer: Killer):
        self._settings = settings
        self._ledger = ledger
        self._rental = Rental({"fake": provider}, ledger, SystemClock())
        self._folder = folder
        self._killer = killer
        self._me = processes.own_identity()

    def launch(self, run: str, variables: Mapping[str, Any]) -> Played:
        self._journal("launch", run, variables)
        self._killer.at("launching")
        return self._played(lambda: self._launch(run, variables))

    def _launch(self, run: str, variables: Mapping[str, Any]) -> Played:
        now = time.time()
        record = RunRecord(run, variables["job"], self._me, now, str(self._folder / run), keep_on_disconnect=True)
        self._ledger.open_or_adopt_run(record, processes.is_alive)
        self._killer.at("opened")
        if variables.get("max_cost_usd"):
            self._ledger.close_run(run, Outcome.FAILED, "over the cap", now)
            raise BudgetError("the worst case breaks max_cost_usd")
        self._ledger.set_plan(run, deadline=now + DEADLINE_S, worst_case_micros=200_000)
        request = RentRequest(run, [offer(1)], {}, 20, now + DEADLINE_S, "key", self._me, controller=self._me)
        self._rental.rent(request, FakeLogin(), _quiet, lambda: None)
        self._killer.at("ready")
        return Played(0)

    def resume(self, run: str, variables: Mapping[str, Any]) -> Played:
        self._journal("resume", run, variables)
        self._killer.at("finishing")
        return self._played(lambda: self._resume(run))

    def _resume(self, run: str) -> Played:
        self._ledger.take_over(run, self._me, processes.is_alive)
        weights = self._folder / f"{run}.weights"
        if not weights.exists():
            self._rental.resume(run, "key", FakeLogin(), _quiet, pinned=[], limit_s=5)
            weights.touch()
        self._killer.at("fetched")
        for attempt in self._ledger.attempts(run):
            self._rental.destroy(attempt, outcome="done", reason="the run is over", report=_quiet)
        self._ledger.close_run(run, Outcome.SUCCEEDED, "weights are home and verified", time.time())
        self._killer.at("closed")
        return Played(0)

    def end_leftovers(self, run: str) -> int:
        return 0

    def _played(self, work: Callable[[], Played]) -> Played:
        try:
            return work()
        except PennypodError as exc:
            return Played(2, exc.code, exc.message)

    def _journal(self, what: str, run: str, variables: Mapping[str, Any]) -> None:
        with (self._folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, "run": run, "variables": dict(variables)}) + "\n")


def _quiet(*_args: object, **_numbers: object) -> None:
    return None


def main(folder: Path, root: Path, port: int) -> None:
    settings = load_settings()
    place = os.environ.get("REHEARSAL_PLACE")
    if place:
        processes.own_place = lambda: f"{place}.boot.1"
    killer = Killer(folder)
    provider = FolderProvider(folder, killer)
    listener = server.listen("127.0.0.1", port)
    config = load_config(os.environ, root)
    ledger = open_ledger(settings)
    playbooks = RehearsedPlaybooks(settings, ledger, provider, folder, killer)
    service = Service(config, settings, ledger=ledger, playbooks=playbooks, providers={"fake": provider})
    server.run(service, listener)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
