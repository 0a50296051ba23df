"""A pod that is a folder of this machine: what ssh would run there runs here, in a shell, with the same pipes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pennypod.errors import SshError
from pennypod.ssh import LATE_S, Ssh, SshTarget, Traffic


class FolderSsh(Ssh):
    """`python` stands in for the pod's python3; `before` is shell text that runs first, such as a noisy login shell."""

    def __init__(self, *, python: str = sys.executable, before: str = "", round_trip_s: float | None = None) -> None:
        super().__init__(SshTarget("folder", 22, "nobody", Path("/nonexistent"), Path("/nonexistent")))
        self.python = python
        self.before = before
        self.conversations = 0
        self.delay_s = round_trip_s

    def popen(self, remote: str) -> subprocess.Popen[bytes]:
        self.conversations += 1
        remote = remote.replace("exec python3", f"exec {self.python}")
        return subprocess.Popen(
            ["sh", "-c", self.before + remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )

    def beside(self, traffic: Traffic, number: int) -> FolderSsh:
        return self

    def round_trip_s(self, timeout_s: float = 3.0, when_late: Callable[[], None] | None = None) -> float | None:
        if when_late is not None and (self.delay_s or 0) > LATE_S:
            when_late()
        return self.delay_s

    def error(self, why: str, **details: object) -> SshError:
        return SshError(f"folder: {why}", **details)


def contents(root: Path) -> dict[bytes, bytes | None]:
    """Every name under `root` as bytes, with a file's content; folders have None. Links count as what they are not."""
    found: dict[bytes, bytes | None] = {}
    for path in sorted(root.rglob("*")):
        name = bytes(path.relative_to(root))
        assert not path.is_symlink(), path
        found[name] = None if path.is_dir() else path.read_bytes()
    return found
