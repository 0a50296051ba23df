"""The status page: readable without JavaScript, its buttons only for who has logged in, and only from its own forms."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import requests
from serving import ADMIN, Rehearsal
from workspace import wait_until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    rehearsal = Rehearsal(tmp_path_factory.mktemp("page"), "limits: {running: 1}")
    rehearsal.start()
    yield rehearsal
    rehearsal.close()


def logged_in(served: Rehearsal) -> tuple[requests.Session, str]:
    """A browser that has logged in, and the token of its forms."""
    browser = requests.Session()
    answer = browser.post(f"{served.url}/login", data={"token": ADMIN}, timeout=10)
    assert answer.status_code == 200
    assert "Log out" in answer.text
    found = re.search(r'name="form_token" value="([0-9a-f]+)"', answer.text)
    assert found
    return browser, found[1]


def only_running(served: Rehearsal) -> str:
    """A new run that has the one place, with nothing waiting beside it, whatever tests ran before."""
    for other in set(re.findall(r"tiny-\d{4}-\w{5}", requests.get(served.url, timeout=10).text)):
        served.post({"action": "train_cancel", "run": other})
    run = served.start_run()
    served.wait_for(run, stage="watch")
    return run


def test_the_page_shows_what_runs_bills_and_waits(served: Rehearsal) -> None:
    run = only_running(served)
    waiting = served.start_run(priority=9)  # not before `run` has the place: this one goes first
    page = requests.get(served.url, timeout=10)
    assert page.status_code == 200
    for shown in (run, waiting, "Live pods: 1", "$0.20/h", "Running: 1 of 1", "Queue: 1 of 100", "per hour now"):
        assert shown in page.text
    assert re.search(r">(1h00m|59m\d\ds)</td>", page.text), "the time to the deadline"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text


def test_without_a_login_there_are_no_buttons_and_they_do_nothing(served: Rehearsal) -> None:
    run = served.start_run()
    assert 'class="danger"' not in requests.get(served.url, timeout=10).text
    for action in ("cancel", "destroy"):
        answer = requests.post(f"{served.url}/runs/{run}/{action}", timeout=10)
        assert (answer.status_code, answer.json()["code"]) == (401, "login_required")
    assert served.status(run)["cancel_requested"] is False


def test_a_wrong_token_does_not_log_in(served: Rehearsal) -> None:
    answer = requests.post(f"{served.url}/login", data={"token": "wrong"}, timeout=10)
    assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    assert not answer.cookies


def test_another_sites_form_does_nothing_in_a_browser_that_has_logged_in(served: Rehearsal) -> None:
    browser, token = logged_in(served)
    run = served.start_run()
    url = f"{served.url}/runs/{run}/cancel"
    for data, headers in (
        ({}, {}),
        ({"form_token": "0" * 64}, {}),
        ({"form_token": token}, {"Sec-Fetch-Site": "cross-site"}),
    ):
        answer = browser.post(url, data=data, headers=headers, timeout=10)
        assert (answer.status_code, answer.json()["code"]) == (403, "csrf")
    assert served.status(run)["cancel_requested"] is False


def test_the_cookie_is_out_of_reach_for_scripts_and_other_sites(served: Rehearsal) -> None:
    answer = requests.post(f"{served.url}/login", data={"token": ADMIN}, timeout=10, allow_redirects=False)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_the_buttons_cancel_a_waiting_run_and_destroy_a_pod(served: Rehearsal) -> None:
    browser, token = logged_in(served)
    running = only_running(served)
    waiting = served.start_run()
    browser.post(f"{served.url}/runs/{waiting}/cancel", data={"form_token": token}, timeout=10)
    assert served.status(waiting)["outcome"] == "cancelled"
    before = served.pods()
    browser.post(f"{served.url}/runs/{running}/destroy", data={"form_token": token}, timeout=10)
    assert served.wait_for(running)["outcome"] == "cancelled"
    wait_until(lambda: not set(before) & set(served.pods()), 20, "its pod is gone")
    receipts = {run: requests.get(f"{served.url}/runs/{run}/receipt.json", timeout=10) for run in (running, waiting)}
    assert [pod["run"] for pod in receipts[running].json()["pods"]] == [running]
    assert (receipts[waiting].status_code, receipts[waiting].json()["code"]) == (404, "not_found")


def test_a_job_with_markup_in_its_reason_stays_text(served: Rehearsal) -> None:
    run = only_running(served)
    token = served.token(run)
    body = '{"event": "epoch", "data": {"note": "<script>alert(1)</script>"}}'
    headers = {"Authorization": f"Bearer {token}"}
    assert (
        requests.post(f"{served.url}/hooks/callback/{run}", data=body, headers=headers, timeout=10).status_code == 204
    )
    assert "<script>alert" not in requests.get(served.url, timeout=10).text
    assert served.http.get(f"{served.url}/runs/{run}", timeout=10).headers["content-type"] == "application/json"


def test_with_a_read_token_reading_needs_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    rehearsal = Rehearsal(tmp_path_factory.mktemp("private"))
    rehearsal.start(PENNYPOD_READ_TOKEN="read-me")
    run = rehearsal.start_run()
    for path in (f"/runs/{run}", "/metrics", "/fragment"):
        assert requests.get(f"{rehearsal.url}{path}", timeout=10).status_code == 401
        headers = {"Authorization": "Bearer read-me"}
        assert requests.get(f"{rehearsal.url}{path}", headers=headers, timeout=10).status_code == 200
    page = requests.get(rehearsal.url, timeout=10)
    assert page.status_code == 401
    assert run not in page.text
    assert "Admin token" in page.text
    browser, _ = logged_in(rehearsal)
    assert browser.get(rehearsal.url, timeout=10).status_code == 200
    rehearsal.close()
