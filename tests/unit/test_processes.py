"""Who controls a run: the ansible command, or the service that says that it answers for its playbooks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from pennypod import processes

ASK = "from pennypod import processes; print(processes.controller_identity())"


def test_a_service_controls_the_runs_of_what_descends_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    service = processes.own_identity()
    monkeypatch.setenv(processes.CONTROLLER_VARIABLE, service)
    told = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == service


def test_a_service_that_is_no_ancestor_controls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        monkeypatch.setenv(processes.CONTROLLER_VARIABLE, processes.identity(stranger.pid))
        told = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
        stranger.communicate(b"\n")
    assert told.stdout.strip() == processes.identity(os.getpid())


# --- several machines with one ledger ---------------------------------------------------------------------------------


def elsewhere(machine: str | None = None, boot: str | None = None, namespace: str | None = None) -> str:
    """Our own identity, but for a part of where it is."""
    pid, ticks, place = processes.own_identity().split(":")
    own = place.split(".")
    parts = [given or kept for given, kept in zip((machine, boot, namespace), own, strict=True)]
    return f"{pid}:{ticks}:{'.'.join(parts)}"


def test_a_process_of_this_machine_is_judged_by_its_process_table() -> None:
    pid, ticks, place = processes.own_identity().split(":")
    assert processes.is_alive(processes.own_identity())
    assert not processes.is_alive(f"{pid}:{int(ticks) + 1}:{place}"), "the pid was used again"
    assert not processes.is_alive(f"4194304:1:{place}")


def test_a_process_of_a_former_version_is_judged_as_one_of_ours() -> None:
    pid, ticks, _ = processes.own_identity().split(":")
    assert processes.is_alive(f"{pid}:{ticks}")
    assert not processes.is_alive("4194304:1")


@pytest.mark.parametrize(
    "place", [{"machine": "ffffffff", "boot": "ffffffff"}, {"namespace": "1"}, {"machine": "ffffffff"}]
)
def test_a_process_elsewhere_is_never_taken_for_dead(place: dict[str, str]) -> None:
    """Neither when its pid is free here, nor when the kernel is ours and the container is another one."""
    other = elsewhere(**place)
    assert not processes.can_judge(other)
    assert processes.is_alive(other)
    assert processes.is_alive("4194304:1:" + other.split(":")[2])
    assert not processes.is_suspended(other)


@pytest.mark.parametrize("words", ["", "test", "12", "12:x", "a:b:c.d.e"])
def test_of_what_is_no_identity_nothing_is_known(words: str) -> None:
    assert not processes.can_judge(words)
    assert processes.is_alive(words)
    assert not processes.is_suspended(words)


def test_a_boot_ends_every_process_of_its_machine() -> None:
    assert not processes.is_alive(elsewhere(boot="ffffffff"))


def test_an_identity_fits_its_column() -> None:
    assert len(f"4194304:{2**63}:" + processes.own_place()) <= 64


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_fork_that_was_killed_is_told_with_its_signal(by: signal.Signals) -> None:
    """In a process of its own: a fork of the test's worker would be one of many."""
    code = (
        "import os, signal, sys, time\n"
        "from pennypod import processes\n"
        "pid = os.fork()\n"
        "if pid == 0: time.sleep(60)\n"
        "os.kill(pid, int(sys.argv[1]))\n"
        "os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n"
        "print(processes.killed_fork() == (pid, int(sys.argv[1])))\n"
        "os.waitpid(pid, 0)\n"
        "print(processes.killed_fork())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(int(by))], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "None"]
