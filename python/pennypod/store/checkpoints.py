"""The checkpoints of one run in the bucket: room for new ones, the newest that counts, and the old ones removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pennypod.errors import StoreError
from pennypod.store.bucket import Bucket
from pennypod.store.layout import (
    CHECKPOINT,
    MARKER,
    MARKER_LIMIT_BYTES,
    Marker,
    Slot,
    candidates,
    checkpoints_prefix,
    next_number,
    parse_marker,
    slot_key,
    slots,
)
from pennypod.store.urls import Download, UploadSlot, UrlPlan

SLOTS_AT_ONCE = 64
"""How many checkpoints a pod can upload before its URLs are renewed."""
KEPT = 2
"""The newest one, and the one before it in case the newest turns out not to be what its marker says."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that counts: its marker is there and the object is as long as the marker says."""

    slot: Slot
    marker: Marker


class Checkpoints:
    """Of one run. Every method asks the bucket anew."""

    def __init__(self, bucket: Bucket, run: str) -> None:
        """Raises ValueError for what is no run id."""
        checkpoints_prefix(run)
        self._bucket = bucket
        self._run = run

    def plan(self, attempt: int, now: float, lifetime: float, *, resume: bool = False) -> UrlPlan:
        """URLs for the pod of an attempt. With `resume` also for the newest checkpoint, whichever pod made it."""
        first = next_number(self._slots(), attempt)
        uploads = tuple(
            UploadSlot(
                number,
                self._bucket.put_url(slot_key(self._run, Slot(attempt, number), CHECKPOINT), lifetime),
                self._bucket.put_url(slot_key(self._run, Slot(attempt, number), MARKER), lifetime),
            )
            for number in range(first, first + SLOTS_AT_ONCE)
        )
        newest = self.newest() if resume else None
        download = None
        if newest is not None:
            url = self._bucket.get_url(slot_key(self._run, newest.slot, CHECKPOINT), lifetime)
            download = Download(url, newest.marker.bytes, newest.marker.sha256)
        return UrlPlan(now + lifetime, uploads, download)

    def valid(self) -> Iterator[Kept]:
        """Those that count, the newest first; what is in them is seen only by `fetch`."""
        found = self._slots()
        for slot in candidates(found):
            if found[slot][MARKER] > MARKER_LIMIT_BYTES:
                continue
            text = self._bucket.get(slot_key(self._run, slot, MARKER), MARKER_LIMIT_BYTES)
            marker = parse_marker(text) if text is not None else None
            if marker is not None and marker.bytes == found[slot][CHECKPOINT]:
                yield Kept(slot, marker)

    def newest(self) -> Kept | None:
        return next(self.valid(), None)

    def fetch_newest(self, target: Path) -> Kept | None:
        """The newest one whose content is what its marker says, as `target`; None when there is none."""
        for kept in self.valid():
            name = slot_key(self._run, kept.slot, CHECKPOINT)
            try:
                self._bucket.fetch(name, target, kept.marker.bytes, kept.marker.sha256)
            except StoreError as exc:
                if "status" in exc.details or exc.__cause__ is not None:
                    raise  # the store's fault, not the checkpoint's
                continue
            return kept
        return None

    def prune(self) -> int:
        """Remove what is older than the newest KEPT that count; returns how many slots. Half-written ones go along."""
        found = self._slots()
        kept = [item.slot for _, item in zip(range(KEPT), self.valid(), strict=False)]
        if len(kept) < KEPT:
            return 0
        old = [slot for slot in found if slot < kept[-1]]
        for slot in sorted(old):
            for name in (MARKER, CHECKPOINT):  # the marker first: what is half removed must not count
                if name in found[slot]:
                    self._bucket.delete(slot_key(self._run, slot, name))
        return len(old)

    def _slots(self) -> dict[Slot, dict[str, int]]:
        return slots(self._run, self._bucket.list(checkpoints_prefix(self._run)))
