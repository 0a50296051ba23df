"""SSH over a real sshd: whose key is trusted, what a failure is, and that nothing stays behind."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from loopback_sshd import LoopbackSshd, wait_until
from pennypod.clock import SystemClock
from pennypod.errors import SshError
from pennypod.ssh import Ssh, control_path, make_key_pair, trust_host_keys, wait_for_ssh


class Ticking(SystemClock):
    """A clock that only its own naps move."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.naps = 0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.naps += 1
        self.time += seconds


def another_host_key(folder: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "other_host"], check=True)
    return (folder / "other_host.pub").read_text()


def test_commands_keep_their_bytes_and_their_exit_status(sshd: LoopbackSshd) -> None:
    ssh = sshd.ssh()
    done = ssh.run("cat; printf 'to stderr' >&2; exit 7", stdin=b"\0\xff\n")
    assert (done.rc, done.stdout, done.stderr) == (7, b"\0\xff\n", b"to stderr")
    with pytest.raises(SshError, match="exit status 7 from: echo no >&2; exit 7 \\(no\\)"):
        ssh.run_checked("echo no >&2; exit 7")


def test_a_script_runs_in_one_round_trip_with_its_own_input(sshd: LoopbackSshd, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:], sys.stdin.read(), __name__)\nsys.exit(4)\n")
    done = sshd.ssh().run_script(script, ["a b", "'\"$(x)", "new\nline"], 20, stdin=b"input")
    assert done.rc == 4
    assert done.stdout.decode().strip() == "['a b', '\\'\"$(x)', 'new\\nline'] input __main__"


def test_a_failed_login_and_a_timeout_are_errors_that_name_the_target(sshd: LoopbackSshd, tmp_path: Path) -> None:
    stranger, _ = make_key_pair(tmp_path / "stranger", "not on the list")
    with pytest.raises(SshError, match=f"@127.0.0.1:{sshd.port}: .*Permission denied") as caught:
        sshd.ssh(key_file=stranger).run("true")
    assert caught.value.details == {"host": "127.0.0.1", "port": sshd.port}
    started = time.monotonic()
    with pytest.raises(SshError, match=r"no answer within 0\.5 s to: sleep 30"):
        sshd.ssh().run("sleep 30", timeout_s=0.5)
    assert time.monotonic() - started < 5


def test_a_pod_that_shows_another_host_key_is_refused(sshd: LoopbackSshd, tmp_path: Path) -> None:
    trust_host_keys(sshd.known_hosts, "127.0.0.1", sshd.port, [another_host_key(tmp_path)])
    with pytest.raises(SshError, match="Host key verification failed"):
        sshd.ssh().run("true")


def test_the_first_host_key_is_kept_when_none_is_pinned(sshd: LoopbackSshd, tmp_path: Path) -> None:
    known_hosts = tmp_path / "fresh known_hosts"
    ssh = sshd.ssh(known_hosts=known_hosts)
    assert "StrictHostKeyChecking=accept-new" in ssh.target.options()
    ssh.run_checked("true")
    assert known_hosts.read_text().startswith(f"[127.0.0.1]:{sshd.port} ")
    assert "StrictHostKeyChecking=yes" in ssh.target.options()
    trust_host_keys(known_hosts, "127.0.0.1", sshd.port, [another_host_key(tmp_path)])
    with pytest.raises(SshError, match="Host key verification failed"):
        ssh.run("true")


def test_no_configuration_of_the_user_turns_host_key_checking_off_or_lends_the_agent(sshd: LoopbackSshd) -> None:
    for target in (sshd.target(), sshd.target(control_path=control_path("h", 1, "u", Path("k")))):
        options = target.options()
        assert not any("StrictHostKeyChecking=no" in option or "=off" in option for option in options)
        assert "ForwardAgent=no" in options
        assert any(option.startswith("StrictHostKeyChecking=") for option in options)


def test_the_shared_connection_is_short_private_and_ended_by_close(sshd: LoopbackSshd) -> None:
    path = control_path("127.0.0.1", sshd.port, "me", sshd.key_file)
    assert len(os.fsencode(path)) < 87
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    ssh = sshd.ssh(control_path=path)
    ssh.run_checked("true")
    assert path.exists()
    masters = [p for p in psutil.process_iter(["cmdline"]) if str(path) in " ".join(p.info["cmdline"] or [])]
    assert len(masters) == 1
    before = len(sshd._sessions())
    ssh.run_checked("true")
    assert len(sshd._sessions()) == before  # no second connection
    ssh.fresh().run_checked("true")
    ssh.close()
    assert not path.exists()
    wait_until("the master is gone", lambda: not masters[0].is_running())
    ssh.close()  # again is fine
    ssh.run_checked("true")  # and so is going on
    ssh.close()


def test_a_control_path_that_is_long_or_not_private_is_refused(sshd: LoopbackSshd, tmp_path: Path) -> None:
    with pytest.raises(SshError, match="over 84 bytes"):
        sshd.ssh(control_path=Path("/tmp") / ("x" * 100))
    tmp_path.chmod(0o755)
    short = Path("/tmp") / f"pp-test-{os.getpid()}"
    short.mkdir(mode=0o755)
    try:
        with pytest.raises(SshError, match="must belong to you alone"):
            sshd.ssh(control_path=short / "socket")
    finally:
        short.rmdir()


def test_waiting_ends_when_a_login_works(sshd: LoopbackSshd) -> None:
    authorized = sshd.folder / "authorized_keys"
    key = authorized.read_text()
    authorized.write_text("")
    answers: list[str] = []

    def on_wait(answer: str) -> None:
        answers.append(answer)
        if len(answers) == 2:
            authorized.write_text(key)

    wait_for_ssh(sshd.ssh(), deadline_s=60, clock=Ticking(), on_wait=on_wait)
    assert len(answers) == 2
    assert all("Permission denied" in answer for answer in answers)


def test_waiting_ends_at_its_limit_with_the_last_answer(sshd: LoopbackSshd) -> None:
    sshd.vanish()
    clock = Ticking()
    with pytest.raises(SshError, match=r"no login within 5 s; last answer: .*Connection refused"):
        wait_for_ssh(sshd.ssh(), deadline_s=5, clock=clock)
    assert clock.naps > 3


def test_a_key_pair_is_made_once(tmp_path: Path) -> None:
    private, line = make_key_pair(tmp_path / "run", "demo-1201-aaaaa")
    assert make_key_pair(tmp_path / "run", "demo-1201-aaaaa") == (private, line)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert line.startswith("ssh-ed25519 ")
    assert line.endswith(" demo-1201-aaaaa")
    assert (tmp_path / "run/id_ed25519.pub").read_text() == line + "\n"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["id_ed25519", "id_ed25519.pub"]


def test_pinned_keys_replace_only_their_own_host(tmp_path: Path) -> None:
    known_hosts = tmp_path / "run" / "known_hosts"
    trust_host_keys(known_hosts, "Pod.example", 22, ["ssh-ed25519 AAAA one", "ssh-rsa BBBB"])
    trust_host_keys(known_hosts, "10.0.0.1", 2201, ["ssh-ed25519 CCCC"])
    trust_host_keys(known_hosts, "10.0.0.1", 2201, ["ssh-ed25519 DDDD"])
    assert known_hosts.read_text().splitlines() == [
        "pod.example ssh-ed25519 AAAA",
        "pod.example ssh-rsa BBBB",
        "[10.0.0.1]:2201 ssh-ed25519 DDDD",
    ]
    with pytest.raises(SshError, match="not an SSH host key"):
        trust_host_keys(known_hosts, "10.0.0.1", 2201, ["nonsense"])


def test_printable_commands_can_be_pasted_into_a_shell(sshd: LoopbackSshd) -> None:
    known_hosts = sshd.folder / "known hosts"
    known_hosts.write_bytes(sshd.known_hosts.read_bytes())
    line = sshd.target(known_hosts=known_hosts).printable("echo 'it is' here")
    done = subprocess.run(["sh", "-c", line], capture_output=True, stdin=subprocess.DEVNULL, timeout=30)
    assert done.stdout == b"it is here\n", done.stderr


def test_without_ssh_here_the_error_says_what_to_install(sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SshError, match="install the package openssh-client"):
        Ssh(sshd.target()).run("true")
