"""`pennypod live` with a simulator in the part of the real service: told apart where it differs, and only there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import canaries
import pytest
import requests
from pennypod.exchanges import Exchange, Scrubber
from pennypod.model.offer import Need
from pennypod.providers.http import Http
from pennypod.providers.runpod import RunpodProvider
from pennypod.providers.vast import VastProvider
from pennypod.simulator.compare import Difference, as_document, as_markdown, differences
from pennypod.simulator.replay import Replayed, replay
from simulated import KEYS, RentingWorld, Simulator, simulator
from workspace import Workspace

Change = Callable[[str, int, Any], tuple[int, Any]]
BOTH = pytest.mark.parametrize("provider", ["vast", "runpod"])


@contextmanager
def changed(real: str, change: Change) -> Iterator[str]:
    """A service before a simulator that changes its JSON answers: (path, status, answer) to (status, answer)."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            sent = {name: value for name, value in self.headers.items() if name.lower() == "authorization"}
            reply = requests.request(self.command, real + self.path, data=body, headers=sent, timeout=10)
            status, payload = reply.status_code, reply.content
            if payload and "json" in reply.headers["Content-Type"]:
                status, answer = change(self.path, status, reply.json())
                payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", reply.headers.get("Content-Type", ""))
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

        def log_message(self, *_args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def as_it_is(_path: str, status: int, answer: Any) -> tuple[int, Any]:
    return status, answer


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with simulator("--seed", "31") as running:
        yield running


def recorded(sim: Simulator, folder: Path, provider: str, change: Change = as_it_is) -> list[Replayed]:
    """A whole life of a pod at the "real" service, recorded, and played again to a simulator of its own."""
    kept: list[Exchange] = []
    scrub = Scrubber(b"salt", KEYS[provider]).scrub
    world = RentingWorld(folder, sim)
    with changed(sim.url, change) as url:
        http = Http(provider, url, KEYS[provider], world.clock, record=lambda exchange: kept.append(scrub(exchange)))
        client = {"vast": VastProvider, "runpod": RunpodProvider}[provider](http, world.clock)
        world.providers[provider] = world.rental._providers[provider] = client  # type: ignore[index]
        client.balance_micros()
        world.rent(sorted(client.offers(Need(gpu=("RTX 4090",))), key=lambda offer: offer.price_micros_per_h))
        world.end()
    world.ledger.close()
    assert sim.live() == []
    assert not [item for item in kept if KEYS[provider] in json.dumps(item.answer)]
    return replay(kept)


def found(replayed: list[Replayed]) -> set[tuple[str, str, str, str, str]]:
    return {(d.endpoint, d.kind, d.where, d.real, d.simulated) for d in differences(replayed)}


@BOTH
def test_a_service_that_is_as_expected_differs_in_nothing(sim: Simulator, tmp_path: Path, provider: str) -> None:
    replayed = recorded(sim, tmp_path, provider)
    assert differences(replayed) == []
    assert all(item.known for item in replayed)
    assert len({item.endpoint for item in replayed}) >= 5
    text = as_markdown(provider, replayed, [])
    assert "No difference" in text


def test_what_a_service_names_types_and_says_otherwise_is_listed(sim: Simulator, tmp_path: Path) -> None:
    def change(path: str, status: int, answer: Any) -> tuple[int, Any]:
        if "/instances/" in path and isinstance(answer, dict) and answer.get("instances"):
            rows = answer["instances"] if isinstance(answer["instances"], list) else [answer["instances"]]
            for row in rows:
                row["image_name"] = row.pop("image_uuid")  # renamed
                row["gpu_temp"] = "41 C" if row["gpu_temp"] is not None else None  # another type
                row["verification"] = "golden"  # a word that nobody knew
        return status, answer

    replayed = recorded(sim, tmp_path, "vast", change)
    assert {row for row in found(replayed) if row[0] == "vast.show"} == {
        ("vast.show", "missing", "instances.image_name", "string", ""),
        ("vast.show", "extra", "instances.image_uuid", "", "string"),
        ("vast.show", "type", "instances.gpu_temp", "string", "number"),
        ("vast.show", "word", "instances.verification", "golden", ""),
    }
    assert {row[0] for row in found(replayed)} <= {"vast.show", "vast.list"}
    listed = as_document(replayed, differences(replayed))
    assert [row["where"] for row in listed["differences"] if row["kind"] == "missing"][-1] == "instances.image_name"
    report = as_markdown("vast", replayed, differences(replayed))
    assert "| vast.show | `instances.gpu_temp` | `string` | `number` |" in report


def test_another_status_code_is_listed_with_both(sim: Simulator, tmp_path: Path) -> None:
    def change(path: str, status: int, answer: Any) -> tuple[int, Any]:
        return (200 if status == 201 else status), answer

    replayed = recorded(sim, tmp_path, "runpod", change)
    assert differences(replayed) == [Difference("runpod.create", "status", "", "200", "201")]


# --- the command ------------------------------------------------------------------------------------------------------


def live(workspace: Workspace, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "pennypod"), "live", "--root", str(workspace.root), *args]
    environment = {name: value for name, value in workspace.environment.items() if name != "CI"}
    return subprocess.run(
        command, env=environment | environ, cwd=workspace.root, capture_output=True, text=True, timeout=280
    )


def test_it_refuses_in_ci_without_a_key_above_the_cap_and_without_credit(sim: Simulator, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    ours = {"VAST_API_KEY": KEYS["vast"], "VAST_URL": sim.url}
    tiny = ("--provider", "vast", "-j", "tiny", "--max-usd")
    for args, environ, words in (
        ([*tiny, "1"], ours | {"CI": "true"}, "PENNYPOD_LIVE_IN_CI"),
        ([*tiny, "1"], {}, "VAST_API_KEY is not set"),
        ([*tiny, "0.0001"], ours, "over max_cost_usd"),
        ([*tiny, "100"], ours, "at most 20"),
    ):
        done = live(workspace, *args, **environ)
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
    sim.post("balance", {"provider": "vast", "usd": 0.00001})
    done = live(workspace, *tiny, "1", **ours)
    assert (done.returncode, "add credit" in done.stderr) == (1, True), done.stderr
    assert sim.ever() == []


@pytest.mark.heavy
@pytest.mark.pod
def test_a_live_run_trains_destroys_and_leaves_its_report(tmp_path: Path) -> None:
    key = canaries.new_key("runpod")
    with simulator("--pods", "container", "--speed", "1", "--seed", "5") as real:
        workspace = Workspace(tmp_path)
        out = workspace.artifacts / "live"
        places = {
            "RUNPOD_API_KEY": key,
            "RUNPOD_API_BASE_URL": real.url,
            "CI": "1",
            "PENNYPOD_LIVE_IN_CI": "spend-money",
        }
        args = ("--provider", "runpod", "-j", "tiny", "--max-usd", "0.25", "--out", str(out))
        done = live(workspace, *args, **places)
        assert done.returncode == 0, done.stdout + done.stderr
        assert real.live() == []
        assert "0 differences" in done.stdout
        assert json.loads((out / "differences.json").read_text())["differences"] == []
        calls = json.loads((out / "exchanges.json").read_text())
        assert {"runpod.create", "runpod.destroy", "runpod.list"} <= {call["endpoint"] for call in calls}
        assert "No difference" in (out / "report.md").read_text()
        assert canaries.in_files([key], [workspace.artifacts, workspace.home]) == []
        pods = {pod["id"] for pod in real.ever()}
        kept = (out / "exchanges.json").read_text()
        assert not [pod for pod in pods if pod in kept]
        assert not list(out.glob("*.salt"))
