"""Run ids and the lease that travels in a pod's own name. Floor 0.

A pod's name is the only record that survives the loss of everything else, so it carries the run, the attempt and the
deadline: ``pennypod-<run>-a<attempt>-t<deadline, base 36>-n<nonce>``. The nonce makes the name unique, so that a create
whose answer was lost can be told from another caller's pod of the same run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pennypod.errors import InputError

PREFIX = "pennypod-"
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"
_JOB = re.compile(r"[a-z][a-z0-9_]{0,39}")
_RUN = re.compile(r"(?P<job>[a-z][a-z0-9_]{0,39})-(?P<mmdd>\d{4})-(?P<random>[a-z2-7]{5})")
_LEASE = re.compile(
    r"pennypod-(?P<run>[a-z][a-z0-9_]{0,39}-\d{4}-[a-z2-7]{5})"
    r"-a(?P<attempt>\d{1,4})-t(?P<deadline>[0-9a-z]{1,12})-n(?P<nonce>[a-z2-7]{5})"
)

RandomBelow = Callable[[int], int]
"""`secrets.randbelow` in production; passed in so that tests choose."""


def random_base32(length: int, randbelow: RandomBelow) -> str:
    return "".join(_BASE32[randbelow(32)] for _ in range(length))


def check_job_name(job: str) -> str:
    """Return `job`. Raises InputError unless it is lower-case letters, digits and `_`, starting with a letter."""
    if not _JOB.fullmatch(job):
        raise InputError(
            f"job name {job!r} is not usable: use lower-case letters, digits and _, starting with a letter"
        )
    return job


def new_run_id(job: str, now: float, randbelow: RandomBelow) -> str:
    """``<job>-<mmdd>-<5 random base32>``; the day is UTC."""
    day = datetime.fromtimestamp(now, UTC).strftime("%m%d")
    return f"{check_job_name(job)}-{day}-{random_base32(5, randbelow)}"


def is_run_id(text: str) -> bool:
    return _RUN.fullmatch(text) is not None


def job_of_run(run: str) -> str:
    """The job a run id belongs to. Raises InputError when `run` is not a run id."""
    match = _RUN.fullmatch(run)
    if match is None:
        raise InputError(f"{run!r} is not a run id: it looks like demo-1201-k3f7q")
    return match["job"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The promise a pod is rented under. `deadline` is Unix seconds."""

    run: str
    attempt: int
    deadline: int
    nonce: str

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.run}-a{self.attempt}-t{_to_base36(self.deadline)}-n{self.nonce}"

    @property
    def job(self) -> str:
        return job_of_run(self.run)


def parse_lease(name: str) -> Lease | None:
    """The lease in a pod's name, or None when the name is not exactly ours."""
    match = _LEASE.fullmatch(name)
    if match is None:
        return None
    return Lease(match["run"], int(match["attempt"]), int(match["deadline"], 36), match["nonce"])


def _to_base36(value: int) -> str:
    if value < 0:
        raise ValueError("a deadline is never negative")
    digits = ""
    while True:
        value, rest = divmod(value, 36)
        digits = _BASE36[rest] + digits
        if value == 0:
            return digits
