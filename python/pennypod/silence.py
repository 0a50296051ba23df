"""Says so while a provider does not answer and a pod of ours may bill. Floor 2: the clock and the report, passed in.

A call repeats itself for a minute before it gives up, so it is a thread that looks at how long nothing was heard.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType

from pennypod.clock import Clock
from pennypod.errors import PennypodError

FIRST_S, AGAIN_S = 10.0, 30.0
"""After so many seconds without an answer it is said, and again that often."""

_TICK_S = 1.0


class Silence:
    """`with Silence(...)` around what waits for a provider.

    `since` tells since when nothing was heard, in Unix seconds, None while nothing is wanting. `report` takes the text.
    """

    def __init__(
        self,
        provider: str,
        since: Callable[[], float | None],
        report: Callable[[str], object],
        clock: Clock,
        *,
        tick_s: float = _TICK_S,
    ) -> None:
        self._who = provider
        self._since = since
        self._report = report
        self._clock = clock
        self._tick_s = tick_s
        self._said_at: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="silence", daemon=True)

    def __enter__(self) -> Silence:
        with contextlib.suppress(RuntimeError):  # no thread to be had: the work itself must not depend on it
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_TICK_S)  # no longer: it may be writing to a terminal that somebody halted

    def _watch(self) -> None:
        while not self._over.wait(self._tick_s):
            text = self.words()
            if text:
                with contextlib.suppress(OSError, PennypodError):
                    self._report(text)

    def words(self) -> str:
        """What is to be said now; empty while there is nothing new."""
        since, now = self._since(), self._clock.now()
        if since is None:
            answers_again, self._said_at = self._said_at is not None, None
            return f"{self._who} answers again" if answers_again else ""
        due = since + FIRST_S if self._said_at is None else self._said_at + AGAIN_S
        if now < due:
            return ""
        self._said_at = now
        moment = f"{datetime.fromtimestamp(since, UTC):%H:%M:%S}"
        return f"{self._who} does not answer since {moment} UTC; a pod there may still be billing; trying on"
