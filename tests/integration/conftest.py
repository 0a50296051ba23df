"""Fixtures for tests against a real sshd on the loopback interface."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_sshd import LoopbackSshd


@pytest.fixture
def sshd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LoopbackSshd]:
    """A server of the test's own, so that a test may cut its connections or end its tmux without touching another. A
    parameter is lines of sshd_config that go before the usual ones."""
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    tmux_dir = Path(tempfile.mkdtemp(prefix="pp-"))  # a socket's path must be short
    server = LoopbackSshd(folder, tmux_dir, getattr(request, "param", ""))
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(tmux_dir, ignore_errors=True)
