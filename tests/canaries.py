"""Keys that are good for nothing but being found, and a search for them in all the places where none belongs."""

from __future__ import annotations

import base64
import gzip
import json
import os
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pennypod.errors import PennypodError
from pennypod.orchestrator.playbooks import RUN_MARK
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
    """Looks at every process of this machine, and into a simulator's pods, for as long as the block lasts.

    `own` are those of the keys that are the orchestrator's: no playbook that it starts may inherit them.
    """

    def __init__(self, keys: Iterable[str], simulator_pid: int, own: Iterable[str] = ()) -> None:
        self.keys = tuple(keys)
        self._own = tuple(own)
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
            self.found |= in_process_arguments(self.keys) | in_playbook_environments(self._own)
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


def in_playbook_environments(keys: Iterable[str]) -> set[str]:
    """The processes that an orchestrator has started for its runs, and that have a key in their environment."""
    found = set()
    wanted = [key.encode() for key in keys]
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        with suppress(OSError):
            content = (process / "environ").read_bytes()
            if f"{RUN_MARK}=".encode() in content and any(key in content for key in wanted):
                found.add(f"environment of a playbook: {(process / 'comm').read_text().strip()}")
    return found


def in_files(keys: Iterable[str], places: Iterable[Path], allowed: Iterable[Path] = ()) -> list[str]:
    """The files at or below these places that have a key, be it encoded: in their name, bytes or SQLite rows.

    The files in `allowed` may hold one as long as they are for their owner only.
    """
    wanted = [form for key in keys for form in forms(key)]
    private = set(allowed)
    found = []
    for path in _files_below(places):
        try:
            content = path.read_bytes()
            for_its_owner_only = path.stat().st_mode & 0o077 == 0
        except FileNotFoundError:  # of another test, which has ended meanwhile
            continue
        if path in private and for_its_owner_only:
            continue
        content += b"\0" + os.fsencode(path) + b"\0" + _unpacked(path, content)
        if any(form in content for form in wanted):
            found.append(str(path))
    return found


def in_texts(keys: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """The names of the texts that have a key: pages, answers, what a command has said."""
    wanted = [form for key in keys for form in forms(key)]
    return [name for name, text in texts.items() if any(form in text.encode() for form in wanted)]


def forms(key: str) -> list[bytes]:
    """A key as it is, percent-encoded, in hex, and inside of something that is in base64, wherever it begins there."""
    raw = key.encode()
    found = [raw, quote(key, safe="").encode(), raw.hex().encode()]
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + raw).rstrip(b"=")
        # The characters at both ends depend on the neighbours, too.
        end = len(encoded) - ((before + len(raw)) % 3 > 0)
        inner = encoded[(0, 2, 3)[before] : end]
        found += [inner, inner.translate(bytes.maketrans(b"+/", b"-_"))]
    return found


def _unpacked(path: Path, content: bytes) -> bytes:
    """What does not lie in a file's bytes as it was written."""
    if content.startswith(b"SQLite format 3"):
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            return "\n".join(database.iterdump()).encode()
    if content.startswith(b"\x1f\x8b"):
        with suppress(OSError, EOFError, zlib.error):
            return gzip.decompress(content)
    return b""


def _files_below(places: Iterable[Path]) -> Iterator[Path]:
    """Regular files; folders may come and go meanwhile, which `Path.rglob` does not bear."""
    for place in places:
        if place.is_file():
            yield place
        for folder, _, names in os.walk(place):
            yield from (path for name in names if (path := Path(folder, name)).is_file())


def in_requests(keys: Iterable[str], rows: Iterable[dict[str, Any]]) -> list[str]:
    """Requests that told a key anywhere but in the header. The simulator writes *** for one in a body or a query."""
    found = []
    for row in rows:
        said = json.dumps({name: row[name] for name in ("path", "query", "body", "user_agent")})
        if row["key_in"] == "url" or "***" in said or any(key in said for key in keys):
            found.append(f"{row['method']} {row['path']}")
    return found
