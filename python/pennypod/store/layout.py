"""Where things lie in the bucket, and which checkpoints count. Pure: names and rules, no I/O.

runs/<run>/checkpoints/<attempt>-<slot>/checkpoint.tar    what the pod uploads first
runs/<run>/checkpoints/<attempt>-<slot>/complete.json     the marker, uploaded last: without it the rest does not count
packs/<sha256>.tar                                        files of data sets; the name tells what is in them
datasets/<sha256>.json                                    a data set: its packs; written when all of them are there

A slot is used once. So a marker never speaks of an older object than the one beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CHECKPOINT = "checkpoint.tar"
MARKER = "complete.json"
MARKER_LIMIT_BYTES = 4096
"""A marker is written by a pod, so it is not trusted to be small."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SLOT = re.compile(r"(\d{3,6})-(\d{5,9})", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One place for one checkpoint. The order is that of time: a later attempt, then a later slot of it."""

    attempt: int
    number: int

    def __str__(self) -> str:
        return f"{self.attempt:03d}-{self.number:05d}"


@dataclass(frozen=True, slots=True)
class Marker:
    """What the pod says it has uploaded. `bytes` and `sha256` are checked, `epoch` is only told."""

    bytes: int
    sha256: str
    epoch: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    key: str
    bytes: int


def checkpoints_prefix(run: str) -> str:
    """Raises ValueError for what is no run id: it becomes part of a key."""
    if not _RUN.fullmatch(run):
        raise ValueError(f"{run!r} is no run id")
    return f"runs/{run}/checkpoints/"


def slot_key(run: str, slot: Slot, name: str) -> str:
    return f"{checkpoints_prefix(run)}{slot}/{name}"


def parse_slot(run: str, key: str) -> tuple[Slot, str] | None:
    """The slot and the object's name in it; None for what we did not put there."""
    prefix = checkpoints_prefix(run)
    folder, _, name = key.removeprefix(prefix).partition("/")
    found = _SLOT.fullmatch(folder)
    if not key.startswith(prefix) or found is None or name not in (CHECKPOINT, MARKER):
        return None
    slot = Slot(int(found[1]), int(found[2]))
    return (slot, name) if str(slot) == folder else None


def slots(run: str, listing: Iterable[StoredObject]) -> dict[Slot, dict[str, int]]:
    """The bytes of the objects in each slot that anything was put into."""
    found: dict[Slot, dict[str, int]] = {}
    for item in listing:
        parsed = parse_slot(run, item.key)
        if parsed is not None:
            found.setdefault(parsed[0], {})[parsed[1]] = item.bytes
    return found


def candidates(found: Mapping[Slot, Mapping[str, int]]) -> list[Slot]:
    """The slots that have a checkpoint and a marker, the newest first. What the marker says is still to be checked."""
    return sorted((slot for slot, names in found.items() if CHECKPOINT in names and MARKER in names), reverse=True)


def next_number(found: Iterable[Slot], attempt: int) -> int:
    """The first slot of an attempt that nothing was put into, nor into any after it."""
    return max((slot.number for slot in found if slot.attempt == attempt), default=0) + 1


def parse_marker(text: bytes) -> Marker | None:
    """None for anything but a whole, sensible marker."""
    if len(text) > MARKER_LIMIT_BYTES:
        return None
    try:
        found = json.loads(text)
        size, sha256, epoch = found["bytes"], found["sha256"], found["epoch"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(size) is not int or type(epoch) is not int or not isinstance(sha256, str):
        return None
    if size <= 0 or epoch < 0 or not _SHA256.fullmatch(sha256):
        return None
    return Marker(size, sha256, epoch)


def pack_key(name: str) -> str:
    return f"packs/{name}.tar"


def dataset_key(name: str) -> str:
    return f"datasets/{name}.json"
