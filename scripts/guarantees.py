#!/usr/bin/env python3
"""Write the measured tables of docs/guarantees.md, and their picture, from docs/guarantees.json.

scripts/guarantees.py                                    write both anew
scripts/guarantees.py --take build/chaos/cells.json      take what `make chaos` measured, then write both
scripts/guarantees.py --check                            exit with 1 when they are not what the JSON says
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PAGE, PICTURE = DOCS / "guarantees.json", DOCS / "guarantees.md", DOCS / "guarantees.svg"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
KEPT = (
    "name", "group", "clock", "ring", "lives", "pods", "receipts", "open", "unseen", "to_deadline", "lease_left_s",
    "overspend_s", "overspend_micros", "bound_s", "bound_micros",
)  # fmt: skip

Row = dict[str, Any]


def taken(document: Row) -> Row:
    """What the page needs of a measurement. Raises SystemExit when a cell did not hold."""
    broken = [row["name"] for row in document["cells"] if row["problems"]]
    if broken:
        raise SystemExit(f"{len(broken)} cells did not hold, the first is {broken[0]!r}: nothing is taken")
    return {**document, "cells": [{key: row[key] for key in KEPT} for row in document["cells"]]}


def as_text(document: Row) -> str:
    """JSON with a line for each cell, so that a diff shows which one changed."""
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in document.items() if key != "cells")
    cells = ",\n".join(f"  {json.dumps(row)}" for row in document["cells"])
    return f'{{\n{head} "cells": [\n{cells}\n ]\n}}\n'


# --- the tables -------------------------------------------------------------------------------------------------------


def tables(document: Row) -> str:
    rows = document["cells"]
    real = [row for row in rows if row["clock"] == "real"]
    ghosts = [row for row in rows if row["clock"] == "simulated"]
    kills = sum(row["name"].startswith("kill ") for row in rows)
    lines = [
        f"Measured on {document['measured']}, on {document['machine']}:",
        f"{len(rows) - kills} of {document['whole']} cells and {kills} random kills, {_sum(rows, 'lives')} runs,",
        f"{_sum(rows, 'pods')} pods. None was left alive, and no run ever had two at once. The end of all was proven,",
        f"but for {_sum(rows, 'unseen')} that had ended themselves before anybody who was left could have seen it, and",
        f"{_sum(rows, 'open')} that their run had just ended when the machine with its books was lost.",
        "",
        *_table("what happens", real, real_group),
        "",
        "A controller that dies right before or right after each single call to its provider, without a fault and with",
        "each of the simulator's in turn, in simulated time, with the default settings and half an hour to live.",
        "Calls take no time here; what waits, waits as long as it would with a provider.",
        "",
        *_table("who is left", ghosts, lambda row: str(row["group"].rpartition(": ")[2])),
    ]
    return "\n".join(lines)


def real_group(row: Row) -> str:
    return "faults of pods" if row["group"].startswith("fault ") else str(row["group"])


def grouped(rows: list[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return dict(sorted(found.items()))


def worst_of(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: (row["overspend_s"], row["bound_s"]))


def _table(head: str, rows: list[Row], key: Callable[[Row], str]) -> list[str]:
    lines = [
        f"| {head} | ended by ring | runs | worst case | bound | of that lease | dearest | bound |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, members in grouped(rows, key).items():
        for ring, of_ring in grouped(members, lambda row: str(row["ring"])).items():
            worst, dearest = worst_of(of_ring), max(of_ring, key=lambda row: row["overspend_micros"])
            lease = f"{worst['lease_left_s']:.0f} s" if worst["to_deadline"] else ""
            cells = [name, ring or "nothing to end", str(_sum(of_ring, "lives"))]
            cells += [f"{worst['overspend_s']:.1f} s", f"{worst['bound_s']:.0f} s", lease]
            cells += [_usd(dearest["overspend_micros"]), _usd(dearest["bound_micros"])]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _sum(rows: list[Row], name: str) -> int:
    return sum(row[name] for row in rows)


def _usd(micros: int) -> str:
    return f"${micros / 1e6:.6f}"


# --- the picture ------------------------------------------------------------------------------------------------------

_LEFT, _WIDTH, _HEIGHT, _SHORTEST, _LONGEST = 270, 520, 20, 0.1, 6000.0


def picture(document: Row) -> str:
    """Bars on a logarithmic scale of seconds: the bound of the worst case in grey, the worst case in front of it."""
    groups = grouped(document["cells"], lambda row: real_group(row).replace("controller dies at every step, ", ""))
    height = _HEIGHT * len(groups) + 40
    size = f'width="{_LEFT + _WIDTH + 20}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        "<title>Seconds from the event to the meter's stop: worst case and bound</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for tick in (0.1, 1, 10, 100, 1000):
        x = _LEFT + _x(tick)
        parts.append(f'<line x1="{x:.0f}" y1="18" x2="{x:.0f}" y2="{height - 18}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.0f}" y="12" text-anchor="middle" fill="#555555">{tick:g} s</text>')
    for number, (name, rows) in enumerate(groups.items()):
        worst, y = worst_of(rows), 20 + _HEIGHT * number
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#222222">{escape(name)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 4}" width="{_x(worst["bound_s"]):.1f}" height="12" fill="#d0d7de"/>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 6}" width="{_x(worst["overspend_s"]):.1f}" height="8" fill="#1a7f37"/>'
        )
    parts.append(
        f'<text x="{_LEFT}" y="{height - 5}" fill="#555555">green: worst case measured; grey: its bound</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _x(seconds: float) -> float:
    scale = math.log(_LONGEST / _SHORTEST)
    return _WIDTH * math.log(max(seconds, _SHORTEST) / _SHORTEST) / scale


# --- the files --------------------------------------------------------------------------------------------------------


def page(text: str, document: Row) -> str:
    """The page with what lies between its two markers made anew."""
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n\n{tables(document)}\n\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--take", type=Path, help="a cells.json of `make chaos` to publish")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.take:
        DATA.write_text(as_text(taken(json.loads(options.take.read_text("utf-8")))), "utf-8")
    document = json.loads(DATA.read_text("utf-8"))
    stale = []
    for file, wanted in ((PAGE, page(PAGE.read_text("utf-8"), document)), (PICTURE, picture(document))):
        if file.exists() and file.read_text("utf-8") == wanted:
            continue
        stale.append(file.name)
        if not options.check:
            file.write_text(wanted, "utf-8")
    if options.check and stale:
        print(f"not what docs/guarantees.json says: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
