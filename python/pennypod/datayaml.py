"""Point a YOLO ``data.yaml`` at where the data really is (erratum 3). Floor 0: text in, text out.

The file in a data set names the machine that built it: ``path: /home/somebody/dataset``, or absolute ``train:`` and
``val:``. Only those values are replaced, at the places the YAML parser reports for them; every other byte stays:
comments, quoting, order, line endings, anchors.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from pennypod.errors import InputError

SPLITS = ("train", "val", "test")

_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
# A plain scalar of these characters means itself to every YAML parser, also inside a flow mapping.
_PLAIN_SAFE = re.compile(r"[/.]?[A-Za-z_][A-Za-z0-9_./+@=-]*")
_PLAIN_RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "nan", "inf"}


@dataclass(slots=True)
class _Node:
    """A value and its place. `start` and `end` count characters and leave an anchor or a tag outside."""

    kind: str  # "scalar", "alias", "sequence", "mapping"
    start: int
    end: int
    value: str = ""
    style: str = ""  # "" plain, "'", '"', "|", ">"
    flow: bool = False
    items: list[_Node] = field(default_factory=list)
    pairs: list[tuple[_Node, _Node]] = field(default_factory=list)


def rewrite(text: str, data_dir: str, entries: Collection[str] | None = None) -> str:
    """`text` with `path:` set to `data_dir`, and absolute `train:`, `val:`, `test:` made relative to it.

    `data_dir` is the absolute directory on the pod. `entries` are the paths that exist below it, relative to it; with
    them an absolute split is found again by the longest ending that exists. Without them it must lie below the old
    `path:`. Applying it twice changes nothing more.
    Raises InputError when the text is not one YAML mapping or when a split cannot be placed: a guess would train on
    the wrong images.
    """
    if not data_dir.startswith("/"):
        raise InputError(f"the data directory on the pod must be absolute, not {data_dir!r}")
    root = _parse(text)
    wanted = posixpath.normpath(data_dir)
    paths = [value for key, value in root.pairs if key.value == "path"]
    old = [value.value for value in paths if value.kind == "scalar" and _is_absolute(value.value)]
    leaves = [
        (key.value, leaf) for key, value in root.pairs if key.value in SPLITS for leaf in _leaves(key.value, value)
    ]
    strangers = [leaf.value for _, leaf in leaves if _is_absolute(leaf.value) and _below(leaf.value, [wanted]) is None]

    edits: list[tuple[int, int, str]] = []
    for value in paths:
        if value.kind not in ("scalar", "alias"):
            raise InputError("data.yaml: path: must be one directory")
        if value.value != wanted:
            edits.append(_replace(text, value, wanted))
    if not paths:
        edits.append(_insert_path(text, root, wanted))
    for split, leaf in leaves:
        if leaf.value in strangers:
            edits.append(_replace(text, leaf, _rebase(split, leaf.value, old, entries)))

    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


# --- reading: events and tokens carry the places, the composed document the meaning ---------------------------------


def _parse(text: str) -> _Node:
    try:
        events = list(yaml.parse(text, Loader=yaml.SafeLoader))
        tokens = list(yaml.scan(text, Loader=yaml.SafeLoader))
        documents = sum(isinstance(event, yaml.DocumentStartEvent) for event in events)
        if documents != 1:
            raise InputError(f"data.yaml must hold exactly one YAML document, it holds {documents}")
        # Marks of events include an anchor or a tag; the token that ends at the same place is the bare scalar.
        bare = {_index(token.end_mark): token for token in tokens if isinstance(token, yaml.ScalarToken)}
        root = _Builder(bare).build(iter(events[2:]))
        yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as exc:
        where = f" at line {exc.problem_mark.line + 1}" if exc.problem_mark else ""
        raise InputError(f"data.yaml is not valid YAML{where}: {exc.problem or exc.context}") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"data.yaml is not valid YAML: {' '.join(str(exc).split())}") from exc
    except RecursionError as exc:
        raise InputError("data.yaml is nested too deeply") from exc
    if root.kind != "mapping":
        raise InputError("data.yaml must be a mapping with path:, train: and val:")
    return root


class _Builder:
    """Builds nodes from the parser's events and resolves aliases to the text they stand for."""

    def __init__(self, bare: dict[int, yaml.ScalarToken]) -> None:
        self._bare = bare
        self._anchors: dict[str, _Node] = {}

    def build(self, events: Iterator[yaml.Event]) -> _Node:
        return self._node(next(events), events)

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event]) -> _Node:
        start, end = _index(event.start_mark), _index(event.end_mark)
        if isinstance(event, yaml.AliasEvent):
            target = self._anchors.get(event.anchor or "")
            return _Node("alias", start, end, target.value if target and target.kind == "scalar" else "")
        if isinstance(event, yaml.ScalarEvent):
            token = self._bare.get(end)
            # An empty value has no token: it sits, zero wide, where the event ends.
            start = _index(token.start_mark) if token is not None else end
            node = _Node("scalar", start, end, event.value, event.style or "")
        elif isinstance(event, yaml.SequenceStartEvent):
            node = _Node("sequence", start, end, flow=bool(event.flow_style))
            while not isinstance(child := next(events), yaml.SequenceEndEvent):
                node.items.append(self._node(child, events))
        else:
            node = _Node("mapping", start, end, flow=bool(getattr(event, "flow_style", False)))
            while not isinstance(child := next(events), yaml.MappingEndEvent):
                key = self._node(child, events)
                node.pairs.append((key, self._node(next(events), events)))
        if event.anchor:  # type: ignore[attr-defined]  # every node event has one
            self._anchors[event.anchor] = node  # type: ignore[attr-defined]
        return node


def _index(mark: Any) -> int:
    return int(mark.index)


def _leaves(split: str, value: _Node) -> Iterator[_Node]:
    if value.kind in ("scalar", "alias"):
        yield value
    elif value.kind == "sequence":
        for item in value.items:
            yield from _leaves(split, item)
    else:
        raise InputError(f"data.yaml: {split}: must be a path or a list of paths")


# --- paths of another machine ---------------------------------------------------------------------------------------


def _is_absolute(path: str) -> bool:
    """Whether `path` only means something on the machine that wrote it: /x, ~/x, C:/x or a network share."""
    return path.startswith(("/", "~", "\\\\")) or _WINDOWS_DRIVE.match(path) is not None


def _parts(path: str) -> tuple[str, ...]:
    """Components without the root; `..` is resolved so that it can never climb out of the data directory."""
    slashed = path.replace("\\", "/") if path.startswith("\\\\") or _WINDOWS_DRIVE.match(path) else path
    return PurePosixPath(posixpath.normpath("/" + slashed)).parts[1:]


def _below(path: str, roots: list[str]) -> tuple[str, ...] | None:
    """The components of `path` under the first root that holds it."""
    for root in roots:
        head = _parts(root)
        parts = _parts(path)
        if parts[: len(head)] == head:
            return parts[len(head) :]
    return None


def _rebase(split: str, path: str, roots: list[str], entries: Collection[str] | None) -> str:
    under = _below(path, roots)
    if entries is None:
        if under is None:
            raise InputError(f"data.yaml: {split}: {path} is not below path:, so its place in the data is unknown")
        return "/".join(under) or "."
    known = {PurePosixPath(entry).parts for entry in entries}
    if under is not None and (not under or under in known):
        return "/".join(under) or "."
    parts = _parts(path)
    for skip in range(len(parts)):
        if parts[skip:] in known:
            return "/".join(parts[skip:])
    raise InputError(f"data.yaml: {split}: {path} was not uploaded: nothing in the data set ends like it")


# --- writing: one value, in the quoting it had ------------------------------------------------------------------------


def _replace(text: str, node: _Node, value: str) -> tuple[int, int, str]:
    old = text[node.start : node.end]
    if node.style == "'" and value.isprintable():
        new = "'" + value.replace("'", "''") + "'"
    elif node.style == '"':
        new = json.dumps(value, ensure_ascii=False)
    else:
        new = _plain(value)
    if node.style in ("|", ">"):
        # A block scalar swallows the line break behind it (and its blank lines): give that much back.
        new += old[len(old.rstrip("\r\n")) :] if old.endswith(("\n", "\r")) else ""
    if not old and text[node.start - 1 : node.start] not in ("", " ", "\t", "\n"):
        new = " " + new
    return node.start, node.end, new


def _plain(value: str) -> str:
    """`value` without quotes where that is safe in every context, double-quoted otherwise."""
    if _PLAIN_SAFE.fullmatch(value) and value.lower() not in _PLAIN_RESERVED:
        return value
    return json.dumps(value, ensure_ascii=False)


def _insert_path(text: str, root: _Node, value: str) -> tuple[int, int, str]:
    """A `path:` in front of the first key, in the form the mapping has."""
    if root.flow:
        # The mapping's own mark may be at its anchor or tag, so look for the brace.
        brace = text.index("{", root.start) + 1
        return brace, brace, f"path: {_plain(value)}, " if root.pairs else f"path: {_plain(value)}"
    first = root.pairs[0][0].start
    indent = text[text.rfind("\n", 0, first) + 1 : first].removeprefix("\ufeff")
    if indent.strip():
        raise InputError("data.yaml has no path: and its first key cannot be preceded by one; write it as 'key: value'")
    newline = "\r\n" if "\r\n" in text else "\n"
    return first, first, f"path: {_plain(value)}{newline}{indent}"
