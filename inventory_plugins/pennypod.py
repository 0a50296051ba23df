"""Dynamic inventory: what bills now. The work is in pennypod.inventory; this file only speaks Ansible."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pennypod
short_description: Rented GPU pods that bill now
description:
  - A host is a run. Its address, port, key and pinned host key are set, so C(ansible RUN -m ping) works as it stands.
  - The listing comes from the providers, since they know what exists. The ledger adds the run's key and start time.
  - Only pods whose name starts with C(pennypod-) are shown. Other people's machines never are.
  - A second pod of the same run, or a pod whose name holds no readable lease, is listed under the pod's own name.
  - A provider that cannot be listed is an error. It never looks like an empty account.
  - Reads C(*.pennypod.yml).
author:
  - pennypod contributors
extends_documentation_fragment:
  - constructed
  - inventory_cache
notes:
  - "Groups: V(billing), V(stopped), V(orphans) (ours by name, but this ledger does not know the run or says that it
    is over), V(unproven) (no proof of its end, and no listing shows it), C(provider_*), C(job_*), C(gpu_*)."
  - "Host variables: C(pennypod_price_usd_per_h), C(pennypod_age_s), C(pennypod_cost_so_far_usd), C(pennypod_deadline)
    (Unix time), C(pennypod_overdue), C(pennypod_may_still_be_billing), C(pennypod_state), C(pennypod_run),
    C(pennypod_job), C(pennypod_provider), C(pennypod_pod_id), C(pennypod_pod_name), C(pennypod_machine_id),
    C(pennypod_gpu), C(pennypod_gpu_count), C(pennypod_artifacts_dir), C(pennypod_root)."
  - With O(cache=true), neither secrets nor host keys are stored, and any change to a local ledger ends the entry.
options:
  plugin:
    description: The name of this plugin.
    type: str
    required: true
    choices: [pennypod]
  providers:
    description:
      - Ask only these providers.
      - By default every provider that is configured here is asked.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
# What bills now:
#   ansible-inventory --graph billing
#   ansible-inventory --list
plugin: pennypod

# One more group, from a host variable:
---
plugin: pennypod
groups:
  dear: pennypod_cost_so_far_usd > 1.0
"""

import contextlib
import hashlib
import re
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.template import trust_as_template

try:
    from pennypod import inventory as pods
    from pennypod.errors import PennypodError
    from pennypod.settings import Settings, load_settings
except ImportError as exc:
    MISSING: str | None = f"the pennypod package is not installed where Ansible runs ({exc}): use the one in .venv/bin"
else:
    MISSING = None

# Neither a brace nor a #: such a string is no template, whoever wrote it.
PLAIN = re.compile(r"[\w .,:;/@%+=~\"'()\[\]-]*")
SUFFIXES = ("pennypod.yml", "pennypod.yaml")


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):
    NAME = "pennypod"

    def verify_file(self, path: str) -> bool:
        return super().verify_file(path) and path.endswith(SUFFIXES)

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path)
        if MISSING is not None:
            raise AnsibleParserError(MISSING)
        self._read_config_data(path)
        try:
            settings = load_settings()
            taken = self._snapshot(settings, path, cache)
        except PennypodError as exc:
            # Without the cause attached, since Ansible would print the same words once more for it.
            raise AnsibleParserError(f"{exc}; or leave the provider out with `providers:` in {path}") from None
        self._populate(pods.hosts(taken, settings.runs_dir, time.time()), str(Path(path).absolute().parent))

    def _snapshot(self, settings: Settings, path: str, cache: bool) -> dict[str, Any]:
        """From the cache when that is wanted and still true, else from the providers."""
        if not self.get_option("cache"):
            return self._fetch(settings)
        wanted = ",".join(self.get_option("providers"))
        place = hashlib.sha256(f"{settings.home} {settings.database_url} {wanted}".encode()).hexdigest()[:12]
        key = f"{self.get_cache_key(path)}_{place}"
        mark = pods.ledger_mark(settings)
        with contextlib.suppress(KeyError):  # nothing cached, or cached too long ago
            entry = self._cache[key] if cache else {}
            if entry["mark"] == mark:
                return entry["snapshot"]
        taken = self._fetch(settings)
        self._cache[key] = {"mark": pods.ledger_mark(settings), "snapshot": taken}
        return taken

    def _fetch(self, settings: Settings) -> dict[str, Any]:
        return pods.take(settings, self.get_option("providers"), time.time())

    def _populate(self, hosts: dict[str, dict[str, Any]], root: str) -> None:
        for group in pods.GROUPS:
            self.inventory.add_group(group)
        for group in {group for entry in hosts.values() for group in entry["groups"]}:
            self.inventory.add_group(group)
        # Job files name paths of the repository by it.
        self.inventory.set_variable("all", "pennypod_root", _marked(root))
        strict = self.get_option("strict")
        compose, groups, keyed = (self.get_option(name) for name in ("compose", "groups", "keyed_groups"))
        for host, entry in hosts.items():
            self.inventory.add_host(host)
            for group in entry["groups"]:
                self.inventory.add_host(host, group=group)
            for name, value in entry["vars"].items():
                self.inventory.set_variable(host, name, _marked(value))
            self._set_composite_vars(compose, entry["vars"], host, strict)
            self._add_host_to_composed_groups(groups, entry["vars"], host, strict)
            self._add_host_to_keyed_groups(keyed, entry["vars"], host, strict)


def _marked(value: Any) -> Any:
    """Strings that cannot be templates are marked as harmless; whatever else a provider answers never is.

    Unmarked, a string comes out of `ansible-inventory --list` wrapped in an object that other programs stumble over.
    """
    return trust_as_template(value) if isinstance(value, str) and PLAIN.fullmatch(value) else value
