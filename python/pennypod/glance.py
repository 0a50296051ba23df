"""A quick look at a local ledger, with the standard library alone: SQLAlchemy takes a third of a second. Floor 1."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path


def nothing_open(ledger_file: Path | None) -> bool:
    """Whether a local ledger plainly has no attempt that may bill. Asked through the standard library, to be quick."""
    if ledger_file is None:
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{ledger_file.as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT 1 FROM attempts WHERE state NOT IN ('gone', 'never') LIMIT 1").fetchone()
    except sqlite3.Error:
        return not ledger_file.exists()  # a broken one is opened for real, and says what is wrong with it
    return found is None
