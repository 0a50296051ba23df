"""A pod saved after its bootstrap, as a local image: what a run costs when nothing has to be installed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pennypod.clock import SystemClock
from pennypod.ending import Ending
from pennypod.errors import TransientError
from pennypod.model.ids import Lease
from pennypod.model.offer import Need, Order
from pennypod.providers.local import LocalProvider
from pennypod.providers.local.image import image_reference
from pennypod.rental import Rental
from pennypod.ssh import make_key_pair
from workspace import REPOSITORY, Workspace

_PLAY = """\
- hosts: pod
  gather_facts: false
  vars_files: [{job}]
  tasks:
    - ansible.builtin.import_role: {{name: bootstrap}}
"""

Say = Callable[[str], None]


class PodSaver:
    """Rents local pods of its own and saves one of them."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.provider = LocalProvider(workspace.settings, workspace.environment)
        self.rental = Rental({"local": self.provider}, workspace.ledger(), SystemClock())
        self.key, self.public_key = make_key_pair(workspace.root, "bench")

    def rent(self, image: str) -> tuple[str, str, str, int]:
        """A pod's id, name, host and port."""
        deadline = int(time.time() + 900)
        name = Lease("bench-0101-aaaaa", 1, deadline, "aaaaa").name
        order = Order(name=name, image=image, disk_gb=2, public_key=self.public_key, deadline=deadline)
        pod_id = self.provider.rent(self.provider.offers(Need(disk_gb=2))[0], order)
        pod = self.provider.pod(pod_id)
        while pod is None or pod.address is None:
            time.sleep(0.1)
            pod = self.provider.pod(pod_id)
        return pod_id, name, pod.address.host, pod.address.port

    def save(self, image: str) -> None:
        """Bootstrap a stock pod for the demo job and commit it as `image`."""
        workspace = self.workspace
        pod_id, _name, host, port = self.rent("stock")
        try:
            play = workspace.root / "save.yml"
            play.write_text(_PLAY.format(job=workspace.root / "group_vars" / "job_demo.yml"))
            options = f"-o UserKnownHostsFile={workspace.root}/known_hosts -o StrictHostKeyChecking=accept-new"
            inventory = workspace.root / "save-inventory.yml"
            login = {
                "ansible_host": host,
                "ansible_port": port,
                "ansible_user": "root",
                "ansible_ssh_private_key_file": str(self.key),
                "ansible_ssh_common_args": options,
            }
            inventory.write_text(json.dumps({"all": {"hosts": {"pod": login}}}))
            playbook = Path(sys.executable).parent / "ansible-playbook"
            command = [str(playbook), "-i", str(inventory), str(play)]
            subprocess.run(command, check=True, cwd=workspace.root, env=workspace.environment, stdout=sys.stderr)
            done = self.provider.engine.call("commit", pod_id, image, timeout_s=120)
            if done.rc != 0:
                raise SystemExit(f"cannot save the pod: {done.stderr}")
        finally:
            pod = self.provider.pod(pod_id)
            if pod is not None:
                self.rental.destroy_all([Ending(pod, "done", "it is saved")], lambda *_a, **_k: None)


def kept_image(workspace: Workspace, say: Say) -> str:
    """The saved image for this state of the bootstrap role and the demo job; made once, older ones are removed."""
    provider = LocalProvider(workspace.settings, workspace.environment)
    recipe = [*sorted((REPOSITORY / "roles" / "bootstrap").rglob("*.*")), REPOSITORY / "group_vars" / "job_demo.yml"]
    parts = [image_reference("stock").encode(), *(path.read_bytes() for path in recipe if path.is_file())]
    repository = "localhost/pennypod-chaos"
    wanted = f"{repository}:{hashlib.sha256(b''.join(parts)).hexdigest()[:12]}"
    engine = provider.engine
    if engine.image_id(wanted) is None:
        say("saving a bootstrapped pod as an image (once)")
        provider.prepare("stock", say)
        PodSaver(workspace).save(wanted)
        with suppress(TransientError):
            listed = engine.check("images", "--format", "{{.Repository}}:{{.Tag}}", repository)
            for old in set(listed.split()) - {wanted}:
                engine.call("rmi", old, timeout_s=60)
    return wanted
