"""A thousand pods in the inventory: mostly the time of the listing calls, however many pods somebody has forgotten."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from crowd import COUNT, crowded, environment
from pennypod.providers.vast import SPACING_S
from simulated import KEYS
from workspace import BIN, REPOSITORY

TRIES = 5


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def inventory(source: str, env: dict[str, str]) -> Any:
    done = subprocess.run(
        [str(BIN / "ansible-inventory"), "-i", source, "--list"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LISTING = """
import sys
from pennypod.inventory import list_pods
from pennypod.providers.registry import all_providers
from pennypod.settings import load_settings
print(sum(pod.name.startswith(sys.argv[1]) for pod in list_pods(all_providers(load_settings()))))
"""


def all_listed(env: dict[str, str]) -> None:
    """The bare calls, as a program: every provider that the inventory asks, and nothing made of the answers."""
    command = [sys.executable, "-c", LISTING, "pennypod-many"]
    assert int(subprocess.run(command, env=env, capture_output=True, check=True).stdout) == COUNT


def billing(env: dict[str, str]) -> int:
    """How many of them the inventory shows; local pods of other tests may be there too."""
    hosts = inventory("pods.pennypod.yml", env)["billing"]["hosts"]
    return len([host for host in hosts if host.startswith("many-")])


def all_in_inventory(env: dict[str, str]) -> None:
    assert billing(env) == COUNT


@pytest.fixture
def empty(tmp_path: Path) -> str:
    (tmp_path / "empty.yml").write_text("all: {}\n")
    return str(tmp_path / "empty.yml")


def test_a_thousand_pods_take_twice_the_listing_calls_and_ansibles_start_at_most(tmp_path: Path, empty: str) -> None:
    with crowded(tmp_path, "runpod") as sim:
        env = environment(sim, "runpod", tmp_path / "home")
        all_in_inventory(env)  # the first use finds the container engine
        # The best of some tries, each measured at one time: another test beside this one slows all its parts down.
        tries = [
            (
                seconds(lambda: all_listed(env)),
                seconds(lambda: inventory(empty, env)),
                seconds(lambda: all_in_inventory(env)),
            )
            for _ in range(TRIES)
        ]
        bare, start, whole = min(tries, key=lambda parts: parts[2] / (parts[0] + parts[1]))
        assert whole <= 2 * (bare + start), f"{whole:.2f} s for {bare:.2f} s of calls and {start:.2f} s of start"


@pytest.mark.heavy
def test_at_vasts_own_pace_it_is_the_pace_that_takes_the_time(tmp_path: Path, empty: str) -> None:
    """25 rows a page and a second between pages: forty pages, which nobody can make quicker. Asked for side by side."""
    with crowded(tmp_path, "vast") as sim, ThreadPoolExecutor(2) as side_by_side:
        env = environment(sim, "vast", tmp_path / "home")
        whole = side_by_side.submit(seconds, lambda: all_in_inventory(env))
        bare = seconds(lambda: all_listed(env))
        assert bare > (COUNT / 25 - 1) * SPACING_S["list"]
        assert whole.result() <= 1.2 * bare + seconds(lambda: inventory(empty, env))


def test_the_inventory_of_this_repository_asks_anew_each_time(tmp_path: Path) -> None:
    """Cached listings are for people who ask for them: a pod that is gone must not look alive to a playbook."""
    with crowded(tmp_path, "runpod") as sim:
        env = environment(sim, "runpod", tmp_path / "home")
        all_in_inventory(env)
        gone = sim.live()[0]
        headers = {"Authorization": f"Bearer {KEYS['runpod']}"}
        requests.delete(f"{sim.url}/v2/pods/{gone['id']}", headers=headers, timeout=10)
        assert billing(env) == COUNT - 1
