"""Erratum 3: data.yaml is pointed at the pod's data and every other byte stays."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pennypod.datayaml import rewrite
from pennypod.errors import InputError

DATA = "/root/pennypod/data"


def test_replaces_path_and_keeps_every_other_byte() -> None:
    text = (
        "# built by the export tool\r\n"
        "path: /home/somebody/datasets/teeth   # where I had it\r\n"
        "train:   train/images\r\n"
        "val: 'valid/images'\r\n"
        "names: {0: \"11\", 1: '12'}\r\n"
        "\r\n"
        "nc: 2 # classes\r\n"
    )
    assert rewrite(text, DATA) == text.replace("/home/somebody/datasets/teeth", DATA)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("path: /old\ntrain: /old/train/images\n", f"path: {DATA}\ntrain: train/images\n"),
        ("path: '/old'\nval: '/old/it''s'\n", f"path: '{DATA}'\nval: 'it''s'\n"),
        ('path: "/old"\nval: "/old/v"\n', f'path: "{DATA}"\nval: "v"\n'),
        (
            "path: /old\ntrain: [/old/a, b, '/old/c']\ntest:\n- /old/t\n",
            f"path: {DATA}\ntrain: [a, b, 'c']\ntest:\n- t\n",
        ),
        ("{path: /old, train: /old/a}\n", f"{{path: {DATA}, train: a}}\n"),
        ("path: |\n  /old\n\ntrain: t\n", f"path: {DATA}\n\ntrain: t\n"),
        ("path: >-\n  /old\n", f"path: {DATA}\n"),
        ("path: /old\ntrain: /old\n", f'path: {DATA}\ntrain: "."\n'),
        ("path: /old\ntrain: /old/a b/c\n", f'path: {DATA}\ntrain: "a b/c"\n'),
        ("path: /old\ntrain: /old/yes\n", f'path: {DATA}\ntrain: "yes"\n'),
        ("path: C:\\ds\ntrain: C:\\ds\\train\\images\n", f"path: {DATA}\ntrain: train/images\n"),
        ("path: ~/ds\ntrain: ~/ds/train\n", f"path: {DATA}\ntrain: train\n"),
        ("path: &root /old\ntrain: /old/a\n", f"path: &root {DATA}\ntrain: a\n"),
        ("root: &r /old\npath: *r\ntrain: a\n", f"root: &r /old\npath: {DATA}\ntrain: a\n"),
        ("path: !!str /old\n", f"path: !!str {DATA}\n"),
        ("path: # unset\ntrain: a\n", f"path: {DATA} # unset\ntrain: a\n"),
        ("path:", f"path: {DATA}"),
        ("path: ../relative\ntrain: a\n", f"path: {DATA}\ntrain: a\n"),
        ("path: /a\npath: /b\n", f"path: {DATA}\npath: {DATA}\n"),
        ("\ufeffpath: /old\n", f"\ufeffpath: {DATA}\n"),
    ],
)
def test_forms_of_yaml(before: str, after: str) -> None:
    assert rewrite(before, DATA) == after
    assert rewrite(after, DATA) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# top\ntrain: a\nval: b\n", f"# top\npath: {DATA}\ntrain: a\nval: b\n"),
        ("train: a\r\nval: b\r\n", f"path: {DATA}\r\ntrain: a\r\nval: b\r\n"),
        ("  train: a\n  val: b\n", f"  path: {DATA}\n  train: a\n  val: b\n"),
        ("{train: a}", f"{{path: {DATA}, train: a}}"),
        ("{}", f"{{path: {DATA}}}"),
    ],
)
def test_a_missing_path_is_added(before: str, after: str) -> None:
    assert rewrite(before, DATA) == after
    assert rewrite(after, DATA) == after


def test_splits_already_on_the_pod_and_relative_ones_stay() -> None:
    text = f"path: {DATA}\ntrain: {DATA}/train\nval: ../valid/images\ntest: null\n"
    assert rewrite(text, DATA) == text


def test_an_absolute_split_is_found_by_its_longest_existing_ending() -> None:
    entries = ["images", "train", "images/train", "images/val"]
    text = "train: /content/drive/ds/images/train\nval: /elsewhere/images/val\n"
    assert rewrite(text, DATA, entries) == f"path: {DATA}\ntrain: images/train\nval: images/val\n"


def test_the_old_path_wins_only_when_the_result_exists() -> None:
    text = "path: /home/me\ntrain: /home/me/set/train\n"
    assert rewrite(text, DATA, ["train"]) == f"path: {DATA}\ntrain: train\n"
    assert rewrite(text, DATA, ["train", "set/train"]) == f"path: {DATA}\ntrain: set/train\n"


def test_a_split_never_climbs_out_of_the_data() -> None:
    assert rewrite("path: /old\ntrain: /old/../../etc/../old/a\n", DATA) == f"path: {DATA}\ntrain: a\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "exactly one"),
        ("# only a comment\n", "exactly one"),
        ("path: a\n---\npath: b\n", "exactly one"),
        ("- a\n- b\n", "must be a mapping"),
        ("just words\n", "must be a mapping"),
        ("path: [a\n", "line 2"),
        ("path: 'a\n", "not valid YAML"),
        ("path: *nowhere\n", "nowhere"),
        ("path: a\x00b\n", "not valid YAML"),
        ("path: {a: b}\n", "one directory"),
        ("path: [a, b]\n", "one directory"),
        ("train: {a: b}\n", "a path or a list"),
        ("train: /far/away\n", "/far/away"),
        ("? train\n: x\n", "no path:"),
        ("[" * 3000, "YAML"),
    ],
)
def test_what_cannot_be_edited_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        rewrite(text, DATA)


def test_a_split_that_was_not_uploaded_is_refused() -> None:
    with pytest.raises(InputError, match="was not uploaded"):
        rewrite("path: /old\ntrain: /old/train\n", DATA, ["valid"])


def test_the_data_directory_must_be_absolute() -> None:
    with pytest.raises(InputError, match="absolute"):
        rewrite("path: /old\n", "data")


_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=12)
_SEGMENT = _NAMES.filter(lambda name: "/" not in name and name not in (".", "..") and not name.startswith("~"))


@settings(max_examples=60, deadline=None)
@given(
    root=st.lists(_SEGMENT, min_size=1, max_size=3),
    split=st.lists(_SEGMENT, max_size=3),
    data=st.lists(_SEGMENT, min_size=1, max_size=3),
    extra=st.dictionaries(_NAMES, _NAMES, max_size=4),
    style=st.sampled_from([None, "'", '"', "|", ">"]),
    flow=st.booleans(),
)
def test_means_the_same_but_for_path_and_splits(
    root: list[str], split: list[str], data: list[str], extra: dict[str, str], style: str | None, flow: bool
) -> None:
    old, new = "/" + "/".join(root), "/" + "/".join(data)
    before: dict[str, Any] = {"path": old, "train": "/".join([old, *split]), "val": ["valid/images"], **extra}
    text = yaml.safe_dump(before, default_style=style, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    result = rewrite(text, new)
    after = yaml.safe_load(result)
    assert after["path"] == new
    lies_there = (before["train"] + "/").startswith(new + "/")
    assert after["train"] == (before["train"] if lies_there else "/".join(split) or ".")
    for key, value in before.items():
        if key not in ("path", "train"):
            assert after[key] == value
    assert rewrite(result, new) == result
