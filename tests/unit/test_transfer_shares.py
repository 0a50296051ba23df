"""Uploads shared out among connections: how many there are, and that losing some of them loses no file."""

from __future__ import annotations

import fcntl
import os
import random
import shlex
import subprocess
import threading
from pathlib import Path

import pytest
from pennypod.clock import SystemClock
from pennypod.errors import DiskFullError, SourceChangedError, TransferError
from pennypod.transfer import plan_upload, upload
from pennypod.transfer.outgoing import LARGE_BYTES, Outgoing
from pennypod.transfer.shares import FIRST_STREAMS, SHARED_FROM, _Share, _StoppedError, streams_for
from pod_folder import FolderSsh, contents
from small_disk import mounted


class NoWait(SystemClock):
    def sleep(self, seconds: float) -> None:
        pass


def images(root: Path, total: int) -> Path:
    source = random.Random(5)
    content = source.randbytes(40_000)
    for number in range(total // len(content) + 1):
        path = root / f"class{number % 3}/{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(8, "big") + content)
    return root


@pytest.mark.parametrize(
    ("round_trip_s", "size", "streams"),
    [
        (0.1, 177_000_000, 8),
        (0.02, 177_000_000, 2),
        (0.001, 177_000_000, 1),
        (0.3, 10**12, FIRST_STREAMS),
        (0.1, SHARED_FROM, 8),
        (0.1, SHARED_FROM - 1, 1),
    ],
)
def test_the_delay_and_the_size_say_how_many_streams(round_trip_s: float, size: int, streams: int) -> None:
    assert streams_for(round_trip_s, size) == streams


def test_large_files_go_first_and_each_file_is_taken_once(tmp_path: Path) -> None:
    for name, size in (("a", 1), ("b", LARGE_BYTES), ("c", 2), ("d", LARGE_BYTES + 1)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    (part,) = plan_upload(None, tmp_path).parts
    todo = Outgoing(part, [0, 1, 2, 3], {})
    assert [todo.take() for _ in range(5)] == [3, 1, 0, 2, None]


def test_shares_carry_files_and_the_pod_has_them_all(tmp_path: Path) -> None:
    data = images(tmp_path / "data", 40_000_000)
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print()\n")
    ssh = FolderSsh(round_trip_s=0.1)
    plan = plan_upload(code, data)
    done = upload(ssh, plan, str(tmp_path / "pod"))
    assert done.streams > 1
    assert (done.files, done.bytes, done.reconnects) == (plan.files, plan.bytes, 0)
    assert contents(tmp_path / "pod/data") == contents(data)
    assert contents(tmp_path / "pod/code") == contents(code)
    assert sorted(path.name for path in (tmp_path / "pod").iterdir()) == ["code", "data"]
    assert upload(ssh, plan, str(tmp_path / "pod")).changed is False


class Fragile(FolderSsh):
    """The second and third connection, which are shares, break off after so many bytes."""

    def __init__(self, up: int) -> None:
        super().__init__(round_trip_s=0.1)
        self.up = up

    def popen(self, remote: str) -> subprocess.Popen[bytes]:
        if self.conversations in (1, 2):
            remote = f"exec bash -c {shlex.quote(f'{remote} < <(head -c {self.up} 2> /dev/null)')}"
        return super().popen(remote)


@pytest.mark.parametrize("up", [0, 30_000, 2_000_000])
def test_a_share_that_breaks_off_costs_its_own_files_only(tmp_path: Path, up: int) -> None:
    """At its login, and in the middle: the others go on, and what it had not delivered goes again."""
    data = images(tmp_path / "data", 40_000_000)
    plan = plan_upload(None, data)
    done = upload(Fragile(up), plan, str(tmp_path / "pod"), clock=NoWait())
    assert contents(tmp_path / "pod/data") == contents(data)
    assert done.reconnects <= 1
    assert done.bytes < plan.bytes * 1.5


def test_a_file_that_a_share_took_and_lost_goes_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod would wait for a share that never comes: no answer is due then."""
    take, lost = _Share._take, []

    def lose_the_first(share: _Share) -> int | None:
        number = take(share)
        if number is not None and not lost:
            lost.append(number)
            raise _StoppedError
        return number

    monkeypatch.setattr(_Share, "_take", lose_the_first)
    data = images(tmp_path / "data", 40_000_000)
    done = upload(FolderSsh(round_trip_s=0.1), plan_upload(None, data), str(tmp_path / "pod"), clock=NoWait())
    assert contents(tmp_path / "pod/data") == contents(data)
    assert (len(lost), done.reconnects) == (1, 1)
    assert done.seconds < 60, "not after a silence that ends the line"


def test_a_file_that_vanishes_from_a_share_fails_the_upload(tmp_path: Path) -> None:
    data = images(tmp_path / "data", 40_000_000)
    plan = plan_upload(None, data)
    victims = [path for path in sorted(data.rglob("*.jpg"))[300:] if int(path.stem) % 2]
    for path in victims:
        path.unlink()
    with pytest.raises(SourceChangedError, match="vanished"):
        upload(FolderSsh(round_trip_s=0.1), plan, str(tmp_path / "pod"), clock=NoWait())


def test_shares_write_nothing_on_a_pod_that_has_refused(tmp_path: Path) -> None:
    data = images(tmp_path / "data", 40_000_000)
    with mounted(tmp_path / "disk", megabytes=30) as disk:
        with pytest.raises(DiskFullError, match="not enough space"):
            upload(FolderSsh(round_trip_s=0.1), plan_upload(None, data), str(disk / "pod"), clock=NoWait())
        assert not list(disk.rglob("*.jpg"))


def test_an_upload_waits_until_the_shares_of_a_broken_one_are_gone(tmp_path: Path) -> None:
    data = images(tmp_path / "data", 100_000)
    pod = tmp_path / "pod"
    pod.mkdir()
    left_over = os.open(pod, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(left_over, fcntl.LOCK_SH)
    gone = threading.Event()

    def go() -> None:
        assert not list(pod.iterdir())
        gone.set()
        os.close(left_over)

    threading.Timer(0.5, go).start()
    upload(FolderSsh(), plan_upload(None, data), str(pod))
    assert gone.is_set()
    assert contents(pod / "data") == contents(data)


def test_a_caller_that_stops_ends_every_share(tmp_path: Path) -> None:
    data = images(tmp_path / "data", 40_000_000)

    def stop(_progress: object) -> None:
        if threading.active_count() > 4:
            raise TransferError("enough")

    before = threading.active_count()
    with pytest.raises(TransferError, match="enough"):
        upload(FolderSsh(round_trip_s=0.1), plan_upload(None, data), str(tmp_path / "pod"), on_progress=stop)
    assert threading.active_count() <= before + 1  # the scout may still be waking up
