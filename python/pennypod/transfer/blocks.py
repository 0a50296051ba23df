"""A large file from a pod in blocks, which several SSH connections fetch at the same time and which come out in order.

One SSH stream has at most a window under way (see `shares`), so on a line with a delay a large file takes several. Each
stream asks for two blocks at a time, so that its line is never empty between them. What a broken stream had asked for
goes to the others; nothing is lost with a stream but its speed. Blocks are not verified here: whoever puts the file
together compares the hash of all of it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pennypod.ssh import Ssh, Traffic
from pennypod.transfer.session import LineBrokenError, Session

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 2 << 20
ASKED = 2  # blocks that a stream has asked for at once
AHEAD = 4  # blocks per stream that may be asked for or wait here before the one whose turn it is
TICK_S = 0.25
END_S = 5.0


@dataclass(frozen=True, slots=True)
class Block:
    offset: int
    length: int


class _Stream(threading.Thread):
    """One connection that fetches blocks until none is left."""

    def __init__(self, ssh: Ssh, blocks: Blocks, number: int) -> None:
        super().__init__(daemon=True)
        self.traffic = Traffic()
        self.error: Exception | None = None
        self._ssh, self._blocks = ssh.beside(self.traffic, number), blocks
        self._session: Session | None = None

    def run(self) -> None:
        asked: deque[Block] = deque()
        try:
            with Session(self._ssh, "blocks", stall_s=self._blocks.stall_s) as session:
                self._session = session
                session.begin(None)
                self._fetch(session, asked)
        except Exception as exc:  # noqa: BLE001 - raised again by whoever waits for the blocks, once all have ended
            self.error = exc
        finally:
            self._blocks.give_back(asked)

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    def _fetch(self, session: Session, asked: deque[Block]) -> None:
        while True:
            while len(asked) < ASKED and (block := self._blocks.take(wait=not asked, on_tick=session.touch)):
                session.tell({"path": self._blocks.path, "offset": block.offset, "length": block.length})
                asked.append(block)
            if not asked:
                return
            block, length = asked[0], int(session.message()["length"])
            parts, left = [], length
            while left:
                parts.append(session.read(left))
                left -= len(parts[-1])
            self._blocks.put(block, b"".join(parts))
            asked.popleft()


class Blocks:
    """The streams of one file. A context manager: they log in when it is entered, and leaving it ends them all.

    With fewer than two streams there are none, and nothing may be read.
    """

    def __init__(self, ssh: Ssh, remote_path: str, streams: int, *, stall_s: float) -> None:
        self.path = os.fsencode(remote_path).decode("utf-8", "surrogateescape")
        self.stall_s = stall_s
        self._ssh = ssh
        self._streams = [_Stream(ssh, self, number + 1) for number in range(streams if streams > 1 else 0)]
        self._change = threading.Condition()
        self._begun = self._over = False
        self._turn = self._next = self._size = 0
        self._again: deque[Block] = deque()
        self._here: dict[int, bytes] = {}

    def __enter__(self) -> Self:
        for stream in self._streams:
            stream.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        with self._change:
            self._over = True
            self._change.notify_all()
        for stream in self._streams:
            stream.stop()
        for stream in self._streams:
            stream.join(END_S)
            self._ssh.traffic.sent += stream.traffic.sent
            self._ssh.traffic.fetched += stream.traffic.fetched

    def begin(self, offset: int, size: int) -> None:
        """Let the streams fetch what is between the two."""
        with self._change:
            self._turn = self._next = offset
            self._size = size
            self._begun = True
            self._change.notify_all()

    def read(self, on_tick: Callable[[], None]) -> bytes:
        """The next bytes of the file, some at least; `on_tick` is called while they are not here.

        Raises LineBrokenError when no stream is left that could bring them, and what has ended the last one when that
        is not its line.
        """
        while True:
            with self._change:
                data = self._here.pop(self._turn, None)
                if data is not None:
                    self._turn += len(data)
                    self._change.notify_all()
                    return data
                if not any(stream.is_alive() for stream in self._streams):
                    raise self._why_none_is_left()
                self._change.wait(TICK_S)
            on_tick()

    @property
    def several(self) -> bool:
        return bool(self._streams)

    # --- for the streams ----------------------------------------------------------------------------------------------

    def take(self, *, wait: bool, on_tick: Callable[[], None]) -> Block | None:
        """A block for the caller alone; None when there is none to take now, or with `wait` none to come."""
        while True:
            with self._change:
                if self._over:
                    return None
                if self._again:
                    return self._again.popleft()
                if self._begun and self._next < min(self._size, self._turn + AHEAD * len(self._streams) * BLOCK):
                    block = Block(self._next, min(BLOCK, self._size - self._next))
                    self._next += block.length
                    return block
                # A stream that breaks gives its blocks back, so nobody leaves before the last one is here.
                if not wait or (self._begun and self._turn >= self._size):
                    return None
                self._change.wait(TICK_S)
            on_tick()

    def put(self, block: Block, data: bytes) -> None:
        if len(data) != block.length:
            raise LineBrokenError("the file on the pod is shorter than it was")
        with self._change:
            self._here[block.offset] = data
            self._change.notify_all()

    def give_back(self, blocks: deque[Block]) -> None:
        with self._change:
            self._again += blocks
            self._change.notify_all()

    def _why_none_is_left(self) -> Exception:
        errors = [stream.error for stream in self._streams if stream.error is not None]
        lines = [error for error in errors if isinstance(error, LineBrokenError)]
        return next((error for error in errors if error not in lines), None) or LineBrokenError(
            str(lines[0]) if lines else "the connections ended"
        )
