"""Stage times: when a stage begins and ends as tasks start, and that nothing here can fail a play."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pennypod.ledger import Ledger, RunRecord, open_ledger
from pennypod.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
RUN = "demo-1201-abcde"
OTHER = "demo-1201-fghij"


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock.time)
    return clock


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ledger:
    monkeypatch.setenv("PENNYPOD_HOME", str(tmp_path))
    monkeypatch.delenv("PENNYPOD_DATABASE_URL", raising=False)
    ledger = open_ledger(load_settings())
    for run in (RUN, OTHER):
        ledger.open_run(RunRecord(run, "demo", "1:1", 0.0, "/tmp/artifacts"))
    return ledger


@pytest.fixture
def callback(ledger: Ledger, clock: Clock) -> Any:
    path = ROOT / "callback_plugins" / "pennypod_stages.py"
    spec = importlib.util.spec_from_file_location("pennypod_stages_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.CallbackModule()
    made._display = SimpleNamespace(warnings=[], verbosity=0)
    made._display.warning = made._display.warnings.append
    return made


def start(callback: Any, role: str | None, host: str = RUN) -> None:
    task = SimpleNamespace(_role=None if role is None else SimpleNamespace(get_name=lambda: role))
    callback.v2_runner_on_start(SimpleNamespace(get_name=lambda: host), task)


def times(ledger: Ledger, run: str = RUN) -> dict[str, tuple[float, float | None]]:
    return {stage.stage: (stage.started, stage.finished) for stage in ledger.stages(run)}


def test_a_stage_lasts_from_its_roles_first_task_to_the_next_roles_first_task(
    callback: Any, ledger: Ledger, clock: Clock
) -> None:
    for at, role in ((10, "pod"), (20, "bootstrap"), (25, "bootstrap"), (40, "dataset"), (50, "training")):
        clock.now = at
        start(callback, role)
    clock.now = 90
    callback.v2_playbook_on_stats(None)
    assert times(ledger) == {"bootstrap": (20, 40), "dataset": (40, 50), "training": (50, 90)}


def test_every_host_has_its_own_stages(callback: Any, ledger: Ledger, clock: Clock) -> None:
    for host in (RUN, OTHER):
        start(callback, "pod", host)
    for at, host, role in ((1, RUN, "training"), (2, OTHER, "dataset"), (3, RUN, "weights"), (4, OTHER, "training")):
        clock.now = at
        start(callback, role, host)
    clock.now = 9
    callback.v2_playbook_on_stats(None)
    assert times(ledger) == {"training": (1, 3), "weights": (3, 9)}
    assert times(ledger, OTHER) == {"dataset": (2, 4), "training": (4, 9)}


@pytest.mark.parametrize("between", [None, "golden_image"])
def test_a_task_of_no_stage_ends_the_stage_and_coming_back_keeps_its_start(
    callback: Any, ledger: Ledger, clock: Clock, between: str | None
) -> None:
    start(callback, "pod")
    for at, role in ((1, "bootstrap"), (2, between), (5, "bootstrap"), (7, "teardown")):
        clock.now = at
        start(callback, role)
        if at == 2:
            assert times(ledger) == {"bootstrap": (1, 2)}
    assert times(ledger) == {"bootstrap": (1, 7), "teardown": (7, None)}


def test_what_happens_before_the_pod_is_asked_for_is_no_stage(callback: Any, ledger: Ledger, clock: Clock) -> None:
    """The check of the data set comes before the plan, and must not count as shipping it."""
    for at, role in ((1, "dataset"), (2, "pod"), (5, "dataset"), (7, "teardown")):
        clock.now = at
        start(callback, role)
    assert times(ledger) == {"dataset": (5, 7), "teardown": (7, None)}
    start(callback, "teardown", OTHER)  # a run that fails before its pod is torn down all the same
    assert times(ledger, OTHER) == {"teardown": (7, None)}


def test_hosts_that_are_no_runs_of_this_ledger_are_left_alone(callback: Any, ledger: Ledger) -> None:
    for host in ("localhost", "demo-1201-zzzzz"):
        start(callback, "pod", host)
        start(callback, "bootstrap", host)
        start(callback, "dataset", host)
    callback.v2_playbook_on_stats(None)
    assert ledger.stages("demo-1201-zzzzz") == []
    assert callback._display.warnings == []


def test_a_broken_ledger_is_one_warning_and_no_exception(
    callback: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PENNYPOD_HOME", str(tmp_path / "file"))
    for role in ("pod", "bootstrap", "dataset"):
        start(callback, role)
    callback.v2_playbook_on_stats(None)
    (warning,) = callback._display.warnings
    assert "stage times are not recorded" in warning


def test_no_open_database_is_left_for_forked_workers(callback: Any, ledger: Ledger, tmp_path: Path) -> None:
    def open_files() -> list[str]:
        """Of this test alone: others have left ledgers behind, which may be collected at any moment."""
        links = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
        return [link for link in links if link.startswith(str(tmp_path))]

    ledger.run(RUN)
    assert open_files() != [], "an open ledger would be seen"
    ledger.close()
    start(callback, "pod")
    start(callback, "bootstrap")
    assert callback._stage_of == {RUN: "bootstrap"}
    assert open_files() == []
