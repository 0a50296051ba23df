"""The supervisor by itself: what it writes, what it forwards, and that nothing but the trainer's end ends it."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pennypod
import psutil
import pytest
from loopback_sshd import wait_until

SCRIPT = Path(pennypod.__file__).parent / "onpod" / "supervise.py"
RUN = "demo-1201-aaaaa"
Start = Callable[..., "Supervised"]


class Supervised:
    """A supervisor as a child process, with its home folder."""

    def __init__(self, home: Path, command: str, **spec: Any) -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        (home / "launch.json").write_text(json.dumps({"run": RUN, "command": command, **spec}))
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, home], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )

    @property
    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.home / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    @property
    def log(self) -> bytes:
        return (self.home / "train.log").read_bytes()

    def wait_for(self, text: str) -> None:
        log = self.home / "train.log"
        wait_until(f"{text!r} in the log", lambda: log.exists() and text in log.read_text())

    def end(self) -> tuple[int, bytes]:
        shown, _ = self.process.communicate(timeout=30)
        return self.process.returncode, shown


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def start(command: str, home: str = "pod", **spec: Any) -> Supervised:
        started.append(Supervised(tmp_path / home, command, **spec))
        return started[-1]

    yield start
    for supervised in started:
        if supervised.process.poll() is None:
            supervised.process.send_signal(signal.SIGTERM)
            supervised.process.communicate(timeout=30)


def test_output_goes_to_log_and_terminal_and_the_status_tells_the_end(supervise: Start) -> None:
    job = supervise('echo out; echo err >&2; pwd; echo "$PYTHONUNBUFFERED $PENNYPOD_DATA $TOKEN"', env={"TOKEN": "t1"})
    code, shown = job.end()
    assert code == 0
    out = job.home / "out"
    assert job.log.decode().splitlines() == ["out", "err", str(out), f"1 {job.home / 'data'} t1"]
    assert job.log in shown
    status = job.status
    assert (status["state"], status["exit_code"], status["signal"]) == ("finished", 0, None)
    assert status["started"] <= status["heartbeat"] <= status["finished"] + 1
    assert status["command"][-1].startswith("echo out")
    assert status["output_bytes"] == len(job.log)
    assert not (job.home / "launch.json").exists(), "the environment may hold tokens and must not stay"


def test_output_is_in_the_log_the_moment_it_is_written(supervise: Start) -> None:
    job = supervise(f"{sys.executable} -c \"print('first'); input()\" < <(sleep 60)")
    job.wait_for("first")  # PYTHONUNBUFFERED, and no buffer of ours
    assert job.status["state"] == "running"


def test_silent_command_has_an_empty_log(supervise: Start) -> None:
    job = supervise("true")
    assert job.end()[0] == 0
    assert job.log == b""


@pytest.mark.parametrize("command", ["exit 3", "false | cat; exit 3", "python3 -c 'import sys; sys.exit(3)'"])
def test_exit_code_is_kept(supervise: Start, command: str) -> None:
    job = supervise(command)
    assert job.end()[0] == 3
    assert (job.status["exit_code"], job.status["signal"]) == (3, None)


def test_a_pipe_to_tee_does_not_hide_a_failure(supervise: Start) -> None:
    job = supervise("(echo boom; exit 4) | tee copy.txt")
    assert job.end()[0] == 4
    assert (job.home / "out" / "copy.txt").read_text() == "boom\n"


def test_killed_command_is_told_by_its_signal_and_leaves_nobody_writing(supervise: Start) -> None:
    job = supervise("sleep 300 & echo ready; wait; true")
    job.wait_for("ready")
    shell = psutil.Process(job.status["pid"])
    orphans = shell.children()
    assert orphans, "the trainer behind the shell"
    shell.kill()
    assert job.end()[0] == 128 + 9
    assert (job.status["signal"], job.status["exit_code"]) == (9, None)
    assert not psutil.wait_procs(orphans, timeout=5)[1]


@pytest.mark.parametrize(("sent", "by"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")])
def test_term_and_hang_up_reach_the_trainer_as_term(supervise: Start, sent: int, by: str) -> None:
    job = supervise("trap 'echo saving; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
    job.wait_for("ready")
    job.process.send_signal(sent)
    assert job.end()[0] == 7
    assert b"saving" in job.log
    assert (job.status["exit_code"], job.status["stopped_by"]) == (7, by)


def test_second_supervisor_refuses_while_the_first_works_and_after_it(supervise: Start) -> None:
    job = supervise("echo once >> count; echo ready; while [ ! -e go ]; do sleep 0.05; done")
    job.wait_for("ready")
    assert supervise("echo twice >> count").end()[0] == 75
    (job.home / "out" / "go").touch()
    assert job.end()[0] == 0
    assert supervise("echo twice >> count").end()[0] == 76
    assert (job.home / "out" / "count").read_text() == "once\n"


def test_another_run_in_the_same_home_starts_with_an_empty_log(supervise: Start) -> None:
    supervise("echo first").end()
    job = supervise("echo second", run="demo-1201-bbbbb")
    assert job.end()[0] == 0
    assert job.log == b"second\n"
    assert (job.home / "train.log.before").read_bytes() == b"first\n"
    assert job.status["run"] == "demo-1201-bbbbb"


def test_a_command_that_cannot_start_says_why(supervise: Start) -> None:
    job = supervise("true", env={"NUL": "a\0b"})
    assert job.end()[0] == 78
    assert job.status["state"] == "failed_to_start"
    assert "null byte" in job.status["error"]


def test_full_disk_does_not_stop_the_trainer(supervise: Start, tmp_path: Path) -> None:
    home = tmp_path / "pod"
    home.mkdir()
    (home / "train.log").symlink_to("/dev/full")  # every write gives "no space left on device"
    job = supervise("echo the disk is full; touch survived; exit 5")
    code, shown = job.end()
    assert code == 5
    assert (home / "out" / "survived").exists()
    assert b"the disk is full" in shown
    status = job.status
    assert status["disk_full"] is True
    assert status["log_lost_bytes"] == len("the disk is full\n")
    assert status["tail"] == "the disk is full\n"


def test_status_can_be_written_on_a_full_disk(tmp_path: Path) -> None:
    """On a real file system that is really full: the two slots exist, so a write needs no block."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        status = load_supervise().StatusFile(str(small / "status.json"))
        assert status.write({"n": 0})
        assert status.write({"n": 1})
        with (small / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            filler.writelines(b"x" * 4096 for _ in range(100))
        for n in range(2, 7):
            assert status.write({"n": n})
            assert json.loads((small / "status.json").read_text()) == {"n": n}
    finally:
        subprocess.run(["umount", small], check=True)


def test_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    status = load_supervise().StatusFile(str(tmp_path / "status.json"))
    status.write({"n": 0})
    done = threading.Event()

    def write_many() -> None:
        for n in range(1, 1500):
            status.write({"n": n, "pad": "x" * (n % 500)})
        done.set()

    writer = threading.Thread(target=write_many)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(json.loads((tmp_path / "status.json").read_text())["n"])
    writer.join()
    assert len(seen) > 10


def load_supervise() -> ModuleType:
    spec = importlib.util.spec_from_file_location("supervise", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
