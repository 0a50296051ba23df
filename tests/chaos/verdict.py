"""What a cell showed: pods and meter as the simulator and the engine know them, proof as our commands tell it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaos.cells import Cell, Event, Moment, Ring
from chaos.subject import Subject, containers
from pennypod.ledger import AttemptState
from pennypod.model.ids import parse_lease
from workspace import wait_until


@dataclass(slots=True)
class Result:
    """One row of the matrix. `problems` is empty when the cell holds.

    `overspend_*` is what was billed from the event to the meter's stop; `bound_*` the most that it may be, with what
    the lease had left where `to_deadline`. `lives` is how many runs the row stands for. `clock` says in whose time: the
    machine's, or the simulator's.
    """

    name: str
    group: str
    event: str
    moment: str
    provider: str
    seed: int
    clock: str = "real"
    ring: str = ""
    pods: int = 0
    receipts: int = 0
    open: int = 0
    unseen: int = 0
    to_deadline: bool = False
    lease_left_s: float = 0.0
    overspend_s: float = 0.0
    overspend_micros: int = 0
    bound_s: float = 0.0
    bound_micros: int = 0
    lives: int = 1
    wall_s: float = 0.0
    struck: bool = True
    problems: list[str] = field(default_factory=list)

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


def blank(cell: Cell) -> Result:
    row = Result(cell.name, cell.group, cell.event, cell.moment, cell.provider, cell.seed)
    row.to_deadline = cell.rule.to_deadline
    return row


def play(cell: Cell, run: Subject, spare_home: Path) -> Result:
    """The whole cell: run, event, survivors, measure. The subject is closed by whoever opened it."""
    result = blank(cell)
    began = time.monotonic()
    home = run.workspace.home if cell.rule.sweeps == "here" else spare_home
    if cell.rule.sweeps:
        run.put_on_watch(home)
    run.start()
    started = time.time()
    if cell.fault:
        result.lease_left_s = cell.lease_s
        event_at, before = started, {}
    else:
        result.struck = run.reach()
        if cell.delay_s:
            time.sleep(cell.delay_s)  # not to recognise anything: the moment of a random kill is drawn
        result.lease_left_s = run.lease_left_s(time.time())
        event_at, before = time.time(), costs(run)
        result.struck = result.struck and not run.over()
        if cell.moment != Moment.PLAN and result.lease_left_s < 0:
            result.problems.append("the moment came after the deadline: this machine is too busy, try it alone")
        if result.struck:
            run.strike()
    deadline = event_at + result.lease_left_s
    result.bound_s = cell.bound_s(result.lease_left_s)
    wait_for_the_end(run, result, event_at, deadline)
    settle(run, result)
    measure(run, result, event_at, before)
    prove(run, result, spare_home)
    result.wall_s = round(time.monotonic() - began, 1)
    return result


def wait_for_the_end(run: Subject, result: Result, event_at: float, deadline: float) -> None:
    """Until the bound has passed or nothing can be left, whichever comes first; a stopped process wakes on the way."""
    asleep = run.cell.event in (Event.SUSPENDED, Event.ASLEEP) and result.struck
    limit = max(event_at + result.bound_s, deadline if run.cell.rule.to_deadline else 0.0)
    while time.time() < limit:
        if asleep and time.time() > deadline and not run.sim.live():
            run.wake()
            asleep = False
        # Somebody may still be about to create a pod as long as a process of the run lives.
        on_its_way = run.hold is not None and run.hold.taken and not run.hold.passed.is_set()
        if not asleep and not on_its_way and not run.processes() and not run.sim.live():
            return
        time.sleep(0.2)
    if asleep:
        run.wake()


def settle(run: Subject, result: Result) -> None:
    """Proofs take longer than the end of the meter: the guard may finish its work, and the command its report."""
    try:
        wait_until(lambda: not run.processes(), 90.0, "every process of the run has ended")
    except AssertionError:
        names = sorted({" ".join(process.cmdline()[:4])[:80] for process in run.processes()})
        if names:
            result.problems.append(f"still running 90 s later: {names}")
    run.relieve()
    live = run.sim.live()
    if live:
        result.problems.append(f"{len(live)} pods live after the bound: {[pod['name'] for pod in live]}")
    if not live:
        try:  # the API says "gone" before the engine has removed the container
            wait_until(lambda: not containers_left(run), 60.0, "every container is gone")
        except AssertionError:
            result.problems.append(f"containers left: {containers_left(run)}")


def containers_left(run: Subject) -> list[str]:
    return [name for pod in run.sim.ever() for name in containers(pod["name"])]


def costs(run: Subject) -> dict[str, int]:
    return {pod["id"]: pod["cost_micros"] for pod in run.sim.ever()}


def measure(run: Subject, result: Result, event_at: float, before: dict[str, int]) -> None:
    """Seconds and micro-dollars that were billed after the event, from the simulator's own meter."""
    pods = [pod for pod in run.sim.ever() if parse_lease(pod["name"]) is not None]
    result.pods = len(pods)
    for earlier, later in pairwise(pods):
        if earlier["gone_at"] is None or earlier["gone_at"] > later["created"]:
            result.problems.append(f"two pods at once: {earlier['name']} and {later['name']}")
    offset = time.time() - float(run.sim.get("clock")["now"])  # both clocks run at the same speed
    billed_after = [pod for pod in pods if pod["gone_at"] is None or pod["gone_at"] + offset > event_at]
    result.ring = who_ended(run, billed_after)
    result.bound_micros = round(max((rate_of(pod) for pod in pods), default=0.0) * result.bound_s / 3600)
    if succeeded(run):
        billed_after = billed_after[:-1]  # the last one was wanted; those before it were given up
    if not billed_after:
        return
    last = max((pod["gone_at"] or time.time()) + offset for pod in billed_after)
    result.overspend_s = round(last - max(event_at, min(pod["created"] for pod in billed_after) + offset), 2)
    result.overspend_micros = sum(pod["cost_micros"] - before.get(pod["id"], 0) for pod in billed_after)
    if last - event_at > result.bound_s:
        result.problems.append(f"{last - event_at:.1f} s after the event, bound {result.bound_s:.1f} s")


def rate_of(pod: dict[str, Any]) -> float:
    """Micro-dollars per hour while it was up; a pod that is gone shows no rate, so it is told from its cost."""
    if pod["rate_micros_per_h"]:
        return float(pod["rate_micros_per_h"])
    seconds = max(1.0, (pod["gone_at"] or 0.0) - pod["created"])
    return float(pod["cost_micros"]) * 3600 / seconds


def succeeded(run: Subject) -> bool:
    return any(document["outcome"] == "succeeded" for document in run.workspace.documents())


def who_ended(run: Subject, pods: list[dict[str, Any]]) -> str:
    """The ring whose destroy call ended the last pod, by its own traces; "" where nothing had to be ended."""
    if not pods:
        return ""
    pod = pods[-1]
    if pod["gone_at"] is None:
        return "nobody"
    if pod["gone_why"] != "destroyed":
        return "the provider"
    firsts = {
        line: min((at for at, path in line.ends if pod["id"] in path), default=math.inf)
        for line in (run.line, run.sweep_line)
    }
    if min(firsts.values()) == math.inf:
        return Ring.FUSE  # nobody but the pod itself has another way to the provider
    if firsts[run.sweep_line] < firsts[run.line]:
        return Ring.SWEEP
    guard_logs = "".join(path.read_text() for path in run.workspace.home.glob("guards/*.log"))
    return Ring.GUARD if f"destroying pod {pod['id'][:12]}" in guard_logs else Ring.PLAYBOOK


def prove(run: Subject, result: Result, spare_home: Path) -> None:
    """Every pod has a receipt that `pennypod verify` believes, or stands on the books as open, and commands say so."""
    pods = [pod for pod in run.sim.ever() if parse_lease(pod["name"]) is not None]
    if run.cell.event == Event.LOST:
        # The books are lost: who ended the pod on another machine has kept a receipt there.
        proven = verified(run, spare_home, sorted((spare_home / "receipts").glob("*.json")), result)
        for pod in pods:
            if f"destroyed {pod['name']}" not in run.watched():
                result.problems.append(f"the sentinel has not said that it destroyed {pod['name']}")
            count(pod, proven, result)
        return
    if any(not attempt.final for attempt in run.attempts()):
        # Where nobody was left to wait for the deadline, the books are closed as of a time after it.
        rc = run.sweep("--now", "+10m") if run.cell.event == Event.ALONE else run.sweep()
        if rc == 0 and any(a.state is AttemptState.DESTROYING for a in run.attempts()):
            result.problems.append("a pod is open, and `pennypod sweep` ends with 0")
    elif any(record.closed is None for record in run.ledger.runs()):
        run.sweep("--now", "+10m")  # all died between the last proof and the books: the first look after the deadline
    proven = verified(run, run.workspace.home, sorted(run.workspace.artifacts.glob("*/receipt.json")), result)
    attempts = {attempt.lease_name: attempt for attempt in run.attempts()}
    for pod in pods:
        attempt = attempts.get(pod["name"])
        if attempt is None:
            result.problems.append(f"the ledger does not know {pod['name']}")
        elif not attempt.final:
            result.open += 1
        elif attempt.state is AttemptState.NEVER and result.ring == Ring.FUSE:
            result.unseen += 1  # it ended itself before anybody could have seen it
        else:
            count(pod, proven, result)


def count(pod: dict[str, Any], proven: set[str], result: Result) -> None:
    if pod["name"] in proven:
        result.receipts += 1
    else:
        result.problems.append(f"{pod['name']} has no receipt")


def verified(run: Subject, home: Path, files: list[Path], result: Result) -> set[str]:
    """The names of the pods in these receipts, if `pennypod verify` says that they hold."""
    if not files:
        return set()
    said = run.command(home, "verify", *(str(file) for file in files))
    if said.returncode != 0:
        result.problems.append(f"pennypod verify: {said.stdout[-500:]}{said.stderr[-300:]}")
        return set()
    return {pod["pod_name"] for file in files for pod in json.loads(file.read_text())["pods"]}
