"""The search for keys finds them where they are: a search that finds nothing proves nothing otherwise."""

from __future__ import annotations

import base64
import gzip
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import canaries
import pytest
from pennypod.orchestrator.playbooks import RUN_MARK

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


@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
def test_a_key_is_found_however_it_was_encoded(tmp_path: Path, before: str) -> None:
    key = "a+key/with?signs&" + KEY
    text = f"{before}{key}, and more"
    for content in (
        text.encode(),
        base64.b64encode(text.encode()),
        base64.urlsafe_b64encode(text.encode()),
        quote(text, safe="").encode(),
        text.encode().hex().encode(),
        gzip.compress(text.encode()),
    ):
        (tmp_path / "log").write_bytes(content)
        assert canaries.in_files([key], [tmp_path]) == [str(tmp_path / "log")], content
        assert canaries.in_files([canaries.new_key("other")], [tmp_path]) == []


def test_a_key_in_a_files_name_is_found(tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.log").touch()
    assert canaries.in_files([KEY], [tmp_path]) == [str(tmp_path / f"{KEY}.log")]


def test_a_file_that_may_hold_a_key_must_be_for_its_owner_only(tmp_path: Path) -> None:
    kept = tmp_path / "keys.json"
    kept.write_text(KEY)
    for mode, found in ((0o600, []), (0o640, [str(kept)]), (0o604, [str(kept)])):
        kept.chmod(mode)
        assert canaries.in_files([KEY], [tmp_path], allowed=[kept]) == found
    kept.chmod(0o600)
    (tmp_path / "copy.json").write_text(KEY)
    assert canaries.in_files([KEY], [tmp_path], allowed=[kept]) == [str(tmp_path / "copy.json")]


def test_a_key_in_an_answer_is_found() -> None:
    assert canaries.in_texts([KEY], {"/": "nothing", "/metrics": f'label="{KEY}"'}) == ["/metrics"]


@contextmanager
def a_process(*arguments: str, **environment: str) -> Iterator[None]:
    """One that is really there: right after its start the kernel does not show its arguments yet."""
    with subprocess.Popen(
        [sys.executable, "-c", "print('here', flush=True); input()", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        yield
        process.communicate(b"\n")


def test_a_key_that_a_playbook_has_inherited_is_found() -> None:
    with a_process(SECRET=KEY):
        assert canaries.in_playbook_environments([KEY]) == set()
    with a_process(SECRET=KEY, **{RUN_MARK: "demo-1201-abcde"}):
        assert canaries.in_playbook_environments([KEY])


def test_a_key_among_a_processs_arguments_is_found() -> None:
    with a_process(KEY):
        assert canaries.in_process_arguments([KEY]) == {f"argument of a process: {sys.executable}"}


def test_a_key_in_an_address_or_a_body_is_found() -> None:
    plain = {"method": "GET", "path": "/v2/pods", "query": {}, "body": {}, "user_agent": "x", "key_in": "header"}
    assert canaries.in_requests([KEY], [plain]) == []
    for wrong in ({"key_in": "url"}, {"path": f"/v2/{KEY}"}, {"body": {"env": {"A": "***"}}}, {"user_agent": KEY}):
        assert canaries.in_requests([KEY], [plain | wrong]), wrong
