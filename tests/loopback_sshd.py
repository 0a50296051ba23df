"""A real sshd on the loopback interface, started as a child of the test and ended by its process id.

What it runs gets a tmux socket folder of its own, so that no other tmux server of this machine is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from pennypod.ssh import Ssh, SshTarget, make_key_pair, trust_host_keys

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class LoopbackSshd:
    """`folder` gets its keys and configuration; `tmux_dir` must have a short path (a socket lies in it). `settings` are
    lines of sshd_config that go before ours, so that they count."""

    def __init__(self, folder: Path, tmux_dir: Path, settings: str = "") -> None:
        assert SSHD, "sshd is not installed: apt-get install openssh-server"
        self.folder = folder
        self.tmux_dir = tmux_dir
        self.port = free_port()
        self.key_file, public = make_key_pair(folder, "pennypod tests")
        self.known_hosts = folder / "known_hosts"
        host_key = folder / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", host_key], check=True)
        words = host_key.with_suffix(".pub").read_text().split()
        trust_host_keys(self.known_hosts, "127.0.0.1", self.port, [" ".join(words[:2])])
        (folder / "authorized_keys").write_text(public + "\n")
        config = folder / "sshd_config"
        config.write_text(
            f"{settings}ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {host_key}\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder / 'authorized_keys'}\nStrictModes no\nPasswordAuthentication no\n"
            f"PermitRootLogin prohibit-password\nMaxStartups 100\nMaxSessions 100\nSubsystem sftp internal-sftp\n"
            f"KexAlgorithms curve25519-sha256\n"  # half the time of a login; what is tried here is not the cipher
            # The interpreter of the tests, so that what runs on a pod is tried under every version they run under; and
            # a shell level at which bash does not read the user's own .bashrc.
            f"SetEnv TMUX_TMPDIR={tmux_dir} PATH={Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin SHLVL=1\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # its privilege separation refuses to start without
        self.log = folder / "sshd.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stderr=log)
        self._wait_until_it_listens()

    def target(self, **changes: object) -> SshTarget:
        user = psutil.Process().username()
        fields = {"host": "127.0.0.1", "port": self.port, "user": user, "key_file": self.key_file}
        return SshTarget(**{**fields, "known_hosts": self.known_hosts, **changes})  # type: ignore[arg-type]

    def ssh(self, **changes: object) -> Ssh:
        return Ssh(self.target(**changes))

    def drop_sessions(self) -> int:
        """Kill the sshd processes of every open connection, as a broken line would; what they started lives on."""
        return kill_all(self._sessions())

    def vanish(self) -> None:
        """Stop listening and break every connection: a pod that is out of reach."""
        sessions = self._sessions()
        self.process.terminate()
        self.process.wait(timeout=10)
        kill_all(sessions)

    def _sessions(self) -> list[psutil.Process]:
        if self.process.poll() is not None:
            return []
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if name_of(child).startswith("sshd")]

    def tmux(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "TMUX_TMPDIR": str(self.tmux_dir)}
        env.pop("TMUX", None)
        return subprocess.run(["tmux", *args], env=env, capture_output=True, text=True, timeout=20)

    def close(self) -> None:
        self.tmux("kill-server")
        self.vanish()

    def _wait_until_it_listens(self) -> None:
        give_up_at = time.monotonic() + 10
        while time.monotonic() < give_up_at:
            assert self.process.poll() is None, f"sshd ended: {self.log.read_text()}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.02)
        raise AssertionError(f"sshd does not listen: {self.log.read_text()}")


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def kill_all(processes: list[psutil.Process]) -> int:
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(what: str, true: object, limit_s: float = 15.0) -> None:
    """Wait for a condition (a callable) and fail with its name when it does not come."""
    assert callable(true)
    give_up_at = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < give_up_at, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)
