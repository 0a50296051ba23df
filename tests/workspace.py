"""A copy of the repository's root for one test: own jobs, own state folder, own artifacts, real local pods."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pennypod.ledger import Ledger, open_ledger
from pennypod.model.pod import Pod
from pennypod.providers.registry import all_providers
from pennypod.rental import ours
from pennypod.settings import Settings, load_settings

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
_OWN = {"group_vars", "artifacts", "data", ".git", ".venv"}
_KEYS = ("VAST_API_KEY", "RUNPOD_API_KEY")

TINY_JOB = """\
---
job_description: Counts instead of training, so that a test can choose how long it takes
pod_gpu: cheapest
pod_disk_gb: 1
pod_boot_minutes: 1
pod_train_minutes: 2
pod_smoke_minutes: 1
pod_allow_no_torch: true
dataset_path: "{{ dataset | default(pennypod_root ~ '/data/tiny', true) }}"
dataset_code: "{{ pennypod_root }}/code"
training_command: sh "$PENNYPOD_CODE/train.sh" {{ tiny_epochs | default(2) }} {{ tiny_exit | default(0) }}
training_stall_minutes: 2
weights_patterns: ["**/best.npz"]
weights_extra: ["**/results.csv"]
"""

TINY_TRAINER = """\
epochs=$1 status=$2
mkdir -p runs/tiny/weights
for epoch in $(seq 1 "$epochs"); do
  echo "epoch $epoch/$epochs loss 0.5"
  sleep 1
  [ -e enough ] && break
done
[ "$status" = 0 ] || { echo "out of luck" >&2; exit "$status"; }
[ -n "${TINY_NO_WEIGHTS:-}" ] && exit 0
echo "epoch,loss" > runs/tiny/results.csv
python3 -c "
import zipfile
with zipfile.ZipFile('runs/tiny/weights/best.npz', 'w') as file:
    file.writestr('w.npy', bytes(100000))
"
"""


class Workspace:
    """`play` runs a playbook to its end, `start` leaves it running. Everything lives under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.artifacts = root / "artifacts"
        # What the engine's probe found out holds for every test on this machine, and takes seconds to find out.
        shared = REPOSITORY / ".cache" / "tests-home"
        shared.mkdir(parents=True, exist_ok=True)
        self.home.mkdir(mode=0o700)
        (self.home / "cache").symlink_to(shared)
        for entry in REPOSITORY.iterdir():
            if entry.name not in _OWN:
                (root / entry.name).symlink_to(entry)
        (root / "group_vars").mkdir()
        for file in (REPOSITORY / "group_vars").iterdir():
            (root / "group_vars" / file.name).write_bytes(file.read_bytes())
        (root / "group_vars" / "job_tiny.yml").write_text(TINY_JOB)
        (root / "code").mkdir()
        (root / "code" / "train.sh").write_text(TINY_TRAINER)
        self.add_data("tiny", files=20, size=2000)

    def add_data(self, name: str, *, files: int, size: int) -> Path:
        """A data set of random, incompressible files."""
        folder = self.root / "data" / name
        folder.mkdir(parents=True)
        for number in range(files):
            (folder / f"{number:05}.jpg").write_bytes(os.urandom(size))
        return folder

    @property
    def environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in _KEYS}
        return env | {
            "PENNYPOD_HOME": str(self.home),
            "ANSIBLE_CONFIG": str(self.root / "ansible.cfg"),
            "ANSIBLE_FORCE_COLOR": "0",
            "PATH": f"{BIN}:{env['PATH']}",
        }

    @property
    def settings(self) -> Settings:
        return load_settings({"PENNYPOD_HOME": str(self.home)})

    def ledger(self) -> Ledger:
        return open_ledger(self.settings)

    def command(self, *args: str, playbook: str = "train.yml", **extra: object) -> list[str]:
        values = {"artifacts_dir": str(self.artifacts), "provider": "local"} | extra
        extras = [part for name, value in values.items() for part in ("-e", f"{name}={value}")]
        return [str(BIN / "ansible-playbook"), playbook, *extras, *args]

    def play(
        self, *args: str, env: Mapping[str, str] | None = None, **extra: object
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args, **extra),
            cwd=self.root,
            env=self.environment | dict(env or {}),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=280,
        )

    def start(self, *args: str, log: Path, **extra: object) -> subprocess.Popen[bytes]:
        """The playbook in a session of its own, as a terminal or a service would start it."""
        with log.open("wb") as file:
            return subprocess.Popen(
                self.command(*args, **extra),
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @contextlib.contextmanager
    def playing(self, *args: str, log: Path, **extra: object) -> Iterator[subprocess.Popen[bytes]]:
        """As `start`, ended for certain, and its pods gone, when the block is over."""
        process = self.start(*args, log=log, **extra)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            wait_until(lambda: not self.pods(), 60, "the test's own pods are gone")

    def pods(self) -> list[Pod]:
        """The local pods of this workspace's runs, as the engine lists them."""
        known = {run.run for run in self.ledger().runs()}
        listed = all_providers(self.settings, self.environment)["local"].pods()
        return [pod for pod, lease in ours(listed) if lease.run in known]

    def documents(self) -> list[dict[str, Any]]:
        """Every run.json, oldest run first."""
        return [json.loads(path.read_text()) for path in sorted(self.artifacts.glob("*/run.json"))]

    def document(self) -> dict[str, Any]:
        (document,) = self.documents()
        return document


def wait_until(condition: Callable[[], Any], limit_s: float, what: str) -> float:
    """Seconds until `condition` held; fails after `limit_s`."""
    started = time.monotonic()
    while True:
        if condition():
            return time.monotonic() - started
        if time.monotonic() - started > limit_s:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.05)
