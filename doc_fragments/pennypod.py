# SPDX-License-Identifier: Apache-2.0
"""Options that several modules document alike. Only text: argument specs are in the modules and `pennypod.podwork`."""

from __future__ import annotations


class ModuleDocFragment:
    # As POD_OPTIONS of pennypod.podwork.
    POD = r"""
options:
  run:
    description: The run id.
    type: str
    required: true
  host:
    description: Where the pod's SSH server listens.
    type: str
    required: true
  port:
    description: Its port.
    type: int
    default: 22
  user:
    description: The user to log in as.
    type: str
    default: root
  key_file:
    description: The run's private SSH key.
    type: path
    required: true
  known_hosts:
    description: The run's known_hosts file. The pod's host key is always checked.
    type: path
    required: true
  pod_home:
    description: Our folder on the pod.
    type: str
    default: /root/pennypod
"""

    CAPS = r"""
options:
  max_cost_usd_per_job:
    description:
      - Highest cost in dollars of all runs of this job that the ledger knows, open ones counted with their worst case.
    type: float
  max_cost_usd_per_day:
    description:
      - Highest cost in dollars of all runs of the last 24 hours, open ones counted with their worst case.
    type: float
  max_cost_usd_account:
    description:
      - Highest cost in dollars that pods which are open at one provider may come to, each counted with its worst case.
    type: float
"""
