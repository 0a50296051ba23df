"""A machine with systemd and cron for the control_node scenario: `machine.py create|destroy FOLDER`.

A privileged container of the stock image with systemd as its init and a real sshd. It is no pod: no lease, no label of
ours, and nothing but this script ever ends it. FOLDER is molecule's own; it gets the key pair, known_hosts, the
inventory, and the container's name before the container is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import sys
import time
from pathlib import Path

from pennypod.clock import SystemClock
from pennypod.errors import PennypodError
from pennypod.providers.local import LocalProvider, local_provider
from pennypod.providers.local.engine import Engine
from pennypod.providers.local.hostsettings import read_host_settings, write_tree
from pennypod.providers.local.image import MOUNT, image_reference, run_arguments, scripts
from pennypod.settings import load_settings
from pennypod.ssh import Ssh, SshTarget, make_key_pair, trust_host_keys, wait_for_ssh

HOST = "control_node"
PACKAGES = ["systemd", "systemd-sysv", "dbus", "cron", "python3-venv"]
INSTALL = f"""\
set -e
. {MOUNT}/host.sh
lay_over
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends {" ".join(PACKAGES)} >/dev/null
systemctl mask systemd-udevd systemd-networkd systemd-resolved getty.target console-getty.service >/dev/null 2>&1
"""


def image(engine: Engine, mounts: list[str]) -> str:
    """The stock image with systemd in it; made once, which takes half a minute."""
    stock = engine.image_id(image_reference("stock")) or ""
    digest = hashlib.sha256(f"{stock} {INSTALL}".encode()).hexdigest()[:12]
    reference = f"localhost/pennypod-control:{digest}"
    if engine.image_id(reference) is None:
        name = f"pennypod-control-build-{secrets.token_hex(4)}"
        command = ["run", "--pull", "never", "--name", name, *engine.flags, *mounts, "--entrypoint", "/bin/sh"]
        try:
            engine.check(*command, image_reference("stock"), "-c", INSTALL, timeout_s=600)
            engine.check("commit", name, reference, timeout_s=300)
        finally:
            engine.remove_container(name)
    return reference


def create(provider: LocalProvider, folder: Path) -> None:
    settings, host = load_settings(), read_host_settings(os.environ)
    provider.prepare("stock", lambda text: print(text, file=sys.stderr, flush=True))
    engine = provider.engine
    mounts = run_arguments(host, write_tree(host, settings.cache_dir / "local", scripts("host.sh")))
    reference = image(engine, mounts)
    name = f"pennypod-control-{secrets.token_hex(4)}"
    (folder / "machine").write_text(name, encoding="utf-8")
    key, public = make_key_pair(folder, "control")
    start = f"set -e; . {MOUNT}/host.sh; lay_over; ssh-keygen -qA; mkdir -p -m 700 /root/.ssh"
    start += f"; echo {shlex.quote(public)} >/root/.ssh/authorized_keys; systemctl enable -q ssh cron"
    command = ["run", "--detach", "--pull", "never", "--privileged", "--name", name, *engine.flags, *mounts]
    command += ["--tmpfs", "/run/lock", "-e", "container=podman", "-p", "127.0.0.1::22", "--entrypoint", "/bin/sh"]
    engine.check(*command, reference, "-c", f"{start}; exec /lib/systemd/systemd", timeout_s=60)
    port = wait_for_port(engine, name)
    known_hosts = folder / "known_hosts"
    trust_host_keys(known_hosts, "127.0.0.1", port, [host_key(engine, name)])
    target = SshTarget("127.0.0.1", port, "root", key, known_hosts)
    wait_for_ssh(Ssh(target), deadline_s=60, clock=SystemClock())
    hostvars = {
        "ansible_host": "127.0.0.1",
        "ansible_port": port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": f"-o UserKnownHostsFile='{known_hosts}' -o StrictHostKeyChecking=yes"
        " -o IdentitiesOnly=yes -o BatchMode=yes",
        "machine_environment": dict(host.env),
    }
    inventory = folder / "inventory" / "machine.yml"
    inventory.parent.mkdir(exist_ok=True)
    inventory.write_text(json.dumps({"all": {"hosts": {HOST: hostvars}}}, indent=2) + "\n", encoding="utf-8")


def wait_for_port(engine: Engine, name: str) -> int:
    for _ in range(100):
        (row,) = engine.list_containers(f"name={name}")
        if row["state"] == "running" and 22 in row["ports"]:
            return int(row["ports"][22][1])
        if row["state"] == "exited":
            break
        time.sleep(0.2)
    logs = engine.call("logs", "--tail", "5", name)
    raise SystemExit(f"the machine did not come up: {logs.stdout}{logs.stderr}")


def host_key(engine: Engine, name: str) -> str:
    """Its public host key, once it has one."""
    for _ in range(50):
        words = engine.call("exec", name, "cat", "/etc/ssh/ssh_host_ed25519_key.pub").stdout.split()
        if len(words) >= 2:
            return " ".join(words[:2])
        time.sleep(0.2)
    raise SystemExit(f"{name} has made no host key")


def destroy(provider: LocalProvider, folder: Path) -> None:
    machine = folder / "machine"
    if machine.exists():
        provider.looker.remove_container(machine.read_text(encoding="utf-8"))
        (folder / "inventory" / "machine.yml").unlink(missing_ok=True)
        machine.unlink()


def main(action: str, folder: str) -> None:
    try:
        {"create": create, "destroy": destroy}[action](local_provider(load_settings()), Path(folder))
    except PennypodError as exc:
        raise SystemExit(exc.message) from exc


if __name__ == "__main__":
    main(*sys.argv[1:])
