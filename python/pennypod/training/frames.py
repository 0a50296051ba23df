"""Frames: one report of onpod/watch_log.py each, streamed over one SSH session."""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pennypod.ssh import end_process, last_line, script_command
from pennypod.weights import RemoteFile, parse_answer, remote_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pennypod.ssh import Ssh

SESSION = "pennypod"
_LAST_WORDS_S = 5.0

WATCH_SCRIPT = Path(__file__).parent.parent / "onpod" / "watch_log.py"


@dataclass(frozen=True, slots=True)
class Frame:
    """One report of onpod/watch_log.py; `drained` when no log bytes are waiting behind it.

    `quiet_s` is how long the trainer had written nothing, by the pod's clock.
    """

    t: float
    status: dict[str, Any] | None
    supervisor: bool
    child: bool
    tmux: bool | None
    size: int = 0
    offset: int = 0
    data: bytes = b""
    reset: bool = False
    drained: bool = True
    end: bool = False
    checkpoint: RemoteFile | None = None
    quiet_s: float = 0.0

    @property
    def state(self) -> str:
        return str((self.status or {}).get("state", ""))

    @property
    def elapsed_s(self) -> float:
        """Since the trainer's start, by the pod's own clock; until its end once it has one."""
        status = self.status or {}
        end = status.get("finished") or self.t
        return max(0.0, float(end) - float(status.get("started") or end))


def parse_frame(line: str | bytes) -> Frame | None:
    """A frame from one line of output, None for anything that is not exactly one (a login banner, half a line)."""
    answer = parse_answer(line.encode() if isinstance(line, str) else line)
    if answer is None or "t" not in answer:
        return None
    try:
        checkpoint = answer.get("checkpoint")
        return Frame(
            t=float(answer["t"]),
            status=answer["status"],
            supervisor=bool(answer["supervisor"]),
            child=bool(answer["child"]),
            tmux=answer["tmux"],
            size=int(answer["size"]),
            offset=int(answer.get("offset", 0)),
            data=base64.b64decode(answer.get("data", "")),
            reset=bool(answer.get("reset", False)),
            drained=bool(answer.get("drained", True)),
            end=bool(answer.get("end", False)),
            checkpoint=remote_file(checkpoint) if checkpoint else None,
            quiet_s=float(answer.get("quiet_s", 0.0)),
        )
    except (KeyError, TypeError, ValueError):
        return None


class StreamEndedError(Exception):
    """The stream broke; the training may be as well as ever."""


class Frames(Protocol):
    """A stream of frames from one attachment."""

    def next(self, timeout_s: float) -> Frame | None:
        """The next frame, None when there is none within `timeout_s`. Raises StreamEndedError."""

    def close(self) -> None: ...


class SshFrames:
    """Frames over one SSH session of its own, so that a stuck shared connection cannot hold the watch up."""

    def __init__(self, ssh: Ssh, options: Mapping[str, Any]) -> None:
        source = WATCH_SCRIPT.read_bytes()
        self._ssh = ssh
        self._process = ssh.fresh().popen(script_command(source, WATCH_SCRIPT.name, [json.dumps(options)]))
        self._queue: queue.Queue[Frame | None] = queue.Queue(maxsize=64)
        self._closed = threading.Event()
        self._stderr = b""
        self._frame_reader = threading.Thread(target=self._read_frames, daemon=True)
        self._error_reader = threading.Thread(target=self._read_errors, daemon=True)
        self._frame_reader.start()
        self._error_reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # ssh is gone already: the reader notices
            self._process.stdin.write(source)
            self._process.stdin.close()

    def next(self, timeout_s: float) -> Frame | None:
        try:
            frame = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if frame is None:
            self._error_reader.join(_LAST_WORDS_S)  # ssh says why before it ends, but another thread reads that
            why = last_line(self._stderr)
            self._ssh.readmitted(why)  # the watch attaches again in any case
            raise StreamEndedError(why or "the connection ended")
        return frame

    def close(self) -> None:
        self._closed.set()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._frame_reader.join()
        self._error_reader.join()
        end_process(self._process)

    def _read_frames(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            frame = parse_frame(line)
            if frame is not None and not self._put(frame):
                return
        self._put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._stderr = (self._stderr + line)[-4096:]

    def _put(self, frame: Frame | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(frame, timeout=0.5)
            except queue.Full:
                continue  # the reader is busy with a checkpoint; the pod waits, the trainer does not
            return True
        return False


def look(ssh: Ssh, pod_home: str, *, run: str = "", session: str = SESSION, wait_s: float = 0.0) -> Frame:
    """One frame over a new login; with `run`, wait on the pod until the run is seen to live or to be over."""
    options = {"home": pod_home, "session": session, "once": True, "wait_run": run, "wait_s": wait_s}
    done = ssh.fresh().run_script(WATCH_SCRIPT, [json.dumps(options)], wait_s + 60)
    frame = parse_frame(done.stdout)
    if frame is None:
        raise ssh.error(f"the pod did not report on the training: {last_line(done.stderr)}", rc=done.rc)
    return frame
