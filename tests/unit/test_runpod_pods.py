"""Renting, finding and ending pods on RunPod."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeClock
from pennypod.errors import (
    AmbiguousError,
    AuthError,
    FundsError,
    InvalidError,
    NoCapacityError,
    OfferGoneError,
    ProviderError,
    RateLimitedError,
    TransientError,
)
from pennypod.model.ids import Lease
from pennypod.model.image import RegistryLogin
from pennypod.model.offer import Offer, Order
from pennypod.model.pod import PodState, SshAddress
from pennypod.providers.base import AttachesKeys, last_words
from pennypod.providers.http import Http
from pennypod.providers.runpod import DEFAULT_IMAGE, RunpodProvider, start_command
from runpod_shapes import CREATE_FIELDS, GPU_FIELDS, NO_CAPACITY, fresh, pod_row, problem
from scripted_api import KEY, Answer, ScriptedApi, scripted_api

CREATE = "POST /v2/pods"
LIST = "GET /v2/pods"
GET = "GET /v2/pods/k3f9q2abcd1234"
DELETE = "DELETE /v2/pods/k3f9q2abcd1234"
POD = "k3f9q2abcd1234"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0o pennypod demo-1201-abcde"
LEASE = Lease("demo-1201-abcde", 1, 1_764_610_000, "abcde").name


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as api:
        yield api


@pytest.fixture
def runpod(api: ScriptedApi) -> RunpodProvider:
    clock = FakeClock()
    return RunpodProvider(Http("runpod", api.url, KEY, clock), clock)


def offer(**details: Any) -> Offer:
    known = {"cloud": "SECURE", "gpu_id": "NVIDIA GeForce RTX 4090", **details}
    return Offer("runpod", "secure:4090", "secure:4090", "RTX 4090", 1, 693_000, 20.0, details=known, pooled=True)


def order(**changes: Any) -> Order:
    values: dict[str, Any] = {
        "name": LEASE,
        "image": "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
        "disk_gb": 20.4,
        "public_key": PUBLIC_KEY + "\n",
        "deadline": 1_764_610_000,
        "env": {"A": "b c"},
    }
    return Order(**(values | changes))


def created(api: ScriptedApi) -> Any:
    return api.calls(CREATE)[0].body


# --- what is sent -----------------------------------------------------------------------------------------------------

REGISTRIES = "/v2/registries"
LOGIN = RegistryLogin("ghcr.io", "pods", "canary-51c7")


def test_a_login_is_left_at_runpod_once_and_named_by_its_id(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CREATE, Answer(201, pod_row(status="PROVISIONING", **fresh())))
    api.on(f"GET {REGISTRIES}", Answer(200, {"registries": [{"id": "reg_old", "name": "dockerhub"}]}))
    api.on(f"POST {REGISTRIES}", Answer(201, {"id": "reg_abc", "name": "whatever"}))
    runpod.rent(offer(), order(login=LOGIN))
    assert created(api)["registry"] == "reg_abc"
    assert "canary-51c7" not in json.dumps(created(api))
    (made,) = api.calls(f"POST {REGISTRIES}")
    name = made.body.pop("name")
    assert made.body == {"username": "pods", "password": "canary-51c7"}
    assert name.startswith("pennypod-ghcr.io-")
    assert "canary" not in name
    api.on(f"GET {REGISTRIES}", Answer(200, {"registries": [{"id": "reg_abc", "name": name}]}))
    runpod.rent(offer(), order(login=LOGIN))
    runpod.rent(offer(), order())
    assert [asked.body.get("registry") for asked in api.calls(CREATE)] == ["reg_abc", "reg_abc", None]
    assert len(api.calls(f"POST {REGISTRIES}")) == 1
    runpod.rent(offer(), order(login=RegistryLogin("ghcr.io", "pods", "another")))
    assert len(api.calls(f"POST {REGISTRIES}")) == 2, "another password is another credential"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(403, problem(403, "forbidden")), InvalidError),
        (Answer(422, problem(422, "bad canary-51c7")), InvalidError),
        (Answer(500), TransientError),
        (Answer(201, {}), TransientError),
    ],
)
def test_without_the_login_no_pod_is_rented(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer, error: type[ProviderError]
) -> None:
    api.on(f"GET {REGISTRIES}", Answer(200, {"registries": []}))
    api.on(f"POST {REGISTRIES}", answer)
    with pytest.raises(error) as refused:
        runpod.rent(offer(), order(login=LOGIN))
    assert "canary-51c7" not in str(refused.value)
    assert api.calls(CREATE) == []


def test_the_create_call_field_by_field(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CREATE, Answer(201, pod_row(status="PROVISIONING", **fresh())))
    assert runpod.rent(offer(), order()) == POD
    assert created(api) == {
        "name": LEASE,
        "image": "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
        "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1, "minCudaVersion": "12.8"},
        "cloud": "SECURE",
        "disk": 21,
        "ports": ["22/tcp"],
        "env": {"A": "b c", "PUBLIC_KEY": PUBLIC_KEY},
        "args": start_command(order()),
    }


def test_a_template_of_the_account_stands_in_the_images_place(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CREATE, Answer(201, pod_row()))
    runpod.rent(offer(), order(image="me/train:latest"))
    plain = dict(created(api))
    api.asked.clear()
    runpod.rent(offer(), order(image="template:k4b7xw2p9a"))
    del plain["image"]
    assert created(api) == {**plain, "templateId": "k4b7xw2p9a"}


@pytest.mark.parametrize("image", ["", "runpod/pytorch:x", "ghcr.io/me/golden:cu118", "template:k4b7xw2p9a"])
def test_every_field_is_one_of_the_closed_specification(api: ScriptedApi, runpod: RunpodProvider, image: str) -> None:
    api.on(CREATE, Answer(201, pod_row()))
    runpod.rent(offer(data_centers=["EU-RO-1"], cuda_min="12.4"), order(image=image))
    for name, value in created(api).items():
        assert isinstance(value, CREATE_FIELDS[name]), name
        assert value, name  # an empty override would replace what the image brings
    for name, value in created(api)["gpu"].items():
        assert isinstance(value, GPU_FIELDS[name]), name
    assert created(api)["cloud"] in ("SECURE", "COMMUNITY")


def test_regions_and_the_cuda_floor_reach_the_create(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CREATE, Answer(201, pod_row()))
    runpod.rent(offer(data_centers=["EU-RO-1", "US-TX-3"], cuda_min="13.0"), order())
    assert created(api)["dataCenterIds"] == ["EU-RO-1", "US-TX-3"]
    assert created(api)["gpu"]["minCudaVersion"] == "13.0"  # the higher of the job's and the image's


def test_an_image_without_a_cuda_in_its_tag_sets_no_floor(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CREATE, Answer(201, pod_row()))
    runpod.rent(offer(), order(image="me/train:latest"))
    assert "minCudaVersion" not in created(api)["gpu"]
    assert created(api)["args"] == start_command(order())


def test_runpods_own_image_is_the_default(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CREATE, Answer(201, pod_row()))
    runpod.rent(offer(), order(image=""))
    assert created(api)["image"] == DEFAULT_IMAGE


def test_the_start_command_is_one_shell_word_list() -> None:
    shell, option, inner = shlex.split(start_command(order()))
    assert (shell, option) == ("bash", "-c")
    assert "exec /start.sh" in inner
    assert '"$PUBLIC_KEY"' in inner
    assert subprocess.run(["bash", "-n", "-c", inner], check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "details", "error"),
    [
        ({"name": "not a lease"}, {}, InvalidError),
        ({"env": {"BAD NAME": "x"}}, {}, InvalidError),
        ({"env": {f"V{n}": "x" for n in range(60)}}, {}, InvalidError),
        ({}, {"cloud": "ALL"}, OfferGoneError),
        ({}, {"gpu_id": ""}, OfferGoneError),
    ],
)
def test_what_cannot_work_is_not_even_asked_for(
    api: ScriptedApi,
    runpod: RunpodProvider,
    changes: dict[str, Any],
    details: dict[str, Any],
    error: type[ProviderError],
) -> None:
    with pytest.raises(error):
        runpod.rent(offer(**details), order(**changes))
    assert api.asked == []


# --- ways out of a create ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, problem(400, NO_CAPACITY), NoCapacityError),
        (400, problem(400, "There are not enough free GPUs on the host machine to start this pod."), NoCapacityError),
        (400, problem(400, 'Network volume "x" is in data center "X"'), InvalidError),
        (401, problem(401, "missing bearer token"), AuthError),
        (402, problem(402, "Your account balance is too low to rent a pod"), FundsError),
        (400, problem(400, "Your account balance is too low to rent a pod"), FundsError),
        (403, problem(403, "no access to this pool"), InvalidError),
        (403, "error code: 1010", AuthError),
        (404, problem(404, "template not found"), InvalidError),
        (410, {"error": "gone"}, InvalidError),
        (413, problem(413, "too large"), InvalidError),
        (422, problem(422, "Request validation failed.", "$: missing property 'name'"), InvalidError),
        (429, problem(429, "minute quota exceeded"), RateLimitedError),
    ],
)
def test_a_refusal_is_certain_and_has_its_error(
    api: ScriptedApi, runpod: RunpodProvider, status: int, body: Any, error: type[ProviderError]
) -> None:
    api.on(CREATE, Answer(status, body))
    with pytest.raises(error) as caught:
        runpod.rent(offer(), order())
    assert type(caught.value) is error
    assert len(api.asked) == 1


def test_a_validation_error_names_the_field(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(CREATE, Answer(422, problem(422, "Request validation failed.", "$: missing property 'name'")))
    with pytest.raises(InvalidError, match="missing property 'name'"):
        runpod.rent(offer(), order())


@pytest.mark.parametrize(
    "answer",
    [
        Answer(201, {}),
        Answer(201, {"id": None}),
        Answer(201, {"id": 5}),
        Answer(201, {"id": "../../v2/pods"}),
        Answer(201, None),
        Answer(201, "created"),
        Answer(500, problem(500, "Something went wrong.")),
        Answer(500, {"error": "create pod: There are no instances currently available", "status": 500}),
        Answer(502, "<html>bad gateway</html>"),
        Answer(524, "a timeout occurred"),
        Answer(fault="drop"),
        Answer(201, pod_row(), fault="half"),
    ],
    ids=lambda answer: f"{answer.status}{answer.fault}",
)
def test_what_may_have_happened_is_ambiguous_and_asked_once(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer
) -> None:
    api.on(CREATE, answer)
    with pytest.raises(AmbiguousError):
        runpod.rent(offer(), order())
    assert len(api.asked) == 1


# --- what exists ------------------------------------------------------------------------------------------------------


def test_every_page_is_read(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(
        LIST,
        Answer(200, {"pods": [pod_row("a")], "pagination": {"nextCursor": "c/1=", "hasNextPage": True}}),
        Answer(200, {"pods": [], "pagination": {"nextCursor": "c2", "hasNextPage": True}}),
        Answer(200, {"pods": [pod_row("b", LEASE)], "pagination": {"nextCursor": None, "hasNextPage": False}}),
    )
    assert [(pod.pod_id, pod.name) for pod in runpod.pods()] == [("a", "somebody"), ("b", LEASE)]
    assert [asked.query.get("cursor") for asked in api.asked] == [None, "c/1=", "c2"]


def test_the_older_listing_has_no_pages(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(LIST, Answer(200, {"pods": [pod_row("a"), pod_row("b", status="TERMINATED")]}))
    assert [pod.pod_id for pod in runpod.pods()] == ["a"]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, {}),
        Answer(200, {"pods": None}),
        Answer(200, [pod_row()]),
        Answer(200, {"pods": ["x"]}),
        Answer(200, {"pods": [{"name": "no id"}]}),
        Answer(200, {"pods": [], "pagination": {"nextCursor": None, "hasNextPage": True}}),
        Answer(200, {"pods": [], "pagination": {"nextCursor": "same", "hasNextPage": True}}),
        Answer(401, problem(401, "x")),
        Answer(403, "error code: 1010"),
        Answer(404, problem(404, "not found")),
        Answer(410, {"error": "gone"}),
        Answer(429, problem(429, "x")),
        Answer(500, problem(500, "x")),
        Answer(fault="drop"),
    ],
    ids=lambda answer: f"{answer.status}{answer.fault}",
)
def test_a_listing_that_failed_never_looks_empty(api: ScriptedApi, runpod: RunpodProvider, answer: Answer) -> None:
    api.on(LIST, answer)
    with pytest.raises(ProviderError):
        runpod.pods()


@pytest.mark.parametrize(
    ("changes", "state", "reachable"),
    [
        ({}, PodState.RUNNING, True),
        (fresh(), PodState.RUNNING, False),  # says RUNNING while the image still comes
        (fresh(status="PROVISIONING"), PodState.STARTING, False),
        (fresh(status="STARTING"), PodState.STARTING, False),
        (fresh(status="EXITED"), PodState.STOPPED, False),
        ({"status": "EXITED"}, PodState.STOPPED, False),  # with the stale address of its last run
        (fresh(status="ERROR"), PodState.FAILED, False),
        (fresh(status="A_WORD_OF_TOMORROW"), PodState.FAILED, False),
        ({"ssh": None}, PodState.RUNNING, False),
        ({"ssh": {"direct": {"host": "", "port": 1}}}, PodState.RUNNING, False),
        ({"ssh": {"direct": {"host": "x", "port": None}}}, PodState.RUNNING, False),
    ],
)
def test_running_and_a_direct_way_in_make_a_pod_ready(
    api: ScriptedApi, runpod: RunpodProvider, changes: dict[str, Any], state: PodState, reachable: bool
) -> None:
    api.on(GET, Answer(200, pod_row(**changes)))
    pod = runpod.pod(POD)
    assert pod is not None
    assert pod.state is state
    assert pod.address == (SshAddress("203.0.113.7", 10341, "root") if reachable else None)


def test_a_pod_is_told_in_our_words(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on(GET, Answer(200, pod_row(name=LEASE)))
    pod = runpod.pod(POD)
    assert pod is not None
    assert (pod.name, pod.gpu, pod.gpu_count, pod.price_micros_per_h) == (LEASE, "RTX 4090", 1, 692_778)
    assert pod.created == 1787206579.436
    assert pod.details["dataCenterId"] == "EU-RO-1"


@pytest.mark.parametrize(
    "answer", [Answer(404, problem(404, "pod not found")), Answer(200, pod_row(status="TERMINATED"))]
)
def test_absence_is_said_plainly(api: ScriptedApi, runpod: RunpodProvider, answer: Answer) -> None:
    api.on(GET, answer)
    assert runpod.pod(POD) is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(404, "<html>nothing here</html>"), InvalidError),
        (Answer(404, {"error": "v1 style"}), InvalidError),
        (Answer(401, problem(401, "x")), AuthError),
        (Answer(403, problem(403, "x")), AuthError),
        (Answer(410, {"error": "gone"}), InvalidError),
        (Answer(200, pod_row("another")), TransientError),
        (Answer(200, "null"), TransientError),
        (Answer(500, problem(500, "x")), TransientError),
    ],
)
def test_an_error_is_never_absence(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer, error: type[ProviderError]
) -> None:
    api.on(GET, answer)
    with pytest.raises(error):
        runpod.pod(POD)


# --- the end and the rest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [Answer(204), Answer(404, problem(404, "resource not found"))])
def test_destroying_is_idempotent(api: ScriptedApi, runpod: RunpodProvider, answer: Answer) -> None:
    api.on(DELETE, answer)
    runpod.destroy(POD)
    assert api.asked[0].body is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(401, problem(401, "x")), AuthError),
        (Answer(404, "<html>"), InvalidError),
        (Answer(409, problem(409, "a cluster member")), InvalidError),
        (Answer(500, problem(500, "x")), TransientError),
    ],
)
def test_a_destroy_that_was_refused_is_an_error(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer, error: type[ProviderError]
) -> None:
    api.on(DELETE, answer)
    with pytest.raises(error):
        runpod.destroy(POD)


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a?b", "x" * 65])
def test_an_id_is_checked_before_it_goes_into_a_path(api: ScriptedApi, runpod: RunpodProvider, bad: str) -> None:
    for call in (runpod.pod, runpod.destroy):
        with pytest.raises(InvalidError):
            call(bad)
    assert api.asked == []


@pytest.mark.parametrize(
    ("answer", "micros"),
    [
        (Answer(200, {"data": {"myself": {"clientBalance": 9.75}}}), 9_750_000),
        (Answer(200, {"data": {"myself": None}}), None),
        (Answer(410, {"error": "gone"}), None),
    ],
)
def test_the_balance_comes_by_graphql_while_that_lives(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer, micros: int | None
) -> None:
    api.on("POST /graphql", answer)
    assert runpod.balance_micros() == micros
    assert api.asked[0].body == {"query": "query { myself { clientBalance } }"}
    assert KEY not in api.asked[0].line


@pytest.mark.parametrize(
    ("answer", "holder"),
    [
        (Answer(200, {"data": {"myself": {"id": "user_2abc"}}}), "user_2abc"),
        (Answer(200, {"errors": [{"message": "Unauthorized"}], "data": None}), None),
        (Answer(410, {"error": "gone"}), None),
    ],
)
def test_whose_key_it_is_comes_by_graphql(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer, holder: str | None
) -> None:
    api.on("POST /graphql", answer)
    assert runpod.holder() == holder
    assert api.asked[0].body == {"query": "query { myself { id } }"}
    assert KEY not in runpod.key_mark()


def test_graphql_refuses_a_key_with_status_200(api: ScriptedApi, runpod: RunpodProvider) -> None:
    errors = [{"message": "Unauthorized", "path": ["myself"], "extensions": {"code": "RUNPOD"}}]
    api.on("POST /graphql", Answer(200, {"errors": errors, "data": {"myself": None}}))
    with pytest.raises(AuthError):
        runpod.balance_micros()


@pytest.mark.parametrize(
    ("answer", "micros"),
    [
        (Answer(200, {"data": {"myself": {"currentSpendPerHr": 0.34}}}), 340_000),
        (Answer(200, {"data": {"myself": {"currentSpendPerHr": 0}}}), 0),
        (Answer(200, {"errors": [{"message": "Unauthorized"}], "data": None}), None),
        (Answer(403, {"error": "no scope"}), None),
        (Answer(410, {"error": "gone"}), None),
    ],
)
def test_what_the_account_spends_where_it_is_told(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer, micros: int | None
) -> None:
    api.on("POST /graphql", answer)
    assert runpod.spend_micros_per_h() == micros


@pytest.mark.parametrize("answer", [Answer(500), Answer(200, {"errors": [{"message": "Something went wrong"}]})])
def test_spending_that_could_not_be_asked_for_is_not_zero(
    api: ScriptedApi, runpod: RunpodProvider, answer: Answer
) -> None:
    api.on("POST /graphql", answer)
    with pytest.raises(TransientError):
        runpod.spend_micros_per_h()


def test_a_full_page_without_a_word_about_more_is_no_whole_listing(api: ScriptedApi, runpod: RunpodProvider) -> None:
    api.on("GET /v2/pods", Answer(200, {"pods": [{"id": f"pod{number}", "name": "x"} for number in range(100)]}))
    with pytest.raises(TransientError):
        runpod.pods()


def test_the_bill_of_one_pod(api: ScriptedApi, runpod: RunpodProvider) -> None:
    record = {"podId": POD, "totalAmount": 0.02, "gpuAmount": 0.019, "cpuAmount": 0, "diskAmount": 0.001}
    api.on("GET /v2/billing/pods", Answer(200, {"records": [record], "metadata": {}}))
    assert runpod.charges(24, POD) == [record]
    assert api.asked[0].query == {"bucketSize": "hour", "lastN": "24", "podId": POD}


def test_runpod_needs_no_preparation_and_attaches_no_keys(api: ScriptedApi, runpod: RunpodProvider) -> None:
    runpod.prepare("image", lambda _text: None)
    assert not isinstance(runpod, AttachesKeys)
    assert (api.asked, runpod.name) == ([], "runpod")


# --- the log ----------------------------------------------------------------------------------------------------------

LOGS = f"GET /v2/pods/{POD}/logs"
EVENTS = """\
id: 2026-06-01T12:02:03Z/000000000001
data: {"ts":"2026-06-01T12:02:03Z","source":"system","line":"create container an/image"}

: a comment that keeps the line open

id: 2026-06-01T12:02:04Z/000000000002
data: {"ts":"2026-06-01T12:02:04Z","source":"container","line":"  Error: no   such file %s"}

data: {"ts":"2026-06"""


def test_the_log_is_what_the_stream_has_said_when_it_falls_silent(api: ScriptedApi) -> None:
    clock = FakeClock()
    runpod = RunpodProvider(Http("runpod", api.url, KEY, clock, quiet_s=0.1), clock)
    # "half" promises more than it sends, as a stream does.
    stream = {"Content-Type": "text/event-stream"}
    api.on(LOGS, Answer(200, EVENTS % KEY, stream, fault="half"))
    lines = runpod.last_lines(POD, tail=7)
    assert lines == ["create container an/image", "Error: no such file ***"]
    assert last_words(lines) == lines[1]
    (asked,) = api.calls(LOGS)
    assert (asked.query, asked.headers["accept"]) == ({"tail": "7"}, "text/event-stream")


def test_host_keys_are_read_from_the_log_of_the_pod_rented_under_that_name(api: ScriptedApi) -> None:
    clock = FakeClock()
    runpod = RunpodProvider(Http("runpod", api.url, KEY, clock, quiet_s=0.1), clock)
    key = "ssh-rsa " + "A" * 540  # longer than what is shown of a log line
    lines = [f"pennypod-host-keys {name} {words}" for name in ("mine", "other") for words in ("begin", key, "end")]
    lines[4] = lines[4].replace("AAAA", "BBBB", 1)
    events = "".join(f"data: {json.dumps({'source': 'container', 'line': line})}\n\n" for line in lines)
    api.on(LOGS, Answer(200, events, {"Content-Type": "text/event-stream"}, fault="half"))
    assert runpod.host_keys(POD, "mine") == [key]


@pytest.mark.parametrize("answer", [Answer(fault="drop"), Answer(after_s=0.4, body=EVENTS), Answer(500), Answer(404)])
def test_a_log_that_does_not_come_is_a_plain_error_and_is_not_waited_for(api: ScriptedApi, answer: Answer) -> None:
    clock = FakeClock()
    runpod = RunpodProvider(Http("runpod", api.url, KEY, clock, quiet_s=0.1), clock)
    api.on(LOGS, answer)
    with pytest.raises(ProviderError):
        runpod.last_lines(POD)
    assert len(api.calls(LOGS)) == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        (["", "  "], ""),
        (["pulling", "error: no space left", "cleaning up"], "error: no space left"),
        (["pulling", "done"], "done"),
        (["x" * 300], "x" * 197 + "..."),
    ],
)
def test_the_last_complaint_is_what_a_log_has_to_say(lines: list[str], words: str) -> None:
    assert last_words(lines) == words
