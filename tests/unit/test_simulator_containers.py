"""Container pods that end while they start, on an engine that is a dict: none is left behind, none is made twice."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from pennypod import processes
from pennypod.model.image import RegistryLogin
from pennypod.providers.local.engine import Completed, Engine
from pennypod.settings import Settings
from pennypod.simulator import pods as module
from pennypod.simulator.clock import VirtualClock
from pennypod.simulator.pods import Containers
from pennypod.simulator.state import RUNPOD, Boot, Pod, Stage, World

LEASE = "pennypod-simtest-1201-abcde-a1-tt2abcd-nabcde"
WAIT_S = 30.0


class FakeEngine:
    """Containers by name. `on_run` is called in the middle of every `run`, when the container exists already."""

    def __init__(self) -> None:
        self.there: dict[str, dict[str, str]] = {}
        self.runs: list[str] = []
        self.images: list[str] = []
        self.pulled: list[dict[str, Any]] = []
        self.pull_says = ""
        self.removed: list[str] = []
        self.on_run: Callable[[], None] = lambda: None

    def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
        match argv[1]:
            case "run":
                return self._run(list(argv))
            case "ps":
                label = str(argv[argv.index("--filter") + 1]).removeprefix("label=").partition("=")
                rows = [
                    {"Id": number, "Names": [labels["name"]], "State": "running", "Labels": labels}
                    for number, labels in self.there.items()
                    if label[0] in labels and label[2] in ("", labels[label[0]])
                ]
                return Completed(0, json.dumps(rows), "")
            case "pull":
                file = Path(argv[argv.index("--authfile") + 1])
                self.pulled.append(json.loads(file.read_text())["auths"])
                return Completed(125 if self.pull_says else 0, "", self.pull_says)
            case "rmi":
                self.removed.append(argv[-1])
            case "rm":
                self.there.pop(argv[-1], None)
        return Completed(0, "", "")

    def _run(self, argv: list[str]) -> Completed:
        name = argv[argv.index("--name") + 1]
        self.runs.append(name)
        self.images.append(argv[argv.index("--name") + 2])
        if any(labels["name"] == name for labels in self.there.values()):
            return Completed(125, "", f'Error: the container name "{name}" is already in use')
        number = f"{len(self.runs):064x}"
        labels = dict(argv[at + 1].split("=", 1) for at, word in enumerate(argv) if word == "--label")
        self.there[number] = {**labels, "name": name}
        self.on_run()
        return Completed(0, number, "")


class Pause:
    """Holds an engine's `run` in the middle until told to go on."""

    def __init__(self, engine: FakeEngine) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        engine.on_run = self._hold

    def _hold(self) -> None:
        self.reached.set()
        assert self.released.wait(WAIT_S)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def world(tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(module, "ensure_image", lambda *_args: "image")
    monkeypatch.setattr(module, "write_tree", lambda *_args: tmp_path)
    podman = Engine("podman", "/bin/podman", "4.3.1", False, str(tmp_path), runner=engine)
    backend = Containers(Settings(tmp_path, "sqlite://"), {}, engine=podman)
    return World(VirtualClock(0, start=1.8e9), backend, boot=Boot(assign_s=1, loading_s=3))


def rented(world: World, name: str = LEASE, **values: Any) -> Pod:
    gpu = world.runpod.gpus["NVIDIA GeForce RTX 4090"]
    center = world.runpod.take(gpu, "SECURE", 1, None)
    details = {"cloud": "SECURE", "center": center, "rate": gpu.secure, "full_rate": 0}
    order = {"name": name, "image": "runpod/pytorch:1", "disk_gb": 5.0, "details": details} | values
    return world.rent_runpod(world.account(RUNPOD), gpu, **order)


def run_jobs(world: World) -> None:
    for job in world.take_jobs():
        job()


def settled(world: World, pod: Pod) -> None:
    """Whatever is under way for the pod has ended: the backend works on one thing at a time."""
    backend = world.backend
    assert isinstance(backend, Containers)
    with backend._entry(pod).lock:
        pass


HERE = f"127.0.0.1:5000/golden@sha256:{'5' * 64}"
LOGIN = RegistryLogin("127.0.0.1:5000", "pods", "canary-51c7")


@pytest.mark.parametrize("login", [None, LOGIN])
def test_an_image_in_a_registry_here_is_pulled_as_the_pod_and_nobody_else(
    world: World, engine: FakeEngine, login: RegistryLogin | None
) -> None:
    pod = rented(world, image=HERE, login=login)
    run_jobs(world)
    settled(world, pod)
    assert [auths.keys() for auths in engine.pulled] == [{LOGIN.registry} if login else set()]
    assert pod.up
    assert engine.images == [HERE]
    world.backend.close()  # type: ignore[attr-defined]
    assert engine.removed == [HERE]


def test_one_that_cannot_be_pulled_makes_no_container_and_says_why(world: World, engine: FakeEngine) -> None:
    engine.pull_says = "Error: unauthorized: authentication required"
    pod = rented(world, image=HERE, login=LOGIN)
    run_jobs(world)
    settled(world, pod)
    assert (pod.up, engine.there) == (False, {})
    assert pod.pull_failure.endswith("unauthorized: authentication required")
    assert "canary" not in pod.pull_failure
    world.clock.advance(60)
    world.tick()
    assert (pod.stage, pod.message) == (Stage.LOADING, pod.pull_failure)
    engine.pull_says = "Error: manifest unknown"
    other = rented(world, name="another", image=HERE)
    run_jobs(world)
    settled(world, other)
    assert "not found: manifest unknown" in other.pull_failure


def test_a_pod_that_is_destroyed_while_it_starts_leaves_no_container(world: World, engine: FakeEngine) -> None:
    pause = Pause(engine)
    pod = rented(world)
    run_jobs(world)
    assert pause.reached.wait(WAIT_S)
    world.destroy(pod, "evicted")
    (destroy,) = world.take_jobs()
    destroying = threading.Thread(target=destroy)
    destroying.start()
    pause.released.set()
    destroying.join(WAIT_S)
    assert engine.there == {}
    assert not pod.up


def test_a_start_that_comes_while_the_pod_is_being_made_makes_no_second_one(world: World, engine: FakeEngine) -> None:
    pause = Pause(engine)
    pod = rented(world)
    run_jobs(world)
    assert pause.reached.wait(WAIT_S)
    starting = threading.Thread(target=world.backend.start, args=(pod,))
    starting.start()
    pause.released.set()
    starting.join(WAIT_S)
    settled(world, pod)
    assert engine.runs == [LEASE]
    assert pod.up
    world.backend.destroy(pod)
    assert engine.there == {}


def test_orders_of_two_threads_are_carried_out_as_they_were_given(world: World, engine: FakeEngine) -> None:
    pod = rented(world)
    create = world.take_jobs()
    world.destroy(pod, "evicted")
    destroy = world.take_jobs()
    for job in [*destroy, *create]:  # the clock's thread may be quicker than the one that answers the create
        job()
    settled(world, pod)
    assert engine.there == {}


def test_a_container_that_a_timed_out_run_made_is_removed_too(world: World, engine: FakeEngine) -> None:
    def too_late() -> None:
        raise TimeoutError("no answer in 60 s")

    engine.on_run = too_late
    pod = rented(world)
    run_jobs(world)
    settled(world, pod)
    assert engine.there
    assert "no answer" in pod.failure
    world.destroy(pod)
    run_jobs(world)
    assert engine.there == {}


def test_nothing_is_tried_again_for_a_pod_that_is_over(world: World, engine: FakeEngine) -> None:
    pod = rented(world)
    run_jobs(world)
    world.destroy(pod)
    run_jobs(world)
    tries = len(engine.runs)
    world.backend.start(pod)
    settled(world, pod)
    assert len(engine.runs) == tries
    assert engine.there == {}


def test_simulators_of_one_seed_do_not_take_each_others_names(world: World, engine: FakeEngine) -> None:
    pod = rented(world, name="a name that is no lease")
    run_jobs(world)
    settled(world, pod)
    assert engine.runs == [f"pennypod-simulated-runpod-{pod.id}-{os.getpid()}"]


# --- what a killed simulator left behind ------------------------------------------------------------------------------


def kept(world: World, engine: FakeEngine, mark: str) -> bool:
    """Whether a simulator that starts leaves the container of another one alone."""
    engine.there = {"f" * 64: {module.LABEL: mark, "name": "another simulator's"}}
    assert isinstance(world.backend, Containers)
    world.backend.prepare(lambda _text: None)
    return bool(engine.there)


def test_pods_of_a_living_simulator_stay_whatever_the_clock_did(
    world: World, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = rented(world)
    run_jobs(world)
    settled(world, pod)
    (labels,) = engine.there.values()
    started = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: started(self) + 3600.0)
    assert kept(world, engine, labels[module.LABEL])
    assert kept(world, engine, f"{os.getpid()}-1"), "a former version's mark, from before the clock moved"


def test_pods_of_a_simulator_that_has_ended_are_removed(world: World, engine: FakeEngine) -> None:
    pid, ticks, place = processes.own_identity().split(":")
    assert not kept(world, engine, f"{pid}:{int(ticks) + 1}:{place}"), "its pid was used again"
    assert not kept(world, engine, f"4194304:1:{place}")
    assert not kept(world, engine, "4194304-1764600000")
    assert not kept(world, engine, "")
