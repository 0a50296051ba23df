"""Templates on the simulator: what one brings to a pod, what the create's own words win, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from simulator_calls import GPU, KEY, Caller, simulator_calls

OTHER = "canary-other"
PASSWORD = "canary-template-7e02"
VAST = {
    "name": "detector",
    "image": "ghcr.io/me/golden",
    "tag": "v3",
    "env": "-e A=template -e B='two words' -p 8080:8080",
    "onstart": "echo template",
    "runtype": "ssh",
    "use_ssh": True,
    "ssh_direct": True,
    "docker_login_repo": "ghcr.io",
    "docker_login_user": "me",
    "docker_login_pass": PASSWORD,
    "recommended_disk_space": 33.0,
}
RUNPOD = {
    "name": "detector",
    "image": "ghcr.io/me/golden:v3",
    "env": {"A": "template", "B": "two words"},
    "args": "bash -c template",
    "disk": 33,
    "ports": ["8080/http"],
    "mounts": {"persistent": {"size": 12, "path": "/workspace"}},
}


@pytest.fixture
def call() -> Iterator[Caller]:
    accounts = [{"key": KEY}, {"key": OTHER}]
    with simulator_calls(accounts={"vast": accounts, "runpod": accounts}) as caller:
        yield caller


def vast_template(call: Caller, **changes: Any) -> Any:
    return call.ok("POST", "/api/v0/template/", VAST | changes)["template"]


def vast_pod(call: Caller, hash_id: str, **given: Any) -> Any:
    """The instance of a create that says nothing but the template's hash, and what is given."""
    body = {"client_id": "me", "image": None, "template_hash_id": hash_id, "label": "pennypod-x", **given}
    made = call.ok("PUT", f"/api/v0/asks/{call.offer()}/", body)["new_contract"]
    call.later(12)
    return call.instance(made)


# --- Vast -------------------------------------------------------------------------------------------------------------


def test_a_vast_template_brings_all_that_the_create_leaves_open(call: Caller) -> None:
    template = vast_template(call)
    row = vast_pod(call, template["hash_id"])
    assert (row["image_uuid"], row["disk_space"]) == ("ghcr.io/me/golden:v3", 33.0)
    assert (row["template_id"], row["template_hash_id"]) == (template["id"], template["hash_id"])
    assert row["template_name"] == "detector"
    assert "ssh" in row["image_runtype"]
    assert dict(row["extra_env"])["B"] == "two words"
    assert row["onstart"] == "echo template"


def test_vasts_create_wins_over_its_template_and_environments_are_merged(call: Caller) -> None:
    template = vast_template(call)
    row = vast_pod(
        call, template["hash_id"], image="me/other:1", env={"A": "mine", "C": "c"}, onstart="echo mine", disk=20
    )
    assert (row["image_uuid"], row["disk_space"], row["onstart"]) == ("me/other:1", 20.0, "echo mine")
    env = dict(row["extra_env"])
    assert (env["A"], env["B"], env["C"]) == ("mine", "two words", "c")


def test_vast_refuses_a_hash_that_nobody_has_and_rents_nothing(call: Caller) -> None:
    offer = call.offer()
    reply = call("PUT", f"/api/v0/asks/{offer}/", {"image": None, "template_hash_id": "0" * 32, "disk": 20})
    assert (reply.status_code, reply.json()["error"]) == (400, "invalid_args")
    assert call.live() == []


def test_an_edit_makes_another_hash_and_the_old_one_stays_good_in_a_create(call: Caller) -> None:
    before = vast_template(call)
    body = VAST | {"id": before["id"], "hash_id": before["hash_id"], "tag": "v4"}
    after = call.ok("PUT", "/api/v1/template/", body)["template"]
    assert (after["id"], after["hash_id"] != before["hash_id"]) == (before["id"], True)
    filters = json.dumps({"id": {"eq": before["id"]}})
    found = call.ok("GET", "/api/v0/template/", params={"select_filters": filters})
    assert [row["hash_id"] for row in found["templates"]] == [after["hash_id"]]
    assert vast_pod(call, before["hash_id"])["image_uuid"] == "ghcr.io/me/golden:v3"
    stale = call("PUT", "/api/v1/template/", body)
    assert stale.status_code == 404, "an edit of what was edited since would undo that"
    gone = call.ok("DELETE", "/api/v0/template/", {"hash_id": after["hash_id"]})
    assert gone["msg"] == f"Template {before['id']} Deleted Successfully"
    reply = call("PUT", f"/api/v0/asks/{call.offer()}/", {"template_hash_id": before["hash_id"], "disk": 20})
    assert reply.status_code == 400


def test_vasts_private_templates_are_their_owners_alone_and_no_password_is_shown(call: Caller) -> None:
    private, public = vast_template(call), vast_template(call, name="for all", private=False)
    other = {"headers": {"Authorization": f"Bearer {OTHER}"}}
    seen = call.ok("GET", "/api/v0/template/", **other)["templates"]
    assert [row["id"] for row in seen] == [public["id"]]
    mine = call.ok("GET", "/api/v0/template/")["templates"]
    assert {row["id"] for row in mine} == {private["id"], public["id"]}
    theft = call("DELETE", "/api/v0/template/", {"template_id": public["id"]}, **other)
    assert theft.status_code == 404
    vast_pod(call, private["hash_id"])
    texts = (mine, seen, call.ok("GET", "/_sim/requests"), call.live())
    assert all(PASSWORD not in json.dumps(text) for text in texts)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": None}, "Template name is required"),
        ({"image": ""}, "Template image is required"),
        ({"env": {"A": "b"}}, "env: Input should be a valid str"),
        ({"env": "-e A='open"}, "env: No closing quotation"),
        ({"private": "yes"}, "private: Input should be a valid bool"),
    ],
)
def test_vasts_refusals_of_a_template(call: Caller, change: dict[str, Any], says: str) -> None:
    reply = call("POST", "/api/v0/template/", VAST | change)
    assert (reply.status_code, reply.json()["msg"]) == (400, says)
    assert call.ok("GET", "/api/v0/template/")["templates_found"] == 0


# --- RunPod -----------------------------------------------------------------------------------------------------------


def runpod_template(call: Caller, **changes: Any) -> Any:
    return call.ok("POST", "/v2/templates", RUNPOD | changes)


def runpod_pod(call: Caller, template: str, **given: Any) -> Any:
    body = {"name": "pennypod-x", "gpu": {"id": GPU, "count": 1}, "templateId": template, **given}
    return call.ok("POST", "/v2/pods", body)


def test_a_runpod_template_brings_all_that_the_create_leaves_open(call: Caller) -> None:
    template = runpod_template(call)
    assert (template["startSsh"], template["startJupyter"], template["category"]) == (True, True, "NVIDIA")
    row = runpod_pod(call, template["id"])
    for name in ("image", "args", "disk", "env", "ports", "mounts"):
        assert row[name] == RUNPOD[name], name


def test_runpods_create_wins_over_its_template_and_environments_are_merged(call: Caller) -> None:
    template = runpod_template(call)
    given = {"image": "me/other:1", "args": "bash -c mine", "disk": 20, "ports": ["22/tcp"], "mounts": {}}
    row = runpod_pod(call, template["id"], env={"A": "mine", "C": "c"}, **given)
    assert {name: row[name] for name in given} == given
    assert row["env"] == {"A": "mine", "B": "two words", "C": "c"}


def test_a_runpod_template_is_copied_once(call: Caller) -> None:
    template = runpod_template(call)
    row = runpod_pod(call, template["id"])
    changed = call.ok("PATCH", f"/v2/templates/{template['id']}", {"image": "me/new:1", "mounts": {}})
    assert (changed["image"], changed["env"], changed["mounts"]) == ("me/new:1", RUNPOD["env"], RUNPOD["mounts"])
    assert call.ok("GET", f"/v2/pods/{row['id']}")["image"] == RUNPOD["image"]
    used = call("DELETE", f"/v2/templates/{template['id']}")
    assert used.status_code == 400, "while a pod of it is there"
    call.ok("DELETE", f"/v2/pods/{row['id']}")
    call.ok("DELETE", f"/v2/templates/{template['id']}")
    assert call.ok("GET", "/v2/templates") == {"templates": []}


def test_a_runpod_templates_credential_goes_with_it(call: Caller) -> None:
    login = {"name": "ghcr", "username": "me", "password": PASSWORD}
    credential = call.ok("POST", "/v2/registries", login)["id"]
    template = runpod_template(call, registry=credential)
    assert runpod_pod(call, template["id"])["registry"] == credential
    unknown = call("POST", "/v2/templates", RUNPOD | {"registry": "reg_nope"})
    assert unknown.status_code == 404


def test_a_runpod_templates_cuda_versions_hold_unless_the_create_says_others(call: Caller) -> None:
    template = runpod_template(call, allowedCudaVersions=["11.1"])
    body = {"name": "pennypod-x", "templateId": template["id"]}
    refused = call("POST", "/v2/pods", body | {"gpu": {"id": GPU, "count": 1}})
    assert (refused.status_code, refused.json()["detail"][:20]) == (400, "There are no longer ")
    runpod_pod(call, template["id"], gpu={"id": GPU, "count": 1, "minCudaVersion": "12.0"})


def test_runpods_refusals_of_a_template(call: Caller) -> None:
    serverless, public = runpod_template(call, serverless=True), runpod_template(call, name="for all", public=True)
    pod = {"name": "pennypod-x", "gpu": {"id": GPU, "count": 1}}
    other = {"headers": {"Authorization": f"Bearer {OTHER}"}}
    assert call("POST", "/v2/pods", pod | {"templateId": "tpl_nope"}).status_code == 404
    assert call("POST", "/v2/pods", pod | {"templateId": serverless["id"]}).status_code == 422
    assert call("GET", f"/v2/templates/{serverless['id']}", **other).status_code == 404
    assert call("GET", f"/v2/templates/{public['id']}", **other).json()["name"] == "for all"
    assert call("PATCH", f"/v2/templates/{public['id']}", {"name": "stolen"}, **other).status_code == 404
    assert call.live() == []
    for body, says in (
        ({"name": "x"}, "$: missing property 'image'"),
        (RUNPOD | {"mounts": {"network": []}}, "$.mounts: additional properties 'network' not allowed"),
        (RUNPOD | {"gpu": {}}, "$: additional properties 'gpu' not allowed"),
    ):
        reply = call("POST", "/v2/templates", body)
        assert (reply.status_code, reply.json()["errors"]) == (422, [says])
