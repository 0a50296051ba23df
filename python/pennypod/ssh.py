"""SSH to a pod through the system's own client. Floor 1: the `ssh` program is its one outside thing.

Each run has its own key and known_hosts, and the host's key is always checked. One connection is shared by all
commands of a target (a control master); `fresh()` goes around it, for when the question is whether a login still works.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shlex
import socket
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pennypod.errors import SshError
from pennypod.files import write_atomically
from pennypod.startup import MORE_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pennypod.clock import Clock

KEY_NAME = "id_ed25519"
SSH_FAILED = 255
_REFUSED = "Permission denied"  # and, in brackets, the ways to log in that are left
CONTROL_PERSIST_S = 60
NO_DELAY_S = 0.005
SPARES = 7
SPARE_PERSIST_S = 300  # a bootstrap may come first
LONG_LOGIN_S = 0.3  # some ten round trips of 20 ms, and what the programs at both ends take; or a busy machine
FAR_S = 0.02  # a round trip from which on one stream does not fill 1 Gbit/s
LATE_S = 0.08  # a server within some 30 ms has greeted by then, unless its machine is busy
# A socket's path holds 104 bytes on the tightest systems, and ssh appends 17 while it makes the socket.
MAX_CONTROL_PATH = 104 - 17 - 1 - len(".1")


@dataclass(frozen=True, slots=True)
class Completed:
    """A remote command that ran to its end; `rc` is its own exit status."""

    rc: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class SshTarget:
    """Where and as whom to log in. `control_path` None means one connection per command."""

    host: str
    port: int
    user: str
    key_file: Path
    known_hosts: Path
    control_path: Path | None = None

    def options(self) -> list[str]:
        """The options every command needs, ready for ssh, scp and Ansible's `ansible_ssh_common_args`."""
        # Once a key is on file nothing else is accepted; before that the first one is taken and kept.
        strict = "yes" if _has_host_key(self.known_hosts, self.host, self.port) else "accept-new"
        settings = [
            "IdentitiesOnly=yes",
            "BatchMode=yes",
            f"UserKnownHostsFile={_quoted(self.known_hosts)}",
            f"StrictHostKeyChecking={strict}",
            "HashKnownHosts=no",
            "UpdateHostKeys=no",
            "ForwardAgent=no",  # whatever the user's own configuration says: the pod is not ours
            "ConnectTimeout=10",
            "ServerAliveInterval=15",
            "ServerAliveCountMax=4",
            "LogLevel=ERROR",
        ]
        if self.control_path is None:
            settings += ["ControlMaster=no", "ControlPath=none"]
        else:
            settings += [
                "ControlMaster=auto",
                f"ControlPersist={CONTROL_PERSIST_S}",
                f"ControlPath={_quoted(self.control_path)}",
            ]
        options = ["-i", str(self.key_file)]
        for setting in settings:
            options += ["-o", setting]
        return options

    def command(self, remote: str) -> list[str]:
        """The full argument list that runs `remote` in the pod's login shell."""
        return ["ssh", *self.options(), "-T", "-p", str(self.port), f"{self.user}@{self.host}", "--", remote]

    def login_command(self) -> list[str]:
        """The full argument list of an interactive login."""
        return ["ssh", *self.options(), "-p", str(self.port), f"{self.user}@{self.host}"]

    def scp_command(self, remote_path: str, local_path: str) -> list[str]:
        """The full argument list that copies a remote path here."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        source = f"{self.user}@{host}:{remote_path}"
        return ["scp", *self.options(), "-P", str(self.port), "-r", source, local_path]

    def printable(self, remote: str = "") -> str:
        """One line that a person can paste into a shell."""
        return shlex.join([*self.login_command(), *(["--", remote] if remote else [])])


@dataclass(slots=True)
class Traffic:
    """Bytes that went to a pod and came from it, as we handed them to ssh and got them from it."""

    sent: int = 0
    fetched: int = 0


class Ssh:
    """Runs commands on one target. Safe to use from several threads. `traffic` counts what files weigh.

    `readmit` lets our key in again when the target refuses it, and says whether a login over the fresh connection that
    it is given works then.
    """

    def __init__(
        self, target: SshTarget, traffic: Traffic | None = None, readmit: Callable[[Ssh], bool] | None = None
    ) -> None:
        self.target = target
        self._readmit = readmit
        self.traffic = Traffic() if traffic is None else traffic
        if target.control_path is not None:
            _check_control_path(target.control_path)

    def run(self, remote: str, *, stdin: bytes | None = None, timeout_s: float = 60) -> Completed:
        """Run `remote` and return its own exit status. Raises SshError when ssh itself fails or time runs out."""
        done = self._run(remote, stdin, timeout_s)
        if done.rc == SSH_FAILED and self.readmitted(last_line(done.stderr)):
            done = self._run(remote, stdin, timeout_s)
        if done.rc == SSH_FAILED:
            raise self.error(last_line(done.stderr) or "the connection failed")
        return done

    def _run(self, remote: str, stdin: bytes | None, timeout_s: float) -> Completed:
        process = self.popen(remote)
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise self.error(f"no answer within {timeout_s:g} s to: {_short(remote)}") from exc
        finally:
            end_process(process)
        return Completed(process.returncode, stdout, stderr)

    def readmitted(self, why: str) -> bool:
        """Whether a connection that failed with `why` is worth another try: our key was refused, and is let in again.

        For whoever uses `popen` and reads the errors himself; `run` does it by itself.
        """
        refused = why.endswith(_REFUSED) or f"{_REFUSED} (" in why
        if self._readmit is None or not refused:
            return False
        return self._readmit(Ssh(replace(self.target, control_path=None)))

    def run_checked(self, remote: str, *, stdin: bytes | None = None, timeout_s: float = 60) -> Completed:
        """Like `run`, and a non-zero exit status raises SshError too."""
        done = self.run(remote, stdin=stdin, timeout_s=timeout_s)
        if done.rc != 0:
            why = last_line(done.stderr) or last_line(done.stdout)
            raise self.error(f"exit status {done.rc} from: {_short(remote)}" + (f" ({why})" if why else ""), rc=done.rc)
        return done

    def popen(self, remote: str) -> subprocess.Popen[bytes]:
        """Start `remote` with pipes on all three streams; the caller ends it (see `end_process`)."""
        try:
            return subprocess.Popen(
                self.target.command(remote),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError as exc:
            raise SshError("the program ssh is not installed here: install the package openssh-client") from exc

    def run_script(
        self,
        path: Path,
        args: Sequence[str],
        timeout_s: float,
        *,
        stdin: bytes = b"",
    ) -> Completed:
        """Run one of our standalone scripts on the pod in one round trip; `stdin` is what the script itself reads."""
        source = path.read_bytes()
        done = self.run(script_command(source, path.name, args), stdin=source + stdin, timeout_s=timeout_s)
        if done.rc == 127:
            raise self.error("the pod has no python3", rc=done.rc)
        return done

    def fresh(self) -> Ssh:
        """The same target without the shared connection: every command logs in anew."""
        return Ssh(replace(self.target, control_path=None), self.traffic, self._readmit)

    def beside(self, traffic: Traffic, number: int) -> Ssh:
        """For another thread, which is the `number`th from 1 on: over the spare connection of that number if it stands,
        with a login of its own otherwise. It counts in `traffic`, and a key that is refused is not let in again.

        The first one can do with the shared connection: TCP has more under way than the window of one stream.
        """
        ways = [*self._spares()[number - 1 : number], *([self] if number == 1 else [])]
        target = next((way.target for way in ways if way.is_open), replace(self.target, control_path=None))
        return Ssh(target, traffic)

    def _spares(self) -> list[Ssh]:
        path = self.target.control_path
        paths = [path.with_suffix(f".{number}") for number in range(1, SPARES + 1)] if path is not None else []
        return [Ssh(replace(self.target, control_path=spare)) for spare in paths]

    def open_spares(self, login_s: float) -> None:
        """Log in some more times where the line has a delay, for those who come `beside` later. Whether it may have one
        is told by how long a login has taken. Returns when they stand or have failed, which nobody needs to know."""
        if login_s < LONG_LOGIN_S:
            return
        closed = [spare for spare in self._spares() if not spare.is_open]
        if not closed or (self.round_trip_s() or 0.0) < FAR_S:
            return
        logins = []
        for spare in closed:
            where = ["-p", str(self.target.port), f"{self.target.user}@{self.target.host}"]
            persist = f"ControlPersist={SPARE_PERSIST_S}"  # the first value of an option counts
            nothing = subprocess.DEVNULL
            command = ["ssh", "-o", persist, *spare.target.options(), "-N", "-f", *where]
            logins.append(subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing))
        for login in logins:
            login.wait()

    @property
    def is_open(self) -> bool:
        """Whether the shared connection stands, as far as can be told without asking it."""
        return self.target.control_path is not None and self.target.control_path.exists()

    def round_trip_s(self, timeout_s: float = 3.0, when_late: Callable[[], None] | None = None) -> float | None:
        """How long a packet takes there and back, at most; None when that cannot be told (a host behind a jump host).
        `when_late` is called before it is known, when the server has not greeted within LATE_S.

        Measured from our greeting to the server's first key exchange message, which is its answer (RFC 4253, 7).
        `connect` will not do, since the port of a container is often answered by a proxy next to us, nor the server's
        own greeting, since it starts a process first; but where that is there at once, there is no delay.
        """
        started = time.monotonic()
        try:
            with socket.create_connection((self.target.host, self.target.port), timeout=timeout_s) as probe:
                if when_late is not None:
                    in_time, _, _ = select.select([probe], [], [], max(0.0, started + LATE_S - time.monotonic()))
                    if not in_time:
                        when_late()
                greeting = probe.recv(256)
                greeted = time.monotonic()
                if not greeting.startswith(b"SSH-"):
                    return None
                if greeted - started < NO_DELAY_S:
                    return (greeted - started) / 2
                probe.sendall(b"SSH-2.0-pennypod\r\n")
                return time.monotonic() - greeted if probe.recv(1) else None
        except OSError:
            return None

    def close(self) -> None:
        """End the shared connection and the spare ones, if there are any. Never raises."""
        for one in (self, *self._spares()):
            if not one.is_open:
                continue
            command = ["ssh", *one.target.options(), "-O", "exit", "-p", str(self.target.port)]
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    [*command, f"{self.target.user}@{self.target.host}"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=10,
                    check=False,
                )

    def error(self, why: str, **details: object) -> SshError:
        """An SshError that names the target."""
        where = f"{self.target.user}@{self.target.host}:{self.target.port}"
        return SshError(f"ssh {where}: {why}", host=self.target.host, port=self.target.port, **details)


def script_command(source: bytes, name: str, args: Sequence[str], *, flags: str = "") -> str:
    """The remote command that runs a script sent ahead on stdin; the rest of stdin is for the script itself.

    Nothing is written on the pod, and the script is not limited by the length of a command line.
    """
    loader = (
        f"import sys;s=sys.stdin.buffer.read({len(source)});exec(compile(s,{name!r},'exec'),{{'__name__':'__main__'}})"
    )
    python = "python3" + (f" {flags}" if flags else "")
    return f'PATH="$PATH:{MORE_PATH}"; export PATH; exec {python} -c {shlex.join([loader, *args])}'


def make_key_pair(run_dir: Path, comment: str) -> tuple[Path, str]:
    """The run's own key: (private key file, public key line). Makes it on first use, afterwards returns the same."""
    private = run_dir / KEY_NAME
    if not private.exists():
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run_dir, prefix=".key-") as scratch:
            made = Path(scratch) / KEY_NAME
            _keygen("-t", "ed25519", "-N", "", "-C", comment, "-f", str(made))
            with contextlib.suppress(FileExistsError):  # another process of the same run was first: its key counts
                os.link(made, private)
    public = _keygen("-y", "-f", str(private)).strip()
    algorithm, key = public.split()[:2]
    line = f"{algorithm} {key} {comment}"
    write_atomically(run_dir / f"{KEY_NAME}.pub", line + "\n", 0o644)
    return private, line


def trust_host_keys(known_hosts: Path, host: str, port: int, keys: list[str]) -> None:
    """Pin `keys` ("ssh-ed25519 AAAA...") as the only ones `host:port` may show; other hosts' lines stay."""
    name = _known_name(host, port)
    lines = known_hosts.read_text(encoding="utf-8").splitlines() if known_hosts.exists() else []
    kept = [line for line in lines if line.split(" ", 1)[0] != name]
    added = []
    for key in keys:
        words = key.split()
        if len(words) < 2:
            raise SshError(f"not an SSH host key: {key[:60]!r}", host=host, port=port)
        added.append(f"{name} {words[0]} {words[1]}")
    known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(known_hosts, "".join(line + "\n" for line in [*kept, *added]), 0o600)


def pinned_host_keys(known_hosts: Path, host: str, port: int) -> list[str]:
    """The host keys that `trust_host_keys`, or a first login, has pinned for `host:port`."""
    name = _known_name(host, port)
    lines = known_hosts.read_text(encoding="utf-8").splitlines() if known_hosts.exists() else []
    return [words[1] for line in lines if (words := line.split(" ", 1))[0] == name and len(words) > 1]


def wait_for_ssh(ssh: Ssh, *, deadline_s: float, clock: Clock, on_wait: Callable[[str], None] | None = None) -> float:
    """Log in with a new connection until it works, for at most `deadline_s` seconds from now. Returns how many seconds
    the login that worked has taken.

    `on_wait` gets the last failure before every pause, and may raise to stop the waiting. Raises SshError at the limit.
    """
    end = clock.now() + deadline_s
    probe = ssh.fresh()
    pause = 0.1
    while True:
        started = time.monotonic()
        try:
            probe.run_checked("true", timeout_s=20)
        except SshError as exc:
            last = exc
        else:
            return time.monotonic() - started
        if on_wait is not None:
            on_wait(last.message)
        if clock.now() + pause > end:
            raise SshError(f"no login within {deadline_s:g} s; last answer: {last.message}", **last.details) from last
        clock.sleep(pause)
        pause = min(pause * 1.5, 3.0)


def control_path(host: str, port: int, user: str, key_file: Path) -> Path:
    """A short socket path for this target in a directory that only this user can enter."""
    identity = f"{user}@{host}:{port} {key_file}"
    return _control_dir() / hashlib.sha256(identity.encode()).hexdigest()[:16]


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End an ssh client that was started here and close its pipes."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # closing flushes, and there may be nobody left to read
                stream.close()


def last_line(output: bytes) -> str:
    """The last line that says something, for messages to people only."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def harmless(text: str) -> str:
    """A pod's words, which are not to be trusted with our screen: 200 characters of them, all printable."""
    return "".join(char if char.isprintable() else " " for char in text)[:200]


def _control_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    choices = [Path(base) / "pennypod"] if base else []
    # Not gettempdir(), which may be a long path; the check below refuses a directory that somebody else made.
    choices.append(Path("/tmp") / f"pennypod-{os.getuid()}")  # noqa: S108
    problem: OSError | SshError | None = None
    for path in choices:
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            _check_control_path(path / ("x" * 16))
        except (OSError, SshError) as exc:
            problem = exc
        else:
            return path
    raise SshError(f"no private directory for SSH control sockets: {problem}")


def _check_control_path(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_CONTROL_PATH:
        raise SshError(f"the control socket's path is over {MAX_CONTROL_PATH} bytes: {path}")
    try:
        directory = path.parent.lstat()
    except OSError as exc:
        raise SshError(f"the control socket's directory is missing: {path.parent}") from exc
    if not stat.S_ISDIR(directory.st_mode) or directory.st_uid != os.getuid() or directory.st_mode & 0o077:
        raise SshError(f"the control socket's directory must belong to you alone (mode 0700): {path.parent}")


def _known_name(host: str, port: int) -> str:
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def _has_host_key(known_hosts: Path, host: str, port: int) -> bool:
    try:
        lines = known_hosts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    name = _known_name(host, port)
    return any(name in line.split(" ", 1)[0].split(",") for line in lines)


def _quoted(path: Path) -> str:
    """A path as ssh's configuration reads it: quoted against blanks, `%` doubled."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if any(char.isspace() for char in text) else text


def _keygen(*args: str) -> str:
    try:
        done = subprocess.run(
            ["ssh-keygen", "-q", *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise SshError(f"ssh-keygen could not run: {exc}") from exc
    if done.returncode != 0:
        raise SshError(f"ssh-keygen failed: {last_line(done.stderr.encode())}")
    return done.stdout


def _short(remote: str) -> str:
    return remote if len(remote) <= 80 else remote[:77] + "..."
