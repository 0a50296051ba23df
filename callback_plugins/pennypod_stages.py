"""Records in the ledger how long each stage of a run took: a role of the loop is a stage."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pennypod_stages
type: aggregate
short_description: Stage times of runs, for the ledger
description:
  - A stage begins with the first task of the role of that name for a host, and ends when that host enters another role
    or the play ends. The stages V(plan), V(rent) and V(gate) are recorded by the code that rents.
  - What a role does before the role C(pod) has begun for a host is preparation on this machine. It belongs to the plan.
  - Only hosts that are runs of the ledger are looked at.
  - Whatever goes wrong here is a warning. It never fails a play.
author:
  - pennypod contributors
requirements:
  - enabled in the configuration (callbacks_enabled)
"""

import contextlib
import time
from typing import Any

from ansible.plugins.callback import CallbackBase
from pennypod.console import STAGE_ROLES


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "pennypod_stages"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._stage_of: dict[str, str] = {}  # host -> the stage it is in
        self._planned: set[str] = set()  # hosts whose role pod has begun
        self._not_runs: set[str] = set()
        self._warned = False

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        name = host.get_name()
        role = task._role.get_name() if task._role is not None else ""
        before = self._stage_of.get(name)
        if role == "pod":
            self._planned.add(name)
        stage = role if role in STAGE_ROLES and (name in self._planned or role == "teardown") else None
        if stage == before or name in self._not_runs:
            return
        if stage is None:
            self._stage_of.pop(name, None)
        else:
            self._stage_of[name] = stage
        self._record(name, finished=before, started=stage)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        for name, stage in self._stage_of.items():
            self._record(name, finished=stage, started=None)
        self._stage_of.clear()

    def _record(self, run: str, *, finished: str | None, started: str | None) -> None:
        try:
            self._write(run, finished, started)
        except Exception as exc:  # noqa: BLE001 - stage times are a courtesy, a run must not fail for them
            if not self._warned:
                self._warned = True
                self._display.warning(f"stage times are not recorded: {exc}")

    def _write(self, run: str, finished: str | None, started: str | None) -> None:
        from pennypod.model.ids import is_run_id

        if not is_run_id(run):
            self._not_runs.add(run)
            return
        # Imported late, since importing the database library takes a while; opened and closed each time, since an open
        # database must not be carried into the workers that Ansible forks.
        from pennypod.errors import InputError
        from pennypod.ledger import open_ledger
        from pennypod.settings import load_settings

        now = time.time()
        with contextlib.closing(open_ledger(load_settings())) as ledger:
            try:
                if finished is not None:
                    ledger.finish_stage(run, finished, now)
                if started is not None:
                    ledger.start_stage(run, started, now)
            except InputError:  # a host that only looks like a run
                self._not_runs.add(run)
                self._stage_of.pop(run, None)
