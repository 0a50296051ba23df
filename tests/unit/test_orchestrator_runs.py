"""The life of a run in the orchestrator: its stages, its ends, and what its training side may say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pennypod.orchestrator.store import open_store
from serving import Rehearsal, check_ended_once
from workspace import wait_until


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    made = Rehearsal(tmp_path, "poll_s: 0.5")
    yield made
    made.close()


def test_a_run_goes_through_its_stages(rehearsal: Rehearsal) -> None:
    rehearsal.start()
    run = rehearsal.start_run(region=["EU-RO-1", "EU-SE-1"], overrides={"smoke": True})
    rehearsal.wait_for(run, stage="watch")
    assert len(rehearsal.pods()) == 1
    assert rehearsal.call_back(run, "started").status_code == 204
    assert rehearsal.call_back(run, "epoch", epoch=1, loss=0.5).status_code == 204
    assert rehearsal.call_back(run, "success").status_code == 204
    check_ended_once(rehearsal, run)
    stages = [entry["name"] for entry in rehearsal.status(run)["timeline"] if entry["kind"] == "stage"]
    assert stages == ["admit", "launch", "watch", "finish", "destroy", "report"]
    (launched,) = rehearsal.journal("launch")
    assert launched["variables"]["pod_region"] == ["EU-RO-1", "EU-SE-1"]
    assert launched["variables"]["smoke"] is True


# --- how runs end otherwise ------------------------------------------------------------------------------------------


def test_a_cancelled_run_ends_its_pod_at_once(rehearsal: Rehearsal) -> None:
    rehearsal.start()
    run = rehearsal.start_run()
    rehearsal.wait_for(run, stage="watch")
    answer = rehearsal.post({"action": "train_cancel", "run": run, "job": "tiny"})
    assert (answer.status_code, answer.json()["run"]) == (202, run)
    check_ended_once(rehearsal, run, "cancelled")
    assert rehearsal.journal("resume") == []
    again = rehearsal.post({"action": "train_cancel", "run": run, "note": "again"})
    assert (again.status_code, again.json()["code"]) == (409, "run_over")


def test_a_pod_that_is_gone_ends_its_run(rehearsal: Rehearsal) -> None:
    rehearsal.start()
    run = rehearsal.start_run()
    rehearsal.wait_for(run, stage="watch")
    (rehearsal.folder / "pods" / rehearsal.pods()[0]).unlink()
    check_ended_once(rehearsal, run, "failed")


def test_a_run_over_its_budget_rents_nothing_and_fails(rehearsal: Rehearsal) -> None:
    rehearsal.start()
    run = rehearsal.start_run(overrides={"max_cost_usd": 1})
    assert rehearsal.wait_for(run)["outcome"] == "failed"
    assert rehearsal.created() == []


def test_a_second_server_on_the_same_home_is_refused(rehearsal: Rehearsal, tmp_path: Path) -> None:
    rehearsal.start()
    (tmp_path / "second").mkdir()
    second = Rehearsal(tmp_path / "second")
    second._environment["PENNYPOD_HOME"] = str(rehearsal.root / "home")
    second._command = [part.replace("PORT", "0") for part in second._command]
    second.port = 1  # it prints none
    second._spawn({})
    wait_until(second.has_ended, 30, "the second one gives up")
    assert "another pennypod serve works on" in second.log()
    assert rehearsal.start_run()


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_a_callback_needs_the_token_of_its_own_run(rehearsal: Rehearsal) -> None:
    rehearsal.start()
    run, other = rehearsal.start_run(), rehearsal.start_run()
    for wrong in ("guess", rehearsal.token(other)):
        answer = rehearsal.call_back(run, "success", token=wrong)
        assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    unknown = rehearsal.call_back("tiny-1201-zzzzz", "success", token="guess")
    assert (unknown.status_code, unknown.json()["code"]) == (401, "token_invalid")
    bad = rehearsal.call_back(run, "destroy_everything")
    assert (bad.status_code, bad.json()["code"]) == (422, "invalid_payload")
    rehearsal.wait_for(run, stage="watch")
    assert rehearsal.status(run)["state"] == "running"


def test_the_token_of_a_run_opens_nothing_else(rehearsal: Rehearsal) -> None:
    rehearsal.start()
    run = rehearsal.start_run()
    token = rehearsal.token(run)
    headers = {"Authorization": f"Bearer {token}"}
    for path in ("/hooks/train", f"/runs/{run}/cancel", f"/runs/{run}/destroy", "/logout"):
        answer = rehearsal.http.post(f"{rehearsal.url}{path}", headers=headers, timeout=10)
        assert answer.status_code == 401, path
    assert rehearsal.post({"action": "train_start", "job": "tiny"}, secret=token).status_code == 401


def test_the_token_of_a_run_outlives_a_restart_and_ends_with_the_run(rehearsal: Rehearsal) -> None:
    rehearsal.start()
    run = rehearsal.start_run()
    rehearsal.wait_for(run, stage="watch")
    token = rehearsal.token(run)
    rehearsal.kill()
    rehearsal.start()
    assert rehearsal.call_back(run, "epoch", token, epoch=1).status_code == 204
    for _ in range(2):  # a word that comes twice ends the run once
        assert rehearsal.call_back(run, "success", token).status_code in (204, 401)
    check_ended_once(rehearsal, run)
    late = rehearsal.call_back(run, "success", token)
    assert (late.status_code, late.json()["code"]) == (401, "token_invalid")
    files = [path for path in rehearsal.root.rglob("*") if path.is_file()]
    assert [path for path in files if token.encode() in path.read_bytes()] == []


def test_only_an_end_makes_anybody_look_at_the_pod(tmp_path: Path) -> None:
    """An epoch a second must not become a login a second."""
    store = open_store(f"sqlite:///{tmp_path / 'o.sqlite3'}")
    for event in ("started", "epoch", "checkpoint"):
        store.record_callback("tiny-1201-aaaaa", event, "", 1.0)
    newest, woken = store.wakes_since(0)
    assert woken == set()
    store.record_callback("tiny-1201-aaaaa", "failure", "", 2.0)
    assert store.wakes_since(newest)[1] == {"tiny-1201-aaaaa"}
    store.close()


def test_success_wakes_the_watch_at_once(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path, "poll_s: 3600")
    rehearsal.start()
    run = rehearsal.start_run()
    rehearsal.wait_for(run, stage="watch")
    wait_until(lambda: "pennypod_runs_watched 1.0" in rehearsal.metrics(), 10, "the run waits")
    began = time.monotonic()
    rehearsal.call_back(run, "failure", reason="out of memory")
    rehearsal.wait_for(run, stage="finish")
    assert time.monotonic() - began < 10, "the next look would have been in an hour"
    rehearsal.close()
