"""No key of the orchestrator is where it does not belong: on disk, in the database, in a log, on a page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import canaries
import pytest
import requests
from scripted_api import Answer, ScriptedApi
from serving import Rehearsal, check_all_ended_once
from workspace import wait_until

CONFIG = """\
poll_s: 0.5
sources:
  lab: {kind: gitlab, secret_env: LAB_SECRET, job: tiny}
notify:
  up: {kind: webhook, url_env: UP_URL, secret_env: UP_SECRET}
  broken: {kind: slack, url_env: BROKEN_URL}
  down: {kind: ntfy, url_env: DOWN_URL}
"""
NAMES = (
    "PENNYPOD_WEBHOOK_SECRET",
    "PENNYPOD_ADMIN_TOKEN",
    "PENNYPOD_READ_TOKEN",
    "LAB_SECRET",
    "UP_SECRET",
    "VAST_API_KEY",
    "RUNPOD_API_KEY",
    "PENNYPOD_S3_SECRET_ACCESS_KEY",
)


@pytest.fixture
def recipients() -> Iterator[ScriptedApi]:
    api = ScriptedApi()
    yield api
    api.stop()


@pytest.fixture
def keys() -> dict[str, str]:
    return {name: canaries.new_key(name.lower()) for name in NAMES}


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    made = Rehearsal(tmp_path, CONFIG)
    yield made
    made.close()


def private_files(rehearsal: Rehearsal, *runs: str) -> list[str]:
    """What may have a key in the clear while those runs go on."""
    return [str(rehearsal.settings.home / "runs" / run / "callback.json") for run in sorted(runs)]


def ask_wrongly(rehearsal: Rehearsal, keys: dict[str, str], token: str) -> None:
    """Whoever holds a key may put it where it does not belong; what is refused for that is not to be written down."""
    for path in (f"/runs/{keys['PENNYPOD_READ_TOKEN']}", f"/hooks/callback/{keys['PENNYPOD_WEBHOOK_SECRET']}"):
        headers = {"Authorization": f"Bearer {token}"}
        assert requests.post(f"{rehearsal.url}{path}", headers=headers, timeout=10).status_code >= 400
    wrong = {"token": keys["PENNYPOD_ADMIN_TOKEN"] + "x"}
    assert requests.post(f"{rehearsal.url}/login", data=wrong, timeout=10).status_code == 401


def start_from_gitlab(rehearsal: Rehearsal, keys: dict[str, str]) -> str:
    """By the one kind of webhook that carries its secret with it; the run."""
    headers = {"X-Gitlab-Token": keys["LAB_SECRET"], "X-Gitlab-Event": "Push Hook", "Idempotency-Key": "lab-1"}
    answer = requests.post(f"{rehearsal.url}/hooks/sources/lab", data=b"{}", headers=headers, timeout=10)
    return str(answer.json()["run"])


def test_no_key_is_left_on_disk_in_a_log_or_on_a_page(
    rehearsal: Rehearsal, keys: dict[str, str], recipients: ScriptedApi
) -> None:
    paths = {name: f"/{canaries.new_key(name)}" for name in ("up", "broken", "down")}
    recipients.on(f"POST {paths['up']}", Answer(200))
    recipients.on(f"POST {paths['broken']}", Answer(500, {"error": "try again"}))
    addresses = {
        "UP_URL": recipients.url + paths["up"],
        "BROKEN_URL": recipients.url + paths["broken"],
        "DOWN_URL": f"http://127.0.0.1:9{paths['down']}",  # nobody listens there
    }
    rehearsal.start(**keys, **addresses)
    secret, admin, read = (keys[name] for name in NAMES[:3])
    rehearsal.http.headers["Authorization"] = f"Bearer {read}"
    answer = rehearsal.post({"action": "train_start", "job": "tiny"}, secret=secret)
    runs = [str(answer.json()["run"]), start_from_gitlab(rehearsal, keys)]
    tokens = [rehearsal.token(run) for run in runs]
    ask_wrongly(rehearsal, keys, tokens[0])
    searched = [*keys.values(), *(path[1:] for path in paths.values()), *tokens]

    for run in runs:
        rehearsal.wait_for(run, stage="watch")
    private = private_files(rehearsal, *runs)
    assert canaries.in_files(searched, [rehearsal.root], map(Path, private)) == []
    assert sorted(canaries.in_files(searched, [rehearsal.root])) == private
    assert canaries.in_process_arguments(searched) == set()
    assert canaries.in_playbook_environments(searched) == set()
    for run in runs:
        assert canaries.in_texts(searched, rehearsal.shown(run, admin=admin, read=read)) == []

    for run, token in zip(runs, tokens, strict=True):
        assert rehearsal.call_back(run, "success", token).status_code == 204
    check_all_ended_once(rehearsal, runs)
    for name in ("up", "broken"):
        wait_until(lambda path=paths[name]: recipients.calls(f"POST {path}"), 30, f"{name} was told")
    assert canaries.in_files(searched, [rehearsal.root]) == []
    for run in runs:
        shown = rehearsal.shown(run, admin=admin, read=read)
        assert canaries.in_texts(searched, shown) == []
        for page in ("/ to owner", f"/runs/{run} to reader", f"/runs/{run}/receipt.json to reader"):
            assert run in shown[page], "it is the real page that was searched"


def test_of_a_callback_token_the_tables_have_the_hash(rehearsal: Rehearsal, keys: dict[str, str]) -> None:
    rehearsal.start(
        **keys, UP_URL="http://127.0.0.1:9/", BROKEN_URL="http://127.0.0.1:9/", DOWN_URL="http://127.0.0.1:9/"
    )
    secret, read = keys["PENNYPOD_WEBHOOK_SECRET"], keys["PENNYPOD_READ_TOKEN"]
    rehearsal.http.headers["Authorization"] = f"Bearer {read}"
    run = str(rehearsal.post({"action": "train_start", "job": "tiny"}, secret=secret).json()["run"])
    digest = hashlib.sha256(rehearsal.token(run).encode()).hexdigest()
    found = {Path(path).name.partition("-")[0] for path in canaries.in_files([digest], [rehearsal.settings.home])}
    assert found == {"orchestrator.sqlite3"}
