"""A real pod as its user sees it: in the inventory, over `ansible -m ping`, over `pennypod ssh`, and swept away."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import ADDRESS
from pennypod.acceptance import GateOptions, PodLogin, run_key
from pennypod.clock import SystemClock
from pennypod.ledger import AttemptState, Ledger, RunRecord, open_ledger
from pennypod.model.ids import Lease, new_run_id
from pennypod.model.offer import Need, Order
from pennypod.providers.local import LocalProvider
from pennypod.rental import Rental, RentRequest, Tenancy
from pennypod.settings import load_settings

pytestmark = [pytest.mark.pod, pytest.mark.xdist_group("billing_view")]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LIFETIME_S = 900
NAME_OF_POD = "cat /etc/hostname"  # engines name a container's host by the container's id


class Rented:
    """One run with a pod, in a state folder whose path needs quoting."""

    def __init__(self, root: Path) -> None:
        self.home = root / "state folder"
        self.settings = load_settings({"PENNYPOD_HOME": str(self.home)})
        self.clock = SystemClock()
        self.ledger: Ledger = open_ledger(self.settings)
        self.provider = LocalProvider(self.settings, {})
        self.rental = Rental({"local": self.provider}, self.ledger, self.clock)
        self.run = new_run_id("view", self.clock.now(), secrets.randbelow)
        self.ledger.open_run(RunRecord(self.run, "view", "1:1", self.clock.now(), str(root / "artifacts" / self.run)))
        self.tenancy = self._rent()

    def _rent(self) -> Tenancy:
        self.provider.prepare("stock", lambda _text: None)
        gate = GateOptions(device="cpu", allow_no_torch=True)
        login = PodLogin(self.settings, self.run, gate, self.clock, on_wait=lambda _why: None)
        request = RentRequest(
            run=self.run,
            offers=self.provider.offers(Need(disk_gb=1)),
            images={"local": "stock"},
            disk_gb=1,
            deadline=self.clock.now() + LIFETIME_S,
            public_key=run_key(self.settings, self.run)[1],
            renter="1:1",
        )
        return self.rental.rent(request, login, lambda *_a, **_k: None, lambda: None)

    def call(self, program: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command as the user types it in the repository."""
        env = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
        env |= {"PENNYPOD_HOME": str(self.home), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        return subprocess.run(
            [str(BIN / program), *args],
            cwd=ROOT,
            env=env | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def inventory(self) -> dict[str, Any]:
        done = self.call("ansible-inventory", "--list")
        assert done.returncode == 0, done.stderr
        listed: dict[str, Any] = json.loads(done.stdout)
        return listed

    def end(self) -> None:
        for attempt in self.ledger.attempts(self.run):
            self.rental.destroy(attempt, outcome="done", reason="the test is over", report=lambda *_a, **_k: None)


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rented]:
    rented = Rented(tmp_path_factory.mktemp("billing"))
    try:
        yield rented
    finally:
        rented.end()


def test_the_run_is_a_host_with_price_age_cost_and_deadline(rented: Rented) -> None:
    listed = rented.inventory()
    for group in ("billing", "provider_local", "job_view"):
        assert rented.run in listed[group]["hosts"], group
    assert rented.run not in listed.get("orphans", {}).get("hosts", [])
    variables = listed["_meta"]["hostvars"][rented.run]
    attempt = rented.tenancy.attempt
    assert variables["pennypod_price_usd_per_h"] == attempt.price_micros_per_h / 1e6
    age = rented.clock.now() - attempt.intended
    assert 0 < variables["pennypod_age_s"] <= age + 1
    assert variables["pennypod_cost_so_far_usd"] == pytest.approx(
        variables["pennypod_age_s"] * attempt.price_micros_per_h / 3600e6, abs=2e-5
    )
    assert variables["pennypod_deadline"] - attempt.intended == pytest.approx(LIFETIME_S, abs=30)
    assert variables["pennypod_pod_id"] == rented.tenancy.pod.pod_id


def test_the_graph_shows_it_under_billing(rented: Rented) -> None:
    done = rented.call("ansible-inventory", "--graph", "billing")
    assert done.returncode == 0
    assert f"|--{rented.run}" in done.stdout


def test_ansible_reaches_it_as_it_stands(rented: Rented) -> None:
    done = rented.call("ansible", rented.run, "-m", "ping")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"ping": "pong"' in done.stdout
    told = rented.call("ansible", rented.run, "-m", "ansible.builtin.command", "-a", NAME_OF_POD)
    assert rented.tenancy.pod.pod_id in told.stdout


def test_a_pod_that_shows_another_host_key_is_not_talked_to(rented: Rented) -> None:
    known_hosts = rented.settings.run_dir(rented.run) / "known_hosts"
    right = known_hosts.read_text()
    name, kind, _key = right.split()[:3]
    public = (rented.settings.run_dir(rented.run) / "id_ed25519.pub").read_text().split()[1]
    try:
        known_hosts.write_text(f"{name} {kind} {public}\n")
        # A connection that is still open from before would not ask for the key again.
        done = rented.call(
            "ansible", rented.run, "-m", "ping", ANSIBLE_SSH_ARGS="-o ControlMaster=no -o ControlPath=none"
        )
        assert done.returncode != 0
        assert "UNREACHABLE" in done.stdout + done.stderr
        assert rented.call("pennypod", "ssh", rented.run, "--", "true").returncode == 255
    finally:
        known_hosts.write_text(right)


def test_pennypod_ssh_runs_a_command_there(rented: Rented) -> None:
    done = rented.call("pennypod", "ssh", rented.run, "--", f"{NAME_OF_POD}; exit 7")
    assert rented.tenancy.pod.pod_id in done.stdout
    assert done.returncode == 7
    assert "may still be billing: 1 pod" in done.stderr


def test_the_printed_lines_work_when_pasted_into_a_shell(rented: Rented, tmp_path: Path) -> None:
    made = rented.call(
        "pennypod", "ssh", rented.run, "--", "mkdir -p /root/pennypod/out && echo hi > /root/pennypod/out/x"
    )
    assert made.returncode == 0
    ssh_line, scp_line = rented.call("pennypod", "ssh", rented.run, "--print").stdout.splitlines()
    logged_in = subprocess.run(ssh_line + " cat /root/pennypod/out/x", shell=True, capture_output=True, text=True)
    assert logged_in.stdout == "hi\n"
    (tmp_path / f"{rented.run}-out").mkdir()
    subprocess.run(scp_line, shell=True, check=True, capture_output=True, cwd=tmp_path)
    assert (tmp_path / f"{rented.run}-out" / "x").read_text() == "hi\n"


def test_another_state_folder_calls_it_an_orphan(rented: Rented, tmp_path: Path) -> None:
    done = rented.call("ansible-inventory", "--list", PENNYPOD_HOME=str(tmp_path))
    listed = json.loads(done.stdout)
    assert rented.run in listed["orphans"]["hosts"]
    assert rented.run in listed["billing"]["hosts"]
    assert not list(tmp_path.glob("ledger*")), "looking made a ledger"


def test_no_engine_at_all_is_no_local_pods_and_a_broken_one_is_an_error(rented: Rented, tmp_path: Path) -> None:
    home, path = {"PENNYPOD_HOME": str(tmp_path / "home")}, tmp_path / "bin"
    path.mkdir()
    (path / "env").symlink_to("/usr/bin/env")
    none = rented.call("ansible-inventory", "--list", **home, PATH=str(path))
    assert none.returncode == 0, none.stderr
    assert "hosts" not in json.loads(none.stdout).get("billing", {})
    engine = path / "podman"
    engine.write_text("#!/bin/sh\necho 'Error: cannot connect' >&2\nexit 125\n")
    engine.chmod(0o755)
    broken = rented.call(
        "ansible-inventory", "--list", **home, PATH=f"{path}:/usr/bin:/bin", PENNYPOD_ENGINE=str(engine)
    )
    assert broken.returncode != 0
    assert "the pods of local cannot be listed" in broken.stderr


# A sweep of everything that looks ahead would end the pods of whatever else runs on this machine, and an overdue pod
# belongs to whichever sweep comes first. So these look ahead, and at one run only.


def test_a_run_that_no_listing_shows_is_still_shown_until_a_sweep_proves_it_gone(rented: Rented) -> None:
    now = rented.clock.now()
    run = new_run_id("lost", now, secrets.randbelow)
    rented.ledger.open_run(RunRecord(run, "lost", "1:1", now, str(rented.home / run)))
    (offer, *_) = rented.provider.offers(Need(disk_gb=1))
    attempt = rented.ledger.open_attempt(Lease(run, 1, int(now) - 5, "aaaaa"), offer, renter="1:1", at=now)
    rented.ledger.record_pod(attempt.id, "0" * 12, now)
    rented.ledger.record_ready(attempt.id, ADDRESS, now)
    listed = rented.inventory()
    assert listed["unproven"]["hosts"] == [run]
    assert listed["_meta"]["hostvars"][run]["pennypod_may_still_be_billing"] is True
    assert rented.call("pennypod", "sweep", "--run", run).returncode == 0
    (record,) = rented.ledger.attempts(run)
    assert record.state is AttemptState.GONE
    assert record.receipt is not None
    assert rented.ledger.run(run).outcome == "cancelled"
    assert run not in json.dumps(rented.inventory())


def test_a_sweep_from_elsewhere_ends_an_overdue_pod_by_its_name_alone(rented: Rented, tmp_path: Path) -> None:
    elsewhere = {"PENNYPOD_HOME": str(tmp_path / "elsewhere")}
    run = new_run_id("late", rented.clock.now(), secrets.randbelow)
    lease = Lease(run, 1, int(rented.clock.now()) + LIFETIME_S, "aaaaa")
    (offer, *_) = rented.provider.offers(Need(disk_gb=1))
    key = run_key(rented.settings, rented.run)[1]
    pod_id = rented.provider.rent(offer, Order(lease.name, "stock", 1, key, lease.deadline))
    sweep = ("sweep", "--json", "--run", run)
    later = (*sweep, "--now", f"+{LIFETIME_S + 60}s")
    try:
        swept = listed(rented.call("pennypod", *sweep, **elsewhere))
        assert ([pod["pod_name"] for pod in swept["kept"]], swept["pods"]) == ([lease.name], [])
        dry = listed(rented.call("pennypod", *later, "--dry-run", **elsewhere))
        assert [(pod["pod_name"], pod["action"]) for pod in dry["pods"]] == [(lease.name, "would destroy")]
        assert rented.provider.pod(pod_id) is not None
        swept = listed(rented.call("pennypod", *later, **elsewhere))
        assert [(pod["pod_name"], pod["action"]) for pod in swept["pods"]] == [(lease.name, "destroyed")]
        assert rented.provider.pod(pod_id) is None
        assert rented.provider.pod(rented.tenancy.pod.pod_id) is not None
    finally:
        rented.provider.destroy(pod_id)


def listed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a sweep printed, once it is certain that it could look everywhere."""
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["not_listed"] == {}
    return document


def test_looking_ahead_judges_this_pod_too(rented: Rented, tmp_path: Path) -> None:
    ahead = ("sweep", "--dry-run", "--json", "--now", f"+{LIFETIME_S + 60}s")
    done = rented.call("pennypod", *ahead, PENNYPOD_HOME=str(tmp_path))
    due = [pod["action"] for pod in json.loads(done.stdout)["pods"] if pod["run"] == rented.run]
    assert due == ["would destroy"]
    assert rented.provider.pod(rented.tenancy.pod.pod_id) is not None
