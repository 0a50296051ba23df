"""Who is alive. Floor 1: the process table, and what the kernel calls itself, are its outside things.

A pid alone can be reused, and several machines may share one ledger, so a process is named by
``<pid>:<start time in clock ticks>:<machine>.<boot>.<pid namespace>``. Of a process on another machine, or in another
container, nothing can be known from here: it counts as alive, and whoever waits for its end waits for the deadline.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from pathlib import Path

import psutil

_ANSIBLE_COMMANDS = frozenset({"ansible", "ansible-playbook", "ansible-console", "ansible-runner"})
_IDENTITY = re.compile(r"\d+:\d+(:|$)")
CONTROLLER_VARIABLE = "PENNYPOD_CONTROLLER"


def identity(pid: int) -> str:
    """The identity of a live process. Raises ProcessLookupError when there is none."""
    return f"{pid}:{_start_ticks(pid)}:{own_place()}"


def own_identity() -> str:
    return identity(os.getpid())


def pid_of(process: str) -> int:
    return int(process.partition(":")[0])


@functools.cache
def own_place() -> str:
    """Where pids mean what they mean here: this machine, since this boot, in this pid namespace."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    # A machine without an id is another one after each boot: a name alone is no proof that it is the same.
    machine = f"{_read('/etc/machine-id') or boot} {socket.gethostname()}"
    namespace = str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")
    return f"{_digest(machine)}.{_digest(boot)}.{namespace}"


def can_judge(process: str, here: str | None = None) -> bool:
    """Whether it can be known from here if that process lives.

    It can where it shares our pids, and where it ran on this very machine before the last boot. An identity without a
    place, as former versions wrote it, is taken for one of ours. Of what is no identity at all nothing can be known.
    """
    if not _IDENTITY.match(process):
        return False
    place, here = _place_of(process), own_place() if here is None else here
    if place in ("", here):
        return True
    (machine, boot, _), (own_machine, own_boot, _) = place.split("."), here.split(".")
    return machine == own_machine and boot != own_boot


def says_where(process: str) -> bool:
    """Whether an identity names its machine; those of former versions do not."""
    return _place_of(process) != ""


def is_alive(process: str) -> bool:
    """Whether that process may still run. A zombie has ended, though its parent has not noticed."""
    if not can_judge(process):
        return True
    pid = pid_of(process)
    return _is_here(process) and _state(pid) != "Z"


def is_suspended(process: str) -> bool:
    """Whether exactly that process is stopped (SIGSTOP, Ctrl-Z, a debugger) and so does nothing about anything."""
    return _is_here(process) and _state(pid_of(process)) in ("T", "t")


def _is_here(process: str) -> bool:
    """Whether exactly that process is in our own process table."""
    if not _IDENTITY.match(process) or _place_of(process) not in ("", own_place()):
        return False
    pid, ticks = process.split(":")[:2]
    try:
        return _start_ticks(int(pid)) == int(ticks)
    except ProcessLookupError:
        return False


def _place_of(process: str) -> str:
    place = ":".join(process.split(":")[2:])
    return place if place.count(".") == 2 else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


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


def killed_fork() -> tuple[int, int] | None:
    """Pid and signal of a fork of this process that a signal has ended, if there is one; it can still be waited for."""
    me = psutil.Process()
    for child in me.children():
        try:
            if child.name() != me.name():
                continue
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (ChildProcessError, psutil.Error):  # somebody else has waited for it just now
            continue
        if ended is not None and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return child.pid, int(ended.si_status)
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
    """One letter; "Z", as of one that has ended, when there is no such process any more."""
    try:
        return _stat_fields(pid)[0]
    except ProcessLookupError:
        return "Z"


def _start_ticks(pid: int) -> int:
    return int(_stat_fields(pid)[19])
