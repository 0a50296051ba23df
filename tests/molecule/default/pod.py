"""Rent and destroy the pod of the molecule scenario: `pod.py create|destroy FOLDER`.

FOLDER is molecule's own; it gets the key pair, known_hosts and inventory/pod.yml. The lease is written down before the
container is made, so that destroy finds one whose creation was cut short.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path

from pennypod.clock import SystemClock
from pennypod.errors import PennypodError
from pennypod.model.ids import Lease, new_run_id, random_base32
from pennypod.model.offer import Need, Order
from pennypod.providers.local import LocalProvider, local_provider
from pennypod.settings import load_settings
from pennypod.ssh import Ssh, SshTarget, make_key_pair, trust_host_keys, wait_for_ssh

HOST = "bootstrap_pod"
LEASE_S = 1800


def create(provider: LocalProvider, folder: Path) -> None:
    clock = SystemClock()
    run = new_run_id("molecule", time.time(), secrets.randbelow)
    lease = Lease(run, 1, int(time.time()) + LEASE_S, random_base32(5, secrets.randbelow))
    (folder / "lease").write_text(lease.name, encoding="utf-8")
    key, public = make_key_pair(folder, run)
    offer = provider.offers(Need(disk_gb=2))[0]
    pod_id = provider.rent(offer, Order(lease.name, "stock", 2, public, lease.deadline))
    while (pod := provider.pod(pod_id)) is None or pod.address is None:
        if time.time() > lease.deadline - LEASE_S + 60:
            raise SystemExit(f"pod {pod_id} did not come up")
        clock.sleep(0.2)
    known_hosts = folder / "known_hosts"
    trust_host_keys(known_hosts, pod.address.host, pod.address.port, provider.host_keys(pod_id))
    target = SshTarget(pod.address.host, pod.address.port, pod.address.user, key, known_hosts)
    wait_for_ssh(Ssh(target), deadline_s=60, clock=clock)
    hostvars = {
        "ansible_host": pod.address.host,
        "ansible_port": pod.address.port,
        "ansible_user": pod.address.user,
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": f"-o UserKnownHostsFile='{known_hosts}' -o StrictHostKeyChecking=yes"
        " -o IdentitiesOnly=yes -o BatchMode=yes",
    }
    inventory = folder / "inventory" / "pod.yml"
    inventory.parent.mkdir(exist_ok=True)
    inventory.write_text(json.dumps({"all": {"hosts": {HOST: hostvars}}}, indent=2) + "\n", encoding="utf-8")


def destroy(provider: LocalProvider, folder: Path) -> None:
    lease = folder / "lease"
    if not lease.exists():
        return
    name = lease.read_text(encoding="utf-8")
    for _ in range(20):
        left = [pod for pod in provider.pods() if pod.name == name]
        if not left:
            lease.unlink()
            (folder / "inventory" / "pod.yml").unlink(missing_ok=True)
            return
        for pod in left:
            provider.destroy(pod.pod_id)
        time.sleep(0.3)
    raise SystemExit(f"pod {name} is still there")


def main(action: str, folder: str) -> None:
    provider = local_provider(load_settings())
    provider.on_progress = lambda text: print(text, file=sys.stderr, flush=True)
    try:
        {"create": create, "destroy": destroy}[action](provider, Path(folder))
    except PennypodError as exc:
        raise SystemExit(exc.message) from exc


if __name__ == "__main__":
    main(*sys.argv[1:])
