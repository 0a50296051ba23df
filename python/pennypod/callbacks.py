"""What a run's pod needs to call back, kept in the run's own folder. Floor 1: one file of the owner's only.

Whoever accepted the run writes it; whoever starts the training hands it to the pod. The token opens one route for one
run, and only until that run is over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from pennypod.files import write_atomically

_FILE = "callback.json"


@dataclass(frozen=True, slots=True)
class CallbackAccess:
    """`url` is empty where no pod can reach us: then nothing of it goes to a pod."""

    url: str
    token: str = field(repr=False)

    @property
    def digest(self) -> str:
        """What may be kept of the token elsewhere."""
        return token_digest(self.token)


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def plan_access(folder: Path, url: str) -> CallbackAccess:
    """What the run in this folder gets: the token it has already, else a new one. Writes nothing."""
    known = read_access(folder)
    return CallbackAccess(url, known.token if known else secrets.token_urlsafe(32))


def give_access(folder: Path, access: CallbackAccess) -> None:
    write_atomically(folder / _FILE, json.dumps({"url": access.url, "token": access.token}) + "\n", 0o600)


def read_access(folder: Path) -> CallbackAccess | None:
    """None when nobody has given one, or the file cannot be understood."""
    try:
        found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return CallbackAccess(str(found["url"]), str(found["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def take_access(folder: Path) -> None:
    """The run is over."""
    with contextlib.suppress(OSError):
        (folder / _FILE).unlink()
