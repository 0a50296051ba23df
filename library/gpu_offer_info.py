#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what is rentable now, ranked, with the worst-case cost. Reads only."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_offer_info
short_description: Show ranked GPU offers and what a run may cost
description:
  - Asks the providers what is rentable now, ranks it by the expected cost of the whole run and checks the cost cap.
  - Rents nothing and changes nothing.
options:
  run:
    description: Write the plan as progress lines of this run.
    type: str
  provider:
    description:
      - Where to look. C(auto) means every provider whose key is set, and local pods when there is none.
    type: str
    default: auto
  gpu:
    description:
      - GPU types that will do, in order of preference. Every offer of the first type comes before any of the second.
      - C(cheapest) means any type, ranked by the expected cost of the run.
      - Empty means a ladder of seven types where GPUs are paid for, and whatever there is for local pods.
    type: list
    elements: str
    default: []
  gpu_count:
    description: GPUs per pod.
    type: int
    default: 1
  gpu_ram_gb:
    description: Least memory per GPU, in GB.
    type: float
  reliability:
    description: Least reliability of the host, between 0 and 1.
    type: float
  inet_down_mbps:
    description: Least download speed of the host, in Mbit/s.
    type: float
  inet_up_mbps:
    description: Least upload speed of the host, in Mbit/s.
    type: float
  disk_gb:
    description: Disk to rent, in GB.
    type: float
    default: 20
  cuda_min:
    description: Least CUDA version that the host's driver supports.
    type: float
  region:
    description:
      - Region or country codes that will do. Empty means any.
      - In order of preference within a GPU type, unless O(gpu) is C(cheapest).
    type: list
    elements: str
    default: []
  vast_query:
    description:
      - More filters for Vast.ai in its own search language, as its official command line takes them. Other providers do
        not read them.
    type: str
    default: ""
  secure:
    description: Only data-centre offers.
    type: bool
    default: false
  secondary:
    description:
      - A second tier - wishes that replace those of the same name once no offer for the first ones could be had. Any of
        C(gpu), C(gpu_ram_gb), C(reliability), C(inet_down_mbps), C(inet_up_mbps), C(cuda_min), C(region), C(secure) and
        C(vast_query).
      - At least one of O(max_attempts) is kept for it. The caps hold for both.
    type: dict
    default: {}
  allow_community:
    description: Allow community hosts even when the run may bill for over an hour.
    type: bool
    default: false
  max_price_usd_per_h:
    description: Highest all-in price per hour, in dollars.
    type: float
  max_cost_usd:
    description: Highest worst-case cost of the run, in dollars. Breaking it is the failure C(over_budget).
    type: float
  boot_minutes:
    description: Optimistic minutes from the create call to a finished bootstrap.
    type: float
    default: 3
  train_minutes:
    description: Optimistic minutes of training.
    type: float
    required: true
  budget_factor:
    description: The wallclock budget is this many times the optimistic estimate.
    type: float
    default: 2.5
  upload_bytes:
    description: Bytes that go up to the pod.
    type: int
    default: 0
  fetch_bytes:
    description: Bytes that come home.
    type: int
    default: 0
  max_attempts:
    description: How many offers may be tried.
    type: int
    default: 8
extends_documentation_fragment:
  - pennypod.caps
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - pennypod
"""

EXAMPLES = r"""
- name: Show what a ten-minute training would cost
  gpu_offer_info:
    gpu: [RTX 4090, RTX 3090]
    train_minutes: 10
    max_cost_usd: 1
  delegate_to: localhost
  register: plan
"""

RETURN = r"""
offers:
  description: The offers in the order to try them; C(offer) is what M(gpu_pod) takes.
  returned: success
  type: list
  elements: dict
deadline_s:
  description: The wallclock budget in seconds, counted from the rent.
  returned: success
  type: float
worst_case_usd:
  description: What the run costs at most when it is ended at the deadline.
  returned: success
  type: float
notes:
  description: What a person should know about this plan.
  returned: success
  type: list
  elements: str
failure:
  description: What went wrong, for programs - C(code), C(message), C(details).
  returned: failure
  type: dict
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from pennypod.ansible import run_module
from pennypod.events import Events
from pennypod.ledger import open_ledger
from pennypod.market import Estimate
from pennypod.model.admission import Asked, admit
from pennypod.model.offer import Need, place
from pennypod.planning import Limits, caps_from, held, make_plan, plan_document
from pennypod.providers.registry import select_providers
from pennypod.settings import load_settings

ARGUMENT_SPEC: dict[str, Any] = {
    "run": {"type": "str"},
    "provider": {"type": "str", "default": "auto"},
    "gpu": {"type": "list", "elements": "str", "default": []},
    "gpu_count": {"type": "int", "default": 1},
    "gpu_ram_gb": {"type": "float"},
    "reliability": {"type": "float"},
    "inet_down_mbps": {"type": "float"},
    "inet_up_mbps": {"type": "float"},
    "disk_gb": {"type": "float", "default": 20},
    "cuda_min": {"type": "float"},
    "region": {"type": "list", "elements": "str", "default": []},
    "vast_query": {"type": "str", "default": ""},
    "secure": {"type": "bool", "default": False},
    "secondary": {"type": "dict", "default": {}},
    "allow_community": {"type": "bool", "default": False},
    "max_price_usd_per_h": {"type": "float"},
    "max_cost_usd": {"type": "float"},
    "max_cost_usd_per_job": {"type": "float"},
    "max_cost_usd_per_day": {"type": "float"},
    "max_cost_usd_account": {"type": "float"},
    "boot_minutes": {"type": "float", "default": 3},
    "train_minutes": {"type": "float", "required": True},
    "budget_factor": {"type": "float", "default": 2.5},
    "upload_bytes": {"type": "int", "default": 0},
    "fetch_bytes": {"type": "int", "default": 0},
    "max_attempts": {"type": "int", "default": 8},
}


def body(module: AnsibleModule) -> dict[str, Any]:
    """Plan as the options say; the plan as JSON."""
    options = module.params
    settings, caps = load_settings(), caps_from(options)
    ledger, now, left_s = open_ledger(settings), time.time(), None
    if options["run"]:
        # A run that goes on on another pod has its deadline and its caps already.
        caps = held(caps, ledger.attempts(options["run"]))
        deadline = ledger.run(options["run"]).deadline
        left_s = None if deadline is None else max(0.0, deadline - now)
    need = Need(
        gpu=tuple(options["gpu"]),
        gpu_count=options["gpu_count"],
        gpu_ram_gb=options["gpu_ram_gb"],
        reliability=options["reliability"],
        inet_down_mbps=options["inet_down_mbps"],
        inet_up_mbps=options["inet_up_mbps"],
        disk_gb=options["disk_gb"],
        cuda_min=options["cuda_min"],
        region=tuple(options["region"]),
        secure=options["secure"],
        max_price_micros_per_h=caps.price,
        vast_query=options["vast_query"],
    )
    estimate = Estimate(
        boot_s=options["boot_minutes"] * 60,
        train_s=options["train_minutes"] * 60,
        upload_bytes=options["upload_bytes"],
        fetch_bytes=options["fetch_bytes"],
    )
    limits = Limits(
        budget_factor=options["budget_factor"],
        max_attempts=options["max_attempts"],
        max_cost_micros=caps.run,
        allow_community=options["allow_community"],
        left_s=left_s,
    )
    providers, note = select_providers(options["provider"], settings)

    def admitted(provider: str, worst_micros: int) -> int | None:
        # Only a run of the ledger has a job, and others beside it. What passes here has to pass again at the rent.
        if not options["run"]:
            return None
        return admit(Asked(worst_micros, caps), ledger.committed(options["run"], provider, now))

    found = make_plan(providers, need, estimate, limits, ledger.quarantined(now), options["secondary"], admit=admitted)
    plan = plan_document(found)
    plan["notes"] = [note, *plan["notes"]] if note else plan["notes"]
    if options["run"]:
        _tell(Events(settings.run_dir(options["run"]), options["run"]), plan)
    return {"changed": False, **plan}


def _tell(events: Events, plan: dict[str, Any]) -> None:
    for note in plan["notes"]:
        events.emit("plan", note)
    for rung, offer in enumerate(plan["offers"], start=1):
        events.emit(
            "plan",
            f"{rung}. {offer['gpu_count']}x {offer['gpu']} on {place(offer)}"
            f" ${offer['price_usd_per_h']:.4f}/h, about {offer['expected_s'] / 60:.1f} min and"
            f" ${offer['expected_usd']:.4f}",
        )
    minutes = plan["deadline_s"] / 60
    events.emit(
        "plan", f"worst case ${plan['worst_case_usd']:.4f}: the pod ends after {minutes:.1f} min whatever happens"
    )


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
