"""The orchestrator's playbooks through the real ansible-runner: what it leaves on disk has none of our keys."""

from __future__ import annotations

from pathlib import Path

import canaries
import pytest
from pennypod.orchestrator.playbooks import AnsiblePlaybooks
from pennypod.settings import Settings

# Fails when what was written down of its command is still there while it runs.
PLAY = """\
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.find: {paths: "HOME", recurse: true, patterns: command}
      register: found
    - ansible.builtin.assert: {that: found.matched == 0}
    - ansible.builtin.debug: {msg: played}
"""


def test_a_playbook_leaves_no_key_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (tmp_path / "train.yml").write_text(PLAY.replace("HOME", str(home)))
    (tmp_path / "ansible.cfg").touch()
    key = canaries.new_key("vast")
    monkeypatch.setenv("VAST_API_KEY", key)
    settings = Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}")
    played = AnsiblePlaybooks(settings, tmp_path).launch("tiny-1201-aaaaa", {"job": "tiny"})
    (output,) = home.rglob("stdout")
    assert (played.rc, "played" in output.read_text()) == (0, True), output.read_text()
    assert canaries.in_files([key], [tmp_path]) == []
