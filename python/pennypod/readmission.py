"""Lets a run's key into its pod again when the pod has lost it. Floor 2: the provider's API, and one login to see.

Vast writes a pod's authorized_keys anew after hours, and what only the start script had put there is gone. The provider
is asked to let the key in again, and a fresh connection shows whether it did. Bounded in time and number: a login that
is refused for another reason must not become a flood of API calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from pennypod.clock import Clock
from pennypod.errors import PennypodError
from pennypod.providers.base import AttachesKeys
from pennypod.providers.registry import open_provider
from pennypod.settings import Settings
from pennypod.ssh import Ssh, wait_for_ssh

SPACING_S = 60.0
MOST_TRIES = 20
LIMIT_S = 60.0
"""However long the API takes: whoever waits for a login has other things to look after."""

_LOGIN_S = 20.0

Where = Callable[[], tuple[str, str] | None]
"""Names the provider and the pod; None when there is no pod any more."""


class Readmission:
    """`Ssh(readmit=...)`. One object for all connections to a pod, since it counts."""

    def __init__(self, settings: Settings, clock: Clock, where: Where) -> None:
        self._settings = settings
        self._clock = clock
        self._where = where
        self._lock = threading.Lock()
        self._tries = 0
        self._last = float("-inf")
        self._let_in = False

    def __call__(self, fresh: Ssh) -> bool:
        """Whether `fresh` can log in now. False at once for another one's try within the last minute that failed."""
        with self._lock:
            now = self._clock.now()
            if now - self._last < SPACING_S:
                return self._let_in
            if self._tries >= MOST_TRIES:
                return False
            self._last, self._let_in = now, False
            self._tries += 1
            thread = threading.Thread(target=self._try, args=(fresh,), name="readmit", daemon=True)
            thread.start()
            thread.join(LIMIT_S)
            return self._let_in

    def _try(self, fresh: Ssh) -> None:
        try:
            found = self._where()
            if found is None:
                return
            name, pod_id = found
            provider = open_provider(name, self._settings)
            if not isinstance(provider, AttachesKeys):
                return
            provider.renew_key(pod_id, _public_key(fresh.target.key_file))
            wait_for_ssh(fresh, deadline_s=_LOGIN_S, clock=self._clock)
        except (PennypodError, OSError):
            return
        self._let_in = True


def _public_key(key_file: Path) -> str:
    return key_file.with_name(f"{key_file.name}.pub").read_text(encoding="utf-8").strip()
