"""Text files written in one step. Floor 1: the file system is its one outside thing."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomically(path: Path, text: str, mode: int | None = None) -> None:
    """A reader sees the old file or the new one, never half of it. The folder is made when it is missing.

    `mode` holds from the first byte on, so a secret is never readable by others; None is what the umask leaves.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Threads of one process may write the same file at once (the guard's renewals do).
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        if mode is not None:
            scratch.chmod(mode)  # the umask may have taken something off
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
