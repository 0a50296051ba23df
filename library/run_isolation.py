#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: let a run's pod talk only to what it needs. Runs on localhost, over the run's own SSH connection."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: run_isolation
short_description: Let a run's pod talk only to what it needs
description:
  - Loads nftables rules on the pod, by which it opens connections only to its name servers, to the run's callback and
    object store, to the API by which its own fuse ends it, and to C(hosts). Answers to SSH always go out. Anything else
    is refused at once. The rules end at the run's deadline.
  - Where the pod cannot be isolated, mostly for want of C(NET_ADMIN), the result and C(run.json) say so, a warning says
    why, and nothing fails.
options:
  phase:
    description:
      - C(setup) also allows C(setup_hosts) and the hosts of apt and pip as the pod has them set up.
      - C(closed) allows them no longer.
    type: str
    choices: [setup, closed]
    required: true
  hosts:
    description: More that the pod may talk to all the time - C(NAME), C(NAME:PORT) (443 without one) or a web address.
    type: list
    elements: str
    default: []
  setup_hosts:
    description: More of that kind for C(phase=setup).
    type: list
    elements: str
    default: []
  setup_texts:
    description: Texts such as arguments of pip whose web addresses are allowed for C(phase=setup).
    type: list
    elements: str
    default: []
  store:
    description: Whether the pod uses the object store.
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
- name: Let the pod talk only to what it needs while it is made ready
  run_isolation:
    run: demo-1201-k3f7q
    phase: setup
    host: 127.0.0.1
    port: 22001
    key_file: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/id_ed25519
    known_hosts: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/known_hosts
    hosts: [huggingface.co]
  delegate_to: localhost
"""

RETURN = r"""
enforced:
  description: Whether the pod is held to C(hosts). In check mode that is not known, and false.
  returned: success
  type: bool
reason:
  description: Why it is not.
  returned: success
  type: str
hosts:
  description: What it may talk to, as C(NAME:PORT).
  returned: success
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
from pennypod.ansible import run_module
from pennypod.clock import SystemClock
from pennypod.errors import PennypodError
from pennypod.events import Events
from pennypod.isolation import allowed, isolate, parse_host, urls_in
from pennypod.ledger import open_ledger
from pennypod.podwork import POD_OPTIONS, Fence, connect
from pennypod.settings import load_settings

ARGUMENT_SPEC: dict[str, Any] = {
    **POD_OPTIONS,
    "phase": {"type": "str", "choices": ["setup", "closed"], "required": True},
    "hosts": {"type": "list", "elements": "str", "default": []},
    "setup_hosts": {"type": "list", "elements": "str", "default": []},
    "setup_texts": {"type": "list", "elements": "str", "default": []},
    "store": {"type": "bool", "default": False},
}


def body(module: AnsibleModule) -> dict[str, Any]:
    """Put the phase's rules in force and write down what became of it."""
    options, settings, clock = module.params, load_settings(), SystemClock()
    run = options["run"]
    allow = allowed(settings, os.environ, run, options["hosts"], store=options["store"])
    setup = [parse_host(text) for text in (*options["setup_hosts"], *urls_in(options["setup_texts"]))]
    if options["phase"] == "closed":
        setup = []
    wanted = [f"{host}:{port}" for host, port in (*allow, *setup)]
    if module.check_mode:
        after = {"phase": options["phase"], "hosts": wanted}
        why = "check mode does not ask the pod"
        return {
            "changed": True,
            "enforced": False,
            "reason": why,
            "hosts": wanted,
            "diff": {"before": {}, "after": after},
        }
    fence = Fence(settings, run, clock)
    fence()
    found = isolate(connect(options, settings, clock), options["phase"], allow, setup, fence.deadline(), clock.now())
    document = found.as_document()
    with contextlib.suppress(PennypodError), contextlib.closing(open_ledger(settings)) as ledger:
        ledger.record_isolation(run, document)  # a run that no ledger knows is worked on by hand
    if found.enforced:
        text = f"the pod may talk to {len(found.hosts)} hosts only" + (
            ", those of packages among them" if found.phase == "setup" else ""
        )
    else:
        text = f"the pod is not isolated: {found.reason}"
        module.warn(text)
    Events(settings.run_dir(run), run).emit("bootstrap" if found.phase == "setup" else "dataset", text)
    return {
        "changed": found.changed,
        "enforced": found.enforced,
        "reason": found.reason,
        "hosts": list(found.hosts),
        "diff": {"before": {}, "after": document if found.changed else {}},
    }


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
