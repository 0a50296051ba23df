"""Debian's docker-registry on a free loopback port, with one login, for as long as a test needs it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

USER, PASSWORD = "tester", "canary-registry-51c7"
# bcrypt of the password above, as `htpasswd -B` writes it.
_HTPASSWD = "tester:$2b$05$abcdefghijklmnopqrstuuVJkVGGAc8ZKlOdnRFY7PRulhwbN5zdq\n"
_TRIES = 5  # a free port may be taken before the registry is there
_CONFIG = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:{port}"}}
auth: {{htpasswd: {{realm: here, path: {root}/htpasswd}}}}
"""


@contextmanager
def oci_registry(root: Path) -> Iterator[str]:
    """Yields "127.0.0.1:PORT", which lets in nobody but USER."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("there is no docker-registry: make test-tools")
    root.mkdir()
    (root / "htpasswd").write_text(_HTPASSWD)
    for _attempt in range(_TRIES):
        port = _free_port()
        (root / "config.yml").write_text(_CONFIG.format(root=root, port=port))
        with (root / "log").open("ab") as log:
            process = subprocess.Popen([program, "serve", str(root / "config.yml")], stdout=log, stderr=log)
        try:
            if _answers(process, f"http://127.0.0.1:{port}/v2/"):
                yield f"127.0.0.1:{port}"
                return
        finally:
            process.terminate()
            process.wait(10)
    raise AssertionError((root / "log").read_text())


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    until = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < until:
        try:
            return requests.get(url, timeout=5).status_code == 401
        except requests.RequestException:
            time.sleep(0.05)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
