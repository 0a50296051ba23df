"""A run's checkpoints in object storage, seen from its training: what the pod needs for it, kept fresh. Floor 2.

It touches the bucket and the pod over SSH. The bucket's keys stay here: the pod gets URLs that each allow one thing and
expire with its lease, and this replaces them in time. A training never waits or fails for any of it.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pennypod.clock import Clock
from pennypod.errors import PennypodError, SshError, StoreError
from pennypod.ledger import AttemptRecord
from pennypod.settings import Settings
from pennypod.ssh import Ssh
from pennypod.store import Checkpoints, lifetime_s, load_config, open_bucket, renew_at
from pennypod.weights import parse_answer

SCRIPT = Path(__file__).parent / "onpod" / "keep_checkpoint.py"
FOLDER = "store"  # in our folder on the pod
HOOK = "PENNYPOD_CHECKPOINT_HOOK"
KEEPS_NOTHING = {HOOK: "true"}
"""A training's environment where there is no bucket: its command may well be a shell's line that calls the hook."""
LEASE_S = 3600.0
"""How long URLs hold where the pod has no lease of its own."""
_AGAIN_S = 30.0  # after URLs that did not arrive
_WRITE_S = 60.0
_RESTORE_S = 600.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Terms:
    """Whose checkpoints and for how long: `lease_s` seconds at a time, never beyond `deadline` in Unix seconds."""

    attempt: int = 0
    lease_s: float = LEASE_S
    deadline: float = float("inf")


@dataclass(slots=True)
class CheckpointKeeper:
    """Of one training. Call it often while the training is watched: it replaces the URLs when they are due."""

    checkpoints: Checkpoints
    ssh: Ssh
    pod_home: str
    terms: Terms
    clock: Clock
    say: Say
    resumed_epoch: int | None = field(init=False, default=None)
    _due: float = field(init=False, default=0.0)
    _thread: threading.Thread | None = field(init=False, default=None)
    _failing: bool = field(init=False, default=False)

    @property
    def _folder(self) -> str:
        return f"{self.pod_home}/{FOLDER}"

    def prepare(self) -> dict[str, str]:
        """Put everything on the pod, the newest checkpoint too where there is one. Returns the training's environment.

        Raises StoreError when the bucket cannot be used, SshError when the pod cannot be reached.
        """
        folder = shlex.quote(self._folder)
        self._write("keep_checkpoint.py", SCRIPT.read_bytes())
        newest = self.checkpoints.newest()
        self._send(resume=newest is not None)
        env = {HOOK: f"python3 {folder}/keep_checkpoint.py offer {folder}"}
        if newest is None:
            return env
        command = f"python3 {folder}/keep_checkpoint.py restore {folder} {folder}/resume"
        try:
            answer = parse_answer(self.ssh.run(command, timeout_s=_RESTORE_S).stdout) or {}
        except SshError as exc:  # too slow, or the line broke: whether the pod is there, the launch will tell
            answer = {"why": exc.message}
        if answer.get("restored"):
            self.resumed_epoch = newest.marker.epoch
            self.say(f"goes on from the checkpoint of epoch {newest.marker.epoch}")
            env["PENNYPOD_RESUME_FROM"] = f"{self._folder}/resume"
        else:
            why = str(answer.get("why", "the pod gave no answer"))[:200]
            self.say(f"begins anew, for its checkpoint could not be fetched: {why}")
        return env

    def __call__(self) -> None:
        """Returns at once; a thread does what is due."""
        if self.clock.now() < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._renew, name="renew-urls", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()

    def _renew(self) -> None:
        try:
            self._send()
            self.checkpoints.prune()
        except (PennypodError, OSError) as exc:
            self._due = self.clock.now() + _AGAIN_S
            if not self._failing:
                self.say(f"checkpoints may not be kept for now: {exc}")
            self._failing = True
        else:
            if self._failing:
                self.say("checkpoints are kept again")
            self._failing = False

    def _send(self, *, resume: bool = False) -> None:
        now = self.clock.now()
        lifetime = lifetime_s(now, self.terms.lease_s, self.terms.deadline)
        if lifetime < 1:
            self._due = float("inf")  # the run's time is over
            return
        plan = self.checkpoints.plan(self.terms.attempt, now, lifetime, resume=resume)
        self._write("urls.json", plan.as_json().encode())
        self._due = renew_at(now, lifetime)

    def _write(self, name: str, content: bytes) -> None:
        folder, path = shlex.quote(self._folder), shlex.quote(f"{self._folder}/{name}")
        script = f"umask 077 && mkdir -p {folder} && cat > {path}.new && mv -f {path}.new {path}"
        # A login of its own: it is written beside a watch, whose connection may hang.
        self.ssh.fresh().run_checked(f"sh -c {shlex.quote(script)}", stdin=content, timeout_s=_WRITE_S)


def open_keeper(
    settings: Settings,
    environ: Mapping[str, str],
    run: str,
    ssh: Ssh,
    pod_home: str,
    terms: Terms,
    clock: Clock,
    say: Say,
) -> CheckpointKeeper:
    """Raises StoreError when there is no bucket that can be used."""
    bucket = open_bucket(load_config(environ, settings.home))
    try:
        checkpoints = Checkpoints(bucket, run)
    except ValueError as exc:
        raise StoreError(str(exc)) from exc
    return CheckpointKeeper(checkpoints, ssh, pod_home, terms, clock, say)


def terms_of(attempt: AttemptRecord | None, deadline: float | None, *, watched: bool) -> Terms:
    """URLs hold as long as the pod's lease; where nobody stays to renew them, until the run's deadline."""
    end = float("inf") if deadline is None else deadline
    number = attempt.attempt if attempt is not None else 0
    lease_s = (attempt.lease_s if attempt is not None else None) or LEASE_S
    return Terms(number, lease_s if watched else float("inf"), end)
