"""The simulator's answers against what the providers publish about theirs: names, types, enums.

facts/*.json holds the parts of the published OpenAPI files that are used here, without their prose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from pennypod.simulator import runpod_schema
from simulated import Simulator, simulator

FACTS = Path(__file__).parent / "facts"
VAST = json.loads((FACTS / "vast.json").read_text("utf-8"))
RUNPOD = json.loads((FACTS / "runpod.json").read_text("utf-8"))
GPU = "NVIDIA GeForce RTX 4090"
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
# Where the published type cannot be right for a row that the same source shows otherwise, or is only ever a sample.
TOLERATED = {
    "ListInstances": re.compile(r"instances\[\d+\]\.(onstart|geolocation)"),
    "User": re.compile(r"(ssh_key|balance)"),
}


def deviations(value: Any, facts: dict[str, Any], path: str = "") -> Iterator[str]:
    """What about `value` is not as the facts have it."""
    if "anyOf" in facts:
        tries = [list(deviations(value, option, path)) for option in facts["anyOf"]]
        if all(tries):
            yield from min(tries, key=len)
        return
    kinds = facts.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds] if kinds else []
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{path}: {value!r} is no {' or '.join(kinds)}"
        return
    if "enum" in facts and value not in facts["enum"]:
        yield f"{path}: {value!r} is none of {facts['enum']}"
    if isinstance(value, dict):
        yield from _object_deviations(value, facts, path)
    if isinstance(value, list) and "items" in facts:
        for index, item in enumerate(value):
            yield from deviations(item, facts["items"], f"{path}[{index}]")


def _object_deviations(value: dict[str, Any], facts: dict[str, Any], path: str) -> Iterator[str]:
    known = facts.get("properties", {})
    yield from (f"{path}.{name}: missing" for name in facts.get("required", []) if name not in value)
    for name, item in value.items():
        if name in known:
            yield from deviations(item, known[name], f"{path}.{name}".lstrip("."))
        elif "values" in facts:
            yield from deviations(item, facts["values"], f"{path}.{name}".lstrip("."))
        elif facts.get("closed"):
            yield f"{path}.{name}: not in the facts"


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def same(value: Any, facts: dict[str, Any], name: str) -> None:
    """Fails with every deviation that is not tolerated by name."""
    tolerated = TOLERATED.get(name)
    found = [text for text in deviations(value, facts) if not (tolerated and tolerated.match(text.split(":")[0]))]
    assert found == []


@pytest.fixture(scope="module")
def world() -> Iterator[Simulator]:
    with simulator("--seed", "11") as running:
        yield running


def ask(world: Simulator, method: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": "Bearer canary"}
    reply = requests.request(method, world.url + path, json=body, headers=headers, timeout=10)
    return reply.json() if reply.content else None


def later(world: Simulator, seconds: float) -> None:
    for step in (seconds, 1, 1):
        world.post("clock", {"advance": step})


def vast_create(world: Simulator, **extra: Any) -> Any:
    query = {"num_gpus": {"eq": 1}, "order": [["dph_total", "asc"]], "limit": 1}
    offer = ask(world, "POST", "/api/v0/bundles/", query)["offers"][0]["id"]
    body = {"image": "an/image:1", "disk": 20, "runtype": "ssh_direct", "label": "pennypod-x", "onstart": "true"}
    return ask(world, "PUT", f"/api/v0/asks/{offer}/", body | {"env": {"A": "b"}} | extra)


def test_the_check_itself_finds_deviations() -> None:
    facts = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}, "closed": True}
    assert list(deviations({"id": 1}, facts)) == []
    assert list(deviations({"id": "1"}, facts)) == ["id: '1' is no integer"]
    assert list(deviations({"id": True}, facts)) == ["id: True is no integer"]
    assert list(deviations({"x": 1}, facts)) == [".id: missing", ".x: not in the facts"]
    assert list(deviations("no", {"type": "string", "enum": ["yes"]})) == [": 'no' is none of ['yes']"]


def test_a_vast_offer_has_every_field_that_a_search_can_name(world: Simulator) -> None:
    offer = ask(world, "POST", "/api/v0/bundles/", {"limit": 1})["offers"][0]
    not_shown = {"ubuntu_version"}  # a filter of the published list that no sample row carries
    assert set(VAST["SearchFields"]) - set(offer) == not_shown


def test_vasts_instances_and_create(world: Simulator) -> None:
    made = vast_create(world)
    same(made, VAST["CreateInstance"], "CreateInstance")
    for seconds in (0, 3, 30):
        later(world, seconds)
        listing = ask(world, "GET", "/api/v1/instances/")
        same(listing, VAST["ListInstances"], "ListInstances")
    missing = set(VAST["ListInstances"]["properties"]["instances"]["items"]["properties"]) - set(
        listing["instances"][0]
    )
    assert missing == set()
    one = ask(world, "GET", f"/api/v0/instances/{made['new_contract']}/")["instances"]
    same({"instances": [one]}, VAST["ListInstances"], "ListInstances")


def test_vasts_money_and_errors(world: Simulator) -> None:
    vast_create(world)
    later(world, 3600)
    now = world.get("clock")["now"]
    filters = json.dumps({"day": {"gte": now - 86400, "lte": now + 86400}})
    same(ask(world, "GET", f"/api/v0/charges/?select_filters={filters}"), VAST["Charges"], "Charges")
    same(ask(world, "GET", "/api/v0/users/spend-rate/"), VAST["SpendRate"], "SpendRate")
    same(ask(world, "GET", "/api/v0/users/current/"), VAST["User"], "User")
    same(ask(world, "DELETE", "/api/v0/instances/1/", {}), VAST["Error"], "Error")


def test_runpods_pods_in_every_state(world: Simulator) -> None:
    def create(**extra: Any) -> Any:
        body = {"name": "pennypod-x", "image": "runpod/pytorch:1", "ports": ["22/tcp"], "env": {"A": "b"}}
        return ask(world, "POST", "/v2/pods", body | {"gpu": {"id": GPU, "count": 1}, "cloud": "COMMUNITY"} | extra)

    made = create()
    same(made, RUNPOD["Pod"], "Pod")
    one = f"/v2/pods/{made['id']}"
    for seconds in (2, 40):
        later(world, seconds)
        same(ask(world, "GET", one), RUNPOD["Pod"], "Pod")
        same(ask(world, "GET", "/v2/pods"), RUNPOD["ListPodsResponse"], "ListPodsResponse")
    same(ask(world, "POST", one + "/action", {"action": "stop"}), RUNPOD["Pod"], "Pod")
    volume = {"persistent": {"size": 20, "path": "/workspace"}}
    same(create(mounts=volume, cmd=["sleep", "1"]), RUNPOD["Pod"], "Pod")
    cpu = {"name": "x", "image": "debian", "cpu": {"id": "cpu3c", "vcpuCount": 2}}
    same(ask(world, "POST", "/v2/pods", cpu), RUNPOD["Pod"], "Pod")
    for body in ({"name": "x", "bogus": 1}, {"name": "x", "image": "i"}):
        same(ask(world, "POST", "/v2/pods", body), RUNPOD["ErrorResponse"], "ErrorResponse")


def test_runpods_catalogue_keys_and_bill(world: Simulator) -> None:
    for query in (
        "",
        "?include=AVAILABILITY&product=POD&count=1&cloud=SECURE",
        "?include=AVAILABILITY&product=POD&cloud=COMMUNITY",
    ):
        for row in ask(world, "GET", f"/v2/catalog/gpus{query}")["gpus"]:
            same(row, RUNPOD["GpuType"], "GpuType")
    centers = ask(world, "GET", "/v2/catalog/datacenters?include=GPU_AVAILABILITY")
    same(centers, RUNPOD["ListDataCentersResponse"], "ListDataCentersResponse")
    same(ask(world, "GET", "/v2/account/ssh-keys"), RUNPOD["SshKeys"], "SshKeys")
    later(world, 3600)
    made = ask(world, "POST", "/v2/registries", {"name": "a", "username": "me", "password": "secret"})
    same(made, RUNPOD["Registry"], "Registry")
    same(ask(world, "GET", f"/v2/registries/{made['id']}"), RUNPOD["Registry"], "Registry")
    listed = ask(world, "GET", "/v2/registries")
    same(listed, RUNPOD["ListRegistriesResponse"], "ListRegistriesResponse")
    assert "secret" not in str(listed)
    bill = ask(world, "GET", "/v2/billing/pods?bucketSize=hour&lastN=24")
    same(bill, RUNPOD["ListPodBillingResponse"], "ListPodBillingResponse")


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("CreatePodRequest", runpod_schema.CREATE),
        ("UpdatePodRequest", runpod_schema.UPDATE),
        ("CreateRegistryRequest", runpod_schema.REGISTRY),
    ],
)
def test_the_simulators_own_validator_knows_the_published_fields_and_no_others(name: str, check: Any) -> None:
    samples: dict[str, Any] = {"object": {}, "array": [], "string": "text", "integer": 10, "boolean": True}
    for field, facts in RUNPOD[name]["properties"].items():
        kind = facts.get("type", "object")
        value = samples[kind if isinstance(kind, str) else kind[0]]
        unknown = f"$: additional properties '{field}' not allowed"
        assert unknown not in check({"name": "x", field: value}, "$"), field
    assert "$: additional properties 'interruptible' not allowed" in check({"name": "x", "interruptible": True}, "$")
