#!/usr/bin/env python3
"""The crash matrix: every event at every moment of a run, and random kills of the demo, on simulated pods.

    make chaos                          everything that is not in the output file yet
    make chaos MINUTES=30 KILLS=20      stop starting cells after that time; so many random kills
    make chaos CELL='SIGKILL / training / vast'      one cell, or one random kill: CELL='kill 17'

Cells run side by side, each in a process of its own. What they showed goes to build/chaos/cells.jsonl as it comes; a
cell that is in there and held is not run again. Ends with 1 when a cell did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bootstrapped import kept_image
from chaos.cells import Cell, matrix, named, random_kill
from chaos.ghosts import GhostCell, blank_ghosts, ghost_matrix, play_ghosts
from chaos.subject import subject
from chaos.verdict import Result, blank, play
from simulated import simulator
from workspace import REPOSITORY, Workspace

OUT = REPOSITORY / "build" / "chaos"
DEMO_DATA = REPOSITORY / ".cache" / "chaos" / "demo"
CELL_LIMIT_S = 600


# --- one cell, in this process ----------------------------------------------------------------------------------------


AnyCell = Cell | GhostCell


def any_cell(name: str) -> AnyCell:
    """A cell of either kind by its name. Raises KeyError."""
    return next((cell for cell in ghost_matrix() if cell.name == name), None) or named(name)


def blank_row(cell: AnyCell) -> dict[str, Any]:
    return (blank_ghosts(cell) if isinstance(cell, GhostCell) else blank(cell)).as_document()


def run_any(cell: AnyCell, folder: Path, image: str) -> Result:
    if isinstance(cell, Cell):
        return run_cell(cell, folder, image)
    began = time.monotonic()
    with simulator("--seed", "3") as sim:
        row = play_ghosts(cell, folder, sim)
    row.wall_s = round(time.monotonic() - began, 1)
    return row


def run_cell(cell: Cell, folder: Path, image: str) -> Result:
    """A cell that breaks the harness itself is a cell that does not hold."""
    with subject(cell, folder, image, DEMO_DATA) as run:
        try:
            return play(cell, run, folder / "spare-home")
        except Exception as exc:  # noqa: BLE001 - whatever it was, it belongs into the result
            result = blank(cell)
            tail = run.log.read_text(errors="replace")[-600:] if run.log.exists() else ""
            result.problems.append(f"{type(exc).__name__}: {exc} | {tail}")
            return result


def prepared(folder: Path) -> str:
    """The pod image, when it and the demo's data set, which all cells share, are there."""
    if not DEMO_DATA.exists():
        say("making the demo's data set (once)")
        part = DEMO_DATA.with_name("part")
        part.parent.mkdir(parents=True, exist_ok=True)
        script = REPOSITORY / "python" / "trainers" / "make_sample_data.py"
        subprocess.run([sys.executable, script, "classify", part], check=True, stdout=sys.stderr)
        part.replace(DEMO_DATA)
    folder.mkdir(parents=True, exist_ok=True)
    return kept_image(Workspace(folder), say)


# --- many cells -------------------------------------------------------------------------------------------------------


def chosen(options: argparse.Namespace) -> list[AnyCell]:
    if options.cell:
        return [any_cell(options.cell)]
    cells: list[AnyCell] = [] if options.only_kills else [*matrix(), *ghost_matrix()]
    if options.match:
        cells = [cell for cell in cells if options.match in cell.name]
    cells += [random_kill(options.seed + number) for number in range(options.kills)]
    random.Random(0).shuffle(cells)  # a part of them, when the time is over, is then a sample
    return cells


def known(file: Path) -> dict[str, dict[str, Any]]:
    """The newest result of every cell."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return {row["name"]: row for row in rows}


def run_all(cells: list[AnyCell], options: argparse.Namespace, out: Path) -> bool:
    file = out / "cells.jsonl"
    done = known(file)
    todo = [cell for cell in cells if options.cell or not _held(done.get(cell.name))]
    say(f"{len(cells)} cells, {len(cells) - len(todo)} of them done; {options.jobs} at a time; seed {options.seed}")
    end = time.monotonic() + options.minutes * 60 if options.minutes else None
    waiting, running, failed, finished = list(todo), dict[subprocess.Popen[str], tuple[AnyCell, float]](), 0, 0
    try:
        while waiting or running:
            late = end is not None and time.monotonic() > end
            while waiting and len(running) < options.jobs and not late:
                cell = waiting.pop(0)
                running[_start(cell, options)] = (cell, time.monotonic())
            if late and not running:
                say(f"{len(waiting)} cells are left for another time")
                break
            for process, (cell, began) in list(running.items()):
                row = _result(process, cell, time.monotonic() - began)
                if row is None:
                    continue
                del running[process]
                finished += 1
                failed += not _held(row)
                with file.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
                say(f"{finished:4}/{len(todo)} {_line(row)}")
            time.sleep(0.2)
    finally:
        for process in running:
            process.terminate()  # all of them first: each puts its pods and processes away
        for process in running:
            _kill(process)
        (out / "cells.json").write_text(json.dumps(document(list(known(file).values())), indent=1) + "\n")
    say(f"{finished - failed} held, {failed} did not; {out / 'cells.json'}")
    return failed == 0 and not waiting


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the guarantees' page is made from."""
    return {
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "whole": len(matrix()) + len(ghost_matrix()),
        "machine": f"{os.cpu_count()} cores, {_memory_gb()} GB, {platform.system()} {platform.machine()}",
        "cells": sorted(rows, key=lambda row: row["name"]),
    }


def _memory_gb() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)


def _held(row: dict[str, Any] | None) -> bool:
    return row is not None and not row["problems"]


def _start(cell: AnyCell, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--one", cell.name, "--image", options.image]
    command += ["--keep", options.keep] if options.keep else []
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, start_new_session=True
    )


def _result(process: subprocess.Popen[str], cell: AnyCell, seconds: float) -> dict[str, Any] | None:
    """The row of a cell that is over, else None; a cell that hangs is ended."""
    if process.poll() is None:
        if seconds < CELL_LIMIT_S:
            return None
        _kill(process)
    assert process.stdout is not None
    text = process.stdout.read()
    process.stdout.close()
    row = blank_row(cell)
    try:
        row |= json.loads(text.splitlines()[-1])
    except (IndexError, ValueError):
        row["problems"] = [f"the cell's process ended with {process.returncode} after {seconds:.0f} s"]
    return row


def _kill(process: subprocess.Popen[str]) -> None:
    """TERM first: a cell puts its pods and processes away."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _line(row: dict[str, Any]) -> str:
    shown = f"{row['overspend_s']:6.1f} s of {row['bound_s']:5.1f}, ${row['overspend_micros'] / 1e6:.6f}, {row['ring']}"
    state = "ok  " if not row["problems"] else "FAIL"
    drawn = f" ({row['event']}, {row['group']}, {row['moment']})" if row["name"].startswith("kill ") else ""
    what = row["name"] + drawn
    return f"{state} {row['wall_s']:5.0f} s  {what}: {shown}" + "".join(f"\n     {text}" for text in row["problems"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ended(*_: object) -> None:
    raise KeyboardInterrupt


def _folder(keep: str) -> Iterator[Path]:
    if keep:
        yield Path(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="pennypod-chaos-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", default="", help="only this cell, whether it is done or not")
    parser.add_argument("--match", default="", help="only cells of the matrix with this in their name")
    parser.add_argument("--kills", type=int, default=200, help="random kills of the demo")
    parser.add_argument("--only-kills", action="store_true")
    parser.add_argument("--seed", type=int, default=1, help="the first random kill's seed; the next ones count on")
    parser.add_argument("--minutes", type=float, default=0, help="start no cell after that time; 0: no limit")
    parser.add_argument("--jobs", type=int, default=3, help="cells at a time")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--keep", default="", help="an empty folder to leave a cell's files in")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--image", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _ended)
    for folder in _folder(options.keep):
        if options.one:
            print(json.dumps(run_any(any_cell(options.one), folder / "cell", options.image).as_document()))
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        options.image = prepared(folder / "image")
        return 0 if run_all(chosen(options), options, options.out) else 1
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; the next call goes on from here")
