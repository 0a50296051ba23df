"""What the orchestrator role leaves: a service behind TLS that no stranger uses, and guards that survive a restart."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCENARIO = Path(__file__).resolve().parents[1]
PENNYPOD = "/opt/pennypod/current/venv/bin/pennypod"
SECRET = "canary-webhook-secret"
READ_TOKEN = "canary-read-token"
CANARIES = (SECRET, READ_TOKEN, "canary-key-of-molecule")
TRAIN = json.dumps({"action": "train_start", "job": "demo"})
# Asks from the server itself, by nginx, and prints status, headers and body. The certificate is signed by itself.
ASK = """
import json, ssl, sys, urllib.error, urllib.request
url, body, headers = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
plain = ssl.create_default_context(cafile="/etc/pennypod/tls/self-signed.crt")
plain.check_hostname = False
class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *rest):
        return None
opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=plain), Stay)
try:
    answer = opener.open(urllib.request.Request(url, body.encode() or None, headers), timeout=20)
except urllib.error.HTTPError as exc:
    answer = exc
print(json.dumps([answer.status, dict(answer.headers), answer.read().decode()]))
"""

testinfra_hosts = ["ansible://control_node"]


def ask(host: Any, path: str, body: str = "", headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], str]:
    url = path if path.startswith("http") else f"https://127.0.0.1{path}"
    told = {"Host": "pennypod.example", "Authorization": f"Bearer {READ_TOKEN}", **(headers or {})}
    status, heard, text = json.loads(host.check_output("python3 -c %s %s %s %s", ASK, url, body, json.dumps(told)))
    return int(status), heard, str(text)


def signed(body: str, secret: str = SECRET) -> dict[str, str]:
    """From the contract alone."""
    stamp = str(int(time.time()))
    mac = hmac.new(secret.encode(), f"{stamp}.{body}".encode(), hashlib.sha256).hexdigest()
    return {"X-Pennypod-Timestamp": stamp, "X-Pennypod-Signature": f"sha256={mac}", "Content-Type": "application/json"}


def wait_until(holds: Callable[[], Any], seconds: float, what: str) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def test_the_playbook_goes_the_same_way_and_finds_nothing_to_change() -> None:
    inventory = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "inventory" / "machine.yml"
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory)]
    command += ["-e", f"@{SCENARIO / 'vars.yml'}", str(SCENARIO.parents[2] / "playbooks" / "serve.yml")]
    plain = os.environ | {"ANSIBLE_FORCE_COLOR": "0"}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"control_node .* changed=0 .* failed=0 ", done.stdout), done.stdout


def test_it_answers_behind_tls_and_only_there(host: Any) -> None:
    assert ask(host, "/healthz")[0] == 200
    assert "pennypod" in ask(host, "/")[2]
    assert ask(host, "/", headers={"Authorization": "Bearer wrong"})[0] == 401
    assert ask(host, "/metrics")[0] == 404, "metrics are for this machine"
    status, headers, _ = ask(host, "http://127.0.0.1/healthz")
    assert (status, headers["Location"]) == (308, "https://pennypod.example/healthz")
    listening = {line.split()[3] for line in host.check_output("ss -Hltn").splitlines()}
    assert {"127.0.0.1:8080", "127.0.0.1:8333"} <= listening
    assert {address.rpartition(":")[2] for address in listening if "127.0.0.1" not in address} == {"22", "80", "443"}


def test_a_stranger_is_sent_away(host: Any) -> None:
    status, headers, text = ask(host, "/hooks/train", TRAIN, signed(TRAIN, "another secret"))
    assert (status, headers["Content-Type"]) == (401, "application/problem+json")
    assert json.loads(text)["code"] == "signature_invalid"
    long = json.dumps({"action": "train_start", "job": "demo", "note": "x" * 70_000})
    assert ask(host, "/hooks/train", long, signed(long))[0] == 413


def test_nobody_else_reads_a_secret(host: Any) -> None:
    for name in ("keys.env", "secrets.env"):
        file = host.file(f"/etc/pennypod/{name}")
        assert (file.user, file.group, file.mode) == ("root", "root", 0o600)
    for path, owner, mode in (
        ("/etc/pennypod/serve.yml", "root", 0o640),
        ("/etc/pennypod/tls", "root", 0o700),
        ("/var/lib/pennypod", "pennypod", 0o700),
        (host.check_output("readlink -f /opt/pennypod/current"), "root", 0o755),
    ):
        file = host.file(path)
        assert (file.user, file.mode) == (owner, mode), path
    shown = host.check_output("systemctl cat pennypod-serve pennypod-sentinel pennypod-store; ps axww -o args; cat %s",
                              "/etc/pennypod/serve.yml")  # fmt: skip
    assert not [canary for canary in CANARIES if canary in shown]
    assert host.run("su -s /bin/sh pennypod -c 'cat /etc/pennypod/secrets.env'").rc != 0


def test_the_firewall_takes_in_ssh_and_the_proxy_only(host: Any) -> None:
    rules = host.check_output("nft list table inet pennypod_orchestrator")
    assert "policy drop" in rules
    assert {line.strip() for line in rules.splitlines() if "tcp dport" in line} == {
        'tcp dport 22 accept comment "SSH"',
        "tcp dport { 80, 443 } accept",
    }
    host.check_output("nft add table inet somebody_elses")
    host.check_output("systemctl reload pennypod-firewall")
    assert "somebody_elses" in host.check_output("nft list tables"), "other tables stay"


@pytest.fixture
def cloud(host: Any) -> Iterator[None]:
    """Vast, played on the server; its pods never answer over SSH."""
    host.check_output(f"systemd-run --unit cloud {PENNYPOD} simulate --port 8400 --pods ghost")
    try:
        wait_until(lambda: "live" in pods(host), 60, "the simulator answers")
        yield
    finally:
        host.run("systemctl stop cloud")


def pods(host: Any) -> dict[str, Any]:
    answer = host.run("python3 -c %s %s '' '{}'", ASK, "http://127.0.0.1:8400/_sim/pods")
    found: dict[str, Any] = json.loads(json.loads(answer.stdout)[2]) if answer.rc == 0 else {}
    return found


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("cloud")
def test_a_guard_survives_a_restart_and_the_run_goes_on(host: Any) -> None:
    """A run for real, as far as one without a pod to log in to gets: whatever the unit forbids, it needs none of it."""
    status, _, text = ask(host, "/hooks/train", TRAIN, signed(TRAIN))
    assert status == 202, text
    run = json.loads(text)["run"]
    wait_until(lambda: pods(host)["live"], 240, "a pod is rented")
    guard = host.check_output("pgrep -f pennypod.guard").split()[0]
    service = host.check_output("systemctl show -P MainPID pennypod-serve")
    host.check_output("systemctl restart pennypod-serve")
    assert host.check_output("systemctl show -P MainPID pennypod-serve") != service
    assert guard in host.check_output("pgrep -f pennypod.guard").split()
    wait_until(lambda: ask(host, "/readyz")[0] == 200, 120, "it is ready again")
    cancel = json.dumps({"action": "train_cancel", "run": run})
    assert ask(host, "/hooks/train", cancel, signed(cancel))[0] == 202
    wait_until(lambda: json.loads(ask(host, f"/runs/{run}")[2])["state"] == "ended", 300, "the run has ended")
    assert pods(host)["live"] == []
    assert host.file(f"/var/lib/pennypod/artifacts/{run}/run.json").exists
