"""Ring 2 as a watch: look, end what is due, look again. Floor 2; of its own it has files below the state folder.

Every look goes the way of `pennypod sweep` and leaves a heartbeat, so that others can tell how long nobody has looked.
A sentinel outlives whatever a look runs into: it writes it down in one line, and looks again sooner.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pennypod.clock import Clock
from pennypod.errors import PennypodError
from pennypod.escrow import Escrow
from pennypod.ledger import Ledger, open_ledger
from pennypod.providers.base import Provider
from pennypod.settings import Settings, home_advice
from pennypod.sweep import DESTROYED, UNPROVEN, UNREADABLE_AFTER_S, Survey, Swept, survey, sweep
from pennypod.unwatched import close_over, somebody_watches

INTERVAL_S = 300.0
SOONER_S = 60.0
"""Seconds until the next look when something was left undone, unless the interval is shorter."""

Log = Callable[[str], None]


class SentinelError(PennypodError):
    """There can be no sentinel here: another one is at work, or its folder cannot be written to."""

    code = "sentinel"


@dataclass(frozen=True, slots=True)
class Manner:
    """How to look. `ahead_s` judges deadlines as of that much later; `runs` leaves everything else out."""

    unreadable_after_s: float = UNREADABLE_AFTER_S
    ahead_s: float = 0.0
    dry_run: bool = False
    runs: Collection[str] = ()
    patience_s: float = 120.0

    @property
    def counts(self) -> bool:
        """Whether a look of this manner is one that others may rely on."""
        return not (self.dry_run or self.ahead_s or self.runs)


MANNER = Manner()


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found and did."""

    judged_at: float
    found: Survey
    swept: list[Swept]
    warning: str = ""

    @property
    def unproven(self) -> list[Swept]:
        return [item for item in self.swept if item.action == UNPROVEN]

    @property
    def complete(self) -> bool:
        """Everybody could be asked, and all that was due is proven gone."""
        return not self.unproven and not self.found.unlisted

    def line(self) -> str:
        """One line for a log: numbers first, then each name that matters."""
        ended = [item for item in self.swept if item.action == DESTROYED]
        parts = [f"{len(self.swept)} due, {len(ended)} destroyed, {len(self.found.kept)} within their time"]
        parts += [f"stopped before its time {name}" for name in self.found.stopped]
        parts += [f"destroyed {item.target.name} ({item.target.reason}, ${item.usd:.4f})" for item in ended]
        parts += [f"NOT PROVEN GONE {item.target.name}: {item.error}" for item in self.unproven]
        parts += [f"{provider} cannot be looked at: {why}" for provider, why in self.found.unlisted.items()]
        if self.warning:
            parts.append(self.warning)
        return " ".join("; ".join(parts).split())


def look(
    providers: Mapping[str, Provider],
    open_it: Callable[[], Ledger],
    settings: Settings,
    clock: Clock,
    manner: Manner = MANNER,
) -> Look:
    """One look over everything, by the ledger where it can be read and by the pods' names alone where it cannot.

    `open_it` gives the ledger, the same one each time.
    """
    warning = ""
    try:
        ledger = open_it()
        ledger.pending_attempts()
    except PennypodError as exc:
        # A broken ledger must not keep a pod alive.
        warning = f"{exc}; sweeping by the pods' names alone"
        ledger = open_ledger(Settings(settings.home, "sqlite://"))
    judged_at = clock.now() + manner.ahead_s
    found = survey(providers, ledger, judged_at, unreadable_after_s=manner.unreadable_after_s, runs=manner.runs)
    swept = sweep(
        found,
        providers,
        ledger,
        clock,
        dry_run=manner.dry_run,
        report=lambda *_a, **_k: None,
        patience_s=manner.patience_s,
        escrow=Escrow(settings, ledger, clock),
    )
    if not manner.dry_run:
        with contextlib.suppress(PennypodError):  # books that cannot be closed now are open at the next look, too
            close_over(ledger, judged_at, clock.now(), lambda run: somebody_watches(settings, run), manner.runs)
    seen = Look(judged_at, found, swept, warning)
    if manner.counts:
        _leave_heartbeat(settings, seen, clock.now())
    return seen


# --- the heartbeat ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last look at this state folder's pods, whoever took it. Times in Unix seconds."""

    at: float
    complete: bool
    due: int
    unproven: int
    not_listed: list[str] = field(default_factory=list)
    host: str = ""
    pid: int = 0


def last_look(settings: Settings) -> Heartbeat | None:
    """None when nobody has looked yet, or what was left cannot be read."""
    try:
        document = json.loads(_folder(settings).joinpath("heartbeat.json").read_text(encoding="utf-8"))
        return Heartbeat(**document)
    except (OSError, ValueError, TypeError):
        return None


def _leave_heartbeat(settings: Settings, seen: Look, at: float) -> None:
    beat = Heartbeat(
        at=at,
        complete=seen.complete,
        due=len(seen.swept),
        unproven=len(seen.unproven),
        not_listed=sorted(seen.found.unlisted),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    with contextlib.suppress(OSError):  # a full disk must not stop the watch; that nobody has looked is what then shows
        folder = _folder(settings)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".heartbeat-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(beat), file)
        Path(temporary).replace(folder / "heartbeat.json")


def _folder(settings: Settings) -> Path:
    return settings.home / "sentinel"


# --- one sentinel per state folder ------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_one(settings: Settings) -> Iterator[None]:
    """Hold the sentinel's place in this state folder. Raises SentinelError when another one has it."""
    path = _folder(settings) / "lock"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as exc:
        raise SentinelError(f"cannot use {path.parent} ({exc.strerror}): {home_advice(exc)}") from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise SentinelError(f"another sentinel is at work here (it holds {path})") from exc
        yield


def is_on_watch(settings: Settings) -> bool:
    """Whether a sentinel is running on this state folder just now."""
    try:
        with _folder(settings).joinpath("lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


# --- the watch --------------------------------------------------------------------------------------------------------


class StoppedError(BaseException):
    """The watch was told to end. No Exception: nothing that handles faults may swallow it."""


@dataclass(frozen=True, slots=True)
class StoppableClock:
    """A clock whose sleep ends the watch when `stop` is set: between two questions, never inside one."""

    clock: Clock
    stop: threading.Event

    def now(self) -> float:
        return self.clock.now()

    def sleep(self, seconds: float) -> None:
        until = self.clock.now() + seconds
        while not self.stop.is_set():
            left = until - self.clock.now()
            if left <= 0:
                return
            self.clock.sleep(min(left, 0.5))
        raise StoppedError


def keep_watch(take_look: Callable[[Clock], Look], clock: Clock, interval_s: float, log: Log) -> None:
    """Look every `interval_s` seconds until the clock raises StoppedError."""
    with contextlib.suppress(StoppedError):
        while True:
            started = clock.now()
            pause = min(interval_s, SOONER_S)
            try:
                seen = take_look(clock)
            except Exception as exc:  # noqa: BLE001 - a sentinel outlives every surprise; it writes it down and goes on
                log(" ".join(f"the look failed, will look again: {type(exc).__name__}: {exc}".split()))
            else:
                log(seen.line())
                if seen.complete:
                    pause = interval_s
            clock.sleep(max(1.0, started + pause - clock.now()))
