"""The transport: what is repeated, what never is, and where the key never shows."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock
from pennypod import __version__
from pennypod.errors import (
    AmbiguousError,
    InputError,
    InvalidError,
    PennypodError,
    ProviderError,
    RateLimitedError,
    TransientError,
)
from pennypod.providers import http as transport
from pennypod.providers.http import Http, Pacing
from scripted_api import KEY, Answer, ScriptedApi, scripted_api

FINE = Answer(200, {"fine": True})


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as api:
        yield api


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def http(api: ScriptedApi, clock: FakeClock) -> Http:
    return Http("cloud", api.url, KEY, clock, chance=lambda: 1.0)


def slept(clock: FakeClock) -> list[float]:
    """Every pause from now on, filled while the clock sleeps."""
    pauses: list[float] = []
    sleep = clock.sleep

    def remember(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    clock.sleep = remember  # type: ignore[method-assign]
    return pauses


def test_the_key_is_in_a_header_and_nowhere_else(api: ScriptedApi, http: Http) -> None:
    api.on("POST /x", FINE)
    http.request("POST", "/x", params={"a": "b c"}, body={"z": 1})
    (asked,) = api.asked
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["user-agent"] == f"pennypod/{__version__}"
    assert (asked.query, asked.body) == ({"a": "b c"}, {"z": 1})
    assert KEY not in asked.line
    assert KEY not in repr(http) + repr(vars(http)["_auth"])


def test_a_netrc_does_not_take_the_header_over(
    api: ScriptedApi, http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    api.on("GET /x", FINE)
    http.request("GET", "/x")
    assert http.fetch_plain(f"{api.url}/x") is not None
    assert [asked.headers.get("authorization") for asked in api.asked] == [f"Bearer {KEY}", None]


@pytest.mark.parametrize(
    "fault",
    [*(Answer(status, {"error": "busy"}) for status in (408, 500, 502, 503, 504, 524)), Answer(fault="drop")],
    ids=lambda answer: answer.fault or str(answer.status),
)
def test_a_passing_fault_is_tried_again(api: ScriptedApi, http: Http, fault: Answer) -> None:
    api.on("GET /x", fault, fault, FINE)
    assert http.request("GET", "/x").fields == {"fine": True}
    assert len(api.asked) == 3


def test_half_an_answer_to_a_read_is_asked_for_again(api: ScriptedApi, http: Http) -> None:
    api.on("GET /x", Answer(200, {"fine": "ha"}, fault="half"), FINE)
    assert http.request("GET", "/x").fields == {"fine": True}


def test_a_fault_that_does_not_pass_ends_after_growing_pauses(api: ScriptedApi, http: Http, clock: FakeClock) -> None:
    api.on("GET /x", Answer(503, {"error": "maintenance"}))
    pauses = slept(clock)
    with pytest.raises(TransientError, match="503 maintenance"):
        http.request("GET", "/x")
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    assert len(api.asked) == transport.ATTEMPTS


def test_pauses_are_capped_and_partly_random(api: ScriptedApi, clock: FakeClock) -> None:
    api.on("GET /x", Answer(503))
    pauses = slept(clock)
    with pytest.raises(TransientError):
        Http("cloud", api.url, KEY, clock, chance=lambda: 0.0, attempts=8).request("GET", "/x")
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 409, 410, 422])
def test_a_refusal_is_no_fault(api: ScriptedApi, http: Http, status: int) -> None:
    api.on("GET /x", Answer(status, {"error": "no"}))
    assert http.request("GET", "/x").status == status
    assert len(api.asked) == 1


# --- creates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    "answer",
    [
        *(Answer(status, {"error": "oops"}) for status in (408, 500, 502, 503, 504, 520, 524)),
        Answer(fault="drop"),
        Answer(200, {"id": "abc"}, fault="half"),
        Answer(200, "<html>fine</html>"),
        Answer(200, [1]),
        Answer(201, None),
    ],
    ids=lambda answer: f"{answer.status}{answer.fault}" if isinstance(answer, Answer) else answer,
)
def test_a_create_that_may_have_happened_is_ambiguous_and_sent_once(
    api: ScriptedApi, http: Http, clock: FakeClock, method: str, answer: Answer
) -> None:
    api.on(f"{method} /x", answer)
    pauses = slept(clock)
    with pytest.raises(AmbiguousError):
        http.create(method, "/x", body={"name": "lease"})
    assert len(api.asked) == 1
    assert pauses == []


def test_a_create_without_an_answer_in_time_is_ambiguous(
    api: ScriptedApi, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CREATE_S", 0.2)
    api.on("PUT /x", Answer(200, {"id": 1}, after_s=0.6))
    with pytest.raises(AmbiguousError, match="no answer in time"):
        http.create("PUT", "/x", body={})
    assert len(api.asked) == 1


def test_a_create_whose_answer_drips_is_cut_off(api: ScriptedApi, http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CREATE_S", 0.3)
    api.on("PUT /x", Answer(200, {"id": 1, "more": "x" * 40}, fault="drip"))
    with pytest.raises(AmbiguousError):
        http.create("PUT", "/x", body={})


def test_a_create_that_never_left_made_nothing(clock: FakeClock) -> None:
    with pytest.raises(TransientError, match="nothing was asked for"):
        Http("cloud", "http://127.0.0.1:9", KEY, clock).create("PUT", "/x", body={})


def test_a_create_does_not_trust_an_old_connection(api: ScriptedApi, http: Http) -> None:
    api.on("GET /x", FINE)
    api.on("POST /x", FINE)
    http.request("GET", "/x")
    http.request("GET", "/x")
    http.create("POST", "/x", body={})
    first, second, create = (asked.client_port for asked in api.asked)
    assert first == second != create


@pytest.mark.parametrize("status", [200, 201, 400, 401, 402, 403, 404, 409, 410, 413, 422, 429])
def test_a_create_returns_every_answer_that_says_what_happened(api: ScriptedApi, http: Http, status: int) -> None:
    api.on("POST /x", Answer(status, {"detail": "said"}))
    assert http.create("POST", "/x", body={}).status == status
    assert len(api.asked) == 1


@pytest.mark.parametrize("call", ["request", "create"])
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_nothing_is_sent_on_to_another_place(api: ScriptedApi, http: Http, call: str, status: int) -> None:
    api.on("PUT /x", Answer(status, None, {"Location": f"{api.url}/other?api_key=1"}))
    with pytest.raises(InvalidError, match="correct the address of cloud"):
        getattr(http, call)("PUT", "/x", body={})
    assert len(api.asked) == 1


# --- too many calls ---------------------------------------------------------------------------------------------------


def test_a_short_retry_after_is_waited_for(api: ScriptedApi, http: Http, clock: FakeClock) -> None:
    api.on("GET /x", Answer(429, {"detail": "slow down"}, {"Retry-After": "7"}), FINE)
    pauses = slept(clock)
    assert http.request("GET", "/x").ok
    assert pauses == [7.0]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "3600"}, 3600),
        ({"Retry-After": "Mon, 01 Dec 2025 15:40:00 GMT"}, 1764603600 - FakeClock().now()),
        ({"X-RateLimit-Reset": str(int(FakeClock().now()) + 500)}, 500),
    ],
)
def test_a_long_wait_is_the_callers_to_decide(
    api: ScriptedApi, http: Http, clock: FakeClock, headers: dict[str, str], seconds: float
) -> None:
    api.on("GET /x", Answer(429, {"detail": "come back later"}, headers))
    pauses = slept(clock)
    with pytest.raises(RateLimitedError) as caught:
        http.request("GET", "/x", endpoint="x")
    assert caught.value.retry_after_s == pytest.approx(seconds)
    assert (pauses, len(api.asked)) == ([], 1)
    with pytest.raises(RateLimitedError):
        http.request("GET", "/x", endpoint="x")
    assert len(api.asked) == 1  # it is not even asked before the time
    clock.time += seconds
    api.on("GET /x", FINE)
    assert http.request("GET", "/x", endpoint="x").ok


def test_a_429_without_a_time_is_tried_a_few_times(api: ScriptedApi, http: Http) -> None:
    api.on("GET /x", Answer(429, "API requests too frequent"))
    with pytest.raises(RateLimitedError, match="too frequent"):
        http.request("GET", "/x")
    assert len(api.asked) == transport.ATTEMPTS


def test_a_used_up_quota_is_not_tried_again(api: ScriptedApi, http: Http) -> None:
    api.on("POST /x", Answer(429, {"error": "quota_gone"}))
    with pytest.raises(RateLimitedError):
        http.request("POST", "/x", body={}, final_errors=("quota_gone",))
    assert len(api.asked) == 1


def test_calls_of_one_endpoint_keep_their_distance(api: ScriptedApi, clock: FakeClock) -> None:
    http = Http("cloud", api.url, KEY, clock, pacing=Pacing({"slow": 4.5}))
    api.on("GET /x", FINE)
    pauses = slept(clock)
    http.request("GET", "/x", endpoint="slow")
    http.request("GET", "/x", endpoint="other")
    assert pauses == []
    clock.time += 1.5
    http.request("GET", "/x", endpoint="slow")
    assert pauses == [3.0]
    clock.time += 100
    http.request("GET", "/x", endpoint="slow")
    assert pauses == [3.0]


def test_a_clock_set_back_does_not_stop_the_calls(api: ScriptedApi, clock: FakeClock) -> None:
    http = Http("cloud", api.url, KEY, clock, pacing=Pacing({"slow": 2.0}))
    api.on("GET /x", FINE)
    http.request("GET", "/x", endpoint="slow")
    clock.time -= 7200
    pauses = slept(clock)
    http.request("GET", "/x", endpoint="slow")
    assert pauses == [2.0]


# --- where the key never shows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
@pytest.mark.parametrize("call", ["request", "create"])
def test_a_service_that_repeats_the_key_does_not_get_it_into_an_error(
    api: ScriptedApi, http: Http, caplog: pytest.LogCaptureFixture, status: int, call: str
) -> None:
    caplog.set_level(logging.DEBUG)
    api.on("PUT /x", Answer(status, {"error": f"bad {KEY}", "msg": f"Bearer {KEY}", "detail": KEY}))
    texts: list[Any] = []
    try:
        reply = getattr(http, call)("PUT", "/x", body={})
        texts.append(http.say(reply))
    except PennypodError as exc:
        texts += [str(exc), repr(exc), exc.as_failure(), repr(exc.__cause__), repr(exc.__context__)]
    assert texts
    assert KEY not in repr(texts) + caplog.text


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://host.invalid"])
@pytest.mark.parametrize("call", ["request", "create"])
def test_no_connection_is_an_error_of_ours_without_the_key(clock: FakeClock, url: str, call: str) -> None:
    with pytest.raises(ProviderError) as caught:
        getattr(Http("cloud", url, KEY, clock), call)("PUT", "/x", body={})
    assert KEY not in str(caught.value) + repr(caught.value.__cause__)


def test_a_text_from_an_address_is_read_without_the_key(api: ScriptedApi, http: Http) -> None:
    api.on("GET /log", Answer(404), Answer(200, "line 1\nline 2"))
    assert http.fetch_plain(f"{api.url}/log") is None
    assert http.fetch_plain(f"{api.url}/log") == "line 1\nline 2"
    assert all("authorization" not in asked.headers for asked in api.asked)
    with pytest.raises(InvalidError):
        http.fetch_plain("file:///etc/passwd")


def test_pauses_double_up_to_a_cap(http: Http) -> None:
    pause: Callable[[int], float] = http._pause
    assert [pause(n) for n in (1, 2, 3, 4, 5, 9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_https_where_the_service_speaks_http_names_the_variable(api: ScriptedApi, clock: FakeClock) -> None:
    url = api.url.replace("http://", "https://")
    http = Http("vast", url, KEY, clock, attempts=1, address_variable="VAST_URL")
    with pytest.raises(TransientError) as caught:
        http.request("GET", "/x")
    assert "should VAST_URL begin with http:// instead of https://?" in str(caught.value)
    assert "HTTPSConnectionPool" not in str(caught.value)


def test_http_where_the_service_speaks_tls_names_the_variable(clock: FakeClock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"\x15\x03\x03\x00\x02\x02\x32\n")  # the TLS alert that OpenSSL sends

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransientError, match="should VAST_URL begin with https://"):
            Http("vast", url, KEY, clock, attempts=1, address_variable="VAST_URL").request("GET", "/x")
        thread.join()


def test_an_address_that_is_none_names_the_variable(clock: FakeClock) -> None:
    with pytest.raises(InputError, match="VAST_URL is not a plain http"):
        Http("vast", "vast.ai", KEY, clock, address_variable="VAST_URL")
