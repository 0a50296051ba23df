#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: ship code and data to a run's pod. Runs on localhost, over the run's own SSH connection."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: run_dataset
short_description: Ship code and data to a run's pod
description:
  - Makes C(pod_home/code) and C(pod_home/data) on the pod equal to the folders here, files that do not belong included.
  - Streams the code as a compressed tar and the data as an uncompressed one, without a temporary file, and compares
    the sha256 of every file on arrival. Where the line has a delay, a data set of 10 MB or more goes over several
    connections at once, as many as fill it. What the pod already has is not sent again, also after a broken line.
  - With C(store), the data set goes into the object store first, named by its content, and the pod fetches it from
    there by URLs that expire; what the bucket has already is not sent again. Where that does not work, a warning says
    why and the rest goes over SSH, which compares every file in any case.
  - Fails with C(source_changed) when a file vanishes or keeps changing meanwhile, and with C(disk_full) when the pod
    has no room; the data set on the pod is never silently short.
options:
  state:
    description:
      - C(shipped) brings code and data to the pod.
      - C(begun) starts to bring them, in a process of its own, and returns at once. C(shipped) then waits for that, has
        what it has done if pod and files are the same, and does itself what is left if it has failed.
      - C(kept) only makes sure that the bucket has the data set, before anything bills. It needs no pod, and never
        fails for the bucket - the data set then goes over SSH.
    type: str
    choices: [shipped, begun, kept]
    default: shipped
  store:
    description: Let the pod fetch the data set from object storage.
    type: bool
    default: false
  host:
    description: Where the pod's SSH server listens. May be left out in check mode, where everything then counts as not
      yet sent.
    required: false
  key_file:
    required: false
  known_hosts:
    required: false
  pod_home:
    description: Folder on the pod under which C(code) and C(data) lie.
  code:
    description:
      - Folder (or single file) with the code. History, caches, environments, outputs and whatever looks like a key
        stay here.
    type: path
  data:
    description: Folder (or single file) with the data set. All of it is sent.
    type: path
  excludes:
    description:
      - More names to leave out of the code. C(name) fits anywhere, C(/name) or C(a/b) the path from the root, and a
        slash at the end means folders only. C(*) and C(?) are wildcards.
    type: list
    elements: str
    default: []
  data_excludes:
    description: Names to leave out of the data set, by the same rules.
    type: list
    elements: str
    default: []
  data_yaml:
    description:
      - Name of the YOLO data file inside the data set. It arrives with C(path) set to where the data is on the pod.
        The file here is not touched. Empty means there is none.
    type: str
    default: ''
  code_limit_mb:
    description: Refuse to send more code than this; it is a sign that outputs or data lie among the code.
    type: int
    default: 200
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
- name: Ship code and data
  run_dataset:
    run: demo-1201-k3f7q
    host: 127.0.0.1
    port: 22001
    key_file: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/id_ed25519
    known_hosts: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/known_hosts
    code: python/trainers
    data: datasets/teeth
    data_yaml: data.yaml
  delegate_to: localhost
"""

RETURN = r"""
files:
  description: Files sent, or in check mode files that would be.
  returned: success
  type: int
bytes:
  description: Their size.
  returned: success
  type: int
unchanged_files:
  description: Files the pod had already, verified by hash.
  returned: success
  type: int
removed_files:
  description: Files on the pod that did not belong and were removed, or would be.
  returned: success
  type: int
resumed_files:
  description: Files that a broken line did not cost a second sending.
  returned: success
  type: int
reconnects:
  description: How often the line broke.
  returned: success
  type: int
streams:
  description: How many connections carried files at once; more than one on a line with a delay.
  returned: success
  type: int
dataset:
  description:
    - How the data set came to the pod, as in C(run.json) - C(by), C(sent_bytes) and the like. Empty without a data set,
      in check mode and with C(state=kept).
  returned: success
  type: dict
seconds:
  description: How long it took.
  returned: success
  type: float
paths:
  description: The first few files that would be sent.
  returned: in check mode
  type: list
  elements: str
failure:
  description: What went wrong, for programs - C(code), C(message), C(details).
  returned: failure
  type: dict
"""

import contextlib
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from pennypod import pulling, shipping
from pennypod.ansible import run_module
from pennypod.clock import SystemClock
from pennypod.errors import InputError, StoreError
from pennypod.events import Events
from pennypod.podwork import POD_OPTIONS, Fence, connect
from pennypod.settings import load_settings
from pennypod.transfer import Preview, UploadPlan, preview

ARGUMENT_SPEC: dict[str, Any] = {
    **POD_OPTIONS,
    "state": {"type": "str", "choices": ["shipped", "begun", "kept"], "default": "shipped"},
    "store": {"type": "bool", "default": False},
    "host": {"type": "str"},
    "key_file": {"type": "path"},
    "known_hosts": {"type": "path"},
    "code": {"type": "path"},
    "data": {"type": "path"},
    "excludes": {"type": "list", "elements": "str", "default": []},
    "data_excludes": {"type": "list", "elements": "str", "default": []},
    "data_yaml": {"type": "str", "default": ""},
    "code_limit_mb": {"type": "int", "default": 200},
}
SHOWN_PATHS = 20


def body(module: AnsibleModule) -> dict[str, Any]:
    """Ship what the options name, or say what would be shipped."""
    options = module.params
    # What is only begun looks at the files itself: twice would be in the way of the repairs that go on meanwhile.
    plan = UploadPlan(()) if options["state"] == "begun" else shipping.plan_of(options)
    if options["state"] == "kept":
        return _keep(module, plan)
    if module.check_mode and not options["host"]:
        everything = Preview(
            files=plan.files, bytes=plan.bytes, unchanged_files=0, extra_files=0, free_bytes=None, changed=True
        )
        return _predicted(plan, everything)
    if not (options["host"] and options["key_file"] and options["known_hosts"]):
        raise InputError("say where the pod is: host, key_file and known_hosts")
    if options["state"] == "begun":
        if not module.check_mode:
            shipping.begin(load_settings(), options)
        return _predicted(plan, _nothing(plan))
    ssh = connect(options, load_settings(), SystemClock())
    if module.check_mode:
        return _predicted(plan, preview(ssh, plan, options["pod_home"]))
    diff = _diff(plan, preview(ssh, plan, options["pod_home"])) if module._diff else {}  # noqa: SLF001 - no other way
    return {**shipping.Shipping(load_settings(), options, SystemClock(), module.warn).ship(ssh, plan), **diff}


def _keep(module: AnsibleModule, plan: UploadPlan) -> dict[str, Any]:
    """Put the data set into the bucket. A bucket that cannot be used is told of when the data set goes over SSH."""
    settings, clock, run = load_settings(), SystemClock(), module.params["run"]
    part, fence = shipping.data_of(plan), Fence(settings, run, clock)
    result = _predicted(plan, _nothing(plan))
    if part is None:
        return result
    events = Events(settings.run_dir(run), run)
    started = clock.now()
    with contextlib.suppress(StoreError):
        if module.check_mode:
            result["changed"] = pulling.would_send(settings, os.environ, part, fence)
            return result
        kept = pulling.keep(settings, os.environ, run, part, fence)
        events.emit(
            "plan",
            f"the data set's {part.bytes / 1e6:.1f} MB are in the bucket, {kept.sent_bytes / 1e6:.1f} MB of it sent"
            f" in {clock.now() - started:.1f} s",
            bytes=kept.sent_bytes,
        )
        result |= {"changed": kept.sent_bytes > 0, "bytes": kept.sent_bytes}
    return result


def _nothing(plan: UploadPlan) -> Preview:
    return Preview(files=0, bytes=0, unchanged_files=plan.files, extra_files=0, free_bytes=None, changed=False)


def _predicted(plan: UploadPlan, seen: Preview) -> dict[str, Any]:
    return {
        "changed": seen.changed,
        "dataset": {},
        "files": seen.files,
        "bytes": seen.bytes,
        "unchanged_files": seen.unchanged_files,
        "removed_files": seen.extra_files,
        "resumed_files": 0,
        "reconnects": 0,
        "streams": 0,
        "seconds": 0.0,
        "paths": list(seen.paths[:SHOWN_PATHS]),
        **_diff(plan, seen),
    }


def _diff(plan: UploadPlan, seen: Preview) -> dict[str, Any]:
    more = seen.files - len(seen.paths)
    before = [f"verified files: {seen.unchanged_files}", f"files that do not belong: {seen.extra_files}"]
    after = [f"verified files: {plan.files}", "files that do not belong: 0", *(f"+ {path}" for path in seen.paths)]
    if seen.paths and more > 0:
        after.append(f"+ {more} more")
    return {"diff": {"before": "\n".join(before) + "\n", "after": "\n".join(after) + "\n"}}


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
