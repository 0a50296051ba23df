"""Live progress: one JSON line per event in the run's own file. Floor 1: that file is its one outside thing.

Modules run in separate processes and cannot print, so whoever shows progress (the Ansible callback) tails these files.
A progress line is a courtesy: a full disk must not fail the run, so writing errors are swallowed here and only here.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"


class Events:
    """Appends events of one run. Lines are short and written in one call, so concurrent writers do not interleave."""

    def __init__(self, run_dir: Path, run: str) -> None:
        self._path = run_dir / EVENTS_FILE
        self._run = run

    def emit(self, stage: str, text: str, **numbers: Any) -> None:
        line = json.dumps({"t": round(time.time(), 3), "run": self._run, "stage": stage, "text": text, **numbers})
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
