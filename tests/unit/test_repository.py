"""The repository keeps its own rules; every rule is first seen to fail on a bad sample (test_rule_can_fail)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import repository_rules as rules
import yaml
from ansible.plugins.loader import fragment_loader
from ansible.utils.plugin_docs import add_fragments

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "library").glob("*.py"))
ON_POD = sorted((ROOT / "python" / "pennypod" / "onpod").glob("*.py"))
TRAINERS = sorted((ROOT / "python" / "trainers").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a trainer may import besides the standard library: what its image or its requirements bring.
TRAINER_LIBRARIES = frozenset({"cv2", "matplotlib", "numpy", "PIL", "torch", "torchvision", "ultralytics", "yaml"})

# Files to write, and what the rule must then say.
BAD_TREES: list[tuple[Callable[[Path], list[str]], dict[str, str], str]] = [
    (rules.money_losing_keywords, {"playbooks/a.yml": "- hosts: all\n  any_errors_fatal: true\n"}, "any_errors_fatal"),
    (
        rules.money_losing_keywords,
        {"playbooks/a.yml": "- hosts: all\n  max_fail_percentage: 0\n"},
        "max_fail_percentage",
    ),
    (
        rules.money_losing_keywords,
        {"roles/a/tasks/main.yml": "- block:\n    - name: x\n      ansible.builtin.ping:\n      run_once: true\n"},
        "run_once",
    ),
    (rules.money_losing_keywords, {"train.yml": "- hosts: all\n  tasks:\n    - meta: end_host\n"}, "meta: end_host"),
    (
        rules.money_losing_keywords,
        {"roles/a/handlers/main.yml": "- name: x\n  ansible.builtin.meta: end_play\n"},
        "meta: end_play",
    ),
    (
        rules.money_losing_keywords,
        {"roles/a/tasks/b.yml": "- name: x\n  ansible.builtin.ping:\n  ignore_errors: true\n"},
        "bare ignore_errors",
    ),
    (
        rules.money_losing_keywords,
        {"roles/a/tasks/b.yml": "- name: x\n  ansible.builtin.ping:\n  throttle: '{{ n }}'\n"},
        "templated throttle",
    ),
    (
        rules.unknown_handlers,
        {
            "roles/a/tasks/main.yml": "- name: x\n  ansible.builtin.ping:\n  notify: Restart it\n",
            "roles/a/handlers/main.yml": "- name: Restart It\n  ansible.builtin.ping:\n",
        },
        "'Restart it' has no handler",
    ),
    (
        rules.unknown_handlers,
        {"playbooks/a.yml": "- hosts: all\n  tasks:\n    - name: x\n      ansible.builtin.ping:\n      notify: [Go]\n"},
        "'Go' has no handler",
    ),
    (
        rules.untagged_teardown,
        {"playbooks/a.yml": "- hosts: all\n  roles:\n    - role: teardown\n"},
        "role teardown is not tagged",
    ),
    (
        rules.untagged_teardown,
        {
            "playbooks/a.yml": "- hosts: all\n  tasks:\n    - block: []\n      always:\n        - name: End\n"
            "          ansible.builtin.import_role:\n            name: teardown\n          tags: [down]\n"
        },
        "End: not tagged always",
    ),
    (
        rules.untagged_teardown,
        {
            "playbooks/a.yml": "- hosts: all\n  tasks:\n    - name: End\n      tags: always\n"
            "      ansible.builtin.include_role:\n        name: teardown\n",
            "roles/teardown/tasks/main.yml": "- name: Destroy\n  ansible.builtin.ping:\n",
        },
        "Destroy: not tagged always",
    ),
    (rules.role_interfaces, {"roles/a/tasks/main.yml": "[]"}, "no meta/argument_specs.yml"),
    (
        rules.role_interfaces,
        {
            "roles/a/tasks/main.yml": "[]",
            "roles/a/meta/argument_specs.yml": "argument_specs: {main: {short_description: x, options: {}}}",
            "roles/a/defaults/main.yml": "b_c: 1",
        },
        "lacks the prefix a_",
    ),
    (
        rules.role_interfaces,
        {
            "roles/a/tasks/main.yml": "[]",
            "roles/a/meta/argument_specs.yml": "argument_specs: {main: {short_description: x, options: "
            "{a_b: {type: int, default: 2, description: y}}}}",
            "roles/a/defaults/main.yml": "a_b: 1",
        },
        "one default in the spec and another",
    ),
]


@pytest.mark.parametrize(("rule", "files", "expected"), BAD_TREES, ids=[f"{r.__name__}-{e}" for r, _, e in BAD_TREES])
def test_rule_can_fail(tmp_path: Path, rule: Callable[[Path], list[str]], files: dict[str, str], expected: str) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    assert any(expected in line for line in rule(tmp_path)), rule(tmp_path)


@pytest.mark.parametrize(
    "rule", [rules.money_losing_keywords, rules.unknown_handlers, rules.untagged_teardown, rules.role_interfaces]
)
def test_rule_holds_here(rule: Callable[[Path], list[str]]) -> None:
    assert rules.ansible_files(ROOT), "no plays found: the rule would hold of nothing"
    assert rule(ROOT) == []


def test_teardown_is_used_by_the_train_playbook() -> None:
    """The tag rule above would hold of a playbook that never tears down."""
    text = (ROOT / "playbooks" / "train.yml").read_text("utf-8")
    assert re.search(r"name: teardown\b|role: teardown\b", text)


# --- playbooks ------------------------------------------------------------------------------------------------------


def ansible(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """An Ansible command of this environment, run from the root, as a user would."""
    env = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", **environ}
    command = [str(Path(sys.executable).parent / argv[0]), *argv[1:]]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


PLAYBOOKS = sorted(
    path.relative_to(ROOT)
    for path in rules.ansible_files(ROOT)
    if path.parent in (ROOT, ROOT / "playbooks") and isinstance(rules.load_yaml(path), list)
)


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=str)
def test_playbook_parses(playbook: Path) -> None:
    done = ansible("ansible-playbook", "-i", "hosts.yml", "--syntax-check", str(playbook))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_task_file_of_every_role_parses(tmp_path: Path) -> None:
    """Files that are included only while a run goes on are not seen by --syntax-check; a typo there ends the run."""
    play: dict[str, Any] = {"name": "Parse", "hosts": "localhost", "gather_facts": False, "tasks": []}
    for path in sorted((ROOT / "roles").glob("*/tasks/**/*.yml")):
        role = path.relative_to(ROOT / "roles").parts[0]
        source = path.relative_to(ROOT / "roles" / role / "tasks")
        play["tasks"].append({"name": f"{role} {source}", "import_role": {"name": role, "tasks_from": str(source)}})
    assert play["tasks"]
    playbook = tmp_path / "parse.yml"
    playbook.write_text(yaml.safe_dump([play]), "utf-8")
    done = ansible("ansible-playbook", "-i", "hosts.yml", "--syntax-check", str(playbook))
    assert done.returncode == 0, done.stdout + done.stderr


def test_group_vars_reach_a_run_of_a_job(tmp_path: Path) -> None:
    """group_vars/ is read only from beside an inventory source: hosts.yml must stay where it is."""
    job = yaml.safe_load((ROOT / "group_vars" / "job_demo.yml").read_text("utf-8"))
    play = {
        "name": "Look",
        "hosts": "localhost",
        "gather_facts": False,
        "tasks": [
            {
                "name": "Add",
                "add_host": {"name": "demo-0101-aaaaa", "groups": ["runs", "job_demo"]},
                "changed_when": False,
            },
            {
                "name": "Write",
                "copy": {
                    "content": "{{ hostvars['demo-0101-aaaaa'].job_description | string }}",
                    "dest": str(tmp_path / "seen"),
                    "mode": "0600",
                },
            },
        ],
    }
    playbook = tmp_path / "look.yml"
    playbook.write_text(yaml.safe_dump([play]), "utf-8")
    done = ansible("ansible-playbook", "-i", "hosts.yml", str(playbook), ANSIBLE_STDOUT_CALLBACK="default")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "seen").read_text("utf-8") == job["job_description"]


def test_group_vars_for_all_reach_localhost() -> None:
    wanted = yaml.safe_load((ROOT / "group_vars" / "all.yml").read_text("utf-8"))
    assert wanted, "group_vars/all.yml is empty: nothing to see"
    done = ansible("ansible-inventory", "-i", "hosts.yml", "--host", "localhost")
    assert done.returncode == 0, done.stderr
    assert wanted.keys() <= json.loads(done.stdout).keys()


def test_every_setting_of_ansible_cfg_is_known(tmp_path: Path) -> None:
    """A misspelt key in ansible.cfg is silently ignored."""
    (tmp_path / "empty.cfg").touch()
    environ = {"ANSIBLE_CONFIG": str(tmp_path / "empty.cfg")}
    listed = ansible("ansible-config", "list", "--type", "all", "--format", "json", **environ)
    assert listed.returncode == 0, listed.stderr
    known = set(re.findall(r'"key": "(\w+)",\s*"section": "(\w+)"', listed.stdout))
    assert ("forks", "defaults") in known
    section, unknown = "", []
    for line in (ROOT / "ansible.cfg").read_text("utf-8").splitlines():
        if found := re.fullmatch(r"\[(\w+)\]", line):
            section = found.group(1)
        elif (found := re.match(r"(\w+)\s*=", line)) and (found.group(1), section) not in known:
            unknown.append(f"[{section}] {found.group(1)}")
    assert section
    assert unknown == []


# --- modules --------------------------------------------------------------------------------------------------------


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"library_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documentation_of(module: ModuleType) -> dict[str, Any]:
    """What ansible-doc shows of it: with the fragments that it names."""
    documentation: dict[str, Any] = yaml.safe_load(module.DOCUMENTATION)
    fragment_loader.add_directory(str(ROOT / "doc_fragments"))
    add_fragments(documentation, str(module.__file__), fragment_loader, is_module=True)
    return documentation


def test_there_are_modules() -> None:
    assert {"gpu_pod", "gpu_pod_info", "gpu_offer_info", "run_ledger"} <= {path.stem for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_says_what_it_takes(path: Path) -> None:
    module = load_module(path)
    documentation = documentation_of(module)
    assert documentation["module"] == path.stem
    assert documentation["short_description"]
    assert rules.spec_mismatches(documentation.get("options") or {}, module.ARGUMENT_SPEC, f"{path.stem}: ") == []
    assert rules.unprotected_secrets(module.ARGUMENT_SPEC, f"{path.stem}: ") == []
    assert rules.wrong_examples(path.stem, module.EXAMPLES, module.ARGUMENT_SPEC, path.stem) == []
    returned = yaml.safe_load(module.RETURN)
    assert returned
    for name, value in returned.items():
        assert {"description", "returned", "type"} <= value.keys(), name
    assert "failure" in returned, "every module says failure.code"


class _Seen(BaseException):
    """Carries what a module hands to AnsibleModule out of the module, past every handler."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_supports_check_mode(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object, argument_spec: dict[str, Any], **arguments: Any) -> None:
        raise _Seen({"argument_spec": argument_spec, **arguments})

    monkeypatch.setattr("ansible.module_utils.basic.AnsibleModule.__init__", refuse)
    module = load_module(path)
    with pytest.raises(_Seen) as seen:
        module.main()
    assert seen.value.arguments["argument_spec"] == module.ARGUMENT_SPEC
    assert seen.value.arguments.get("supports_check_mode") is True
    attributes = yaml.safe_load(module.DOCUMENTATION)["attributes"]
    assert attributes["check_mode"]["support"] == "full"


@pytest.mark.parametrize("key", rules.SPEC_KEYS)
def test_spec_rule_can_fail(key: str) -> None:
    said = {"a": {"description": "x", "type": "int", "default": 1, "elements": "str", "choices": [1], "aliases": ["b"]}}
    real = {"a": {**said["a"], key: {"type": "bool", "required": True, "default": True}.get(key, ["other"])}}
    assert rules.spec_mismatches(said, said, "") == []
    assert len(rules.spec_mismatches(said, real, "")) == 1
    assert (
        len(rules.spec_mismatches({"o": {"description": "x", "suboptions": said}}, {"o": {"options": real}}, "")) == 1
    )


def test_spec_rule_misses_no_name() -> None:
    assert rules.spec_mismatches({"a": {"description": "x"}}, {}, "") == ["a: in the documentation only"]
    assert rules.spec_mismatches({}, {"a": {}}, "") == ["a: in the argument spec only"]


def test_secret_and_example_rules_can_fail() -> None:
    assert rules.unprotected_secrets({"api_key": {}, "token": {"no_log": True}}, "") == ["api_key: says no no_log"]
    assert len(rules.wrong_examples("m", "- name: x\n  m:\n    nope: 1\n", {"yes": {}}, "m")) == 1
    assert len(rules.wrong_examples("m", "- name: x\n  other:\n", {}, "m")) == 1


# --- scripts for pods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ON_POD, ids=lambda path: path.name)
def test_pod_script_needs_the_standard_library_only(path: Path) -> None:
    assert rules.foreign_imports(path.read_text("utf-8"), path.name, frozenset({"torch"})) == []


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.name)
def test_trainer_imports_nothing_of_ours(path: Path) -> None:
    assert rules.foreign_imports(path.read_text("utf-8"), path.name, TRAINER_LIBRARIES) == []


def test_there_are_pod_scripts_and_trainers() -> None:
    assert ON_POD
    assert TRAINERS


def test_import_rule_can_fail() -> None:
    for line in ("import pennypod.errors", "from pennypod import errors", "from . import x", "import requests"):
        assert rules.foreign_imports(line, "x"), line
    assert rules.foreign_imports("import os, json\nfrom __future__ import annotations", "x") == []


# --- documents and public things ------------------------------------------------------------------------------------


def test_role_readmes_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "role_readmes.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_role_readme_check_can_fail_and_be_mended(tmp_path: Path) -> None:
    role = tmp_path / "roles" / "a"
    for folder in ("tasks", "meta", "defaults"):
        (role / folder).mkdir(parents=True)
    spec = {"main": {"short_description": "S", "options": {"a_b": {"type": "int", "description": "B | c"}}}}
    (role / "meta" / "argument_specs.yml").write_text(yaml.safe_dump({"argument_specs": spec}), "utf-8")
    (role / "defaults" / "main.yml").write_text("a_b: 3\n", "utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "role_readmes.py"), "--roles", str(tmp_path / "roles")]

    def check() -> int:
        return subprocess.run([*command, "--check"], capture_output=True, timeout=60).returncode

    assert check() == 1
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert check() == 0
    text = (role / "README.md").read_text("utf-8")
    assert "| `a_b` | int | `3` | B \\| c |" in text
    # what people write around the table stays, and a new default is noticed
    (role / "README.md").write_text(f"{text}\nBy hand.\n", "utf-8")
    assert check() == 0
    (role / "defaults" / "main.yml").write_text("a_b: 4\n", "utf-8")
    assert check() == 1
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert "By hand." in (role / "README.md").read_text("utf-8")


def repository_files() -> list[Path]:
    """What git tracks, and what it would track after `git add`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_nothing_private_is_published() -> None:
    broken, looked_at = [], 0
    for path in repository_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        looked_at += 1
        broken += rules.private_things(text, str(path.relative_to(ROOT)), str(ROOT))
    assert looked_at > 20
    assert broken == []


@pytest.mark.parametrize(
    "bad",
    ["/home/" + "ann/x", "/Users/" + "ann", "/root/" + ".pyenv/shims", "see https://" + "pypi." + "org" + "/simple",
     "x /srv/clone/y", "/srv/clone", "-----BEGIN OPENSSH " + "PRIVATE KEY-----"],
)  # fmt: skip
def test_private_rule_can_fail(bad: str) -> None:
    assert len(rules.private_things(f"good\n{bad}\n", "x", "/srv/clone")) == 1


@pytest.mark.parametrize("good", ["/root/pennypod/out", "/root/.ssh/authorized_keys", "/home/me/x", "/srv/clones/x"])
def test_private_rule_lets_pods_be(good: str) -> None:
    assert rules.private_things(good, "x", "/srv/clone") == []


def test_the_lock_names_no_index_and_has_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text("utf-8")
    assert text.count("==") > 20
    assert rules.lock_oddities(text) == []


@pytest.mark.parametrize("bad", ["--index-url x", "-f /wheels", "a @ file:///x", "a==1", "a>=1 \\"])
def test_lock_rule_can_fail(bad: str) -> None:
    assert rules.lock_oddities(f"# fine\n{bad}\n") != []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_document_tells_the_truth(path: Path) -> None:
    from pennypod.cli import main

    text, where = path.read_text("utf-8"), path.name
    assert rules.unknown_make_targets(text, (ROOT / "Makefile").read_text("utf-8"), where) == []
    assert rules.unknown_commands(text, set(main.commands), where) == []
    assert rules.dead_links(text, path.parent, where) == []


def test_document_rules_can_fail() -> None:
    makefile = "test: setup\n"
    assert rules.unknown_make_targets("`make tset` and HEAVY: `HEAVY=1 make slow`", makefile, "x") == [
        "x: make slow",
        "x: make tset",
    ]
    assert rules.unknown_make_targets("```\nmake test\n```\nmake no claim in prose", makefile, "x") == []
    assert rules.unknown_commands("run `pennypod swep --now`", {"sweep"}, "x") == ["x: pennypod swep"]
    assert rules.dead_links("[a](nope.md) [b](https://example.com) [c](#x)", ROOT, "x") == ["x: link to nope.md"]


def test_every_documented_variable_is_read() -> None:
    """.env.example may only offer what the program reads, or say that it is reserved."""
    text = (ROOT / ".env.example").read_text("utf-8")
    offered = re.findall(r"^#?([A-Z][A-Z_]+)=", text.split("# Reserved")[0], re.MULTILINE)
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "python").rglob("*.py"))
    assert offered
    assert [name for name in offered if f'"{name}"' not in source] == []
    assert re.search(r"^[A-Z]", text, re.MULTILINE) is None, ".env.example holds placeholders only"
