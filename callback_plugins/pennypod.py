"""What a person sees of a play: live lines of the runs, failures in one line, a summary at the end."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pennypod
type: stdout
short_description: Live progress of runs, and a summary
description:
  - Shows what the runs of this play are doing (which offer, what state, bytes moved, epochs, seconds and dollars so
    far) while their tasks are still running. On a terminal every run has a line that updates, elsewhere there are plain
    lines.
  - A failure is one line that begins with C(error:) and goes to stderr. Task banners and the recap are not shown.
  - Ends with the summary of every run and the line C(pods still billing).
  - With C(-v) and above it behaves like the default callback, plus the live lines and the summary.
author:
  - pennypod contributors
extends_documentation_fragment:
  - default_callback
  - result_format_callback
requirements:
  - set as stdout in configuration
"""

import atexit
import contextlib
import io
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from ansible import constants
from ansible.plugins.callback.default import CallbackModule as Default
from ansible.utils.color import ANSIBLE_COLOR
from pennypod import console, processes
from pennypod.model.ids import is_run_id
from pennypod.settings import load_settings

TICK_TERMINAL_S = 0.25
TICK_PLAIN_S = 1.0
WORKERS_S = 2.0
# At the end of a play Ansible terminates workers that are slow to leave, and waits for them when it starts another one.
# One that is terminated and not waited for within this was terminated by somebody else.
TERMINATED_S = 10.0


class CallbackModule(Default):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "pennypod"

    def __init__(self) -> None:
        super().__init__()
        # Ansible forks its workers while it holds this lock, and prints under it. So whatever happens under it neither
        # lies across a fork nor mixes with other output.
        self._lock = getattr(self._display, "_lock", None) or threading.RLock()
        self._failures = console.Failures()
        self._terminal = self._display.verbosity == 0 and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._output = _Output()
        self._live = console.Live(
            load_settings().runs_dir,
            self._output,
            since=time.time() - 1,
            terminal=self._terminal,
            color=bool(ANSIBLE_COLOR),
            size=lambda: tuple(shutil.get_terminal_size()),
        )
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._summed_up = False
        self._worker_died = False
        self._look_at_workers_at = 0.0
        self._terminated: tuple[int, float] | None = None  # a worker's pid, and when it was first seen terminated

    # --- live lines ---------------------------------------------------------------------------------------------------

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        name = host.get_name()
        if is_run_id(name):
            self._live.follow(name)
            if task._role is not None:
                self._live.at_task(name, task._role.get_name(), task.name or task.action)
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_ticking, name="pennypod-live", daemon=True)
                self._thread.start()
                atexit.register(self._interrupted, os.getpid())
        super().v2_runner_on_start(host, task)

    def _keep_ticking(self) -> None:
        while not self._ended.wait(TICK_TERMINAL_S if self._terminal else TICK_PLAIN_S):
            self._end_with_a_dead_worker()
            # A terminal that somebody halted (Ctrl-S) must not halt the run: it gets to see afterwards what happened.
            with self._lock:
                if not self._ended.is_set() and self._output.takes_more():
                    self._live.tick(time.time())

    def _end_with_a_dead_worker(self) -> None:
        """A worker that was killed never answers, and `free` would wait for it until the deadline."""
        if self._worker_died or time.monotonic() < self._look_at_workers_at:
            return
        self._look_at_workers_at = time.monotonic() + WORKERS_S
        killed = processes.killed_fork()
        if killed is not None and (killed[1] != signal.SIGTERM or self._is_left(killed[0])):
            self._worker_died = True
            with self._lock:
                self._display.error("a worker of Ansible was killed: ending here, the guard destroys the pod")
            os.kill(os.getpid(), signal.SIGINT)  # what Ctrl-C does: Ansible ends its other workers

    def _is_left(self, pid: int) -> bool:
        """Whether a terminated worker has been there for so long that it was not Ansible that ended it."""
        if self._terminated is None or self._terminated[0] != pid:
            self._terminated = (pid, time.monotonic())
        return time.monotonic() - self._terminated[1] >= TERMINATED_S

    def _stop_ticking(self) -> None:
        self._ended.set()
        with self._lock:
            self._live.tick(time.time())
            self._live.clear()

    @contextlib.contextmanager
    def _own_line(self) -> Iterator[None]:
        """What is printed inside comes after everything that has happened, and not into a status line."""
        with self._lock:
            if not self._ended.is_set():
                self._live.tick(time.time())
                self._live.clear()
            yield

    # --- quiet at verbosity 0, the default above ----------------------------------------------------------------------

    @property
    def _quiet(self) -> bool:
        return self._display.verbosity == 0

    def v2_playbook_on_play_start(self, play: Any) -> None:
        if self._quiet:
            self._play = play
        else:
            super().v2_playbook_on_play_start(play)

    def _task_start(self, task: Any, prefix: str | None = None) -> None:
        if not self._quiet:
            super()._task_start(task, prefix)
            return
        # A diff prints its task's banner itself, and needs these two for it.
        self._task_type_cache[task._uuid] = prefix or "TASK"
        self._last_task_name = None

    def v2_runner_on_ok(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_on_ok(result)
            return
        with self._own_line_if(self._speaks(result)):
            self._handle_warnings(result.result)
            if result.result.get("_ansible_verbose_always") and not result.result.get("_ansible_verbose_override"):
                self._display.display(self._spoken(result))
            elif result.task.check_mode and result.result.get("changed"):
                self._display.display(f"would change: {_task_name(result)} ({result.host.get_name()})")

    def v2_runner_item_on_ok(self, result: Any) -> None:
        if self._quiet:
            if result.result.get("_ansible_verbose_always"):
                self.v2_runner_on_ok(result)
            else:
                self._handle_warnings(result.result)
        else:
            super().v2_runner_item_on_ok(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        if not self._quiet:
            super().v2_runner_on_failed(result, ignore_errors)
        elif not ignore_errors:
            self._tell(console.failure_of(result.result, _task_name(result)), result)
        else:
            self._handle_warnings(result.result)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_item_on_failed(result)  # when quiet, the task's own result tells it

    def v2_runner_on_unreachable(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_on_unreachable(result)
            return
        why = console.failure_of(result.result).message
        self._tell(console.Failure(f"{result.host.get_name()} cannot be reached: {why}", "unreachable"), result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_on_skipped(result)

    def v2_runner_item_on_skipped(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_item_on_skipped(result)

    def v2_runner_retry(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_retry(result)

    def v2_runner_on_async_poll(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_on_async_poll(result)

    def v2_runner_on_async_ok(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_on_async_ok(result)

    def v2_runner_on_async_failed(self, result: Any) -> None:
        if not self._quiet:
            super().v2_runner_on_async_failed(result)

    def v2_playbook_on_include(self, included_file: Any) -> None:
        if not self._quiet:
            super().v2_playbook_on_include(included_file)

    def v2_playbook_on_no_hosts_matched(self) -> None:
        if not self._quiet:
            super().v2_playbook_on_no_hosts_matched()

    def v2_playbook_on_no_hosts_remaining(self) -> None:
        if not self._quiet:
            super().v2_playbook_on_no_hosts_remaining()

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._stop_ticking()
        if not self._quiet:
            super().v2_playbook_on_stats(stats)
        self._sum_up()

    def _speaks(self, result: Any) -> bool:
        names = ("_ansible_verbose_always", "warnings", "deprecations")
        return any(result.result.get(name) for name in names) or bool(result.task.check_mode)

    def _own_line_if(self, needed: bool) -> contextlib.AbstractContextManager[None]:
        return self._own_line() if needed else contextlib.nullcontext()

    def _spoken(self, result: Any) -> str:
        """The text of a debug task or its like: for people, so without the wrapping of a result."""
        self._clean_results(result.result, result.task.action)
        message = result.result.get("msg")
        if isinstance(message, str):
            text = message
        elif isinstance(message, (list, tuple)):
            text = "\n".join(str(item) for item in message)
        else:
            text = self._dump_results(result.result).strip()
        host = result.host.get_name()
        if len(self._live.runs) > 1 and is_run_id(host):
            return "\n".join(f"{host}  {line}" for line in text.splitlines())
        return text

    def _tell(self, failure: console.Failure, result: Any) -> None:
        with self._own_line():
            self._handle_warnings(result.result)
            if not self._failures.is_new(failure):
                return
            host = result.host.get_name()
            if len(self._live.runs) > 1 and is_run_id(host) and host not in failure.message:
                failure = console.Failure(f"{host}: {failure.message}", failure.code)
            self._display.display(str(failure), color=constants.COLOR_ERROR, stderr=True)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _sum_up(self, *, interrupted: bool = False) -> None:
        if self._summed_up:
            return
        self._summed_up = True
        try:
            text = _summary(self._live.runs, interrupted=interrupted)
        except Exception as exc:  # noqa: BLE001 - a summary must not change how a play ends
            self._display.warning(f"the summary cannot be shown: {exc}; `pennypod ledger` has it all")
            return
        if text:
            self._display.display(text)

    def _interrupted(self, pid: int) -> None:
        """At the end of the process: after Ctrl-C there were no stats, and the guard is at work."""
        if os.getpid() == pid and not self._summed_up:
            self._stop_ticking()
            if self._live.runs:
                self._display.display("ended early: the guard destroys what is left, `pennypod ledger` shows it done")
            self._sum_up(interrupted=True)


class _Output:
    """Writes to stdout's descriptor: no buffer and no lock of Python's own, since the process forks at any time."""

    def __init__(self) -> None:
        try:
            self._descriptor: int | None = sys.stdout.fileno()
        except (OSError, ValueError, AttributeError):
            self._descriptor = None
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"

    def takes_more(self) -> bool:
        if self._descriptor is None:
            return False
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        return bool(poller.poll(0))

    def __call__(self, text: str) -> None:
        data = text.encode(self._encoding, "replace")
        try:
            while data and self._descriptor is not None:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            self._descriptor = None  # nobody reads any more


def _task_name(result: Any) -> str:
    return result.task.get_name().split(" : ", 1)[-1].strip()


def _summary(runs: list[str], *, interrupted: bool = False) -> str:
    """The summaries of these runs and, last, how many pods of all runs may be billing."""
    settings = load_settings()
    if not runs and not (settings.ledger_file is None or settings.ledger_file.exists()):
        return ""
    from pennypod.errors import InputError
    from pennypod.ledger import open_ledger
    from pennypod.report import run_document, still_billing_line, summary
    from rich.console import Console

    now = time.time()
    shown = io.StringIO()
    out = Console(
        file=shown, force_terminal=bool(ANSIBLE_COLOR), no_color=not ANSIBLE_COLOR, highlight=False, width=200
    )
    with contextlib.closing(open_ledger(settings)) as ledger:
        known = 0
        for run in runs:
            with contextlib.suppress(InputError):  # a host that only looks like a run
                document = run_document(ledger, run, now)
                out.print(summary(document, closing=False, interrupted=interrupted), soft_wrap=True)
                out.print()
                known += 1
        pending = ledger.pending_attempts()
        left = [text for run in runs if (text := _farewell(settings, ledger, run))]
    if pending:
        out.print(still_billing_line(pending, now, runs), style="bold red", soft_wrap=True)
    if known or pending:
        last = "; ".join([f"pods still billing: {len(pending)}", *left])
        out.print(last, style="bold red" if pending else "bold green", end="", soft_wrap=True)
    return shown.getvalue()


def _farewell(settings: Any, ledger: Any, run: str) -> str:
    """What goes on without this command, if that is how the run was meant."""
    from pennypod.errors import InputError

    if not (settings.runs_dir / run / "monitor").exists():
        return ""
    from pennypod.monitor import farewell

    with contextlib.suppress(InputError):
        return farewell(settings, ledger, run)
    return ""
