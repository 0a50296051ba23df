"""Transfers over a real sshd: verified byte for byte, resumed when the line breaks, honest when a disk is full."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from link import Link
from loopback_sshd import LoopbackSshd
from pennypod import shipping
from pennypod.clock import SystemClock
from pennypod.errors import DiskFullError, SourceChangedError, SshError
from pennypod.ledger import RunRecord, open_ledger
from pennypod.settings import load_settings
from pennypod.ssh import Ssh, control_path, trust_host_keys
from pennypod.store.embedded import EmbeddedStore
from pennypod.transfer import Progress, fetch, plan_upload, upload
from pennypod.transfer.session import Meter
from pod_folder import contents
from small_disk import mounted
from tcp_proxy import CuttingProxy
from workspace import wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN = "demo-1201-aaaaa"


class NoWait(SystemClock):
    def sleep(self, seconds: float) -> None:
        pass


def through(sshd: LoopbackSshd, proxy: CuttingProxy) -> Ssh:
    """The same pod at the other end of a line that breaks."""
    public = (sshd.folder / "host_key.pub").read_text()
    trust_host_keys(sshd.known_hosts, "127.0.0.1", proxy.port, [public])
    return sshd.ssh(port=proxy.port)


def small_images(root: Path, count: int, *, size: int = 8_000) -> Path:
    """Files that do not compress, as JPEGs do not."""
    source = random.Random(7)
    for number in range(count):
        path = root / f"train/class{number % 7}/img_{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(source.randint(size // 2, size * 3 // 2)))
    return root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    with mounted(tmp_path / "small disk", megabytes=8) as path:
        yield path


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is reported after every chunk."""
    monkeypatch.setattr(Meter, "interval_s", 0.0)


def once(act: Callable[[], object], *, at: int) -> Callable[[Progress], None]:
    """A progress callback that acts one time, after `at` bytes."""
    waiting = [act]

    def on_progress(progress: Progress) -> None:
        if waiting and progress.bytes_done >= at:
            waiting.pop()()

    return on_progress


# --- upload ----------------------------------------------------------------------------------------------------------


def test_a_whole_tree_arrives_byte_for_byte_and_only_once(sshd: LoopbackSshd, tmp_path: Path) -> None:
    data = small_images(tmp_path / "data", 300)
    for name in ("-rf", "a b/new\nline", "zahn-ü.jpg", "\udcff\udcfe", "'\"$(touch x)`y`", "x" * 200 + "/" + "y" * 200):
        path = data / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.fsencode(name))
    (data / "empty folder").mkdir()
    (data / "empty file").touch()
    (data / "link.jpg").symlink_to("train/class0/img_00000.jpg")
    code = ROOT / "python"
    plan = plan_upload(code, data)
    home = tmp_path / "pod home"
    seen: list[Progress] = []
    with_master = sshd.ssh(control_path=control_path("127.0.0.1", sshd.port, "me", sshd.key_file))
    try:
        first = upload(with_master, plan, str(home), on_progress=seen.append)
        second = upload(with_master, plan, str(home))
    finally:
        with_master.close()
    arrived = contents(home / "data")
    assert arrived.pop(b"link.jpg") == (data / "train/class0/img_00000.jpg").read_bytes()
    (data / "link.jpg").unlink()
    assert arrived == contents(data)
    assert (home / "code/pennypod/ssh.py").read_bytes() == (code / "pennypod/ssh.py").read_bytes()
    assert not list(home.glob("code/**/__pycache__"))
    assert (first.files, first.bytes, first.unchanged_files) == (plan.files, plan.bytes, 0)
    assert (second.files, second.bytes, second.unchanged_files, second.changed) == (0, 0, plan.files, False)
    assert (seen[-1].bytes_done, seen[-1].files_done) == (plan.bytes, plan.files)


def test_a_broken_line_costs_only_what_was_not_verified_yet(sshd: LoopbackSshd, tmp_path: Path) -> None:
    data = small_images(tmp_path / "data", 400, size=20_000)
    plan = plan_upload(None, data)
    with CuttingProxy(sshd.port, up=6_000_000, cuts=1) as proxy:
        done = upload(through(sshd, proxy), plan, str(tmp_path / "pod"), clock=NoWait())
        carried = proxy.carried["up"]
    assert contents(tmp_path / "pod/data") == contents(data)
    assert done.reconnects == 1
    assert done.resumed_files > 60
    # Without resuming it would be 6 MB more; what was on its way when the line broke goes twice.
    assert carried < plan.bytes + 4_000_000


def test_a_line_that_breaks_often_is_no_reason_to_give_up_while_files_arrive(
    sshd: LoopbackSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["pennypod.transfer.upload"], "MAX_STRIKES", 1)
    data = small_images(tmp_path / "data", 160, size=20_000)
    with CuttingProxy(sshd.port, up=1_000_000, cuts=100) as proxy:
        done = upload(through(sshd, proxy), plan_upload(None, data), str(tmp_path / "pod"), clock=NoWait())
    assert done.reconnects > 2
    assert contents(tmp_path / "pod/data") == contents(data)


def test_a_file_larger_than_what_the_line_ever_carries_in_one_go_arrives(sshd: LoopbackSshd, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "set.npz").write_bytes(random.Random(3).randbytes(24_000_000))
    with CuttingProxy(sshd.port, up=8_000_000, cuts=100) as proxy:
        done = upload(through(sshd, proxy), plan_upload(None, data), str(tmp_path / "pod"), clock=NoWait())
    assert done.reconnects >= 3
    assert contents(tmp_path / "pod/data") == contents(data)


def test_a_later_upload_goes_on_where_an_earlier_one_ended(sshd: LoopbackSshd, tmp_path: Path) -> None:
    data = small_images(tmp_path / "data", 200, size=20_000)
    plan = plan_upload(None, data)
    with CuttingProxy(sshd.port, up=2_000_000, cuts=100) as proxy, pytest.raises(SshError, match="in a row"):
        upload(through(sshd, proxy), plan, str(tmp_path / "pod"), clock=NoEndlessWait(proxy, 3))
    there = sum(1 for path in (tmp_path / "pod/data").rglob("*.jpg"))
    assert 0 < there < 200
    done = upload(sshd.ssh(), plan, str(tmp_path / "pod"))
    assert done.unchanged_files >= there - 1
    assert done.files == 200 - done.unchanged_files
    assert contents(tmp_path / "pod/data") == contents(data)


class NoEndlessWait(NoWait):
    """After a few connections the line carries nothing at all any more, so that the upload has to give up."""

    def __init__(self, proxy: CuttingProxy, after: int) -> None:
        self.proxy, self.after = proxy, after

    def sleep(self, seconds: float) -> None:
        if self.proxy.connections >= self.after:
            self.proxy.limit(up=0)


def test_a_vanished_file_fails_the_upload_and_names_it(sshd: LoopbackSshd, tmp_path: Path) -> None:
    data = small_images(tmp_path / "data", 20)
    victim = data / "train/class3/img_00010.jpg"
    with pytest.raises(SourceChangedError, match=r"img_00010\.jpg vanished"):
        upload(sshd.ssh(), plan_upload(None, data), str(tmp_path / "pod"), on_progress=once(victim.unlink, at=0))


@pytest.mark.usefixtures("eager")
def test_a_changed_file_arrives_in_its_last_form(sshd: LoopbackSshd, tmp_path: Path) -> None:
    data = small_images(tmp_path / "data", 20)
    (data / "video.mp4").write_bytes(b"1" * 6_000_000)
    meddle = once(lambda: (data / "video.mp4").write_bytes(b"2" * 5_000_000), at=3_000_000)
    upload(sshd.ssh(), plan_upload(None, data), str(tmp_path / "pod"), on_progress=meddle, clock=NoWait())
    assert contents(tmp_path / "pod/data") == contents(data)


def test_a_pod_without_room_says_so_before_anything_is_sent(
    sshd: LoopbackSshd, tmp_path: Path, small_disk: Path
) -> None:
    data = small_images(tmp_path / "data", 20)
    (data / "z.npz").write_bytes(b"1" * 9_000_000)  # the last to be sent
    with pytest.raises(DiskFullError, match=r"8\.\d MB free, 9\.\d MB needed") as caught:
        upload(sshd.ssh(), plan_upload(None, data), str(small_disk / "pod"))
    assert caught.value.details["where"] == "pod"
    assert not list((small_disk / "pod").rglob("*.jpg"))


@pytest.mark.usefixtures("eager")
def test_a_disk_that_fills_up_meanwhile_is_an_error_not_a_short_data_set(
    sshd: LoopbackSshd, tmp_path: Path, small_disk: Path
) -> None:
    data = small_images(tmp_path / "data", 20)
    (data / "z.npz").write_bytes(b"1" * 6_000_000)

    def fill() -> None:
        (small_disk / "other").write_bytes(b"1" * 3_000_000)

    with pytest.raises(DiskFullError, match=r"MB free, 6\.\d MB needed"):
        upload(sshd.ssh(), plan_upload(None, data), str(small_disk / "pod"), on_progress=once(fill, at=1_000_000))
    (small_disk / "other").unlink()
    upload(sshd.ssh(), plan_upload(None, data), str(small_disk / "pod"))
    assert contents(small_disk / "pod/data") == contents(data)


def test_files_to_be_replaced_count_as_room(sshd: LoopbackSshd, tmp_path: Path, small_disk: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.npz").write_bytes(b"1" * 5_000_000)
    upload(sshd.ssh(), plan_upload(None, data), str(small_disk / "pod"))
    (data / "a.npz").write_bytes(b"2" * 5_000_000)
    assert upload(sshd.ssh(), plan_upload(None, data), str(small_disk / "pod")).files == 1
    assert contents(small_disk / "pod/data") == contents(data)


def test_many_small_files_take_less_time_than_with_scp(sshd: LoopbackSshd, tmp_path: Path) -> None:
    """The reason for tar streams: one round trip for all files, not some for each."""
    data = small_images(tmp_path / "data", 100, size=2_000)
    with Link(sshd.port, rtt_s=0.02, bits_per_s=1e9) as link:
        trust_host_keys(sshd.known_hosts, "127.0.0.1", link.port, [(sshd.folder / "host_key.pub").read_text()])
        target = sshd.target(port=link.port)
        started = time.monotonic()
        upload(sshd.ssh(port=link.port), plan_upload(None, data), str(tmp_path / "ours"))
        ours = time.monotonic() - started
        where = f"{target.user}@127.0.0.1:{tmp_path}/scp"
        started = time.monotonic()
        subprocess.run(["scp", *target.options(), "-q", "-P", str(target.port), "-r", str(data), where], check=True)
        scp = time.monotonic() - started
    assert contents(tmp_path / "ours/data") == contents(tmp_path / "scp")
    assert ours < scp, f"ours {ours:.2f} s, scp {scp:.2f} s"


# --- fetch -----------------------------------------------------------------------------------------------------------


def test_a_fetch_goes_on_at_the_byte_where_the_line_broke(sshd: LoopbackSshd, tmp_path: Path) -> None:
    content = random.Random(1).randbytes(12_000_000)
    (tmp_path / "best.pt").write_bytes(content)
    home = tmp_path / "artifacts/best.pt"
    seen: list[bool] = []
    with CuttingProxy(sshd.port, down=4_000_000, cuts=2) as proxy:
        done = fetch(
            through(sshd, proxy),
            str(tmp_path / "best.pt"),
            home,
            expected_sha256=hashlib.sha256(content).hexdigest(),
            on_progress=lambda progress: seen.append(home.exists() and progress.files_done == 0),
            clock=NoWait(),
        )
        assert proxy.connections == 3
        # Without going on it would be 20 MB; what ssh had under way (its window is 2 MB) is lost with each cut.
        assert proxy.carried["down"] < len(content) + 2 * 2_200_000
    assert home.read_bytes() == content
    assert done.bytes == len(content)
    assert not any(seen)  # it appears whole or not at all
    assert [path.name for path in home.parent.iterdir()] == ["best.pt"]


def test_a_fetch_that_was_given_up_leaves_a_part_to_go_on_from(sshd: LoopbackSshd, tmp_path: Path) -> None:
    content = random.Random(2).randbytes(6_000_000)
    (tmp_path / "best.pt").write_bytes(content)
    home = tmp_path / "artifacts/best.pt"
    with CuttingProxy(sshd.port, down=3_000_000, cuts=100) as proxy, pytest.raises(SshError, match="in a row"):
        fetch(through(sshd, proxy), str(tmp_path / "best.pt"), home, clock=NoEndlessWait(proxy, 1))
    assert not home.exists()
    had = home.with_name("best.pt.part").stat().st_size
    assert 500_000 < had < len(content)
    with CuttingProxy(sshd.port) as proxy:
        fetch(through(sshd, proxy), str(tmp_path / "best.pt"), home)
        assert proxy.carried["down"] < len(content) - had + 500_000
    assert home.read_bytes() == content


def test_a_full_disk_here_is_an_error_and_makes_room_again(
    sshd: LoopbackSshd, tmp_path: Path, small_disk: Path, eager: None
) -> None:
    (tmp_path / "big.pt").write_bytes(b"1" * 9_000_000)
    (tmp_path / "fits.pt").write_bytes(b"1" * 6_000_000)
    home = small_disk / "best.pt"
    home.write_bytes(b"old")
    with pytest.raises(DiskFullError, match=r"8\.\d MB free in .*, 9\.0 MB needed"):
        fetch(sshd.ssh(), str(tmp_path / "big.pt"), home)
    fill = once(lambda: (small_disk / "other").write_bytes(b"1" * 4_000_000), at=1_000_000)
    with pytest.raises(DiskFullError, match="the disk here is full"):
        fetch(sshd.ssh(), str(tmp_path / "fits.pt"), home, on_progress=fill)
    assert sorted(path.name for path in small_disk.iterdir()) == ["best.pt", "other"]
    assert home.read_bytes() == b"old"


# --- the module ------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(sshd: LoopbackSshd, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs library/run_dataset.py as Ansible does: in a process of its own, options on stdin, the result on stdout."""
    data = small_images(tmp_path / "data", 12)
    (data / "data.yaml").write_text("path: /home/somebody  # ours\ntrain: train\nnames: [a]\n")
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print('hello')\n")
    target = sshd.target()
    where = {"host": target.host, "port": target.port, "user": target.user}
    keys = {"key_file": str(target.key_file), "known_hosts": str(target.known_hosts)}
    what = {"code": str(code), "data": str(data), "data_yaml": "data.yaml", "pod_home": str(tmp_path / "pod")}

    with contextlib.closing(open_ledger(load_settings({"PENNYPOD_HOME": str(tmp_path / "state")}))) as ledger:
        ledger.open_run(RunRecord(RUN, job="demo", controller="test", created=time.time(), artifacts_dir=str(tmp_path)))

    def run(*, check: bool = False, diff: bool = False, **changes: Any) -> dict[str, Any]:
        options = {"run": RUN, **where, **keys, **what, **changes}
        options |= {"_ansible_check_mode": check, "_ansible_diff": diff, "_ansible_remote_tmp": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", RUN_MODULE, str(ROOT / "library/run_dataset.py")],
            input=json.dumps({name: value for name, value in options.items() if value is not None}).encode(),
            capture_output=True,
            env={**os.environ, "PENNYPOD_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT / "python")},
            timeout=60,
        )
        assert done.stdout, done.stderr.decode()
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


RUN_MODULE = """
import runpy, sys
from ansible.module_utils.testing import patch_module_args
import json
with patch_module_args(json.load(sys.stdin)):
    runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_the_module_ships_once_and_predicts_what_it_would_do(
    module: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    without_pod = module(check=True, host=None, key_file=None, known_hosts=None)
    assert (without_pod["changed"], without_pod["files"]) == (True, 14)
    predicted = module(check=True)
    assert (predicted["changed"], predicted["files"], len(predicted["paths"])) == (True, 14, 14)
    assert not (tmp_path / "pod").exists()
    first = module(diff=True)
    assert (first["changed"], first["files"], first["bytes"]) == (True, 14, predicted["bytes"])
    assert "+ data/data.yaml\n" in first["diff"]["after"]
    second = module(diff=True)
    assert (second["changed"], second["files"], second["unchanged_files"]) == (False, 0, 14)
    assert second["diff"]["before"] == second["diff"]["after"]
    assert module(check=True)["changed"] is False
    arrived = (tmp_path / "pod/data/data.yaml").read_text()
    assert arrived == f"path: {tmp_path}/pod/data  # ours\ntrain: train\nnames: [a]\n"
    assert (tmp_path / "data/data.yaml").read_text().startswith("path: /home/somebody")
    lines = (tmp_path / "state/runs/demo-1201-aaaaa/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert {event["stage"] for event in events} == {"dataset"}
    assert "all 14 verified on the pod" in events[1]["text"]


def test_the_module_lets_the_pod_fetch_the_data_from_the_bucket_and_falls_back(
    module: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("boto3", reason="the store extra is not installed")
    with EmbeddedStore(tmp_path / "state") as server:
        would = module(check=True, state="kept", host=None, code=None)
        kept = module(state="kept", host=None, code=None)
        assert (would["changed"], kept["changed"]) == (True, True)
        again = module(check=True, state="kept", host=None, code=None)
        assert (again["changed"], set(again) - set(kept)) == (False, set()), "the same keys on every path"
        first = module(store=True)
        assert (first["changed"], first["dataset"]["by"]) == (True, "bucket and ssh")
        assert (first["dataset"]["pulled_files"], first["dataset"]["bucket_bytes"]) == (12, kept["bytes"])
        second = module(store=True, pod_home=str(tmp_path / "pod2"))
        rewritten = (tmp_path / "pod2/data/data.yaml").stat().st_size
        assert (second["dataset"]["pulled_files"], second["dataset"]["sent_bytes"]) == (12, rewritten)
        assert module(store=True, pod_home=str(tmp_path / "pod2"))["changed"] is False
        secret = server.config.secret_key
    third = module(store=True, pod_home=str(tmp_path / "pod3"))
    assert (third["changed"], third["dataset"]["by"], third["files"]) == (True, "ssh", 14)
    assert "goes over SSH, not from the bucket: no object store" in str(third["warnings"])
    for path in [*(tmp_path / "pod").rglob("*"), *(tmp_path / "state/runs").rglob("*")]:
        content = path.read_bytes() if path.is_file() else b""
        assert secret.encode() not in content, path
        assert b"X-Amz-Signature" not in content, path


# --- what is begun beside the bootstrap -------------------------------------------------------------------------------

Module = Callable[..., dict[str, Any]]


def note_of(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "state/runs" / RUN / shipping.NOTE
    return dict(json.loads(path.read_text())) if path.exists() else {}


def begun_by(tmp_path: Path) -> list[psutil.Process]:
    """The processes that ship for the run's state folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_one = process.cmdline()[-3:] == ["-m", "pennypod.shipping", RUN]
            if is_one and process.environ().get("PENNYPOD_HOME") == str(tmp_path / "state"):
                found.append(process)
    return found


def events_of(tmp_path: Path) -> str:
    path = tmp_path / "state/runs" / RUN / "events.jsonl"
    return path.read_text() if path.exists() else ""


def test_what_was_begun_is_waited_for_and_told_once(module: Module, tmp_path: Path) -> None:
    assert module(state="begun", check=True)["changed"] is False
    assert not note_of(tmp_path), "check mode begins nothing"
    begun = module(state="begun")
    assert (begun["changed"], begun["files"]) == (False, 0)
    wait_until(lambda: "result" in note_of(tmp_path), 30, "what was begun is done")
    assert contents(tmp_path / "pod/code") == contents(tmp_path / "code")
    shipped = module()
    assert (shipped["changed"], shipped["files"], shipped["unchanged_files"]) == (True, 14, 0)
    assert not note_of(tmp_path)
    again = module()
    assert (again["changed"], again["files"], again["unchanged_files"]) == (False, 0, 14)


def test_whoever_ships_while_it_is_under_way_waits_for_it(module: Module, tmp_path: Path) -> None:
    module(state="begun")
    shipped = module()
    assert (shipped["changed"], shipped["files"]) == (True, 14)
    assert contents(tmp_path / "pod/code") == contents(tmp_path / "code")
    wait_until(lambda: not begun_by(tmp_path), 30, "what was begun has ended")
    assert events_of(tmp_path).count("14 files, ") == 2, (
        "one of the two has sent them: what there is, and what was sent"
    )


def test_what_was_begun_is_not_believed_for_other_files_or_another_pod(module: Module, tmp_path: Path) -> None:
    module(state="begun")
    wait_until(lambda: "result" in note_of(tmp_path), 30, "what was begun is done")
    (tmp_path / "code/train.py").write_text("print('changed meanwhile')\n")
    shipped = module()
    assert (shipped["files"], shipped["unchanged_files"]) == (1, 13)
    assert (tmp_path / "pod/code/train.py").read_text() == "print('changed meanwhile')\n"
    module(state="begun")
    wait_until(lambda: "result" in note_of(tmp_path), 30, "what was begun is done")
    elsewhere = module(pod_home=str(tmp_path / "another pod"))
    assert (elsewhere["changed"], elsewhere["files"]) == (True, 14)


def test_one_that_is_killed_or_comes_too_late_costs_nothing_but_time(module: Module, tmp_path: Path) -> None:
    module(state="begun")
    for process in begun_by(tmp_path):
        process.kill()
    shipped = module()
    assert shipped["files"] + shipped["unchanged_files"] == 14
    assert contents(tmp_path / "pod/code") == contents(tmp_path / "code")
    (tmp_path / "pod/code/output.txt").write_text("made by the training, which runs by now")
    environ = {**os.environ, "PENNYPOD_HOME": str(tmp_path / "state")}
    late = subprocess.run([sys.executable, "-m", "pennypod.shipping", RUN], env=environ, timeout=60, check=True)
    assert late.returncode == 0
    assert (tmp_path / "pod/code/output.txt").exists(), "what does not belong is removed, so it must not ship now"


def test_what_was_begun_ends_when_the_run_is_taken_away(module: Module, tmp_path: Path) -> None:
    (tmp_path / "data/large.bin").write_bytes(random.Random(1).randbytes(200_000_000))
    module(state="begun")
    wait_until(lambda: "to ship" in events_of(tmp_path), 30, "it ships")
    with contextlib.closing(open_ledger(load_settings({"PENNYPOD_HOME": str(tmp_path / "state")}))) as ledger:
        assert ledger.fence(RUN, "taken away")
    wait_until(lambda: not begun_by(tmp_path), 10, "it has ended")


def test_a_failure_of_what_was_begun_is_told_and_made_good(module: Module, tmp_path: Path) -> None:
    module(state="begun", port=1)
    wait_until(lambda: not begun_by(tmp_path), 60, "it has ended")
    assert "has ended early: ssh" in events_of(tmp_path)
    assert module()["files"] == 14


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"data_yaml": "other.yaml"}, "input", "there is no other.yaml in"),
        ({"host": None}, "input", "say where the pod is"),
        ({"port": 1}, "ssh", "Connection refused"),
        ({"code_limit_mb": 0}, "input", "over the limit of 0.0 MB"),
    ],
)
def test_the_module_fails_with_one_line_and_a_code(
    module: Callable[..., dict[str, Any]],
    changes: dict[str, Any],
    code: str,
    words: str,
) -> None:
    result = module(check=code == "ssh", **changes)
    assert result["failed"] is True
    assert result["failure"]["code"] == code
    assert words in result["msg"]
    assert "\n" not in result["msg"]
