"""A TCP proxy on the loopback interface that cuts connections after a number of bytes: a line that breaks."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class CuttingProxy:
    """Forwards to `port`; the first `cuts` connections end abruptly after `up` or `down` bytes in that direction."""

    def __init__(
        self,
        port: int,
        *,
        up: int | None = None,
        down: int | None = None,
        cuts: int = 1,
        host: str = "127.0.0.1",
        listen: int = 0,
    ) -> None:
        """It listens on `host` and the port `listen`, 0 for any."""
        self._target = port
        self._limits = {"up": up, "down": down}
        self._cuts = cuts
        self.connections = 0
        self.carried = {"up": 0, "down": 0}
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((host, listen))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for one in self._open:
            _end(one)

    def limit(self, *, up: int | None = None, down: int | None = None) -> None:
        """Other limits for the connections that come from now on."""
        self._limits = {"up": up, "down": down}

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, server]
            limits = self._limits if self.connections <= self._cuts else {"up": None, "down": None}
            for name, source, sink in (("up", client, server), ("down", server, client)):
                threading.Thread(target=self._pump, args=(name, source, sink, limits[name]), daemon=True).start()

    def _pump(self, name: str, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        moved = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if limit is not None and moved + len(data) > limit:
                    sink.sendall(data[: limit - moved])
                    self.carried[name] += limit - moved
                    break
                sink.sendall(data)
                moved += len(data)
                self.carried[name] += len(data)
        _end(source)
        _end(sink)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
