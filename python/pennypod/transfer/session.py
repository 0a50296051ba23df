"""One conversation with a program on the pod, and how progress is counted."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from pennypod.errors import DiskFullError, SshError, TransferError
from pennypod.ssh import SSH_FAILED, Ssh, end_process, last_line, script_command
from pennypod.transfer.plan import megabytes

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).parent.parent / "onpod" / "manifest.py"
MARK = "pennypod-manifest-1"
# Without a byte in either direction for this long the line counts as broken; hashing on the pod says a line per second.
STALL_S = 120.0
PIPE_BYTES = 1 << 20
MAX_NOISE_BYTES = 1 << 17
RC_LINE_BROKE = 4  # manifest.py met the end of its input in the middle


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is. `rate_bytes_per_s` counts what really moved, not what was there already."""

    bytes_done: int
    bytes_total: int
    files_done: int
    files_total: int
    rate_bytes_per_s: float


class LineBrokenError(Exception):
    """The connection ended before the answer was complete; whatever arrived is still good."""


class Meter:
    """Counts, from any thread, and calls back at most four times a second, in the thread that made it only."""

    interval_s = 0.25

    def __init__(self, on_progress: Callable[[Progress], None] | None, bytes_total: int, files_total: int) -> None:
        self._on_progress = on_progress
        self.bytes_total, self.files_total = bytes_total, files_total
        self.bytes_done = self.files_done = 0
        self.moved = 0
        self._started = time.monotonic()
        self._next = 0.0
        self._lock = threading.Lock()
        self._owner = threading.get_ident()

    def start_from(self, bytes_done: int, files_done: int) -> None:
        """What is known to be there already."""
        self.bytes_done, self.files_done = bytes_done, files_done
        self.show()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes_done += count
            self.moved += count
        self.tick()

    def add_file(self) -> None:
        with self._lock:
            self.files_done += 1

    def tick(self) -> None:
        """Call back if it is time."""
        if threading.get_ident() == self._owner and time.monotonic() >= self._next:
            self.show()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def show(self) -> None:
        self._next = time.monotonic() + self.interval_s
        if self._on_progress is not None:
            rate = self.moved / max(self.seconds, 1e-3)
            done = min(self.bytes_done, self.bytes_total)
            self._on_progress(Progress(done, self.bytes_total, self.files_done, self.files_total, rate))


class Session:
    """A program of ours running on the pod, with our end of its stdin and stdout. A context manager: leaving it ends
    ssh."""

    def __init__(
        self, ssh: Ssh, command: str, *, stall_s: float = STALL_S, script: Path = SCRIPT, mark: str = MARK
    ) -> None:
        """`script` is the program, `mark` what its first line says."""
        self._ssh = ssh
        self._source, self._mark = script.read_bytes(), mark
        # -I: nothing in the pod's working folder can stand in for a module; -S: starts faster.
        self._process = ssh.popen(script_command(self._source, script.name, [command], flags="-I -S"))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin.fileno()
        self._stdout = self._process.stdout
        with contextlib.suppress(OSError):  # lets reading here and encrypting there go on side by side
            fcntl.fcntl(self._stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._moved_at = time.monotonic()
        self._closed = threading.Event()
        self._stall_s = stall_s
        self._watchdog = threading.Thread(target=self._watch, daemon=True)
        self._watchdog.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._closed.set()
        self._watchdog.join()
        end_process(self._process)

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._stall_s / 4)):
            if time.monotonic() - self._moved_at > self._stall_s:
                self._process.kill()  # the reader or writer then meets the end of its pipe
                return

    def touch(self) -> None:
        """Nothing is due from the other end now: a silence so far means nothing."""
        self._moved_at = time.monotonic()

    def stop(self) -> None:
        """End ssh, from any thread: whoever reads or writes meets a broken line."""
        self._process.kill()

    def write(self, *parts: bytes | memoryview) -> None:
        """Send bytes. When the pod has hung up, raises what it said before, or LineBrokenError."""
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    count = os.write(self._stdin, rest)
                    self._ssh.traffic.sent += count
                    rest = rest[count:]
                    self._moved_at = time.monotonic()
        except BrokenPipeError:
            while True:  # what the pod said last is worth more than "broken pipe"
                self.message()

    def tell(self, message: dict[str, Any]) -> None:
        self.write(json.dumps(message).encode("ascii") + b"\n")

    def begin(self, request: dict[str, Any] | None) -> None:
        """Send the program and its request, if there is one yet; skip whatever a login shell prints before the
        program's first own line."""
        self.write(self._source)
        if request is not None:
            self.tell(request)
        noise = 0
        while noise < MAX_NOISE_BYTES:
            line = self._line()
            with contextlib.suppress(ValueError):
                if json.loads(line) == {"mark": self._mark}:
                    return
            noise += len(line)
        raise TransferError("the pod's login shell prints without end, so no program on it can be talked to")

    def message(self) -> dict[str, Any]:
        """The next answer, skipping signs of life. Raises the typed error the pod reports."""
        while True:
            try:
                answer: dict[str, Any] = json.loads(self._line())
            except ValueError as exc:
                raise TransferError("the pod's answer is garbled: something else writes to the same output") from exc
            if "hashed" in answer:
                continue
            if "error" in answer:
                raise self._reported(answer)
            return answer

    def read(self, limit: int) -> bytes:
        """Between one and `limit` bytes."""
        data = self._stdout.read1(limit)  # type: ignore[attr-defined]
        self._ssh.traffic.fetched += len(data)
        self._moved_at = time.monotonic()
        if not data:
            self._ended()
        return bytes(data)

    def _line(self) -> bytes:
        line = self._stdout.readline()
        self._ssh.traffic.fetched += len(line)
        self._moved_at = time.monotonic()
        if not line.endswith(b"\n"):
            self._ended()
        return line

    def _ended(self) -> NoReturn:
        """The pod's output is at its end though an answer was due: say why."""
        try:
            rc = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            rc = self._process.wait()
        assert self._process.stderr is not None
        why = last_line(self._process.stderr.read())
        if rc == 127:
            raise self._ssh.error("the pod has no python3", rc=rc)
        if rc == SSH_FAILED:
            self._ssh.readmitted(why)  # the next try, which whoever meets a broken line makes, finds out
        if rc in (0, RC_LINE_BROKE, SSH_FAILED) or rc < 0:
            raise LineBrokenError(why or "the connection ended")
        raise TransferError(f"the program on the pod ended with exit status {rc}: {why or 'it said nothing'}", rc=rc)

    def _reported(self, answer: dict[str, Any]) -> TransferError:
        code, message = answer.pop("error"), answer.pop("message")
        if code == "raced":  # what an earlier conversation left under way is gone in a moment
            raise LineBrokenError(f"{message} ({answer.get('path')})")
        if code == "disk_full":
            free, needed = int(answer["free"]), int(answer["needed"])
            return DiskFullError(
                f"the pod's disk is too small ({message}): {megabytes(free)} free, {megabytes(needed)} needed; "
                "rent a pod with a larger disk or send less",
                where="pod",
                free_bytes=free,
                needed_bytes=needed,
            )
        about = f" ({answer['path']})" if answer.get("path") else ""
        return TransferError(f"on the pod: {message}{about}", reason=code, **answer)


def lost(ssh: Ssh, what: str, strikes: int, why: Exception) -> SshError:
    """The error for a line that broke again and again."""
    return ssh.error(f"the connection broke {strikes} times in a row while {what}; last: {why}")
