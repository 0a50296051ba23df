#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: a run that goes on without its command, and who looks after it. Runs on localhost."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: run_monitor
short_description: Leave a run to cron, and look after one that was left
description:
  - With C(state=possible), fails unless a line in this user's crontab would be run. Asked before anything is rented.
  - With C(state=prepared), writes what cron is to run for the run, with the environment that it needs, keys included,
    in files that only their owner can read. The crontab's line itself is for M(ansible.builtin.cron) to write.
  - With C(state=left), lets the run outlive its command from then on, once the crontab has the line.
  - With C(state=looked), takes one look at a run and says what is to be done. Ends nothing itself.
  - With C(state=absent), removes the keys and the plan of a run that is over. What is left in I(folder) takes itself
    out of the crontab should nobody come to do it. A run that is not over keeps everything.
options:
  state:
    description: What to do.
    type: str
    choices: [possible, prepared, left, looked, absent]
    required: true
  run:
    description: The run id. Needed for all states but C(possible).
    type: str
  root:
    description: The repository, from which cron is to run. Needed for C(state=prepared).
    type: path
  poll_minutes:
    description: Minutes between two looks. Fewer are taken when the deadline is near.
    type: int
    default: 30
  reserve_s:
    description: Seconds before the pod's deadline that the end of the run needs for itself.
    type: float
    default: 60
  stall_s:
    description: Seconds of silence after which a training is taken for stalled. 0 means never.
    type: float
    default: 0
  pod_home:
    description: Our folder on the pod.
    type: str
    default: /root/pennypod
  cancel:
    description: With C(state=looked), end the run even when all is well with it.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - pennypod
"""

EXAMPLES = r"""
- name: Look whether cron could look after a run
  run_monitor:
    state: possible

- name: Write what it is to run
  run_monitor:
    state: prepared
    run: demo-1201-k3f7q
    root: /srv/pennypod
  register: monitor

- name: Look after one
  run_monitor:
    state: looked
    run: demo-1201-k3f7q
  register: look
"""

RETURN = r"""
next:
  description:
    - C(wait) - nothing to do now; C(busy) - another command works on it; C(finish) - take it over and bring it to its
      end; C(end) - destroy what is left of it; C(over) - closed, and every pod proven gone.
  returned: state is looked
  type: str
why:
  description: The reason, in one line.
  returned: state is looked
  type: str
closed:
  description: Whether the ledger has closed the run.
  returned: state is looked
  type: bool
fenced:
  description: Whether the run was stopped, so that nobody can take it over any more.
  returned: state is looked
  type: bool
cron:
  description: The crontab's line - C(name), C(job), C(minute), C(hour).
  returned: state is prepared, looked or absent
  type: dict
left:
  description: Whether the run outlives its command from now on.
  returned: state is left
  type: bool
over:
  description: Whether the run is over, so that the crontab's line has to go.
  returned: state is absent
  type: bool
folder:
  description: The monitor's folder, empty when there is none.
  returned: state is absent
  type: str
failure:
  description: What went wrong, for programs - C(code), C(message), C(details).
  returned: failure
  type: dict
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from pennypod import processes
from pennypod.ansible import run_module
from pennypod.clock import SystemClock
from pennypod.errors import InputError
from pennypod.events import Events
from pennypod.ledger import Ledger, open_ledger
from pennypod.monitor import (
    MAX_POLL_MINUTES,
    Lookout,
    Monitor,
    MonitorError,
    Plan,
    check_cron,
    cron_times,
    poll_minutes,
    stays_in_crontab,
)
from pennypod.providers.registry import all_providers
from pennypod.settings import Settings, load_settings

ARGUMENT_SPEC: dict[str, Any] = {
    "state": {"type": "str", "choices": ["possible", "prepared", "left", "looked", "absent"], "required": True},
    "run": {"type": "str"},
    "root": {"type": "path"},
    "poll_minutes": {"type": "int", "default": 30},
    "reserve_s": {"type": "float", "default": 60},
    "stall_s": {"type": "float", "default": 0},
    "pod_home": {"type": "str", "default": "/root/pennypod"},
    "cancel": {"type": "bool", "default": False},
}
REQUIRED_IF = [
    ("state", "prepared", ["run", "root"]),
    ("state", "left", ["run"]),
    ("state", "looked", ["run"]),
    ("state", "absent", ["run"]),
]


def body(module: AnsibleModule) -> dict[str, Any]:
    """Do what the state asks for."""
    state, run = module.params["state"], module.params["run"]
    if state == "possible":
        _check_poll(module.params["poll_minutes"])
        check_cron()
        return {"changed": False}
    settings = load_settings()
    ledger = open_ledger(settings)
    monitor = Monitor(settings, run)
    if state == "prepared":
        return _prepare(module, ledger, monitor)
    if state == "left":
        return _leave(module, ledger, monitor)
    if state == "looked":
        return _look(module, settings, ledger, monitor)
    return _remove(module, ledger, monitor)


def _check_poll(minutes: int) -> None:
    if not 1 <= minutes <= MAX_POLL_MINUTES:
        raise InputError(f"detach_poll_minutes is {minutes}: give 1 to {MAX_POLL_MINUTES}")


def _prepare(module: AnsibleModule, ledger: Ledger, monitor: Monitor) -> dict[str, Any]:
    options, run = module.params, module.params["run"]
    _check_poll(options["poll_minutes"])
    deadline = ledger.run(run).deadline
    if deadline is None:
        raise InputError(f"run {run} has no deadline: nothing was rented for it")
    left_s = deadline - options["reserve_s"] - SystemClock().now()
    plan = Plan(
        run=run,
        poll_minutes=poll_minutes(options["poll_minutes"], left_s),
        deadline=deadline,
        reserve_s=options["reserve_s"],
        stall_s=options["stall_s"],
        pod_home=options["pod_home"],
    )
    old = monitor.plan()
    before = {} if old is None else {"poll_minutes": old.poll_minutes}
    changed = old != plan
    if not module.check_mode:
        providers = {attempt.provider for attempt in ledger.attempts(run) if not attempt.final}
        changed = monitor.leave(plan, Path(options["root"]), providers, os.environ)
    after = {"poll_minutes": plan.poll_minutes}
    return {"changed": changed, "cron": _cron(monitor, plan), "diff": {"before": before, "after": after}}


def _cron(monitor: Monitor, plan: Plan | None) -> dict[str, Any]:
    minute, hour = cron_times(plan.poll_minutes if plan else 30)
    return {"name": monitor.name, "job": monitor.cron_job, "minute": minute, "hour": hour}


def _leave(module: AnsibleModule, ledger: Ledger, monitor: Monitor) -> dict[str, Any]:
    run = module.params["run"]
    before = ledger.run(run)
    changed = not before.keep_on_disconnect
    plan = monitor.plan()
    if not module.check_mode:
        if plan is None or not stays_in_crontab(monitor.script, SystemClock()):
            raise MonitorError(f"the crontab has no line for run {run}: it is not left alone")
        # The last step: until here, whatever ends this command ends the pod.
        ledger.take_over(run, processes.controller_identity(), processes.is_alive, keep_on_disconnect=True)
        text = f"left to cron, which looks every {plan.poll_minutes} min; log: {monitor.log}"
        Events(monitor.settings.run_dir(run), run).emit("training", text)
    return {
        "changed": changed,
        "left": not module.check_mode,
        "diff": {"before": {"left": not changed}, "after": {"left": True}},
    }


def _look(module: AnsibleModule, settings: Settings, ledger: Ledger, monitor: Monitor) -> dict[str, Any]:
    run = module.params["run"]
    lookout = Lookout(settings, ledger, all_providers(settings), SystemClock())
    verdict = lookout.look(run, cancel=module.params["cancel"])
    record = ledger.run(run)
    return {
        "changed": False,
        "next": verdict.next.value,
        "why": verdict.why,
        "closed": record.closed is not None,
        "fenced": record.fenced_reason is not None,
        "cron": _cron(monitor, monitor.plan()),
    }


def _remove(module: AnsibleModule, ledger: Ledger, monitor: Monitor) -> dict[str, Any]:
    run = module.params["run"]
    had = monitor.plan() is not None
    over = ledger.run(run).closed is not None and all(attempt.final for attempt in ledger.attempts(run))
    cron = _cron(monitor, monitor.plan())
    if over and not module.check_mode:
        monitor.remove()
    return {
        "changed": had and over,
        "over": over,
        "folder": str(monitor.folder) if monitor.folder.exists() else "",
        "cron": cron,
        "diff": {"before": {"monitor": had}, "after": {"monitor": had and not over}},
    }


def main() -> None:
    run_module(ARGUMENT_SPEC, body, required_if=REQUIRED_IF)


if __name__ == "__main__":
    main()
