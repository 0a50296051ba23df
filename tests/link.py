"""An emulated network link in user space: delay each way, a rate that all connections share, a window for each of them.

Kernel netem is often missing, and this needs no rights. What it models: a bottleneck with a queue (bytes of all
connections of one direction go through it one after the other), propagation delay after it, and per connection a window
of bytes that were taken and are not yet acknowledged by the other end, as TCP has. `connect` itself is answered by the
kernel at once; the first byte of either side comes as late as it would after a handshake through the link.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque

from forwarder import Forwarder, end_socket

CHUNK = 1 << 17
WINDOW = 4 << 20  # bytes; about what Linux lets one connection have under way with its default limits


class _Bottleneck:
    """One direction of the link: hands out the moment at which a piece has passed it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def passed_at(self, size: int, ready_at: float) -> float:
        with self._lock:
            self._free_at = max(self._free_at, ready_at) + size / self._bytes_per_s
            return self._free_at


class Link(Forwarder):
    """Forwards to `port` of this machine; `with Link(...) as link` listens at `link.port`."""

    def __init__(self, port: int, *, rtt_s: float, bits_per_s: float, window: int = WINDOW) -> None:
        self._one_way_s = rtt_s / 2
        self._window = window
        self._ways = {name: _Bottleneck(bits_per_s / 8) for name in ("up", "down")}
        super().__init__(port)

    def accepted(self, client: socket.socket, number: int) -> None:
        threading.Thread(target=self._connect, args=(client, time.monotonic()), daemon=True).start()

    def _connect(self, client: socket.socket, began: float) -> None:
        established = began + 2 * self._one_way_s  # for the client; the server sees its last ACK half a trip later
        time.sleep(3 * self._one_way_s)
        try:
            server = self.to_target(client)
        except OSError:
            end_socket(client)
            return
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _Way(self, "up", client, server, established).start()
        _Way(self, "down", server, client, began + 3 * self._one_way_s).start()


class _Way:
    """One direction of one connection: a thread that takes bytes in, and one that hands them out when they are due."""

    def __init__(self, link: Link, name: str, source: socket.socket, sink: socket.socket, from_time: float) -> None:
        self._link, self._name, self._source, self._sink, self._from = link, name, source, sink, from_time
        self._due: deque[tuple[float, bytes]] = deque()
        self._acks: deque[tuple[float, int]] = deque()  # when the source learns that these bytes have arrived
        self._under_way = 0
        self._change = threading.Condition()

    def start(self) -> None:
        for work in (self._take, self._hand_out):
            threading.Thread(target=work, daemon=True).start()

    def _take(self) -> None:
        bottleneck = self._link._ways[self._name]
        data = b"-"
        while data:
            self._wait_for_window()
            try:
                data = self._source.recv(CHUNK)
            except OSError:
                data = b""
            due = bottleneck.passed_at(len(data), max(time.monotonic(), self._from)) + self._link._one_way_s
            with self._change:
                self._due.append((due, data))
                self._under_way += len(data)
                self._change.notify_all()

    def _wait_for_window(self) -> None:
        with self._change:
            while True:
                now = time.monotonic()
                while self._acks and self._acks[0][0] <= now:
                    self._under_way -= self._acks.popleft()[1]
                if self._under_way + CHUNK <= max(self._link._window, CHUNK):
                    return
                self._change.wait(self._acks[0][0] - now if self._acks else None)

    def _hand_out(self) -> None:
        while True:
            with self._change:
                while not self._due:
                    self._change.wait()
                due, data = self._due.popleft()
            pause = due - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            try:
                if not data:
                    self._sink.shutdown(socket.SHUT_WR)
                    return
                self._sink.sendall(data)
            except OSError:
                end_socket(self._source)
                end_socket(self._sink)
                data = b""
            self._link.carried[self._name] += len(data)
            with self._change:
                self._acks.append((time.monotonic() + self._link._one_way_s, len(data)))
                self._change.notify_all()
            if not data:
                return


def measured_bytes_per_s(*, rtt_s: float, bits_per_s: float, size: int, connections: int = 8) -> float:
    """What raw TCP gets through such a link here: `size` bytes over several connections, from the first byte to the
    last acknowledged, less the way of an acknowledgement. The link's own limit on this machine."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sink:
        arrived = threading.Semaphore(0)

        def swallow(one: socket.socket) -> None:
            with one:
                while one.recv(1 << 20):
                    pass
            arrived.release()

        def accept() -> None:
            for _ in range(connections):
                one, _ = sink.accept()
                threading.Thread(target=swallow, args=(one,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

        def push(port: int) -> None:
            block, left = bytes(1 << 18), size // connections
            with socket.create_connection(("127.0.0.1", port)) as one:
                while left > 0:
                    one.sendall(block[: min(len(block), left)])
                    left -= len(block)

        with Link(sink.getsockname()[1], rtt_s=rtt_s, bits_per_s=bits_per_s) as link:
            started = time.monotonic()
            for _ in range(connections):
                threading.Thread(target=push, args=(link.port,), daemon=True).start()
            for _ in range(connections):
                arrived.acquire()
            took = time.monotonic() - started - 1.5 * rtt_s  # the handshake, and the way of the first byte
    return size / took
