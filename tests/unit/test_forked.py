"""A module runs in a fork of Ansible's worker: as a program of its own would, and with the same result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from workspace import wait_until

ROOT = Path(__file__).parents[2]


def told(work: str, wait: str = "print(run_in_fork(work))", **options: Any) -> str:
    """What a program says that runs `work` in a fork of itself: a fork is for processes without threads."""
    head = "import os, signal, sys\nfrom pennypod.forked import run_in_fork\n"
    program = f"{head}def work():\n{textwrap.indent(work, '    ')}\n"
    done = subprocess.run(
        [sys.executable, "-c", program + wait], capture_output=True, text=True, check=True, timeout=60, **options
    )
    return done.stdout.strip()


def test_what_it_writes_and_how_it_ends_come_back() -> None:
    assert told("print('out'); print('err', file=sys.stderr); sys.exit(3)") == (
        "Done(rc=3, stdout='out\\n', stderr='err\\n')"
    )
    assert told("os.write(1, b'raw')") == "Done(rc=0, stdout='raw', stderr='')"
    assert told("sys.exit('why')").startswith("Done(rc=1,")


def test_a_fault_is_a_traceback_and_not_the_end_of_the_parent() -> None:
    said = told("raise ValueError('a fault')")
    assert said.startswith("Done(rc=1, stdout='', stderr='Traceback")
    assert "ValueError: a fault" in said


def test_it_may_die_of_a_signal() -> None:
    assert told("os.kill(os.getpid(), signal.SIGKILL)") == "Done(rc=-9, stdout='', stderr='')"


def test_more_than_a_pipe_holds_on_both_streams() -> None:
    said = told(
        "sys.stdout.write('o' * 3_000_000); sys.stderr.write('e' * 3_000_000)",
        "d = run_in_fork(work); print(len(d.stdout), len(d.stderr))",
    )
    assert said == "3000000 3000000"


def test_nothing_that_it_does_to_itself_lasts() -> None:
    wait = "run_in_fork(work); print(os.getcwd() != '/', 'X' in os.environ, signal.getsignal(signal.SIGTERM))"
    assert told(
        "os.chdir('/'); os.environ['X'] = '1'; signal.signal(signal.SIGTERM, signal.SIG_IGN)", wait, cwd=ROOT
    ) == (f"True False {signal.Handlers.SIG_DFL}")


def test_it_is_ended_with_whoever_waits_for_it(tmp_path: Path) -> None:
    wait = textwrap.dedent(
        """
        class Enough(Exception): pass
        def enough(*_): raise Enough
        signal.signal(signal.SIGALRM, enough)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            run_in_fork(work)
        except Enough:
            print("enough")
        """
    )
    said = told(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); signal.pause()", wait)
    assert said == "enough"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# --- the action -----------------------------------------------------------------------------------------------------

TASKS = {
    "answers": {"gpu_pod_info": {"run": "demo-1201-abcde"}},
    "refuses": {
        "run_ledger": {"state": "opened", "jobs": ["nosuch"], "jobs_dir": "{{ empty }}", "artifacts_root": "x"}
    },
    "lacks an option": {"gpu_pod": {"state": "absent"}},
    "warns": {"gpu_offer_info": {"run": "demo-1201-abcde", "provider": "local", "gpu": ["CPU"]}},
}


def environment(home: Path) -> dict[str, str]:
    """What Ansible needs to play with this checkout's modules, in a state folder of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENNYPOD_", "VAST_", "RUNPOD_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return kept | {"PENNYPOD_HOME": str(home), "ANSIBLE_CONFIG": f"{ROOT}/ansible.cfg", "PATH": path}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every task by Ansible's own way (an environment of its own asks for it) and by ours."""
    folder = tmp_path_factory.mktemp("play")
    (folder / "empty").mkdir()
    tasks: list[dict[str, Any]] = []
    for name, task in TASKS.items():
        for way in ("ansible", "fork"):
            own = {"environment": {"WAY": way}} if way == "ansible" else {}
            tasks.append({"name": f"{name} {way}", "ignore_errors": True, "register": "found", **task, **own})
            keep = {"content": "{{ found | to_json }}", "dest": f"{folder}/{name} {way}.json"}
            tasks.append({"name": "keep it", "ansible.builtin.copy": keep})
    play = [{"hosts": "localhost", "gather_facts": False, "vars": {"empty": f"{folder}/empty"}, "tasks": tasks}]
    (folder / "play.yml").write_text(json.dumps(play))
    done = subprocess.run(
        ["ansible-playbook", "-vvv", "-i", f"{ROOT}/hosts.yml", f"{folder}/play.yml"],
        env=environment(folder / "home"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return found | {"said": done.stdout}


@pytest.mark.parametrize("name", TASKS)
def test_the_result_is_that_of_the_module_run_by_ansible(results: dict[str, Any], name: str) -> None:
    assert results[f"{name} fork"] == results[f"{name} ansible"]


def test_only_ansibles_own_way_sends_the_module_to_a_python_of_its_own(results: dict[str, Any]) -> None:
    said = results["said"]
    assert said.count("Using module file") == len(TASKS) + said.count("modules/copy.py") + said.count("modules/stat.py")


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "library").glob("*.py")))
def test_every_module_has_its_action(module: str) -> None:
    assert f'load_module("{module}")' in (ROOT / "action_plugins" / f"{module}.py").read_text()


def test_a_worker_whose_ansible_was_killed_ends_with_its_module(tmp_path: Path) -> None:
    """Nobody reads its result any more, and one that is longer than a pipe would be offered for ever."""
    engine = tmp_path / "podman"
    engine.write_text(f"#!/bin/sh\necho >{tmp_path}/asked\nsleep 2\nexit 1\n")
    engine.chmod(0o755)
    tasks = [{"name": "a long result", "gpu_pod_info": {"provider": "local", "run": "x" * 200_000}}]
    (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    with subprocess.Popen(
        ["ansible-playbook", "-i", f"{ROOT}/hosts.yml", f"{tmp_path}/play.yml"],
        env=environment(tmp_path / "home") | {"PENNYPOD_ENGINE": str(engine)},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as ansible:
        wait_until((tmp_path / "asked").exists, 30, "the module is at work")
        left = psutil.Process(ansible.pid).children(recursive=True)
        ansible.kill()
    assert len(left) >= 3, "the worker, its fork, and what that has started"
    _, alive = psutil.wait_procs(left, timeout=15)
    for process in alive:
        process.kill()
    assert alive == []
