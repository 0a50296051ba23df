"""Where real answers differ in shape from the simulator's: fields, types, words, status codes. Pure.

All answers of one endpoint are taken together, since a pod that starts says other things at other seconds. Values are
compared only where they are words of a fixed list; amounts, ids and texts of course differ.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pennypod.simulator.replay import Replayed

MISSING, EXTRA, TYPE, WORD, STATUS, CONTENT = "missing", "extra", "type", "word", "status", "content type"
MEANING = {
    MISSING: "the real service has it, the simulator does not",
    EXTRA: "the simulator has it, the real service does not",
    TYPE: "of another type",
    WORD: "a word that the simulator never says",
    STATUS: "the same call was answered with another status",
    CONTENT: "of another content type",
}

# What each of these may say, as far as is known. Anything else is news to us.
WORDS: dict[str, frozenset[str]] = {
    "actual_status": frozenset(
        ("created", "loading", "running", "stopped", "frozen", "exited", "rebooting", "restarting", "recycling")
    )
    | {"scheduling", "unknown", "offline"},
    "intended_status": frozenset(("running", "stopped", "frozen")),
    "cur_state": frozenset(("running", "stopped", "unloaded")),
    "next_state": frozenset(("running", "stopped", "unloaded")),
    "verification": frozenset(("verified", "unverified", "deverified")),
    "status": frozenset(("PROVISIONING", "STARTING", "RUNNING", "EXITED", "ERROR", "TERMINATED")),
    "cloud": frozenset(("SECURE", "COMMUNITY")),
    "availability": frozenset(("NONE", "LOW", "MEDIUM", "HIGH")),
    "manufacturer": frozenset(("NVIDIA", "AMD", "UNKNOWN")),
}
# Fields whose keys are names that somebody chose, not part of the shape.
_FREE_KEYS = frozenset(("env", "extra_env"))


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs. `where` is a path in the answer, "" for the call as a whole; `times` counts calls."""

    endpoint: str
    kind: str
    where: str
    real: str
    simulated: str
    times: int = 1


@dataclass(slots=True)
class _Seen:
    types: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    times: int = 0


def differences(replayed: Iterable[Replayed]) -> list[Difference]:
    """Everything that differs, by endpoint. Calls about pods that the record did not make are left out."""
    by_endpoint: dict[str, list[Replayed]] = defaultdict(list)
    for item in replayed:
        if item.known and item.real.status:
            by_endpoint[item.endpoint].append(item)
    found: list[Difference] = []
    for endpoint, items in sorted(by_endpoint.items()):
        found += _of_whole_calls(endpoint, items)
        alike = [item for item in items if item.real.status // 100 == item.status // 100]
        real, ours = _shape(item.real.answer for item in alike), _shape(item.answer for item in alike)
        found += _of_shapes(endpoint, real, ours)
    return found


def _of_whole_calls(endpoint: str, items: Sequence[Replayed]) -> list[Difference]:
    statuses = Counter((item.real.status, item.status) for item in items if item.real.status != item.status)
    kinds = Counter(
        (item.real.content_type, item.content_type)
        for item in items
        if item.real.status == item.status and item.real.content_type != item.content_type and item.answer is not None
    )
    return [
        *(Difference(endpoint, STATUS, "", str(a), str(b), times) for (a, b), times in sorted(statuses.items())),
        *(Difference(endpoint, CONTENT, "", a or "none", b, times) for (a, b), times in sorted(kinds.items())),
    ]


def _of_shapes(endpoint: str, real: dict[str, _Seen], ours: dict[str, _Seen]) -> list[Difference]:
    found = []
    for path in sorted(real.keys() | ours.keys()):
        theirs, mine = real.get(path), ours.get(path)
        if theirs is None or mine is None:
            # Of a branch that is not there at all, only its beginning is news; of an empty list nobody knows the rows.
            if _told(path, real, ours) and _parent_is_filled(path, ours if mine is None else real, real, ours):
                there = theirs or mine or _Seen()
                kind = MISSING if mine is None else EXTRA
                has = _types(there)
                found.append(Difference(endpoint, kind, path, *((has, "") if mine is None else ("", has)), there.times))
            continue
        if theirs.types - {"null"} and mine.types - {"null"} and not _fits(theirs.types, mine.types):
            shown = (_types(theirs), _types(mine))
            found.append(Difference(endpoint, TYPE, path, *shown, theirs.times))
        name = path.rpartition(".")[2].removesuffix("[]")
        news = theirs.words - mine.words - WORDS.get(name, theirs.words)
        found += [Difference(endpoint, WORD, path, word, "", theirs.times) for word in sorted(news)]
    return found


def _told(path: str, real: dict[str, _Seen], ours: dict[str, _Seen]) -> bool:
    """Whether both sides have the place that the path belongs to."""
    parent = _parent(path)
    return parent in real and parent in ours


def _parent_is_filled(path: str, lacking: dict[str, _Seen], real: dict[str, _Seen], ours: dict[str, _Seen]) -> bool:
    """Whether the side that lacks the path has an object there, and not only null or an empty list."""
    if path.endswith("[]"):
        return False
    parent = _parent(path)
    return "object" in lacking[parent].types and parent in real and parent in ours


def _parent(path: str) -> str:
    if path.endswith("[]"):
        return path[:-2]
    return path.rpartition(".")[0] if "." in path else ""


def _types(seen: _Seen) -> str:
    return " or ".join(sorted(seen.types - {"null"})) or "null"


def _fits(theirs: set[str], mine: set[str]) -> bool:
    """A whole number where we say a fraction is no news, nor is a null on either side."""
    return theirs - {"null"} <= mine | ({"integer"} if "number" in mine else set())


def _shape(answers: Iterable[Any]) -> dict[str, _Seen]:
    shape: dict[str, _Seen] = defaultdict(_Seen)
    for answer in answers:
        _walk(answer, "", shape)
    return dict(shape)


def _walk(value: Any, path: str, shape: dict[str, _Seen]) -> None:
    seen = shape[path]
    seen.types.add(_type(value))
    seen.times += 1
    name = path.rpartition(".")[2].removesuffix("[]")
    if isinstance(value, str) and name in WORDS:
        seen.words.add(value)
    if isinstance(value, dict) and name not in _FREE_KEYS:
        for key, item in value.items():
            # A dot in a key would read like a step into an object.
            _walk(item, f"{path}.{key.replace('.', '_')}" if path else key.replace(".", "_"), shape)
    elif isinstance(value, list):
        for item in value:
            _walk(item, f"{path}[]", shape)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), type(value).__name__)


# --- for people -------------------------------------------------------------------------------------------------------


def as_document(replayed: Sequence[Replayed], found: Sequence[Difference]) -> dict[str, Any]:
    return {
        "calls": len(replayed),
        "not_compared": sum(1 for item in replayed if not item.known or not item.real.status),
        "endpoints": dict(sorted(Counter(item.endpoint for item in replayed).items())),
        "differences": [asdict(difference) for difference in found],
    }


def as_markdown(provider: str, replayed: Sequence[Replayed], found: Sequence[Difference]) -> str:
    """The report that a person reads and sends on."""
    document = as_document(replayed, found)
    lines = [
        f"# {provider}: the real service and the simulator",
        "",
        f"{document['calls']} calls were recorded, {document['not_compared']} of them could not be compared.",
        "Ids, addresses, amounts and names are replaced, keys are left out;",
        "read `exchanges.json` yourself before you send it on.",
        "",
        "| endpoint | calls | differences |",
        "| --- | ---: | ---: |",
    ]
    counts = Counter(difference.endpoint for difference in found)
    lines += [f"| {name} | {calls} | {counts[name]} |" for name, calls in document["endpoints"].items()]
    lines.append("")
    if not found:
        lines += ["No difference: every answer had the fields, types, words and status codes that were expected.", ""]
        return "\n".join(lines)
    for kind, meaning in MEANING.items():
        rows = [difference for difference in found if difference.kind == kind]
        if not rows:
            continue
        lines += [f"## {kind}: {meaning}", "", "| endpoint | where | real | simulator | times |"]
        lines.append("| --- | --- | --- | --- | ---: |")
        lines += [
            f"| {row.endpoint} | {_cell(row.where or 'the call')} | {_cell(row.real)} | {_cell(row.simulated)} |"
            f" {row.times} |"
            for row in rows
        ]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return f"`{json.dumps(text)[1:-1].replace('|', chr(92) + '|')}`" if text else ""
