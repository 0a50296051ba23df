"""A TCP proxy on the loopback interface that cuts connections after a number of bytes: a line that breaks."""

from __future__ import annotations

import contextlib
import socket
import threading

from forwarder import Forwarder, end_socket


class CuttingProxy(Forwarder):
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
        self._limits = {"up": up, "down": down}
        self._cuts = cuts
        super().__init__(port, host=host, listen=listen)

    def limit(self, *, up: int | None = None, down: int | None = None) -> None:
        """Other limits for the connections that come from now on."""
        self._limits = {"up": up, "down": down}

    def accepted(self, client: socket.socket, number: int) -> None:
        server = self.to_target(client)
        limits = self._limits if number <= self._cuts else {"up": None, "down": None}
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
        end_socket(source)
        end_socket(sink)
