"""Ring 1 renews the lease of ring 3: a pod whose guard is silent for too long ends itself. Floor 2.

The guard says which attempts may live; this says so to their pods over SSH. Each word goes out in a thread of its own
with a time limit, so a pod that does not answer never keeps the guard from destroying another one, or that one. A
thread touches one pod and nothing else of ours, the ledger least of all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pennypod import fuse
from pennypod.acceptance import run_target
from pennypod.clock import Clock
from pennypod.errors import PennypodError
from pennypod.ledger import AttemptRecord, AttemptState
from pennypod.model.pod import SshAddress
from pennypod.readmission import Readmission
from pennypod.settings import Settings
from pennypod.ssh import Ssh

_PART = 4  # a lease is renewed after a quarter of its time, so three words in a row may be lost
_AGAIN_S = 30.0  # at the latest, after a word that did not arrive
_ANSWER_S = 30.0

Send = Callable[[AttemptRecord, float], None]
"""Tell a pod that its lease holds for so many seconds from now. Raises PennypodError when it could not be told."""


@dataclass(slots=True)
class _Word:
    """The last word to one pod. `due` is when the next one goes out."""

    due: float
    under_way: bool = False
    failing: bool = False


class Renewals:
    """Keeps the leases of the attempts that it is shown; forgets nothing but what it is not shown any more."""

    def __init__(
        self, settings: Settings, clock: Clock, log: Callable[[str], None], *, send: Send | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._log = log
        self._send = send or self._send_over_ssh
        self._words: dict[int, _Word] = {}
        self._readmissions: dict[int, Readmission] = {}
        self._threads: list[threading.Thread] = []

    def look_after(self, attempts: Iterable[AttemptRecord], deadline: float, *, to_the_end: bool = False) -> None:
        """Renew what is due among the attempts of one run, and return at once. Never beyond the run's deadline.

        `to_the_end` makes each lease as long as that allows: for a run that nobody need watch over any more.
        """
        now = self._clock.now()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for attempt in attempts:
            if attempt.state is not AttemptState.READY or not attempt.lease_s:
                continue
            word = self._words.setdefault(attempt.id, _Word(due=now))
            # The fuse itself waits a little at the deadline; a lease that ended on the dot would not.
            left = deadline + fuse.AFTER_DEADLINE_S - now
            left = left if to_the_end else min(attempt.lease_s, left)
            if word.under_way or now < word.due or left <= 0:
                continue
            word.under_way = True
            thread = threading.Thread(target=self._renew, args=(attempt, left, word), name="renew", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Until every word that is under way has arrived or failed."""
        for thread in self._threads:
            thread.join()

    def _renew(self, attempt: AttemptRecord, seconds: float, word: _Word) -> None:
        lease_s = attempt.lease_s or 0.0
        pause = lease_s / _PART
        try:
            self._send(attempt, seconds)
            if word.failing:
                self._log(f"{attempt.lease_name}: its lease is renewed again")
            word.failing = False
        except PennypodError as exc:
            pause = min(pause, _AGAIN_S)
            if not word.failing:
                left = f"after {lease_s / 60:.0f} min without one the pod ends itself"
                self._log(f"{attempt.lease_name}: its lease could not be renewed ({left}): {exc}")
            word.failing = True
        finally:
            word.due = self._clock.now() + pause
            word.under_way = False

    def _send_over_ssh(self, attempt: AttemptRecord, seconds: float) -> None:
        if attempt.ssh_host is None or attempt.ssh_port is None or attempt.pod_id is None:
            return
        pod = (attempt.provider, attempt.pod_id)
        readmit = self._readmissions.setdefault(attempt.id, Readmission(self._settings, self._clock, lambda: pod))
        address = SshAddress(attempt.ssh_host, attempt.ssh_port, attempt.ssh_user or "root")
        # A login of its own: the connection that others share may hang.
        ssh = Ssh(run_target(self._settings, attempt.run, address), readmit=readmit)
        fuse.renew(ssh.fresh(), seconds, timeout_s=_ANSWER_S)
