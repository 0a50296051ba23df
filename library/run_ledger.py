#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: open and close runs in the ledger. Runs on localhost."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: run_ledger
short_description: Open and close runs in the ledger
description:
  - With C(state=opened), checks the job files and writes a new run for each job, with a fresh id.
  - With C(state=resumed), takes a run over whose controller has died, so that the command that runs this module is its
    controller from then on, with a guard of its own. Refused while the present controller is alive, and for a run that
    is over. Of two that try at once, one gets it.
  - With C(state=closed), records how a run ended, once, and writes C(run.json) and C(receipt.json).
options:
  state:
    description: What to write.
    type: str
    choices: [opened, resumed, closed]
    required: true
  jobs:
    description: The jobs to open a run for; a job may be named more than once.
    type: list
    elements: str
    default: []
  jobs_dir:
    description: The group_vars folder with the job files. Needed for C(state=opened) and C(state=resumed).
    type: path
  artifacts_root:
    description: The folder in which each run gets a folder of its own. Needed for C(state=opened).
    type: path
  keep_on_disconnect:
    description:
      - Leave the pod alive until its deadline when this controller goes away.
      - Not given, an opened run does not, and a resumed one keeps what it was opened with.
    type: bool
  inputs:
    description:
      - Variables that the run was started with and that its later stages need. C(state=opened) keeps them in the run's
        own folder for C(state=resumed). Never a key.
    type: dict
    default: {}
  provider:
    description:
      - Where to rent. C(state=opened) refuses a name that is none, or one without its key, before a run is opened.
      - Without it, C(pod_provider) of the job's file is looked at.
    type: str
    default: ""
  run:
    description:
      - The run id. Needed for all states but C(opened).
      - With C(state=opened) and exactly one job, the id that the new run is to have. Asked for again, it is still one
        run, which this command takes over as long as it has rented nothing.
    type: str
  outcome:
    description: How the run ended.
    type: str
    choices: [succeeded, failed, cancelled]
  reason:
    description: Why, in one line.
    type: str
    default: ""
  cause:
    description: What M(gpu_pod) says has become of the pod of a failed run; the reason then begins with it.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - pennypod
"""

EXAMPLES = r"""
- name: Open two runs of the same job
  run_ledger:
    state: opened
    jobs: [demo, demo]
    jobs_dir: group_vars
    artifacts_root: artifacts
  register: opened

- name: Take one over whose command has died
  run_ledger:
    state: resumed
    run: demo-1201-k3f7q
    jobs_dir: group_vars

- name: Close one
  run_ledger:
    state: closed
    run: demo-1201-k3f7q
    outcome: succeeded
"""

RETURN = r"""
runs:
  description: The opened or resumed runs - run, job, artifacts_dir, inputs.
  returned: state is opened or resumed
  type: list
  elements: dict
monitored:
  description: Whether the run has a monitor, which M(run_monitor) takes away.
  returned: state is closed
  type: bool
document:
  description: The content of C(run.json).
  returned: state is closed
  type: dict
failure:
  description: What went wrong, for programs - C(code), C(message), C(details).
  returned: failure
  type: dict
"""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from pennypod import processes
from pennypod.ansible import run_module
from pennypod.clock import SystemClock
from pennypod.errors import InputError
from pennypod.events import Events
from pennypod.guard import ensure_guard
from pennypod.jobs import load_job
from pennypod.ledger import Ledger, Outcome, RunRecord, open_ledger
from pennypod.model.ids import job_of_run, new_run_id
from pennypod.monitor import FOLDER as MONITOR_FOLDER
from pennypod.podwork import ASK_EVERY_S, explained
from pennypod.providers.registry import AUTO, all_providers, check_choice
from pennypod.receipts import write_json
from pennypod.report import run_document, write_results
from pennypod.settings import Settings, disk_is_full, load_settings

INPUTS_FILE = "inputs.json"

ARGUMENT_SPEC: dict[str, Any] = {
    "state": {"type": "str", "choices": ["opened", "resumed", "closed"], "required": True},
    "jobs": {"type": "list", "elements": "str", "default": []},
    "jobs_dir": {"type": "path"},
    "artifacts_root": {"type": "path"},
    "keep_on_disconnect": {"type": "bool"},
    "inputs": {"type": "dict", "default": {}},
    "provider": {"type": "str", "default": ""},
    "run": {"type": "str"},
    "outcome": {"type": "str", "choices": ["succeeded", "failed", "cancelled"]},
    "reason": {"type": "str", "default": ""},
    "cause": {"type": "str", "default": ""},
}
REQUIRED_IF = [
    ("state", "opened", ["jobs_dir", "artifacts_root"]),
    ("state", "resumed", ["run", "jobs_dir"]),
    ("state", "closed", ["run", "outcome"]),
]


def body(module: AnsibleModule) -> dict[str, Any]:
    """Write what the state asks for."""
    settings = load_settings()
    ledger = open_ledger(settings)
    if module.params["state"] == "opened":
        return _open(module, settings, ledger)
    if module.params["state"] == "resumed":
        return _resume(module, settings, ledger)
    return _close(module, settings, ledger)


def _open(module: AnsibleModule, settings: Settings, ledger: Ledger) -> dict[str, Any]:
    options = module.params
    jobs = [job.strip() for job in options["jobs"] if job.strip()]
    if not jobs:
        raise InputError("which job? say -e job=NAME; `ls group_vars/job_*.yml` shows them")
    for job in jobs:
        variables = load_job(Path(options["jobs_dir"]), job)
        provider = str(options["provider"] or variables.get("pod_provider") or AUTO).strip()
        if "{{" not in provider:  # a job's own template is known only once its run is a host
            check_choice(provider, os.environ)
    chosen = _chosen_id(options["run"], jobs)
    root = Path(options["artifacts_root"]).resolve()
    now = SystemClock().now()
    runs = []
    for job in jobs:
        run = chosen or new_run_id(job, now, secrets.randbelow)
        runs.append({"run": run, "job": job, "artifacts_dir": str(root / run), "inputs": options["inputs"]})
    if not module.check_mode:
        try:
            for item in runs:
                Path(item["artifacts_dir"]).mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            room = "free some room on its disk, or " if disk_is_full(exc) else ""
            raise InputError(
                f"cannot make {root}: {exc.strerror}; {room}choose another place with -e artifacts_dir="
            ) from exc
        controller = processes.controller_identity()
        ledger.close_abandoned(processes.is_alive, now)
        for item in runs:
            record = RunRecord(
                run=item["run"],
                job=item["job"],
                controller=controller,
                created=now,
                artifacts_dir=item["artifacts_dir"],
                keep_on_disconnect=bool(options["keep_on_disconnect"]),
            )
            if chosen:
                ledger.open_or_adopt_run(record, processes.is_alive)
            else:
                ledger.open_run(record)
            ledger.start_stage(item["run"], "plan", now)
            write_json(settings.run_dir(item["run"]) / INPUTS_FILE, options["inputs"])
    names = [item["run"] for item in runs]
    return {"changed": True, "runs": runs, "diff": {"before": {"runs": []}, "after": {"runs": names}}}


def _chosen_id(run: str | None, jobs: list[str]) -> str | None:
    """The id that was asked for; one that is no run id of the one job is refused."""
    if not run:
        return None
    if len(jobs) != 1 or job_of_run(run) != jobs[0]:
        raise InputError(f"{run} can be the id of one run of job {job_of_run(run)} only")
    return run


def _resume(module: AnsibleModule, settings: Settings, ledger: Ledger) -> dict[str, Any]:
    """Whatever can be found wanting is found before the run is taken over: a refusal must leave it as it is."""
    options, run = module.params, module.params["run"]
    before = ledger.run(run)
    load_job(Path(options["jobs_dir"]), before.job)
    run_dir = settings.runs_dir / run
    if not (run_dir / "id_ed25519").is_file():
        raise InputError(f"there is no key of run {run} in {run_dir}: resume it on the machine that it was started on")
    missing = {a.provider for a in ledger.attempts(run) if not a.final} - set(all_providers(settings))
    if missing:
        raise InputError(f"run {run} has a pod of {', '.join(sorted(missing))}: set that provider's key and repeat")
    item = {"run": run, "job": before.job, "artifacts_dir": before.artifacts_dir, "inputs": _inputs(run_dir)}
    controller = processes.controller_identity()
    if not module.check_mode:
        ensure_guard(settings, controller)  # before the run is ours: not one moment without a guard
        clock = SystemClock()
        before = ledger.take_over(run, controller, processes.is_alive, keep_on_disconnect=options["keep_on_disconnect"])
        if before.controller != controller:
            Path(before.artifacts_dir).mkdir(parents=True, exist_ok=True)
            Events(settings.run_dir(run), run).emit("rent", "resumed: its first command has died")
            # What that has left running asks once a second whether the run is still its own.
            clock.sleep(3 * ASK_EVERY_S)
    return {
        "changed": before.controller != controller,
        "runs": [item],
        "diff": {"before": {"controller": before.controller}, "after": {"controller": controller}},
    }


def _inputs(run_dir: Path) -> dict[str, Any]:
    try:
        inputs = json.loads((run_dir / INPUTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return inputs if isinstance(inputs, dict) else {}


def _close(module: AnsibleModule, settings: Settings, ledger: Ledger) -> dict[str, Any]:
    options, run = module.params, module.params["run"]
    before = ledger.run(run)
    now = SystemClock().now()
    changed = before.closed is None
    if changed and not module.check_mode:
        outcome = Outcome(options["outcome"])
        if outcome is Outcome.SUCCEEDED and any(not attempt.final for attempt in ledger.attempts(run)):
            outcome, options["reason"] = Outcome.FAILED, "a pod is not proven gone: it may still be billing"
        ledger.finish_stage(run, "teardown", now)
        ledger.close_run(run, outcome, explained(options["reason"], options["cause"]), now)
    document = run_document(ledger, run, now)
    if not module.check_mode:
        with contextlib.suppress(OSError):  # a full disk must not hide how the run ended: the ledger has it
            document = write_results(ledger, run, now)
    return {
        "changed": changed,
        "document": document,
        "monitored": (settings.runs_dir / run / MONITOR_FOLDER).exists(),
        "diff": {"before": {"outcome": before.outcome}, "after": {"outcome": document["outcome"]}},
    }


def main() -> None:
    run_module(ARGUMENT_SPEC, body, required_if=REQUIRED_IF)


if __name__ == "__main__":
    main()
