#!/usr/bin/env python3
"""Pack this checkout for another machine: `release.py FOLDER` fills FOLDER and prints the release's name as JSON.

FOLDER gets `project.tar.gz` (what git tracks, and new files that it does not ignore, so one's own jobs too, without
the tests), `requirements.txt` (the part of requirements.lock that runs need, hashes included) and the wheel. The same
files give the same bytes, so the name, a hash over all three, changes only when something is to be installed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
# PostgreSQL's driver is no dependency, but PENNYPOD_DATABASE_URL may name such a database.
NEEDED = ("pennypod[demo,serve,store]", "psycopg[binary]")
LEFT_OUT = frozenset({"tests", "molecule", ".ci"})
PYTHONS = ("3.11", "3.12", "3.13")
EPOCH = 1_700_000_000


def files(root: Path) -> list[str]:
    """Paths relative to `root`, sorted. Raises CalledProcessError where that is no clone."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    kept = (name for name in names if name and LEFT_OUT.isdisjoint(name.split("/")))
    return sorted({name for name in kept if (root / name).is_file()})


def pack(root: Path, names: list[str], target: Path) -> None:
    """Names, contents and the executable bit, and nothing that differs between two clones."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = EPOCH
        entry.mode = 0o755 if entry.mode & 0o100 else 0o644
        return entry

    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=EPOCH, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, dereference=True) as tar,
    ):
        for name in names:
            tar.add(root / name, name, recursive=False, filter=plain)


def holds(requirement: Requirement, extra: str) -> bool:
    """Whether it is needed on any Python that the other machine may have."""
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({"extra": extra, "python_version": python, "python_full_version": f"{python}.9"})
        for python in PYTHONS
    )


def closure(needed: tuple[str, ...], requires: Callable[[str], list[str]]) -> set[str]:
    """The canonical names of all packages that these requirements bring, except our own."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in needed]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                parts = [Requirement(text) for text in requires(name)]
                waiting += [part for part in parts if holds(part, extra)]
    return found - {"pennypod"}


def installed(name: str) -> list[str]:
    """What a package asks for; one that this Python does not need asks for nothing."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def entries(lock: str) -> Iterator[tuple[str, str]]:
    """The entries of a lock, each with its package's name."""
    for entry in re.split(r"\n(?=[a-z0-9])", lock):
        if found := re.match(r"([a-z0-9-]+)==", entry):
            yield found[1], entry.rstrip() + "\n"


def wheel(root: Path, folder: Path) -> Path:
    """Our own package."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, "--wheel-dir", str(folder), str(root)], check=True, env=environment)
    (built,) = folder.glob("*.whl")
    return built


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    project, requirements = folder / "project.tar.gz", folder / "requirements.txt"
    pack(ROOT, files(ROOT), project)
    needed = closure(NEEDED, installed)
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    requirements.write_text("".join(entry for name, entry in entries(lock) if name in needed), "utf-8")
    built = wheel(ROOT, folder)
    digest = hashlib.sha256()
    for path in (project, requirements, built):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    print(json.dumps({"release": digest.hexdigest()[:12], "wheel": built.name}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
