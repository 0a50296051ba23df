"""Vast's search language, as users of its official CLI know it, into the body of a search. Floor 0.

`gpu_name=RTX_3090 reliability>0.98 gpu_ram>=24` becomes what the official client sends for it: aliases resolved, sizes
in MB, `_` in names as a blank, numbers as strings (the server converts them) except where a unit was scaled.
"""

from __future__ import annotations

import re
from typing import Any

from pennypod.errors import InputError

Query = dict[str, Any]

_ALIASES = {
    "cuda_vers": "cuda_max_good",
    "display_active": "gpu_display_active",
    "dlperf_usd": "dlperf_per_dphtotal",
    "dph": "dph_total",
    "flops_usd": "flops_per_dphtotal",
}
_SCALES = {"cpu_ram": 1000.0, "gpu_ram": 1000.0, "gpu_total_ram": 1000.0, "duration": 86400.0}
_OPERATORS = {
    ">=": "gte",
    ">": "gt",
    "gt": "gt",
    "gte": "gte",
    "<=": "lte",
    "<": "lt",
    "lt": "lt",
    "lte": "lte",
    "!=": "neq",
    "==": "eq",
    "=": "eq",
    "eq": "eq",
    "neq": "neq",
    "noteq": "neq",
    "not eq": "neq",
    "notin": "notin",
    "not in": "notin",
    "nin": "notin",
    "in": "in",
}
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WILDCARDS = ("?", "*", "any")
_TERM = re.compile(
    r"\s*(?P<field>[a-zA-Z0-9_]+)"
    r"(?P<op>\s*[=><!]+|\s+(?:[lg]te?|nin|neq|eq|not\s?eq|not\s?in|in)(?=\s))?"
    r"\s*(?P<value>\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[^\s]+)?"
)
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def parse(text: str, defaults: Query | None = None) -> Query:
    """The filters of `text` over `defaults`; `field=any` takes one away. Raises InputError naming what is wrong."""
    query: Query = {field: dict(filters) for field, filters in (defaults or {}).items()}
    position, text = 0, text.strip()
    while position < len(text):
        match = _TERM.match(text, position)
        if match is None:
            raise InputError(f"vast_query: cannot be read from here on: {text[position:].strip()!r}")
        position = match.end()
        _add(query, match["field"], " ".join((match["op"] or "").split()), match["value"] or "")
    return query


def _add(query: Query, name: str, sign: str, text: str) -> None:
    field = _ALIASES.get(name, name)
    operator = _OPERATORS.get(sign)
    if operator is None:
        raise InputError(f"vast_query: {name} {sign or '(no operator)'}: use one of = != > >= < <= in notin")
    listed = operator in ("in", "notin")
    value = _plain(text)
    if not value:
        raise InputError(f"vast_query: {name} {sign}: the value is missing")
    if value in _WILDCARDS and not text.startswith(('"', "'")):
        if operator != "eq":
            raise InputError(f"vast_query: {name} {sign} {value}: a wildcard makes sense only with =")
        query.pop(field, None)
        return
    wish = [_value(field, part) for part in _parts(text)] if listed else _WORDS.get(value, _value(field, value))
    if listed and not wish:
        raise InputError(f"vast_query: {name} {sign}: the list is empty")
    query.setdefault(field, {})[operator] = wish


def _plain(text: str) -> str:
    return text.strip(",[]").strip("\"'").strip()


def _parts(text: str) -> list[str]:
    return [part for part in (piece.strip().strip("\"'").strip() for piece in text.strip("[]").split(",")) if part]


def _value(field: str, text: str) -> Any:
    """One value as it goes over the wire."""
    if field in _SCALES:
        try:
            return float(text) * _SCALES[field]
        except ValueError as exc:
            raise InputError(f"vast_query: {field} is a number, not {text!r}") from exc
    if field == "driver_version" and "." in text:
        return _driver_version(text)
    return text.replace("_", " ")


def _driver_version(text: str) -> int:
    match = _VERSION.fullmatch(text)
    if match is None:
        raise InputError(f"vast_query: driver_version looks like 535.86.05, not {text!r}")
    return int("".join(part.zfill(3) for part in match.groups()))
