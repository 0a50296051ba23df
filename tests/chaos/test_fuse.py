"""Ring 3: with the whole control side gone, the fuse alone ends the pod. Nobody logs in, sweeps or guards."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pennypod import fuse
from pennypod.clock import SystemClock
from pennypod.ledger import open_ledger
from pennypod.model.ids import Lease, new_run_id, parse_lease, random_base32
from pennypod.model.offer import FuseTerms, Need, Order
from pennypod.model.pod import Pod, PodState
from pennypod.providers.base import Provider
from pennypod.providers.http import Http
from pennypod.providers.local import LocalProvider, local_provider
from pennypod.providers.local.engine import Engine
from pennypod.providers.runpod import RunpodProvider
from pennypod.providers.vast import VastProvider
from pennypod.settings import Settings, load_settings
from pennypod.ssh import Ssh, SshTarget, make_key_pair, wait_for_ssh
from pennypod.sweep import DESTROYED, survey, sweep
from simulated import KEYS, Simulator, simulator
from workspace import Workspace

pytestmark = [pytest.mark.heavy, pytest.mark.pod, pytest.mark.timeout(1200), pytest.mark.xdist_group("fuse")]

FAR_S = 3600


def wait_until(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.2)
    return found


class Tenant:
    """Rents with a provider's own client and then forgets about it."""

    def __init__(self, folder: Path, provider: Provider, engine: Engine) -> None:
        self.folder = folder
        self.provider = provider
        self.engine = engine
        self.key_file, self.public_key = make_key_pair(folder, "pennypod tests")
        self.names: list[str] = []

    def rent(self, *, deadline_s: float = FAR_S, count_s: int = FAR_S, lease_s: int = 0) -> str:
        """The pod's id. Three ways to its end: the deadline by the pod's clock, the count, the lease."""
        run = new_run_id("fuse", time.time(), secrets.randbelow)
        lease = Lease(run, 1, int(time.time() + deadline_s), random_base32(5, secrets.randbelow))
        self.names.append(lease.name)
        terms = FuseTerms(count_s, lease_s)
        order = Order(lease.name, "stock", 20, self.public_key, lease.deadline, {"HELLO": "there"}, terms)
        offers = sorted(self.provider.offers(Need(disk_gb=0.1)), key=lambda offer: offer.price_micros_per_h)
        return self.provider.rent(offers[0], order)

    def pod(self, pod_id: str) -> Pod:
        found = self.provider.pod(pod_id)
        assert found is not None
        return found

    def container(self) -> str:
        """The running container of the last pod."""
        return str(wait_until(lambda: self._running(self.names[-1]), 60, "the container runs"))

    def _running(self, name: str) -> str:
        rows = [row for row in self.engine.list_containers(f"name={name}") if row["state"] == "running"]
        return str(rows[0]["id"]) if rows else ""

    def inside(self, script: str) -> str:
        done = self.engine.call("exec", self.container(), "sh", "-c", script)
        return done.stdout + done.stderr

    def armed(self) -> bool:
        return "pennypod-fuse" in self.inside("cat /proc/[0-9]*/comm 2>/dev/null; [ -s /dev/shm/pennypod-fuse ]")

    def ssh(self, pod_id: str) -> Ssh:
        address = wait_until(lambda: self.pod(pod_id).address, 60, "an address")
        target = SshTarget(address.host, address.port, address.user, self.key_file, self.folder / "known_hosts")
        ssh = Ssh(target)
        wait_for_ssh(ssh, deadline_s=30, clock=SystemClock())
        return ssh

    def clean(self) -> None:
        for name in self.names:
            self.engine.remove_container(name)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Tenant]:
    provider = local_provider(load_settings())
    provider.prepare("stock", print)
    tenant = Tenant(tmp_path, provider, provider.engine)
    try:
        yield tenant
    finally:
        tenant.clean()


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    local_provider(load_settings()).prepare("stock", print)
    with simulator("--pods", "container", "--speed", "1") as running:
        yield running


@pytest.fixture(params=["vast", "runpod"])
def rented(request: pytest.FixtureRequest, sim: Simulator, tmp_path: Path) -> Tenant:
    return tenant_of(request.param, sim, tmp_path)


def tenant_of(name: str, sim: Simulator, folder: Path) -> Tenant:
    clock = SystemClock()
    http = Http(name, sim.url, KEYS[name], clock)
    provider: Provider = VastProvider(http, clock) if name == "vast" else RunpodProvider(http, clock)
    return Tenant(folder, provider, local_provider(load_settings()).engine)


def row(sim: Simulator, pod_id: str) -> dict[str, Any]:
    return next(pod for pod in sim.ever() if pod["id"] == pod_id)


# --- the local provider: the container ends with its first process ----------------------------------------------------


def ended(tenant: Tenant, pod_id: str, limit_s: float) -> Pod:
    wait_until(lambda: tenant.pod(pod_id).state is not PodState.RUNNING, limit_s, "the container ends")
    return tenant.pod(pod_id)


def test_a_local_pod_ends_at_its_deadline(local: Tenant, record_property: Callable[[str, object], None]) -> None:
    pod_id = local.rent(deadline_s=5)
    deadline = time.time() + 5
    pod = ended(local, pod_id, 15)
    record_property("seconds_late", round(time.time() - deadline, 1))
    assert pod.state is PodState.STOPPED
    assert "the deadline has passed" in "\n".join(pod.details["log"])


def test_a_job_that_kills_what_it_can_does_not_save_the_pod(local: Tenant) -> None:
    """All of Python, by name and by command line; tmux; the pod's Python and all room in /dev/shm gone after that."""
    pod_id = local.rent(count_s=30)
    wait_until(local.armed, 20, "it is armed")
    local.inside("pkill python; pkill -TERM -f python; pkill -HUP -f pennypod; pkill -INT sh; tmux kill-server")
    assert local.armed()
    local.inside("pkill -9 -f python; pkill -9 python")
    wait_until(local.armed, 10, "it is back")
    local.inside("head -c 2G /dev/zero >/dev/shm/full; rm -rf /usr/lib/python3* /usr/bin/python3* /tmp/* /root/*")
    assert local.armed()
    container = local.container()
    ended(local, pod_id, 60)
    done = local.engine.call("logs", container)
    left = [int(seconds) for seconds in re.findall(r"armed: (\d+) s left", done.stdout + done.stderr)]
    assert len(left) == 2
    assert left[1] < left[0], "the count went on where it was"


def test_a_missed_lease_ends_the_pod_and_a_renewed_one_does_not(local: Tenant) -> None:
    pod_id = local.rent(lease_s=15)
    ssh = local.ssh(pod_id)
    state = fuse.ask(ssh)
    assert (state.armed, state.renewable) == (True, True)
    ssh.run_checked("head -c 2G /dev/zero >/dev/shm/full || true", timeout_s=60)  # a full /dev/shm is no excuse
    end = time.monotonic() + 20
    while time.monotonic() < end:
        fuse.renew(ssh, 15)
        time.sleep(1)
    assert local.pod(pod_id).state is PodState.RUNNING
    pod = ended(local, pod_id, 30)
    assert "nobody has renewed the lease" in "\n".join(pod.details["log"])


def test_it_does_not_wait_for_sshd(local: Tenant) -> None:
    """Its line is the first of the container's log, before the server has even listened."""
    pod_id = local.rent()
    local.ssh(pod_id)
    lines = local.engine.call("logs", local.container())
    words = (lines.stdout + lines.stderr).splitlines()
    assert any("pennypod-fuse: armed" in line for line in words), words


# --- with the whole control side of a real run ------------------------------------------------------------------------

LEASE_MINUTES = 0.75


def test_a_lost_control_node_is_a_pod_that_ends_itself(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The guard keeps the lease alive; with controller, guard and ledger gone at once, only the pod is left to know."""
    workspace, log = Workspace(tmp_path), tmp_path / "log"
    process = workspace.start(job="tiny", tiny_epochs=600, pod_lease_minutes=LEASE_MINUTES, log=log)
    wait_until(lambda: "/600" in log.read_text(), 240, "the training runs")
    (pod,) = workspace.pods()
    (run,) = workspace.ledger().runs()
    provider = local_provider(load_settings())
    try:
        wait_until(lambda: time.time() - pod.created > 1.5 * LEASE_MINUTES * 60, 120, "the first lease is over")
        assert still(provider, pod).state is PodState.RUNNING, "the guard has renewed it"
        for victim in [*guards(run.controller), psutil.Process(process.pid)]:
            victim.kill()
        process.wait(20)
        shutil.rmtree(workspace.home)
        began = time.monotonic()
        wait_until(lambda: still(provider, pod).state is not PodState.RUNNING, LEASE_MINUTES * 60 + 20, "it ends")
        record_property("seconds", round(time.monotonic() - began, 1))
        assert "nobody has renewed the lease" in "\n".join(still(provider, pod).details["log"])
    finally:
        provider.destroy(pod.pod_id)


def guards(controller: str) -> list[psutil.Process]:
    found = [process for process in psutil.process_iter(["cmdline"]) if controller in (process.info["cmdline"] or [])]
    assert found
    return found


def still(provider: LocalProvider, pod: Pod) -> Pod:
    found = provider.pod(pod.pod_id)
    assert found is not None
    return found


# --- both providers' APIs, as the simulator plays them ----------------------------------------------------------------


def test_a_rented_pod_destroys_itself_at_its_deadline(
    sim: Simulator, rented: Tenant, record_property: Callable[[str, object], None]
) -> None:
    pod_id = rented.rent(count_s=4)
    wait_until(lambda: row(sim, pod_id)["gone_at"], 40, "the pod is gone")
    record_property("seconds", round(row(sim, pod_id)["gone_at"] - row(sim, pod_id)["created"], 1))
    assert row(sim, pod_id)["gone_why"] == "destroyed"
    calls = [call for call in sim.get("requests")["requests"] if call["user_agent"] == "pennypod-fuse"]
    assert {call["key_in"] for call in calls} == {"header"}


def test_a_rented_pod_destroys_itself_when_nobody_renews_its_lease(sim: Simulator, rented: Tenant) -> None:
    pod_id = rented.rent(lease_s=4)
    wait_until(lambda: row(sim, pod_id)["gone_why"] == "destroyed", 40, "the pod is gone")


def test_no_network_for_a_while_only_delays_it(sim: Simulator, tmp_path: Path) -> None:
    tenant = tenant_of("vast", sim, tmp_path)
    sim.fault("vast.destroy", "lost_reply", times=1, where={"key": "pod"})
    sim.fault("vast.destroy", "error", status=502, nth=[1, 2], where={"key": "pod"})
    pod_id = tenant.rent(count_s=3)
    wait_until(lambda: row(sim, pod_id)["gone_why"] == "destroyed", 60, "the pod is gone")


def test_a_key_that_may_not_delete_stops_the_pod_and_the_next_sweep_ends_it(sim: Simulator, tmp_path: Path) -> None:
    tenant = tenant_of("runpod", sim, tmp_path)
    pod_id = tenant.rent(deadline_s=8, count_s=3)
    sim.fault("runpod.destroy", "forbidden", where={"key": "pod", "pod": pod_id})
    sim.fault("runpod.graphql", "forbidden", where={"key": "pod", "field": "podTerminate"}, times=1)
    wait_until(lambda: row(sim, pod_id)["stage"] == "exited", 40, "the pod is stopped")
    assert tenant.pod(pod_id).state is PodState.STOPPED
    assert row(sim, pod_id)["rate_micros_per_h"] == 0
    lease = parse_lease(tenant.names[-1])
    assert lease is not None
    # An empty ledger, as on any other machine: the deadline in the pod's name is all that is known.
    ledger = open_ledger(Settings(tmp_path, "sqlite://"))
    providers = {"runpod": tenant.provider}
    found = survey(providers, ledger, lease.deadline + 1.0)
    (swept,) = sweep(found, providers, ledger, SystemClock(), dry_run=False, report=lambda *_a, **_k: None)
    assert (swept.target.pod_id, swept.action) == (pod_id, DESTROYED)
    assert row(sim, pod_id)["gone_why"] == "destroyed"


def test_the_accounts_key_is_nowhere_in_a_pod(sim: Simulator, rented: Tenant) -> None:
    pod_id = rented.rent()
    rented.ssh(pod_id)
    wait_until(rented.armed, 10, "it is armed")
    found = rented.inside(
        "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' >/tmp/seen;"
        "find / -xdev -type f -size -4M -newer /proc/1 2>/dev/null | xargs -r cat >>/tmp/seen 2>/dev/null;"
        "cat /dev/shm/* >>/tmp/seen; cat /tmp/seen"
    )
    assert "pennypod-fuse" in found
    assert "HELLO=there" in found
    for key in KEYS.values():
        assert key not in found
    rented.provider.destroy(pod_id)
