"""The line between the control side and the simulator: it can hold one call, before or after its effect, or be down.

What a network does and no provider: a create call that is still on its way when its sender dies and arrives after it,
an answer that nobody reads any more, minutes without any answer at all. Pods reach the simulator on another way.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_CREATES = (("PUT", "/api/v0/asks/"), ("POST", "/v2/pods"))
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host"})


def is_create(method: str, path: str) -> bool:
    return any(method == verb and path.startswith(start) for verb, start in _CREATES)


@dataclass(slots=True)
class Hold:
    """The first call that `takes` it stops `before` or after its effect: `reached` when it is there, until `released`.

    `passed`: it has had its effect, if it is to have one. With `lost` it has none: it gets no further.
    """

    takes: Callable[[str, str], bool]
    before: bool
    lost: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    passed: threading.Event = field(default_factory=threading.Event)
    taken: bool = False


class Line:
    """A proxy on a loopback port in front of the simulator at `url`. `ends`: when it carried which destroy call."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self.target = (target.hostname or "127.0.0.1", target.port or 80)
        self.down = threading.Event()
        self.calls = 0
        self.ends: list[tuple[float, str]] = []
        self.hold: Hold | None = None
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.line = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="line", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.hold is not None:
            self.hold.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def hold_create(self, *, before: bool) -> Hold:
        self.hold = Hold(is_create, before)
        return self.hold

    def lose_destroy(self) -> Hold:
        """The first destroy call stops on its way, and never arrives."""
        self.hold = Hold(lambda method, _path: method == "DELETE", before=True, lost=True)
        return self.hold

    def take_hold(self, method: str, path: str) -> Hold | None:
        """The hold, for the one call that it is meant for."""
        with self._lock:
            self.calls += 1
            hold = self.hold
            if hold is None or hold.taken or not hold.takes(method, path):
                return None
            hold.taken = True
            return hold


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    line: Line

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed in the middle is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: _Server
    timeout = 300

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """The simulator keeps the log."""

    def _serve(self) -> None:
        line = self.server.line
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if line.down.is_set():
            self._cut()
            return
        hold = line.take_hold(self.command, self.path)
        _stop_at(hold, before=True)
        if hold is not None and hold.lost:
            hold.passed.set()
            self._cut()
            return
        if self.command == "DELETE":
            line.ends.append((time.monotonic(), self.path))
        try:
            status, reason, headers, payload = self._ask(body)
        except (OSError, http.client.HTTPException):
            self._cut()  # the simulator cut its own answer off: so do we
            return
        finally:
            if hold is not None:
                hold.passed.set()
        _stop_at(hold, before=False)
        if line.down.is_set():
            self._cut()
            return
        self.send_response_only(status, reason)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - the base class names them so

    def _ask(self, body: bytes) -> tuple[int, str, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server.line.target, timeout=200)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.reason, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _stop_at(hold: Hold | None, *, before: bool) -> None:
    if hold is not None and hold.before is before:
        hold.reached.set()
        hold.released.wait(120)
