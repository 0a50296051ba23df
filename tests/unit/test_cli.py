"""The `pennypod` command: what it prints, where it prints it, and the exit code it leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from fakes import ADDRESS, FakeClock, FakeProvider, offer
from pennypod import __version__, processes
from pennypod.cli import main
from pennypod.cli.app import App
from pennypod.cli.times import parse_duration
from pennypod.errors import AuthError, TransientError
from pennypod.ledger import ArtifactRecord, Ledger, LedgerError, Outcome, RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.pod import Pod, PodState
from pennypod.sentinel import only_one
from pennypod.settings import Settings
from pennypod.ssh import make_key_pair, trust_host_keys
from pennypod.unwatched import OVERDUE_AFTER_S

ROOT = Path(__file__).resolve().parents[2]
RUN = "demo-1201-abcde"
OTHER = "fdi-1201-fghij"
NOON = 1_764_590_400.0  # 2025-12-01 12:00 UTC


class World:
    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}")
        self.clock = FakeClock(NOON)
        self.provider = FakeProvider(self.clock)
        self.ledger: Ledger = open_ledger(self.settings)

    def call(self, *args: str) -> Result:
        app = App(self.settings, self.clock, lambda _settings: {"fake": self.provider})
        return CliRunner().invoke(main, list(args), obj=app)

    def rented(
        self,
        run: str = RUN,
        at: float = NOON,
        ends: Outcome | None = None,
        seconds: float = 100,
        *,
        controller: str = "",
        keep: bool = False,
    ) -> None:
        """A run with a pod at 0.36 $/h, ended with `ends` after `seconds`, or still going on under this process."""
        job, folder = run.split("-", maxsplit=1)[0], str(self.settings.home / "artifacts")
        record = RunRecord(run, job, controller or processes.own_identity(), at, folder)
        self.ledger.open_run(replace(record, keep_on_disconnect=keep))
        lease = Lease(run, 1, int(at) + 600, "aaaaa")
        attempt = self.ledger.open_attempt(lease, offer(1, 360_000), renter="1:1", at=at)
        pod_id = f"pod-{attempt.id}"
        self.ledger.record_pod(attempt.id, pod_id, at)
        self.ledger.record_ready(attempt.id, ADDRESS, at)
        if ends is None:
            self.provider.live[pod_id] = Pod("fake", pod_id, lease.name, PodState.RUNNING, at, 360_000, address=ADDRESS)
            return
        self.ledger.record_destroying(attempt.id, ends.value, "over", at + seconds)
        self.ledger.record_gone(attempt.id, {}, at + seconds, 10_000)
        self.ledger.close_run(run, ends, "over", at + seconds)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "home")


# --- what every command keeps to --------------------------------------------------------------------------------------


def commands(group: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize("path", commands(main), ids=" ".join)
def test_every_command_has_help_that_needs_nothing(path: tuple[str, ...], tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    result = world.call(*path, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage:")
    assert result.stderr == ""


def test_the_exit_codes_are_documented() -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"]).stdout.split())
    assert "0 done, 1 failed, 2 wrong usage, 3 something may still be billing" in text


def test_version(world: World) -> None:
    assert __version__ in world.call("--version").stdout


@pytest.mark.parametrize(
    "args",
    [
        ("nonsense",),
        ("ledger", "--nonsense"),
        ("ledger", "verdict", RUN, "maybe"),
        ("ledger", "--since", "tomorrowish"),
        ("sweep", "--now", "2h"),
        ("sweep", "--now", "+"),
        ("sweep", "--unreadable-after", "0s"),
        ("sentinel", "--interval", "soon"),
        ("report",),
        ("sample-data", "audio", "x"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(world: World, args: tuple[str, ...]) -> None:
    result = world.call(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert "--help)" in result.stderr


@pytest.mark.parametrize("args", [("report", RUN), ("ssh", RUN), ("ledger", "verdict", RUN, "adopt")])
def test_an_unknown_run_is_one_line_and_exit_code_1(world: World, args: tuple[str, ...]) -> None:
    result = world.call(*args)
    assert result.exit_code == 1
    assert result.stderr == f"error: the ledger has no run {RUN!r}: `pennypod ledger` lists them\n"


def test_a_ledger_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    settings = Settings(home=tmp_path / "home", database_url=f"sqlite:///{tmp_path / 'home' / 'l.db'}")
    result = CliRunner().invoke(main, ["ledger"], obj=App(settings))
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("args", [("ledger",), ("ledger", "--json"), ("report", RUN), ("report", RUN, "--json")])
def test_what_may_still_bill_is_said_last_and_on_stderr(world: World, args: tuple[str, ...]) -> None:
    world.rented()
    result = world.call(*args)
    assert result.exit_code == 0
    last = result.stderr.splitlines()[-1]
    assert last.startswith("may still be billing: 1 pod")
    assert Lease(RUN, 1, int(NOON) + 600, "aaaaa").name in last


@pytest.mark.parametrize("args", [("--version",), ("sample-data", "--help"), ("verify", "no-such-file")])
def test_a_command_that_has_no_need_of_the_ledger_says_it_too(world: World, args: tuple[str, ...]) -> None:
    world.rented()
    assert world.call(*args).stderr.splitlines()[-1].startswith("may still be billing: 1 pod,")


@pytest.mark.parametrize("args", [("report", RUN), ("ledger",), ("ledger", "--json"), ("report", RUN, "--json")])
def test_a_pod_that_should_be_gone_makes_the_exit_code_3_and_one_at_work_does_not(
    world: World, args: tuple[str, ...]
) -> None:
    world.rented()
    assert world.call(*args).exit_code == 0
    (attempt,) = world.ledger.attempts(RUN)
    world.ledger.record_destroying(attempt.id, "done", "over", NOON + 50)
    assert world.call(*args).exit_code == 3
    assert world.call("ledger", "verdict", RUN, "skip").exit_code == 0


DEAD = "4194304:1"  # above the largest pid there can be
SHOWS = pytest.mark.parametrize("args", [("report", RUN), ("ledger",), ("ledger", "--json"), ("report", RUN, "--json")])


def elsewhere() -> str:
    return f"{processes.own_identity().rpartition(':')[0]}:00000000.00000000.1"


@SHOWS
def test_a_run_whose_command_and_guard_are_dead_is_unwatched(world: World, args: tuple[str, ...]) -> None:
    world.rented(controller=DEAD)
    result = world.call(*args)
    assert result.exit_code == 3
    assert "unwatched" in result.output
    assert f"pennypod sweep --run {RUN} --now +11m" in result.output
    assert "running" not in result.stdout


def test_the_sweep_that_is_advised_ends_the_pod(world: World) -> None:
    world.rented(controller=DEAD)
    assert world.call("sweep", "--run", RUN, "--now", "+11m").exit_code == 0
    assert world.provider.live == {}
    assert world.call("report", RUN).exit_code == 0


@SHOWS
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("controller", [DEAD, elsewhere(), ""], ids=["dead", "elsewhere", "alive"])
def test_a_run_past_its_deadline_is_overdue_whoever_lives(
    world: World, args: tuple[str, ...], controller: str, keep: bool
) -> None:
    world.rented(controller=controller, keep=keep)
    world.clock.sleep(600 + OVERDUE_AFTER_S + 1)
    result = world.call(*args)
    assert result.exit_code == 3
    assert "overdue" in result.output
    assert "`pennypod sweep` ends it" in result.output


@SHOWS
@pytest.mark.parametrize("watch", ["its guard", "another machine", "left on purpose", "nearly due"])
def test_a_run_that_somebody_sees_to_is_running(world: World, args: tuple[str, ...], watch: str) -> None:
    world.rented(
        controller={"another machine": elsewhere(), "nearly due": ""}.get(watch, DEAD), keep=watch == "left on purpose"
    )
    world.settings.guards_dir.mkdir(parents=True)
    with (world.settings.guards_dir / f"{DEAD.replace(':', '-')}.lock").open("wb") as lock:
        if watch == "its guard":
            fcntl.flock(lock, fcntl.LOCK_EX)
        if watch == "nearly due":
            world.clock.sleep(600 + OVERDUE_AFTER_S - 1)
        result = world.call(*args)
    assert result.exit_code == 0
    assert "running" in result.stdout


@SHOWS
@pytest.mark.parametrize(
    ("controller", "outcome"),
    [(DEAD, "cancelled"), (processes.own_identity(), "running"), (elsewhere(), "running")],
    ids=["dead", "alive", "elsewhere"],  # two test workers must give a test the same name
)
def test_a_run_whose_command_died_before_it_rented_is_over(
    world: World, args: tuple[str, ...], controller: str, outcome: str
) -> None:
    world.ledger.open_run(RunRecord(RUN, "demo", controller, NOON, "/tmp"))
    result = world.call(*args)
    assert result.exit_code == 0
    assert outcome in result.stdout
    assert world.ledger.run(RUN).outcome == (outcome if outcome != "running" else None)


@SHOWS
def test_a_ledger_that_cannot_be_written_is_shown_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    world.ledger.open_run(RunRecord(RUN, "demo", DEAD, NOON, "/tmp"))

    def refuse(*_args: object, **_options: object) -> bool:
        raise LedgerError("database or disk is full")

    monkeypatch.setattr(Ledger, "fence", refuse)
    result = world.call(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "running" in result.stdout


def test_nothing_is_said_when_nothing_bills(world: World) -> None:
    world.rented(ends=Outcome.SUCCEEDED)
    assert world.call("ledger").stderr == ""


# --- ledger -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def history(world: World) -> World:
    day = 86400
    world.rented("demo-1129-aaaaa", NOON - 2 * day, Outcome.SUCCEEDED)
    world.rented("demo-1130-bbbbb", NOON - day, Outcome.FAILED, seconds=50)
    world.rented("fdi-1201-ccccc", NOON, Outcome.SUCCEEDED, seconds=3600)
    return world


def test_the_ledger_as_json_with_totals_per_job_and_over_all(history: World) -> None:
    document = json.loads(history.call("ledger", "--json").stdout)
    assert [(row["run"], row["outcome"], row["cost_usd"]) for row in document["runs"]] == [
        ("demo-1129-aaaaa", "succeeded", 0.01),
        ("demo-1130-bbbbb", "failed", 0.005),
        ("fdi-1201-ccccc", "succeeded", 0.36),
    ]
    assert document["totals"] == {
        "demo": {"runs": 2, "succeeded": 1, "seconds": 150.0, "cost_usd": 0.015},
        "fdi": {"runs": 1, "succeeded": 1, "seconds": 3600.0, "cost_usd": 0.36},
        "": {"runs": 3, "succeeded": 2, "seconds": 3750.0, "cost_usd": 0.375},
    }


@pytest.mark.parametrize(
    ("args", "runs"),
    [
        (("--job", "fdi"), ["fdi-1201-ccccc"]),
        (("--since", "2025-11-30"), ["demo-1130-bbbbb", "fdi-1201-ccccc"]),
        (("--until", "2025-11-30"), ["demo-1129-aaaaa", "demo-1130-bbbbb"]),  # the whole of that day
        (("--since", "2025-11-30", "--until", "2025-11-30"), ["demo-1130-bbbbb"]),
        (("--until", "2025-11-30T11:59"), ["demo-1129-aaaaa"]),
        (("--since", "2025-11-30T13:00+01:00"), ["demo-1130-bbbbb", "fdi-1201-ccccc"]),
        (("--job", "nothing"), []),
        (("--since", "1h"), []),  # an hour before the real now
    ],
)
def test_runs_are_chosen_by_job_and_dates(history: World, args: tuple[str, ...], runs: list[str]) -> None:
    document = json.loads(history.call("ledger", "--json", *args).stdout)
    assert [row["run"] for row in document["runs"]] == runs
    assert document["totals"][""]["runs"] == len(runs)


def test_the_table_holds_every_column_even_without_a_terminal(history: World) -> None:
    text = history.call("ledger").stdout
    for part in (
        "demo-1130-bbbbb",
        "2025-11-30 12:00:00",
        "CPU",
        "fake",
        "3600",
        "$0.3600",
        "failed",
        "2 runs, 1 succeeded",
    ):
        assert part in text
    assert "…" not in text


def test_an_empty_ledger_is_no_error(world: World) -> None:
    result = world.call("ledger")
    assert (result.exit_code, result.stdout) == (0, "no runs\n")


def test_a_verdict_is_kept_and_shown(history: World) -> None:
    result = history.call("ledger", "verdict", "demo-1129-aaaaa", "skip", "--note", "overfitted")
    assert (result.exit_code, result.stdout) == (0, "demo-1129-aaaaa: skip (overfitted)\n")
    (row, *_) = json.loads(history.call("ledger", "--json").stdout)["runs"]
    assert (row["verdict"], row["note"]) == ("skip", "overfitted")


# --- report and ssh ---------------------------------------------------------------------------------------------------


def test_a_report_is_the_runs_document(world: World) -> None:
    world.rented(ends=Outcome.SUCCEEDED)
    world.ledger.record_artifacts([ArtifactRecord(RUN, "best.npz", 5, "a" * 64, "weights")])
    document = json.loads(world.call("report", RUN, "--json").stdout)
    assert (document["run"], document["outcome"], document["cost_usd"]) == (RUN, "succeeded", 0.01)
    text = world.call("report", RUN).stdout
    assert "a" * 64 in text
    assert "pods still billing: 0" in text


@pytest.fixture
def reachable(world: World) -> World:
    world.rented()
    run_dir = world.settings.run_dir(RUN)
    make_key_pair(run_dir, "test")
    _, host_key = make_key_pair(run_dir / "host", "host")
    trust_host_keys(run_dir / "known_hosts", ADDRESS.host, ADDRESS.port, [host_key])
    return world


def test_ssh_prints_lines_with_the_runs_own_key_and_pinned_host_key(reachable: World) -> None:
    result = reachable.call("ssh", RUN, "--print")
    ssh_line, scp_line = result.stdout.splitlines()
    run_dir = reachable.settings.run_dir(RUN)
    for line in (ssh_line, scp_line):
        assert f"-i {run_dir / 'id_ed25519'}" in line
        assert f"UserKnownHostsFile={run_dir / 'known_hosts'}" in line
        assert "StrictHostKeyChecking=yes" in line
    assert ssh_line.startswith("ssh ")
    assert ssh_line.endswith(" -p 2222 root@127.0.0.1")
    assert scp_line.startswith("scp ")
    assert scp_line.endswith(f" root@127.0.0.1:/root/pennypod/out/. {RUN}-out")


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ([], None),
        (["nvidia-smi"], "nvidia-smi"),
        (["cd /tmp && ls"], "cd /tmp && ls"),  # one word is a line for the shell
        (["ls", "-l", "a b"], "ls -l 'a b'"),  # several words are a program and its arguments
    ],
)
def test_ssh_hands_the_terminal_to_ssh(
    reachable: World, monkeypatch: pytest.MonkeyPatch, words: list[str], sent: str | None
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda file, argv: called.append([file, *argv]))
    result = reachable.call("ssh", RUN, *(["--", *words] if words else []))
    assert result.exit_code == 0
    (argv,) = called
    assert argv[:2] == ["ssh", "ssh"]
    assert argv[-1] == (sent if sent is not None else "root@127.0.0.1")


def test_ssh_to_a_pod_that_is_gone_says_so(world: World) -> None:
    world.rented(ends=Outcome.SUCCEEDED)
    result = world.call("ssh", RUN)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: the pod of {RUN} is gone since 2025-12-01 12:01:40 UTC (succeeded)")


def test_ssh_to_a_pod_that_is_still_starting_says_so(world: World) -> None:
    world.ledger.open_run(RunRecord(RUN, "demo", "1:1", NOON, "/tmp"))
    assert "has rented no pod" in world.call("ssh", RUN).stderr
    world.ledger.open_attempt(Lease(RUN, 1, int(NOON), "aaaaa"), offer(1), renter="1:1", at=NOON)
    assert "still starting" in world.call("ssh", RUN).stderr


def test_looking_at_a_run_makes_no_keys(world: World) -> None:
    world.rented()
    world.call("report", RUN)
    world.call("ledger")
    assert not world.settings.runs_dir.exists()


# --- sweep ------------------------------------------------------------------------------------------------------------


def test_a_sweep_with_nothing_due(world: World) -> None:
    world.rented()
    result = world.call("sweep")
    assert (result.exit_code, result.stdout) == (0, "0 due, 1 within their time\n")
    assert world.provider.live


def test_a_dry_run_tells_what_a_sweep_would_do(world: World) -> None:
    world.rented()
    result = world.call("sweep", "--dry-run", "--now", "+2h", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["dry_run"] is True
    assert document["judged_at"] == NOON + 7200
    (pod,) = document["pods"]
    assert (pod["run"], pod["action"], pod["reason"]) == (RUN, "would destroy", "the deadline passed")
    assert world.provider.live
    assert "would destroy" in world.call("sweep", "--dry-run", "--now", "+2h").stdout


def test_a_sweep_destroys_and_nothing_may_bill_afterwards(world: World) -> None:
    world.rented()
    result = world.call("sweep", "--now", "+2h")
    assert result.exit_code == 0
    assert "1 due, 0 within their time" in result.stdout
    assert result.stderr == ""
    assert world.provider.live == {}


def test_a_pod_that_will_not_go_is_exit_code_3(world: World) -> None:
    world.rented()
    world.provider.ignored_destroys = 10**9
    result = world.call("sweep", "--now", "+2h")
    assert result.exit_code == 3
    assert "not proven gone" in result.stdout
    assert result.stderr.splitlines()[0].startswith("error: pod pod-1")
    assert result.stderr.splitlines()[-1].startswith("may still be billing: 1 pod")


def test_a_provider_that_cannot_be_listed_is_exit_code_3(world: World) -> None:
    world.provider.list_faults = [TransientError("HTTP 500")]
    result = world.call("sweep")
    assert result.exit_code == 3
    assert result.stderr == "error: fake cannot be looked at: HTTP 500\n"


def test_a_broken_ledger_does_not_keep_a_pod_alive(world: World) -> None:
    world.rented()
    world.ledger.close()
    assert world.settings.ledger_file is not None
    for file in world.settings.home.glob("ledger.sqlite3*"):
        file.unlink()
    world.settings.ledger_file.write_bytes(b"no database" * 1000)
    result = world.call("sweep", "--now", "+2h")
    assert result.exit_code == 0
    assert "sweeping by the pods' names alone" in result.stderr
    assert world.provider.live == {}


# --- offers and sample data -------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "group_vars").mkdir(parents=True)
    (root / "roles/pod/defaults").mkdir(parents=True)
    (root / "roles/pod/defaults/main.yml").write_text(
        'pod_boot_minutes: 3\npod_gpu: []\npod_max_cost_usd: "{{ max_cost_usd | default(none) }}"\n'
    )
    (root / "group_vars/all.yml").write_text("pod_budget_factor: 2\n")
    (root / "group_vars/job_demo.yml").write_text(
        "training_command: x\npod_train_minutes: 57\npod_smoke_minutes: 2\npod_disk_gb: '{{ size }}'\n"
    )
    return root


def test_offers_of_a_job_with_its_own_values_over_the_roles(world: World, repository: Path) -> None:
    result = world.call("offers", "-j", "demo", "--root", str(repository), "--json")
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    assert [item["machine_id"] for item in plan["offers"]] == ["machine-1", "machine-2", "machine-3"]
    assert plan["deadline_s"] == 2 * 60 * 60  # (3 + 57 minutes) x 2
    assert plan["worst_case_usd"] == 0.4
    assert plan["notes"][-1] == "templates, taken at their default: pod_disk_gb"
    smoke = json.loads(world.call("offers", "-j", "demo", "--root", str(repository), "--smoke", "--json").stdout)
    assert smoke["deadline_s"] == 2 * 5 * 60
    text = world.call("offers", "-j", "demo", "--root", str(repository)).stdout
    assert "worst case $0.4000: the pod ends after 120.0 min in any case" in text


def test_offers_over_the_cap_is_an_error_before_anything_is_spent(world: World, repository: Path) -> None:
    result = world.call("offers", "-j", "demo", "--root", str(repository), "--max-cost-usd", "0.1")
    assert result.exit_code == 1
    assert "nothing was rented" in result.stderr


@pytest.mark.parametrize("value", ["nan", "-1", "inf"])
@pytest.mark.parametrize("option", ["--max-cost-usd", "--max-price-usd-per-h"])
def test_offers_under_a_cap_that_is_none_is_wrong_usage_of_that_option(
    world: World, repository: Path, option: str, value: str
) -> None:
    result = world.call("offers", "-j", "demo", "--root", str(repository), option, value)
    assert result.exit_code == 2
    assert f"{option} is {float(value)}: give a number of dollars, 0 or more" in result.stderr
    assert "job file" not in result.stderr


def test_offers_says_when_a_provider_refuses_the_key(
    world: World, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: object) -> list[Pod]:
        raise AuthError("fake: Invalid user key")

    monkeypatch.setattr(FakeProvider, "pods", refuse)
    result = world.call("offers", "-j", "demo", "--root", str(repository))
    assert "with this key: fake: Invalid user key" in result.stdout


def test_a_full_disk_is_one_line_whoever_wrote(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/state/x")

    monkeypatch.setattr(sys.modules["pennypod.cli.offers"], "find_root", write)
    result = world.call("offers", "-j", "demo")
    assert result.exit_code == 1
    assert "error: no room left on the disk of /state/x: free some room on it" in result.stderr


def test_offers_of_a_job_that_is_none(world: World, repository: Path) -> None:
    result = world.call("offers", "-j", "nope", "--root", str(repository))
    assert result.exit_code == 1
    assert "known jobs are demo" in result.stderr


def test_offers_of_every_job_of_this_repository(world: World) -> None:
    jobs = sorted(path.stem.removeprefix("job_") for path in (ROOT / "group_vars").glob("job_*.yml"))
    assert "demo" in jobs
    for job in jobs:
        result = world.call("offers", "-j", job, "--root", str(ROOT), "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["worst_case_usd"] > 0


def test_sample_data_is_made(world: World, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    result = world.call("sample-data", "yolo", str(tmp_path / "shapes"))
    assert result.exit_code == 0
    assert (tmp_path / "shapes" / "data.yaml").is_file()


def test_sample_data_that_cannot_be_made_is_exit_code_1(world: World, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "thesis.txt").write_text("precious")
    assert world.call("sample-data", "yolo", str(tmp_path / "shapes")).exit_code == 1
    assert stat.S_ISREG((tmp_path / "shapes" / "thesis.txt").stat().st_mode)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1d12h", 129600), ("1h30m5s", 5405), ("0s", 0)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-5", "1.5h", "2w", "5m1h", " 5s", "1h "])
def test_what_is_no_duration(text: str) -> None:
    assert parse_duration(text) is None


def test_the_console_script_is_this_command() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="pennypod")
    loaded: Any = script.load()
    assert loaded is main


def test_a_pod_whose_name_cannot_be_read_is_listed_by_a_dry_run_as_a_sweep_would_end_it(world: World) -> None:
    world.rented()
    (pod,) = world.provider.live.values()
    world.provider.live["pod-7"] = replace(pod, pod_id="pod-7", name="pennypod-demo", created=NOON - 5 * 3600)
    world.provider.live["pod-8"] = replace(pod, pod_id="pod-8", name="database", created=NOON - 5 * 3600)
    assert "2 within their time, 1 of them with a name" in world.call("sweep", "--unreadable-after", "6h").stdout
    dry = json.loads(world.call("sweep", "--dry-run", "--json").stdout)
    assert [(item["pod_name"], item["run"], item["deadline"]) for item in dry["pods"]] == [
        ("pennypod-demo", None, None)
    ]
    result = world.call("sweep")
    assert (result.exit_code, "unreadable" in result.stdout) == (0, True)
    assert sorted(world.provider.live) == ["pod-1", "pod-8"]


# --- sentinel ---------------------------------------------------------------------------------------------------------


def test_a_sentinel_that_looks_once_sweeps_and_says_one_line(world: World) -> None:
    world.rented()
    world.clock.time += 7200
    result = world.call("sentinel", "--once")
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert "1 due, 1 destroyed" in line
    assert world.provider.live == {}
    world.provider.list_faults = [TransientError("HTTP 500")]
    assert world.call("sentinel", "--once").exit_code == 3


def test_a_second_sentinel_is_refused(world: World) -> None:
    with only_one(world.settings):
        result = world.call("sentinel", "--once")
    assert (result.exit_code, "another sentinel" in result.stderr) == (1, True)
