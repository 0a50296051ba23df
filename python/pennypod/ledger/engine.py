"""Engines for our databases: SQLite in the one way that is safe between processes, or a server. Floor 1."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine, make_url

_BUSY_TIMEOUT_MS = 20_000


def open_engine(database_url: str) -> Engine:
    """An engine for any SQLAlchemy URL; the folder of an SQLite file is made.

    Raises what SQLAlchemy raises for an unusable URL, ImportError without its driver, OSError without its folder.
    """
    url = make_url(database_url)
    engine = sa.create_engine(url, pool_pre_ping=True)
    if url.get_backend_name() == "sqlite":
        prepare_sqlite_file(url.database)
        _use_sqlite_safely(engine)
    return engine


def prepare_sqlite_file(database: str | None) -> None:
    """Make the file of an SQLite database, and its folder, for the owner only."""
    if not database or database == ":memory:":
        return
    path = Path(database)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Created here so that only the owner can read it whatever the umask is. Never opened when it exists: closing any
    # descriptor of the file would drop the locks that SQLite holds on it in this process (POSIX advisory locks).
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _use_sqlite_safely(engine: Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def _connect(dbapi_connection: Any, _record: Any) -> None:
        # Take transactions into our own hands: the driver would begin them late and without a write lock.
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
