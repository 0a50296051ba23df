"""Uploads over an emulated long line: several streams beat one, and whatever is cut or refused, every file arrives."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from link import Link
from loopback_sshd import LoopbackSshd
from pennypod.clock import SystemClock
from pennypod.errors import DiskFullError
from pennypod.ssh import SPARES, Ssh, control_path, trust_host_keys, wait_for_ssh
from pennypod.transfer import Progress, UploadResult, fetch, plan_upload, upload
from pennypod.transfer.session import Meter
from pennypod.transfer.shares import MAX_STREAMS
from pod_folder import contents
from small_disk import mounted

RTT_S = 0.1
WINDOW = 192 << 10  # small, so that a few megabytes take as long on one stream as many do with the usual one


class NoWait(SystemClock):
    def sleep(self, seconds: float) -> None:
        pass


@pytest.fixture
def link(sshd: LoopbackSshd) -> Iterator[Link]:
    with Link(sshd.port, rtt_s=RTT_S, bits_per_s=1e9, window=WINDOW) as link:
        yield link


def over(link: Link, sshd: LoopbackSshd) -> Ssh:
    trust_host_keys(sshd.known_hosts, "127.0.0.1", link.port, [(sshd.folder / "host_key.pub").read_text()])
    return sshd.ssh(port=link.port)


def images(root: Path, total: int) -> Path:
    source = random.Random(9)
    root.mkdir()
    for number in range(total // 25_000 + 1):
        (root / f"img_{number:05}.jpg").write_bytes(source.randbytes(25_000))
    return root


def test_on_a_long_line_several_streams_take_less_time_than_one(sshd: LoopbackSshd, link: Link, tmp_path: Path) -> None:
    data = images(tmp_path / "data", 10_000_000)
    plan = plan_upload(None, data)

    def timed(pod: str, most: int) -> tuple[UploadResult, float]:
        started = time.monotonic()
        done = upload(over(link, sshd), plan, str(tmp_path / pod), most_streams=most)
        return done, time.monotonic() - started

    shared, several_s = timed("several", MAX_STREAMS)
    alone, one_s = timed("one", 1)
    assert contents(tmp_path / "several/data") == contents(tmp_path / "one/data") == contents(data)
    assert (shared.files, shared.bytes, alone.streams) == (alone.files, alone.bytes, 1)
    assert shared.streams > 2
    assert several_s < 0.8 * one_s, f"{shared.streams} streams {several_s:.1f} s, one {one_s:.1f} s"


def test_connections_that_stand_already_carry_the_shares(sshd: LoopbackSshd, link: Link, tmp_path: Path) -> None:
    data = images(tmp_path / "data", 40_000_000)
    trust_host_keys(sshd.known_hosts, "127.0.0.1", link.port, [(sshd.folder / "host_key.pub").read_text()])
    ssh = sshd.ssh(port=link.port, control_path=control_path("127.0.0.1", link.port, "", sshd.key_file))
    login_s = wait_for_ssh(ssh, deadline_s=20, clock=SystemClock())
    ssh.run_checked("true")
    ssh.open_spares(login_s)
    ssh.open_spares(login_s)
    before = link.connections
    assert before == 3 + SPARES, "a login as a proof, the shared one, a look at the delay, and each spare one once"
    done = upload(ssh, plan_upload(None, data), str(tmp_path / "pod"))
    assert contents(tmp_path / "pod/data") == contents(data)
    assert (done.streams, link.connections) == (1 + SPARES, before + 1), "the delay is measured, nobody logs in"
    ssh.close()
    assert not ssh.is_open
    upload(ssh, plan_upload(None, data), str(tmp_path / "again"))
    assert link.connections > before + 2, "without them shares log in"
    ssh.close()


def test_a_pod_near_by_gets_no_spare_connections(sshd: LoopbackSshd) -> None:
    ssh = sshd.ssh(control_path=control_path("127.0.0.1", sshd.port, "", sshd.key_file))
    wait_for_ssh(ssh, deadline_s=20, clock=SystemClock())
    ssh.open_spares(login_s=5.0)  # as on a busy machine
    assert not list(ssh.target.control_path.parent.glob(f"{ssh.target.control_path.name}*"))


def test_a_line_that_is_cut_costs_none_of_what_the_shares_delivered(
    sshd: LoopbackSshd, link: Link, tmp_path: Path
) -> None:
    data = images(tmp_path / "data", 16_000_000)
    plan = plan_upload(None, data)
    cuts = [link.cut]

    def cut(_progress: Progress) -> None:
        if cuts and link.carried["up"] > 8_000_000:
            cuts.pop()()

    done = upload(over(link, sshd), plan, str(tmp_path / "pod"), on_progress=cut, clock=NoWait())
    assert contents(tmp_path / "pod/data") == contents(data)
    assert (done.reconnects, cuts) == (1, [])
    assert done.resumed_files > 150
    assert link.carried["up"] < plan.bytes + 4_000_000


@pytest.mark.parametrize("sshd", ["MaxStartups 2\n"], indirect=True)
def test_a_server_that_turns_logins_down_gets_everything_over_fewer_streams(
    sshd: LoopbackSshd, link: Link, tmp_path: Path
) -> None:
    data = images(tmp_path / "data", 10_000_000)
    done = upload(over(link, sshd), plan_upload(None, data), str(tmp_path / "pod"))
    assert contents(tmp_path / "pod/data") == contents(data)
    assert done.streams < 8


def test_a_pod_whose_disk_fills_up_under_the_shares_says_so(
    sshd: LoopbackSshd, link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "interval_s", 0.0)
    data = images(tmp_path / "data", 12_000_000)
    with mounted(tmp_path / "small disk", megabytes=16) as disk:

        def fill(_progress: Progress) -> None:
            other = disk / "other"
            if link.carried["up"] > 4_000_000 and not other.exists():
                other.write_bytes(bytes(6_000_000))

        with pytest.raises(DiskFullError, match="the pod's disk is too small"):
            upload(over(link, sshd), plan_upload(None, data), str(disk / "pod"), on_progress=fill, clock=NoWait())
        (disk / "other").unlink()
        upload(over(link, sshd), plan_upload(None, data), str(disk / "pod"))
        assert contents(disk / "pod/data") == contents(data)


# --- fetch ------------------------------------------------------------------------------------------------------------


def test_on_a_long_line_a_large_file_comes_home_over_several_connections(
    sshd: LoopbackSshd, link: Link, tmp_path: Path
) -> None:
    (tmp_path / "best.pt").write_bytes(random.Random(3).randbytes(14_000_000))

    def timed(home: str, size: int) -> tuple[int, float]:
        before, started = link.connections, time.monotonic()
        fetch(over(link, sshd), str(tmp_path / "best.pt"), tmp_path / home, size=size)
        return link.connections - before, time.monotonic() - started

    several, several_s = timed("several.pt", 14_000_000)
    one, one_s = timed("one.pt", 0)
    for home in ("several.pt", "one.pt"):
        assert (tmp_path / home).read_bytes() == (tmp_path / "best.pt").read_bytes()
    assert (several > 4, one) == (True, 1)
    assert several_s < 0.8 * one_s, f"{several} connections {several_s:.1f} s, one {one_s:.1f} s"


def test_a_line_that_is_cut_costs_a_fetch_only_what_was_on_its_way(
    sshd: LoopbackSshd, link: Link, tmp_path: Path
) -> None:
    content = random.Random(4).randbytes(40_000_000)
    (tmp_path / "best.pt").write_bytes(content)
    cuts = [link.cut]

    def cut(_progress: Progress) -> None:
        if cuts and link.carried["down"] > 20_000_000:
            cuts.pop()()

    home = tmp_path / "home.pt"
    fetch(over(link, sshd), str(tmp_path / "best.pt"), home, size=len(content), on_progress=cut, clock=NoWait())
    assert (home.read_bytes() == content, cuts) == (True, [])
    assert link.carried["down"] < len(content) + 36_000_000


@pytest.mark.parametrize("sshd", ["MaxStartups 1\n"], indirect=True)
def test_a_server_that_turns_logins_down_gives_the_file_over_fewer_connections(
    sshd: LoopbackSshd, link: Link, tmp_path: Path
) -> None:
    content = random.Random(5).randbytes(12_000_000)
    (tmp_path / "best.pt").write_bytes(content)
    fetch(over(link, sshd), str(tmp_path / "best.pt"), tmp_path / "home.pt", size=len(content), clock=NoWait())
    assert (tmp_path / "home.pt").read_bytes() == content
