"""What a person sees while runs go on: live lines from the runs' event files, and failures in one line. Floor 2.

Everything here is plain values in, text out, except `Tail`, which reads a file with nothing but open, read and close:
it runs in a thread of a process that forks all the time, where anything that takes a lock could lock up a child.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pennypod.events import EVENTS_FILE
from pennypod.model.ids import is_run_id
from pennypod.model.money import SECONDS_PER_HOUR

PROGRESS_EVERY_S = 5.0
"""On a plain output, a line of mere progress (bytes, epochs) comes at most this often for a run and a stage."""

STAGE_ROLES = frozenset({"bootstrap", "dataset", "training", "weights", "teardown"})
"""Roles that are a stage of the loop; `pod` is three, and its module's events tell which."""

_MAX_LINE = 600
_READ_BYTES = 1 << 16
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_SIZE = re.compile(r"\d\s?[kKMGT]?i?B\b")

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a run's events file. `numbers` are the machine-readable extras."""

    at: float
    run: str
    stage: str
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_progress(self) -> bool:
        """Whether it only says how far something is: such lines may be thinned out."""
        return any(name in self.numbers for name in ("bytes", "epoch", "log_bytes"))

    @property
    def is_last_of_progress(self) -> bool:
        pairs = (("bytes", "total_bytes"), ("epoch", "epochs"))
        return any(
            name in self.numbers and total in self.numbers and self.numbers[name] == self.numbers[total]
            for name, total in pairs
        )


def parse_event(line: bytes) -> Event | None:
    """An event, or None for a line that is none: a full disk may have cut one short."""
    try:
        values = json.loads(line)
        at, run, stage, text = (values.pop(name) for name in ("t", "run", "stage", "text"))
        event = Event(float(at), str(run), str(stage), str(text), values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return event if is_run_id(event.run) else None


class Tail:
    """The lines that were added to a file since the last look. A file that is not there yet has none."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[bytes]:
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            return self._read(handle)
        except OSError:
            return []
        finally:
            os.close(handle)

    def _read(self, handle: int) -> list[bytes]:
        os.lseek(handle, self._offset, os.SEEK_SET)
        parts = [self._rest]
        while part := os.read(handle, _READ_BYTES):
            parts.append(part)
            self._offset += len(part)
        *lines, self._rest = b"".join(parts).split(b"\n")
        return lines


# --- a run, as its events tell it -------------------------------------------------------------------------------------


class RunView:
    """Where a run stands: stage, last text, seconds since its start, dollars so far."""

    def __init__(self, run: str, started: float) -> None:
        self.run = run
        self.started = started
        self.stage = ""
        self.text = ""
        self.over = False
        self._price_usd_per_h = 0.0
        self._asked_at: float | None = None
        self._billing_since: float | None = None
        self._spent_usd = 0.0

    def take(self, event: Event) -> None:
        self.started = min(self.started, event.at)
        self.stage, self.text = event.stage, describe(event)
        numbers = event.numbers
        if "usd_per_h" in numbers:
            self._price_usd_per_h, self._asked_at = float(numbers["usd_per_h"]), event.at
        elif numbers.get("gone"):
            self._spent_usd += float(numbers.get("usd", self._running_usd(event.at)))
            self._billing_since = None
            self.over = event.stage == "teardown"
        elif event.stage == "rent" and "pod_id" in numbers and self._billing_since is None:
            # Our clock starts with the question, as the ledger's does: the provider's own starts no earlier.
            self._billing_since = self._asked_at if self._asked_at is not None else event.at
            self.over = False

    def usd(self, now: float) -> float:
        return self._spent_usd + self._running_usd(now)

    def _running_usd(self, now: float) -> float:
        if self._billing_since is None:
            return 0.0
        return max(0.0, now - self._billing_since) * self._price_usd_per_h / SECONDS_PER_HOUR


def describe(event: Event) -> str:
    """The event's text, with the numbers that it does not say itself."""
    text, numbers = one_line(event.text), event.numbers
    if "epoch" in numbers and "epoch" not in text.lower():
        text = f"epoch {numbers['epoch']}" + (f"/{numbers['epochs']}" if "epochs" in numbers else "") + f": {text}"
    if "bytes" in numbers and not _SIZE.search(text):
        text += f" {format_bytes(numbers['bytes'])}"
        if numbers.get("total_bytes"):
            text += f" of {format_bytes(numbers['total_bytes'])}"
        if numbers.get("rate_bytes_per_s"):
            text += f", {format_bytes(numbers['rate_bytes_per_s'])}/s"
    return text


def line(view: RunView, event: Event) -> str:
    """A whole line: run, seconds since its start, dollars so far, stage, text."""
    return _columns(view, event.at, event.stage, describe(event))


def status(view: RunView, now: float, width: int) -> str:
    """The same for the updating line of a terminal, cut to its width."""
    return _columns(view, now, view.stage or "plan", view.text)[: max(0, width - 1)]


def _columns(view: RunView, now: float, stage: str, text: str) -> str:
    return f"{view.run}  {format_seconds(now - view.started):>6}  ${view.usd(now):.4f}  {stage:<9}  {text}"


class Thinner:
    """Lets every change through and progress only so often, so that a log file stays readable."""

    def __init__(self, every_s: float = PROGRESS_EVERY_S) -> None:
        self._every_s = every_s
        self._shown_at: dict[tuple[str, str], float] = {}
        self._last_text: dict[str, tuple[str, str]] = {}
        self._held: dict[tuple[str, str], Event] = {}

    def lets_through(self, event: Event, now: float) -> bool:
        key = (event.run, event.stage)
        if not event.is_progress:
            if self._last_text.get(event.run) == (event.stage, event.text):
                return False
            self._last_text[event.run] = (event.stage, event.text)
            return True
        if key in self._shown_at and now - self._shown_at[key] < self._every_s and not event.is_last_of_progress:
            self._held[key] = event
            return False
        self._held.pop(key, None)
        self._shown_at[key] = now
        return True

    def due(self, now: float) -> list[Event]:
        """Progress that was held back and has waited long enough."""
        keys = [key for key in self._held if now - self._shown_at[key] >= self._every_s]
        for key in keys:
            self._shown_at[key] = now
        return [self._held.pop(key) for key in keys]


def frame(permanent: Sequence[str], statuses: Sequence[str], color: bool) -> str:
    """What to send to a terminal: lines that stay, then status lines below the cursor.

    The cursor is left on an empty line above the status lines, so that whatever else prints does not run into them.
    """
    shown = "".join(f"{text}\n" for text in permanent)
    below = "".join(f"\n\x1b[2m{text}\x1b[0m" if color else f"\n{text}" for text in statuses)
    back = f"\r\x1b[{len(statuses)}A" if statuses else ""
    return f"\r\x1b[J{shown}{below}{back}"


class Live:
    """Follows the event files of runs and writes what is new; on a terminal it also keeps a status line per run.

    `write` gets text for the output, `size` tells the terminal's present columns and rows. Events older than `since`
    are history.
    """

    def __init__(
        self,
        runs_dir: Path,
        write: Callable[[str], None],
        *,
        since: float,
        terminal: bool = False,
        color: bool = False,
        size: Callable[[], tuple[int, int]] = lambda: (80, 24),
    ) -> None:
        self._runs_dir = runs_dir
        self._write = write
        self._since = since
        self._terminal = terminal
        self._color = color
        self._size = size
        self._thinner = Thinner()
        self._tails: dict[str, Tail] = {}
        self._views: dict[str, RunView] = {}
        self._drawn: list[str] = []

    @property
    def runs(self) -> list[str]:
        return list(self._views)

    def follow(self, run: str) -> None:
        if run not in self._views:
            self._tails[run] = Tail(self._runs_dir / run / EVENTS_FILE)
            self._views[run] = RunView(run, self._since)

    def at_task(self, run: str, role: str, task: str) -> None:
        """A run is at this task now: what its status line says until an event says more."""
        if role in STAGE_ROLES and run in self._views:
            view = self._views[run]
            view.stage, view.text = role, one_line(task)

    def tick(self, now: float) -> None:
        """Write what has happened since the last tick."""
        permanent = [text for run in list(self._views) for text in self._news(run, now)]
        if not self._terminal:
            permanent += [line(self._views[event.run], event) for event in self._thinner.due(now)]
            if permanent:
                self._write("".join(f"{text}\n" for text in permanent))
            return
        statuses = self._statuses(now)
        if permanent or statuses != self._drawn:
            self._write(frame(permanent, statuses, self._color))
            self._drawn = statuses

    def clear(self) -> None:
        """Take the status lines off the terminal, so that something else can be printed; a tick brings them back."""
        if self._drawn:
            self._write(frame([], [], self._color))
            self._drawn = []

    def _news(self, run: str, now: float) -> Iterator[str]:
        view = self._views[run]
        for raw in self._tails[run].new_lines():
            event = parse_event(raw)
            if event is None or event.run != run or event.at < self._since:
                continue
            view.take(event)
            if self._terminal and event.is_progress:
                continue  # the status line shows it
            if self._thinner.lets_through(event, now):
                yield line(view, event)

    def _statuses(self, now: float) -> list[str]:
        columns, rows = self._size()
        shown = [status(view, now, columns) for view in list(self._views.values()) if view.stage and not view.over]
        room = max(1, rows - 3)  # lines above the top of the screen could not be reached again
        return shown if len(shown) <= room else [*shown[: room - 1], f"... and {len(shown) - room + 1} more runs"]


# --- failures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    message: str
    code: str = ""

    def __str__(self) -> str:
        return f"error: {self.message}" + (f" [{self.code}]" if self.code else "")


_WRONG_TYPE = re.compile(r"argument '([^']+)' is of type .+? and we were unable to convert to (\w+): (.+?)(?=; |$)")
_TYPES = {"float": "a number", "int": "a whole number", "bool": "true or false", "list": "a list", "dict": "a mapping"}


def failure_of(result: Mapping[str, Any], task: str = "") -> Failure:
    """A failed task's result as one line. `task` is named where the message alone would not say what went wrong."""
    items = [item for item in result.get("results") or [] if isinstance(item, Mapping) and _is_bad(item)]
    if items:
        return failure_of(items[0], task)
    failure = result.get("failure")
    if isinstance(failure, Mapping) and failure.get("message"):
        return Failure(one_line(str(failure["message"])), one_line(str(failure.get("code") or "")))
    if result.get("argument_errors"):
        context = result.get("validate_args_context") or {}
        errors = "; ".join(_plain_type(str(error)) for error in result["argument_errors"])
        role = f"role {context['name']}: " if context.get("name") else ""
        return Failure(one_line(f"{role}{errors}"))
    return Failure(one_line(_plain_message(result, task)))


def _is_bad(item: Mapping[str, Any]) -> bool:
    return bool(item.get("failed") or item.get("unreachable"))


def _plain_message(result: Mapping[str, Any], task: str) -> str:
    message = str(result.get("msg") or "").strip()
    where = f"{task}: " if task else ""
    if message == "non-zero return code" or (not message and "rc" in result):
        why = _last_line(result.get("stderr")) or _last_line(result.get("stdout")) or "it said nothing"
        return f"{where}{_program(result.get('cmd'))} ended with exit status {result.get('rc')}: {why}"
    if "module_stderr" in result:
        why = _last_line(result.get("module_stderr")) or _last_line(result.get("module_stdout")) or message
        return f"{where}the module ended without a result: {why}"
    stripped = re.sub(r"^(Task failed: |Module failed: |Finalization of task args for '[^']*' failed: )+", "", message)
    if stripped != message:
        return f"{where}{stripped}"
    return _plain_type(message) or f"{where}failed without a reason"


def _plain_type(message: str) -> str:
    """Ansible's words for a value of the wrong type, without the names of Python classes."""

    def said(found: re.Match[str]) -> str:
        why = "" if "<class" in found[3] else f" ({found[3]})"
        return f"{found[1]} must be {_TYPES.get(found[2], found[2])}{why}"

    return _WRONG_TYPE.sub(said, message)


def _program(command: Any) -> str:
    words = command if isinstance(command, Sequence) and not isinstance(command, str) else str(command or "").split()
    return Path(str(words[0])).name if words else "the command"


def _last_line(text: Any) -> str:
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


class Failures:
    """Each failure is told once, however many hosts and tasks repeat it."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def is_new(self, failure: Failure) -> bool:
        if failure.message in self._told:
            return False
        self._told.add(failure.message)
        return True


# --- small print ------------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """Control characters and line breaks out, since a trainer's log or a provider's answer may hold anything."""
    flat = " ".join(_CONTROL.sub(" ", text).split())
    return flat if len(flat) <= _MAX_LINE else flat[: _MAX_LINE - 1] + "…"


def format_bytes(count: float) -> str:
    """`12.3 MB`; decimal units, as disks and lines are sold."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """`45s`, `3m05s`, `2h07m`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
