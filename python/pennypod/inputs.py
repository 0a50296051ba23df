"""Which extra variables mean anything. Floor 2: the repository's YAML files are its one outside thing.

Ansible takes any `-e NAME=VALUE` in silence, so a misspelt cap would be no cap. Known is what the playbook documents,
what the roles declare, what their defaults read, and any word of the job files: their templates may use own variables.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from pennypod.errors import InputError
from pennypod.jobs import read_mapping
from pennypod.model.admission import NAMES
from pennypod.model.image import parse_repository

_START = ("job", "provider", "smoke", "dataset", "plan_only", "allow_community", "artifacts_dir", "run_id", "isolate")
_LEAVE = ("detach", "detach_to", "detach_poll_minutes", "keep_on_disconnect", "escrow_grace_s")
_GO_ON = ("run", "cancel", "dataset", "smoke", "isolate", "keep_on_disconnect")
_AGAIN = ("job", "provider", "artifacts_dir")  # harmless, and people repeat the line that started the run
INPUTS = {
    "train": (*_START, *_LEAVE, "golden"),
    "bake": ("job", "provider", "artifacts_dir", "plan_only", "registry"),
    "offers": (*_START, *_LEAVE),
    "resume": (*_GO_ON, *_AGAIN),
    "finish": (*_GO_ON, *_AGAIN),
}
"""What a playbook reads itself; the caps and the like are what the roles' defaults read."""

AMOUNTS = (*(NAMES[cap] for cap in ("run", "job", "day", "account")), "max_price_usd_per_h", "escrow_grace_s")
"""Inputs that are numbers of dollars, or of seconds."""

_RESERVED = ("ansible_", "pennypod_")
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_YAML_FILES = ("*.yml", "*.yaml")


@dataclass(frozen=True, slots=True)
class Known:
    """`inputs` are names of pennypod, worth suggesting; `words` are whatever else the job files hold."""

    inputs: frozenset[str]
    words: frozenset[str] = frozenset()

    def __contains__(self, name: object) -> bool:
        return name in self.inputs or name in self.words or str(name).startswith(_RESERVED)


def known_inputs(root: Path, playbook: str) -> Known:
    """What `playbook` of the repository at `root` understands. Raises InputError when a role's file cannot be read."""
    names = set(INPUTS[playbook])
    for role in sorted((root / "roles").iterdir()):
        names |= _role_names(role)
    words: set[str] = set()
    for file in (file for pattern in _YAML_FILES for file in (root / "group_vars").rglob(pattern)):
        words.update(_NAME.findall(_COMMENT.sub("", file.read_text(encoding="utf-8", errors="replace"))))
    return Known(frozenset(name for name in names if not name.startswith("__")), frozenset(words))


def refusals(given: Iterable[str], known: Known) -> list[str]:
    """One sentence for each name that nothing knows, with the nearest known one where there is one."""
    return [_refusal(name, known) for name in sorted(given) if name not in known]


def amount_refusals(given: Mapping[str, Any]) -> list[str]:
    """One sentence for each amount that is no number, 0 or more. Templates are left to whoever reads them."""
    return [
        refusal
        for name in AMOUNTS
        if given.get(name) is not None and "{{" not in str(given[name]) and (refusal := _amount(name, given[name]))
    ]


def registry_refusals(playbook: str, given: Mapping[str, Any]) -> list[str]:
    """One sentence when the place to push to is none: found out after a bake, it would be late."""
    if playbook != "bake" or not given.get("registry"):
        return []
    try:
        parse_repository(str(given["registry"]))
    except InputError as exc:
        return [f"registry: {exc}"]
    return []


def _amount(name: str, value: Any) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if 0 <= number < math.inf and not isinstance(value, bool):
        return ""
    return f"{name} is {value}: give a number of {'seconds' if name.endswith('_s') else 'dollars'}, 0 or more"


def _refusal(name: str, known: Known) -> str:
    near = difflib.get_close_matches(name, sorted(known.inputs), n=1)
    advice = f"did you mean {near[0]}?" if near else "a job's own variable has to occur in its file in group_vars/"
    return f"nothing knows the variable {name} of -e: {advice}"


def _role_names(role: Path) -> set[str]:
    """The role's variables, and those that its defaults read."""
    defaults = read_mapping(role / "defaults" / "main.yml")
    names = set(defaults) | _read_by(defaults)
    for entry in (read_mapping(role / "meta" / "argument_specs.yml").get("argument_specs") or {}).values():
        names.update(entry.get("options") or {})
    return names


def _read_by(value: Any) -> set[str]:
    """The variables that the templates in a value read."""
    if isinstance(value, dict):
        return _read_by(list(value.values()))
    if isinstance(value, list):
        return {name for item in value for name in _read_by(item)}
    if not isinstance(value, str) or "{" not in value:
        return set()
    try:
        return meta.find_undeclared_variables(jinja2.Environment(autoescape=True).parse(value))
    except jinja2.TemplateSyntaxError:
        return set()  # Ansible will say so, and better
