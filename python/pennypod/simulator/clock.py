"""Virtual time: it starts at the true time, runs at any speed and can be moved ahead. Every reading is thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class VirtualClock:
    def __init__(
        self, speed: float = 1.0, *, start: float | None = None, real: Callable[[], float] = time.monotonic
    ) -> None:
        self._real = real
        self._lock = threading.Lock()
        self._base = time.time() if start is None else start
        self._since = real()
        self._speed = _checked(speed)

    @property
    def speed(self) -> float:
        return self._speed

    def now(self) -> float:
        """Unix seconds of the simulated world."""
        with self._lock:
            return self._now()

    def _now(self) -> float:
        return self._base + (self._real() - self._since) * self._speed

    def advance(self, seconds: float) -> None:
        """Jump ahead. Time never runs backwards."""
        if seconds < 0:
            raise ValueError("the clock only goes forward")
        with self._lock:
            self._base += seconds

    def set_speed(self, speed: float) -> None:
        """Seconds of the simulated world per real second; 0 stops it, so that only `advance` moves it."""
        with self._lock:
            self._base = self._now()
            self._since = self._real()
            self._speed = _checked(speed)


def _checked(speed: float) -> float:
    if not 0 <= speed <= 1e6:
        raise ValueError("the speed is a number from 0 to 1000000")
    return speed
