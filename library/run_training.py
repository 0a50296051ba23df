#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: start a run's training on its pod and follow it to its end. Runs on localhost."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: run_training
short_description: Start a run's training on its pod and follow it to its end
description:
  - Starts the command detached in the tmux session C(pennypod) on the pod, at most once per run, and proves over a new
    connection that it lives. The command's output goes to C(train.log) in I(pod_home), and here as it is written.
  - With C(state=finished), waits until the command has ended. A broken SSH connection is taken up again where it ended.
  - Fails when the command ends with anything but exit code 0, when it was killed, when tmux died, when the log stands
    still, and when the time is used up. A command that is stopped gets TERM and a few seconds first.
  - Idempotent by run id. A run that was started on the pod before is not started again.
options:
  state:
    description: Whether to wait until the training has ended.
    type: str
    choices: [started, finished]
    default: finished
  command:
    description:
      - The shell command, run in C(out/) of I(pod_home) with C(pipefail) set. It may use C($PENNYPOD_DATA),
        C($PENNYPOD_CODE), C($PENNYPOD_OUT) and C($PENNYPOD_PYTHON).
    type: str
    required: true
  env:
    description: More environment variables for the command.
    type: dict
    default: {}
  python:
    description:
      - The interpreter behind C($PENNYPOD_PYTHON); its folder comes first in the command's C(PATH). Empty means the
        pod's python3.
    type: str
    default: ""
  artifacts_dir:
    description: The run's folder for results. The log grows in it.
    type: path
    required: true
  stall_s:
    description: Stop the training when it has written nothing for so many seconds. 0 means never.
    type: float
    default: 0
  wallclock_s:
    description: Stop the training so many seconds after it was started. 0 means never.
    type: float
    default: 0
  deadline:
    description:
      - Stop the training at this time, in Unix seconds. 0 means never. The earlier of this and I(wallclock_s) counts.
    type: float
    default: 0
  reserve_s:
    description:
      - Stop the training so many seconds before the pod's own deadline in the ledger, and before the run has cost what
        its caps leave, so that the best checkpoint can still come home.
    type: float
    default: 60
  poll_s:
    description: Seconds between two reports of the pod when its log is quiet.
    type: float
    default: 2
  ssh_patience_s:
    description: Give up when the pod was out of reach for so many seconds.
    type: float
    default: 300
  weights_patterns:
    description: Globs under C(out/) that find the best checkpoint, in order of preference.
    type: list
    elements: str
    default: []
  weights_early:
    description: Bring each new best checkpoint home while the training still runs.
    type: bool
    default: false
  weights_every_s:
    description: Seconds between two such copies, at least.
    type: float
    default: 15
  salvage_s:
    description: Seconds to spend on bringing the best checkpoint home when the training fails. 0 means not to try.
    type: float
    default: 120
  escrow_grace_s:
    description:
      - Seconds that whoever ends the pod later may spend on its newest checkpoint when that is not home, since the
        command was killed or the deadline is near. 0 means to destroy at once.
    type: float
    default: 60
  escrow_grace_usd:
    description: What that may cost at most. The smaller of the two bounds counts.
    type: float
    default: 0.05
  checkpoint_store:
    description:
      - Keep the training's checkpoints in object storage, by C($PENNYPOD_CHECKPOINT_HOOK), which a trainer calls after
        each epoch, and go on from the newest one when the run has one already, by C($PENNYPOD_RESUME_FROM).
      - The bucket is that of the environment's C(PENNYPOD_S3_*). Its keys never reach the pod. When it cannot be used,
        the training goes on without it, with a warning.
    type: bool
    default: false
extends_documentation_fragment:
  - pennypod.pod
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - pennypod
"""

EXAMPLES = r"""
- name: Train
  run_training:
    run: demo-1201-k3f7q
    host: 127.0.0.1
    port: 40022
    key_file: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/id_ed25519
    known_hosts: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/known_hosts
    command: '"$PENNYPOD_PYTHON" "$PENNYPOD_CODE/train.py" --data "$PENNYPOD_DATA"'
    artifacts_dir: artifacts/demo-1201-k3f7q
    stall_s: 600
    wallclock_s: 3600
    weights_patterns: ["**/best.pt"]
    weights_early: true
  delegate_to: localhost
  register: training
"""

RETURN = r"""
state:
  description: Where the training stands.
  returned: success
  type: str
  sample: finished
launched:
  description: Whether this call started it.
  returned: success
  type: bool
exit_code:
  description: The command's exit code.
  returned: state is finished
  type: int
seconds:
  description: How long the command ran, by the pod's clock.
  returned: state is finished
  type: float
epoch:
  description: The last epoch the log speaks of, null when it speaks of none.
  returned: state is finished
  type: int
epochs:
  description: How many epochs the log promises, null when it does not say.
  returned: state is finished
  type: int
last_lines:
  description: The last lines of the log.
  returned: state is finished
  type: list
  elements: str
log:
  description: The copy of the log here.
  returned: state is finished
  type: str
resumed_epoch:
  description: The epoch of the checkpoint in object storage that this call let the training go on from, null for none.
  returned: success
  type: int
reattached:
  description: How often the connection had to be taken up again.
  returned: state is finished
  type: int
artifacts:
  description: Checkpoints that came home early - path, bytes, sha256, kind.
  returned: success
  type: list
  elements: dict
failure:
  description:
    - What went wrong, for programs - C(code), C(message), C(details).
    - With the code C(training_failed), C(details.reason) is one of exit, signal, supervisor_gone, tmux_gone, hung,
      stalled, deadline, money, failed_to_start, not_started, no_status, no_tmux, busy, failed.
    - C(details.salvaged) is the checkpoint that came home in spite of it (path, bytes, sha256, kind), or null. It is in
      the ledger then.
  returned: failure
  type: dict
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from pennypod.ansible import run_module
from pennypod.callbacks import read_access
from pennypod.checkpointing import KEEPS_NOTHING, CheckpointKeeper, open_keeper, terms_of
from pennypod.clock import SystemClock
from pennypod.errors import InputError, PennypodError, StoreError, TrainingError
from pennypod.escrow import EscrowPlan, write_plan
from pennypod.events import Events
from pennypod.ledger import LedgerError, open_ledger
from pennypod.model.money import usd_to_micros
from pennypod.podwork import (
    POD_OPTIONS,
    Fence,
    GuardWatch,
    PodWatch,
    artifact,
    connect,
    counted,
    note_artifacts,
    show_bytes,
)
from pennypod.providers.registry import open_provider
from pennypod.settings import load_settings
from pennypod.spending import MoneyWatch
from pennypod.training import Launched, TrainingResult, WatchPlan, launch, watch, would_launch
from pennypod.transfer import Fetched
from pennypod.weights import LOG_NAME, RemoteFile, bring_home, check_patterns, salvage

ARGUMENT_SPEC: dict[str, Any] = {
    **POD_OPTIONS,
    "state": {"type": "str", "choices": ["started", "finished"], "default": "finished"},
    "command": {"type": "str", "required": True},
    "env": {"type": "dict", "default": {}},
    "python": {"type": "str", "default": ""},
    "artifacts_dir": {"type": "path", "required": True},
    "stall_s": {"type": "float", "default": 0},
    "wallclock_s": {"type": "float", "default": 0},
    "deadline": {"type": "float", "default": 0},
    "reserve_s": {"type": "float", "default": 60},
    "poll_s": {"type": "float", "default": 2},
    "ssh_patience_s": {"type": "float", "default": 300},
    "weights_patterns": {"type": "list", "elements": "str", "default": []},
    "weights_early": {"type": "bool", "default": False},
    "weights_every_s": {"type": "float", "default": 15},
    "salvage_s": {"type": "float", "default": 120},
    "escrow_grace_s": {"type": "float", "default": 60},
    "escrow_grace_usd": {"type": "float", "default": 0.05},
    "checkpoint_store": {"type": "bool", "default": False},
}
# A training that never ran has left nothing to bring home, and a pod that is gone has nothing any more.
NOTHING_THERE = ("failed_to_start", "not_started", "no_status", "no_tmux", "busy", "failed", "pod_gone")


LEAST_SALVAGE_S = 15.0
"""What a checkpoint gets even when the money is used up already: less than the destroy's own margin costs."""


class Training:
    """One call of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.options: dict[str, Any] = module.params
        settings = self.settings = load_settings()
        run = self.options["run"]
        self.clock = SystemClock()
        self.events = Events(settings.run_dir(run), run)
        self.fence = Fence(settings, run, self.clock)
        self.keep_guard = GuardWatch(settings, run, "training", self.events, self.clock, module.warn)
        self.ssh = connect(self.options, settings, self.clock)
        self.artifacts_dir = Path(self.options["artifacts_dir"])
        self.home_early: dict[str, Fetched] = {}
        self.money: MoneyWatch | None = None
        self.keeper: CheckpointKeeper | None = None

    def body(self) -> dict[str, Any]:
        """Bring the run's training to the wanted state."""
        o = self.options
        check_patterns(o["weights_patterns"])
        self.fence()
        env = {str(name): str(value) for name, value in o["env"].items()}
        if self.module.check_mode:
            found = would_launch(self.ssh, o["pod_home"], o["command"], env, run=o["run"])
            return self.result(found, None, found.state)
        self.keep_guard()
        if o["checkpoint_store"]:
            env |= self.keep_checkpoints(env)
        write_plan(self.settings.run_dir(o["run"]), self.escrow_plan())
        started = launch(
            self.ssh,
            o["pod_home"],
            o["command"],
            env,
            run=o["run"],
            python=o["python"],
            callback=read_access(self.settings.run_dir(o["run"])),
        )
        self.events.emit("training", "started in tmux" if started.launched else f"is {started.state} already")
        if o["state"] == "started":
            return self.result(started, None, "started" if started.launched else started.state)
        self.money = self.money_watch()
        try:
            result = watch(
                lambda: self.ssh,
                o["pod_home"],
                self.watch_plan(started),
                events=self.events,
                clock=self.clock,
                should_stop=self.on_tick,
                on_checkpoint=self.bring if o["weights_early"] else None,
                why_gone=PodWatch(self.settings, o["run"]),
                out_of_money=self.money or (lambda: ""),
            )
        except TrainingError as exc:
            self.save_what_can_be_saved(exc)
            raise
        for warning in result.warnings:
            self.module.warn(warning)
        if self.fence.problem:
            self.module.warn(f"the ledger could not say whether the run is still ours: {self.fence.problem}")
        return self.result(started, result, "finished")

    def on_tick(self) -> None:
        """Raises FencedError when the run is not ours any more."""
        self.guarded()
        if self.keeper is not None:
            self.keeper()

    def guarded(self) -> None:
        """Raises FencedError when the run is not ours any more; sees to it that it has a guard while it is."""
        self.fence()
        self.keep_guard()

    def keep_checkpoints(self, env: dict[str, str]) -> dict[str, str]:
        """What the training needs for its checkpoints to be kept: without a bucket, a hook that keeps nothing."""
        o = self.options
        try:
            attempts = open_ledger(self.settings).attempts(o["run"])
            terms = terms_of(
                attempts[-1] if attempts else None, self.fence.deadline(), watched=o["state"] == "finished"
            )
            self.keeper = open_keeper(
                self.settings,
                os.environ,
                o["run"],
                self.ssh,
                o["pod_home"],
                terms,
                self.clock,
                lambda text: self.events.emit("training", text),
            )
            if would_launch(self.ssh, o["pod_home"], o["command"], env, run=o["run"]).launched:
                return self.keeper.prepare()
        except (StoreError, LedgerError) as exc:
            self.keeper = None
            self.module.warn(f"this training's checkpoints are not kept in object storage: {exc}")
            return KEEPS_NOTHING
        return {}

    def escrow_plan(self) -> EscrowPlan:
        """What whoever ends the pod needs to know to save its newest checkpoint."""
        o = self.options
        if o["escrow_grace_s"] < 0 or o["escrow_grace_usd"] < 0:
            raise InputError("escrow_grace_s and escrow_grace_usd must not be negative; 0 means to destroy at once")
        return EscrowPlan(
            pod_home=o["pod_home"],
            patterns=tuple(o["weights_patterns"]),
            grace_s=o["escrow_grace_s"],
            grace_micros=usd_to_micros(o["escrow_grace_usd"]),
        )

    def watch_plan(self, started: Launched) -> WatchPlan:
        """What the options say about time, as one deadline."""
        o, now = self.options, self.clock.now()
        pod_ends = self.fence.deadline()
        limits = [
            o["deadline"] or None,
            now - started.elapsed_s + o["wallclock_s"] if o["wallclock_s"] else None,
            pod_ends - o["reserve_s"] if pod_ends is not None else None,
        ]
        return WatchPlan(
            run=o["run"],
            log_path=self.artifacts_dir / LOG_NAME,
            poll_s=o["poll_s"],
            stall_s=o["stall_s"] or None,
            wallclock_deadline=min((limit for limit in limits if limit is not None), default=None),
            ssh_patience_s=o["ssh_patience_s"],
            checkpoint_patterns=tuple(o["weights_patterns"]),
            checkpoint_every_s=o["weights_every_s"],
        )

    def money_watch(self) -> MoneyWatch | None:
        """What watches the cost of the run's pod; None when the ledger cannot say which pod that is."""
        o = self.options
        try:
            ledger = open_ledger(self.settings)
            provider = open_provider(ledger.attempts(o["run"])[-1].provider, self.settings)
        except (PennypodError, IndexError) as exc:
            self.module.warn(f"nothing watches the cost of this training: {exc}")
            return None
        return MoneyWatch(o["run"], ledger, provider, self.clock, self.events.emit, o["reserve_s"])

    def bring(self, remote: RemoteFile) -> None:
        """Bring a checkpoint home while the training runs."""
        show = show_bytes(self.events, "weights", remote.relative, self.clock, self.guarded)
        fetched = bring_home(self.ssh, remote, self.artifacts_dir, on_progress=show, early=True)
        self.home_early[str(fetched.path)] = fetched
        self.events.emit("weights", f"{remote.relative} is home early", bytes=fetched.bytes, total_bytes=fetched.bytes)

    def save_what_can_be_saved(self, error: TrainingError) -> None:
        """Money was spent: the best checkpoint of a failed training may still be worth it."""
        error.details["salvaged"] = None
        o = self.options
        if not o["salvage_s"] or not o["weights_patterns"] or error.details.get("reason") in NOTHING_THERE:
            return
        limit_s = o["salvage_s"]
        left_s = self.money.seconds_left() if self.money and error.details.get("reason") == "money" else None
        if left_s is not None:
            limit_s = min(limit_s, max(left_s, LEAST_SALVAGE_S))
        saved = salvage(
            self.ssh,
            o["pod_home"],
            o["weights_patterns"],
            self.artifacts_dir,
            limit_s=limit_s,
            clock=self.clock,
            on_progress=show_bytes(self.events, "weights", "the best checkpoint", self.clock, self.guarded),
        )
        if saved is not None:
            error.details["salvaged"] = artifact(saved, "weights")
            error.message += f"; the best checkpoint so far is home: {saved.path}"
            self.events.emit("weights", f"the best checkpoint so far is home: {saved.path}", bytes=saved.bytes)
            try:
                note_artifacts(self.settings, o["run"], [error.details["salvaged"]])
            except LedgerError as exc:  # why the training failed is what must be told
                self.module.warn(f"the checkpoint that is home is not in the ledger: {exc}")

    def result(self, started: Launched, result: TrainingResult | None, state: str) -> dict[str, Any]:
        """The public shape, the same on every path."""
        o = self.options
        before = {"state": "absent" if started.launched else started.state}
        after = {"state": o["state"] if started.launched else state}
        if started.launched:
            after["command"] = o["command"]
        return {
            "changed": started.launched,
            "launched": started.launched,
            "state": state or "absent",
            "exit_code": result.exit_code if result else None,
            "seconds": round(result.seconds, 3) if result else None,
            "epoch": result.epoch if result else None,
            "epochs": result.epochs if result else None,
            "last_lines": list(result.last_lines) if result else [],
            "log": str(self.artifacts_dir / LOG_NAME) if result else "",
            "resumed_epoch": self.keeper.resumed_epoch if self.keeper else None,
            "reattached": result.reattached if result else 0,
            "artifacts": [artifact(fetched, "weights") for fetched in self.home_early.values()],
            "diff": {"before": before, "after": after},
        }


def body(module: AnsibleModule) -> dict[str, Any]:
    training = Training(module)
    with counted(training.settings, module.params["run"], training.ssh):
        return training.body()


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
