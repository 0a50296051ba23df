"""Keeps scrubbed exchanges in a file while a recording goes on. Floor 1: that file is its one outside thing.

Off by default. PENNYPOD_RECORD names the file, and the salt beside it says that the recording goes on: all processes of
a run write a line each to the one and replace ids by the other. When it is over the salt is removed; without it nobody
can find out what a replaced id was.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pennypod.errors import InputError
from pennypod.exchanges import Exchange, Scrubber

VARIABLE = "PENNYPOD_RECORD"
_MODE = 0o600


def start_recording(path: Path) -> None:
    """Make the salt. Raises InputError where nothing can be written."""
    try:
        path.unlink(missing_ok=True)
        handle = os.open(_salt_file(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(32))
    except OSError as exc:
        raise InputError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def stop_recording(path: Path) -> None:
    _salt_file(path).unlink(missing_ok=True)


def recorder(environ: Mapping[str, str], secret: str) -> Callable[[Exchange], None] | None:
    """What keeps exchanges, None when nobody asked for it. A full disk or a lost folder never disturbs a call."""
    place = environ.get(VARIABLE)
    if not place:
        return None
    path = Path(place)

    def keep(exchange: Exchange) -> None:
        with suppress(OSError, ValueError, TypeError):
            scrubbed = Scrubber(_salt_file(path).read_bytes(), secret).scrub(exchange)
            line = json.dumps(asdict(scrubbed), separators=(",", ":")) + "\n"
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)

    return keep


def read_exchanges(path: Path) -> list[Exchange]:
    """A recording in the order of its calls; a line that was cut off is left out. Raises InputError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []  # not one call was made
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    found = []
    for line in lines:
        with suppress(ValueError, TypeError):
            found.append(Exchange.from_document(json.loads(line)))
    return sorted(found, key=lambda exchange: exchange.at)


def _salt_file(path: Path) -> Path:
    return path.with_name(path.name + ".salt")
