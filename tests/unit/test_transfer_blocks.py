"""A large file in blocks over several connections: whole and in order, whatever becomes of some of them."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
from pathlib import Path

import pytest
from pennypod.clock import SystemClock
from pennypod.errors import DiskFullError, SourceChangedError, SshError
from pennypod.transfer import Progress, fetch
from pennypod.transfer.blocks import BLOCK
from pod_folder import FolderSsh
from small_disk import mounted

SIZE = 9 * BLOCK + 12_345


class NoWait(SystemClock):
    def sleep(self, seconds: float) -> None:
        pass


class Fragile(FolderSsh):
    """The connections with these numbers, of which the first asks for the hash, break off after `down` bytes."""

    def __init__(self, *broken: int, down: int) -> None:
        super().__init__(round_trip_s=0.1)
        self.broken, self.down = broken, down

    def popen(self, remote: str) -> subprocess.Popen[bytes]:
        if self.conversations in self.broken:
            cut = f"dd bs=64K count={self.down} iflag=count_bytes status=none"  # head would hold back what it has
            remote = f"exec bash -c {shlex.quote(f'{remote} | {cut}')}"
        return super().popen(remote)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "pod/best.pt"
    path.parent.mkdir()
    path.write_bytes(random.Random(2).randbytes(SIZE))
    return path


def test_the_file_is_put_together_in_order(tmp_path: Path, weights: Path) -> None:
    ssh = FolderSsh(round_trip_s=0.1)
    seen: list[Progress] = []
    done = fetch(ssh, str(weights), tmp_path / "home.pt", size=SIZE, on_progress=seen.append)
    assert (tmp_path / "home.pt").read_bytes() == weights.read_bytes()
    assert (done.bytes, seen[-1].bytes_done, seen[-1].bytes_total) == (SIZE, SIZE, SIZE)
    assert ssh.conversations == 9
    assert SIZE < ssh.traffic.fetched < SIZE + 20_000


def test_a_short_line_or_a_small_file_takes_one_connection(tmp_path: Path, weights: Path) -> None:
    for round_trip_s, size in ((0.001, SIZE), (None, SIZE), (0.1, 9_999_999), (0.1, 0)):
        ssh = FolderSsh(round_trip_s=round_trip_s)
        fetch(ssh, str(weights), tmp_path / "home.pt", size=size)
        assert ssh.conversations == 1


def test_it_goes_on_from_what_is_here(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "home.pt.part").write_bytes(weights.read_bytes()[: 3 * BLOCK + 7])
    ssh = FolderSsh(round_trip_s=0.1)
    fetch(ssh, str(weights), tmp_path / "home.pt", size=SIZE)
    assert (tmp_path / "home.pt").read_bytes() == weights.read_bytes()
    assert ssh.traffic.fetched < SIZE - 3 * BLOCK + 20_000


@pytest.mark.parametrize("down", [0, 1_000, BLOCK + 500_000])
@pytest.mark.parametrize("broken", [(1,), (1, 2, 3, 4, 5, 6, 7)])
def test_what_a_broken_connection_had_asked_for_comes_over_the_others(
    tmp_path: Path, weights: Path, broken: tuple[int, ...], down: int
) -> None:
    ssh = Fragile(*broken, down=down)
    fetch(ssh, str(weights), tmp_path / "home.pt", size=SIZE, clock=NoWait())
    assert (tmp_path / "home.pt").read_bytes() == weights.read_bytes()
    assert ssh.conversations == 9, "the others were enough"


def test_with_all_of_them_broken_it_goes_on_over_fewer_from_where_it_was(tmp_path: Path, weights: Path) -> None:
    ssh = Fragile(*range(1, 9), down=1_000)
    fetch(ssh, str(weights), tmp_path / "home.pt", size=SIZE, clock=NoWait())
    assert (tmp_path / "home.pt").read_bytes() == weights.read_bytes()
    assert ssh.conversations == 9 + 5


def test_a_line_that_never_holds_is_given_up(tmp_path: Path, weights: Path) -> None:
    with pytest.raises(SshError, match="broke 6 times in a row"):
        fetch(Fragile(*range(100), down=0), str(weights), tmp_path / "home.pt", size=SIZE, clock=NoWait())
    assert not (tmp_path / "home.pt").exists()


def test_a_file_that_changes_meanwhile_never_comes_home_as_a_mix(tmp_path: Path, weights: Path) -> None:
    changed: list[bytes] = []
    before = weights.read_bytes()

    def meddle(progress: Progress) -> None:
        if progress.bytes_done > BLOCK and not changed:
            changed.append(random.Random(8).randbytes(SIZE - 3 * BLOCK))
            weights.write_bytes(changed[0])
            os.utime(weights, (1, 1))

    fetch(
        FolderSsh(round_trip_s=0.1), str(weights), tmp_path / "home.pt", size=SIZE, on_progress=meddle, clock=NoWait()
    )
    assert (tmp_path / "home.pt").read_bytes() in (before, changed[0])


def test_another_file_than_expected_is_refused(tmp_path: Path, weights: Path) -> None:
    with pytest.raises(SourceChangedError, match="not the file that was asked for"):
        fetch(FolderSsh(round_trip_s=0.1), str(weights), tmp_path / "x", size=SIZE, expected_sha256="0" * 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pod"]


def test_a_disk_that_is_too_small_here_is_said_and_nothing_stays(tmp_path: Path, weights: Path) -> None:
    with mounted(tmp_path / "disk", megabytes=8) as disk:
        with pytest.raises(DiskFullError, match="the disk here is full"):
            fetch(FolderSsh(round_trip_s=0.1), str(weights), disk / "home.pt", size=SIZE)
        assert not list(disk.glob("home*"))
