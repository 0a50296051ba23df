#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what exists at the providers under our name. Reads only; runs on localhost."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_pod_info
short_description: List the pods that exist under our name
description:
  - Lists the pods whose name carries a lease of ours, as the providers show them now. Changes nothing.
  - A provider that cannot be listed is a failure, never an empty list.
options:
  provider:
    description: Where to look. C(all) means every provider that is set up here.
    type: str
    default: all
  run:
    description: Only the pods of this run.
    type: str
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - pennypod
"""

EXAMPLES = r"""
- name: See what bills now
  gpu_pod_info:
  delegate_to: localhost
  register: now

- name: Fail when anything is left
  ansible.builtin.assert:
    that: now.pods | length == 0
"""

RETURN = r"""
pods:
  description: The pods, with price and deadline.
  returned: success
  type: list
  elements: dict
  sample:
    - provider: local
      pod_id: 5f2c9d1e8a44
      name: pennypod-demo-1201-k3f7q-a1-tssb3kq-nq4z7m
      run: demo-1201-k3f7q
      state: running
      billing: true
      price_usd_per_h: 0.2
      age_s: 42.0
      deadline: 1764600000
failure:
  description: What went wrong, for programs - C(code), C(message), C(details).
  returned: failure
  type: dict
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from pennypod.ansible import run_module
from pennypod.errors import InputError
from pennypod.model.money import micros_to_usd
from pennypod.providers.registry import all_providers
from pennypod.rental import ours
from pennypod.settings import load_settings

ARGUMENT_SPEC: dict[str, Any] = {
    "provider": {"type": "str", "default": "all"},
    "run": {"type": "str"},
}


def body(module: AnsibleModule) -> dict[str, Any]:
    """List as the options say."""
    providers = all_providers(load_settings())
    wanted = module.params["provider"]
    if wanted != "all" and wanted not in providers:
        raise InputError(f"no provider {wanted!r} is set up here: there is {', '.join(sorted(providers)) or 'none'}")
    now = time.time()
    pods = []
    for name, provider in providers.items():
        if wanted not in ("all", name):
            continue
        for pod, lease in ours(provider.pods()):
            if module.params["run"] in (None, lease.run):
                pods.append(
                    {
                        "provider": name,
                        "pod_id": pod.pod_id,
                        "name": pod.name,
                        "run": lease.run,
                        "attempt": lease.attempt,
                        "state": pod.state.value,
                        "billing": pod.billing,
                        "machine_id": pod.machine_id,
                        "gpu": pod.gpu,
                        "price_usd_per_h": micros_to_usd(pod.price_micros_per_h),
                        "age_s": round(now - pod.created, 1),
                        "deadline": lease.deadline,
                    }
                )
    return {"changed": False, "pods": pods}


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
