"""Runs our modules in forks of Ansible's workers. Top floor: used by `action_plugins/`, knows Ansible's controller.

A module that Ansible runs on localhost costs a new Python, the unpacking of an archive and every import anew: more than
half a second, seven times while a pod bills. Ansible forks a worker for each task anyway. With its action plugin loaded
in the process that the workers are forked from, a module's imports are there already. The module itself is the same:
the same arguments, the same checks of them, the same result.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

from ansible.module_utils import _internal, basic
from ansible.module_utils.common.json import Direction, get_module_encoder
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import module_loader
from ansible.utils.vars import merge_hash

from pennypod.forked import run_in_fork

# How arguments and results are written down between Ansible and a module written in Python.
_PROFILE = "legacy"


def load_module(name: str) -> ModuleType:
    """A module of `library/`, imported. Call it where an action plugin is loaded: before workers are forked."""
    path = module_loader.find_plugin(name)
    spec = importlib.util.spec_from_file_location(f"pennypod_library_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class ForkedModule(ActionBase):  # type: ignore[misc] # Ansible tells no types
    """A task of the module that its subclass names; anywhere but on this machine, as Ansible runs any module."""

    _supports_async = True
    module: ModuleType

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        if self._is_here(task_vars):
            return dict(merge_hash(result, self._run_here(task_vars)))
        later = bool(self._task.async_val) and not self._connection.has_native_async
        return dict(merge_hash(result, self._execute_module(task_vars=task_vars, wrap_async=later)))

    def _is_here(self, task_vars: Mapping[str, Any]) -> bool:
        """Whether the task asks for this machine, this Python, this user and this environment."""
        if sys.platform != "linux":  # elsewhere a fork may crash in the system's own libraries
            return False
        plain = not (self._task.async_val or any(self._task.environment or []) or self._play_context.become)
        asked = task_vars.get("ansible_delegated_vars", {}).get(self._task.delegate_to, task_vars)
        python = self._templar.template(asked.get("ansible_python_interpreter"))
        return bool(plain and self._connection.transport == "local" and python == sys.executable)

    def _run_here(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        name, arguments = self._task.action, dict(self._task.args)
        self._update_module_args(name, arguments, task_vars)
        encoder = get_module_encoder(_PROFILE, Direction.CONTROLLER_TO_MODULE)
        words = json.dumps({"ANSIBLE_MODULE_ARGS": arguments}, cls=encoder).encode()
        done = run_in_fork(partial(self._call, words))
        controller = multiprocessing.parent_process()
        if controller is not None and os.getppid() != controller.pid:
            os._exit(1)  # it was killed: nobody reads the result, and a long one would be offered for ever
        if done.rc < 0:
            return {"failed": True, "msg": f"{name} was ended by signal {-done.rc}"}
        return dict(self._parse_returned_data(dataclasses.asdict(done), _PROFILE))

    def _call(self, arguments: bytes) -> None:
        """In the fork: what Ansible's wrapper does before it runs a module as a program."""
        basic._ANSIBLE_ARGS, basic._ANSIBLE_PROFILE = arguments, _PROFILE  # noqa: SLF001 - the way to hand them over
        _internal.is_controller = False  # warnings go into the result
        self.module.main()
