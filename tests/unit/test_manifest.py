"""manifest.py as the standalone program it is on a pod."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pennypod.transfer.session import MARK, SCRIPT

ODD_NAMES = ["-rf", "a b", "new\nline", "zahn-ü", "\udcff\udcfe", "'\"$(x)", "~"]


def run(*args: str, stdin: Any = None) -> tuple[int, list[Any]]:
    """Exit status and the answers."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), *args],
        input=json.dumps(stdin).encode(),
        capture_output=True,
        env={"LC_ALL": "C"},
        timeout=30,
    )
    assert done.stderr == b""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_both_ends_mean_the_same_mark() -> None:
    assert f'MARK = "{MARK}"' in SCRIPT.read_text()


def test_check_names_what_is_missing_mismatched_and_extra(tmp_path: Path) -> None:
    for name in ODD_NAMES:
        (tmp_path / name).write_bytes(os.fsencode(name))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/extra").write_bytes(b"1")
    (tmp_path / "link").symlink_to("a b")
    (tmp_path / "folder").mkdir()
    files: list[list[Any]] = [[name, len(os.fsencode(name)), sha256(os.fsencode(name))] for name in ODD_NAMES]
    files += [["absent", 1, sha256(b"1")], ["folder", 0, None], ["any-size", None, None]]
    (tmp_path / "any-size").write_bytes(b"whatever")
    (tmp_path / "~").write_bytes(b"!")  # same size, other content
    (tmp_path / "a b").write_bytes(b"longer than it was")
    rc, (mark, answer) = run("check", str(tmp_path), stdin={"files": files})
    assert (rc, mark) == (0, {"mark": MARK})
    assert answer == {
        "missing": ["absent", "folder"],
        "mismatched": ["a b", "~"],
        "extra": ["link", "sub/extra"],
        "files": len(files),
    }


def test_check_of_a_folder_that_is_not_there_finds_all_missing(tmp_path: Path) -> None:
    rc, (_, answer) = run("check", str(tmp_path / "none"), stdin={"files": [["a", 1, None]]})
    assert (rc, answer["missing"], answer["extra"]) == (0, ["a"], [])


def test_hash_answers_for_every_name_whatever_it_is(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ODD_NAMES]
    for path in paths:
        Path(path).write_bytes(os.fsencode(path))
    rc, (_, answer) = run("hash", *paths, str(tmp_path / "none"), str(tmp_path))
    assert rc == 0
    found = answer["files"]
    for path in paths:
        content = os.fsencode(path)
        assert found[path] == {"size": len(content), "sha256": sha256(content)}
    assert found[str(tmp_path / "none")] == {"error": "No such file or directory"}
    assert found[str(tmp_path)] == {"error": "Is a directory"}


def test_list_takes_the_root_literally_and_stays_inside_it(tmp_path: Path) -> None:
    root = tmp_path / "out[1]*"
    for name in ("best.pt", "a/best.pt", "a/b/best.pt", "a/x y.csv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"12")
    (root / "escape").symlink_to("/etc")
    rc, (_, answer) = run("list", str(root), stdin=["**/best.pt", "a/*.csv", "escape/passwd", "../*"])
    assert rc == 0
    assert answer["files"] == [["a/b/best.pt", 2], ["a/best.pt", 2], ["a/x y.csv", 2], ["best.pt", 2]]


@pytest.mark.parametrize(
    "request_line",
    [b"", b'{"home": "/x", "dry_run": false, "parts": []', b"\n" * 3],
)
def test_a_conversation_cut_short_ends_it_without_an_answer(request_line: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), "receive"], input=request_line, capture_output=True, timeout=30
    )
    assert done.returncode != 0
    assert b"bad" not in done.stdout


def test_an_unknown_command_is_refused() -> None:
    rc, answers = run("format")
    assert rc == 3
    assert answers[-1]["error"] == "usage"
