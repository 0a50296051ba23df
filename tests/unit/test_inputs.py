"""An extra variable that nothing reads is refused: a misspelt cap would be no cap."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from pennypod.errors import InputError
from pennypod.inputs import AMOUNTS, INPUTS, Known, amount_refusals, known_inputs, refusals, registry_refusals

ROOT = Path(__file__).resolve().parents[2]
TYPOS = {
    "max_cost": "max_cost_usd",
    "provder": "provider",
    "max_price_usd": "max_price_usd_per_h",
    "plan_onyl": "plan_only",
    "dettach": "detach",
    "pod_max_cost": "pod_max_cost_usd",
    "escrow_grace": "escrow_grace_s",
}


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_misspelt_input_is_refused_with_the_one_that_was_meant(typo: str, meant: str) -> None:
    (refusal,) = refusals(["job", typo], known_inputs(ROOT, "train"))
    assert f"the variable {typo} " in refusal
    assert f"did you mean {meant}?" in refusal


def test_a_name_that_is_like_nothing_is_refused_with_where_it_may_be_read() -> None:
    (refusal,) = refusals(["zzyzx"], known_inputs(ROOT, "train"))
    assert "zzyzx" in refusal
    assert "group_vars/" in refusal


def test_every_input_of_the_readme_is_known_to_train() -> None:
    table = (ROOT / "README.md").read_text().partition("| input | meaning |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`([a-z_]+)=", table))
    assert {"job", "max_cost_usd", "max_cost_usd_account", "detach_to"} <= documented
    assert refusals(documented, known_inputs(ROOT, "train")) == []


@pytest.mark.parametrize("playbook", INPUTS)
def test_a_playbook_checks_first_and_knows_what_it_reads(playbook: str) -> None:
    text = (ROOT / "playbooks" / f"{playbook}.yml").read_text()
    assert f"pennypod_playbook: {playbook}\n" in text
    first = yaml.safe_load(text)[0]["tasks"][0]
    assert first["ansible.builtin.import_tasks"] == "tasks/check_inputs.yml", "nothing may come before the check"
    read = set(re.findall(r"(?<![.\w])([a-z_]+) \| default\(", text))
    assert refusals(read, known_inputs(ROOT, playbook)) == []


def test_a_place_to_push_to_that_is_none_is_found_before_the_bake() -> None:
    assert registry_refusals("bake", {"registry": "ghcr.io/me/golden"}) == []
    (refusal,) = registry_refusals("bake", {"registry": "ghcr.io/me/golden:v1"})
    assert "HOST/REPO" in refusal
    assert refusals(["registry"], known_inputs(ROOT, "bake")) == []
    assert refusals(["registry"], known_inputs(ROOT, "train")) != []


def test_an_input_of_another_playbook_is_refused() -> None:
    # run= names a run to go on with; train.yml would rent a pod for a new one.
    assert refusals(["run"], known_inputs(ROOT, "train")) != []
    assert refusals(["run", "cancel"], known_inputs(ROOT, "finish")) == []


def test_names_that_ansible_and_pennypod_keep_for_themselves_are_let_through() -> None:
    assert refusals(["ansible_user", "pennypod_root"], Known(frozenset())) == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "group_vars", tmp_path / "group_vars")
    (tmp_path / "roles" / "own" / "defaults").mkdir(parents=True)
    return tmp_path


def test_a_job_may_have_variables_of_its_own(repository: Path) -> None:
    assert refusals(["my_epochs"], known_inputs(repository, "train")) != []
    job = repository / "group_vars" / "job_own.yml"
    job.write_text("training_command: train {{ my_epochs | default(3) }} # as my_comment says\n")
    assert refusals(["my_epochs"], known_inputs(repository, "train")) == []
    assert refusals(["my_comment"], known_inputs(repository, "train")) != []


def test_what_a_roles_defaults_read_is_known_and_their_words_are_not(repository: Path) -> None:
    defaults = repository / "roles" / "own" / "defaults" / "main.yml"
    defaults.write_text("own_list: [{deep: \"{{ wished | default('nothing') }}\"}]\nown_broken: '{{ oops'\n")
    assert refusals(["own_list", "wished"], known_inputs(repository, "train")) == []
    assert len(refusals(["nothing", "oops"], known_inputs(repository, "train"))) == 2


def test_a_role_that_cannot_be_read_is_said(repository: Path) -> None:
    (repository / "roles" / "own" / "defaults" / "main.yml").write_text("a: [")
    with pytest.raises(InputError, match="cannot be read"):
        known_inputs(repository, "train")


@pytest.mark.parametrize("name", AMOUNTS)
@pytest.mark.parametrize("value", ["abc", "nan", "inf", -1, "-0.5", "", True, [1]])
def test_an_amount_that_is_none_is_said_in_plain_words(name: str, value: object) -> None:
    (refusal,) = amount_refusals({name: value, "job": "demo"})
    assert refusal.startswith(f"{name} is {value}: give a number of ")
    assert "class" not in refusal


def test_amounts_null_and_templates_are_let_through() -> None:
    assert amount_refusals({"max_cost_usd": "0.5", "max_price_usd_per_h": None, "escrow_grace_s": "{{ 2 * 30 }}"}) == []
    assert amount_refusals({"max_cost_usd": 0}) == []
