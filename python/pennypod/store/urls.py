"""What a pod gets in place of keys: URLs that each allow one thing for a while. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

LONGEST_S = 7 * 24 * 3600
"""No signature of version 4 holds longer."""
_PART = 4  # as with the lease: renewed after a quarter of its time, so three words in a row may be lost


@dataclass(frozen=True, slots=True)
class UploadSlot:
    """`checkpoint` and `marker` take one PUT each; a slot is used once."""

    number: int
    checkpoint: str
    marker: str

    def __repr__(self) -> str:
        return f"UploadSlot({self.number})"  # whoever has the URLs may write


@dataclass(frozen=True, slots=True)
class Download:
    """One object that a pod may fetch, and what it must turn out to be."""

    url: str
    bytes: int
    sha256: str

    def __repr__(self) -> str:
        return f"Download({self.sha256[:12]}, {self.bytes} bytes)"


@dataclass(frozen=True, slots=True)
class UrlPlan:
    """`expires` in Unix seconds. `resume` is the checkpoint to go on from, where there is one."""

    expires: float
    uploads: tuple[UploadSlot, ...]
    resume: Download | None = None

    def as_json(self) -> str:
        """What onpod/keep_checkpoint.py reads."""
        return json.dumps({"version": 1, **asdict(self)})


def lifetime_s(now: float, lease_s: float, deadline: float) -> float:
    """How long new URLs hold: as long as the pod's lease, never beyond the run's deadline; 0 when that has passed."""
    return max(0.0, min(lease_s, deadline - now, LONGEST_S))


def renew_at(now: float, lifetime: float) -> float:
    """When URLs that were made now are to be replaced."""
    return now + lifetime / _PART
