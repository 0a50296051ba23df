"""What the control_node role leaves: a sentinel in either form, keys for one pair of eyes, a guard that survives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCENARIO = Path(__file__).resolve().parents[1]
PENNYPOD = "/opt/pennypod/venv/bin/pennypod"
PYTHON = "/opt/pennypod/venv/bin/python"
ENV_FILE = "/etc/pennypod/sentinel.env"
HEARTBEAT = "/var/lib/pennypod/sentinel/heartbeat.json"
CANARY = "canary-key-of-molecule"
RENT = """
import time
from pennypod.clock import SystemClock
from pennypod.model.ids import Lease
from pennypod.model.offer import Need, Order
from pennypod.providers.http import Http
from pennypod.providers.vast import VastProvider
clock = SystemClock()
vast = VastProvider(Http("vast", "http://127.0.0.1:8400", "key", clock), clock)
name = Lease("late-1201-aaaaa", 1, int(time.time()) - 60, "aaaaa").name
key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0oxLPVh6nQ9xVU1h0Wl9M1s3JzYkq3TnWbBz4sXq1P x"
vast.rent(vast.offers(Need(gpu=("RTX 4090", "RTX 3090")))[0], Order(name, "", 20, key, int(time.time())))
"""

testinfra_hosts = ["ansible://control_node"]


@pytest.fixture
def cloud(host: Any) -> Iterator[None]:
    """Vast, played on the machine, with one pod that is overdue."""
    put_the_timer_off(host)
    host.check_output(f"systemd-run --unit cloud {PENNYPOD} simulate --port 8400 --speed 20")
    try:
        for _ in range(50):
            if (
                host.run(
                    "curl -sf http://127.0.0.1:8400/_sim/clock || python3 -c 'import urllib.request as u;"
                    ' u.urlopen("http://127.0.0.1:8400/_sim/clock")\''
                ).rc
                == 0
            ):
                break
            time.sleep(0.2)
        host.check_output("%s -c %s", PYTHON, RENT)
        yield
    finally:
        host.run("systemctl stop cloud")


def put_the_timer_off(host: Any) -> None:
    """A look just now: the timer's own next one is due minutes after it, and meets no test."""
    host.run("systemctl start pennypod-sentinel.service")


def live(host: Any) -> list[Any]:
    code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8400/_sim/pods').read().decode())"
    pods: list[Any] = json.loads(host.check_output("python3 -c %s", code))["live"]
    return pods


def test_keys_are_for_their_owner_only(host: Any) -> None:
    file = host.file(ENV_FILE)
    assert (file.mode, file.user) == (0o600, "root")
    assert CANARY in file.content_string
    shown = host.check_output("systemctl cat pennypod-sentinel.service pennypod-sentinel.timer")
    assert CANARY not in shown


def test_the_timer_calls_it(host: Any) -> None:
    timer = host.service("pennypod-sentinel.timer")
    assert timer.is_enabled
    assert timer.is_running
    assert "5min" in host.check_output("systemctl show pennypod-sentinel.timer -p TimersMonotonic")
    assert host.file(HEARTBEAT).exists
    assert not host.file("/etc/cron.d/pennypod").exists


@pytest.mark.usefixtures("cloud")
def test_what_the_timer_calls_ends_an_overdue_pod_with_keys_alone(host: Any) -> None:
    assert len(live(host)) == 1
    assert host.run("systemctl start pennypod-sentinel.service").rc == 0
    assert live(host) == []
    assert json.loads(host.file(HEARTBEAT).content_string)["complete"] is True
    assert "1 destroyed" in host.check_output("journalctl -u pennypod-sentinel.service --no-pager")


def test_a_guard_outlives_the_restart_of_the_service_that_it_was_started_in(host: Any) -> None:
    """With the default KillMode, the whole control group would be killed: the second unit proves that it would."""
    guard = (
        "ExecStart=\nExecStart=/bin/sh -c 'setsid sleep %s & exec sleep 1000'\nEnvironmentFile=\nWorkingDirectory=/\n"
    )
    for unit, seconds, more in (
        ("pennypod-train@keeps", 7771, ""),
        ("pennypod-train@kills", 7772, "KillMode=control-group"),
    ):
        folder = f"/run/systemd/system/{unit}.service.d"
        host.check_output(
            "mkdir -p %s && printf %%b %s >%s/test.conf", folder, f"[Service]\n{guard % seconds}{more}\n", folder
        )
    host.check_output("systemctl daemon-reload")
    for unit in ("pennypod-train@keeps", "pennypod-train@kills"):
        host.check_output(f"systemctl start {unit}")
    assert {pid(host, 7771), pid(host, 7772)}.isdisjoint({""})
    first = pid(host, 7771).split()[0]
    host.check_output("systemctl restart pennypod-train@keeps")
    assert first in pid(host, 7771).split(), "the guard of the first start is still there"
    host.check_output("systemctl stop pennypod-train@keeps pennypod-train@kills")
    assert first in pid(host, 7771).split()
    assert pid(host, 7772) == ""
    host.run("pkill -f 'sleep 7771'")


def pid(host: Any, seconds: int) -> str:
    return str(host.run(f"pgrep -x -f 'sleep {seconds}'").stdout).strip()


def test_the_cron_form_replaces_the_timer_and_looks_too(host: Any) -> None:
    """Last, since it changes the machine. Check mode first: it changes nothing."""
    play("--check")
    assert host.service("pennypod-sentinel.timer").is_running
    put_the_timer_off(host)
    before = host.file(HEARTBEAT).content_string
    host.check_output(f"rm {HEARTBEAT}")
    play()
    assert not host.service("pennypod-sentinel.timer").is_running
    assert not host.file("/etc/systemd/system/pennypod-sentinel.timer").exists
    line = host.file("/etc/cron.d/pennypod").content_string
    assert "*/5 * * * * root " in line
    assert CANARY not in line
    assert host.file(HEARTBEAT).content_string != before
    assert "cannot be looked at" in host.file("/var/lib/pennypod/sentinel.log").content_string, "there is no cloud now"


def play(*options: str) -> None:
    """The role once more, in the other form, on the scenario's own inventory."""
    folder = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(folder / "inventory" / "machine.yml")]
    command += ["-e", "control_node_form=cron", str(SCENARIO / "converge.yml"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
