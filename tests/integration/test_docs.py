"""Every command that the documents show is run here, word for word, or is what runs these tests."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from workspace import REPOSITORY, Workspace

DOCUMENTS = ["README.md", "docs/golden.md", "docs/local-pods.md"]
PROGRAMS = ("ansible", "pennypod", "make", "molecule")
# Run by every `make test`, by hand before a release, or only with gigabytes at hand (tests marked heavy).
ELSEWHERE = {
    "make test": "this very run",
    "ansible <run> -m ansible.builtin.ping": "test_billing_view.py, on a pod that is up",
    "pennypod ssh <run> --print": "test_billing_view.py, on a pod that is up",
    "pennypod sentinel --interval 5m": "tests/contract/test_ring_two.py, where it ends no other test's pods",
    "pennypod serve": "tests/unit/test_webhooks.py and tests/integration/test_serve.py: it serves until it is stopped",
    "make setup": "the first step of make test",
    "ansible-playbook playbooks/resume.yml -e run=<run>": "test_resume.py",
    "ansible-playbook train.yml -e job=demo -e detach=true": "test_detach.py, with a cron of its own",
    "ansible-playbook playbooks/finish.yml -e run=<run>": "test_detach.py",
    "ansible-playbook playbooks/control_node.yml": "tests/molecule/control_node, on a machine of its own",
    "ansible-playbook -i HOST, playbooks/serve.yml": "tests/molecule/serve, on a machine of its own",
    "ansible-playbook -i HOST, -u root playbooks/gpu_host.yml": "tests/molecule/gpu_host, on a machine of its own",
    "pennypod simulate --pods container --port 8400 &": "tests/contract/test_train_on_simulator.py",
    "ansible-playbook train.yml -e job=demo -e provider=auto": "tests/contract/test_train_on_simulator.py",
    "make live PROVIDER=vast MAX_USD=0.25": "tests/contract/test_live.py, with a simulator in the service's part",
    "ansible-playbook bake.yml -e job=demo": "test_golden.py, with a job of its own",
    "ansible-playbook bake.yml -e job=demo -e registry=HOST/REPO": "test_golden_registry.py, with its own registry",
    "ansible-playbook bake.yml -e job=demo -e provider=vast -e registry=HOST/REPO": "test_golden_snapshot.py",
    "pennypod images push golden-demo-v1 HOST/REPO": "test_golden_registry.py",
    "ansible-playbook train.yml -e job=demo -e provider=vast": "test_golden_registry.py, on the simulator",
    "ansible-playbook train.yml -e job=fdi -e dataset=PATH": "test_train.py, heavy",
}
# Appended so that a training is two epochs; everything else is as printed.
SHORT = " -e smoke=true"


def commands(document: str) -> Iterator[str]:
    """The command lines in the document's fenced blocks, comments cut off."""
    text = (REPOSITORY / document).read_text("utf-8")
    for block in re.findall(r"^```(?:console|sh|shell)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            command = re.sub(r"\s+# .*", "", line.removeprefix("$ ")).strip()
            if re.match(rf"({'|'.join(PROGRAMS)})[\w-]*( |$)", command):
                yield command


def shown() -> list[str]:
    return sorted({command for document in DOCUMENTS for command in commands(document)})


pytestmark = [pytest.mark.pod, pytest.mark.xdist_group("docs")]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """One workspace for all commands, with a finished run in its ledger and a pod that is still up."""
    workspace = Workspace(tmp_path_factory.mktemp("docs"))
    done = workspace.play(job="tiny", tiny_epochs=1)
    assert done.returncode == 0, done.stdout + done.stderr
    return workspace


def test_the_documents_show_commands() -> None:
    assert len(shown()) >= 8


def cases() -> list[object]:
    """All commands that are run here; the whole trainings among them take minutes."""
    long = pytest.mark.heavy
    run_here = [command for command in shown() if command not in ELSEWHERE]
    return [pytest.param(c, marks=long) if c.startswith(("make demo", "ansible-playbook")) else c for c in run_here]


@pytest.mark.parametrize("command", cases())
def test_a_documented_command_works(workspace: Workspace, command: str, tmp_path: Path) -> None:
    (run,) = [document["run"] for document in workspace.documents() if document["job"] == "tiny"]
    line = command.replace("<run>", run).replace("RUN", run)
    if line.startswith("ansible-playbook"):
        line += SHORT
    where = workspace.root
    if line.startswith("make"):
        where = REPOSITORY
        line += f" ARGS='{SHORT.strip()} -e artifacts_dir={tmp_path}'" if line == "make demo" else ""
    done = subprocess.run(
        shlex.split(line), cwd=where, env=workspace.environment, capture_output=True, text=True, timeout=290
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
