"""The search for keys finds them where they are: a search that finds nothing proves nothing otherwise."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import canaries

KEY = canaries.new_key("test")


def test_a_key_in_a_file_or_in_a_row_is_found(tmp_path: Path) -> None:
    (tmp_path / "clean").write_text("nothing")
    (tmp_path / "log").write_text(f"Authorization: {KEY}")
    with closing(sqlite3.connect(tmp_path / "ledger")) as database:
        database.execute("CREATE TABLE runs (note TEXT)")
        database.execute("INSERT INTO runs VALUES (?)", (KEY,))
        database.commit()
    assert sorted(canaries.in_files([KEY], [tmp_path])) == [str(tmp_path / "ledger"), str(tmp_path / "log")]
    assert canaries.in_files([canaries.new_key("other")], [tmp_path]) == []


def test_a_key_among_a_processs_arguments_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", KEY], stdin=subprocess.PIPE) as process:
        assert canaries.in_process_arguments([KEY]) == {f"argument of a process: {sys.executable}"}
        process.communicate(b"\n")


def test_a_key_in_an_address_or_a_body_is_found() -> None:
    plain = {"method": "GET", "path": "/v2/pods", "query": {}, "body": {}, "user_agent": "x", "key_in": "header"}
    assert canaries.in_requests([KEY], [plain]) == []
    for wrong in ({"key_in": "url"}, {"path": f"/v2/{KEY}"}, {"body": {"env": {"A": "***"}}}, {"user_agent": KEY}):
        assert canaries.in_requests([KEY], [plain | wrong]), wrong
