"""The page of guarantees says what was measured, and what was measured keeps its bounds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chaos.cells import matrix, named
from chaos.ghosts import GhostCell, ghost_matrix
from workspace import REPOSITORY


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guarantees", REPOSITORY / "scripts" / "guarantees.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


guarantees = _script()
DOCUMENT: dict[str, Any] = json.loads(Path(guarantees.DATA).read_text("utf-8"))
ROWS: list[dict[str, Any]] = DOCUMENT["cells"]


def test_the_page_and_its_picture_are_made_of_what_was_measured() -> None:
    text = Path(guarantees.PAGE).read_text("utf-8")
    assert guarantees.page(text, DOCUMENT) == text, "run `make docs`"
    assert guarantees.picture(DOCUMENT) == Path(guarantees.PICTURE).read_text("utf-8"), "run `make docs`"


def test_no_measured_case_exceeds_its_bound() -> None:
    assert [row["name"] for row in ROWS if row["overspend_s"] > row["bound_s"]] == []
    assert [row["name"] for row in ROWS if row["overspend_micros"] > max(1, row["bound_micros"])] == []


def test_the_end_of_every_pod_was_proven() -> None:
    """But for two kinds that are named: a pod that ended itself before anybody who was left could have seen it, and one
    that its run itself ended, where the run's machine with its books was lost right after.
    """
    for row in ROWS:
        assert row["receipts"] + row["unseen"] + row["open"] == row["pods"], row["name"]
        assert not row["unseen"] or row["ring"] == "3 fuse", row["name"]
        assert not row["open"] or row["group"].endswith("sweep elsewhere"), row["name"]


def test_the_bounds_are_the_ones_that_the_matrix_states() -> None:
    """So that no bound is loosened in the measurement alone."""
    for row in ROWS:
        if row["clock"] == "real":
            assert row["bound_s"] == pytest.approx(named(row["name"]).bound_s(row["lease_left_s"]), abs=0.1), row[
                "name"
            ]


def test_the_page_tells_how_much_of_the_matrix_was_measured() -> None:
    cells = [row for row in ROWS if not row["name"].startswith("kill ")]
    assert {row["name"] for row in cells} <= {cell.name for cell in [*matrix(), *ghost_matrix()]}
    assert f"{len(cells)} of {DOCUMENT['whole']} cells" in Path(guarantees.PAGE).read_text("utf-8")


def test_a_measurement_with_a_broken_cell_is_not_published() -> None:
    broken = {
        "measured": "2026-12-01",
        "machine": "here",
        "whole": 3,
        "cells": [{**ROWS[0], "problems": ["two pods at once"]}],
    }
    with pytest.raises(SystemExit, match="did not hold"):
        guarantees.taken(broken)


def test_the_worst_case_of_each_ring_is_what_the_table_shows() -> None:
    row = {**ROWS[0], "group": "a thing", "clock": "real", "ring": "1 guard", "to_deadline": False}
    rows = [{**row, "overspend_s": seconds, "bound_s": 12.0} for seconds in (1.0, 7.3, 2.0)]
    table = guarantees.tables({"measured": "today", "machine": "here", "whole": 3, "cells": rows})
    assert "| a thing | 1 guard | 3 | 7.3 s | 12 s |" in table


def test_names_of_ghost_cells_differ() -> None:
    names = [cell.name for cell in ghost_matrix()]
    assert len(names) == len(set(names))
    assert GhostCell("none", "vast", "guard").name in names
