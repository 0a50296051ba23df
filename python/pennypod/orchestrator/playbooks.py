"""Running the project's playbooks through ansible-runner. Floor 3: processes are its one outside thing.

A playbook is a child process of ours that does not die with us. So whatever carries a run's mark in its environment is
ended before the run is touched again: two must never work on one pod.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ansible_runner
import psutil

from pennypod import processes
from pennypod.settings import Settings

RUN_MARK = "PENNYPOD_ORCHESTRATED_RUN"
_LAST_WORDS = 2000


@dataclass(frozen=True, slots=True)
class Played:
    """How a playbook ended. `code` is the machine-readable reason of the last failed task, empty without one."""

    rc: int
    code: str = ""
    message: str = ""


class Playbooks(Protocol):
    """What the workflow needs of Ansible; each call blocks until its playbook is over."""

    def launch(self, run: str, variables: Mapping[str, Any]) -> Played: ...

    def resume(self, run: str, variables: Mapping[str, Any]) -> Played: ...

    def end_leftovers(self, run: str) -> int: ...


class AnsiblePlaybooks:
    """The playbooks of a repository's root, with our own process as the runs' controller."""

    def __init__(self, settings: Settings, root: Path) -> None:
        self._settings = settings
        self._root = root
        self._controller = processes.own_identity()

    def launch(self, run: str, variables: Mapping[str, Any]) -> Played:
        leaving = {"run_id": run, "keep_on_disconnect": True, "detach": True, "detach_to": "caller"}
        return self._play("train.yml", run, {**variables, **leaving})

    def resume(self, run: str, variables: Mapping[str, Any]) -> Played:
        # What the run itself knows is not said again.
        said = {name: value for name, value in variables.items() if name not in ("job", "artifacts_dir")}
        return self._play("playbooks/resume.yml", run, {**said, "run": run})

    def _play(self, playbook: str, run: str, variables: Mapping[str, Any]) -> Played:
        folder = self._settings.run_dir(run) / "runner"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "env").mkdir(parents=True, mode=0o700)
        # In a file for the owner only: a process's arguments can be read by everybody.
        extravars = folder / "env" / "extravars"
        extravars.touch(mode=0o600)
        extravars.write_text(json.dumps(dict(variables)), encoding="utf-8")
        failure = _LastFailure()
        done = ansible_runner.run(
            private_data_dir=str(folder),
            project_dir=str(self._root),
            playbook=playbook,
            envvars=self._environment(run),
            event_handler=failure.see,
            status_handler=_forget_keys,
            quiet=True,
            suppress_env_files=True,
            settings={"idle_timeout": 0, "job_timeout": 0},
        )
        with contextlib.suppress(OSError):
            extravars.unlink(missing_ok=True)
        return Played(int(done.rc), failure.code, failure.message)

    def _environment(self, run: str) -> dict[str, str]:
        return {
            "ANSIBLE_CONFIG": str(self._root / "ansible.cfg"),
            "ANSIBLE_FORCE_COLOR": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            RUN_MARK: run,
            processes.CONTROLLER_VARIABLE: self._controller,
        }

    def end_leftovers(self, run: str) -> int:
        """End every process that an orchestrator before us left working on the run; how many there were."""
        ended = 0
        while found := _marked(run):
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
                    ended += 1
            psutil.wait_procs(found, timeout=5)
        return ended


def _forget_keys(status: Mapping[str, Any], runner_config: Any) -> None:
    """Take away what ansible-runner writes down before it starts a playbook: all of our environment, keys included."""
    if status["status"] != "starting":
        Path(runner_config.artifact_dir, "command").unlink(missing_ok=True)


class _LastFailure:
    """Picks the last failed task's reason out of the runner's events."""

    def __init__(self) -> None:
        self.code = ""
        self.message = ""

    def see(self, event: Mapping[str, Any]) -> bool:
        """Returns False: the event need not be kept in a file."""
        if event.get("event") in ("runner_on_failed", "runner_on_unreachable"):
            result = (event.get("event_data") or {}).get("res") or {}
            failure = result.get("failure")
            if isinstance(failure, dict):
                self.code = str(failure.get("code") or self.code)
            self.message = str(result.get("msg") or self.message)[:_LAST_WORDS]
        return False


def _marked(run: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            # The guard keeps watch for the run: it is the one that must stay.
            if process.pid != os.getpid() and process.environ().get(RUN_MARK) == run and not _is_guard(process):
                found.append(process)
    return found


def _is_guard(process: psutil.Process) -> bool:
    return "pennypod.guard" in process.cmdline()
