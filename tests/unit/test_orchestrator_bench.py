"""The bench of `pennypod serve` measures what it says: nothing here is about how fast it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "orchestrator_bench.py"


@pytest.mark.heavy
def test_every_figure_is_measured() -> None:
    words = [sys.executable, BENCH, "--requests", "20", "--connections", "4", "--runs", "2", "--seconds", "1"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["accepting"]["requests"] == 60
    assert result["accepting"]["pennypod"]["per_s"] > 0
    assert result["waiting"]["runs"] == 2
    assert result["waiting"]["rss_mib"] > 0
    if shutil.which("webhook"):
        assert result["accepting"]["ratio_rate"] > 0
        assert "pennypod/webhook" in done.stderr
    else:
        assert "webhook is not installed" in done.stderr
