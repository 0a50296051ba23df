"""Looking after a run that nobody watches: cron calls, this decides what is to be done. Floor 2.

A run that was started with `detach` has a folder of its own below its run folder: what the monitor has to know, the
environment that cron does not give (keys included, so for the owner only), and the script that cron runs. The crontab's
line itself is Ansible's to write. Touches that folder, the crontab, the run's provider and, by one short look, its pod.
Nothing is ended here: that is done by the roles that end every run, under a controller of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import psutil

from pennypod import processes
from pennypod.acceptance import run_target
from pennypod.clock import Clock
from pennypod.errors import PennypodError, SshError
from pennypod.files import write_atomically
from pennypod.ledger import AttemptRecord, Ledger, RunRecord
from pennypod.model.money import format_usd
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.providers.base import Provider
from pennypod.providers.registry import PROVIDERS
from pennypod.settings import Settings
from pennypod.ssh import Ssh
from pennypod.training import Frame, look

FOLDER = "monitor"
LOG_FILE = "monitor.log"
MAX_POLL_MINUTES = 12 * 60
UNREACHABLE_S = 300.0
"""A pod that its provider calls running and that lets nobody in for so long is given up, as it is under a watch."""

_CRON_DAEMONS = frozenset(("cron", "crond", "fcron", "cronie", "dcron", "busybox-crond"))
_AFTER_DEADLINE_S = 24 * 3600
_LOOKS_FOR_ABSENCE = 2
_CRONTAB_SETTLES_S = 3.0
# What a run needs of the environment that it was started in, besides its provider's key and address.
_KEPT = (
    "PENNYPOD_ENGINE",
    "PENNYPOD_DATABASE_URL",
    "ANSIBLE_CONFIG",
    "DOCKER_HOST",
    "CONTAINER_HOST",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
)


class MonitorError(PennypodError):
    """Nobody could look after a run that is left alone."""

    code = "monitor"


# --- is there a cron that would call ----------------------------------------------------------------------------------


def check_cron(
    *,
    which: Callable[[str], str | None] = shutil.which,
    running: Callable[[], Iterable[str]] | None = None,
    crontab: Callable[[], subprocess.CompletedProcess[str]] | None = None,
) -> None:
    """Raises MonitorError with what to do when a line in the crontab of this user would never be run."""
    if which("crontab") is None:
        raise MonitorError(
            "detach needs cron on this machine, and there is no crontab command: install it (apt-get install cron), or"
            " run without detach"
        )
    done = (crontab or _read_crontab)()
    if done.returncode != 0 and "no crontab for" not in done.stderr.lower():
        why = done.stderr.strip().splitlines()
        raise MonitorError(
            f"detach needs a crontab, and this user may have none: {why[0] if why else 'crontab failed'}"
        )
    if not any(name in _CRON_DAEMONS for name in (running or _process_names)()):
        raise MonitorError(
            "detach needs a cron that runs, and there is no cron daemon on this machine: start it (service cron start),"
            " or run without detach"
        )


def _process_names() -> Iterable[str]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield process.name()


def _read_crontab() -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["crontab", "-l"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as exc:
        return subprocess.CompletedProcess(["crontab"], 1, "", str(exc))


def in_crontab(script: Path, read: Callable[[], subprocess.CompletedProcess[str]] = _read_crontab) -> bool:
    """Whether a line of the crontab calls that script."""
    lines = read().stdout.splitlines()
    return any(str(script).replace("%", r"\%") in line and not line.lstrip().startswith("#") for line in lines)


def stays_in_crontab(
    script: Path, clock: Clock, read: Callable[[], subprocess.CompletedProcess[str]] = _read_crontab
) -> bool:
    """Whether the line is there and stays: who changes another one just now may write over it with what they had read.

    A crontab has no lock of its own; reading, changing and writing it takes Ansible about a second.
    """
    if not in_crontab(script, read):
        return False
    clock.sleep(_CRONTAB_SETTLES_S)
    return in_crontab(script, read)


# --- what is left behind for it ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What a monitor has to know. Times in seconds, `deadline` in Unix seconds."""

    run: str
    poll_minutes: int
    deadline: float
    reserve_s: float
    stall_s: float
    pod_home: str

    @property
    def latest_start(self) -> float:
        """From when on a look may be the last one that comes in time: then the run is followed to its end."""
        return self.deadline - self.reserve_s - 60.0 * (self.poll_minutes + 1)


def poll_minutes(wanted: int, left_s: float) -> int:
    """Minutes between two looks: as wanted, and at least three looks in the time that is left."""
    return max(1, min(wanted, MAX_POLL_MINUTES, int(left_s / 60 / 3)))


def cron_times(minutes: int) -> tuple[str, str]:
    """The minute and hour fields of a look at least so often: minutes that divide no hour come out shorter."""
    if minutes < 60:
        return f"*/{minutes}", "*"
    return "0", f"*/{minutes // 60}"


@dataclass(frozen=True, slots=True)
class Monitor:
    """The files of one run's monitor. They exist from `leave` until `remove`."""

    settings: Settings
    run: str

    @property
    def folder(self) -> Path:
        return self.settings.runs_dir / self.run / FOLDER

    @property
    def script(self) -> Path:
        return self.folder / "look.sh"

    @property
    def log(self) -> Path:
        return self.settings.runs_dir / self.run / LOG_FILE

    @property
    def name(self) -> str:
        """How the crontab's line is found again."""
        return f"pennypod finish {self.run}"

    @property
    def cron_job(self) -> str:
        """The crontab's command. There a percent sign would end it (crontab(5))."""
        return shlex.quote(str(self.script)).replace("%", r"\%")

    def leave(self, plan: Plan, root: Path, providers: Iterable[str], environ: Mapping[str, str]) -> bool:
        """Write the files; `root` is the repository. Returns whether anything is other than it was."""
        kept = environment(self.settings, providers, environ)
        files = {
            "plan.json": json.dumps(asdict(plan)) + "\n",
            "environment": "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(kept.items())),
            "look.sh": _script(plan, self, root),
        }
        self.settings.run_dir(self.run)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        changed = False
        for name, text in files.items():
            path = self.folder / name
            mode = 0o700 if name == "look.sh" else 0o600
            if _content(path) == text and stat.S_IMODE(path.stat().st_mode) == mode:
                continue
            changed = True
            write_atomically(path, text, mode)  # keys are in one of them
        return changed

    def plan(self) -> Plan | None:
        """None when the run has no monitor."""
        try:
            return Plan(**json.loads((self.folder / "plan.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def remove(self) -> None:
        """Take everything away but the script, the keys first: without them it takes its line out of the crontab."""
        for name in ("environment", "unreachable", "plan.json"):
            (self.folder / name).unlink(missing_ok=True)

    # --- since when the pod cannot be reached, from one look to the next ---

    def note_reached(self) -> None:
        (self.folder / "unreachable").unlink(missing_ok=True)

    def note_unreachable(self, now: float) -> float:
        """Seconds since the first look in a row that found the pod out of reach."""
        path = self.folder / "unreachable"
        try:
            return max(0.0, now - float(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                write_atomically(path, f"{now:.0f}\n")
            return 0.0


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def environment(settings: Settings, providers: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What cron does not give. Of the keys only those of the providers that the run has pods of."""
    names = [*_KEPT, *(name for name in environ if name.startswith(("PENNYPOD_LOCAL_", "PENNYPOD_S3_")))]
    for provider in providers:
        names += [PROVIDERS[provider].key_variable, PROVIDERS[provider].url_variable]
    kept = {name: environ[name] for name in names if name and environ.get(name)}
    bin_dir = Path(sys.executable).parent
    return kept | {
        "PATH": f"{bin_dir}{os.pathsep}{environ.get('PATH') or os.defpath}",
        "PENNYPOD_HOME": str(settings.home),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_HOST_PATTERN_MISMATCH": "ignore",  # most looks have nothing to end
    }


def _script(plan: Plan, monitor: Monitor, root: Path) -> str:
    """What cron runs. It does without us for the one thing that must work even when this repository is gone."""
    folder, here = (shlex.quote(str(path)) for path in (monitor.folder, monitor.script))
    return f"""\
#!/bin/sh
# Looks after run {plan.run} while nobody does. Its line leaves the crontab when the run is over.
exec >>{shlex.quote(str(monitor.log))} 2>&1
umask 077
date -u '+%Y-%m-%dT%H:%M:%SZ looking'
if [ ! -f {folder}/environment ] || [ "$(date +%s)" -gt {int(plan.deadline) + _AFTER_DEADLINE_S} ]; then
    echo 'the run is over, or its deadline long past: this monitor ends'
    crontab -l | grep -vF -e {here} -e {shlex.quote(monitor.name)} | crontab -
    rm -rf {folder}
    exit
fi
. {folder}/environment
cd {shlex.quote(str(root))} || exit 1
exec ansible-playbook playbooks/finish.yml -e run={plan.run} </dev/null
"""


# --- what is to be done -----------------------------------------------------------------------------------------------


class Next(StrEnum):
    WAIT = "wait"  # all is well, or nothing can be done now
    BUSY = "busy"  # another command works on the run
    FINISH = "finish"  # take it over and bring it to its end
    END = "end"  # nothing to bring home: destroy, prove, close
    OVER = "over"  # closed, and every pod proven gone


@dataclass(frozen=True, slots=True)
class Verdict:
    next: Next
    why: str


class Lookout:
    """One look at a run that was left alone."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        providers: Mapping[str, Provider],
        clock: Clock,
        *,
        alive: Callable[[str], bool] = processes.is_alive,
        see: Callable[[RunRecord, SshAddress, str], Frame] | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._providers = providers
        self._clock = clock
        self._alive = alive
        self._see = see or self._see_over_ssh

    def look(self, run: str, *, cancel: bool = False) -> Verdict:
        """What the ledger says, then the clock, the provider and the pod: the first that settles it."""
        record = self._ledger.run(run)
        pending = [attempt for attempt in self._ledger.attempts(run) if not attempt.final]
        if record.closed is not None:
            if not pending:
                return Verdict(Next.OVER, f"the run is over: {record.outcome} ({record.reason})")
            return Verdict(Next.END, "the run is closed, and its pod is not proven gone")
        if self._alive(record.controller):
            pid = processes.pid_of(record.controller)
            return Verdict(Next.BUSY, f"process {pid} works on the run: nothing to do beside it")
        if cancel:
            return Verdict(Next.END, "cancelled by its user")
        if record.fenced_reason is not None:
            return Verdict(Next.END, f"the run was stopped: {record.fenced_reason}")
        if not pending:
            return Verdict(Next.FINISH, "no pod of it is left")
        plan = Monitor(self._settings, run).plan()
        if plan is not None and self._clock.now() >= plan.latest_start:
            return Verdict(Next.FINISH, "its deadline comes before the look after the next: following it to its end")
        return self._look_at_pod(record, pending[-1], plan)

    def _look_at_pod(self, record: RunRecord, attempt: AttemptRecord, plan: Plan | None) -> Verdict:
        provider = self._providers.get(attempt.provider)
        if provider is None:
            return Verdict(Next.WAIT, f"{attempt.provider} is not configured here: its key is missing")
        try:
            pod = self._find(provider, attempt)
        except PennypodError as exc:
            return Verdict(Next.WAIT, f"{attempt.provider} cannot be asked: {exc}")
        if pod is None:
            return Verdict(Next.FINISH, f"its pod is gone: {attempt.provider} has it no more")
        if pod.state in (PodState.STOPPED, PodState.FAILED):
            return Verdict(Next.FINISH, f"its pod is {pod.state.value}: {pod.progress or 'no reason given'}")
        address = pod.address or _recorded_address(attempt)
        if address is None:
            return self._out_of_reach(record.run, "it has no address")
        try:
            frame = self._see(record, address, plan.pod_home if plan else "/root/pennypod")
        except SshError as exc:
            return self._out_of_reach(record.run, str(exc))
        Monitor(self._settings, record.run).note_reached()
        return judge(frame, record.run, plan.stall_s if plan else 0.0)

    def _find(self, provider: Provider, attempt: AttemptRecord) -> Pod | None:
        """The run's pod; its absence has to be heard twice, in both views."""
        for number in range(_LOOKS_FOR_ABSENCE):
            if number:
                self._clock.sleep(provider.timing.absence_spacing_s)
            pod = None if attempt.pod_id is None else provider.pod(attempt.pod_id)
            pod = pod or next((item for item in provider.pods() if item.name == attempt.lease_name), None)
            if pod is not None:
                return pod
        return None

    def _out_of_reach(self, run: str, why: str) -> Verdict:
        seconds = Monitor(self._settings, run).note_unreachable(self._clock.now())
        if seconds >= UNREACHABLE_S:
            return Verdict(Next.FINISH, f"its pod has been out of reach for {seconds / 60:.0f} min: {why}")
        return Verdict(Next.WAIT, f"its pod cannot be reached: {why}")

    def _see_over_ssh(self, record: RunRecord, address: SshAddress, pod_home: str) -> Frame:
        return look(Ssh(run_target(self._settings, record.run, address)), pod_home)


def _recorded_address(attempt: AttemptRecord) -> SshAddress | None:
    if attempt.ssh_host is None or attempt.ssh_port is None:
        return None
    return SshAddress(attempt.ssh_host, attempt.ssh_port, attempt.ssh_user or "root")


def judge(frame: Frame, run: str, stall_s: float) -> Verdict:
    """What one report of the pod says about the training. Whoever follows it then says what was wrong."""
    status = frame.status or {}
    if status.get("run") != run:
        return Verdict(Next.FINISH, "the pod knows nothing of its training")
    if frame.state != "running":
        return Verdict(Next.FINISH, f"its training is over: exit code {status.get('exit_code')}")
    if not frame.supervisor or frame.tmux is False:
        return Verdict(Next.FINISH, "its training has died without an exit code")
    if stall_s and frame.quiet_s >= stall_s:
        return Verdict(Next.FINISH, f"its training has written nothing for {frame.quiet_s / 60:.0f} min")
    return Verdict(Next.WAIT, f"it trains, {frame.elapsed_s / 60:.0f} min so far, {frame.size} bytes of log")


# --- what to say when a command leaves --------------------------------------------------------------------------------


def farewell(settings: Settings, ledger: Ledger, run: str) -> str:
    """For a run that goes on without its command: what bills, who looks, until when, and what to type. Else empty."""
    plan = Monitor(settings, run).plan()
    record = ledger.run(run)
    pending = [attempt for attempt in ledger.attempts(run) if not attempt.final]
    if plan is None or record.closed is not None or not pending or not record.keep_on_disconnect:
        return ""
    attempt = pending[-1]
    price = format_usd(attempt.price_micros_per_h)
    end = datetime.fromtimestamp(plan.deadline, UTC)
    return (
        f"{run} goes on: {attempt.provider} pod {(attempt.pod_id or '')[:12]} bills {price}/h, at the latest until"
        f" {end:%Y-%m-%d %H:%M} UTC; cron looks every {plan.poll_minutes} min; look or finish now:"
        f" ansible-playbook playbooks/finish.yml -e run={run}; cancel: the same with -e cancel=true"
    )
