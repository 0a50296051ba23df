"""Webhooks in: what is taken is taken once, what is refused leaves nothing behind and says why."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from serving import OLD_SECRET, SECRET, Rehearsal, signature

START = {"action": "train_start", "job": "tiny"}
# Nothing is let in: what was accepted stays in the queue, where it can be counted.
CONFIG = """\
limits: {queue: 400, running: 1, per_provider: {auto: 1}}
sources:
  hub: {kind: github, secret_env: HUB_SECRET, job: tiny, branches: [main], overrides: {smoke: true}}
  lab: {kind: gitlab, secret_env: LAB_SECRET, job: tiny}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    rehearsal = Rehearsal(tmp_path_factory.mktemp("webhooks"), CONFIG)
    rehearsal.start(HUB_SECRET="hub-secret-1 hub-secret-2", LAB_SECRET="lab-token")
    rehearsal.wait_for(rehearsal.start_run(), stage="watch")  # the one place is taken
    yield rehearsal
    rehearsal.close()


@pytest.fixture
def unchanged(served: Rehearsal) -> Iterator[Rehearsal]:
    """Whatever the test does, nothing is queued and nothing rented."""
    before = (waiting(served), served.created(), served.journal("launch"))
    yield served
    assert (waiting(served), served.created(), served.journal("launch")) == before


def waiting(served: Rehearsal) -> str:
    return next(line for line in served.metrics().splitlines() if line.startswith('pennypod_runs{state="waiting"}'))


def check_problem(answer: requests.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["type"] == f"urn:pennypod:problem:{code}"
    assert problem["title"]
    assert problem["detail"]
    return problem


# --- taken ------------------------------------------------------------------------------------------------------------


def test_a_signed_webhook_is_taken_and_says_where_to_look(served: Rehearsal) -> None:
    answer = served.post({**START, "region": "EU-RO-1", "overrides": {"smoke": True}, "note": "first"}, key="k-first")
    assert answer.status_code == 202
    taken = answer.json()
    assert taken["status_url"] == f"{served.url}/runs/{taken['run']}" == answer.headers["location"]
    status = requests.get(taken["status_url"], timeout=10).json()
    assert (status["state"], status["stage"], status["job"]) == ("waiting", "admit", "tiny")


def test_a_secret_that_is_being_rotated_out_is_still_good(served: Rehearsal) -> None:
    assert served.post({**START, "note": "old secret"}, secret=OLD_SECRET).status_code == 202


def test_a_repeat_under_its_key_gets_the_first_answer(served: Rehearsal) -> None:
    payload = {**START, "note": "repeated"}
    first = served.post(payload, key="repeated", timestamp=str(int(time.time()) - 2))
    second = served.post(payload, key="repeated")
    assert (second.status_code, second.json()) == (202, first.json())
    assert second.headers["idempotent-replayed"] == "true"


def test_of_many_at_once_with_one_key_there_is_one_run(served: Rehearsal) -> None:
    now = int(time.time())
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda ago: served.post({**START, "note": "race"}, key="race", timestamp=str(now - ago)), range(8))
        )
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["run"] for answer in answers}) == 1


# --- refused: nothing rented, nothing queued --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"secret": "not-the-secret"},
        {"X_Pennypod_Signature": "sha256=" + "0" * 64},
        {"X_Pennypod_Signature": "sha1=abc"},
        {"X_Pennypod_Signature": "sha256=\xe9"},
    ],
)
def test_a_wrong_signature(unchanged: Rehearsal, change: dict[str, str]) -> None:
    check_problem(unchanged.post(START, **change), 401, "signature_invalid")  # type: ignore[arg-type]


def test_a_signature_over_another_time(unchanged: Rehearsal) -> None:
    stamp = str(int(time.time()))
    answer = unchanged.post(START, timestamp=stamp, X_Pennypod_Timestamp=str(int(stamp) + 1))
    check_problem(answer, 401, "signature_invalid")


def test_a_signature_over_another_body(unchanged: Rehearsal) -> None:
    stamp = str(int(time.time()))
    forged = signature(json.dumps({**START, "job": "other"}).encode(), stamp)
    check_problem(unchanged.post(START, X_Pennypod_Signature=forged), 401, "signature_invalid")


@pytest.mark.parametrize("header", ["X_Pennypod_Timestamp", "X_Pennypod_Signature"])
def test_no_signature(unchanged: Rehearsal, header: str) -> None:
    check_problem(unchanged.post(START, **{header: ""}), 401, "signature_missing")


@pytest.mark.parametrize("away_s", [-301, 305, -86_400])
def test_an_old_or_early_timestamp_though_signed(unchanged: Rehearsal, away_s: int) -> None:
    answer = unchanged.post(START, timestamp=str(int(time.time()) + away_s))
    assert abs(check_problem(answer, 401, "timestamp_stale")["server_time"] - time.time()) < 30


@pytest.mark.parametrize("stamp", ["soon", "1e9", "-1", "12 34", "\u0661"])
def test_a_timestamp_that_is_none(unchanged: Rehearsal, stamp: str) -> None:
    headers = {"X-Pennypod-Timestamp": stamp.encode(), "X-Pennypod-Signature": b"sha256=0"}
    answer = requests.post(f"{unchanged.url}/hooks/train", data=b"{}", headers=headers, timeout=10)
    check_problem(answer, 401, "timestamp_stale")


def test_a_replayed_delivery_under_whatever_key(served: Rehearsal) -> None:
    stamp = str(int(time.time()))
    payload = {**START, "note": "replayed"}
    run = served.post(payload, timestamp=stamp, key="original").json()["run"]
    before = waiting(served)
    for key in ("original", "another", None):
        answer = served.post(payload, timestamp=stamp, key=key)
        assert check_problem(answer, 409, "replayed")["run"] == run
    assert waiting(served) == before


def test_a_replayed_delivery_after_a_restart(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path, "limits: {running: 1}")
    rehearsal.start()
    stamp = str(int(time.time()))
    assert rehearsal.post(START, timestamp=stamp).status_code == 202
    rehearsal.kill()
    rehearsal.start()
    check_problem(rehearsal.post(START, timestamp=stamp), 409, "replayed")
    assert len(rehearsal.created()) <= 1
    rehearsal.close()


def test_a_key_that_came_with_another_body(served: Rehearsal) -> None:
    assert served.post({**START, "note": "one"}, key="shared").status_code == 202
    before = waiting(served)
    check_problem(served.post({**START, "note": "two"}, key="shared"), 409, "idempotency_conflict")
    assert waiting(served) == before


def test_an_oversize_body(unchanged: Rehearsal) -> None:
    payload = {**START, "note": "x" * 70_000}
    check_problem(unchanged.post(payload), 413, "too_large")


def test_who_sends_an_oversize_body_slowly_still_hears_why_it_is_refused(unchanged: Rehearsal) -> None:
    head = "POST /hooks/train HTTP/1.1\r\nHost: here\r\nContent-Length: 200000\r\n"
    signed = f"X-Pennypod-Timestamp: {int(time.time())}\r\nX-Pennypod-Signature: sha256=0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", unchanged.port), timeout=20) as client:
        client.sendall((head + signed).encode())
        for _ in range(20):
            time.sleep(0.02)  # not to wait for anything: this is the slowness
            client.sendall(b"x" * 10_000)
        heard = b"".join(iter(lambda: client.recv(65_536), b""))
    assert heard.startswith(b"HTTP/1.1 413 ")
    assert b"too_large" in heard


def test_an_oversize_body_of_unsaid_length_is_not_read_to_its_end(unchanged: Rehearsal) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 65_536
            yield b"x" * 65_536

    connection = http.client.HTTPConnection("127.0.0.1", unchanged.port, timeout=20)
    headers = {"X-Pennypod-Timestamp": str(int(time.time())), "X-Pennypod-Signature": "sha256=0"}
    try:
        connection.request("POST", "/hooks/train", body=endless(), headers=headers, encode_chunked=True)
        status = connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        status = 413  # hung up on, in the middle of it
    finally:
        connection.close()
    assert status == 413
    assert sent < 64 * 65_536


@pytest.mark.parametrize(
    ("payload", "at"),
    [
        (b"", "body"),
        (b"not json", "body"),
        (b"[]", "body"),
        (b'{"action": "train_start", "job": NaN}', "body"),
        (b"[" * 40_000, "body"),
        ({"job": "tiny"}, "body"),
        ({"action": "destroy_all", "job": "tiny"}, "body"),
        ({"action": "train_start"}, "job"),
        ({**START, "job": 7}, "job"),
        ({**START, "unheard": 1}, "unheard"),
        ({**START, "priority": 10}, "priority"),
        ({**START, "priority": "5"}, "priority"),
        ({**START, "region": "EU; rm -rf /"}, "region"),
        ({**START, "overrides": {"smoke": {"deep": 1}}}, "overrides"),
        ({**START, "overrides": {"smoke": "{{ lookup('pipe', 'id') }}"}}, "overrides"),
        ({**START, "overrides": {"smoke": ["{% raw %}"]}}, "overrides"),
        ({**START, "overrides": {"smoke": "line\nbreak"}}, "overrides"),
        ({"action": "train_cancel"}, "run"),
    ],
)
def test_a_payload_that_is_not_usable(unchanged: Rehearsal, payload: Any, at: str) -> None:
    problem = check_problem(unchanged.post(payload), 422, "invalid_payload")
    assert at in problem["detail"]


@pytest.mark.parametrize("job", ["nosuch", "closed", "../tiny", "TINY", ""])
def test_a_job_that_webhooks_may_not_start(unchanged: Rehearsal, job: str) -> None:
    check_problem(unchanged.post({**START, "job": job}), 422, "unknown_job")


@pytest.mark.parametrize("name", ["training_command", "pod_env", "job", "run_id", "artifacts_dir"])
def test_an_override_that_the_job_does_not_allow(unchanged: Rehearsal, name: str) -> None:
    problem = check_problem(unchanged.post({**START, "overrides": {name: "x"}}), 422, "override_forbidden")
    assert problem["override"] == name
    assert "smoke" in problem["detail"]


def test_a_cancel_of_no_run(unchanged: Rehearsal) -> None:
    answer = unchanged.post({"action": "train_cancel", "run": "tiny-1201-zzzzz"})
    check_problem(answer, 404, "unknown_run")


def test_pages_and_methods_that_are_not_there(unchanged: Rehearsal) -> None:
    check_problem(requests.get(f"{unchanged.url}/hooks/train", timeout=10), 405, "method_not_allowed")
    check_problem(requests.get(f"{unchanged.url}/nothing", timeout=10), 404, "not_found")
    check_problem(requests.get(f"{unchanged.url}/runs/tiny-1201-zzzzz", timeout=10), 404, "unknown_run")
    check_problem(requests.post(f"{unchanged.url}/hooks/sources/nobody", timeout=10), 404, "unknown_source")


def test_bad_signatures_take_nothing_from_good_callers_and_are_counted_apart(served: Rehearsal) -> None:
    for _ in range(60):
        assert served.post(START, secret="wrong").status_code == 401
    assert served.post({**START, "note": "good"}).status_code == 202
    counted = [line for line in served.metrics().splitlines() if line.startswith("pennypod_webhooks_total")]
    bad = next(line for line in counted if 'result="signature_invalid"' in line)
    assert float(bad.rpartition(" ")[2]) >= 60
    assert served.log().count("signature_invalid") < 30, (
        "a flood of bad signatures must not become a flood of log lines"
    )


def test_no_secret_is_in_any_answer_or_log(served: Rehearsal) -> None:
    run = served.journal("launch")[0]["run"]  # one that waits has no token yet
    seen = served.log() + served.metrics() + json.dumps(served.status(run))
    seen += requests.get(served.url, timeout=10).text
    for secret in (SECRET, OLD_SECRET, "hub-secret-1", "lab-token", served.token(run)):
        assert secret not in seen


# --- GitHub and GitLab ------------------------------------------------------------------------------------------------


def push(branch: str = "main", **more: Any) -> bytes:
    return json.dumps({"ref": f"refs/heads/{branch}", "after": f"{time.time_ns():040x}", **more}).encode()


def from_github(
    served: Rehearsal, body: bytes, *, delivery: str, secret: str = "hub-secret-1", event: str = "push"
) -> requests.Response:
    mac = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    headers = {"X-Hub-Signature-256": f"sha256={mac}", "X-GitHub-Delivery": delivery, "X-GitHub-Event": event}
    return requests.post(f"{served.url}/hooks/sources/hub", data=body, headers=headers, timeout=10)


def from_gitlab(served: Rehearsal, body: bytes, *, token: str = "lab-token", **headers: str) -> requests.Response:
    given = {"X-Gitlab-Token": token, "X-Gitlab-Event": "Push Hook"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(f"{served.url}/hooks/sources/lab", data=body, headers=given, timeout=10)


def test_a_push_on_github_starts_the_job_of_its_source_once(served: Rehearsal) -> None:
    body = push()
    first = from_github(served, body, delivery="d-1", secret="hub-secret-2")
    assert first.status_code == 202
    check_problem(from_github(served, body, delivery="d-1"), 409, "replayed")
    check_problem(from_github(served, body, delivery="another id"[:7]), 409, "replayed")


@pytest.mark.parametrize(
    ("fields", "event"),
    [({"branch": "dev"}, "push"), ({}, "ping"), ({"deleted": True}, "push"), ({"after": "0" * 40}, "push")],
)
def test_what_happens_on_github_besides_is_ignored(unchanged: Rehearsal, fields: dict[str, Any], event: str) -> None:
    answer = from_github(unchanged, push(**fields), delivery=f"d-{time.time_ns()}", event=event)
    assert answer.status_code == 200
    assert "ignored" in answer.json()


def test_a_github_webhook_must_be_signed_and_named(unchanged: Rehearsal) -> None:
    check_problem(from_github(unchanged, push(), delivery="d-2", secret="wrong"), 401, "signature_invalid")
    check_problem(from_github(unchanged, push(), delivery=""), 401, "signature_missing")


def test_a_push_on_gitlab_starts_the_job_of_its_source_once(served: Rehearsal) -> None:
    body = push()
    assert from_gitlab(served, body, X_Gitlab_Event_UUID="u-1").status_code == 202
    check_problem(from_gitlab(served, body, X_Gitlab_Event_UUID="u-1"), 409, "replayed")
    check_problem(from_gitlab(served, body, Idempotency_Key="u-2"), 409, "replayed")


def test_a_gitlab_webhook_needs_its_token_and_an_id(unchanged: Rehearsal) -> None:
    check_problem(from_gitlab(unchanged, push(), token="wrong", Idempotency_Key="u-3"), 401, "signature_invalid")
    check_problem(from_gitlab(unchanged, push()), 401, "signature_missing")


# --- full -------------------------------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_again_and_takes_the_very_delivery_then(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path, "limits: {running: 1, queue: 2}")
    rehearsal.start()
    running = rehearsal.start_run()
    rehearsal.wait_for(running, stage="watch")
    waiting_runs = [rehearsal.start_run(), rehearsal.start_run()]
    stamp = str(int(time.time()))
    refused = rehearsal.post(START, timestamp=stamp, key="later")
    check_problem(refused, 429, "queue_full")
    assert int(refused.headers["retry-after"]) > 0
    rehearsal.post({"action": "train_cancel", "run": waiting_runs[0]})
    assert rehearsal.post(START, timestamp=stamp, key="later").status_code == 202
    assert rehearsal.status(waiting_runs[0])["outcome"] == "cancelled"
    rehearsal.close()


def test_too_many_starts_from_one_source(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path, "limits: {running: 1, queue: 200, starts_per_minute: 1}")
    rehearsal.start()
    answers = [rehearsal.post({**START, "note": f"{number}"}) for number in range(30)]
    refused = [answer for answer in answers if answer.status_code != 202]
    assert len(answers) - len(refused) == 20
    check_problem(refused[0], 429, "rate_limited")
    assert int(refused[0].headers["retry-after"]) > 1
    rehearsal.close()
