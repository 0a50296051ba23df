"""The simulator over HTTP: the providers' shapes and words, the faults of calls, its own controls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from pennypod.simulator.clock import VirtualClock
from pennypod.simulator.pods import Ghosts
from pennypod.simulator.server import Simulator
from pennypod.simulator.state import World
from simulator_calls import GPU, KEY, Caller, simulator_calls

SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0oxLPVh6nQ9xVU1h0Wl9M1s3JzYkq3TnWbBz4sXq1P someone"


@pytest.fixture
def call() -> Iterator[Caller]:
    with simulator_calls() as caller:
        yield caller


# --- Vast -------------------------------------------------------------------------------------------------------------


def test_a_vast_instance_from_search_to_destroy(call: Caller) -> None:
    reply = call("POST", "/api/v0/bundles/", {"limit": 3})
    assert reply.headers["Content-Type"] == "application/json"
    number = call.vast()
    assert call.instance(number)["actual_status"] is None
    call.later(12)
    row = call.instance(number)
    assert row["actual_status"] == "running"
    assert row["label"] == "pennypod-x"
    assert row["local_ipaddrs"].endswith("\n"), "strings come unstripped"
    assert call.ok("DELETE", f"/api/v0/instances/{number}/", {}) == {"success": True}
    assert call.instance(number) is None
    again = call("DELETE", f"/api/v0/instances/{number}/", {})
    assert (again.status_code, again.json()["error"]) == (404, "no_such_instance")
    assert call.ok("GET", "/api/v0/users/spend-rate/")["has_active_resources"] is False


def test_vast_says_a_bad_key_like_a_missing_thing(call: Caller) -> None:
    for headers, code, msg in (
        ({"Authorization": "Bearer bad-key"}, 404, "Invalid user key"),
        ({"Authorization": ""}, 403, "This action requires login."),
    ):
        reply = call("GET", "/api/v1/instances/", headers=headers)
        assert (reply.status_code, reply.json()["error"], reply.json()["msg"]) == (code, "auth_error", msg)


def test_the_old_listing_is_gone_and_never_looks_empty(call: Caller) -> None:
    reply = call("GET", "/api/v0/instances/?owner=me")
    assert (reply.status_code, reply.json()["error"]) == (410, "deprecated_endpoint")
    old = call("GET", "/v1/pods")
    assert old.status_code == 410
    assert "error" in old.json()


def test_offers_are_single_use_and_cancel_unavail_decides_what_a_late_create_leaves(call: Caller) -> None:
    offer = call.offer()
    body = {"image": "an/image:1", "disk": 20, "label": "first"}
    call.ok("PUT", f"/api/v0/asks/{offer}/", body)
    late = call("PUT", f"/api/v0/asks/{offer}/", body)
    assert (late.status_code, late.json()["error"]) == (410, "no_such_ask")
    left = call.ok("PUT", f"/api/v0/asks/{offer}/", body | {"cancel_unavail": False})
    assert left["success"] is False
    row = call.instance(left["new_contract"])
    assert (row["intended_status"], row["cur_state"]) == ("stopped", "stopped")
    call.later(3600)
    meter = {item["id"]: item for item in call.ok("GET", "/_sim/meter")["pods"]}[str(left["new_contract"])]
    assert meter["by_kind"].get("gpu", 0) == 0
    assert meter["by_kind"]["disk"] > 0
    unknown = call("PUT", "/api/v0/asks/1/", body)
    assert (unknown.status_code, unknown.json()["error"]) == (404, "no_such_ask")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"image": None}, "invalid_args", "image"),
        ({"disk": 4}, "invalid_args", "disk"),
        ({"disk": 1e9}, "invalid_args", "disk"),
        ({"runtype": "telnet"}, "invalid_args", "runtype"),
        ({"env": "-e A=b"}, "invalid_args", "env"),
        ({"onstart": "x" * 5000}, "invalid_args", "4096"),
        ({"label": "x" * 300}, "label_too_long", "label"),
        ({"price": 0.0001}, "invalid_price", "price"),
        ({"price": 0.002}, "invalid_price", "minimum"),
    ],
)
def test_what_vast_refuses(call: Caller, change: dict[str, Any], error: str, says: str) -> None:
    body = {"image": "an/image:1", "disk": 20} | change
    reply = call("PUT", f"/api/v0/asks/{call.offer()}/", body)
    assert (reply.status_code, reply.json()["error"]) == (400, error)
    assert says in reply.json()["msg"]
    assert call.live() == []


def test_vast_pages_of_25_with_tokens_filters_and_columns(call: Caller) -> None:
    call.ok("POST", "/_sim/clock", {"advance": 1})
    numbers = [call.vast(label=f"pennypod-{index % 2}") for index in range(27)]
    seen, token, pages = [], "", 0
    while True:
        path = "/api/v1/instances/?limit=100" + (f"&after_token={token}" if token else "")
        page = call.ok("GET", path)
        assert page["total_instances"] == 27
        seen += [row["id"] for row in page["instances"]]
        pages += 1
        token = page["next_token"]
        if token is None:
            break
    assert (pages, seen) == (2, sorted(numbers))
    assert page["label_counts"] == {"pennypod-0": 14, "pennypod-1": 13}
    params = {"select_filters": json.dumps({"label": {"in": ["pennypod-1"]}}), "select_cols": '["id","label"]'}
    some = call.ok("GET", "/api/v1/instances/", params=params)["instances"]
    assert len(some) == 13
    assert all(set(row) == {"id", "label"} for row in some)
    computed = call("GET", "/api/v1/instances/", params={"select_filters": '{"dph_total":{"lt":1}}'})
    assert (computed.status_code, computed.json()["error"]) == (400, "invalid_request")
    token = call("GET", "/api/v1/instances/", params={"after_token": "nonsense"})
    assert (token.status_code, token.json()["error"]) == (400, "invalid_token")
    assert len(call.ok("GET", "/api/v1/instances/?limit=0")["instances"]) == 5


def test_vast_keys_of_account_and_instance(call: Caller) -> None:
    made = call.ok("POST", "/api/v0/ssh/", {"ssh_key": SSH_KEY})
    assert made["key"]["public_key"] == SSH_KEY
    assert [key["public_key"] for key in call.ok("GET", "/api/v0/ssh/")] == [SSH_KEY]
    number = call.vast()
    attached = json.loads(call.ok("GET", f"/api/v0/instances/{number}/ssh/")["ssh_keys"])
    assert [key["public_key"] for key in attached] == [SSH_KEY], "account keys come along at creation"
    other = SSH_KEY.replace("someone", "other")
    assert isinstance(call.ok("POST", f"/api/v0/instances/{number}/ssh/", {"ssh_key": other})["key"], str)
    twice = call("POST", f"/api/v0/instances/{number}/ssh/", {"ssh_key": other})
    assert (twice.status_code, twice.json()["success"]) == (200, False)
    assert "already associated" in twice.json()["msg"]
    assert call("DELETE", "/api/v0/ssh/77/").json()["error"] == "no_ssh_key"


def test_an_instances_own_key_acts_on_that_instance_only(call: Caller) -> None:
    body = {"image": "an/image:1", "disk": 20}
    mine = call.ok("PUT", f"/api/v0/asks/{call.offer()}/", body)
    other = call.vast()
    headers = {"Authorization": f"Bearer {mine['instance_api_key']}"}
    assert call("GET", "/api/v1/instances/", headers=headers).status_code == 403
    assert call("GET", "/api/v0/users/current/", headers=headers).status_code == 403
    assert call("PUT", f"/api/v0/asks/{call.offer()}/", body, headers=headers).status_code == 403
    assert call("DELETE", f"/api/v0/instances/{other}/", {}, headers=headers).status_code == 404
    number = mine["new_contract"]
    assert call("PUT", f"/api/v0/instances/{number}/", {"label": "another"}, headers=headers).status_code == 403
    assert call("GET", f"/api/v0/instances/{number}/ssh/", headers=headers).status_code == 403
    stopped = call("PUT", f"/api/v0/instances/{number}/", {"state": "stopped"}, headers=headers)
    assert stopped.json() == {"success": True}
    assert call("DELETE", f"/api/v0/instances/{number}/", {}, headers=headers).json() == {"success": True}
    after = call("DELETE", f"/api/v0/instances/{number}/", {}, headers=headers)
    assert after.json()["error"] == "auth_error", "the key dies with its instance"


def test_a_fault_may_be_for_the_pods_own_key_alone(call: Caller) -> None:
    """How it is rehearsed that a pod's key may not delete, which is unproven at RunPod."""
    mine = call.ok("PUT", f"/api/v0/asks/{call.offer()}/", {"image": "an/image:1", "disk": 20})
    place = f"/api/v0/instances/{mine['new_contract']}/"
    call.ok("POST", "/_sim/faults", {"endpoint": "vast.destroy", "fault": "forbidden", "where": {"key": "pod"}})
    own = {"Authorization": f"Bearer {mine['instance_api_key']}"}
    assert call("DELETE", place, {}, headers=own).status_code == 403
    assert call("PUT", place, {"state": "stopped"}, headers=own).status_code == 200
    assert call("DELETE", place, {}).status_code == 200


def test_vast_logs_are_ready_a_little_later_and_need_no_key(call: Caller) -> None:
    number = call.vast()
    place = call.ok("PUT", f"/api/v0/instances/request_logs/{number}/", {"tail": "10"})["result_url"]
    assert requests.get(place, timeout=5).status_code != 200
    call.later(1)
    reply = requests.get(place, timeout=5)
    assert (reply.status_code, reply.text) == (200, "an/image:1: ghost pod, no container\n")


def test_vast_charges_need_both_days_and_name_the_label(call: Caller) -> None:
    number = call.vast()
    call.later(3600)
    assert call("GET", "/api/v0/charges/", params={"select_filters": "{}"}).status_code == 400
    now = call.ok("GET", "/_sim/clock")["now"]
    params = {"select_filters": json.dumps({"day": {"gte": now - 86400, "lte": now + 86400}})}
    rows = call.ok("GET", "/api/v0/charges/", params=params)["results"]
    assert [row["source"] for row in rows] == [f"instance-{number}"]
    assert rows[0]["metadata"]["label"] == "pennypod-x"
    assert {item["type"] for item in rows[0]["items"]} == {"gpu", "disk"}
    assert rows[0]["amount"] == round(call.ok("GET", "/_sim/meter")["total_micros"] / 1e6, 3)


def test_vast_state_changes(call: Caller) -> None:
    number = call.vast()
    call.later(12)
    one = f"/api/v0/instances/{number}/"
    assert call.ok("PUT", one, {"state": "stopped"}) == {"success": True}
    assert call.instance(number)["actual_status"] == "exited"
    reboot = call("PUT", f"/api/v0/instances/reboot/{number}/", {})
    assert (reboot.status_code, reboot.json()["success"], reboot.json()["error"]) == (200, False, "invalid_id")
    call.ok("PUT", one, {"state": "running"})
    call.later(12)
    assert call.instance(number)["actual_status"] == "running"
    call.ok("PUT", one, {"label": "other"})
    assert call.instance(number)["label"] == "other"
    assert call("PUT", one, {"label": "x" * 2000}).json()["error"] == "label_too_long"
    assert call("PUT", one, {"state": "asleep"}).status_code == 400


# --- RunPod -----------------------------------------------------------------------------------------------------------


def test_a_runpod_pod_from_create_to_gone(call: Caller) -> None:
    made = call.runpod(disk=20, env={"PUBLIC_KEY": SSH_KEY})
    assert made.status_code == 201
    pod = made.json()
    assert (pod["status"], pod["runtime"], pod["ssh"]["direct"], pod["startedAt"]) == ("PROVISIONING", None, None, None)
    one = f"/v2/pods/{pod['id']}"
    call.later(2)
    early = call.ok("GET", one)
    assert (early["status"], early["runtime"], early["ssh"]["direct"]) == ("RUNNING", None, None)
    call.later(12)
    ready = call.ok("GET", one)
    assert ready["ssh"]["direct"]["username"] == "root"
    mapped = [item for item in ready["runtime"]["ports"] if item["private"] == 22 and item["type"] == "tcp"]
    assert [item["public"] for item in mapped] == [ready["ssh"]["direct"]["port"]]
    assert ready["cost"] == pytest.approx(0.69 + 20 * 0.1 / 720, abs=1e-6)
    gone = call("DELETE", one)
    assert (gone.status_code, gone.content) == (204, b"")
    assert call("GET", one).status_code == call("DELETE", one).status_code == 404
    assert call.ok("GET", "/v2/pods")["pods"] == []


def test_runpod_without_port_22_has_no_direct_ssh(call: Caller) -> None:
    pod = call.runpod(ports=["8888/http"]).json()
    call.later(12)
    row = call.ok("GET", f"/v2/pods/{pod['id']}")
    assert row["runtime"] is not None
    assert row["ssh"]["direct"] is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"bogus": 1}, "$: additional properties 'bogus' not allowed"),
        ({"gpu": {"id": GPU, "count": 0}}, "$.gpu.count: value must be >= 1, but got 0"),
        ({"gpu": {"id": GPU, "count": 1, "kind": "x"}}, "$.gpu: additional properties 'kind' not allowed"),
        ({"cloud": "ALL"}, "$.cloud: value must be one of 'SECURE', 'COMMUNITY'"),
        ({"env": {"A": 1}}, "$.env.A: value must be string"),
        ({"name": ""}, "$.name: length must be >= 1, but got 0"),
        ({"disk": 2.5}, "$.disk: value must be integer"),
    ],
)
def test_runpods_create_is_a_closed_schema(call: Caller, change: dict[str, Any], error: str) -> None:
    reply = call.runpod(**change)
    assert (reply.status_code, reply.headers["Content-Type"]) == (422, "application/problem+json")
    assert reply.json()["errors"] == [error]


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": {"id": GPU}},  # documented default 1; the scheduler finds nothing
        {"gpu": {"id": "NVIDIA Nothing", "count": 1}},
        {"gpu": {"id": GPU, "count": 1, "allowedCudaVersions": ["11.1"]}},
        {"gpu": {"id": GPU, "count": 1, "minCudaVersion": "99.0"}},
        {"dataCenterIds": ["EU-RO-1"]},
    ],
)
def test_runpod_says_no_capacity_as_a_400(call: Caller, change: dict[str, Any]) -> None:
    reply = call.runpod(**change)
    assert reply.status_code == 400
    assert reply.json()["detail"].startswith("There are no longer any instances available")


def test_runpods_other_refusals(call: Caller) -> None:
    assert call.runpod(cpu={"id": "cpu3c", "vcpuCount": 2}).status_code == 400
    assert call.runpod(templateId="nope").status_code == 404
    call.ok("POST", "/_sim/balance", {"provider": "runpod", "usd": 0})
    poor = call.runpod()
    assert (poor.status_code, poor.json()["detail"]) == (402, "Your account balance is too low to rent a pod")
    big = call("POST", "/v2/pods", {"name": "x" * 110_000}, headers={"Authorization": ""})
    assert big.status_code == 413, "the size is looked at before the key"
    nobody = call("GET", "/v2/pods", headers={"Authorization": ""})
    assert (nobody.status_code, nobody.json()["detail"]) == (401, "missing bearer token")
    wrong = call("PUT", "/v2/pods")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "GET, POST")
    assert wrong.headers["x-request-id"]


def test_runpod_pages_and_actions(call: Caller) -> None:
    ids = [call.runpod().json()["id"] for _ in range(5)]
    seen, cursor = [], ""
    while True:
        page = call.ok("GET", "/v2/pods", params={"limit": 2, "cursor": cursor, "unknown": "ignored"})
        seen += [row["id"] for row in page["pods"]]
        cursor = page["pagination"]["nextCursor"]
        assert (cursor is not None) == page["pagination"]["hasNextPage"]
        if cursor is None:
            break
    assert sorted(seen) == sorted(ids)
    assert page["pods"][0]["env"] is None
    call.later(12)
    one = f"/v2/pods/{ids[0]}"
    assert call("POST", one + "/action", {"action": "start"}).status_code == 409
    assert call("POST", one + "/action", {"action": "reset"}).status_code == 422
    stopped = call.ok("POST", one + "/action", {"action": "stop"})
    assert (stopped["status"], stopped["actions"], stopped["ssh"]["direct"]) == ("EXITED", ["start", "terminate"], None)
    assert call("POST", one + "/action", {"action": "terminate"}).status_code == 204


def test_runpods_catalogue_and_bill(call: Caller) -> None:
    assert call("GET", "/v2/catalog/gpus?include=AVAILABILITY").status_code == 400
    row = call.ok("GET", "/v2/catalog/gpus?include=AVAILABILITY&product=POD&count=1&cloud=COMMUNITY")["gpus"][0]
    assert (row["id"], row["availability"], row["price"]) == (GPU, "HIGH", {"secure": 0.69, "community": 0.34})
    one = call.ok("GET", "/v2/catalog/gpus/NVIDIA%20GeForce%20RTX%204090")
    assert "availability" not in one
    pod = call.runpod().json()["id"]
    call.later(7200)
    bill = call.ok("GET", "/v2/billing/pods?bucketSize=hour&lastN=24")
    assert bill["metadata"]["uniquePodCount"] == 1
    assert {record["podId"] for record in bill["records"]} == {pod}
    total = sum(record["totalAmount"] for record in bill["records"])
    assert total == pytest.approx(call.ok("GET", "/_sim/meter")["total_micros"] / 1e6, abs=3e-6)


def test_the_balance_by_graphql(call: Caller) -> None:
    body = {"query": "query Q($n: Int) { me: myself { clientBalance currentSpendPerHr spendLimit } }", "variables": {}}
    assert call.ok("POST", "/graphql", body)["data"]["me"] == {
        "clientBalance": 100.0,
        "currentSpendPerHr": 0.0,
        "spendLimit": 80,
    }
    nobody = call("POST", "/graphql", {"query": "{ myself { id } }"}, headers={"Authorization": "Bearer bad"})
    assert nobody.status_code == 200
    assert nobody.json()["errors"][0]["message"] == "Unauthorized"
    assert nobody.json()["data"] == {"myself": None}
    for query, code in (("{ myself { shoe } }", "GRAPHQL_VALIDATION_FAILED"), ("{ myself {", "GRAPHQL_PARSE_FAILED")):
        reply = call("POST", "/graphql", {"query": query})
        assert (reply.status_code, reply.json()["errors"][0]["extensions"]["code"]) == (400, code)
    assert call.ok("POST", "/graphql", {"query": '{ pod(input: {podId: "none"}) { id } }'})["data"] == {"pod": None}


# --- faults of calls --------------------------------------------------------------------------------------------------


def create(call: Caller, provider: str) -> requests.Response:
    if provider == "runpod":
        return call.runpod()
    return call("PUT", f"/api/v0/asks/{call.offer()}/", {"image": "an/image:1", "disk": 20})


@pytest.mark.parametrize("provider", ["vast", "runpod"])
@pytest.mark.parametrize(
    ("fault", "options", "status", "made"),
    [
        ("error", {"status": 503}, 503, 0),
        ("error_after_commit", {}, 500, 1),
        ("rate_limited", {}, 429, 0),
        ("forbidden", {}, 403, 0),
    ],
)
def test_faults_before_and_after_the_create_takes_effect(
    call: Caller, provider: str, fault: str, options: dict[str, Any], status: int, made: int
) -> None:
    call.fault(f"{provider}.create", fault, nth=1, **options)
    assert create(call, provider).status_code == status
    assert len(call.live()) == made
    assert create(call, provider).ok, "only the first call is struck"


@pytest.mark.parametrize("provider", ["vast", "runpod"])
def test_a_lost_reply_leaves_a_pod_and_no_answer(call: Caller, provider: str) -> None:
    call.fault(f"{provider}.create", "lost_reply", nth=1)
    with pytest.raises(requests.ConnectionError):
        create(call, provider)
    assert len(call.live()) == 1


def test_the_providers_own_words_for_faults(call: Caller) -> None:
    for endpoint, fault, options, status, text in (
        ("vast.create", "vanished_offer", {}, 404, "no_such_ask"),
        ("vast.create", "vanished_offer", {"status": 410}, 410, "no_such_ask"),
        ("vast.create", "no_capacity", {}, 410, "no longer available"),
        ("vast.create", "low_balance", {}, 400, "You lack credit"),
        ("vast.create", "auth", {}, 404, "auth_error"),
        ("runpod.create", "no_capacity", {}, 400, "no longer any instances"),
        ("runpod.create", "low_balance", {}, 402, "too low to rent"),
        ("runpod.create", "auth", {}, 401, "api key"),
        ("runpod.create", "forbidden", {"html": True}, 403, "error code: 1010"),
    ):
        call.ok("DELETE", "/_sim/faults")
        call.fault(endpoint, fault, **options)
        reply = create(call, endpoint.partition(".")[0])
        assert reply.status_code == status, (endpoint, fault)
        assert text in reply.text, (endpoint, fault)
    assert call.live() == []


def test_a_create_that_fails_and_yet_names_its_contract(call: Caller) -> None:
    call.fault("vast.create", "error_with_id")
    reply = create(call, "vast")
    assert (reply.status_code, reply.json()["success"]) == (200, False)
    assert call.instance(reply.json()["new_contract"])["intended_status"] == "stopped"


def test_a_vanished_offer_is_not_in_the_next_search(call: Caller) -> None:
    offer = call.offer()
    call.fault("vast.create", "vanished_offer", nth=1)
    assert call("PUT", f"/api/v0/asks/{offer}/", {"image": "i", "disk": 20}).status_code == 404
    ids = {row["id"] for row in call.ok("POST", "/api/v0/bundles/", {"limit": 1000})["offers"]}
    assert offer not in ids


@pytest.mark.parametrize(("provider", "path"), [("vast", "/api/v0/instances/"), ("runpod", "/v2/pods/")])
def test_a_destroy_that_does_nothing_says_success(call: Caller, provider: str, path: str) -> None:
    number = call.vast() if provider == "vast" else call.runpod().json()["id"]
    call.fault(f"{provider}.destroy", "destroy_noop", nth=1)
    assert call("DELETE", f"{path}{number}").ok
    assert len(call.live()) == 1
    assert call("DELETE", f"{path}{number}").ok
    assert call.live() == []


def test_retry_after_and_the_daily_quota(call: Caller) -> None:
    call.fault("vast.list", "rate_limited", nth=1, retry_after=7)
    assert call("GET", "/api/v1/instances/").headers["Retry-After"] == "7"
    call.fault("vast.search", "search_quota", nth=1)
    reply = call("POST", "/api/v0/bundles/", {})
    assert (reply.status_code, reply.json()["error"]) == (429, "search_quota_exceeded")
    assert int(reply.headers["Retry-After"]) > 3600


def test_short_pages_and_half_answers(call: Caller) -> None:
    for _ in range(3):
        call.vast()
        call.runpod()
    call.fault("*.list", "short_page", times=2)
    assert len(call.ok("GET", "/api/v1/instances/")["instances"]) == 2
    assert len(call.ok("GET", "/v2/pods")["pods"]) == 2
    call.fault("vast.list", "malformed", times=1)
    with pytest.raises(requests.RequestException):
        call("GET", "/api/v1/instances/").json()
    assert len(call.ok("GET", "/api/v1/instances/")["instances"]) == 3


def test_rate_limits_only_when_asked_for() -> None:
    for asked, second in ((False, 200), (True, 429)):
        world = World(VirtualClock(0), Ghosts(), market={"options": {"rate_limits": asked}})
        simulator = Simulator(world)
        simulator.start()
        call = Caller(simulator)
        codes = [call("GET", "/api/v1/instances/").status_code for _ in range(2)]
        simulator.stop()
        assert codes == [200, second]


# --- the simulator's own ----------------------------------------------------------------------------------------------


def test_the_request_log_tells_where_the_key_came_and_never_the_key(call: Caller) -> None:
    call.vast(env={"SECRET_TOKEN": "hush", "COPY": KEY})
    call("GET", f"/api/v1/instances/?api_key={KEY}")
    log = call("GET", "/_sim/requests").text
    assert KEY not in log
    assert "hush" not in log
    rows = json.loads(log)["requests"]
    assert [row["key_in"] for row in rows if row["endpoint"] == "vast.create"] == ["header"]
    assert [row["key_in"] for row in rows if row["endpoint"] == "vast.list"] == ["url"]
    assert call.ok("GET", "/_sim/requests", params={"endpoint": "vast.create"})["count"] == 1
    call.ok("DELETE", "/_sim/requests")
    assert call.ok("GET", "/_sim/requests")["count"] == 0


def test_bad_controls_say_what_is_wrong(call: Caller) -> None:
    for method, path, body in (
        ("POST", "/_sim/faults", {"endpoint": "vast.list", "fault": "meteor"}),
        ("POST", "/_sim/clock", {"advance": -5}),
        ("POST", "/_sim/clock", {"reverse": 5}),
        ("POST", "/_sim/clock", [1]),
        ("POST", "/_sim/balance", {"usd": 5}),
    ):
        reply = call(method, path, body)
        assert reply.status_code == 400, path
        assert reply.json()["error"]
    assert "GET /_sim/pods" in call("GET", "/_sim/nothing").json()["known"]
    assert call("GET", "/").status_code == 404


def test_a_thousand_ghosts_are_listed_in_less_time_than_it_takes_to_make_them(call: Caller) -> None:
    began = time.monotonic()
    for _ in range(1000):
        assert call.runpod().status_code == 201
    making_s = time.monotonic() - began
    call.later(20)
    began = time.monotonic()
    page = call.ok("GET", "/v2/pods", params={"limit": 1000})
    assert len(page["pods"]) == 1000
    assert time.monotonic() - began < making_s
    began = time.monotonic()
    cursor, seen = "", 0
    while cursor is not None:
        page = call.ok("GET", "/v2/pods", params={"cursor": cursor})
        seen, cursor = seen + len(page["pods"]), page["pagination"]["nextCursor"]
    assert seen == 1000
    assert time.monotonic() - began < making_s


def test_runpods_log_is_a_stream_that_stays_open(call: Caller) -> None:
    made = call.runpod().json()["id"]
    reply = call("GET", f"/v2/pods/{made}/logs?tail=5", stream=True)
    assert (reply.headers["Content-Type"], reply.headers["Cache-Control"]) == ("text/event-stream", "no-cache")
    lines = reply.iter_lines(chunk_size=1)
    number, data = next(lines), next(lines)
    event = json.loads(data.removeprefix(b"data: "))
    assert number.startswith(b"id: " + event["ts"].encode())
    assert (event["source"], event["line"]) == ("system", "runpod/pytorch:1: ghost pod, no container")
    reply.close()
    assert call("GET", f"/v2/pods/{made}/logs?source=nobody").status_code == 400
