#!/usr/bin/env python3
"""What `pennypod serve` costs: taking signed webhooks, beside Debian's `webhook` package, and runs that wait.

    make bench-serve              JSON on stdout, progress and one line per result on stderr

Both servers are asked by the same client, in turns, over as many connections, with bodies of the same size whose
HMAC-SHA256 they check. They do not do the same work: `webhook` starts a command and forgets; ours has the run on disk
when it answers, once per delivery. Machines are noisy, so read the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from serving import SECRET, Rehearsal, signature
from workspace import wait_until

ROUNDS = 3
HOOK = {
    "id": "train",
    "execute-command": "/bin/true",
    "http-methods": ["POST"],
    "trigger-rule-mismatch-http-response-code": 403,
    "trigger-rule": {
        "match": {
            "type": "payload-hmac-sha256",
            "secret": SECRET,
            "parameter": {"source": "header", "name": "X-Hub-Signature-256"},
        }
    },
}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of requests against one server: seconds, in all and of each."""

    total: float
    each: list[float]

    @property
    def per_s(self) -> float:
        return len(self.each) / self.total


# --- the client -------------------------------------------------------------------------------------------------------


def requests_for(number: int, label: str) -> list[bytes]:
    """Signed for both servers, every one another delivery."""
    made = []
    for index in range(number):
        body = json.dumps({"action": "train_start", "job": "tiny", "note": f"{label}-{index:06}"}).encode()
        stamp = str(int(time.time()))
        github = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        head = (
            "POST /hooks/train HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nX-Pennypod-Timestamp: {stamp}\r\n"
            f"X-Pennypod-Signature: {signature(body, stamp)}\r\nX-Hub-Signature-256: sha256={github}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


async def send_all(port: int, requests: Sequence[bytes], connections: int, wanted: int) -> Round:
    """Every request once, over so many connections that stay open. Exits when an answer has not the status `wanted`."""
    waiting: Iterator[bytes] = iter(requests)
    each: list[float] = []

    async def one_connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in waiting:
            began = time.perf_counter()
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:"))
            body = await reader.readexactly(length)
            each.append(time.perf_counter() - began)
            if int(head.split()[1]) != wanted:
                raise SystemExit(f"not {wanted}: {head}{body.decode(errors='replace')}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(one_connection() for _ in range(connections)))
    return Round(time.perf_counter() - began, each)


# --- accepting --------------------------------------------------------------------------------------------------------


def accepting(root: Path, number: int, connections: int) -> dict[str, Any]:
    """Both servers in turns. Without the package `webhook`, ours alone."""
    ours = Rehearsal(root, "limits: {running: 1, queue: 10000, starts_per_minute: 10000}")
    program = shutil.which("webhook")
    if program is None:
        say("webhook is not installed (apt-get install webhook): only our own figures")
    try:
        ours.start()
        ports = {"pennypod": (ours.port, 202)}
        if program is not None:
            ports["webhook"] = (free_port(), 200)
            other = start_webhook(program, root, ports["webhook"][0])
        rounds: dict[str, list[Round]] = {name: [] for name in ports}
        spent = 0.0
        for turn in range(ROUNDS + 1):
            for name, (port, status) in ports.items():
                requests = requests_for(number if turn else 50, f"{turn}")
                before = cpu_s(ours.pid)
                done = asyncio.run(send_all(port, requests, connections, status))
                if turn:  # the first one only warms up
                    rounds[name].append(done)
                    spent += cpu_s(ours.pid) - before if name == "pennypod" else 0.0
        if program is not None:
            other.terminate()
            other.wait(10)
    finally:
        ours.close()
    result: dict[str, Any] = {"requests": number * ROUNDS, "connections": connections}
    for name, done in rounds.items():
        result[name] = summary(done)
        say(f"{name}: {result[name]['per_s']} accepted/s, p99 {result[name]['p99_ms']} ms")
    result["pennypod"]["cpu_ms"] = round(1000 * spent / (number * ROUNDS), 2)
    if program is not None:
        result["ratio_rate"] = round(result["pennypod"]["per_s"] / result["webhook"]["per_s"], 3)
        result["ratio_p99"] = round(result["pennypod"]["p99_ms"] / result["webhook"]["p99_ms"], 2)
        say(f"pennypod/webhook: {result['ratio_rate']} of its accept rate, {result['ratio_p99']} times its p99")
    return result


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    each = sorted(seconds for done in rounds for seconds in done.each)
    return {
        "per_s": round(statistics.median(done.per_s for done in rounds), 1),
        "p50_ms": round(1000 * each[len(each) // 2], 2),
        "p99_ms": round(1000 * each[len(each) * 99 // 100], 2),
    }


def start_webhook(program: str, root: Path, port: int) -> subprocess.Popen[bytes]:
    hooks = root / "hooks.json"
    hooks.write_text(json.dumps([HOOK]))
    log = (root / "webhook.log").open("wb")
    command = [program, "-hooks", str(hooks), "-ip", "127.0.0.1", "-port", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    wait_until(lambda: is_open(port), 20, "webhook listens")
    return process


def cpu_s(pid: int) -> float:
    """CPU seconds of that process alone."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# --- waiting ----------------------------------------------------------------------------------------------------------


def waiting(root: Path, runs: int, poll_s: int, seconds: int) -> dict[str, Any]:
    """So many trainings watched by one process, each looked at every `poll_s`; what that costs over `seconds`.

    The rehearsed pods refuse a login, so a look is an `ssh` that starts and ends: counted apart, as `children`.
    """
    server = Rehearsal(root, f"poll_s: {poll_s}\nlimits: {{running: {runs}, per_job: {runs}, queue: 10000}}")
    try:
        server.start()
        say(f"starting {runs} runs")
        for _ in range(runs):
            server.start_run()
        watched = f"pennypod_runs_watched {float(runs)}"
        wait_until(lambda: watched in server.metrics(), 900, f"{runs} runs are watched")
        process = psutil.Process(server.pid)
        before = process.cpu_times()
        time.sleep(seconds)
        after = process.cpu_times()
        own = after.user + after.system - before.user - before.system
        children = after.children_user + after.children_system - before.children_user - before.children_system
        result = {
            "runs": runs,
            "poll_s": poll_s,
            "rss_mib": round(process.memory_info().rss / 2**20, 1),
            "threads": process.num_threads(),
            "cpu_s_per_min": round(own * 60 / seconds, 2),
            "cpu_s_per_min_children": round(children * 60 / seconds, 2),
        }
    finally:
        server.close()
    say(
        f"{runs} runs wait: {result['rss_mib']} MiB, {result['cpu_s_per_min']} CPU s/min"
        f" and {result['cpu_s_per_min_children']} in ssh"
    )
    return result


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(number: int = 400, connections: int = 16, runs: int = 200, seconds: int = 60) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pennypod-bench-") as scratch:
        result: dict[str, Any] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
        for name, part in (
            ("accepting", lambda root: accepting(root, number, connections)),
            ("waiting", lambda root: waiting(root, runs, 30, seconds)),
        ):
            (Path(scratch) / name).mkdir()
            result[name] = part(Path(scratch) / name)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400, help="in each of the three rounds")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--runs", type=int, default=200, help="how many wait at once")
    parser.add_argument("--seconds", type=int, default=60, help="how long they are measured")
    given = parser.parse_args()
    print(json.dumps(measure(given.requests, given.connections, given.runs, given.seconds), indent=2))


if __name__ == "__main__":
    main()
