"""What exists on Vast, in which state, and how it ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from pennypod.errors import (
    AuthError,
    InvalidError,
    NoCapacityError,
    PennypodError,
    ProviderError,
    RateLimitedError,
    TransientError,
)
from pennypod.model.pod import PodState, SshAddress
from pennypod.providers.http import Http
from pennypod.providers.vast import VastProvider, _pod, pod_state
from scripted_api import KEY, Answer, ScriptedApi, scripted_api
from vast_shapes import instance_row, starting

LIST = "GET /api/v1/instances/"
GET = "GET /api/v0/instances/5678/"
DELETE = "DELETE /api/v0/instances/5678/"
WRONG_KEY = Answer(404, {"success": False, "error": "auth_error", "msg": "Invalid user key"})


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as api:
        yield api


@pytest.fixture
def vast(api: ScriptedApi) -> VastProvider:
    clock = FakeClock()
    return VastProvider(Http("vast", api.url, KEY, clock), clock)


def page(*rows: dict[str, Any], token: Any = None) -> Answer:
    return Answer(200, {"success": True, "instances_found": len(rows), "instances": list(rows), "next_token": token})


# --- the listing ------------------------------------------------------------------------------------------------------


def test_every_page_is_read(api: ScriptedApi, vast: VastProvider) -> None:
    first = [instance_row(number, f"label {number}") for number in range(1, 26)]
    api.on(LIST, page(*first, token="t1"), page(instance_row(26), token="t2"), page(instance_row(27)))
    assert [pod.pod_id for pod in vast.pods()] == [str(number) for number in range(1, 28)]
    assert [asked.query.get("after_token") for asked in api.asked] == [None, "t1", "t2"]
    assert all(asked.query["limit"] == "25" for asked in api.asked)
    assert all(asked.query["order_by"] == '[{"col":"id","dir":"asc"}]' for asked in api.asked)


def test_a_pod_in_the_listing_carries_its_lease(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(LIST, page(instance_row(5678, "pennypod-x"), instance_row(5679, None)))
    ours, other = vast.pods()
    assert (ours.name, ours.machine_id, ours.gpu, ours.created) == ("pennypod-x", "12", "RTX 4090", 1764600000.25)
    assert (ours.state, ours.price_micros_per_h) == (PodState.RUNNING, 304_167)
    assert other.name == ""


@pytest.mark.parametrize(
    "answer",
    [
        WRONG_KEY,
        Answer(410, {"success": False, "error": "deprecated_endpoint", "msg": "use another"}),
        Answer(404, "<html>not found</html>"),
        Answer(403, {"error": "forbidden"}),
        Answer(200, {"success": True}),
        Answer(200, {"success": True, "instances": None}),
        Answer(200, {"success": True, "instances": {}}),
        Answer(200, {"success": True, "instances": ["x"]}),
        Answer(200, {"success": True, "instances": [{"label": "no id"}]}),
        Answer(200, {"success": False, "instances": []}),
        Answer(200, []),
        Answer(200, "null"),
        Answer(500, {"error": "x"}),
        Answer(429, {"detail": "x"}),
        Answer(fault="drop"),
    ],
    ids=lambda answer: f"{answer.status}{answer.fault}",
)
def test_a_listing_that_failed_never_looks_empty(api: ScriptedApi, vast: VastProvider, answer: Answer) -> None:
    api.on(LIST, answer)
    with pytest.raises(ProviderError):
        vast.pods()


@pytest.mark.parametrize("second", [Answer(500), page(instance_row(2), token="t1"), page(instance_row(2), token=7)])
def test_a_listing_that_breaks_off_never_looks_whole(api: ScriptedApi, vast: VastProvider, second: Answer) -> None:
    api.on(LIST, page(instance_row(1), token="t1"), second)
    with pytest.raises(TransientError):
        vast.pods()


def test_a_listing_short_of_its_own_count_is_read_again(api: ScriptedApi, vast: VastProvider) -> None:
    def counted(*rows: dict[str, Any]) -> Answer:
        return Answer(200, {"success": True, "instances": list(rows), "next_token": None, "total_instances": 2})

    api.on(LIST, counted(instance_row(1)), counted(instance_row(1), instance_row(2)))
    assert [pod.pod_id for pod in vast.pods()] == ["1", "2"]


def test_a_listing_that_stays_short_of_its_own_count_is_no_listing(api: ScriptedApi, vast: VastProvider) -> None:
    """Absence from it would prove nothing."""
    short = Answer(200, {"success": True, "instances": [instance_row(1)], "next_token": None, "total_instances": 2})
    api.on(LIST, short)
    with pytest.raises(TransientError, match="1 of 2"):
        vast.pods()


# --- one pod ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, {"instances": None}),
        Answer(200, {"instances": {}}),
        Answer(200, {"instances": []}),
        Answer(404, {"success": False, "error": "no_such_instance", "msg": "Instance 5678 not found."}),
        Answer(404, {"success": False, "error": "not_found", "msg": "x"}),
    ],
)
def test_absence_is_said_plainly(api: ScriptedApi, vast: VastProvider, answer: Answer) -> None:
    api.on(GET, answer)
    assert vast.pod("5678") is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (WRONG_KEY, AuthError),
        (Answer(404, {"msg": "Session expired. Please log in again."}), AuthError),
        (Answer(401, {"msg": "Invalid user key"}), AuthError),
        (Answer(404, "<html>not found</html>"), InvalidError),
        (Answer(404, {"error": "no_such_page"}), InvalidError),
        (Answer(410, {"error": "deprecated_endpoint"}), InvalidError),
        (Answer(200, {}), TransientError),
        (Answer(200, {"instances": instance_row(1)}), TransientError),
        (Answer(200, "null"), TransientError),
        (Answer(503), TransientError),
        (Answer(429, {"detail": "x"}), RateLimitedError),
    ],
)
def test_an_error_is_never_absence(
    api: ScriptedApi, vast: VastProvider, answer: Answer, error: type[ProviderError]
) -> None:
    api.on(GET, answer)
    with pytest.raises(error):
        vast.pod("5678")


def test_one_pod_is_asked_for_as_its_owner(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(GET, Answer(200, {"instances": instance_row()}))
    pod = vast.pod("5678")
    assert pod is not None
    assert api.asked[0].query == {"owner": "me"}


# --- states -----------------------------------------------------------------------------------------------------------

RUNNING, STARTING, STOPPED, FAILED = PodState.RUNNING, PodState.STARTING, PodState.STOPPED, PodState.FAILED


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, RUNNING),
        ({"actual_status": None, "status_msg": None}, STARTING),
        ({"actual_status": "created", "status_msg": None}, STARTING),
        (starting("latest: Pulling from vastai/pytorch"), STARTING),
        (starting("Unable to find image 'x:y' locally"), STARTING),
        (starting("tls handshake timeout"), STARTING),
        ({"actual_status": "rebooting"}, STARTING),
        (starting("Error response from daemon: manifest for x:y not found"), FAILED),
        (starting("OCI runtime create failed: runc"), FAILED),
        (starting("write /var/lib: no space left on device"), FAILED),
        (starting(None, intended_status="stopped"), FAILED),  # Vast gave up after some minutes
        ({"intended_status": "stopped"}, FAILED),
        ({"cur_state": "unloaded"}, FAILED),
        ({"actual_status": "exited"}, STOPPED),
        ({"actual_status": "stopped", "intended_status": "stopped"}, STOPPED),
        ({"actual_status": "frozen"}, STOPPED),
        ({"actual_status": "unknown"}, FAILED),
        ({"actual_status": "offline"}, FAILED),
        ({"actual_status": "a word of tomorrow"}, FAILED),
    ],
)
def test_the_state_table(changes: dict[str, Any], state: PodState) -> None:
    assert pod_state(instance_row(**changes))[0] is state


def test_pull_progress_shows_and_changes() -> None:
    looks = [pod_state(instance_row(**starting(text)))[1] for text in ("a: Pulling fs layer\n", "a: Pull complete")]
    assert looks == ["loading a: Pulling fs layer", "loading a: Pull complete"]


@given(
    st.dictionaries(
        st.sampled_from(
            ["actual_status", "intended_status", "cur_state", "status_msg", "ports", "ssh_port", "label", "uptime_mins"]
        ),
        st.none() | st.text(max_size=20) | st.integers() | st.lists(st.integers(), max_size=2) | st.booleans(),
    )
)
def test_whatever_a_row_holds_it_is_a_state_or_an_error_of_ours(changes: dict[str, Any]) -> None:
    with contextlib.suppress(PennypodError):
        assert _pod(instance_row(**changes), 1764600000.0).state in PodState


def test_the_direct_way_comes_first_and_the_proxy_second(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(GET, Answer(200, {"instances": instance_row()}))
    pod = vast.pod("5678")
    assert pod is not None
    assert pod.addresses == (SshAddress("192.0.2.45", 20000), SshAddress("ssh5.vast.ai", 10600))


@pytest.mark.parametrize(
    "changes",
    [
        {"ports": None},
        {"ports": {}},
        {"ports": {"22/tcp": []}},
        {"ports": {"22/tcp": [{"HostPort": ""}]}},
        {"public_ipaddr": None},
    ],
)
def test_without_a_mapped_port_the_proxy_is_the_way(
    api: ScriptedApi, vast: VastProvider, changes: dict[str, Any]
) -> None:
    api.on(GET, Answer(200, {"instances": instance_row(**changes)}))
    pod = vast.pod("5678")
    assert pod is not None
    assert pod.addresses == (SshAddress("ssh5.vast.ai", 10600),)


def test_a_starting_pod_has_no_address_yet(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(GET, Answer(200, {"instances": instance_row(**starting("pulling"))}))
    pod = vast.pod("5678")
    assert pod is not None
    assert pod.address is None


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, {"success": True}),
        Answer(404, {"success": False, "error": "no_such_instance", "msg": "Instance 5678 not found."}),
        Answer(404, {"success": False, "error": "not_found"}),
    ],
)
def test_destroying_is_idempotent(api: ScriptedApi, vast: VastProvider, answer: Answer) -> None:
    api.on(DELETE, answer)
    vast.destroy("5678")
    assert api.asked[0].body == {}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (WRONG_KEY, AuthError),
        (Answer(200, {"success": False, "msg": "busy"}), InvalidError),
        (Answer(200, {}), TransientError),
        (Answer(404, "<html>"), InvalidError),
        (Answer(500), TransientError),
    ],
)
def test_a_destroy_that_was_not_confirmed_is_an_error(
    api: ScriptedApi, vast: VastProvider, answer: Answer, error: type[ProviderError]
) -> None:
    api.on(DELETE, answer)
    with pytest.raises(error):
        vast.destroy("5678")


@pytest.mark.parametrize("answer", [Answer(500), Answer(fault="drop"), Answer(429)])
def test_a_destroy_is_one_call_whatever_comes_of_it(api: ScriptedApi, vast: VastProvider, answer: Answer) -> None:
    """Calls are counted and paced for all processes together, in the ledger."""
    api.on(DELETE, answer)
    with pytest.raises(ProviderError):
        vast.destroy("5678")
    assert len(api.asked) == 1


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "micros"),
    [
        ({"credit": 12.5, "balance": 0}, 12_500_000),
        ({"credit": 0, "balance": 3.25}, 3_250_000),
        ({"balance": -1.5}, -1_500_000),
        ({"credit": None}, None),
        ({}, None),
    ],
)
def test_the_balance(api: ScriptedApi, vast: VastProvider, user: dict[str, Any], micros: int | None) -> None:
    api.on("GET /api/v0/users/current/", Answer(200, {"id": 1, "api_key": "other-secret", **user}))
    assert vast.balance_micros() == micros


def test_whose_key_it_is_comes_with_the_balance(api: ScriptedApi, vast: VastProvider) -> None:
    api.on("GET /api/v0/users/current/", Answer(200, {"id": 4711, "credit": 1.0}))
    vast.balance_micros()
    assert [vast.holder(), vast.holder()] == ["4711", "4711"]
    assert len(api.asked) == 1
    assert KEY not in vast.key_mark()


def test_a_key_may_not_be_let_know_whose_it_is(api: ScriptedApi, vast: VastProvider) -> None:
    api.on("GET /api/v0/users/current/", Answer(403, {"success": False, "error": "no_scope"}))
    assert vast.holder() is None


def test_logs_come_from_another_address_without_the_key(api: ScriptedApi, vast: VastProvider) -> None:
    api.on("PUT /api/v0/instances/request_logs/5678/", Answer(200, {"success": True, "result_url": f"{api.url}/log"}))
    api.on("GET /log", Answer(404), Answer(403), Answer(200, "line 1"))
    assert vast.logs("5678", tail=50) == "line 1"
    assert api.asked[0].body == {"tail": "50"}
    assert [asked.headers.get("authorization") for asked in api.calls("GET /log")] == [None] * 3


def test_charges_are_read_page_by_page(api: ScriptedApi, vast: VastProvider) -> None:
    row = {"source": "instance-5678", "amount": 0.01, "metadata": {"label": "pennypod-x"}, "items": []}
    api.on("GET /api/v0/charges/", Answer(200, {"results": [row], "next_token": "n"}), Answer(200, {"results": [row]}))
    assert vast.charges(100.0, 200.0) == [row, row]
    assert api.asked[0].query["select_filters"] == '{"day": {"gte": 100.0, "lte": 200.0}, "type": {"in": ["instance"]}}'


def test_a_label_is_set(api: ScriptedApi, vast: VastProvider) -> None:
    api.on("PUT /api/v0/instances/5678/", Answer(200, {"success": True}))
    vast.label("5678", "mine")
    assert api.asked[0].body == {"label": "mine"}


def test_the_spend_rate_tells_whether_anything_is_left(api: ScriptedApi, vast: VastProvider) -> None:
    api.on("GET /api/v0/users/spend-rate/", Answer(200, {"gpu_cost_per_hour": 0, "has_active_resources": False}))
    assert vast.spend_rate()["has_active_resources"] is False


@pytest.mark.parametrize(
    ("answer", "micros"),
    [
        (Answer(200, {"gpu_cost_per_hour": 0.4, "container_storage_cost_per_hour": 0.01}), 410_000),
        (Answer(200, {"gpu_cost_per_hour": 0, "volume_storage_cost_per_hour": 3.0}), 0),
        (Answer(403, {"success": False, "error": "forbidden", "msg": "no scope"}), None),
    ],
)
def test_what_instances_cost_now_leaves_out_what_outlives_them(
    api: ScriptedApi, vast: VastProvider, answer: Answer, micros: int | None
) -> None:
    api.on("GET /api/v0/users/spend-rate/", answer)
    assert vast.spend_micros_per_h() == micros


@pytest.mark.parametrize("answer", [Answer(502), Answer(200, {}), Answer(200, [])])
def test_a_spend_rate_that_failed_is_not_zero(api: ScriptedApi, vast: VastProvider, answer: Answer) -> None:
    api.on("GET /api/v0/users/spend-rate/", answer)
    with pytest.raises(TransientError):
        vast.spend_micros_per_h()


def test_vast_needs_no_preparation(api: ScriptedApi, vast: VastProvider) -> None:
    vast.prepare("image", lambda _text: None)
    assert (api.asked, vast.name) == ([], "vast")


def test_a_key_that_a_pod_has_lost_is_registered_anew(api: ScriptedApi, vast: VastProvider) -> None:
    rows = [{"id": 7, "public_key": "ssh-ed25519 OTHER x"}, {"id": 8, "public_key": "ssh-ed25519 AAAA run"}]
    place = "/api/v0/instances/5678/ssh/"
    api.on(f"GET {place}", Answer(200, {"success": True, "ssh_keys": json.dumps(rows)}))
    api.on(f"DELETE {place}8/", Answer(200, {"success": True}))
    api.on(f"POST {place}", Answer(200, {"success": True}))
    vast.renew_key("5678", "ssh-ed25519 AAAA pennypod")
    assert [(asked.method, asked.path) for asked in api.asked] == [
        ("GET", place),
        ("DELETE", f"{place}8/"),
        ("POST", place),
    ]


@pytest.mark.parametrize("listed", ["", "[", "{}", None, [{"id": "x", "public_key": "ssh-ed25519 AAAA"}]])
def test_a_list_of_keys_that_says_nothing_only_means_to_attach(
    api: ScriptedApi, vast: VastProvider, listed: Any
) -> None:
    api.on("GET /api/v0/instances/5678/ssh/", Answer(200, {"success": True, "ssh_keys": listed}))
    api.on("POST /api/v0/instances/5678/ssh/", Answer(200, {"success": True}))
    vast.renew_key("5678", "ssh-ed25519 AAAA pennypod")
    assert len(api.asked) == 2


def test_host_keys_are_read_from_the_log_of_the_pod_rented_under_that_name(
    api: ScriptedApi, vast: VastProvider
) -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0oxLPVh6nQ9xVU1h0Wl9M1s3JzYkq3TnWbBz4sXq1P"
    lines = [f"pennypod-host-keys {name} {words}" for name in ("other", "mine") for words in ("begin", key, "end")]
    lines[1] = lines[1].replace("AAAA", "BBBB")
    api.on("PUT /api/v0/instances/request_logs/5678/", Answer(200, {"success": True, "result_url": f"{api.url}/log"}))
    api.on("GET /log", Answer(200, "\n".join(lines)))
    assert vast.host_keys("5678", "mine") == [key]
    assert api.asked[0].body == {"tail": "5000", "filter": "mine"}


def test_a_start_whose_gpus_are_taken_is_no_start(api: ScriptedApi, vast: VastProvider) -> None:
    busy = {"success": False, "error": "resources_unavailable", "msg": "Required resources unavailable, queued."}
    api.on("PUT /api/v0/instances/5678/", Answer(200, {"success": True}), Answer(200, busy))
    vast.start("5678")
    with pytest.raises(NoCapacityError):
        vast.start("5678")
    assert [call.body for call in api.calls("PUT /api/v0/instances/5678/")] == [{"state": "running"}] * 2
