"""A PostgreSQL server of a test's own, where its binaries are installed: data in a folder, a socket, no TCP port."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory


def binaries() -> Path | None:
    """The folder with initdb and pg_ctl, None where PostgreSQL is not installed."""
    found = shutil.which("pg_ctl")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    return versions[-1].parent if versions else None


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The SQLAlchemy URL of an empty database. The server ends with the block."""
    folder = binaries()
    assert folder is not None
    # Not pytest's own folder: a socket's path has 108 bytes at most, and the server's user must be let in.
    with TemporaryDirectory(prefix="pg-", dir="/tmp") as made:
        root, data = Path(made), Path(made) / "data"
        user = _unprivileged_user()
        if user is not None:
            shutil.chown(root, user)
        _run(user, str(folder / "initdb"), "-D", str(data), "-A", "trust", "-U", "tester", "--no-sync")
        options = f"-k {root} -c listen_addresses='' -c fsync=off"
        _run(user, str(folder / "pg_ctl"), "-D", str(data), "-l", str(root / "log"), "-w", "-o", options, "start")
        try:
            yield f"postgresql+psycopg://tester@/postgres?host={root}"
        finally:
            _run(user, str(folder / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")


def _unprivileged_user() -> str | None:
    """Who the server runs as: PostgreSQL refuses root, so there it is the user of Debian's package, or nobody."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _run(user: str | None, *command: str) -> None:
    done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
