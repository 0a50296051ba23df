"""The bootstrap role's filters: one line from whatever apt, pip and the probe say."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

FILE = Path(__file__).parents[2] / "roles/bootstrap/filter_plugins/bootstrap.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_filters", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


filters = load()


def test_every_filter_carries_the_roles_name() -> None:
    assert all(name.startswith("bootstrap_") for name in filters.FilterModule().filters())


@pytest.mark.parametrize(
    ("result", "report"),
    [
        ({"stdout": 'welcome\r\n@pennypod {"ok": true}\r\n'}, {"ok": True}),
        ({"stdout": '@pennypod {"ok": 1}\n@pennypod {"ok": 2}\nbye\n'}, {"ok": 2}),
        ({"stdout": "", "stderr": "Traceback\nValueError: x\n"}, {"error": "ValueError: x"}),
        ({"stdout": "only a banner\n", "stderr": ""}, {"error": "only a banner"}),
        ({"unreachable": True, "msg": "Connection refused"}, {"error": "Connection refused"}),
        ({}, {"error": "no answer"}),
        ({"stdout": "\n", "stderr": "\n"}, {"error": "no answer"}),
    ],
)
def test_the_report_is_what_follows_the_mark(result: dict[str, Any], report: dict[str, Any]) -> None:
    assert filters.report(result) == report


def test_weights_get_their_place_and_who_can_fetch_them() -> None:
    asked = [
        {"url": "https://example.org/a.pt", "sha256": "AB", "dest": "a.pt", "bytes": 3},
        {"url": "file:///here/b.pt", "sha256": "cd", "dest": "/root/b.pt"},
    ]
    assert filters.weights(asked, "/pod/cache") == [
        {"url": "https://example.org/a.pt", "sha256": "ab", "bytes": 3, "path": "/pod/cache/a.pt", "direct": True},
        {"url": "file:///here/b.pt", "sha256": "cd", "bytes": None, "path": "/root/b.pt", "direct": False},
    ]


def test_pips_errors_become_one_line_without_the_list_of_versions() -> None:
    said = (
        "WARNING: something\n"
        "ERROR: Could not find a version that satisfies the requirement a<0.1 (from versions: 3.10, 3.11)\n"
        "ERROR: No matching distribution found for a<0.1\n"
    )
    assert filters.pip_error({"stderr": said}) == (
        "Could not find a version that satisfies the requirement a<0.1; No matching distribution found for a<0.1"
    )


def test_pips_explanation_of_a_conflict_is_kept() -> None:
    out = "Collecting a\n\nThe conflict is caused by:\n    You asked for numpy<2\n    a 1 needs numpy>=2\n\nTo fix\n"
    said = filters.pip_error({"stdout": out, "stderr": "ERROR: Cannot install a and numpy<2\n"})
    assert said == "Cannot install a and numpy<2; You asked for numpy<2; a 1 needs numpy>=2"


def test_pip_that_says_nothing_known() -> None:
    assert (
        filters.pip_error({"stderr": "/usr/bin/python3: No module named pip\n"})
        == "/usr/bin/python3: No module named pip"
    )
    assert filters.pip_error({"msg": "lost"}) == "lost"


def test_apts_errors_become_one_line() -> None:
    assert filters.apt_error({"stderr": "W: old\nE: Unable to locate package a\nE: Unable to locate package a\n"}) == (
        "Unable to locate package a"
    )
    assert filters.apt_error({"stderr": "sh: apt-get: not found\n"}) == "sh: apt-get: not found"
    assert filters.apt_error({"msg": "lost"}) == "lost"


def test_what_could_not_be_fetched_is_named_with_every_reason(tmp_path: Path) -> None:
    (tmp_path / "aa").touch()
    have, lost = {"url": "http://x/have", "sha256": "aa"}, {"url": "http://x/lost", "sha256": "bb"}
    tried = [
        {"item": lost, "msg": "refused"},
        {"item": lost, "msg": "404"},
        {"item": have, "msg": "OK"},
        {"skipped": True},
    ]
    assert filters.fetch_error([have, lost], str(tmp_path), tried) == "http://x/lost (refused; 404)"
    assert filters.fetch_error([have], str(tmp_path), tried) == ""


def test_data_yaml_is_pointed_at_the_data() -> None:
    def state(text: str, entries: list[str]) -> dict[str, Any]:
        return {"text": base64.b64encode(text.encode()).decode(), "entries": entries}

    text = "\ufeffpath: /x # é\r\ntrain: /y/train\r\n"
    done = filters.point_data_yaml(state(text, ["train"]), "/pod/data")
    assert done == {"text": "\ufeffpath: /pod/data # é\r\ntrain: train\r\n", "differs": True, "error": ""}
    assert not filters.point_data_yaml(state(done["text"], []), "/pod/data")["differs"]
    assert "was not uploaded" in filters.point_data_yaml(state(text, []), "/pod/data")["error"]
    with pytest.raises(AnsibleFilterError):
        filters.point_data_yaml({}, "/pod/data")
