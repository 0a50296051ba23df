"""More SSH connections that take shares of an upload, as many as the line's delay and rate make worth while.

One SSH stream has at most a window (2 MB) under way, so on a line with a delay it moves a window per round trip however
fast the line is. Every stream takes the next file when it has room for one. No share is ever needed: one that cannot
log in (the pod's sshd limits logins) takes nothing, and the rest goes over the connections that there are.
"""

from __future__ import annotations

import math
import secrets
import threading
from itertools import chain
from typing import TYPE_CHECKING, Self

from pennypod.ssh import Ssh, Traffic
from pennypod.transfer.outgoing import Outgoing, Tally, stream_out
from pennypod.transfer.session import LineBrokenError, Meter, Session

if TYPE_CHECKING:
    from collections.abc import Callable

SSH_WINDOW = 2 << 20  # CHAN_SES_WINDOW_DEFAULT of OpenSSH, 64 packets of 32 KiB
FULL_RATE = 125e6  # bytes/s: the line that the first streams are counted for, 1 Gbit/s
FIRST_STREAMS = 8  # logins at once; sshd begins to turn some down at 10 (MaxStartups)
MAX_STREAMS = 16
SHARED_FROM = 10_000_000  # a smaller set is over before further connections stand
LEAST_SHARE = 1_000_000
TICK_S = 0.25
END_S = 5.0  # its ssh has been killed; what that started itself may hold on to the pipes


def streams_for(round_trip_s: float, size: int) -> int:
    """How many streams fill a line of FULL_RATE, with a quarter to spare since windows do not stay full."""
    if size < SHARED_FROM:
        return 1
    needed = math.ceil(1.25 * FULL_RATE * round_trip_s / SSH_WINDOW)
    return max(1, min(needed, size // LEAST_SHARE, FIRST_STREAMS))


class _StoppedError(Exception):
    """The upload is over, for this share at least."""


class _Share(threading.Thread):
    """One more connection, from the login to the pod's answer about its files."""

    def __init__(self, ssh: Ssh, shares: Shares, number: int) -> None:
        super().__init__(daemon=True)
        self.traffic = Traffic()
        self.ssh, self.shares = ssh.beside(self.traffic, number), shares
        self.tally = Tally()
        self.used = False  # it has taken a file
        self.bad: list[int] = []
        self.error: Exception | None = None
        self._session: Session | None = None
        self._stopped = False

    def run(self) -> None:
        try:
            with Session(self.ssh, "share", stall_s=self.shares.stall_s) as session:
                self._session = session
                self._converse(session)
        except _StoppedError:
            pass
        except Exception as exc:  # noqa: BLE001 - raised again in the upload's own thread, see Shares
            self.error = exc
        finally:
            self.shares.changed.set()

    def stop(self) -> None:
        self._stopped = True
        if self._session is not None:
            self._session.stop()

    def check(self) -> None:
        if self._stopped:
            raise _StoppedError

    def _take(self) -> int | None:
        self.check()
        return self.shares.take(self)

    def _converse(self, session: Session) -> None:
        self.check()
        session.begin(None)
        self.shares.begun.wait()
        self.check()
        todo = self.shares.shared
        assert todo is not None
        first = self._take()
        if first is None:
            return  # and the pod has not heard of it: it waits for those only that bring something
        session.touch()
        session.tell({**self.shares.order, "name": todo.part.name})
        stream_out(session, todo, chain([first], iter(self._take, None)), self.shares.meter, self.tally)
        session.tell({"sha256": [sha256 for _, sha256 in self.tally.sent]})
        self.bad = [self.tally.sent[place][0] for place in session.message()["bad"]]


class Shares:
    """The further connections of one attempt. A context manager: leaving it ends them all.

    They log in while the first connection does, since a login takes longer than many a data set.
    """

    def __init__(self, ssh: Ssh, meter: Meter, size: int, *, most: int, stall_s: float) -> None:
        """`size` is what there may be to send, in bytes; `most` limits the streams, the first connection included."""
        self.meter, self.stall_s = meter, stall_s
        self.shared: Outgoing | None = None
        self.order: dict[str, object] = {}
        self.begun = threading.Event()
        self.changed = threading.Event()
        self.bad: list[int] = []
        self._ssh, self._size, self._most = ssh, size, most
        self._all: list[_Share] = []
        self._lock = threading.Lock()
        self._token = secrets.token_hex(8)
        self._over = threading.Event()
        self._scout = threading.Thread(target=self._look_around, daemon=True)

    def __enter__(self) -> Self:
        if min(self._size // SHARED_FROM, self._most - 1) > 0:
            self._scout.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end()
        for share in self._all:
            share.join(END_S)
            self._ssh.traffic.sent += share.traffic.sent
            self._ssh.traffic.fetched += share.traffic.fetched

    def token(self) -> str | None:
        """What the pod is to know the shares by, when there may be some."""
        return self._token if self._scout.ident is not None else None

    def begin(self, todo: Outgoing, pod_home: str, room: int) -> None:
        """What there is to share, once the pod is told; `room` is what all of it takes on the pod's disk."""
        self.shared, self.order = todo, {"home": pod_home, "bytes": room, "token": self._token}
        if todo.bytes < SHARED_FROM:
            self._end()
        self.begun.set()

    def check(self) -> None:
        """Raise what has ended a share and must end the upload."""
        if self.changed.is_set():
            for share in self._all:
                if share.used and share.error is not None and not isinstance(share.error, LineBrokenError):
                    raise share.error

    def tallies_of(self, todo: Outgoing) -> list[Tally]:
        """What each share has sent of it that got something to send."""
        return [share.tally for share in self._all if share.tally.sent and todo is self.shared]

    def take(self, share: _Share) -> int | None:
        """The next file of a share."""
        assert self.shared is not None
        with self._lock:
            number = self.shared.take()
            share.used = share.used or number is not None
            return number

    def last_call(self) -> int:
        """How many shares have taken files, now that none is left: the pod is to wait for them."""
        with self._lock:
            self._over.set()
            return sum(share.used for share in self._all)

    def finish(self, on_tick: Callable[[], None]) -> None:
        """Wait for the shares, once no file is left to take; the pod waits for them too. `on_tick` is called meanwhile.

        Raises LineBrokenError when one broke off, after the others are done.
        """
        shares = [share for share in self._all if share.used]
        for share in shares:
            while share.is_alive():
                share.join(TICK_S)
                on_tick()
                self.meter.tick()
                self.check()
        self.check()
        for share in shares:
            self.bad += share.bad
            if share.error is not None:
                raise share.error

    def _end(self) -> None:
        self._over.set()
        with self._lock:
            for share in self._all:
                share.stop()
        self.begun.set()

    def _look_around(self) -> None:
        """Count the streams by the delay, then by what they move in their first second.

        A login takes about ten round trips, so on a long line it is begun before the delay is known to the end.
        """
        likely = min(FIRST_STREAMS, self._size // SHARED_FROM, self._most)
        round_trip = self._ssh.round_trip_s(when_late=lambda: self._open(likely))
        if round_trip is None:
            return
        self._open(min(streams_for(round_trip, self._size), self._most))
        streams = len(self._all) + 1
        self.begun.wait()
        if streams == 1 or self._over.wait(TICK_S + 2 * round_trip):  # until the pipes on the way are full
            return
        before = self.meter.moved
        if self._over.wait(1.0):
            return
        rate = self.meter.moved - before
        left = self.meter.bytes_total - self.meter.bytes_done
        # Each stream at its window, and time enough for more logins: the line is faster than was assumed.
        if rate > 0.7 * streams * SSH_WINDOW / round_trip and left > rate * (1 + 10 * round_trip):
            self._open(min(2 * streams, self._most))

    def _open(self, streams: int) -> None:
        """See to it that there are so many, the first connection included."""
        with self._lock:
            while len(self._all) + 1 < streams and not self._over.is_set():
                share = _Share(self._ssh, self, len(self._all) + 1)
                self._all.append(share)
                share.start()
