"""A run that was left alone: what its monitor has to know, and what it decides."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from crontabs import Crontab
from fakes import ADDRESS, FakeClock, FakeProvider, offer
from pennypod.errors import SshError, TransientError
from pennypod.ledger import Outcome, RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.pod import Pod, PodState
from pennypod.monitor import (
    UNREACHABLE_S,
    Lookout,
    Monitor,
    MonitorError,
    Next,
    Plan,
    check_cron,
    cron_times,
    environment,
    farewell,
    in_crontab,
    judge,
    poll_minutes,
    stays_in_crontab,
)
from pennypod.settings import Settings
from pennypod.training import Frame

RUN = "demo-1201-abcde"
CANARY = "canary-key-0123456789"


def frame(state: str = "running", **other: Any) -> Frame:
    status = {"run": other.pop("run", RUN), "state": state, "started": 0, "exit_code": other.pop("code", None)}
    return Frame(**({"t": 60.0, "status": status, "supervisor": True, "child": True, "tmux": True} | other))


# --- what the pod's report says ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "expected", "why"),
    [
        (frame(), Next.WAIT, "it trains"),
        (frame("finished", code=0), Next.FINISH, "exit code 0"),
        (frame("finished", code=3), Next.FINISH, "exit code 3"),
        (frame("failed_to_start"), Next.FINISH, "over"),
        (frame(supervisor=False), Next.FINISH, "died"),
        (frame(tmux=False), Next.FINISH, "died"),
        (frame(quiet_s=599), Next.WAIT, "it trains"),
        (frame(quiet_s=600), Next.FINISH, "nothing for 10 min"),
        (frame(run="demo-1201-zzzzz"), Next.FINISH, "knows nothing"),
        (frame(status=None), Next.FINISH, "knows nothing"),
    ],
)
def test_what_one_report_says(seen: Frame, expected: Next, why: str) -> None:
    verdict = judge(seen, RUN, 600)
    assert verdict.next is expected
    assert why in verdict.why


def test_a_job_that_may_be_silent_for_ever_is_never_stalled() -> None:
    assert judge(frame(quiet_s=10**6), RUN, 0).next is Next.WAIT


# --- how often to look ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "left_min", "expected"), [(30, 600, 30), (30, 30, 10), (30, 2, 1), (30, -5, 1), (10_000, 10**6, 720)]
)
def test_there_are_three_looks_before_the_end(wanted: int, left_min: float, expected: int) -> None:
    assert poll_minutes(wanted, left_min * 60) == expected


@pytest.mark.parametrize("minutes", [1, 7, 30, 59, 60, 90, 150, 720])
def test_cron_never_looks_less_often_than_asked(minutes: int) -> None:
    minute, hour = cron_times(minutes)
    moments = [
        60 * h + m
        for h in range(48)
        for m in range(60)
        if (m % int(minute[2:]) == 0 if minute.startswith("*/") else m == int(minute))
        and (hour == "*" or h % 24 % int(hour[2:]) == 0)
    ]
    assert max(later - earlier for earlier, later in pairwise(moments)) <= minutes


# --- is there a cron --------------------------------------------------------------------------------------------------


def crontab(rc: int = 0, stderr: str = "") -> Callable[[], subprocess.CompletedProcess[str]]:
    return lambda: subprocess.CompletedProcess(["crontab"], rc, "", stderr)


def test_a_cron_that_runs_is_enough() -> None:
    for read in (crontab(), crontab(1, "no crontab for me\n")):
        check_cron(which=lambda _name: "/usr/bin/crontab", running=lambda: ["init", "cron"], crontab=read)


@pytest.mark.parametrize(
    ("which", "running", "read", "text"),
    [
        (None, ["cron"], crontab(), "apt-get install cron"),
        ("/usr/bin/crontab", ["init"], crontab(), "service cron start"),
        ("/usr/bin/crontab", ["cron"], crontab(1, "you (me) are not allowed to use this program\n"), "not allowed"),
    ],
)
def test_without_one_it_says_what_to_do(which: str | None, running: list[str], read: Any, text: str) -> None:
    with pytest.raises(MonitorError, match=text) as caught:
        check_cron(which=lambda _name: which, running=lambda: running, crontab=read)
    assert "detach" in caught.value.message


# --- what is left behind ----------------------------------------------------------------------------------------------


class World:
    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.start = self.clock.now()
        self.provider = FakeProvider(self.clock)
        self.providers: dict[str, Any] = {"fake": self.provider}
        self.settings = Settings(home, f"sqlite:///{home / 'ledger.sqlite3'}")
        self.ledger = open_ledger(self.settings)
        self.lease = Lease(RUN, 1, int(self.start) + 7200, "aaaaa")
        self.alive = False
        self.frame: Frame | SshError = frame()
        self.monitor = Monitor(self.settings, RUN)
        self.plan = Plan(RUN, 30, self.start + 7200, 180.0, 600.0, "/root/pennypod")
        record = RunRecord(RUN, "demo", "1:1", self.start, str(home / "artifacts"), deadline=self.start + 7200)
        self.ledger.open_run(replace(record, keep_on_disconnect=True))
        self.attempt = self.ledger.open_attempt(self.lease, offer(1), renter="1:1", at=self.start)
        self.ledger.record_pod(self.attempt.id, "pod-1", self.start)
        self.ledger.record_ready(self.attempt.id, ADDRESS, self.start)
        self.provider.live["pod-1"] = Pod(
            "fake", "pod-1", self.lease.name, PodState.RUNNING, self.start, 200_000, address=ADDRESS
        )

    def leave(self, **environ: str) -> bool:
        return self.monitor.leave(self.plan, Path("/srv/pennypod"), ["vast"], environ)

    def look(self, **options: Any) -> tuple[Next, str]:
        def see(*_args: object) -> Frame:
            if isinstance(self.frame, SshError):
                raise self.frame
            return self.frame

        lookout = Lookout(
            self.settings, self.ledger, self.providers, self.clock, alive=lambda _process: self.alive, see=see
        )
        verdict = lookout.look(RUN, **options)
        return verdict.next, verdict.why


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "state folder")


def test_keys_are_for_the_owner_only_and_only_those_that_the_run_needs(world: World) -> None:
    os.umask(0)
    world.leave(VAST_API_KEY=CANARY, RUNPOD_API_KEY="other", SECRET="other", VAST_URL="https://v", PATH="/bin")
    kept = (world.monitor.folder / "environment").read_text()
    assert CANARY in kept
    assert "other" not in kept
    assert stat.S_IMODE((world.monitor.folder / "environment").stat().st_mode) == 0o600
    assert stat.S_IMODE(world.monitor.folder.stat().st_mode) == 0o700
    for file in world.monitor.folder.iterdir():
        assert CANARY not in file.read_text() or file.name == "environment"


def test_a_shell_reads_the_environment_as_it_was(world: World) -> None:
    odd = "a'b\"c $HOME `x` \\ %"
    world.leave(VAST_API_KEY=odd, PATH="/bin")
    read = ["/bin/sh", "-c", f". '{world.monitor.folder}/environment'; printf %s \"$VAST_API_KEY\""]
    assert subprocess.run(read, capture_output=True, text=True, env={}).stdout == odd
    assert environment(world.settings, [], {})["PENNYPOD_HOME"] == str(world.settings.home)


def test_leaving_twice_changes_nothing_and_what_was_left_is_found(world: World) -> None:
    assert world.monitor.plan() is None
    assert world.leave(PATH="/bin") is True
    assert world.leave(PATH="/bin") is False
    assert world.monitor.plan() == world.plan


def run_script(world: World, tmp_path: Path) -> Crontab:
    """The script's turn, with a crontab that holds its line and somebody else's."""
    table = Crontab(tmp_path)
    others = "5 4 * * * /usr/bin/true"
    table.file.write_text(f"{others}\n#Ansible: {world.monitor.name}\n*/30 * * * * {world.monitor.cron_job}\n")
    assert table.commands()[1] == world.monitor.cron_job
    table.start(table.commands()[1]).wait(20)
    assert others in table.lines()
    return table


def test_a_monitor_without_its_keys_takes_its_own_line_out_of_the_crontab(world: World, tmp_path: Path) -> None:
    world.leave(PATH="/bin")
    world.monitor.remove()
    assert world.monitor.script.exists()
    table = run_script(world, tmp_path)
    assert RUN not in table.file.read_text()
    assert not world.monitor.folder.exists()


def test_a_monitor_long_past_its_deadline_goes_by_itself(world: World, tmp_path: Path) -> None:
    world.leave(PATH="/bin")  # its deadline is years ago by the clock of this machine
    table = run_script(world, tmp_path)
    assert RUN not in table.file.read_text()
    assert "this monitor ends" in world.monitor.log.read_text()


def test_the_crontab_is_asked_whether_the_line_is_there(world: World) -> None:
    line = f"*/30 * * * * {world.monitor.cron_job}\n"
    for text, expected in ((line, True), (f"# {line}", False), ("", False)):
        assert in_crontab(world.monitor.script, lambda t=text: subprocess.CompletedProcess([], 0, t, "")) is expected


def test_a_line_that_another_command_writes_over_is_noticed(world: World) -> None:
    line = f"*/30 * * * * {world.monitor.cron_job}\n"
    for after, expected in ((line, True), ("", False)):
        texts = [line, after]
        read = lambda t=texts: subprocess.CompletedProcess([], 0, t.pop(0), "")  # noqa: E731
        assert stays_in_crontab(world.monitor.script, world.clock, read) is expected


# --- what is to be done -----------------------------------------------------------------------------------------------


def test_a_training_that_goes_on_is_left_alone(world: World) -> None:
    world.leave(PATH="/bin")
    assert world.look()[0] is Next.WAIT


def test_a_training_that_is_over_is_finished(world: World) -> None:
    world.leave(PATH="/bin")
    world.frame = frame("finished", code=0)
    assert world.look()[0] is Next.FINISH


def test_a_run_that_somebody_works_on_is_theirs(world: World) -> None:
    world.alive = True
    world.frame = frame("finished", code=0)
    assert world.look()[0] is Next.BUSY
    assert world.look(cancel=True)[0] is Next.BUSY


def test_a_run_that_is_to_be_cancelled_is_ended_whatever_it_does(world: World) -> None:
    assert world.look(cancel=True)[0] is Next.END


def test_near_its_deadline_a_run_is_followed_to_its_end(world: World) -> None:
    """The look after the next would come too late, so this one stays."""
    world.leave(PATH="/bin")
    world.clock.time = world.plan.deadline - 180 - 31 * 60 - 1
    assert world.look()[0] is Next.WAIT
    world.clock.time += 1
    assert world.look()[0] is Next.FINISH


@pytest.mark.parametrize("how", ["gone", "stopped", "failed"])
def test_a_run_whose_pod_is_gone_or_dead_is_finished(world: World, how: str) -> None:
    pod = world.provider.live.pop("pod-1")
    if how != "gone":
        world.provider.live["pod-1"] = replace(pod, state=PodState(how))
    step, why = world.look()
    assert (step, how in why) == (Next.FINISH, True)


def test_a_pod_that_one_answer_leaves_out_is_not_gone(world: World) -> None:
    pod = world.provider.live.pop("pod-1")
    world.clock.on_sleep = lambda: world.provider.live.update({"pod-1": pod})
    assert world.look()[0] is Next.WAIT


def test_a_provider_that_cannot_be_asked_is_no_reason_to_end_a_run(world: World) -> None:
    world.provider.live.clear()
    world.provider.list_faults = [TransientError("HTTP 502")]
    assert world.look() == (Next.WAIT, "fake cannot be asked: HTTP 502")
    world.providers.clear()
    assert "key is missing" in world.look()[1]


def test_a_pod_out_of_reach_gets_as_long_as_it_would_under_a_watch(world: World) -> None:
    world.leave(PATH="/bin")
    world.frame = SshError("timed out")
    assert world.look()[0] is Next.WAIT
    world.clock.time += UNREACHABLE_S - 1
    assert world.look()[0] is Next.WAIT
    world.frame = frame()
    assert world.look()[0] is Next.WAIT
    world.frame = SshError("timed out")
    world.clock.time += 2
    assert world.look()[0] is Next.WAIT, "it was reached meanwhile"
    world.clock.time += UNREACHABLE_S
    step, why = world.look()
    assert (step, "out of reach for 5 min" in why) == (Next.FINISH, True)


def test_a_run_that_is_over_needs_no_monitor(world: World) -> None:
    world.ledger.close_run(RUN, Outcome.SUCCEEDED, "home", world.start + 9)
    assert world.look()[0] is Next.END, "closed, and its pod may still bill"
    world.ledger.record_gone(world.attempt.id, {}, world.start + 9, 1)
    assert world.look() == (Next.OVER, "the run is over: succeeded (home)")


def test_a_run_that_was_stopped_is_ended(world: World) -> None:
    world.ledger.fence(RUN, "the deadline passed")
    assert world.look()[0] is Next.END


# --- the farewell -----------------------------------------------------------------------------------------------------


def test_the_last_line_says_what_bills_who_looks_until_when_and_what_to_type(world: World) -> None:
    assert farewell(world.settings, world.ledger, RUN) == ""
    world.leave(PATH="/bin")
    text = farewell(world.settings, world.ledger, RUN)
    assert "fake pod pod-1 bills $0.2000/h, at the latest until 2025-12-01 16:40 UTC" in text
    assert "cron looks every 30 min" in text
    assert f"playbooks/finish.yml -e run={RUN}" in text
    assert "-e cancel=true" in text
    world.ledger.close_run(RUN, Outcome.SUCCEEDED, "home", world.start + 9)
    assert farewell(world.settings, world.ledger, RUN) == ""


def test_a_plan_that_cannot_be_read_is_none(world: World) -> None:
    world.leave(PATH="/bin")
    for text in ("", json.dumps({"run": RUN})):
        (world.monitor.folder / "plan.json").write_text(text)
        assert world.monitor.plan() is None
