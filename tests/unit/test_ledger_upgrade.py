"""A ledger of an older version goes on being read and written: what is missing is added, nothing else is touched."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest
import sqlalchemy as sa
from fakes import offer
from pennypod.ledger import AttemptState, LedgerError, open_ledger, schema
from pennypod.model.ids import Lease
from pennypod.settings import Settings

NOW = 1_764_600_000.0
RUN = "demo-1201-abcde"
VERSION_1 = Path(__file__).parents[1] / "ledger_v1.sql"
# A run with a pod that is being destroyed: what must not be lost.
ROWS = """
INSERT INTO runs (run, job, controller, created, artifacts_dir, keep_on_disconnect)
    VALUES ('demo-1201-abcde', 'demo', '1:2', 1764600000.25, '/tmp/artifacts', false);
INSERT INTO attempts (run, attempt, lease_name, provider, offer_id, machine_id, gpu, gpu_count, price_micros_per_h,
                      renter, state, intended, pod_id)
    VALUES ('demo-1201-abcde', 1, 'pennypod-demo-1201-abcde-a1-tssb3kq-nq4z7m', 'fake', 'o', 'm', 'CPU', 1, 200000,
            '1:2', 'destroying', 1764600000.5, 'pod-1');
"""

needs_postgres = pytest.mark.skipif(postgres.binaries() is None, reason="PostgreSQL is not installed")


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    pytest.importorskip("psycopg")
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgres)])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Where a ledger of version 1 lies, with one pod in it."""
    home = tmp_path / "home"
    home.mkdir()
    url = f"sqlite:///{home / 'ledger.sqlite3'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    run_sql(url, VERSION_1.read_text() + ROWS)
    return Settings(home=home, database_url=url)


def run_sql(url: str, text: str) -> None:
    engine = sa.create_engine(url)
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("DROP SCHEMA IF EXISTS public CASCADE")
            connection.exec_driver_sql("CREATE SCHEMA public")
        identity = "SERIAL" if engine.dialect.name == "postgresql" else "INTEGER"
        for statement in "\n".join(lines).replace("<id>", identity).split(";"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    engine.dispose()


def columns(settings: Settings) -> dict[str, set[str]]:
    engine = sa.create_engine(settings.database_url)
    inspector = sa.inspect(engine)
    found = {name: {column["name"] for column in inspector.get_columns(name)} for name in inspector.get_table_names()}
    engine.dispose()
    return found


def wanted() -> dict[str, set[str]]:
    return {table.name: {column.name for column in table.columns} for table in schema.metadata.sorted_tables}


def test_a_ledger_of_version_1_is_read_and_written_as_before(settings: Settings) -> None:
    ledger = open_ledger(settings)
    [pending] = ledger.pending_attempts()
    assert (pending.run, pending.pod_id, pending.state) == (RUN, "pod-1", AttemptState.DESTROYING)
    assert ledger.run(RUN).created == 1_764_600_000.25
    assert columns(settings) == wanted()
    ledger.record_gone(pending.id, {"pod_id": "pod-1"}, NOW, 5)
    attempt = ledger.open_attempt(Lease(RUN, 2, int(NOW) + 600, "abcde"), offer(1), renter="1:2", at=NOW)
    assert [item.state for item in ledger.attempts(RUN)] == [AttemptState.GONE, AttemptState.INTENT]
    assert attempt.id > pending.id
    ledger.close()


def test_columns_that_are_missing_at_the_same_version_are_added_too(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ledger(settings).run(RUN)
    extended = sa.MetaData()
    for table in schema.metadata.sorted_tables:
        table.to_metadata(extended)
    column = sa.Column("colour", sa.String(8), index=True)
    extended.tables["attempts"].append_column(column)
    monkeypatch.setattr(schema, "metadata", extended)
    open_ledger(settings).run(RUN)
    assert "colour" in columns(settings)["attempts"]
    engine = sa.create_engine(settings.database_url)
    assert "ix_attempts_colour" in {index["name"] for index in sa.inspect(engine).get_indexes("attempts")}
    engine.dispose()


def test_what_is_new_since_version_1_can_be_added_to_rows_that_exist(settings: Settings) -> None:
    before = columns(settings)
    for table in schema.metadata.sorted_tables:
        for column in table.columns:
            assert table.name not in before or column.name in before[table.name] or column.nullable, column


def test_an_upgrade_that_fails_leaves_the_old_ledger(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    before = columns(settings)
    extended = sa.MetaData()
    for table in schema.metadata.sorted_tables:
        table.to_metadata(extended)
    sa.Table("first", extended, sa.Column("key", sa.Integer, primary_key=True))
    # A column that no existing row can have: every database refuses it.
    extended.tables["attempts"].append_column(sa.Column("colour", sa.String(8), nullable=False))
    monkeypatch.setattr(schema, "metadata", extended)
    with pytest.raises(LedgerError):
        open_ledger(settings).run(RUN)
    assert columns(settings) == before
    monkeypatch.undo()
    assert open_ledger(settings).run(RUN).run == RUN


@pytest.mark.parametrize("version", [str(schema.SCHEMA_VERSION + 1), "999", "two", "-1", "0"])
def test_a_version_that_is_not_known_is_refused_in_one_line_and_nothing_is_changed(
    settings: Settings, version: str
) -> None:
    engine = sa.create_engine(settings.database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE meta SET value = :version"), {"version": version})
    engine.dispose()
    before = columns(settings)
    with pytest.raises(LedgerError, match=f"schema version {version}") as caught:
        open_ledger(settings).pending_attempts()
    assert "\n" not in str(caught.value)
    assert columns(settings) == before


def test_many_processes_upgrade_one_ledger_at_once(settings: Settings) -> None:
    code = """
        import sys
        from pathlib import Path
        from pennypod.ledger import open_ledger
        from pennypod.settings import Settings
        sys.stdin.read()
        ledger = open_ledger(Settings(home=Path(sys.argv[1]), database_url=sys.argv[2]))
        print(len(ledger.pending_attempts()))
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(settings.home), settings.database_url]
    openers = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.close()  # all at once
        opener.stdin = None
    for opener in openers:
        out, err = opener.communicate(timeout=60)
        assert (out.strip(), opener.returncode) == ("1", 0), err
    assert columns(settings) == wanted()


def test_a_process_of_the_version_before_goes_on_working(tmp_path: Path) -> None:
    """A guard that has the ledger open while another command upgrades it must still be able to end its pod."""
    home = tmp_path / "home"
    home.mkdir()
    settings = Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}")
    run_sql(settings.database_url, VERSION_1.read_text() + ROWS)
    old = sqlite3.connect(home / "ledger.sqlite3", isolation_level=None)
    assert old.execute("SELECT state FROM attempts").fetchall() == [("destroying",)]
    open_ledger(settings).run(RUN)
    old.execute("UPDATE attempts SET state = 'gone', gone = ?, receipt = '{}' WHERE pod_id = 'pod-1'", (NOW,))
    old.close()
    assert open_ledger(settings).pending_attempts() == []
