#!/usr/bin/env python3
"""Reports on a training from the pod, one line per frame. Standalone: Python 3.8+, standard library only.

    watch_log.py '{"home": "/root/pennypod", "session": "pennypod", "offset": 0, "poll_s": 2}'

A frame is ``@pennypod {...}``: what status.json says, who is alive, and the next bytes of train.log in base64. Options:

once         one frame without log bytes, then the end
wait_run     with `once`: wait up to wait_s until status.json speaks of this run and the tmux session lives or is over
offset       the first log byte that is wanted
before       sha256 (hex) of the up to 4096 bytes in front of offset: with another log, reading starts again at 0
poll_s       the longest silence between two frames
patterns     look for a checkpoint (find_files.py beside the log's onpod/ folder) every check_s seconds
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

MARK = "@pennypod "
TICK_S = 0.25
TMUX_EVERY_S = 2.0
CHUNK_BYTES = 131072
PROOF_BYTES = 4096


def read_status(home: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(home, "status.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def alive(pid: Any, start: Any) -> bool:
    """Whether this very process lives; a zombie that nobody reaps does not."""
    if not pid:
        return False
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (OSError, TypeError):
        return False
    return fields[0] not in (b"Z", b"X") and (start is None or int(fields[19]) == start)


def tmux_lives(session: str) -> bool | None:
    """Whether the session exists; None when tmux cannot be asked."""
    try:
        done = subprocess.run(
            ["tmux", "has-session", "-t", "=" + session],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode == 0


class Watch:
    def __init__(self, options: dict[str, Any]) -> None:
        self.home: str = options["home"]
        self.session: str = options.get("session", "pennypod")
        self.log = os.path.join(self.home, "train.log")
        self.offset = int(options.get("offset", 0))
        self.before: str = options.get("before", "")
        self.poll_s = float(options.get("poll_s", 2.0))
        self.finder = Finder(self.home, options)
        self.tmux: bool | None = None
        self.tmux_at = 0.0

    def frame(self) -> dict[str, Any]:
        """State without log bytes. Who lives is asked first: a process that is gone has written its last status."""
        known = read_status(self.home) or {}
        supervisor = alive(known.get("supervisor_pid"), known.get("supervisor_start"))
        child = alive(known.get("pid"), known.get("pid_start"))
        status = read_status(self.home)
        now = time.monotonic()
        if self.tmux_at == 0.0 or now - self.tmux_at >= TMUX_EVERY_S:
            self.tmux, self.tmux_at = tmux_lives(self.session), now
        return {
            "t": time.time(),
            "status": status,
            "supervisor": supervisor,
            "child": child,
            "tmux": self.tmux,
            "size": self.size(),
            "quiet_s": self.quiet_s(status),
        }

    def quiet_s(self, status: dict[str, Any] | None) -> float:
        """Seconds since the trainer's last output; 0 where the log cannot tell, as on a full disk."""
        known = status or {}
        try:
            log = os.stat(self.log)
        except OSError:
            return max(0.0, time.time() - float(known.get("started") or time.time()))
        if int(known.get("output_bytes") or 0) > log.st_size:
            return 0.0
        return max(0.0, time.time() - log.st_mtime)

    def size(self) -> int:
        try:
            return os.stat(self.log).st_size
        except OSError:
            return 0

    def same_log(self) -> bool:
        """Whether the log still begins with what the reader has."""
        if self.size() < self.offset:
            return False
        if not self.before:
            return True
        start = max(0, self.offset - PROOF_BYTES)
        try:
            with open(self.log, "rb") as file:
                file.seek(start)
                return hashlib.sha256(file.read(self.offset - start)).hexdigest() == self.before
        except OSError:
            return False

    def next_bytes(self) -> bytes:
        try:
            with open(self.log, "rb") as file:
                file.seek(self.offset)
                return file.read(CHUNK_BYTES)
        except OSError:
            return b""

    def stream(self) -> None:
        reset = bool(self.offset) and not self.same_log()
        if reset:
            self.offset = 0
        sent_at = 0.0
        sent_state: Any = None
        while True:
            frame = self.frame()
            data = self.next_bytes()
            status = frame["status"] or {}
            state = (status.get("state"), frame["supervisor"], frame["tmux"])
            over = status.get("state") in ("finished", "failed_to_start")
            drained = self.offset + len(data) >= frame["size"] and not self.size() > frame["size"]
            checkpoint = self.finder.look(time.monotonic())
            if data or checkpoint or over or state != sent_state or time.monotonic() - sent_at >= self.poll_s:
                end = over and drained
                frame.update(
                    offset=self.offset,
                    data=base64.b64encode(data).decode(),
                    reset=reset,
                    drained=drained,
                    end=end,
                    checkpoint=checkpoint,
                )
                emit(frame)
                self.offset += len(data)
                reset, sent_at, sent_state = False, time.monotonic(), state
                if end:
                    return
            if drained:
                time.sleep(TICK_S)


class Finder:
    """Runs find_files.py beside the stream: hashing a large checkpoint must not hold the log back."""

    def __init__(self, home: str, options: dict[str, Any]) -> None:
        self.script = os.path.join(home, "onpod", "find_files.py")
        self.root = os.path.join(home, "out")
        self.patterns: list[str] = options.get("patterns") or []
        self.every_s = float(options.get("check_s", 5.0))
        self.known: list[Any] = options.get("known") or []
        self.process: subprocess.Popen[bytes] | None = None
        self.next_at = 0.0

    def look(self, now: float) -> dict[str, Any] | None:
        """A new checkpoint, once per version of it."""
        if self.process is None:
            if self.patterns and now >= self.next_at:
                self.start()
            return None
        if self.process.poll() is None:
            return None
        output = self.process.stdout.read() if self.process.stdout else b""
        self.process, self.next_at = None, now + self.every_s
        for line in output.decode("utf-8", "replace").splitlines():
            if line.startswith(MARK):
                return self.fresh(json.loads(line[len(MARK) :]).get("files") or [])
        return None

    def fresh(self, files: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not files or not files[0]["sha256"]:
            return None  # nothing, or the version that is known
        self.known = [files[0]["path"], files[0]["bytes"], files[0]["mtime_ns"]]
        return files[0]

    def start(self) -> None:
        options = {"root": self.root, "patterns": self.patterns, "best": True, "known": self.known}
        try:
            self.process = subprocess.Popen(
                [sys.executable, self.script, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self.next_at = time.monotonic() + self.every_s


def emit(frame: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(frame) + "\n")
    sys.stdout.flush()


def once(watch: Watch, run: str, wait_s: float) -> None:
    """One frame; with `run`, wait until the run is seen to live, or to be over."""
    give_up_at = time.monotonic() + wait_s
    while True:
        frame = watch.frame()
        status = frame["status"] or {}
        over = status.get("state") in ("finished", "failed_to_start")
        proven = status.get("run") == run and (over or (frame["supervisor"] and frame["tmux"]))
        if not run or proven or time.monotonic() >= give_up_at:
            emit(frame)
            return
        watch.tmux_at = 0.0
        time.sleep(0.1)


def main(argv: list[str]) -> int:
    options = json.loads(argv[1])
    watch = Watch(options)
    try:
        if options.get("once"):
            once(watch, options.get("wait_run", ""), float(options.get("wait_s", 15.0)))
        else:
            watch.stream()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody listens any more
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
