"""Bringing a ledger's tables up to what this pennypod knows, in place. Floor 1: one open transaction, passed in.

A ledger that an upgrade made unreadable could not end a pod, so an upgrade only ever adds: tables, nullable columns,
indexes. A process of the version before, a guard say, goes on working on the upgraded ledger: it names its columns.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateColumn

from pennypod.ledger import schema

_VERSION = "schema_version"


def bring_up_to_date(connection: Connection) -> str | None:
    """Create and add what is missing, within the caller's transaction.

    Safe between processes: SQLite's transaction holds the write lock from its first statement on, PostgreSQL is asked
    for a lock of its own, which ends with the transaction. Returns the ledger's version when it is none that can be
    brought up to date (a newer one, or no number), having changed nothing; None when all is well.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(schema.UPGRADING)))
    found = _version(connection)
    if found is not None and not (found.isdecimal() and 1 <= int(found) <= schema.SCHEMA_VERSION):
        return found
    schema.metadata.create_all(connection)
    if found is None:
        connection.execute(schema.meta.insert().values(key=_VERSION, value=str(schema.SCHEMA_VERSION)))
        return None
    _add_columns(connection)
    if found != str(schema.SCHEMA_VERSION):
        version = schema.meta.update().where(schema.meta.c.key == _VERSION)
        connection.execute(version.values(value=str(schema.SCHEMA_VERSION)))
    return None


def _version(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table(schema.meta.name):
        return None
    version = sa.select(schema.meta.c.value).where(schema.meta.c.key == _VERSION)
    return connection.execute(version).scalar_one_or_none()


def _add_columns(connection: Connection) -> None:
    """Compared by name whatever the version says: two changes may have been made to the same version."""
    inspector = sa.inspect(connection)
    words = connection.dialect.identifier_preparer
    for table in schema.metadata.sorted_tables:
        there = {column["name"] for column in inspector.get_columns(table.name)}
        missing = [column for column in table.columns if column.name not in there]
        for column in missing:
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE {words.format_table(table)} ADD COLUMN {definition}")
        names = {column.name for column in missing}
        for index in table.indexes:
            if names & {column.name for column in index.columns}:
                index.create(connection)
