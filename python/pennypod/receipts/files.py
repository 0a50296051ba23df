"""JSON documents on disk: written in one step, read back to the byte. The file system is its one outside thing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(as_written(document))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def as_written(document: Any) -> str:
    return json.dumps(document, indent=2, sort_keys=False) + "\n"


def read_document(path: Path) -> tuple[Any, bool]:
    """A JSON document, and whether its file is byte for byte as `write_json` writes it.

    Two texts can mean the same to one reader and something else to the next (a name that is there twice, say), so a
    sealed document is only believed as it was written. Raises OSError, and ValueError for what is no JSON.
    """
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
        document = json.loads(text)
        return document, as_written(document) == text
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
