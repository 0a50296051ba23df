"""Rules about this repository that no linter knows. Each takes a folder or a text and returns what breaks the rule,
one line each, so that the same function can be tried on a bad sample and on the repository itself.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


class AnsibleLoader(yaml.SafeLoader):
    """YAML as Ansible writes it: its own tags (!vault, !unsafe) are read as plain text."""


AnsibleLoader.add_multi_constructor("!", lambda loader, _suffix, node: loader.construct_scalar(node))


def load_yaml(path: Path) -> Any:
    return yaml.load(path.read_text("utf-8"), AnsibleLoader)


def ansible_files(root: Path) -> list[Path]:
    """Every file that holds plays or tasks."""
    found = [path for path in sorted(root.glob("*.yml")) if path.name not in {"hosts.yml", "pods.pennypod.yml"}]
    found += sorted((root / "playbooks").rglob("*.yml"))
    for kind in ("tasks", "handlers"):
        found += sorted((root / "roles").glob(f"*/{kind}/**/*.yml"))
    return [path for path in found if not path.name.startswith(".")]


def mappings(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a document, from the top down."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from mappings(value)
    elif isinstance(node, list):
        for value in node:
            yield from mappings(value)


def tasks(node: Any, tags: frozenset[str] = frozenset()) -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
    """Every task of a play, block or task list with the tags that hold for it; blocks and plays hand theirs down."""
    for entry in node if isinstance(node, list) else []:
        if not isinstance(entry, dict):
            continue
        own = entry.get("tags", [])
        held = tags | frozenset([own] if isinstance(own, str) else own)
        inner = [
            key
            for key in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers")
            if isinstance(entry.get(key), list)
        ]
        for key in inner:
            yield from tasks(entry[key], held)
        if not inner and "hosts" not in entry and "import_playbook" not in entry:
            yield entry, held


def module_args(task: dict[str, Any], *names: str) -> Any:
    """The arguments of the first of these modules that the task calls, by short or full name; None if it calls none."""
    for name in names:
        for key in (name, f"ansible.builtin.{name}"):
            if key in task:
                return task[key]
    return None


# --- what a play that owns a pod must not say -----------------------------------------------------------------------


def money_losing_keywords(root: Path) -> list[str]:
    """Keywords that end a play, or take a host's `always` away, while its pod goes on billing."""
    broken = []
    for path in ansible_files(root):
        where = path.relative_to(root)
        document = load_yaml(path)
        for mapping in mappings(document):
            for keyword in ("run_once", "any_errors_fatal", "max_fail_percentage"):
                if keyword in mapping:
                    broken.append(f"{where}: {keyword}")
            meta = module_args(mapping, "meta")
            word = meta.get("_raw_params", "") if isinstance(meta, dict) else str(meta or "")
            if word.startswith("end_"):
                broken.append(f"{where}: meta: {word}")
            if "{{" in str(mapping.get("throttle", "")):
                broken.append(f"{where}: templated throttle")
            if mapping.get("ignore_errors") is True:
                broken.append(f"{where}: bare ignore_errors: true ({mapping.get('name', 'unnamed task')})")
    return broken


def unknown_handlers(root: Path) -> list[str]:
    """A notify that nothing listens to aborts the whole run, `always` included."""
    broken = []
    for path in ansible_files(root):
        document = load_yaml(path)
        role = next((parent for parent in path.parents if parent.parent == root / "roles"), None)
        sources = [load_yaml(file) for file in sorted((role / "handlers").glob("*.yml"))] if role else [document]
        if not role:
            sources = [play.get("handlers") for play in document or [] if isinstance(play, dict)]
        known: set[str] = set()
        for handlers in sources:
            for handler, _ in tasks(handlers):
                listen = handler.get("listen", [])
                known |= {handler.get("name", "")} | set([listen] if isinstance(listen, str) else listen)
        for task, _ in tasks(document):
            notify = task.get("notify", [])
            for name in [notify] if isinstance(notify, str) else notify:
                if name not in known:
                    broken.append(f"{path.relative_to(root)}: notify {name!r} has no handler")
    return broken


def untagged_teardown(root: Path) -> list[str]:
    """`--tags` must never filter the teardown away: every use of the role, and what it includes, is tagged `always`."""
    broken = []
    leaves_need_tags = False
    for path in ansible_files(root):
        document = load_yaml(path)
        where = path.relative_to(root)
        for play in document if isinstance(document, list) else []:
            for entry in play.get("roles", []) if isinstance(play, dict) else []:
                name = entry if isinstance(entry, str) else entry.get("role", entry.get("name"))
                held = [] if isinstance(entry, str) else entry.get("tags", [])
                if name == "teardown" and "always" not in ([held] if isinstance(held, str) else held):
                    broken.append(f"{where}: role teardown is not tagged always")
        for task, held in tasks(document):
            static, dynamic = module_args(task, "import_role"), module_args(task, "include_role")
            used = static or dynamic
            if not isinstance(used, dict) or used.get("name") != "teardown":
                continue
            if "always" not in held:
                broken.append(f"{where}: {task.get('name', 'the use of teardown')}: not tagged always")
            if dynamic and "always" not in (used.get("apply") or {}).get("tags", []):
                leaves_need_tags = True  # an include hands no tags down by itself
    for path in sorted((root / "roles" / "teardown" / "tasks").rglob("*.yml")) if leaves_need_tags else []:
        for task, held in tasks(load_yaml(path)):
            if "always" not in held:
                broken.append(f"{path.relative_to(root)}: {task.get('name', 'a task')}: not tagged always")
    return broken


# --- roles ----------------------------------------------------------------------------------------------------------


def role_interfaces(root: Path) -> list[str]:  # noqa: C901 - one list of small questions
    """Every role says what it takes, says it once, and keeps to its own prefix."""
    broken = []
    for role in sorted(path.parent for path in (root / "roles").glob("*/tasks")):
        where = role.relative_to(root)
        spec_file = role / "meta" / "argument_specs.yml"
        specs = (load_yaml(spec_file) or {}).get("argument_specs") if spec_file.is_file() else None
        if not specs or "main" not in specs:
            broken.append(f"{where}: no meta/argument_specs.yml with an entry point main")
            continue
        defaults_file = role / "defaults" / "main.yml"
        defaults = (load_yaml(defaults_file) if defaults_file.is_file() else None) or {}
        documented: dict[str, Any] = {}
        for entry, spec in specs.items():
            if not any((role / "tasks" / f"{entry}{suffix}").is_file() for suffix in (".yml", ".yaml")):
                broken.append(f"{where}: entry point {entry} has no tasks/{entry}.yml")
            if not spec.get("short_description"):
                broken.append(f"{where}: entry point {entry} has no short_description")
            documented |= spec.get("options") or {}
        for name, value in defaults.items():
            if not name.startswith((f"{role.name}_", f"__{role.name}_")):
                broken.append(f"{where}: default {name} lacks the prefix {role.name}_")
            if name not in documented and not name.startswith("__"):
                broken.append(f"{where}: default {name} is not in the argument spec")
            elif "{{" not in str(value) and documented.get(name, {}).get("default", value) != value:
                broken.append(f"{where}: {name} has one default in the spec and another in defaults/main.yml")
        for name, option in documented.items():
            if not option.get("description"):
                broken.append(f"{where}: {name} has no description")
            if "default" in option and name not in defaults:
                broken.append(f"{where}: {name} has a default in the spec that defaults/main.yml does not set")
    return broken


# --- modules --------------------------------------------------------------------------------------------------------

SPEC_KEYS = ("type", "elements", "default", "choices", "required", "aliases")


def _normal(option: dict[str, Any], key: str) -> Any:
    if key == "required":
        return bool(option.get("required", False))
    if key == "aliases":
        return sorted(option.get("aliases") or [])
    if key == "type":
        return option.get("type", "str")
    return option.get(key)


def spec_mismatches(documented: dict[str, Any], spec: dict[str, Any], where: str) -> list[str]:
    """Where the documentation of a module's options and its argument spec differ."""
    broken = [f"{where}{name}: in the documentation only" for name in documented.keys() - spec.keys()]
    broken += [f"{where}{name}: in the argument spec only" for name in spec.keys() - documented.keys()]
    for name in sorted(documented.keys() & spec.keys()):
        said, real = documented[name], spec[name]
        if not said.get("description"):
            broken.append(f"{where}{name}: no description")
        for key in SPEC_KEYS:
            ours, theirs = _normal(said, key), _normal(real, key)
            # 1 == True in Python, not in an interface
            if ours != theirs or isinstance(ours, bool) != isinstance(theirs, bool):
                broken.append(f"{where}{name}: {key} is {ours!r} in the documentation, {theirs!r} in the spec")
        broken += spec_mismatches(said.get("suboptions") or {}, real.get("options") or {}, f"{where}{name}.")
    return broken


SECRET_WORDS = re.compile(r"(password|passphrase|secret|token|api_key)$")


def unprotected_secrets(spec: dict[str, Any], where: str) -> list[str]:
    """Options that look like secrets and do not say whether they are."""
    return [
        f"{where}{name}: says no no_log"
        for name, option in spec.items()
        if SECRET_WORDS.search(name) and "no_log" not in option
    ]


def wrong_examples(module: str, text: str, spec: dict[str, Any], where: str) -> list[str]:
    """Examples that call the module with options it does not have."""
    broken = []
    names = set(spec) | {alias for option in spec.values() for alias in option.get("aliases") or []}
    used = False
    for task, _ in tasks(yaml.load(text, AnsibleLoader)):
        if module in task:
            used = True
            for unknown in sorted(set(task[module] or {}) - names):
                broken.append(f"{where}: the example {task.get('name')!r} uses the unknown option {unknown}")
    return broken if used else [*broken, f"{where}: no example uses the module"]


# --- scripts that run on a pod --------------------------------------------------------------------------------------


def foreign_imports(source: str, where: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Imports of anything but the standard library: a pod has nothing else of ours."""
    broken = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        for name in names:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top not in allowed and name != "__future__":
                broken.append(f"{where}:{node.lineno}: imports {name}")
    return broken


# --- what must not be in a public repository ------------------------------------------------------------------------

# Written in pieces, so that this file does not hold what it looks for.
_INDEXES = [
    ("pypi", "org"), ("files", "pythonhosted", "org"), ("deb", "debian", "org"), ("security", "debian", "org"),
    ("archive", "ubuntu", "com"), ("registry", "npmjs", "org"),
]  # fmt: skip
_INDEX = re.compile("|".join(re.escape(".".join(parts)) for parts in _INDEXES))
# Pods are entered as root, so most of /root is theirs. /home/me is what the documentation calls the reader,
# /home/somebody is in tests.
_HOME = re.compile(
    r"(?<![\w}])/(?:(?:home|Users)/(?!(?:me|somebody)\b)[A-Za-z][\w.-]*|root/\.(?!(?:ssh|cache|config)\b)\w[\w./-]*)"
)
_KEYS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")


def private_things(text: str, where: str, checkout: str) -> list[str]:
    """Home folders, the folder this checkout lies in, addresses of package registries, private keys."""
    broken = []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, what in ((_HOME, "a home folder"), (_INDEX, "a registry's address"), (_KEYS, "a private key")):
            if found := pattern.search(line):
                broken.append(f"{where}:{number}: {what}: {found.group()}")
        if re.search(re.escape(checkout) + r"(?=[/\s'\"]|$)", line):
            broken.append(f"{where}:{number}: the folder this checkout lies in")
    return broken


def lock_oddities(text: str) -> list[str]:
    """Lines of requirements.lock that are neither `name==version` nor a hash, and packages without a hash."""
    broken = []
    for number, line in enumerate(text.splitlines(), 1):
        if re.fullmatch(r"#.*|\s+--hash=sha256:[0-9a-f]{64}( \\)?|[a-z0-9-]+==[\w.+!-]+( ; [^\\]+)? \\", line) is None:
            broken.append(f"requirements.lock:{number}: {line}")
    return broken


# --- documents ------------------------------------------------------------------------------------------------------


def unknown_make_targets(text: str, makefile: str, where: str) -> list[str]:
    """Targets a document tells the reader to make that the Makefile does not have."""
    known = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|[`$ ])(?:[A-Z]+=\S+ )?make ([a-z][a-z-]*)(?=[`\s]|$)", code_of(text), re.MULTILINE))
    return [f"{where}: make {name}" for name in sorted(named - known)]


def unknown_commands(text: str, known: set[str], where: str) -> list[str]:
    """Subcommands of `pennypod` that a document names and the program does not have."""
    named = set(re.findall(r"(?:^|[`$ /])pennypod ([a-z][a-z-]*)", code_of(text), re.MULTILINE))
    return [f"{where}: pennypod {name}" for name in sorted(named - known)]


def code_of(text: str) -> str:
    """The parts of a Markdown text that are code: fenced blocks and inline spans."""
    fences = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*fences, *re.findall(r"`([^`\n]+)`", rest)])


def dead_links(text: str, folder: Path, where: str) -> list[str]:
    """Relative links of a Markdown text to files that are not there."""
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
    return [f"{where}: link to {target}" for target in targets if not (folder / target).exists()]
