"""The simulator as an HTTP server: requests in, answers out, the world's clock ticking beside them."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pennypod.simulator.control_api import ControlApi
from pennypod.simulator.dispatch import Dispatcher, Outcome
from pennypod.simulator.runpod_api import RunpodApi
from pennypod.simulator.runpod_graphql import GraphqlApi
from pennypod.simulator.state import World
from pennypod.simulator.vast_api import VastApi
from pennypod.simulator.wire import Reply, Request

TICK_S = 0.25
MAX_BODY = 4 * 1024 * 1024
_IP_FREEBIND = 15  # linux/in.h; Python names it from 3.14 on


class Simulator:
    """One world behind one port. `start` returns at once; `stop` ends it and its pods.

    `also` are more addresses of this machine to listen on with the same port, such as the one at which containers find
    their host. It may be one that the machine has only later.
    """

    def __init__(self, world: World, *, host: str = "127.0.0.1", port: int = 0, also: Iterable[str] = ()) -> None:
        self.world = world
        self.control = ControlApi(world)
        vast, runpod = Dispatcher(world, VastApi(world)), Dispatcher(world, RunpodApi(world))
        graphql = GraphqlApi(world)
        self._places: tuple[tuple[str, Callable[[Request], Outcome]], ...] = (
            ("/api/", vast.handle),
            ("/_sim/vast-logs/", vast.handle),
            ("/graphql", graphql.handle),
            ("/v2/", runpod.handle),
            ("/v1", runpod.handle),
        )
        self._servers = [_Server((host, port), _Handler)]
        self._servers += [_Server((address, self.port), _Handler) for address in also]
        for server in self._servers:
            server.simulator = self
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._tick, name="clock", daemon=True)]
        self._threads += [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True)
            for server in self._servers
        ]

    @property
    def port(self) -> int:
        return int(self._servers[0].server_address[1])

    @property
    def url(self) -> str:
        return f"http://{self._servers[0].server_address[0]!s}:{self.port}"

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _tick(self) -> None:
        while not self._stopping.wait(TICK_S):
            with self.world.lock:
                self.world.tick()
                jobs = self.world.take_jobs()
            _run(jobs)

    def handle(self, request: Request) -> Outcome:
        """One request. What the backend has to do is done before the answer leaves, but not under the lock.

        The end of a container is the exception: a provider answers at once, and a pod that ends itself has to hear it.
        """
        real_time = time.time()
        with self.world.lock:
            outcome = self._route(request, real_time)
            jobs = self.world.take_jobs()
        if outcome.endpoint.endswith(".destroy"):
            threading.Thread(target=_run, args=(jobs,), name="endings", daemon=True).start()
        else:
            _run(jobs)
        return outcome

    def _route(self, request: Request, real_time: float) -> Outcome:
        for prefix, handle in self._places:
            if request.path.startswith(prefix):
                outcome = handle(request)
                self.control.log(request, outcome, real_time)
                return outcome
        if request.path.startswith("/_sim"):
            return Outcome("sim", self.control.handle(request))
        return Outcome(
            "unknown",
            Reply(404, {"error": "nothing here", "known": ["/api/v0", "/api/v1", "/v2", "/graphql", "/_sim"]}),
        )


def _run(jobs: list[Callable[[], None]]) -> None:
    for job in jobs:
        job()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    simulator: Simulator

    def server_bind(self) -> None:
        # The base class looks its own name up, which takes seconds where no resolver answers.
        socketserver_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no event."""


def socketserver_bind(server: _Server) -> None:
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # An engine's bridge appears with its first container, after us.
    server.socket.setsockopt(socket.SOL_IP, _IP_FREEBIND, 1)
    server.socket.bind(server.server_address)
    server.server_address = server.socket.getsockname()
    server.server_name, server.server_port = str(server.server_address[0]), int(server.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # the head and the body leave in one packet
    server: _Server
    timeout = 300

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """/_sim/requests is the log."""

    def version_string(self) -> str:
        return "nginx"

    def _serve(self) -> None:
        split = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY:
            self.close_connection = True
            self._send(Reply(413, {"detail": "too large"}))
            return
        request = Request(
            method=self.command,
            path=unquote(split.path),
            query=parse_qs(split.query, keep_blank_values=True),
            headers=_lower(self.headers),
            body=self.rfile.read(length) if length else b"",
        )
        outcome = self.server.simulator.handle(request)
        if outcome.delay_s:
            time.sleep(outcome.delay_s)
        if outcome.drop:
            self._cut()
        else:
            self._send(outcome.reply, half=outcome.cut_body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - the base class names them so

    def _send(self, reply: Reply, half: bool = False) -> None:
        payload = reply.payload()
        self.send_response(reply.status)
        if reply.body is not None:
            self.send_header("Content-Type", reply.content_type)
        if reply.open_s:
            self.send_header("Transfer-Encoding", "chunked")
        elif reply.status != 204:
            self.send_header("Content-Length", str(len(payload)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if reply.open_s:
            self._stream(payload, reply.open_s)
            return
        self.wfile.write(payload[: len(payload) // 2] if half else payload)
        self.wfile.flush()
        if half:
            self._cut()

    def _stream(self, payload: bytes, open_s: float) -> None:
        """All there is, in one chunk, then silence until the client leaves or the time is over."""
        self.close_connection = True
        with suppress(OSError):
            if payload:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))
                self.wfile.flush()
            select.select([self.connection], [], [], open_s)  # readable: the client has hung up
            self.wfile.write(b"0\r\n\r\n")

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
