"""The trainer's log: what its lines say, and the copy of it that is here."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

TAIL_LINES = 20
TAIL_BYTES = 262144  # enough to find the last epoch in
PROOF_BYTES = 4096  # watch_log.py compares as many

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# "epoch 3/8", "Epoch [3/8]", "Epoch: 3 of 8", "EPOCH 3 / 8"
_EPOCH_OF = re.compile(r"\bepoch\b[\s:=#\[(]*(\d+)\s*(?:/|\bof\b)\s*(\d+)", re.IGNORECASE)
# "Epoch 3: loss=0.1", "epoch=3"; trainers that do not say how many there will be
_EPOCH_ONLY = re.compile(r"^\W*epoch\b[\s:=#\[(]*(\d+)(?:[\])\s:,;-]|$)", re.IGNORECASE)
# "      1/100      2.31G      1.204 ..." (ultralytics): set off on the left, a table column follows
_EPOCH_TABLE = re.compile(r"^\s{2,}(\d+)/(\d+)\s{2,}\S")


@dataclass(frozen=True, slots=True)
class Epoch:
    number: int
    total: int | None


def parse_epoch(line: str) -> Epoch | None:
    """The epoch a log line speaks of, in the notations that trainers use; None for every other line."""
    # Most lines speak of no epoch, and a log may have millions of them.
    if not line.startswith("  ") and "poch" not in line and "POCH" not in line:
        return None
    for pattern in (_EPOCH_OF, _EPOCH_TABLE):
        match = pattern.search(line)
        if match:
            number, total = int(match[1]), int(match[2])
            return Epoch(number, total) if 0 <= number <= total and total > 0 else None
    match = _EPOCH_ONLY.search(line)
    return Epoch(int(match[1]), None) if match else None


def clean_line(text: str) -> str:
    """A log line fit for showing: no colours, no control characters, tabs as blanks."""
    text = text.rstrip("\r\n")
    if text.isprintable():
        return text.rstrip()
    plain = _ANSI.sub("", text).replace("\t", "    ")
    return "".join(char for char in plain if char.isprintable()).rstrip()


class Tally:
    """Turns log bytes into lines and epochs. A carriage return rewrites the line, as progress bars do."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=TAIL_LINES)
        self.epoch: Epoch | None = None
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines (and rewritings of a line) that these bytes completed."""
        *whole, self._partial = re.split(rb"(?<=\n)|(?<=\r)(?=[^\n])", self._partial + data)
        # A terminal would not scroll either: an endless line is cut, not kept.
        self._partial = self._partial[-8192:]
        fresh = []
        for raw in whole:
            line = clean_line(raw.decode("utf-8", "replace"))
            if not line:
                continue
            fresh.append(line)
            self.epoch = parse_epoch(line) or self.epoch
            if not raw.endswith(b"\r"):
                self.lines.append(line)
        return fresh

    def last_lines(self) -> tuple[str, ...]:
        """The last whole lines, and what has been written of the one after them."""
        partial = clean_line(self._partial.decode("utf-8", "replace"))
        return (*self.lines, partial)[-TAIL_LINES:] if partial else tuple(self.lines)


def last_epoch(path: Path) -> int | None:
    """The last epoch that the log at `path` speaks of; None when it speaks of none or is not there."""
    tally = Tally()
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            tally.feed(file.read(TAIL_BYTES) + b"\n")
    except OSError:
        return None
    return tally.epoch.number if tally.epoch is not None else None


class LocalLog:
    """The copy of train.log that is here even when the pod is not.

    A local disk that is full must not end a training that is paid for: the copy then stops, and `problem` says why. The
    weights stage fetches the whole log again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self.position = 0
        self._recent = b""
        self._file: BinaryIO | None = None

    def open(self) -> bytes:
        """Go on with what is here already; returns its last part, so that the reader knows where it stands."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self.position = self.path.stat().st_size
            with self.path.open("rb") as file:
                start = file.seek(max(0, self.position - TAIL_BYTES))
                end = file.read(self.position - start)
        except OSError as exc:
            self._fail(exc)
            return b""
        self._recent = end[-PROOF_BYTES:]
        return end

    def proof(self) -> str:
        """Names the bytes before `position`, so that the pod can tell whether its log is the one we have."""
        return hashlib.sha256(self._recent).hexdigest() if self.position else ""

    def append(self, data: bytes) -> None:
        if self._file is not None:
            try:
                view = memoryview(data)
                while view:
                    view = view[self._file.write(view) :]
            except OSError as exc:
                self._fail(exc)
        self.position += len(data)
        self._recent = (self._recent + data)[-PROOF_BYTES:]

    def start_over(self) -> None:
        """The pod has another log (a new pod of the same run): keep ours aside and begin a new one."""
        self.close()
        try:
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
                number += 1
            self.path.rename(aside)
            self._file = self.path.open("ab", buffering=0)
        except OSError as exc:
            self._fail(exc)
        self.position = 0
        self._recent = b""

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _fail(self, exc: OSError) -> None:
        self.problem = f"{self.path}: {exc.strerror or exc}"
        self.close()
