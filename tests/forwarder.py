"""What stands between a client and a port of this machine: accepts on a port of its own, and forwards as it likes."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Forwarder:
    """`with` it, clients connect to `port`. A subclass says in `accepted` what becomes of a connection."""

    def __init__(self, target: int, *, host: str = "127.0.0.1", listen: int = 0) -> None:
        """It listens on `host` and the port `listen`, 0 for any."""
        self._target = target
        self.connections = 0
        self.carried = {"up": 0, "down": 0}
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((host, listen), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def accepted(self, client: socket.socket, number: int) -> None:
        """Called in the accepting thread, which takes the next one when this returns; `number` counts from 1."""
        raise NotImplementedError

    def to_target(self, client: socket.socket) -> socket.socket:
        """The other end of what `client` is connected to by this."""
        server = socket.create_connection(("127.0.0.1", self._target))
        self._open += [client, server]
        return server

    def cut(self) -> None:
        """End every connection at once."""
        for one in self._open:
            end_socket(one)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self.cut()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self.accepted(client, self.connections)


def end_socket(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
