"""Who is alive. Floor 1: the process table is its one outside thing.

A pid alone can be reused, so a process is named by ``<pid>:<start time in clock ticks>`` as the kernel tells it.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_ANSIBLE_COMMANDS = frozenset({"ansible", "ansible-playbook", "ansible-console", "ansible-runner"})
CONTROLLER_VARIABLE = "PENNYPOD_CONTROLLER"


def identity(pid: int) -> str:
    """The identity of a live process. Raises ProcessLookupError when there is none."""
    return f"{pid}:{_start_ticks(pid)}"


def own_identity() -> str:
    return identity(os.getpid())


def pid_of(process: str) -> int:
    return int(process.partition(":")[0])


def is_alive(process: str) -> bool:
    """Whether exactly that process still runs; a zombie has ended, though its parent has not noticed."""
    pid = pid_of(process)
    try:
        return identity(pid) == process and _state(pid) != "Z"
    except ProcessLookupError:
        return False


def is_suspended(process: str) -> bool:
    """Whether exactly that process is stopped (SIGSTOP, Ctrl-Z, a debugger) and so does nothing about anything."""
    pid = pid_of(process)
    try:
        return identity(pid) == process and _state(pid) in ("T", "t")
    except ProcessLookupError:
        return False


def controller_identity() -> str:
    """The process that a run must not outlive: the ansible command this process descends from, else its parent.

    Ansible forks a worker per task and a worker keeps its parent's command line, so the outermost of an unbroken chain
    of ansible processes is the one the user started.

    A service that answers for its playbooks itself names itself in `PENNYPOD_CONTROLLER`. That counts only for what
    descends from it: a playbook that has outlived its service must not speak in its name.
    """
    parents = psutil.Process().parents()
    service = os.environ.get(CONTROLLER_VARIABLE)
    if service and any(_is(parent, service) for parent in parents):
        return service
    controller: psutil.Process | None = None
    for parent in parents:
        if _is_ansible(parent):
            controller = parent
        elif controller is not None:
            break
    if controller is None:
        return identity(os.getppid())
    return identity(controller.pid)


def killed_fork() -> int | None:
    """The pid of a fork of this process that a signal has ended, if there is one; whoever waits for it still can."""
    me = psutil.Process()
    for child in me.children():
        try:
            if child.name() != me.name():
                continue
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (ChildProcessError, psutil.Error):  # somebody else has waited for it just now
            continue
        if ended is not None and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return child.pid
    return None


def _is(process: psutil.Process, wanted: str) -> bool:
    try:
        return identity(process.pid) == wanted
    except ProcessLookupError:
        return False


def _is_ansible(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:3]
    except psutil.Error:
        return False
    return any(Path(word).name in _ANSIBLE_COMMANDS for word in words)


def _stat_fields(pid: int) -> list[str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise ProcessLookupError(f"no process {pid}") from exc
    # The command name is in parentheses and may hold blanks, so count from the last one (proc(5)).
    return stat[stat.rindex(")") + 2 :].split()


def _state(pid: int) -> str:
    return _stat_fields(pid)[0]


def _start_ticks(pid: int) -> int:
    return int(_stat_fields(pid)[19])
