"""One run under test: its simulator, the line to it, its files and its processes, and what can be done to them."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
from chaos.cells import GRACE_S, OUTAGE_S, POD_FAULTS, POD_LEASE_S, SWEEP_INTERVAL_S, Cell, Event, Moment
from chaos.line import Hold, Line
from pennypod.ledger import AttemptRecord, AttemptState, Ledger
from pennypod.model.ids import parse_lease
from simulated import KEYS, Simulator, simulator
from workspace import BIN, Workspace, wait_until

FACTOR = 2.5  # pod_budget_factor: the lease is so many times the estimate
MARKET = {"boot": {name: {"assign_s": 0.2, "loading_s": 2} for name in ("vast", "runpod")}}
REACH_S = 150.0
_NO_FUSE = {"endpoint": "*", "fault": "forbidden", "where": {"key": "pod"}}
_TOOLS = ("sh", "ssh", "ssh-keygen", "tar")
_APART = "PENNYPOD_CHAOS_APART"
"""Marks a process that belongs to another service than the run's."""
_LATE_SSHD = {"endpoint": "*.create", "fault": "sshd_late", "seconds": 6}


class Subject:
    """A run of one cell. `log` gets what the playbook prints."""

    def __init__(self, cell: Cell, folder: Path, sim: Simulator, line: Line, sweep_line: Line, demo_data: Path) -> None:
        self.cell = cell
        self.sim = sim
        self.line = line
        self.sweep_line = sweep_line  # of its own, so that it can be told who ended a pod
        (folder / "work").mkdir()
        self.workspace = Workspace(folder / "work")
        self.log = folder / "playbook.log"
        self.watch_log = folder / "sentinel.log"
        self.env = self.workspace.environment | addresses(line.url)
        self.demo_data = demo_data
        self.ledger: Ledger = self.workspace.ledger()
        self.process: subprocess.Popen[bytes] | None = None
        self.hold: Hold | None = None
        self._closing = threading.Event()
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []

    # --- the run ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Rules and holds first, so that the moment is there to be met; then the playbook, in a session of its own."""
        if self.cell.rule.sweeps == "elsewhere":
            self.sim.post("faults", _NO_FUSE)
        if self.cell.fault:
            fault = POD_FAULTS[self.cell.fault]
            self.sim.fault(fault.endpoint, self.cell.fault, **dict(fault.options))
        if self.cell.moment in (Moment.BEFORE_CREATE, Moment.IN_CREATE):
            self.hold = self.line.hold_create(before=self.cell.moment == Moment.BEFORE_CREATE)
        elif self.cell.moment == Moment.TEARDOWN:
            self.hold = self.line.lose_destroy()
        elif self.cell.moment == Moment.WAITING:
            self.sim.post("faults", _LATE_SSHD)
        half = self.cell.lease_s / FACTOR / 60 / 2
        short: dict[str, object] = {
            "pod_boot_minutes": half,
            "pod_train_minutes": half,
            "pod_smoke_minutes": half,
            "training_ssh_patience_s": 10,
            "training_reserve_s": 5,
            "training_salvage_s": 5,
            "escrow_grace_s": GRACE_S,
            "provider": self.cell.provider,
        }
        if self.cell.event == Event.ALONE:
            short |= {"pod_lease_minutes": POD_LEASE_S / 60}
        if self.cell.victim:
            short |= {"job": "demo", "smoke": "true", "dataset": str(self.demo_data)}
        else:
            short |= {"job": "tiny", "tiny_epochs": 3}
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                # Whatever started the tests (nohup, a shell's &) may have had some of these ignored.
                ["env", "--default-signal=INT,HUP,TERM", *self.workspace.command(**short)],
                cwd=self.workspace.root,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def controller(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def over(self) -> bool:
        return self.controller.poll() is not None

    def reach(self) -> bool:
        """Wait for the cell's moment. False when the run was over before it came."""
        there = self._arrived(Moment(self.cell.moment)) if not self.cell.fault else lambda: False
        wait_until(lambda: there() or self.over(), REACH_S + self.cell.lease_s, f"the run reaches {self.cell.moment}")
        return not self.over()

    def _arrived(self, moment: Moment) -> Callable[[], bool]:
        """What tells that the run is there: a held call, a row of the ledger, a stage of the simulated pod."""
        if moment is Moment.PLAN:
            return lambda: self.run_id() is not None  # on the books, and nothing is asked for yet
        if self.hold is not None:
            return self.hold.reached.is_set
        if moment is Moment.AFTER_ID:
            return lambda: any(attempt.state is AttemptState.RENTED for attempt in self.attempts())
        if moment is Moment.WAITING:
            return lambda: any(pod["stage"] == "running" for pod in self.sim.live())
        return lambda: moment in self.stages()

    def run_id(self) -> str | None:
        runs = self.ledger.runs()
        return runs[0].run if runs else None

    def attempts(self) -> list[AttemptRecord]:
        run = self.run_id()
        return self.ledger.attempts(run) if run else []

    def stages(self) -> set[str]:
        run = self.run_id()
        return {record.stage for record in self.ledger.stages(run)} if run else set()

    def lease_left_s(self, now: float) -> float:
        """What is left to the deadline in the run's plan, or the whole lease where there is none yet."""
        run = self.run_id()
        deadline = self.ledger.run(run).deadline if run else None
        return self.cell.lease_s if deadline is None else deadline - now

    # --- its processes ------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Everything that was started for the run: what a control group would hold."""
        return list(_with_home(self.workspace.home))

    def guards(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "pennypod.guard" in _command(process)]

    def workers(self) -> list[psutil.Process]:
        """The forks of ansible-playbook that run a module just now."""
        with contextlib.suppress(psutil.Error):
            return [child for child in psutil.Process(self.controller.pid).children() if child.children()]
        return []

    # --- events -------------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Let the cell's event happen. What ends by itself (an outage) or later (a wake-up) is seen to here, too."""
        if self.cell.victim:
            self._signal(self.cell.victim, _number(self.cell.event))
        elif not self.cell.fault:
            self._happen(Event(self.cell.event))
        if self.hold is not None:
            self._background(self._let_go)

    def _happen(self, event: Event) -> None:
        victims = {
            Event.INT: ("controller", signal.SIGINT),
            Event.TERM: ("controller", signal.SIGTERM),
            Event.HUP: ("controller", signal.SIGHUP),
            Event.KILL: ("controller", signal.SIGKILL),
            Event.WORKER: ("worker", signal.SIGKILL),
            Event.GUARD: ("guard", signal.SIGKILL),
            Event.GUARD_TOO: ("controller and guard", signal.SIGKILL),
            Event.TREE: ("everything", signal.SIGKILL),
            Event.LOST: ("everything", signal.SIGKILL),
            Event.ALONE: ("everything", signal.SIGKILL),
            Event.SUSPENDED: ("controller", signal.SIGSTOP),
            Event.ASLEEP: ("everything", signal.SIGSTOP),
            Event.OUTAGE_KILL: ("controller", signal.SIGKILL),
        }
        if event in (Event.OUTAGE, Event.OUTAGE_KILL):
            for line in (self.line, self.sweep_line):
                line.down.set()
            self._background(self._repair_line)
        if event in victims:
            self._signal(*victims[event])
        if event is Event.LOST:
            self.ledger.close()
            shutil.rmtree(self.workspace.home)
        if event is Event.UNREACHABLE:
            for pod in self.sim.live():
                engine("kill", pod["name"])

    def wake(self) -> None:
        """After a suspension: what was stopped goes on."""
        for process in self.processes():
            _send(process, signal.SIGCONT)

    def _signal(self, victim: str, number: signal.Signals) -> None:
        if victim == "worker":
            wait_until(lambda: self.workers() or self.over(), 20, "a worker is at work")
            victims = self.workers()
        elif victim == "guard":
            victims = self.guards()
        elif victim == "everything":
            self._signal_all(number)
            return
        else:
            # The guard first: it is to have no time to see the other's end.
            victims = self.guards() if victim == "controller and guard" else []
            victims.append(psutil.Process(self.controller.pid))
        for process in victims:
            _send(process, number)

    def _signal_all(self, number: signal.Signals) -> None:
        """As a control group does it: nothing that a victim has just started is left out."""
        stopped: set[psutil.Process] = set()
        while fresh := set(self.processes()) - stopped:
            for process in fresh:
                _send(process, signal.SIGSTOP)
            stopped |= fresh
        if number is signal.SIGSTOP:
            return
        for process in stopped:
            _send(process, number)
        for process in stopped:
            _send(process, signal.SIGCONT)

    def _let_go(self) -> None:
        """The held call goes on its way as soon as a survivor has looked for the pod, and at the latest in 5 s."""
        assert self.hold is not None
        seen, limit = self.line.calls, time.monotonic() + 5.0
        while self.line.calls == seen and time.monotonic() < limit and not self._closing.is_set():
            time.sleep(0.05)
        self.hold.released.set()

    def _repair_line(self) -> None:
        self._closing.wait(OUTAGE_S)
        for line in (self.line, self.sweep_line):
            line.down.clear()

    # --- ring 2 -------------------------------------------------------------------------------------------------------

    def put_on_watch(self, home: Path) -> None:
        """A sentinel beside the run, a service of its own: what ends the run's processes does not end it."""
        home.mkdir(mode=0o700, exist_ok=True)
        with self.watch_log.open("wb") as file:
            self._sentinel = subprocess.Popen(
                [BIN / "pennypod", "sentinel", "--interval", f"{SWEEP_INTERVAL_S:.0f}s"],
                env=self._sweep_env(home) | {_APART: "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd="/",
                start_new_session=True,
            )

    def relieve(self) -> None:
        """End the watch when the look that is under way has proven and told what it did."""
        if self._sentinel is None or self._sentinel.poll() is not None:
            return
        told = self.watched().count("\n")
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.watched().count("\n") > told, 60, "the sentinel tells of its look")
        self._sentinel.terminate()
        try:
            self._sentinel.wait(90)
        except subprocess.TimeoutExpired:
            self._sentinel.kill()
            self._sentinel.wait()

    def watched(self) -> str:
        """What the sentinel has told so far."""
        return self.watch_log.read_text() if self.watch_log.exists() else ""

    def sweep(self, *options: str) -> int:
        """One `pennypod sweep` by the run's own ledger; its exit code."""
        return self.command(self.workspace.home, "sweep", "--json", *options).returncode

    def command(self, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """A `pennypod` command with that home, beside the run."""
        return subprocess.run(
            [BIN / "pennypod", *words],
            env=self._sweep_env(home) | {_APART: "1"},
            capture_output=True,
            text=True,
            timeout=200,
            cwd="/",
        )

    def _sweep_env(self, home: Path) -> dict[str, str]:
        """A machine without a container engine: local pods of others are none of this sweep's business."""
        tools = self.watch_log.with_name("tools")
        if not tools.exists():
            tools.mkdir()
            for name in _TOOLS:
                (tools / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
        return self.env | addresses(self.sweep_line.url) | {"PENNYPOD_HOME": str(home), "PATH": str(tools)}

    # --- the end ------------------------------------------------------------------------------------------------------

    def _background(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """Whatever became of the cell: none of its processes stays."""
        self._closing.set()
        self.line.down.clear()
        if self.hold is not None:
            self.hold.released.set()
        for thread in self._threads:
            thread.join(60)
        for process in self.processes():
            _send(process, signal.SIGKILL)
        for started in (self.process, self._sentinel):
            if started is not None:
                started.kill()
                started.wait(20)


@contextlib.contextmanager
def subject(cell: Cell, folder: Path, image: str, demo_data: Path) -> Iterator[Subject]:
    """A run of the cell's job on a simulator of its own, with container pods made of `image`."""
    folder.mkdir(parents=True, exist_ok=True)
    market = folder / "market.json"
    market.write_text(json.dumps(MARKET))
    options = ("--pods", "container", "--speed", "1", "--seed", str(cell.seed % 1000), "--image", image)
    with ExitStack() as stack:
        sim = stack.enter_context(simulator(*options, "--market", str(market)))
        line = stack.enter_context(Line(sim.url))
        sweep_line = stack.enter_context(Line(sim.url))
        run = Subject(cell, folder, sim, line, sweep_line, demo_data)
        stack.callback(run.close)
        yield run


def addresses(url: str) -> dict[str, str]:
    return {
        "VAST_API_KEY": KEYS["vast"],
        "VAST_URL": url,
        "RUNPOD_API_KEY": KEYS["runpod"],
        "RUNPOD_API_BASE_URL": f"{url}/v2",
    }


def engine(*args: str) -> str:
    """The container engine itself, past all code of ours."""
    program = shutil.which("podman") or "docker"
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=60).stdout


def containers(name_part: str) -> list[str]:
    """Names of the containers, in whatever state, that carry `name_part` in their name."""
    listed = engine("ps", "--all", "--filter", f"name={name_part}", "--format", "{{.Names}}")
    return [name for name in listed.split() if parse_lease(name) is not None]


def _number(event: str) -> signal.Signals:
    return signal.Signals[event]


def _with_home(home: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            env = process.environ()
            ours = env.get("PENNYPOD_HOME") == str(home) and _APART not in env
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
