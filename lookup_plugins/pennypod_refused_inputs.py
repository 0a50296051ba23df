"""Lookup: what is wrong with the names given by -e. The work is in pennypod.inputs; this file only speaks Ansible."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pennypod_refused_inputs
short_description: Extra variables that nothing knows, and amounts that are none
description:
  - Ansible takes any extra variable in silence. This returns one sentence for each that no playbook, role or job reads,
    and for each cap that is no number of dollars.
author:
  - pennypod contributors
options:
  _terms:
    description: The playbook's name without its suffix, and the root of the repository.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- ansible.builtin.assert:
    that: query('pennypod_refused_inputs', 'train', inventory_dir) | length == 0
"""

RETURN = r"""
_raw:
  description: One sentence for each extra variable that is refused.
  type: list
  elements: str
"""

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase
from ansible.utils.vars import load_extra_vars
from pennypod.errors import PennypodError
from pennypod.inputs import amount_refusals, known_inputs, refusals, registry_refusals


class LookupModule(LookupBase):
    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[str]:  # noqa: ARG002 - Ansible's signature
        playbook, root = terms
        given = {str(name): value for name, value in load_extra_vars(self._loader).items()}
        try:
            unknown = refusals(given, known_inputs(Path(root), playbook))
            return unknown + amount_refusals(given) + registry_refusals(playbook, given)
        except PennypodError as exc:
            raise AnsibleError(str(exc)) from None
