"""Starting a training in tmux, at most once per run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pennypod.errors import DiskFullError, InputError, TrainingError
from pennypod.ssh import last_line
from pennypod.training.frames import SESSION, Frame, look
from pennypod.weights import parse_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pennypod.callbacks import CallbackAccess
    from pennypod.ssh import Ssh

ONPOD = Path(__file__).parent.parent / "onpod"
LAUNCH_SCRIPT = ONPOD / "launch.py"
# What the pod keeps for itself: the supervisor, and what the stream calls beside it.
RESIDENT_SCRIPTS = ("supervise.py", "find_files.py", "call_back.py")
PROOF_S = 20.0  # from new-session to a status file and a living session, on a busy pod

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Launched:
    """`launched` False: the run was started before. `elapsed_s` since the trainer's start, by the pod's own clock."""

    launched: bool
    state: str
    elapsed_s: float


def check_launch(command: str, env: Mapping[str, str]) -> None:
    """Raises InputError for what no pod could run."""
    if not command.strip():
        raise InputError("training_command is empty: say what to run on the pod")
    if "\0" in command:
        raise InputError("training_command has a NUL byte in it")
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name) or "\0" in value:
            raise InputError(f"training_env: {name!r} is not usable as an environment variable")


def launch(
    ssh: Ssh,
    pod_home: str,
    command: str,
    env: Mapping[str, str],
    *,
    run: str,
    python: str = "",
    session: str = SESSION,
    callback: CallbackAccess | None = None,
) -> Launched:
    """Start `command` in tmux on the pod, unless this run was started there before; then only say so.

    With `callback` the pod tells that address how it goes; no file there keeps the token once the command has started.
    Returns once a new login, made after the launching one was over, has seen the session alive (or the command over).
    Raises TrainingError when it cannot be started, DiskFullError when the pod has no room.
    """
    check_launch(command, env)
    spec: dict[str, Any] = {"run": run, "command": command, "env": dict(env), "python": python}
    if callback is not None and callback.url:
        spec["callback"] = {"url": callback.url, "token": callback.token}
    order = {
        "home": pod_home,
        "session": session,
        "run": run,
        "spec": spec,
        "scripts": {name: (ONPOD / name).read_text(encoding="utf-8") for name in RESIDENT_SCRIPTS},
    }
    # Not over the shared connection: the session must outlive the very connection that started it.
    answer = _ask(ssh.fresh(), order)
    frame = look(ssh, pod_home, run=run, session=session, wait_s=PROOF_S)
    _prove(frame, run, session)
    return Launched(bool(answer["launched"]), frame.state, frame.elapsed_s)


def would_launch(ssh: Ssh, pod_home: str, command: str, env: Mapping[str, str], *, run: str) -> Launched:
    """What `launch` would find, changing nothing."""
    check_launch(command, env)
    answer = _ask(ssh, {"home": pod_home, "session": SESSION, "run": run, "check": True})
    return Launched(not answer["state"], str(answer["state"]), 0.0)


def _ask(ssh: Ssh, order: Mapping[str, Any]) -> dict[str, Any]:
    done = ssh.run_script(LAUNCH_SCRIPT, [], 60, stdin=json.dumps(order).encode())
    answer = parse_answer(done.stdout)
    if answer is None:
        raise ssh.error(f"the pod did not answer to the launch: {last_line(done.stderr)}", rc=done.rc)
    if "error" not in answer:
        return answer
    kind, text = answer["kind"], answer["error"]
    if kind == "disk_full":
        raise DiskFullError(f"the training cannot start: the pod's disk is full ({text})")
    advice = {"no_tmux": ": the bootstrap stage installs it", "busy": ": one pod trains one run at a time"}
    raise TrainingError(f"the training cannot start: {text}{advice.get(kind, '')}", reason=kind)


def _prove(frame: Frame, run: str, session: str) -> None:
    status = frame.status or {}
    if frame.state == "failed_to_start":
        raise TrainingError(f"the training command cannot start: {status.get('error')}", reason="failed_to_start")
    if status.get("run") != run:
        raise TrainingError(
            f"the training did not start within {PROOF_S:g} s: no sign of it in the tmux session {session}",
            reason="not_started",
        )
    if frame.state != "finished" and not (frame.supervisor and frame.tmux):
        raise TrainingError(
            f"the training did not outlive the connection that started it: supervisor alive: {frame.supervisor}, "
            f"tmux session alive: {frame.tmux}",
            reason="not_started",
        )
