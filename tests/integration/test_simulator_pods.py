"""Simulated pods that are real containers: who may log in, what goes wrong inside, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from pennypod.clock import SystemClock
from pennypod.errors import SshError
from pennypod.providers.base import AttachesKeys
from pennypod.providers.local.engine import Engine, find_engine
from pennypod.providers.registry import open_provider
from pennypod.readmission import Readmission
from pennypod.settings import load_settings
from pennypod.simulator.pods import LABEL
from pennypod.ssh import Ssh, SshTarget, wait_for_ssh
from workspace import wait_until

# The first use on a machine builds the image: a minute or two, several on a busy one.
pytestmark = [pytest.mark.heavy, pytest.mark.pod, pytest.mark.timeout(1200), pytest.mark.xdist_group("simulator_pods")]
GATE = Path(__file__).parents[2] / "python" / "pennypod" / "onpod" / "gpu_check.py"


class Running:
    """A simulator of its own process, and requests to it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "pennypod.simulator", "--port", "0", "--pods", "container", "--seed", "3"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]

    def __call__(self, method: str, path: str, body: Any = None, key: str = "canary") -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        reply = requests.request(method, self.url + path, json=body, headers=headers, timeout=60)
        return reply.json() if reply.content else None

    def fault(self, endpoint: str, fault: str, **options: Any) -> None:
        self("POST", "/_sim/faults", {"endpoint": endpoint, "fault": fault, "times": 1, **options})

    def vast(self, **extra: Any) -> Any:
        query = {"num_gpus": {"eq": 1}, "limit": 1, "order": [["dph_total", "asc"]]}
        offer = self("POST", "/api/v0/bundles/", query)["offers"][0]["id"]
        body = {"image": "pytorch/pytorch:2", "disk": 20, "runtype": "ssh_direct", "label": "a label of no lease"}
        return self("PUT", f"/api/v0/asks/{offer}/", body | extra)

    def runpod(self, public_key: str, **extra: Any) -> str:
        body = {"name": "pennypod-x", "image": "runpod/pytorch:1", "ports": ["22/tcp"], "cloud": "COMMUNITY"}
        body |= {
            "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1},
            "env": {"PUBLIC_KEY": public_key, "GREETING": "hi"},
        }
        return str(self("POST", "/v2/pods", body | extra)["id"])

    def address(self, pod_id: Any) -> tuple[str, int]:
        """Once the API shows it, as either API shows it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if str(pod_id).isdigit():
                row = self("GET", f"/api/v0/instances/{pod_id}/")["instances"]
                if row["ports"]:
                    return row["public_ipaddr"], int(row["ports"]["22/tcp"][0]["HostPort"])
            else:
                direct = self("GET", f"/v2/pods/{pod_id}")["ssh"]["direct"]
                if direct:
                    return direct["host"], direct["port"]
            time.sleep(0.3)
        raise AssertionError(self("GET", "/_sim/pods"))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def sim() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def clean(sim: Running) -> Iterator[None]:
    yield
    sim("DELETE", "/_sim/faults")
    for pod in sim("GET", "/_sim/pods")["live"]:
        sim("DELETE", f"/api/v0/instances/{pod['id']}/" if pod["provider"] == "vast" else f"/v2/pods/{pod['id']}")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    file = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "someone", "-f", str(file)], check=True)
    return file, file.with_suffix(".pub").read_text().strip()


def engine() -> Engine:
    return find_engine(os.environ, load_settings().cache_dir / "local")


def containers(of: Running) -> list[str]:
    """The names of one simulator's containers: others may run on the same engine, with the same seed even."""
    return [
        row["name"]
        for row in engine().list_containers(f"label={LABEL}")
        if str(row["labels"][LABEL]).startswith(f"{of.process.pid}:")
    ]


def ssh(address: tuple[str, int], key: tuple[Path, str], command: str, stdin: bytes = b"") -> Any:
    known_hosts = key[0].with_name("known_hosts")
    known_hosts.unlink(missing_ok=True)
    options = ["-i", str(key[0]), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    options += [
        "-o",
        f"UserKnownHostsFile={known_hosts}",
        "-o",
        "StrictHostKeyChecking=accept-new",
        "-p",
        str(address[1]),
    ]
    return subprocess.run(
        ["ssh", *options, f"root@{address[0]}", command], input=stdin, capture_output=True, timeout=60
    )


def logs_in(address: tuple[str, int], key: tuple[Path, str], patience_s: float = 10.0) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        if ssh(address, key, "true").returncode == 0:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.3)


def test_a_vast_pod_takes_the_keys_that_are_attached_and_runs_onstart(sim: Running, key: tuple[Path, str]) -> None:
    made = sim.vast(onstart='echo "$CONTAINER_ID $CONTAINER_API_KEY" >/root/told; touch ~/.no_auto_tmux')
    number = made["new_contract"]
    address = sim.address(number)
    assert not logs_in(address, key, 2), "a fresh account has no key, and so has its pod"
    sim("POST", f"/api/v0/instances/{number}/ssh/", {"ssh_key": key[1]})
    assert logs_in(address, key)
    assert ssh(address, key, "cat /root/told").stdout.decode().split() == [str(number), made["instance_api_key"]]
    assert [name for name in containers(sim) if str(number) in name]
    sim("DELETE", f"/api/v0/instances/{number}/", {}, key=made["instance_api_key"])
    wait_until(lambda: not [name for name in containers(sim) if str(number) in name], 20, "its own key ended it")


def test_vast_keeps_a_stopped_pods_disk(sim: Running, key: tuple[Path, str]) -> None:
    number = sim.vast(onstart=f"echo '{key[1]}' >>/root/.ssh/authorized_keys")["new_contract"]
    assert logs_in(sim.address(number), key)
    ssh(sim.address(number), key, "echo kept >/root/file")
    for state in ("stopped", "running"):
        sim("PUT", f"/api/v0/instances/{number}/", {"state": state})
    assert logs_in(sim.address(number), key)
    assert ssh(sim.address(number), key, "cat /root/file").stdout == b"kept\n"


def test_runpod_takes_the_key_from_the_environment_and_wipes_a_stopped_disk(
    sim: Running, key: tuple[Path, str]
) -> None:
    pod = sim.runpod(key[1])
    address = sim.address(pod)
    assert logs_in(address, key)
    assert ssh(address, key, "echo $GREETING").stdout == b"\n", "ssh sessions do not see the pod's environment"
    ssh(address, key, "echo lost >/root/file")
    for verb in ("stop", "start"):
        sim("POST", f"/v2/pods/{pod}/action", {"action": verb})
    again = sim.address(pod)
    assert again != address
    assert logs_in(again, key)
    assert ssh(again, key, "cat /root/file").returncode != 0


def test_a_runpod_image_without_sshd_refuses_unless_the_start_command_brings_one(
    sim: Running, key: tuple[Path, str]
) -> None:
    bare = sim.address(sim.runpod(key[1], image="pytorch/pytorch:2"))
    assert not logs_in(bare, key, 2)
    own = "bash -c 'mkdir -p /run/sshd; service ssh start; echo ran >/root/ran; sleep infinity'"
    brought = sim.address(sim.runpod(key[1], image="pytorch/pytorch:2", args=own))
    assert logs_in(brought, key)
    assert ssh(brought, key, "cat /root/ran").stdout == b"ran\n"


def test_faults_inside_a_container(sim: Running, key: tuple[Path, str]) -> None:
    sim.fault("runpod.create", "key_missing")
    missing = sim.runpod(key[1])
    sim.fault("runpod.create", "bad_gpu")
    broken = sim.runpod(key[1])
    sim.fault("runpod.create", "sshd_late", seconds=12)
    began = time.monotonic()
    late = sim.runpod(key[1])
    assert not logs_in(sim.address(missing), key, 2)
    assert logs_in(sim.address(broken), key)
    gate = ssh(sim.address(broken), key, "python3 - --json --device auto", GATE.read_bytes())
    report = json.loads(gate.stdout)
    assert (gate.returncode, report["ok"]) == (1, False)
    assert "GPU is lost" in report["reason"]
    assert logs_in(sim.address(late), key, 40)
    assert time.monotonic() - began > 11


def test_a_key_that_is_lost_in_mid_run_is_let_in_again(
    sim: Running, key: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VAST_API_KEY", "canary")
    monkeypatch.setenv("VAST_URL", sim.url)
    sim.fault("vast.create", "keys_lost_after", seconds=15)
    number = str(sim.vast()["new_contract"])
    vast = open_provider("vast", load_settings())
    assert isinstance(vast, AttachesKeys)
    vast.attach_key(number, key[1])
    host, port = sim.address(number)
    target = SshTarget(host, port, "root", key[0], tmp_path / "known_hosts")
    wait_for_ssh(Ssh(target), deadline_s=30, clock=SystemClock())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and logs_in((host, port), key, 1):
        time.sleep(0.5)
    with pytest.raises(SshError, match="Permission denied"):
        Ssh(target).run("true")
    vast.attach_key(number, key[1])  # Vast takes it for attached, and does nothing
    with pytest.raises(SshError, match="Permission denied"):
        Ssh(target).run("true")
    readmit = Readmission(load_settings(), SystemClock(), lambda: ("vast", number))
    assert Ssh(target, readmit=readmit).run("echo in").stdout == b"in\n"


def test_the_wrong_port_refuses_and_the_right_one_follows(sim: Running, key: tuple[Path, str]) -> None:
    sim.fault("runpod.create", "wrong_port", seconds=6)
    pod = sim.runpod(key[1])
    host, wrong = sim.address(pod)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, wrong), timeout=2)
    sim("POST", "/_sim/clock", {"advance": 10})
    assert sim.address(pod)[1] != wrong
    assert logs_in(sim.address(pod), key)


def test_an_exit_and_an_eviction_take_the_container(sim: Running, key: tuple[Path, str]) -> None:
    sim.fault("runpod.create", "evict_after", seconds=1)
    evicted = sim.runpod(key[1])
    sim.fault("vast.create", "exit_after", seconds=1)
    exited = sim.vast()["new_contract"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and sim("GET", f"/v2/pods/{evicted}").get("status") != 404:
        time.sleep(0.3)
    assert sim("GET", f"/v2/pods/{evicted}")["status"] == 404
    # The API forgets a pod at once; the engine is still at its container for a moment.
    while time.monotonic() < deadline and [name for name in containers(sim) if evicted in name]:
        time.sleep(0.3)
    assert not [name for name in containers(sim) if evicted in name]
    while time.monotonic() < deadline:
        row = sim("GET", f"/api/v0/instances/{exited}/")["instances"]
        if row["actual_status"] == "exited":
            break
        time.sleep(0.3)
    assert (row["actual_status"], row["intended_status"], row["ports"]) == ("exited", "running", None)


def test_two_pods_may_have_the_same_name(sim: Running, key: tuple[Path, str]) -> None:
    lease = "pennypod-simtest-1201-abcde-a1-tt2abcd-nabcde"
    one, two = (sim.runpod(key[1], name=lease) for _ in range(2))
    assert logs_in(sim.address(one), key)
    assert logs_in(sim.address(two), key)
    named = [name for name in containers(sim) if name.startswith(lease)]
    assert len(named) == 2
    assert lease in named, "a lease is its container's name"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_container_outlives_the_simulator(key: tuple[Path, str], number: signal.Signals) -> None:
    own = Running()
    own.address(own.runpod(key[1]))
    own.vast()  # still being made
    assert containers(own)
    own.stop(number)
    assert own.process.returncode == 0
    assert not containers(own)


def test_what_a_killed_simulator_leaves_the_next_one_removes(sim: Running, key: tuple[Path, str]) -> None:
    killed = Running()
    killed.address(killed.runpod(key[1]))
    mine = sim.runpod(key[1])
    sim.address(mine)
    killed.stop(signal.SIGKILL)
    assert containers(killed)
    following = Running()
    left = containers(killed)
    following.stop()
    assert not left
    assert containers(sim), "a living simulator's pods are left alone"
