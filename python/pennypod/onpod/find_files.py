#!/usr/bin/env python3
"""Finds result files on the pod and says which of them are whole. Standalone: Python 3.8+, standard library only.

    find_files.py '{"root": "/root/pennypod/out", "patterns": ["**/best.pt"], "best": true}'

Prints one line, ``@pennypod {"files": [...], "rejected": [...], "left": 0}``, files newest first; for a list of
searches ``@pennypod {"found": [...]}`` with such an answer for each. The options of a search:

best     only the newest valid match of the first pattern that has one, else every match of every pattern
hash     add each file's sha256 (default true)
settle_s how long size and time must stand still (default 0.3); all searches wait once, for the longest, and for none
         when nothing was touched for that long
known    [path, bytes, mtime_ns] of a file whose hash the caller has: it is not read again
deep     also check the CRC of every member of a zip container (default false)
inline   files of at most so many bytes come with the answer, in "content", as base64 (default 0: none)
small    files above that size are not looked at, but counted in "left" (default false)
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

MARK = "@pennypod "
HALF_WRITTEN = (".part", ".partial", ".tmp", ".temp", ".incomplete", ".crdownload", ".swp", "~")
MAX_INLINE = 1 << 20  # all contents of one answer together
MAX_REJECTED = 20  # they are for a message; the answer must fit into a pipe that nobody reads yet
ZIPS = (".pt", ".pth", ".ckpt", ".bin", ".npz", ".keras", ".zip")
PICKLES = (".pt", ".pth", ".ckpt", ".bin")


def signature(path: str) -> tuple[int, int, int] | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_size, seen.st_mtime_ns, seen.st_ino


def matches(root: str, pattern: str) -> list[str]:
    """Regular files under `root` that match a relative glob; links are followed only inside `root`."""
    if os.path.isabs(pattern) or ".." in Path(pattern).parts or not pattern.strip():
        raise ValueError("a pattern is a glob relative to the output folder, without ..: %r" % pattern)
    inside = os.path.realpath(root) + os.sep
    for _ in range(3):
        try:
            names = [str(path) for path in Path(root).glob(pattern)]
            break
        except OSError:
            continue  # the trainer removed a folder under our feet
    else:
        return []
    return [name for name in names if os.path.isfile(name) and os.path.realpath(name).startswith(inside)]


def why_broken(path: str, deep: bool) -> str:
    """What is wrong with a file's container, empty when it looks whole."""
    suffix = os.path.splitext(path)[1].lower()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return "empty"
            head = file.read(16)
            if suffix in ZIPS:
                return zip_broken(file, head, deep, suffix in PICKLES)
            if suffix == ".safetensors":
                return safetensors_broken(file, size)
            if suffix == ".onnx":
                return protobuf_broken(file, size)
            if suffix in (".h5", ".hdf5"):
                return hdf5_broken(file, head, size)
            if suffix == ".gguf" and head[:4] != b"GGUF":
                return "not a GGUF file"
    except (OSError, ValueError, struct.error, zipfile.BadZipFile, EOFError) as exc:
        return str(exc) or type(exc).__name__
    return ""


def zip_broken(file: BinaryIO, head: bytes, deep: bool, pickle_too: bool) -> str:
    if pickle_too and head[:1] == b"\x80":
        return ""  # torch.save before 1.6 wrote bare pickles; nothing in them tells a whole one
    if head[:2] != b"PK":
        return "not a zip container"
    # The directory is at the end of a zip, so a file that is still being written has none.
    with zipfile.ZipFile(file) as archive:
        if not archive.namelist():
            return "a zip container with nothing in it"
        bad = archive.testzip() if deep else None
    return "damaged member %s" % bad if bad else ""


def safetensors_broken(file: BinaryIO, size: int) -> str:
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    if length > size - 8:
        return "the header is longer than the file"
    header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    return "" if wanted == size else "%d bytes, its header says %d" % (size, wanted)


def protobuf_broken(file: BinaryIO, size: int) -> str:
    """Walk the top-level fields: in a whole ONNX file the last one ends where the file ends."""
    file.seek(0)
    at = 0
    while at < size:
        kind = varint(file) & 7
        if kind == 0:
            varint(file)
        elif kind in (1, 5):
            file.seek(8 if kind == 1 else 4, os.SEEK_CUR)
        elif kind == 2:
            file.seek(varint(file), os.SEEK_CUR)
        else:
            return "not a protobuf message"
        at = file.tell()
    return "" if at == size else "cut short"


def varint(file: BinaryIO) -> int:
    value = shift = 0
    while shift < 70:
        byte = file.read(1)
        if not byte:
            raise EOFError("cut short")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
        shift += 7
    raise ValueError("not a protobuf message")


def hdf5_broken(file: BinaryIO, head: bytes, size: int) -> str:
    if head[:8] != b"\x89HDF\r\n\x1a\n":
        return "not an HDF5 file"
    # With 8-byte offsets, which is what everybody writes, the end-of-file address is at 40 (version 0) or 28 (2, 3).
    version, offset_size = head[8], head[13] if head[8] < 2 else head[9]
    if offset_size != 8 or version == 1:
        return ""
    file.seek(40 if version == 0 else 28)
    (end,) = struct.unpack("<Q", file.read(8))
    return "" if end <= size else "cut short"


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            chunk = file.read(1 << 20)
            if not chunk:
                return digest.hexdigest()
            digest.update(chunk)


class Finder:
    """One search, in two steps: what is there, and after a pause, what of it has kept still."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.root: str = options["root"]
        self.patterns: list[str] = options["patterns"]
        self.best = bool(options.get("best", False))
        self.hash = bool(options.get("hash", True))
        self.settle_s = float(options.get("settle_s", 0.3))
        self.known = tuple(options.get("known") or ())
        self.deep = bool(options.get("deep", False))
        self.inline = int(options.get("inline", 0))
        self.small = bool(options.get("small", False))
        self.left = 0
        self.rejected: list[dict[str, str]] = []
        self.seen: list[dict[str, tuple[int, int, int] | None]] = []

    def start(self) -> float:
        """Note what is there; how many seconds it should keep still."""
        before: set[str] = set()
        for pattern in self.patterns:
            fresh = {path: signature(path) for path in matches(self.root, pattern) if path not in before}
            before.update(fresh)
            self.seen.append(fresh)
        return self.settle_s if any(not self.at_rest(path) for path in before) else 0.0

    def at_rest(self, path: str) -> bool:
        """Whether nothing has happened to a file for as long as it should keep still."""
        try:
            return time.time() - os.stat(path).st_ctime > self.settle_s
        except OSError:
            return True  # it is gone, and nothing to wait for

    def find(self, room: int) -> list[dict[str, Any]]:
        """The files that are whole; `room` is how many bytes of content the answer still has room for."""
        files: list[dict[str, Any]] = []
        for first in self.seen:
            for path in sorted(first, key=lambda path: (first[path] or (0, 0, 0))[1], reverse=True):
                file = self.look(path, first[path], room)
                if file:
                    room -= file["bytes"] if "content" in file else 0
                    files.append(file)
                    if self.best:
                        return files
        return sorted(files, key=lambda file: (-int(file["mtime_ns"]), str(file["path"])))

    def look(self, path: str, before: tuple[int, int, int] | None, room: int) -> dict[str, Any] | None:
        if path.endswith(HALF_WRITTEN):
            return self.refuse(path, "half-written by its name")
        size = before[0] if before else 0
        inline = 0 < size <= min(self.inline, room)
        if self.small and size and not inline:
            self.left += 1
            return None
        why = why_broken(path, self.deep)
        if why:
            return self.refuse(path, why)
        if before is None or signature(path) != before:
            return self.refuse(path, "still being written")
        mtime_ns = before[1]
        content = b""
        digest = ""
        if self.hash and (path, size, mtime_ns) != self.known:
            try:
                content = read(path, size) if inline else b""
                digest = hashlib.sha256(content).hexdigest() if inline else sha256(path)
            except OSError as exc:
                return self.refuse(path, str(exc))
            if signature(path) != before:
                return self.refuse(path, "changed while it was read")
        file = {
            "path": path,
            "relative": os.path.relpath(path, self.root),
            "bytes": size,
            "mtime": mtime_ns / 1e9,
            "mtime_ns": mtime_ns,
            "sha256": digest,
        }
        return dict(file, content=base64.b64encode(content).decode("ascii")) if content else file

    def refuse(self, path: str, why: str) -> dict[str, Any] | None:
        self.rejected.append({"path": path, "why": why})
        return None


def read(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)


def search(searches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    finders = [Finder(options) for options in searches]
    pause = max([finder.start() for finder in finders], default=0.0)
    if pause:
        time.sleep(pause)
    answers = []
    room = MAX_INLINE
    for finder in finders:
        files = finder.find(room)
        room -= sum(file["bytes"] for file in files if "content" in file)
        answers.append({"files": files, "rejected": finder.rejected[:MAX_REJECTED], "left": finder.left})
    return answers


def main(argv: list[str]) -> int:
    try:
        asked = json.loads(argv[1])
        answer: dict[str, Any] = {"found": search(asked)} if isinstance(asked, list) else search([asked])[0]
    except (ValueError, KeyError, IndexError) as exc:
        answer = {"error": str(exc)}
    print(MARK + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
