"""Keys that are good for nothing but being found, and a search for them in all the places where none belongs."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from pennypod.errors import PennypodError
from pennypod.providers.local.engine import Engine, find_engine
from pennypod.settings import load_settings
from pennypod.simulator.pods import LABEL

# The keys come by stdin: on a command line they would be found by the search themselves.
_SEARCH_POD = """\
cat > /dev/shm/canaries
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -qaF -f /dev/shm/canaries && echo /proc
grep -rlaF -f /dev/shm/canaries /root /etc /tmp /run /var/log /var/tmp /workspace 2>/dev/null
rm -f /dev/shm/canaries
[ -e /root/pennypod/train.log ] && echo searched-while-training
true
"""


class Watch:
    """Looks at every process of this machine, and into a simulator's pods, for as long as the block lasts."""

    def __init__(self, keys: Iterable[str], simulator_pid: int) -> None:
        self.keys = tuple(keys)
        self.found: set[str] = set()
        self.looked_at_processes = 0
        self.looked_at_pods = 0
        self.saw_training = False
        self._simulator_pid = simulator_pid
        self._engine: Engine = find_engine(os.environ, load_settings().cache_dir / "local")
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._processes, self._pods)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _processes(self) -> None:
        while not self._over.wait(0.05):
            self.found |= in_process_arguments(self.keys)
            self.looked_at_processes += 1

    def _pods(self) -> None:
        while not self._over.wait(0.5):
            with suppress(PennypodError):  # a busy engine; the next round asks again
                for row in self._engine.list_containers(f"label={LABEL}"):
                    if str(row["labels"][LABEL]).startswith(f"{self._simulator_pid}:") and row["state"] == "running":
                        self._search_pod(row["id"])

    def _search_pod(self, container: str) -> None:
        text = "".join(f"{key}\n" for key in self.keys).encode()
        done = self._engine.call("exec", "-i", container, "/bin/sh", "-c", _SEARCH_POD, stdin=text, timeout_s=60)
        if done.rc == 0:
            self.looked_at_pods += 1
            self.saw_training |= "searched-while-training" in done.stdout
            self.found |= {f"in the pod: {line}" for line in done.stdout.splitlines() if line.startswith("/")}


def new_key(name: str) -> str:
    return f"canary-{name}-{secrets.token_hex(12)}"


def in_process_arguments(keys: Iterable[str]) -> set[str]:
    """The processes of this machine, whoever's they are, that show a key to everybody who can list processes."""
    found = set()
    wanted = [key.encode() for key in keys]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            content = (process / "cmdline").read_bytes()
            if any(key in content for key in wanted):
                found.add(f"argument of a process: {content.partition(bytes(1))[0].decode(errors='replace')}")
    return found


def in_files(keys: Iterable[str], folders: Iterable[Path]) -> list[str]:
    """The files below the folders that hold a key, and the rows of SQLite files that do."""
    found = []
    for path in _files_below(folders):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # of another test, which has ended meanwhile
            continue
        if content.startswith(b"SQLite format 3"):
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
                content += "\n".join(database.iterdump()).encode()
        if any(key.encode() in content for key in keys):
            found.append(str(path))
    return found


def _files_below(folders: Iterable[Path]) -> Iterator[Path]:
    """Regular files; folders may come and go meanwhile, which `Path.rglob` does not bear."""
    for folder in folders:
        for place, _, names in os.walk(folder):
            yield from (path for name in names if (path := Path(place, name)).is_file())


def in_requests(keys: Iterable[str], rows: Iterable[dict[str, Any]]) -> list[str]:
    """Requests that told a key anywhere but in the header. The simulator writes *** for one in a body or a query."""
    found = []
    for row in rows:
        said = json.dumps({name: row[name] for name in ("path", "query", "body", "user_agent")})
        if row["key_in"] == "url" or "***" in said or any(key in said for key in keys):
            found.append(f"{row['method']} {row['path']}")
    return found
