"""Logging in to a fresh pod and checking it before it is trusted. Floor 2: SSH and the run's own key folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from pennypod import fuse
from pennypod.clock import Clock
from pennypod.errors import GateError, HostKeyError, SshError
from pennypod.model.pod import SshAddress
from pennypod.rental import ACCEPT_NEW, ATTESTED
from pennypod.settings import Settings
from pennypod.ssh import (
    Completed,
    Ssh,
    SshTarget,
    control_path,
    make_key_pair,
    pinned_host_keys,
    trust_host_keys,
    wait_for_ssh,
)

_CHECK_SCRIPT = Path(__file__).parent / "onpod" / "gpu_check.py"
_CHECK_LIMIT_S = 300.0
_SAY_AGAIN_S = 20.0
_FIRST_TRY_S = 20.0  # on one way in, before the next is tried and the pod is looked at again
_LONGEST_TRY_S = 60.0
_ASK_AGAIN_S = 2.0
_BESIDE_S = 10.0  # longer than the check itself has taken


@dataclass(frozen=True, slots=True)
class Script:
    """A standalone Python script, here, and its arguments."""

    path: Path
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GateOptions:
    """What the acceptance check asks of a pod. `device` is "cuda", "cpu" or "auto"; sizes in GB.

    `time_limits` gives single checks of gpu_check.py other limits, in seconds: {"torch": 300}. `beside` is a standalone
    script that runs on the pod at the same time: what has to be asked anyway costs no time of its own then.
    """

    device: str = "auto"
    gpu_count: int = 1
    min_disk_gb: float = 0.0
    min_memory_gb: float = 0.0
    allow_no_torch: bool = False
    time_limits: Mapping[str, float] = field(default_factory=dict)
    beside: Script | None = None


def run_key(settings: Settings, run: str) -> tuple[Path, str]:
    """The run's own key pair, made on first use: (private key file, public key line)."""
    return make_key_pair(settings.run_dir(run), f"pennypod {run}")


def run_target(settings: Settings, run: str, address: SshAddress) -> SshTarget:
    """How to reach the run's pod with the run's own key and known_hosts."""
    run_dir = settings.run_dir(run)
    key_file = run_dir / "id_ed25519"
    return SshTarget(
        host=address.host,
        port=address.port,
        user=address.user,
        key_file=key_file,
        known_hosts=run_dir / "known_hosts",
        control_path=control_path(address.host, address.port, address.user, key_file),
    )


class PodLogin:
    """The `rental.Login` of production: pins the host key, proves a fresh login, runs gpu_check.py on the pod."""

    def __init__(
        self,
        settings: Settings,
        run: str,
        gate: GateOptions,
        clock: Clock,
        on_wait: Callable[[str], None],
        report: Callable[[str], object] = lambda _text: None,
    ) -> None:
        self._settings = settings
        self._run = run
        self._gate = gate
        self._clock = clock
        self._on_wait = on_wait
        self._report = report
        self.beside: Completed | None = None
        """What the script beside the last check has said; None when there was none, or it took too long."""
        self._login_s = 0.0

    def log_in(
        self, addresses: Callable[[], Sequence[SshAddress]], host_keys: Sequence[str], limit_s: float
    ) -> SshAddress:
        """The first address that lets us in. Raises SshError when none does within `limit_s`.

        `addresses` is asked again after each round over all of them; it and `on_wait` may raise to stop earlier. A pod
        that bills and lets nobody in is told of now and then.
        """
        known_hosts = self._settings.run_dir(self._run) / "known_hosts"
        started = said = self._clock.now()
        end = started + limit_s
        try_s = _FIRST_TRY_S
        why = ""

        def wait(last: str) -> None:
            nonlocal said
            self._on_wait(last)
            now = self._clock.now()
            if now - said >= _SAY_AGAIN_S:
                said = now
                self._report(f"no login after {now - started:.0f} s, waiting for {end - now:.0f} s more: {last}")

        while True:
            known = addresses()
            for address in known:
                left = end - self._clock.now()
                if left <= 0:
                    break
                # Until a login has worked, no host key is believed: an earlier pod may have had the same address, and
                # sshd may still be making its keys.
                trust_host_keys(known_hosts, address.host, address.port, list(host_keys))
                ssh = Ssh(run_target(self._settings, self._run, address))
                try:
                    self._login_s = wait_for_ssh(ssh, deadline_s=min(try_s, left), clock=self._clock, on_wait=wait)
                except SshError as exc:
                    why = exc.message.rpartition("; last answer: ")[2]
                else:
                    return address
            if self._clock.now() >= end:
                raise SshError(f"no login within {limit_s:.0f} s; last answer: {why or 'the pod shows no address'}")
            if not known:
                wait("the pod shows no address")
                self._clock.sleep(1.0)
            try_s = min(2 * try_s, _LONGEST_TRY_S)

    def host_key(self, address: SshAddress, ask: Callable[[], Sequence[str]], patience_s: float) -> str:
        """Pin what the provider tells, if it tells in time. A key that is made late may be told late: asked again.

        Until here nothing but a login was done, which tells nobody a secret, whoever it was that answered.
        """
        known_hosts = self._settings.run_dir(self._run) / "known_hosts"
        met = set(pinned_host_keys(known_hosts, address.host, address.port))
        end = self._clock.now() + patience_s
        while True:
            told = [" ".join(key.split()[:2]) for key in ask()]
            if met & set(told):
                trust_host_keys(known_hosts, address.host, address.port, told)
                return ATTESTED
            self._on_wait("its host key is not attested yet")
            if self._clock.now() >= end:
                break
            self._clock.sleep(_ASK_AGAIN_S)
        if told:
            raise HostKeyError(
                f"{address.host}:{address.port} shows a host key that its provider does not tell of: either somebody"
                " else answers there or the pod made new keys; the pod is not used",
                host=address.host,
                port=address.port,
            )
        return ACCEPT_NEW

    def check(self, address: SshAddress) -> dict[str, Any]:
        """The acceptance report. Raises GateError with the reason when the pod fails, or gives no verdict in time."""
        ssh = Ssh(run_target(self._settings, self._run, address))
        # The data set comes soon: on a long line its connections are opened while the pod is checked.
        Thread(target=lambda: ssh.open_spares(self._login_s), name="spares", daemon=True).start()
        answers: Queue[Completed | None] = Queue(1)
        self.beside = None
        script = self._gate.beside
        if script is not None:  # a daemon: a pod that has failed is not kept waiting for it
            Thread(target=lambda: answers.put(_said(ssh, script)), name="beside", daemon=True).start()
        done = ssh.run_script(_CHECK_SCRIPT, self._arguments(), _CHECK_LIMIT_S)
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError as exc:
            tail = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise GateError(f"the acceptance check gave no verdict (exit status {done.rc}) {''.join(tail)}") from exc
        if done.rc != 0 or not report.get("ok"):
            raise GateError(f"the acceptance check failed: {report.get('reason') or 'no reason given'}", report=report)
        report["summary"] = f"matmul checked on {report['device']}"
        report["fuse"] = self._fuse(ssh)
        if script is not None:
            with contextlib.suppress(Empty):
                self.beside = answers.get(timeout=_BESIDE_S)
        return report

    def _fuse(self, ssh: Ssh) -> dict[str, Any]:
        """Whether the pod would end itself. One that is without a fuse can still be used: three other rings end it."""
        try:
            return fuse.ask(ssh).as_document()
        except SshError as exc:
            return fuse.FuseState(armed=False, said=(f"not asked: {exc.message}",)).as_document()

    def _arguments(self) -> list[str]:
        arguments = ["--json", "--device", self._gate.device, "--gpus", str(self._gate.gpu_count)]
        arguments += ["--min-disk-gb", str(self._gate.min_disk_gb), "--min-memory-gb", str(self._gate.min_memory_gb)]
        for name, seconds in self._gate.time_limits.items():
            arguments += ["--time-limit", f"{name}={seconds}"]
        if self._gate.allow_no_torch:
            arguments.append("--allow-no-torch")
        return arguments


def _said(ssh: Ssh, script: Script) -> Completed | None:
    try:
        return ssh.run_script(script.path, script.args, _CHECK_LIMIT_S)
    except SshError:
        return None
