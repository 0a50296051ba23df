"""A run's code and data to its pod: now, or beside what else is done to the pod. Floor 2: SSH, the ledger, the bucket,
the run's own folder.

What is begun is a process of its own (`begin`). It holds a lock while it works, and leaves a note of what it has done:
for which pod and which files. Whoever ships later waits for the lock, and takes the note's word or does the work
itself, which sends only what is not there. Taking the note away keeps one that comes too late from starting at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import posixpath
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pennypod import datayaml, pulling
from pennypod.clock import Clock, SystemClock
from pennypod.errors import FencedError, InputError, PennypodError
from pennypod.events import Events
from pennypod.files import write_atomically
from pennypod.ledger import open_ledger
from pennypod.podwork import Fence, GuardWatch, connect, counted, show_bytes
from pennypod.settings import Settings, load_settings
from pennypod.ssh import Ssh
from pennypod.transfer import Pulled, UploadPlan, UploadResult, plan_upload, upload
from pennypod.transfer.plan import Part
from pennypod.transfer.shares import MAX_STREAMS

NOTE = "shipping.json"
"""In the run's folder, from the begin of a shipping beside the bootstrap until its result is taken."""
_LOCK = "shipping.lock"
_LOOK_S = 0.1

Warn = Callable[[str], None]


def plan_of(options: Mapping[str, Any]) -> UploadPlan:
    """What the options of `run_dataset` name, as it is on disk now. Raises InputError."""
    code, data = (Path(options[name]) if options[name] else None for name in ("code", "data"))
    limit = options["code_limit_mb"] * 1_000_000
    rules = {"excludes": options["excludes"], "data_excludes": options["data_excludes"], "code_limit_bytes": limit}
    plan = plan_upload(code, data, **rules)
    name = options["data_yaml"]
    if not name or data is None:
        return plan
    part = next(part for part in plan.parts if part.name == "data")
    file = next((file for file in part.files if file.path == name), None)
    if file is None:
        raise InputError(f"there is no {name} in {data}: correct data_yaml, or leave it empty", path=str(data))
    try:
        text = Path(part.source(file)).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"{data / name} cannot be read: {exc}", path=str(data / name)) from exc
    entries = {*part.directories, *(entry.path for entry in part.files)}
    rewritten = datayaml.rewrite(text, posixpath.join(options["pod_home"], "data"), entries).encode()
    # Sent in place of the file, not edited on the pod: the second run then finds what it would send.
    return plan_upload(code, data, **rules, replacements={name: rewritten})


def data_of(plan: UploadPlan) -> Part | None:
    return next((part for part in plan.parts if part.name == "data"), None)


# --- beside the bootstrap ---------------------------------------------------------------------------------------------


def begin(settings: Settings, options: Mapping[str, Any]) -> None:
    """Start to ship what the options of `run_dataset` name, in a process of its own."""
    run = options["run"]
    _write(settings, run, {"pod": _pod(settings, options), "options": dict(options)})
    subprocess.Popen(
        [sys.executable, "-m", "pennypod.shipping", run],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def main(run: str) -> None:
    """The process that `begin` starts. What goes wrong here is met again by whoever ships later, and told there."""
    settings, clock = load_settings(), SystemClock()
    options = _read(settings, run).get("options")
    if options is None:
        return
    warnings: list[str] = []
    shipping = Shipping(settings, options, clock, warnings.append)
    try:
        with _alone(settings, run, clock, shipping.on_tick):
            note = _read(settings, run)
            if note.get("pod") != _pod(settings, options):
                return  # somebody was quicker, or the pod is another one by now
            plan = plan_of(options)
            result = shipping.ship_now(connect(options, settings, clock), plan)
            done = {"mark": _mark(options, plan), "result": result, "warnings": warnings}
            _write(settings, run, {"pod": note["pod"], **done})
    except FencedError:
        return
    except Exception as exc:  # noqa: BLE001 - there is nobody else to tell
        why = exc.message if isinstance(exc, PennypodError) else f"{type(exc).__name__}: {exc}"
        Events(settings.run_dir(run), run).emit("dataset", f"shipping beside the bootstrap has ended early: {why}")


@contextlib.contextmanager
def _alone(settings: Settings, run: str, clock: Clock, on_wait: Callable[[], None]) -> Iterator[None]:
    """One at a time ships for a run. `on_wait` may raise to stop waiting."""
    with (settings.run_dir(run) / _LOCK).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
                clock.sleep(_LOOK_S)
        yield


def _pod(settings: Settings, options: Mapping[str, Any]) -> list[Any]:
    """Which pod the options mean: the run's attempt as well, since another pod may have the same address."""
    with contextlib.suppress(PennypodError), contextlib.closing(open_ledger(settings)) as ledger:
        attempts = [attempt.id for attempt in ledger.attempts(options["run"]) if not attempt.final]
        return [*attempts, options["host"], options["port"]]
    return [options["host"], options["port"]]


def _mark(options: Mapping[str, Any], plan: UploadPlan) -> str:
    """What is shipped to where: equal for two calls that would do the same."""
    return hashlib.sha256(f"{options['pod_home']} {options['store']} {plan!r}".encode(errors="replace")).hexdigest()


def _read(settings: Settings, run: str) -> dict[str, Any]:
    try:
        note = json.loads((settings.run_dir(run) / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _write(settings: Settings, run: str, note: Mapping[str, Any]) -> None:
    write_atomically(settings.run_dir(run) / NOTE, json.dumps(note), 0o600)


# --- shipping ---------------------------------------------------------------------------------------------------------


class Shipping:
    """One shipping of a run, by the options of `run_dataset`. `warn` gets what a person should know."""

    def __init__(self, settings: Settings, options: Mapping[str, Any], clock: Clock, warn: Warn) -> None:
        self.settings, self.options, self.clock, self.warn = settings, options, clock, warn
        self.run: str = options["run"]
        self.events = Events(settings.run_dir(self.run), self.run)
        self.fence = Fence(settings, self.run, clock)
        self._keep_guard = GuardWatch(settings, self.run, "dataset", self.events, clock, warn)

    def on_tick(self) -> None:
        """Raises FencedError when the run is not ours any more."""
        self.fence()
        self._keep_guard()

    def ship(self, ssh: Ssh, plan: UploadPlan) -> dict[str, Any]:
        """Bring the plan to the pod, or wait for what was begun to do that; the module's result."""
        if not (self.settings.run_dir(self.run) / NOTE).exists():
            return self.ship_now(ssh, plan)
        with _alone(self.settings, self.run, self.clock, self.on_tick):
            note = _read(self.settings, self.run)
            same_pod = note.get("pod") == _pod(self.settings, self.options)
            try:
                if not same_pod or note.get("mark") != _mark(self.options, plan):
                    return self.ship_now(ssh, plan)
                for text in note["warnings"]:
                    self.warn(text)
                return dict(note["result"])
            finally:
                (self.settings.run_dir(self.run) / NOTE).unlink(missing_ok=True)

    def ship_now(self, ssh: Ssh, plan: UploadPlan) -> dict[str, Any]:
        """Bring the plan to the pod. Raises what `upload` does, and FencedError."""
        options = self.options
        self.events.emit("dataset", f"{plan.files} files, {plan.bytes / 1e6:.1f} MB to ship", total_bytes=plan.bytes)
        self.on_tick()
        on_progress = show_bytes(self.events, "dataset", "shipped", self.clock, self.on_tick)
        part, fetched, why = data_of(plan), None, ""
        with counted(self.settings, self.run, ssh):
            if options["store"] and part is not None:
                fetched, why = self._fetch(ssh, part)
            hashes = pulling.known_hashes(part, fetched[0]) if fetched and part else None
            most = 1 if fetched and not fetched[1].left else MAX_STREAMS
            done = upload(ssh, plan, options["pod_home"], on_progress=on_progress, known=hashes, most_streams=most)
        way = {} if part is None else self._note(part, done, fetched, why)
        rate = done.bytes / max(done.seconds, 1e-3)
        self.events.emit(
            "dataset",
            f"{done.files} files, {done.bytes / 1e6:.1f} MB sent in {done.seconds:.1f} s ({rate / 1e6:.1f} MB/s)"
            + (f" over {done.streams} connections" if done.streams > 1 else "")
            + f"; all {plan.files} verified on the pod"
            + (f"; the line broke {done.reconnects} times" if done.reconnects else ""),
            bytes=done.bytes,
            total_bytes=plan.bytes,
            rate_bytes_per_s=round(rate),
        )
        return {
            "changed": done.changed or bool(fetched and fetched[1].files),
            "dataset": way,
            "files": done.files,
            "bytes": done.bytes,
            "unchanged_files": done.unchanged_files,
            "removed_files": done.removed_files,
            "resumed_files": done.resumed_files,
            "reconnects": done.reconnects,
            "streams": done.streams,
            "seconds": done.seconds,
        }

    def _fetch(self, ssh: Ssh, part: Part) -> tuple[tuple[pulling.Kept, Pulled] | None, str]:
        """Have the pod fetch the data set; what did not come of it, and why, is a warning: it goes over SSH."""
        deadline, home = self.fence.deadline(), self.options["pod_home"]
        shown = show_bytes(self.events, "dataset", "fetched from the bucket", self.clock, self.on_tick)
        started = self.clock.now()
        try:
            fetched = pulling.fetch(
                self.settings, os.environ, self.run, part, ssh, home, deadline, self.clock, shown, self.on_tick
            )
        except FencedError:
            raise
        except PennypodError as exc:
            self.warn(f"the data set goes over SSH, not from the bucket: {exc.message}")
            return None, exc.message
        pulled = fetched[1]
        self.events.emit(
            "dataset",
            f"{pulled.files} files, {pulled.bytes / 1e6:.1f} MB fetched by the pod from the bucket"
            f" in {self.clock.now() - started:.1f} s, {fetched[0].sent_bytes / 1e6:.1f} MB sent to it",
            bytes=pulled.bytes,
        )
        if pulled.left:
            self.warn(f"{pulled.left} files of the data set go over SSH, not from the bucket: {pulled.why}")
        return fetched, ""

    def _note(
        self, part: Part, done: UploadResult, fetched: tuple[pulling.Kept, Pulled] | None, why: str
    ) -> dict[str, Any]:
        way = pulling.way_of(self.settings, self.run, part, done, fetched, why).as_document()
        with contextlib.suppress(PennypodError), contextlib.closing(open_ledger(self.settings)) as ledger:
            ledger.record_dataset(self.run, way)  # a run that no ledger knows is shipped by hand
        return way


if __name__ == "__main__":
    main(sys.argv[1])
