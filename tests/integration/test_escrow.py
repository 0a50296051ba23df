"""A pod that has to go: its newest whole checkpoint comes home first, within its grace, or the loss is stated."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from loopback_sshd import LoopbackSshd, wait_until
from pennypod import escrow, processes
from pennypod.escrow import Bring, Escrow, EscrowPlan, bring_to_artifacts, write_plan
from pennypod.guard import Guard
from pennypod.ledger import AttemptState, RunRecord, open_ledger
from pennypod.model.pod import Pod, SshAddress
from pennypod.providers.base import Provider
from pennypod.rental import Rental, RentRequest
from pennypod.settings import Settings
from pennypod.sweep import survey, sweep

RUN, OTHER = "demo-1201-abcde", "demo-1201-fghij"
DEAD = "4194304:1"  # above the largest pid there can be
GRACE_S = 20.0


class World:
    """A run in training on a pod behind a real sshd; its provider is a dict, its controller is dead."""

    def __init__(self, tmp_path: Path, sshd: LoopbackSshd) -> None:
        self.sshd = sshd
        self.home = tmp_path / "pod"
        self.clock = FakeClock(time.time())
        self.provider = FakeProvider(self.clock)
        self.providers: dict[str, Provider] = {"fake": self.provider}
        self.settings = Settings(home=tmp_path / "state", database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
        self.ledger = open_ledger(self.settings)
        self.rental = Rental(self.providers, self.ledger, self.clock)
        self.root = tmp_path / "artifacts"
        self.artifacts = self.root / RUN
        self.lines: list[str] = []

    def rent(
        self, run: str = RUN, address: SshAddress | None = None, *, seconds: float = 600, keep: bool = False
    ) -> None:
        record = RunRecord(run, "demo", DEAD, self.clock.now(), str(self.root / run), keep_on_disconnect=keep)
        self.ledger.open_run(record)
        deadline = self.clock.now() + seconds
        self.ledger.set_plan(run, deadline=deadline, worst_case_micros=1)
        request = RentRequest(run, [offer(1)], {}, 20, deadline, "key", renter=DEAD)
        tenancy = self.rental.rent(request, FakeLogin(), lambda *_a, **_k: None, lambda: None)
        target = self.sshd.target()
        self.ledger.record_ready(
            tenancy.attempt.id, address or SshAddress(target.host, target.port, target.user), self.clock.now()
        )
        run_dir = self.settings.run_dir(run)
        shutil.copy(self.sshd.key_file, run_dir / "id_ed25519")
        shutil.copy(self.sshd.known_hosts, run_dir / "known_hosts")

    def train(
        self, run: str = RUN, *, grace_s: float = GRACE_S, grace_micros: int = 10**6, home: Path | None = None
    ) -> None:
        """As run_training does before it starts anything."""
        plan = EscrowPlan(str(home or self.home), ("**/best.pt",), grace_s, grace_micros)
        write_plan(self.settings.run_dir(run), plan)
        self.ledger.start_stage(run, "training", self.clock.now())

    def checkpoint(self, relative: str = "out/a/best.pt", *, age_s: float = 30, home: Path | None = None) -> Path:
        path = (home or self.home) / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data/0", os.urandom(200_000))
        stamp = time.time() - age_s
        os.utime(path, (stamp, stamp))
        return path

    def end(self, bring: Bring | None = None, *, alive: bool = False, controller: str = DEAD) -> bool:
        """One tick of the guard; whether something is left to do."""
        keeper = Escrow(self.settings, self.ledger, self.clock, bring=bring)
        guard = Guard(self.settings, self.ledger, self.rental, self.clock, self.lines.append, keeper)
        return guard.tick(controller, alive)

    def weights_at_end(self, run: str = RUN) -> dict[str, Any]:
        document = json.loads((self.root / run / "run.json").read_text())
        found: dict[str, Any] = document["weights_at_end"]
        return found

    def is_home(self, checkpoint: Path, run: str = RUN) -> bool:
        (item,) = self.ledger.artifacts(run)
        here = self.root / run / item.path
        wanted = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
        return item.kind == "weights" and item.sha256 == wanted == hashlib.sha256(here.read_bytes()).hexdigest()


@pytest.fixture
def world(tmp_path: Path, sshd: LoopbackSshd) -> World:
    return World(tmp_path, sshd)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SshAddress]:
    """A pod that accepts connections and never says a word."""
    monkeypatch.setattr(escrow, "ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield SshAddress("127.0.0.1", server.getsockname()[1])


def test_the_newest_checkpoint_comes_home_before_the_pod_goes(world: World) -> None:
    world.rent()
    world.train()
    world.checkpoint("out/old/best.pt", age_s=300)
    newest = world.checkpoint("out/new/best.pt", age_s=30)
    (world.artifacts).mkdir(parents=True)
    (world.artifacts / "train.log").write_text("epoch 6/8 loss 0.3\nepoch 7/8 loss 0.2\n")
    assert world.end(_while_alive(world, bring_to_artifacts)) is False
    assert world.provider.live == {}
    assert world.is_home(newest)
    end = world.weights_at_end()
    assert (end["state"], end["path"], end["epoch"]) == ("escrowed", "weights/best.pt", 7)
    assert 25 < end["age_s"] < 60


def _while_alive(world: World, bring: Bring) -> Bring:
    def checked(*args: Any) -> Any:
        assert world.provider.live, "destroyed before its weights were home"
        return bring(*args)

    return checked


def test_a_half_written_checkpoint_never_counts(world: World) -> None:
    world.rent()
    world.train()
    whole = world.checkpoint("out/a/best.pt", age_s=300)
    torn = world.checkpoint("out/b/best.pt", age_s=10)
    torn.write_bytes(torn.read_bytes()[:-40])
    world.end()
    assert world.is_home(whole)


def test_a_trainer_that_left_nothing_whole_is_said_to_have_left_nothing(world: World) -> None:
    world.rent()
    world.train()
    torn = world.checkpoint()
    torn.write_bytes(torn.read_bytes()[:-40])
    world.end()
    assert world.provider.live == {}
    assert world.ledger.artifacts(RUN) == []
    assert world.weights_at_end()["state"] == "none"
    assert "best.pt" in world.weights_at_end()["reason"]


def test_a_checkpoint_that_is_home_is_not_fetched_again_and_is_written_down(world: World) -> None:
    world.rent()
    world.train()
    newest = world.checkpoint()
    keeper = Escrow(world.settings, world.ledger, world.clock)
    (attempt,) = world.ledger.attempts(RUN)
    list(keeper.release([attempt], lambda *_a, **_k: None))  # as an early copy would

    def never(*_args: Any) -> Any:
        raise AssertionError("fetched again")

    world.end(never)
    assert world.is_home(newest)
    assert world.provider.live == {}


def test_a_pod_that_does_not_answer_gets_no_grace_and_the_loss_is_stated(world: World, silent: SshAddress) -> None:
    world.rent(address=silent)
    world.train(grace_s=60)
    started = time.monotonic()
    world.end()
    assert time.monotonic() - started < 8
    assert world.provider.live == {}
    end = world.weights_at_end()
    assert (end["state"], end["path"]) == ("lost", None)
    assert "no answer within 1 s" in end["reason"]


def test_an_older_copy_that_is_home_is_named_when_the_newest_is_lost(world: World, silent: SshAddress) -> None:
    world.rent(address=silent)
    world.train()
    early = world.checkpoint(age_s=500)
    _bring_early(world, early)
    world.end()
    end = world.weights_at_end()
    assert (end["state"], end["path"]) == ("lost", "weights/best.pt")
    assert end["age_s"] > 400
    assert world.is_home(early)


def _bring_early(world: World, path: Path) -> None:
    from pennypod.weights import bring_home, find_best

    remote = find_best(world.sshd.ssh(), str(world.home), ["**/best.pt"])
    assert remote is not None
    assert remote.path == str(path)
    bring_home(world.sshd.ssh(), remote, world.artifacts, on_progress=lambda _progress: None, early=True)


def test_the_grace_ends_a_fetch_that_hangs(world: World) -> None:
    world.rent()
    world.train(grace_s=3)
    world.checkpoint()

    def hangs(ssh: Any, *_args: Any) -> Any:
        ssh.run_checked("sleep 60", timeout_s=60)

    started = time.monotonic()
    world.end(hangs)
    assert time.monotonic() - started < 8
    assert world.provider.live == {}
    assert world.weights_at_end()["state"] == "lost"
    assert "not within the grace of 3 s" in world.weights_at_end()["reason"]


def test_a_fault_in_the_saving_never_keeps_a_pod_alive(world: World) -> None:
    world.rent()
    world.train()
    world.checkpoint()

    def faulty(*_args: Any) -> Any:
        raise RuntimeError("a bug")

    assert world.end(faulty) is False
    assert world.provider.live == {}
    assert world.weights_at_end()["state"] == "lost"


def test_no_grace_is_taken_where_none_is_allowed(world: World) -> None:
    world.rent()
    world.train(grace_s=0)
    world.checkpoint()
    world.end(_never)
    assert world.provider.live == {}
    assert world.weights_at_end()["state"] == "lost"


def test_a_run_that_never_trained_has_nothing_to_look_for(world: World, silent: SshAddress) -> None:
    world.rent(address=silent)
    world.end(_never)
    assert world.provider.live == {}
    assert world.weights_at_end()["state"] == "none"
    assert not [line for line in world.lines if "looking for" in line]


def _never(*_args: Any) -> Any:
    raise AssertionError("nothing was to be brought home")


def test_a_slow_pod_keeps_no_other_billing(world: World, tmp_path: Path) -> None:
    homes = {RUN: tmp_path / "slow", OTHER: tmp_path / "quick"}
    for run, home in homes.items():
        world.rent(run)
        world.train(run, home=home)
        world.checkpoint(home=home)
    quick_is_gone = threading.Event()
    at_the_end = world.provider.destroy

    def destroy(pod_id: str) -> None:
        at_the_end(pod_id)
        if not any(_belongs(pod, OTHER) for pod in world.provider.live.values()):
            quick_is_gone.set()

    world.provider.destroy = destroy  # type: ignore[method-assign]

    def bring(ssh: Any, remote: Any, artifacts_dir: Path, on_progress: Callable[[Any], None]) -> Any:
        if artifacts_dir.name == RUN:
            assert quick_is_gone.wait(GRACE_S), "the quick pod waited for the slow one"
        return bring_to_artifacts(ssh, remote, artifacts_dir, on_progress)

    assert world.end(bring) is False
    assert world.provider.live == {}
    assert [world.weights_at_end(run)["state"] for run in homes] == ["escrowed", "escrowed"]


def _belongs(pod: Pod, run: str) -> bool:
    return run in pod.name


def test_a_pod_that_nobody_attends_is_looked_after_before_its_deadline(world: World) -> None:
    world.rent(seconds=600, keep=True)
    world.train(grace_s=20)
    newest = world.checkpoint()
    world.clock.sleep(570)
    assert world.end() is True, "it may still train"
    world.clock.sleep(15)
    assert world.end() is False
    assert world.is_home(newest)
    (attempt,) = world.ledger.attempts(RUN)
    assert attempt.gone is not None
    assert attempt.gone < (world.ledger.run(RUN).deadline or 0)


def test_a_command_at_work_keeps_its_pod_to_the_deadline(world: World) -> None:
    world.rent(seconds=600)
    world.train(grace_s=20)
    world.checkpoint()
    world.clock.sleep(595)
    assert world.end(alive=True) is True
    assert world.provider.live


def test_a_suspended_command_does_not_keep_its_weights_from_coming_home(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.rent(seconds=600)
    world.train(grace_s=20)
    newest = world.checkpoint()
    world.clock.sleep(595)
    monkeypatch.setattr(processes, "is_suspended", lambda process: process == DEAD)
    assert world.end(alive=True) is False
    assert world.is_home(newest)


def test_a_sweep_saves_what_its_machine_has_the_key_for(world: World) -> None:
    world.rent(seconds=10)
    world.train()
    newest = world.checkpoint()
    world.clock.sleep(11)
    keeper = Escrow(world.settings, world.ledger, world.clock)
    found = survey(world.providers, world.ledger, world.clock.now())
    swept = sweep(
        found, world.providers, world.ledger, world.clock, dry_run=False, report=lambda *_a, **_k: None, escrow=keeper
    )
    assert [item.action for item in swept] == ["destroyed"]
    assert world.is_home(newest)
    assert world.weights_at_end()["state"] == "escrowed"


def test_a_sweep_without_the_key_destroys_and_says_what_is_lost(world: World) -> None:
    world.rent(seconds=10)
    world.train()
    world.checkpoint()
    (world.settings.run_dir(RUN) / "id_ed25519").unlink()
    world.clock.sleep(11)
    keeper = Escrow(world.settings, world.ledger, world.clock)
    found = survey(world.providers, world.ledger, world.clock.now())
    sweep(
        found, world.providers, world.ledger, world.clock, dry_run=False, report=lambda *_a, **_k: None, escrow=keeper
    )
    assert world.provider.live == {}
    assert world.ledger.attempts(RUN)[0].state is AttemptState.GONE
    assert "SSH key is not on this machine" in world.weights_at_end()["reason"]


def test_a_suspended_process_is_told_from_one_at_work() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            known = processes.identity(process.pid)
            assert not processes.is_suspended(known)
            process.send_signal(signal.SIGSTOP)
            wait_until("it is suspended", lambda: processes.is_suspended(known))
            assert not processes.is_suspended(DEAD)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("price_micros_per_h", "seconds"), [(200_000, 60.0), (3_000_000, 60.0), (12_000_000, 15.0), (0, 60.0)]
)
def test_the_grace_is_bounded_in_seconds_and_in_dollars(price_micros_per_h: int, seconds: float) -> None:
    assert EscrowPlan("/root", ("*",), 60.0, 50_000).limit_s(price_micros_per_h) == seconds
