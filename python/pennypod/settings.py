"""Where state lives, read from the environment once. Floor 1: the environment is its one outside thing."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs


@dataclass(frozen=True, slots=True)
class Settings:
    """`home` holds all state of this control node; `database_url` is any SQLAlchemy URL."""

    home: Path
    database_url: str

    def run_dir(self, run: str) -> Path:
        """Keys, known_hosts and progress events of one run; made on first use, for the owner only."""
        self._make_home()
        path = self.runs_dir / run
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    @property
    def runs_dir(self) -> Path:
        return self.home / "runs"

    @property
    def ledger_file(self) -> Path | None:
        """The ledger's file, None when it is on a server or only in memory."""
        scheme, found, place = self.database_url.partition(":///")
        database = place.partition("?")[0]
        if not found or scheme.partition("+")[0] != "sqlite" or database in ("", ":memory:"):
            return None
        return Path(database)

    @property
    def guards_dir(self) -> Path:
        return self.home / "guards"

    @property
    def cache_dir(self) -> Path:
        self._make_home()
        return self.home / "cache"

    def _make_home(self) -> None:
        """For the owner only: folders made along the way to another one would get whatever mode is usual."""
        with contextlib.suppress(OSError):  # whoever writes into it says what is wrong
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)


def disk_is_full(exc: OSError) -> bool:
    """Whether there is no room left, or no quota."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def home_advice(exc: OSError) -> str:
    """What to do about a state folder that cannot be written to."""
    return "free some room on its disk" if disk_is_full(exc) else "set PENNYPOD_HOME to a folder you own"


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from `PENNYPOD_HOME` and `PENNYPOD_DATABASE_URL`, with the documented defaults."""
    env = os.environ if environ is None else environ
    home = Path(env.get("PENNYPOD_HOME") or platformdirs.user_state_dir("pennypod")).expanduser().absolute()
    url = env.get("PENNYPOD_DATABASE_URL") or f"sqlite:///{home / 'ledger.sqlite3'}"
    return Settings(home=home, database_url=url)
