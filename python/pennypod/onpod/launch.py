#!/usr/bin/env python3
"""Starts a run's training in tmux, at most once. Standalone: Python 3.8+, standard library only.

Reads one JSON object from standard input and prints one line ``@pennypod {...}``:

in    {"home", "session", "run", "spec": what supervise.py reads, "scripts": {file name: source}, "check": only look}
out   {"launched": true|false, "state": ""|"running"|"finished"|"failed_to_start", "run": whose state that is}
      or {"error": text, "kind": "no_tmux"|"busy"|"disk_full"|"failed"}
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

MARK = "@pennypod "
TRIES = 5
STATUS_S = 10.0


class FailedError(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def read_status(home: str) -> dict[str, Any]:
    try:
        with open(os.path.join(home, "status.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def alive(status: dict[str, Any]) -> bool:
    try:
        with open("/proc/%d/stat" % status["supervisor_pid"], "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (OSError, TypeError, KeyError):
        return False
    return fields[0] != b"Z" and int(fields[19]) == status.get("supervisor_start", int(fields[19]))


def write(path: str, text: str, mode: int) -> None:
    handle = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def tmux(*args: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["tmux", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise FailedError("failed", "tmux %s: %s" % (args[0], exc)) from exc


def launch(order: dict[str, Any]) -> dict[str, Any]:
    home = order["home"]
    if order.get("check"):
        return look(order) or {"launched": False, "state": "", "run": order["run"]}
    os.makedirs(os.path.join(home, "onpod"), exist_ok=True)
    os.makedirs(os.path.join(home, "out"), exist_ok=True)
    with open(os.path.join(home, "launch.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two launches at once: the second one finds what the first has started
        return look(order) or start(order)


def look(order: dict[str, Any]) -> dict[str, Any] | None:
    """The answer when there is nothing to start. Raises when nothing may be started."""
    home = order["home"]
    status = read_status(home)
    state = str(status.get("state", ""))
    if status.get("run") == order["run"] and state in ("running", "finished"):
        return {"launched": False, "state": state, "run": order["run"]}
    if state == "running" and alive(status):
        raise FailedError("busy", "run %s is training in %s" % (status.get("run"), home))
    if not shutil.which("tmux"):
        raise FailedError("no_tmux", "tmux is not installed on the pod")
    return None


def start(order: dict[str, Any]) -> dict[str, Any]:
    home, session = order["home"], order["session"]
    if read_status(home).get("run") == order["run"]:
        os.unlink(os.path.join(home, "status.json"))  # an attempt that could not start must not pass for this one
    for name, source in order["scripts"].items():
        write(os.path.join(home, "onpod", name), source, 0o755)
    write(os.path.join(home, "launch.json"), json.dumps(order["spec"]), 0o600)
    # A server first, and in the same call: one that is started by itself ends again when it has no session, and may do
    # so while `new-session` is connecting to it.
    new_session = ["new-session", "-d", "-s", session, "-c", os.path.join(home, "out")]
    supervisor = [sys.executable, os.path.join(home, "onpod", "supervise.py"), home]
    why = ""
    for _ in range(TRIES):
        done = tmux("start-server", ";", *new_session, *supervisor)
        # "duplicate session": somebody else was faster by a moment. Whether it runs our run is for the proof to say.
        if done.returncode == 0 or "duplicate session" in done.stderr:
            wait_for_status(order)
            return {"launched": done.returncode == 0, "state": "", "run": order["run"]}
        why = done.stderr.strip() or "exit status %d" % done.returncode
        time.sleep(0.3)  # a server that was just ending
    raise FailedError("failed", "tmux new-session: %s" % why)


def wait_for_status(order: dict[str, Any]) -> None:
    give_up_at = time.monotonic() + STATUS_S
    while read_status(order["home"]).get("run") != order["run"] and time.monotonic() < give_up_at:
        time.sleep(0.05)


def main() -> int:
    try:
        answer = launch(json.load(sys.stdin))
    except FailedError as exc:
        answer = {"error": str(exc), "kind": exc.kind}
    except OSError as exc:
        full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        answer = {"error": str(exc), "kind": "disk_full" if full else "failed"}
    print(MARK + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
