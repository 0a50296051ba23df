"""`pennypod simulate` as a command: files, ports, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from pennypod.cli import main; main()", "simulate", "--port", "0", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refused(*options: str) -> str:
    process = start(*options)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1, (out, err)
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    return err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_says_where_it_is_and_ends_when_told(number: signal.Signals) -> None:
    process = start("--seed", "5")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["VAST_URL"] == ready["RUNPOD_API_BASE_URL"] == ready["url"]
    assert requests.get(f"{ready['url']}/_sim/pods", timeout=5).json()["live"] == []
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "", "")


def test_market_and_faults_come_from_files(tmp_path: Path) -> None:
    market, faults = tmp_path / "market.yml", tmp_path / "faults.json"
    market.write_text("seed: 9\nvast:\n  machines:\n    - {gpu_name: RTX_4090, num_gpus: 1, dph_per_gpu: 0.5}\n")
    faults.write_text(json.dumps([{"endpoint": "vast.search", "fault": "error", "nth": 2, "status": 502}]))
    process = start("--market", str(market), "--faults", str(faults), "--seed", "1")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["seed"] == 9, "the file's seed wins"
    search = f"{ready['url']}/api/v0/bundles/"
    replies = [requests.post(search, json={}, timeout=5) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 502, 200]
    assert [offer["gpu_name"] for offer in replies[0].json()["offers"]] == ["RTX 4090"]
    process.terminate()
    process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--market", "vast: {machines: [{colour: red}]}", "colour"),
        ("--market", "vast: {machines: [{num_gpus: many}]}", "num_gpus of a vast machine is a number"),
        ("--market", "runpod: {gpus: [{id: NVIDIA A40, secure: dear}]}", "secure of a runpod gpu is a number"),
        ("--market", "machines: []", "no part machines"),
        ("--market", "[1, 2]", "object"),
        ("--market", "vast: [", "cannot be read"),
        ("--market", "boot: {vast: {loading_s: soon}}", "boot.vast"),
        ("--faults", "just text", "list of rules"),
        ("--faults", "faults: [{fault: meteor}]", "meteor"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_is_wrong(tmp_path: Path, option: str, content: str, says: str) -> None:
    file = tmp_path / "file.yml"
    file.write_text(content)
    assert says in refused(option, str(file))


def test_a_missing_file_and_a_port_in_use(tmp_path: Path) -> None:
    assert "cannot be read" in refused("--market", str(tmp_path / "none.yml"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port: Any = taken.getsockname()[1]
        assert "cannot listen" in refused("--port", str(port))
