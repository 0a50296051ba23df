"""What is kept of a call: its shape, and nothing private."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod.exchanges import HIDDEN, Exchange, Scrubber
from pennypod.model.ids import Lease
from pennypod.recording import VARIABLE, read_exchanges, recorder, start_recording, stop_recording
from runpod_shapes import pod_row
from vast_shapes import instance_row

KEY = "canary-5a1f"
OURS = Lease("demo-1201-abcde", 1, 1_900_000_000, "abcde").name
SCRUB = Scrubber(b"salt", KEY).scrub


def kept(answer: Any, path: str = "/api/v1/instances/", **more: Any) -> Any:
    return SCRUB(Exchange("vast", 1.0, "GET", path, answer=answer, status=200, **more)).answer


def test_an_instance_keeps_its_shape_and_loses_what_is_private() -> None:
    row = instance_row(
        label=OURS, jupyter_token="t0k3n", onstart="echo ssh-ed25519 AAAA", public_ipaddr="203.0.113.77 \n"
    )
    answer = kept({"instances": [row], "total_instances": 1})
    (shown,) = answer["instances"]
    assert {name: type(value) for name, value in shown.items()} == {name: type(value) for name, value in row.items()}
    assert shown["label"] == OURS
    assert shown["actual_status"] == "running"
    assert (shown["jupyter_token"], shown["onstart"]) == (HIDDEN, HIDDEN)
    assert shown["id"] != row["id"]
    assert len(str(shown["id"])) == len(str(row["id"]))
    assert shown["public_ipaddr"].endswith(" \n")
    assert "203.0.113.77" not in json.dumps(answer)
    assert (shown["gpu_name"], shown["ports"]) == (row["gpu_name"], row["ports"])


def test_a_pod_of_runpod_keeps_its_gpu_and_loses_its_id() -> None:
    row = pod_row(name=OURS, env={"PUBLIC_KEY": "ssh-ed25519 AAAA", "A": "b"})
    shown = kept({"pods": [row]}, "/v2/pods")["pods"][0]
    assert shown["gpu"]["id"] == "NVIDIA GeForce RTX 4090"
    assert shown["dataCenterId"] == "EU-RO-1"
    assert shown["id"] != row["id"]
    assert len(shown["id"]) == len(row["id"])
    assert shown["env"] == {"PUBLIC_KEY": HIDDEN, "A": HIDDEN}
    assert row["id"] not in json.dumps(shown)


def test_the_same_id_is_the_same_wherever_it_shows() -> None:
    made = SCRUB(Exchange("vast", 1, "PUT", "/api/v0/asks/7654321/", answer={"new_contract": 12345678}))
    looked = SCRUB(
        Exchange("vast", 2, "GET", "/api/v0/instances/12345678/", answer={"msg": "Instance 12345678 not found."})
    )
    number = made.answer["new_contract"]
    assert looked.path == f"/api/v0/instances/{number}/"
    assert str(number) in looked.answer["msg"]
    assert "7654321" not in made.path
    other = Scrubber(b"other salt").scrub(Exchange("vast", 1, "PUT", "/x", answer={"new_contract": 12345678}))
    assert other.answer != made.answer


def test_pods_that_are_not_ours_are_not_kept_at_all() -> None:
    rows = [instance_row(1, "somebody's secret project"), instance_row(2, None), instance_row(3, OURS)]
    answer = kept({"instances": rows})
    assert [row["label"] for row in answer["instances"]] == [OURS]


def test_of_an_account_only_the_types_are_kept() -> None:
    user = {"id": 4711, "email": "a@b.example", "username": "jane", "credit": 12.34, "balance": 0.0, "can_pay": True}
    shown = kept(user | {"api_key": KEY, "ssh_key": None}, "/api/v0/users/current/")
    assert {name: type(value) for name, value in shown.items()} == {
        "id": int,
        "email": str,
        "username": str,
        "credit": float,
        "balance": float,
        "can_pay": bool,
        "api_key": str,
        "ssh_key": type(None),
    }
    said = json.dumps(shown)
    assert not [word for word in ("4711", "jane", "b.example", "12.34", KEY) if word in said]
    money = kept({"data": {"myself": {"clientBalance": 98.7}}}, "/graphql")
    assert money == {"data": {"myself": {"clientBalance": 1.0}}}


@given(st.text(max_size=40))
def test_a_key_shows_nowhere(text: str) -> None:
    exchange = Exchange(
        "vast",
        1,
        "GET",
        "/x",
        query={"q": text + KEY},
        body={"note": [KEY + text]},
        answer={"msg": f"{text} {KEY}"},
        trouble=KEY,
    )
    assert KEY not in json.dumps(asdict(SCRUB(exchange)))


def test_a_recording_goes_on_until_it_is_stopped(tmp_path: Path) -> None:
    place = tmp_path / "calls.jsonl"
    assert recorder({}, KEY) is None
    keep = recorder({VARIABLE: str(place)}, KEY)
    assert keep is not None
    exchange = Exchange("vast", 2.0, "GET", "/api/v0/instances/12345678/", status=404, answer={"success": False})
    keep(exchange)
    assert not place.exists(), "the salt is not there: nobody is recording"
    start_recording(place)
    keep(exchange)
    keep(replace(exchange, at=1.0))
    stop_recording(place)
    keep(exchange)
    assert [found.at for found in read_exchanges(place)] == [1.0, 2.0]
    assert (place.stat().st_mode & 0o777, list(tmp_path.glob("*.salt"))) == (0o600, [])


@pytest.mark.parametrize("place", ["/proc/none/calls", "/dev/full"])
def test_a_recording_that_cannot_be_written_disturbs_nobody(place: str) -> None:
    keep = recorder({VARIABLE: place}, KEY)
    assert keep is not None
    keep(Exchange("vast", 1.0, "GET", "/x"))
