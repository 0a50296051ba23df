"""The modules run_training and run_weights, and the roles around them, against a real sshd and a real tmux."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from loopback_sshd import LoopbackSshd
from pennypod.ledger import Ledger, RunRecord, open_ledger
from pennypod.settings import Settings, load_settings
from pennypod.store import Checkpoints, open_bucket
from pennypod.store.embedded import EmbeddedStore
from workspace import wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN = "tiny-1201-aaaaa"
SAVE = 'python3 -c \'import sys, zipfile; zipfile.ZipFile(sys.argv[1], "w").writestr("data.pkl", "w" * 999)\''
TRAIN = f"mkdir -p runs/x/weights; echo epoch 1/1; {SAVE} runs/x/weights/best.pt; echo a,b > runs/x/results.csv"
Result = dict[str, Any]


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "library" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Bench:
    """A run in a ledger of its own and a pod behind the loopback sshd."""

    sshd: LoopbackSshd
    settings: Settings
    ledger: Ledger
    home: Path
    artifacts: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def connection(self) -> dict[str, Any]:
        target = self.sshd.target()
        return {
            "run": RUN,
            "host": target.host,
            "port": target.port,
            "user": target.user,
            "key_file": str(target.key_file),
            "known_hosts": str(target.known_hosts),
            "pod_home": str(self.home),
            "artifacts_dir": str(self.artifacts),
        }

    def call(self, name: str, **options: Any) -> Result:
        """Run a module in this process as Ansible would; its answer with `failed` on every path."""
        with patch_module_args({**self.connection, **options}), pytest.raises(SystemExit):
            load_module(name).main()
        answer: Result = json.loads(self.capsys.readouterr().out)
        return {"failed": False, **answer}

    def train(self, command: str = TRAIN, **options: Any) -> Result:
        return self.call("run_training", command=command, poll_s=0.5, **options)

    def fetch(self, **options: Any) -> Result:
        return self.call("run_weights", **options)


@pytest.fixture
def bench(
    sshd: LoopbackSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    monkeypatch.setenv("PENNYPOD_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PENNYPOD_DATABASE_URL", raising=False)
    # Control sockets of its own, in a place with a short name.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sshd.tmux_dir))
    settings = load_settings()
    ledger = open_ledger(settings)
    artifacts = tmp_path / "artifacts"
    ledger.open_run(
        RunRecord(run=RUN, job="tiny", controller="test", created=time.time(), artifacts_dir=str(artifacts))
    )
    return Bench(sshd, settings, ledger, tmp_path / "pod", artifacts, capsys)


def test_train_and_fetch_once_and_only_once(bench: Bench) -> None:
    predicted = bench.train(_ansible_check_mode=True)
    assert (predicted["changed"], predicted["state"]) == (True, "absent")
    assert not bench.home.exists(), "check mode touches nothing"
    trained = bench.train(_ansible_diff=True)
    assert (trained["changed"], trained["exit_code"], trained["epochs"]) == (True, 0, 1)
    assert trained["diff"]["after"]["command"] == TRAIN
    assert Path(trained["log"]).read_text() == "epoch 1/1\n"
    again = bench.train()
    assert (again["changed"], again["exit_code"], again["state"]) == (False, 0, "finished")
    assert set(again) == set(trained), "the same keys on every path"
    assert bench.train(_ansible_check_mode=True)["changed"] is False

    options = {"extra": ["**/results.csv", "**/none.txt"]}
    would = bench.fetch(**options, _ansible_check_mode=True)
    assert would["changed"] is True
    assert not (bench.artifacts / "weights").exists()
    fetched = bench.fetch(**options)
    weights = fetched["weights"]
    assert (fetched["changed"], weights["early"]) == (True, False)
    assert weights["remote"] == str(bench.home / "out/runs/x/weights/best.pt")
    assert Path(weights["path"]).read_bytes() == Path(weights["remote"]).read_bytes()
    assert [artifact["kind"] for artifact in fetched["artifacts"]] == ["weights", "log", "extra"]
    assert bench.fetch(**options)["changed"] is False


def test_state_started_does_not_wait(bench: Bench) -> None:
    started = bench.train("sleep 300", state="started")
    assert (started["changed"], started["state"], started["exit_code"]) == (True, "started", None)
    assert bench.train("sleep 300", state="started")["state"] == "running"


def test_failed_training_says_why_and_saves_its_best_checkpoint(bench: Bench) -> None:
    failed = bench.train(f"{TRAIN}; echo 'CUDA out of memory'; exit 1", weights_patterns=["**/best.pt"])
    assert failed["failed"] is True
    failure = failed["failure"]
    assert failure["code"] == "training_failed"
    assert (failure["details"]["reason"], failure["details"]["exit_code"]) == ("exit", 1)
    assert "CUDA out of memory" in failed["msg"]
    assert Path(failure["details"]["salvaged"]["path"]).stat().st_size == failure["details"]["salvaged"]["bytes"]
    assert failure["details"]["salvaged"]["path"] in failed["msg"]


def test_failed_training_without_a_checkpoint_keeps_its_own_reason(bench: Bench) -> None:
    failed = bench.train("exit 1", weights_patterns=["**/best.pt"])
    assert failed["failure"]["code"] == "training_failed"
    assert failed["failure"]["details"]["salvaged"] is None


def test_trainer_without_weights_is_its_own_error_and_the_log_is_home(bench: Bench) -> None:
    bench.train("echo done")
    failed = bench.fetch()
    assert failed["failure"]["code"] == "no_weights"
    assert [artifact["kind"] for artifact in failed["failure"]["details"]["artifacts"]] == ["log"]


def test_early_checkpoint_stands_in_when_the_pod_has_no_whole_one_any_more(bench: Bench) -> None:
    wait = "while [ ! -e home ]; do sleep 0.02; done; echo torn > runs/x/weights/best.pt"
    # The trainer goes on when the early copy is here; it then spoils its own checkpoint.
    link = f"ln -s {bench.artifacts}/weights/checkpoint.json home"
    trained = bench.train(
        f"{TRAIN}; {link}; {wait}", weights_patterns=["**/best.pt"], weights_early=True, weights_every_s=0
    )
    assert [artifact["kind"] for artifact in trained["artifacts"]] == ["weights"]
    fetched = bench.fetch()
    assert fetched["weights"]["early"] is True
    assert "during the training" in fetched["problems"][0]
    assert fetched["weights"]["sha256"] == trained["artifacts"][0]["sha256"]


def test_time_limits_are_kept_and_the_pod_deadline_leaves_a_reserve(bench: Bench) -> None:
    bench.ledger.set_plan(RUN, deadline=time.time() + 61, worst_case_micros=1)
    failed = bench.train("echo training; exec sleep 300", wallclock_s=200, reserve_s=60)
    assert failed["failure"]["details"]["reason"] == "deadline"


def test_fenced_run_is_left_alone(bench: Bench) -> None:
    bench.ledger.fence(RUN, "the guard took over")
    assert bench.train()["failure"]["code"] == "fenced"
    assert bench.fetch()["failure"]["code"] == "fenced"
    assert not bench.home.exists()


def test_run_that_no_ledger_knows_can_be_trained_by_hand(bench: Bench) -> None:
    assert bench.train(run="tiny-1201-bbbbb")["exit_code"] == 0


def test_pod_out_of_reach_is_an_ssh_error(bench: Bench) -> None:
    bench.sshd.vanish()
    assert bench.train()["failure"]["code"] == "ssh"
    assert bench.fetch()["failure"]["code"] == "ssh"


PLAY = """\
- hosts: runs
  gather_facts: false
  serial: 1  # both are on one machine here, whose tmux holds one session of that name
  tasks:
    - block:
        - import_role:
            name: training
        - import_role:
            name: weights
      rescue:
        - set_fact:
            why: "{{ ansible_failed_result.msg }}"
    - copy:
        content: "{{ {'why': why | default(''), 'weights': weights_result.weights | default({})} | to_json }}"
        dest: "{{ pennypod_artifacts_dir }}/told.json"
        mode: "0600"
      delegate_to: localhost
"""


def test_roles_train_fetch_and_write_down_what_is_home(bench: Bench, tmp_path: Path) -> None:
    """Smoke arguments reach the trainer, weights and log reach the ledger, and a failure is one line."""
    hosts = {}
    for run, argument in ((RUN, "0"), ("tiny-1201-ccccc", "1")):
        artifacts = tmp_path / run
        if run != RUN:
            bench.ledger.open_run(
                RunRecord(run=run, job="tiny", controller="test", created=time.time(), artifacts_dir=str(artifacts))
            )
        connection = bench.connection
        hosts[run] = {
            "pennypod_run": run,
            "pennypod_artifacts_dir": str(bench.artifacts if run == RUN else artifacts),
            "ansible_host": connection["host"],
            "ansible_port": connection["port"],
            "ansible_user": connection["user"],
            "pennypod_key_file": connection["key_file"],
            "pennypod_known_hosts": connection["known_hosts"],
            "training_pod_home": str(tmp_path / f"pod-{argument}"),
            "weights_pod_home": str(tmp_path / f"pod-{argument}"),
            "training_command": f"{TRAIN}; end() {{ echo args $*; exit $1; }}; end {argument}",
            "training_smoke_args": "--smoke",
            "pod_smoke_minutes": 1,
            "weights_extra": ["**/results.csv"],
        }
    localhost = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(json.dumps({"all": {"hosts": {"localhost": localhost}}, "runs": {"hosts": hosts}}))
    play = tmp_path / "play.yml"
    play.write_text(PLAY)
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", inventory, "-e", "smoke=true", play],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "default"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads((Path(host["pennypod_artifacts_dir"]) / "told.json").read_text()) for host in hosts.values()]
    assert told[0]["why"] == ""
    assert Path(told[0]["weights"]["path"]).exists()
    assert (bench.artifacts / "train.log").read_text() == "epoch 1/1\nargs 0 --smoke\n"
    kinds = {record.path: record.kind for record in bench.ledger.artifacts(RUN)}
    assert kinds == {"weights/best.pt": "weights", "train.log": "log", "extra/runs/x/results.csv": "extra"}
    assert "exit code 1" in told[1]["why"]
    assert "args 1 --smoke" in told[1]["why"]
    assert [record.path for record in bench.ledger.artifacts("tiny-1201-ccccc")] == ["weights/best.pt"]


KEEP = (
    "mkdir -p x; for e in $(seq {first} {last}); do echo state $e > x/last.pt; echo epoch $e/6;"
    ' $PENNYPOD_CHECKPOINT_HOOK $e "$PWD/x" last.pt; done; {then}'
)


def kept_epoch(checkpoints: Checkpoints) -> int | None:
    newest = checkpoints.newest()
    return newest.marker.epoch if newest is not None else None


def test_a_training_goes_on_from_the_bucket_on_another_pod_and_no_key_leaves_home(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("boto3", reason="the store extra is not installed")
    with EmbeddedStore(bench.settings.home) as server:
        checkpoints = Checkpoints(open_bucket(server.config), RUN)
        failed = bench.train(KEEP.format(first=1, last=3, then="exit 1"), checkpoint_store=True)
        assert failed["failure"]["details"]["exit_code"] == 1
        wait_until(lambda: kept_epoch(checkpoints) == 3, 30, "epoch 3 is kept though the training has failed")
        bench.home = tmp_path / "pod2"
        command = 'echo from $(cat "$PENNYPOD_RESUME_FROM/last.pt"); ' + KEEP.format(first=4, last=6, then="true")
        trained = bench.train(command, checkpoint_store=True)
        assert (trained["exit_code"], trained["resumed_epoch"], trained["epoch"]) == (0, 3, 6)
        assert "from state 3" in Path(trained["log"]).read_text()
        wait_until(lambda: kept_epoch(checkpoints) == 6, 30, "epoch 6 is kept")

        again = bench.train(command, checkpoint_store=True)
        assert (again["changed"], again["resumed_epoch"]) == (False, None), "what has trained is not begun again"
        store = bench.settings.home / "store"
        for path in tmp_path.rglob("*"):
            if path.is_file() and not path.is_relative_to(store):
                content = path.read_bytes()
                assert server.config.secret_key.encode() not in content, path
                signed = b"X-Amz-Signature" in content
                assert not signed or path.name == "urls.json", f"{path} has a URL that lets somebody in"


def test_without_a_bucket_a_training_is_none_the_worse(bench: Bench) -> None:
    trained = bench.train("set -e; $PENNYPOD_CHECKPOINT_HOOK 1 . last; echo epoch 1/1", checkpoint_store=True)
    assert (trained["exit_code"], trained["resumed_epoch"], trained["epoch"]) == (0, None, 1)
    assert "no object store" in str(trained["warnings"])
