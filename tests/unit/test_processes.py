"""Who controls a run: the ansible command, or the service that says that it answers for its playbooks."""

from __future__ import annotations

import os
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
