"""What ansible-playbook prints with our callback: whole playbooks, no pod; progress comes from the real event files."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from pennypod.ledger import Outcome, RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.offer import Offer
from pennypod.settings import Settings, load_settings
from terminal import Screen
from workspace import wait_until

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = str(Path(sys.executable).parent / "ansible-playbook")
RUNS = ("demo-1201-aaaaa", "demo-1201-bbbbb")

# The pretended runs are not reached over SSH; everything happens on this machine.
HEAD = """\
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.add_host: {name: "{{ item }}", groups: runs}
      loop: [demo-1201-aaaaa, demo-1201-bbbbb]
- hosts: runs
  gather_facts: false
  strategy: ansible.builtin.free
  tasks:
"""
EMIT = """\
import sys, time
from pennypod.events import Events
from pennypod.settings import load_settings

run, pause = sys.argv[1], float(sys.argv[2])
events = Events(load_settings().run_dir(run), run)
events.emit("rent", "asking for CPU", usd_per_h=36.0)
time.sleep(pause)
events.emit("rent", "pod abc rented", pod_id="abc")
for number in range(1, 41):
    events.emit("training", f"loss {1 / number:.2f}", epoch=number, epochs=40)
    time.sleep(pause / 10)
events.emit("teardown", "pod abc proven gone", pod_id="abc", gone=True, usd=0.5)
"""


class Stage:
    """A folder with a playbook, and a ledger that knows two runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings: Settings = load_settings({"PENNYPOD_HOME": str(root / "home")})
        self.ledger = open_ledger(self.settings)
        for run in RUNS:
            self.ledger.open_run(RunRecord(run, "demo", "1:1", time.time(), str(root / "artifacts" / run)))
        (root / "emit.py").write_text(EMIT)

    def prepare(self, playbook: str) -> list[str]:
        path = self.root / "play.yml"
        path.write_text(playbook)
        return [PLAYBOOK, "-i", str(ROOT / "hosts.yml"), str(path)]

    def environment(self, **more: str) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE", "NO_COLOR"))}
        env |= {"PENNYPOD_HOME": str(self.settings.home), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
        return env | {"ANSIBLE_ROLES_PATH": str(self.root / "roles"), "ANSIBLE_LOCALHOST_WARNING": "0"} | more

    def play(self, playbook: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prepare(playbook), *args],
            env=self.environment(**environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def play_on_a_terminal(self, playbook: str, *args: str, **environ: str) -> str:
        """Everything that a terminal would have got, escape sequences included."""
        main, side = pty.openpty()
        process = subprocess.Popen(
            [*self.prepare(playbook), *args],
            env=self.environment(TERM="xterm-256color", COLUMNS="100") | environ,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
        )
        os.close(side)
        received = b""
        deadline = time.monotonic() + 120
        try:
            while time.monotonic() < deadline:
                if select.select([main], [], [], 1)[0]:
                    try:
                        received += os.read(main, 65536)
                    except OSError:  # the other side is closed
                        break
            else:
                process.kill()
                pytest.fail(f"still running: {received.decode()}")
        finally:
            os.close(main)
            process.wait()
        return received.decode()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def emit_task(root: Path, pause: float) -> str:
    command = f"{{{{ ansible_playbook_python }}}} {root}/emit.py {{{{ inventory_hostname }}}} {pause}"
    return f"    - ansible.builtin.command: '{command}'\n      delegate_to: localhost\n"


def test_a_quiet_playbook_prints_nothing_but_what_it_says(stage: Stage) -> None:
    done = stage.play(
        "- hosts: localhost\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.debug: {msg: hello}\n"
        "    - ansible.builtin.debug: {msg: [two, lines]}\n"
        "    - ansible.builtin.debug: {msg: loud, verbosity: 1}\n"
        "    - ansible.builtin.command: 'true'\n"
        "    - ansible.builtin.command: 'false'\n      ignore_errors: true\n"
        "    - ansible.builtin.debug: {msg: 'item {{ item }}'}\n      loop: [1, 2]\n"
        "    - ansible.builtin.debug: {msg: never}\n      when: false\n"
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["hello", "two", "lines", "item 1", "item 2"]
    assert done.stderr == ""


def test_lines_of_every_run_thinned_and_the_summary_at_the_end(stage: Stage) -> None:
    said = "    - ansible.builtin.debug: {msg: [whose, word]}\n"
    done = stage.play(HEAD + emit_task(stage.root, 1.0) + said)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for run in RUNS:
        for word in ("whose", "word"):
            lines.remove(f"{run}  {word}")
        own = [line for line in lines if line.startswith(f"{run}  ")]
        texts = [line.split("  ")[-1].strip() for line in own]
        assert texts[:2] == ["asking for CPU", "pod abc rented"]
        assert texts[-1] == "pod abc proven gone"
        # 40 epochs in about four seconds, at most one line in five seconds, and the last one in any case.
        epochs = [text for text in texts if text.startswith("epoch")]
        assert 2 <= len(epochs) <= 4
        assert epochs[-1] == "epoch 40/40: loss 0.03"
        assert f"{run}: running" in lines
    assert lines[-1] == "pods still billing: 0"
    assert "\x1b" not in done.stdout
    assert "PLAY RECAP" not in done.stdout


def test_what_still_bills_is_the_last_line_and_counts_over_all_runs(stage: Stage) -> None:
    now = time.time()
    offer = Offer("local", "o", "m", "CPU", 1, 200_000, 1)
    stage.ledger.open_attempt(Lease(RUNS[0], 1, int(now) + 600, "aaaaa"), offer, renter="1:1", at=now)
    stage.ledger.close_run(RUNS[1], Outcome.SUCCEEDED, "done", now)
    done = stage.play(HEAD.replace(", demo-1201-bbbbb", "") + emit_task(stage.root, 0.1))
    assert done.stdout.splitlines()[-1] == "pods still billing: 1"
    assert RUNS[0] in done.stdout.splitlines()[-2]
    assert RUNS[1] not in done.stdout


ROLE_SPEC = "argument_specs: {main: {options: {r_a: {type: int, required: true}}}}\n"
FAILING = {
    "ansible.builtin.command: \"sh -c 'echo 1 >&2; echo two >&2; exit 3'\"": "Do it: sh ended with exit status 3: two",
    "ansible.builtin.fail: {msg: out of luck}": "out of luck",
    'ansible.builtin.debug: {msg: "{{ nope }}"}': "Do it: Error while resolving value for 'msg': 'nope' is undefined",
    "ansible.builtin.include_role: {name: r}": "role r: missing required arguments: r_a",
    "run_ledger: {state: opened, jobs: [Loud], jobs_dir: /nowhere, artifacts_root: /tmp}": "job name 'Loud'",
    "ansible.builtin.assert: {that: 1 == 2, fail_msg: no sums}": "no sums",
}


def test_a_failure_is_exactly_one_line_on_stderr(stage: Stage) -> None:
    role = stage.root / "roles" / "r"
    (role / "meta").mkdir(parents=True)
    (role / "tasks").mkdir()
    (role / "meta/argument_specs.yml").write_text(ROLE_SPEC)
    (role / "tasks/main.yml").write_text("- ansible.builtin.debug: {msg: in}\n")
    blocks = "".join(
        f"    - block:\n        - name: Do it\n          {task}\n"
        "      rescue:\n        - ansible.builtin.debug: {msg: rescued}\n"
        for task in FAILING
    )
    done = stage.play(f"- hosts: localhost\n  gather_facts: false\n  tasks:\n{blocks}")
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["rescued"] * len(FAILING)
    lines = done.stderr.splitlines()
    assert [line.startswith(f"error: {told}") for line, told in zip(lines, FAILING.values(), strict=True)] == [
        True for _ in FAILING
    ], lines
    assert lines[4].endswith(" [input]")


def test_a_failure_that_a_later_task_repeats_is_told_once(stage: Stage) -> None:
    done = stage.play(
        "- hosts: localhost\n  gather_facts: false\n  tasks:\n    - block:\n"
        "        - ansible.builtin.fail: {msg: out of luck}\n      always:\n"
        "        - ansible.builtin.fail: {msg: out of luck}\n"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: out of luck"]


def test_an_unreachable_host_is_one_line(stage: Stage) -> None:
    done = stage.play(
        "- hosts: localhost\n  gather_facts: false\n  tasks:\n    - ansible.builtin.ping:\n"
        "      delegate_to: 127.0.0.1\n      vars: {ansible_connection: ssh, ansible_port: 9}\n"
    )
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: localhost cannot be reached: ")
    assert line.endswith(" [unreachable]")


def test_warnings_stay_visible(stage: Stage) -> None:
    done = stage.play(
        "- hosts: localhost\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.command: 'true'\n      loop: [1]\n      when: \"{{ true }}\"\n"
        "    - ansible.builtin.file: {path: /nonexistent/x, state: absent, recurse: false, force: true, owner: 1}\n",
    )
    assert "[WARNING]" in done.stderr


def test_with_v_it_is_the_default_callback_with_live_lines_and_summary(stage: Stage) -> None:
    done = stage.play(HEAD + emit_task(stage.root, 0.3), "-v")
    for part in ("PLAY [runs]", "TASK [ansible.builtin.command]", "changed: [", "PLAY RECAP", "pod abc rented"):
        assert part in done.stdout, part
    assert done.stdout.splitlines()[-1] == "pods still billing: 0"


def test_on_a_terminal_progress_updates_in_place(stage: Stage) -> None:
    text = stage.play_on_a_terminal(HEAD + emit_task(stage.root, 1.0))
    # Far more epochs passed by than plain lines would show, and none of them is left on the screen at the end.
    assert len(set(re.findall(r"epoch \d+/40", text))) > 8
    screen = Screen()
    screen.write(text)
    assert "epoch" not in "\n".join(screen.text)
    for run in RUNS:
        own = [line.split("  ")[-1].strip() for line in screen.text if line.startswith(f"{run}  ")]
        assert own == ["asking for CPU", "pod abc rented", "pod abc proven gone"]
    assert screen.text[-1] == "pods still billing: 0"


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=["dumb", "no color"])
def test_dumb_terminals_and_no_color_are_honoured(stage: Stage, environ: dict[str, str]) -> None:
    text = stage.play_on_a_terminal(HEAD + emit_task(stage.root, 0.2), **environ)
    assert "pod abc rented" in text
    if "TERM" in environ:
        assert "\x1b[J" not in text
        assert "\x1b[1A" not in text
    else:
        assert not re.search(r"\x1b\[[\d;]*m", text)


def test_a_halted_terminal_does_not_halt_the_run(stage: Stage) -> None:
    """Ctrl-S: nothing can be written any more, and the tasks go on all the same."""
    mark = stage.root / "mark"
    playbook = HEAD.replace(", demo-1201-bbbbb", "") + emit_task(stage.root, 1.0)
    playbook += "".join(f"    - ansible.builtin.debug: {{msg: {number}, verbosity: 1}}\n" for number in range(5))
    playbook += f"    - ansible.builtin.file: {{path: {mark}, state: touch}}\n      delegate_to: localhost\n"
    main, side = pty.openpty()
    process = subprocess.Popen(
        stage.prepare(playbook),
        env=stage.environment(TERM="xterm-256color"),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    try:
        wait_until(lambda: select.select([main], [], [], 0)[0] and b"asking" in os.read(main, 65536), 60, "output")
        termios.tcflow(side, termios.TCOOFF)
        wait_until(mark.exists, 60, "the last task")
        termios.tcflow(side, termios.TCOON)
        os.close(side)
        shown = b""
        with contextlib.suppress(OSError):
            while part := os.read(main, 65536):
                shown += part
        assert b"pod abc proven gone" in shown
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_many_forks_beside_the_live_thread_neither_hang_nor_lose_lines(stage: Stage) -> None:
    """Every loop item and host is a fork; the thread reads and writes all the while."""
    playbook = HEAD + (
        emit_task(stage.root, 1.0)
        + "      async: 60\n      poll: 0\n"
        + "".join(f"    - ansible.builtin.debug: {{msg: 'fork {number}', verbosity: 1}}\n" for number in range(60))
        + "    - ansible.builtin.wait_for: {timeout: 4}\n      delegate_to: localhost\n"
    )
    screen = Screen()
    screen.write(stage.play_on_a_terminal(playbook))
    assert sum("pod abc proven gone" in line for line in screen.text) == 2
    assert screen.text[-1] == "pods still billing: 0"


def test_lines_come_while_a_task_still_runs_and_after_ctrl_c_it_is_told_what_may_bill(stage: Stage) -> None:
    now = time.time()
    offer = Offer("local", "o", "m", "CPU", 1, 200_000, 1)
    stage.ledger.open_attempt(Lease(RUNS[0], 1, int(now) + 600, "aaaaa"), offer, renter="1:1", at=now)
    process = subprocess.Popen(
        stage.prepare(HEAD + emit_task(stage.root, 5.0)),
        env=stage.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = ""
    while "asking for CPU" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    process.send_signal(2)
    rest = process.communicate(timeout=30)[0]
    assert process.returncode == 99
    assert rest.splitlines()[-1] == "pods still billing: 1"
