"""A few cells of the crash matrix with every test run, other ones each time, and what the matrix itself promises."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from chaos.cells import RULES, Event, Moment, matrix, named, random_kill, sample
from chaos.ghosts import FAULTS, GhostCell, play_ghosts
from chaos.matrix import prepared, run_cell
from pennypod.simulator.faults import CALL_FAULTS
from pennypod.simulator.faults import POD_FAULTS as FAULTS_OF_PODS
from simulated import simulator

CELLS = 6
# The same for all workers of one test run, another one for the next.
SEED = int(
    os.environ.get("PENNYPOD_CHAOS_SEED") or random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(10**6)
)


def test_a_cell_is_found_by_the_name_that_is_printed() -> None:
    cells = [*matrix(), *(random_kill(seed) for seed in range(20))]
    assert [named(cell.name) for cell in cells] == cells
    assert named("SIGKILL / training / vast").provider == "vast"
    with pytest.raises(KeyError):
        named("SIGKILL / lunch")


def test_every_event_meets_every_moment_that_it_can_happen_at() -> None:
    met = {(cell.event, cell.moment) for cell in matrix() if not cell.fault}
    assert met == {(event, moment) for event in Event for moment in RULES[event].moments}
    for event in (Event.INT, Event.TERM, Event.HUP, Event.KILL, Event.GUARD_TOO, Event.TREE, Event.LOST):
        assert set(RULES[event].moments) == set(Moment)


def test_every_fault_of_the_simulator_is_met_somewhere() -> None:
    met = {cell.fault for cell in matrix()} | {fault.fault for fault in FAULTS.values()}
    # Met by the sweep's and the clients' own tests: what is refused before anything is rented, what only takes longer.
    elsewhere = {"timeout", "slow", "search_quota", "auth", "forbidden", "short_page", "timer_noop", "slow_loading"}
    elsewhere |= {"keys_lost_after", "snapshot_lost"}  # met by a training's and a bake's own tests
    assert set(CALL_FAULTS) | set(FAULTS_OF_PODS) <= met | elsewhere


@pytest.mark.parametrize("survivor", ["guard", "sweep elsewhere"])
def test_a_controller_that_dies_at_any_step_leaves_no_pod(survivor: str, tmp_path: Path) -> None:
    with simulator("--seed", "3") as sim:
        row = play_ghosts(GhostCell("create: reply lost", "runpod", survivor, seed=SEED), tmp_path, sim)
    assert row.problems == []
    assert row.lives > 5
    assert row.pods == row.receipts + row.open > row.open


@pytest.mark.pod
@pytest.mark.heavy
@pytest.mark.parametrize("number", range(CELLS))
def test_a_random_cell_of_the_matrix_holds(number: int, record_property: pytest.RecordProperty) -> None:
    cell = sample(SEED, CELLS)[number]
    print(f"seed {SEED}: make chaos CELL='{cell.name}'")
    record_property("cell", cell.name)
    with tempfile.TemporaryDirectory(prefix="pennypod-chaos-", ignore_cleanup_errors=True) as folder:
        result = run_cell(cell, Path(folder) / "cell", prepared(Path(folder) / "image"))
    record_property("overspend_s", result.overspend_s)
    assert result.problems == []
