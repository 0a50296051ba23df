"""A pod that loses the run's key in mid-run lets it in again, and nobody notices but by a moment's delay."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock, FakeProvider
from loopback_sshd import LoopbackSshd
from pennypod import readmission
from pennypod.clock import SystemClock
from pennypod.errors import SshError, TransientError
from pennypod.readmission import MOST_TRIES, SPACING_S, Readmission
from pennypod.settings import Settings
from pennypod.ssh import Ssh
from pennypod.training.frames import SshFrames, StreamEndedError
from pennypod.transfer import fetch


class KeyedProvider(FakeProvider):
    """Writes the pod's authorized_keys, as Vast does. `works` False: it says yes and does nothing."""

    def __init__(self, sshd: LoopbackSshd) -> None:
        super().__init__(FakeClock(), "vast")
        self.file = sshd.folder / "authorized_keys"
        self.renewed: list[str] = []
        self.works = True
        self.takes_s = 0.0

    def lose_keys(self) -> None:
        self.file.write_text("")

    def attach_key(self, pod_id: str, public_key: str) -> None:
        raise AssertionError("the provider believes that it is attached: that would change nothing")

    def renew_key(self, pod_id: str, public_key: str) -> None:
        self.renewed.append(pod_id)
        time.sleep(self.takes_s)
        if not self.works:
            raise TransientError("502")
        self.file.write_text(public_key + "\n")


@pytest.fixture
def provider(sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch) -> KeyedProvider:
    made = KeyedProvider(sshd)
    monkeypatch.setattr(readmission, "open_provider", lambda *_args: made)
    return made


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}")


def connected(sshd: LoopbackSshd, settings: Settings, clock: Any = None, **target: object) -> Ssh:
    readmit = Readmission(settings, clock or SystemClock(), lambda: ("vast", "pod-1"))
    return Ssh(sshd.target(**target), readmit=readmit)


def test_a_command_goes_on_after_the_key_was_let_in_again(
    sshd: LoopbackSshd, provider: KeyedProvider, settings: Settings
) -> None:
    ssh = connected(sshd, settings)
    provider.lose_keys()
    assert ssh.run("cat", stdin=b"as ever").stdout == b"as ever"
    assert provider.renewed == ["pod-1"]
    assert ssh.fresh().run("true").rc == 0


def test_a_transfer_goes_on_too(
    sshd: LoopbackSshd, provider: KeyedProvider, settings: Settings, tmp_path: Path
) -> None:
    remote = tmp_path / "there"
    remote.write_bytes(b"weights" * 1000)
    provider.lose_keys()
    fetched = fetch(connected(sshd, settings), str(remote), tmp_path / "here")
    assert fetched.path.read_bytes() == remote.read_bytes()
    assert provider.renewed == ["pod-1"]


def test_the_watch_of_a_training_attaches_again(
    sshd: LoopbackSshd, provider: KeyedProvider, settings: Settings, tmp_path: Path
) -> None:
    ssh = connected(sshd, settings)
    options = {"home": str(tmp_path), "session": "x", "offset": 0, "before": "", "poll_s": 0.2}
    options |= {"check_s": 1.0, "patterns": []}
    provider.lose_keys()
    frames = SshFrames(ssh, options)
    with pytest.raises(StreamEndedError, match="Permission denied"):
        frames.next(10)
    frames.close()
    again = SshFrames(ssh, options)
    assert again.next(10) is not None
    again.close()


def test_a_connection_that_works_is_left_alone(sshd: LoopbackSshd, provider: KeyedProvider, settings: Settings) -> None:
    ssh = connected(sshd, settings)
    done = ssh.run("echo 'Permission denied (publickey).' >&2; exit 3")
    assert (done.rc, provider.renewed) == (3, [])


def test_a_key_that_stays_shut_out_is_told_and_not_asked_for_for_ever(
    sshd: LoopbackSshd, provider: KeyedProvider, settings: Settings
) -> None:
    provider.works = False
    clock = FakeClock()
    ssh = connected(sshd, settings, clock)
    provider.lose_keys()
    for _ in range(3):
        with pytest.raises(SshError, match="Permission denied"):
            ssh.run("true")
    assert len(provider.renewed) == 1, "once a minute at most"
    for _ in range(MOST_TRIES + 3):
        clock.sleep(SPACING_S + 1)
        with pytest.raises(SshError, match="Permission denied"):
            ssh.run("true")
    assert len(provider.renewed) == MOST_TRIES


def test_an_api_that_hangs_is_not_waited_for(
    sshd: LoopbackSshd, provider: KeyedProvider, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readmission, "LIMIT_S", 0.5)
    provider.takes_s = 5.0
    ssh = connected(sshd, settings)
    provider.lose_keys()
    started = time.monotonic()
    with pytest.raises(SshError, match="Permission denied"):
        ssh.run("true")
    assert time.monotonic() - started < 4


def test_a_provider_without_such_a_call_changes_nothing(
    sshd: LoopbackSshd, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readmission, "open_provider", lambda *_args: FakeProvider(FakeClock()))
    (sshd.folder / "authorized_keys").write_text("")
    with pytest.raises(SshError, match="Permission denied"):
        connected(sshd, settings).run("true")
