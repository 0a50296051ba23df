"""The last lines of a command: whose pods may bill, and what an interrupted run is."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import offer
from pennypod.ledger import AttemptRecord, Ledger, RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.report import run_document, spending_table, still_billing_line, summary
from pennypod.settings import Settings
from rich.console import Console

NOW = 1_764_600_000.0
RUN, OTHER = "demo-1201-abcde", "demo-1201-fghkm"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = open_ledger(Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}"))
    for run in (RUN, OTHER):
        ledger.open_run(RunRecord(run, "demo", "1:1", NOW, str(tmp_path / run)))
    yield ledger
    ledger.close()


def rented(ledger: Ledger, run: str) -> AttemptRecord:
    attempt = ledger.open_attempt(Lease(run, 1, int(NOW + 600), "abcde"), offer(1), renter="1:1", at=NOW)
    ledger.record_pod(attempt.id, f"pod-of-{run}", NOW)
    return attempt


def shown(ledger: Ledger, *, interrupted: bool) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(summary(run_document(ledger, RUN, NOW), interrupted=interrupted))
    return out.getvalue()


def test_a_run_whose_command_was_interrupted_is_not_called_running(ledger: Ledger) -> None:
    rented(ledger, RUN)
    text = shown(ledger, interrupted=True)
    assert f"{RUN}: interrupted" in text
    assert f"pennypod report {RUN}" in text
    assert "None" not in text
    assert f"{RUN}: running" in shown(ledger, interrupted=False)


def test_pods_of_other_runs_are_told_apart(ledger: Ledger) -> None:
    for run in (RUN, OTHER):
        rented(ledger, run)
    ledger.record_destroying(ledger.attempts(RUN)[0].id, "cancelled", "ended early", NOW)
    own, others = still_billing_line(ledger.pending_attempts(), NOW, [RUN]).splitlines()
    assert own.startswith("may still be billing: 1 pod (1 being destroyed), ")
    assert RUN in own
    assert OTHER not in own
    assert others.startswith("may still be billing, of other runs: 1 pod, ")
    assert still_billing_line(ledger.pending_attempts(), NOW).startswith("may still be billing: 2 pods (1 being ")


def spent(ledger: Ledger, bootstrap_s: float) -> str:
    attempt = rented(ledger, RUN)
    for stage, begin, end in (("bootstrap", 10, 10 + bootstrap_s), ("training", 10 + bootstrap_s, 60)):
        ledger.start_stage(RUN, stage, NOW + begin)
        ledger.finish_stage(RUN, stage, NOW + end)
    ledger.record_destroying(attempt.id, "done", "", NOW + 60)
    ledger.record_gone(attempt.id, {}, NOW + 60, 0)
    out = io.StringIO()
    Console(file=out, width=200).print(spending_table(run_document(ledger, RUN, NOW + 100)))
    return out.getvalue()


def test_a_report_tells_where_the_cents_went(ledger: Ledger) -> None:
    text = spent(ledger, 30)
    assert [line.split()[0] for line in text.splitlines() if "%" in line] == ["boot", "bootstrap", "training"]
    assert "a golden image would save up to 30 s and $" in text


def test_a_bootstrap_without_work_is_nothing_to_save(ledger: Ledger) -> None:
    assert "would save" not in spent(ledger, 1)
