"""The whole conversation with manifest.py, both ends on this machine: any tree arrives as it is."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pennypod.clock import SystemClock
from pennypod.errors import DiskFullError, InputError, SourceChangedError, SshError, TransferError
from pennypod.transfer import Progress, fetch, fetch_tree, plan_upload, preview, tar, upload
from pennypod.transfer.fetch import _stays_below
from pennypod.transfer.session import Meter
from pod_folder import FolderSsh, contents


class NoWait(SystemClock):
    """Time passes without waiting; `naps` counts the pauses that were asked for."""

    def __init__(self) -> None:
        self.naps = 0

    def sleep(self, seconds: float) -> None:
        self.naps += 1


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


NAME = st.one_of(
    st.sampled_from(
        [b"-rf", b"a b", b"new\nline", "zahn-ü".encode(), b"\xff\xfe", b"'\"$(x)", b" ", b"x" * 200, b"~", b"#"]
    ),
    st.binary(min_size=1, max_size=12).map(lambda raw: raw.replace(b"/", b"_").replace(b"\0", b"0")),
).filter(lambda name: name not in (b".", b".."))
CONTENT = st.one_of(st.just(b""), st.binary(max_size=40), st.integers(500, 530).map(lambda size: b"x" * size))
TREE = st.dictionaries(
    st.lists(NAME, min_size=1, max_size=3).map(b"/".join), st.one_of(CONTENT, st.none()), min_size=1, max_size=8
)


def build(root: Path, tree: dict[bytes, bytes | None]) -> None:
    for name, content in tree.items():
        path = root / os.fsdecode(name)
        try:
            (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue  # one name is a file here and a folder there: the first one stays


@settings(max_examples=12, deadline=None)
@given(first=TREE, second=TREE)
def test_any_tree_arrives_and_replaces_any_other(tmp_path_factory: Any, first: Any, second: Any) -> None:
    """Also on a pod that holds another tree: afterwards it is equal, and a further upload has nothing to do."""
    base = tmp_path_factory.mktemp("trees")
    ssh = FolderSsh()
    for number, tree in enumerate((first, second)):
        source = base / str(number)
        source.mkdir()
        build(source, tree)
        if not any(content is not None for content in contents(source).values()):
            (source / "one").write_bytes(b"1")
        plan = plan_upload(None, source)
        upload(ssh, plan, str(base / "pod"))
        assert contents(base / "pod" / "data") == contents(source)
        again = upload(ssh, plan, str(base / "pod"))
        assert (again.files, again.removed_files, again.changed) == (0, 0, False)
        assert again.unchanged_files == plan.files
    shutil.rmtree(base)


@settings(max_examples=20, deadline=None)
@given(names=st.lists(NAME, min_size=1, max_size=3), content=CONTENT, mtime=st.integers(0, 2**33 - 1))
def test_the_stream_is_a_tar_as_others_read_it(names: list[bytes], content: bytes, mtime: int) -> None:
    name = b"/".join(names)
    stream = tar.header(name, len(content), 0o755, mtime) + content + tar.padding(len(content)) + tar.END
    with tarfile.open(fileobj=io.BytesIO(stream), encoding="utf-8", errors="surrogateescape") as archive:
        (member,) = archive.getmembers()
        assert os.fsencode(member.name) == name.rstrip(b"/")
        assert (member.size, member.mode, member.mtime) == (len(content), 0o755, mtime)
        extracted = archive.extractfile(member)
        assert extracted is not None
        assert extracted.read() == content


def test_gnu_tar_reads_the_stream_and_sizes_beyond_octal() -> None:
    listed = subprocess.run(
        ["tar", "-tvf", "-"],
        input=tar.header(b"d/" + b"n" * 300, 3, 0o644, 1) + b"abc" + tar.padding(3) + tar.END,
        capture_output=True,
        check=True,
    )
    assert listed.stderr == b""
    assert b"d/" + b"n" * 300 in listed.stdout
    huge = tarfile.TarInfo.frombuf(tar.header(b"huge", 9 << 30, 0o644, 1), "utf-8", "strict")
    assert huge.size == 9 << 30


def test_code_and_data_arrive_with_modes_and_times(tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"run.sh": b"#!/bin/sh\n", "lib/a.py": b"a = 1\n" * 1000})
    (code / "run.sh").chmod(0o700)
    data = write(tmp_path / "data", {"a.jpg": b"jpeg"})
    os.utime(data / "a.jpg", (1_600_000_000, 1_600_000_000))
    seen: list[Progress] = []
    done = upload(FolderSsh(), plan_upload(code, data), str(tmp_path / "pod"), on_progress=seen.append)
    assert contents(tmp_path / "pod/code") == contents(code)
    assert contents(tmp_path / "pod/data") == contents(data)
    assert (tmp_path / "pod/code/run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "pod/code/lib/a.py").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "pod/data/a.jpg").stat().st_mtime == 1_600_000_000
    assert (done.files, done.bytes, done.changed) == (3, 6014, True)
    assert (seen[0].bytes_done, seen[-1].bytes_done, seen[-1].bytes_total) == (0, 6014, 6014)
    assert (seen[-1].files_done, seen[-1].files_total) == (3, 3)


def test_only_what_differs_goes_and_what_does_not_belong_is_removed(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {f"{n}.jpg": bytes([n]) * 100 for n in range(10)})
    pod = tmp_path / "pod"
    ssh = FolderSsh()
    plan = plan_upload(None, data)
    upload(ssh, plan, str(pod))
    outside = write(tmp_path / "outside", {"precious": b"1"})
    (pod / "data/3.jpg").write_bytes(b"\0" * 100)  # same size, other content
    (pod / "data/4.jpg").unlink()
    (pod / "data/5.jpg").chmod(0o755)
    (pod / "data/6.jpg").unlink()
    (pod / "data/6.jpg").mkdir()
    write(pod / "data", {"stray/deep/file": b"1", "other": b"2"})
    (pod / "data/link").symlink_to(outside)
    seen = preview(ssh, plan, str(pod))
    assert (seen.files, seen.unchanged_files, seen.extra_files, seen.changed) == (4, 6, 6, True)
    assert seen.paths == ("data/3.jpg", "data/4.jpg", "data/5.jpg", "data/6.jpg")
    assert (pod / "data/stray/deep/file").exists()  # a preview changes nothing
    done = upload(ssh, plan, str(pod))
    assert (done.files, done.unchanged_files, done.removed_files) == (4, 6, 3)
    assert contents(pod / "data") == contents(data)
    assert (outside / "precious").read_bytes() == b"1"
    assert preview(ssh, plan, str(pod)).changed is False


def test_a_large_file_that_broke_off_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Only when what is there is its beginning, and the rest is hashed with it."""
    large = os.urandom(9_000_000)
    data = write(tmp_path / "data", {"a.npz": large, "b.npz": large, "c.npz": large[:5_000_000], "d" * 120: large})
    pod, ssh = tmp_path / "pod", FolderSsh()
    write(
        pod / "data",
        {
            "a.npz": large[:6_000_000],
            "b.npz": large[:4_500_000] + b"?",  # not its beginning
            "c.npz": large[:4_000_000],  # under the limit from which it is worth it
            "d" * 120: large[:8_999_999],
        },
    )
    done = upload(ssh, plan_upload(None, data), str(pod))
    assert contents(pod / "data") == contents(data)
    assert (done.files, done.bytes) == (4, 3_000_000 + 9_000_000 + 5_000_000 + 1)
    assert upload(ssh, plan_upload(None, data), str(pod)).changed is False


def test_gnu_tar_knows_a_file_that_goes_on() -> None:
    head = tar.header_of_rest(b"big", 3, 0o644, 1, offset=7)
    with tarfile.open(fileobj=io.BytesIO(head + b"abc" + tar.padding(3) + tar.END)) as archive:
        (member,) = archive.getmembers()
    assert (member.name, member.size, member.type) == ("big", 3, b"M")
    listed = subprocess.run(
        ["tar", "-tvf", "-"], input=head + b"abc" + tar.padding(3) + tar.END, capture_output=True, check=True
    )
    assert b"big--Continued at byte 7--" in listed.stdout


def test_caches_beside_the_code_on_the_pod_are_left_alone(tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"pkg/a.py": b"1"})
    pod, ssh = tmp_path / "pod", FolderSsh()
    upload(ssh, plan_upload(code, None), str(pod))
    write(pod / "code", {"pkg/__pycache__/a.pyc": b"2", "runs/train/best.pt": b"3", "pkg/runs/x": b"4"})
    done = upload(ssh, plan_upload(code, None), str(pod))
    assert done.removed_files == 1  # pkg/runs is not the runs/ of the root
    assert sorted(contents(pod / "code")) == [
        b"pkg",
        b"pkg/__pycache__",
        b"pkg/__pycache__/a.pyc",
        b"pkg/a.py",
        b"runs",
        b"runs/train",
        b"runs/train/best.pt",
    ]


def test_replaced_contents_arrive_and_stay(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"data.yaml": b"path: /home/me\n", "a": b"1"})
    ssh, pod = FolderSsh(), tmp_path / "pod"
    plan = plan_upload(None, data, replacements={"data.yaml": b"path: /pod\n"})
    upload(ssh, plan, str(pod))
    assert (pod / "data/data.yaml").read_bytes() == b"path: /pod\n"
    assert (data / "data.yaml").read_bytes() == b"path: /home/me\n"
    assert upload(ssh, plan, str(pod)).changed is False


def test_a_login_shell_that_prints_is_no_obstacle(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1" * 1000})
    noisy = FolderSsh(before="echo Welcome to the pod; echo '{\"error\": 1}'; printf 'no newline yet '; echo; ")
    upload(noisy, plan_upload(None, data), str(tmp_path / "pod"))
    assert fetch(noisy, str(tmp_path / "pod/data/a"), tmp_path / "back").bytes == 1000
    assert len(fetch_tree(noisy, str(tmp_path / "pod/data"), ["*"], tmp_path / "tree")) == 1
    endless = FolderSsh(before="yes; ")
    with pytest.raises(TransferError, match="prints without end"):
        upload(endless, plan_upload(None, data), str(tmp_path / "pod"))


def test_a_pod_without_python_is_said_plainly(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1"})
    with pytest.raises(SshError, match="no python3"):
        upload(FolderSsh(python="no-such-python"), plan_upload(None, data), str(tmp_path / "pod"))


def test_a_program_that_fails_on_the_pod_is_not_taken_for_a_broken_line(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1"})
    ssh = FolderSsh(before="echo out of luck >&2; exit 9; ")
    with pytest.raises(TransferError, match="exit status 9: out of luck"):
        upload(ssh, plan_upload(None, data), str(tmp_path / "pod"))
    assert ssh.conversations == 1


def test_a_line_that_stays_broken_is_given_up(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1"})
    clock = NoWait()
    ssh = FolderSsh(before="exit 255; ")
    with pytest.raises(SshError, match="broke 6 times in a row while uploading"):
        upload(ssh, plan_upload(None, data), str(tmp_path / "pod"), clock=clock)
    assert (ssh.conversations, clock.naps) == (6, 5)
    with pytest.raises(SshError, match="broke 6 times in a row while fetching"):
        fetch(ssh, "/x", tmp_path / "x", clock=clock)
    assert list(tmp_path.glob("x*")) == []


def test_a_line_that_is_dead_before_the_first_byte_is_an_ssh_error(tmp_path: Path) -> None:
    """Nothing is left running either, however early it ends."""
    data = write(tmp_path / "data", {"a": b"1"})
    dead = FolderSsh()
    real = dead.popen

    def popen(remote: str) -> Any:
        process = real("exit 255")
        process.wait()
        return process

    dead.popen = popen  # type: ignore[method-assign]
    before = threading.active_count()
    with pytest.raises(SshError):
        preview(dead, plan_upload(None, data), str(tmp_path / "pod"))
    with pytest.raises(SshError, match="broke 6 times"):
        upload(dead, plan_upload(None, data), str(tmp_path / "pod"), clock=NoWait())
    with pytest.raises(SshError, match="broke 6 times"):
        fetch(dead, "/x", tmp_path / "x", clock=NoWait())
    assert threading.active_count() == before


def test_a_silent_line_counts_as_broken(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1"})
    ssh = FolderSsh(before="exec sleep 60; ")
    with pytest.raises(SshError, match="broke 6 times"):
        upload(ssh, plan_upload(None, data), str(tmp_path / "pod"), clock=NoWait(), stall_s=0.1)


class Meddler:
    """A progress callback that does something to the source once, or every time, after `at` bytes."""

    def __init__(self, act: Any, *, at: int = 0, always: bool = False) -> None:
        self.act, self.at, self.always = act, at, always
        self.times = 0

    def __call__(self, progress: Progress) -> None:
        if progress.bytes_done >= self.at and (self.always or not self.times):
            self.times += 1
            self.act()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is reported after every chunk."""
    monkeypatch.setattr(Meter, "interval_s", 0.0)


def test_a_file_that_vanishes_is_an_error_that_names_it(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1", "b c.jpg": b"2", "d": b"3"})
    gone = data / "b c.jpg"
    with pytest.raises(SourceChangedError, match=r"/data/b c\.jpg vanished") as caught:
        upload(FolderSsh(), plan_upload(None, data), str(tmp_path / "pod"), on_progress=Meddler(gone.unlink))
    assert caught.value.details["path"] == str(gone)


@pytest.mark.usefixtures("eager")
def test_a_file_that_vanishes_after_it_was_sent_is_an_error_too(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1" * 10, "b": b"2" * 10})
    meddler = Meddler((data / "a").unlink, at=20)
    with pytest.raises(SourceChangedError, match="/data/a vanished"):
        upload(FolderSsh(), plan_upload(None, data), str(tmp_path / "pod"), on_progress=meddler)


def test_a_whole_tree_that_vanishes_is_an_error(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1"})
    meddler = Meddler(lambda: shutil.rmtree(data))
    with pytest.raises(SourceChangedError, match="vanished"):
        upload(FolderSsh(), plan_upload(None, data), str(tmp_path / "pod"), on_progress=meddler)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("at", [0, 300_000, 3_000_000])
@pytest.mark.parametrize("size", [10, 1_000_000, 4_000_000])
def test_a_file_that_changes_once_arrives_as_it_is_in_the_end(tmp_path: Path, at: int, size: int) -> None:
    """Whether it grows, shrinks or keeps its size, before, while or after it is read."""
    data = write(tmp_path / "data", {"a": b"1" * 1_000_000, "b": b"2" * 1_000_000, "c": b"3" * 1_000_000})
    clock = NoWait()
    meddler = Meddler(lambda: (data / "b").write_bytes(b"n" * size), at=at)
    done = upload(FolderSsh(), plan_upload(None, data), str(tmp_path / "pod"), on_progress=meddler, clock=clock)
    assert meddler.times == 1
    assert contents(tmp_path / "pod/data") == contents(data)
    assert done.files <= 4
    assert clock.naps == 1


def test_a_file_that_appears_meanwhile_goes_along(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1"})
    meddler = Meddler(lambda: write(data, {"new/late.jpg": b"2"}))
    upload(FolderSsh(), plan_upload(None, data), str(tmp_path / "pod"), on_progress=meddler, clock=NoWait())
    assert contents(tmp_path / "pod/data") == {b"a": b"1", b"new": None, b"new/late.jpg": b"2"}


def test_a_file_that_never_keeps_still_is_an_error_that_names_it(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a": b"1", "log.txt": b""})

    def append() -> None:
        with (data / "log.txt").open("ab") as file:
            file.write(b"line\n")

    with pytest.raises(SourceChangedError, match=r"data/log\.txt keeps changing"):
        upload(
            FolderSsh(),
            plan_upload(None, data),
            str(tmp_path / "pod"),
            on_progress=Meddler(append, always=True),
            clock=NoWait(),
        )


def test_a_file_that_cannot_be_read_any_more_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "data", {"a": b"1", "b": b"2"})
    plan = plan_upload(None, data)
    real = os.open

    def deny(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == f"{data}/b":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(InputError, match=r"cannot read .*/data/b: Permission denied"):
        upload(FolderSsh(), plan, str(tmp_path / "pod"))


def test_a_disk_that_returns_other_bytes_is_noticed(tmp_path: Path) -> None:
    """The pod writes what it got, and says it is not what was sent, each time: no endless repeating."""
    data = write(tmp_path / "data", {"a": b"1" * 100, "b": b"2" * 100})
    lying = FolderSsh()
    real = lying.popen
    other_hash = ";import hashlib as h;o=h.sha256;h.sha256=lambda d=bytes():o(bytes(1)+d);s=sys"

    def popen(remote: str) -> Any:
        return real(remote.replace(";s=sys", other_hash))

    lying.popen = popen  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="2 files arrive damaged on the pod again and again, first data/a"):
        upload(lying, plan_upload(None, data), str(tmp_path / "pod"), clock=NoWait())


# --- fetch -----------------------------------------------------------------------------------------------------------


def test_a_fetch_puts_the_file_in_place_in_one_step(tmp_path: Path) -> None:
    write(tmp_path, {"pod/best.pt": os.urandom(3_000_000), "home/best.pt": b"old"})
    home = tmp_path / "home/best.pt"
    seen: list[bytes] = []

    def look(progress: Progress) -> None:
        if progress.files_done == 0:
            seen.append(home.read_bytes())

    done = fetch(FolderSsh(), str(tmp_path / "pod/best.pt"), home, on_progress=look)
    assert home.read_bytes() == (tmp_path / "pod/best.pt").read_bytes()
    assert set(seen) <= {b"old"}
    assert (done.path, done.bytes) == (home, 3_000_000)
    assert sorted(path.name for path in home.parent.iterdir()) == ["best.pt"]


def test_a_fetch_goes_on_from_the_part_that_is_here(tmp_path: Path) -> None:
    content = os.urandom(2_000_000)
    write(tmp_path, {"pod/w": content, "w.part": content[:1_500_000]})
    seen: list[Progress] = []
    done = fetch(FolderSsh(), str(tmp_path / "pod/w"), tmp_path / "w", on_progress=seen.append)
    assert (tmp_path / "w").read_bytes() == content
    assert done.bytes == 2_000_000
    assert seen[0].bytes_done > 1_500_000
    assert seen[-1].rate_bytes_per_s * 60 > 0


@pytest.mark.parametrize("part", [b"x" * 1000, b"x" * 5000, b"c" * 999 + b"x"])
def test_a_part_of_another_file_is_thrown_away(tmp_path: Path, part: bytes) -> None:
    write(tmp_path, {"pod/w": b"c" * 2000, "w.part": part})
    fetch(FolderSsh(), str(tmp_path / "pod/w"), tmp_path / "w", clock=NoWait())
    assert (tmp_path / "w").read_bytes() == b"c" * 2000


def test_an_empty_file_and_odd_names_come_home(tmp_path: Path) -> None:
    for name in ("empty", "-n", "a b\n'\"$x", "ü", "\udcff"):
        write(tmp_path / "pod", {name: b""})
        assert fetch(FolderSsh(), str(tmp_path / "pod" / name), tmp_path / "home" / name).bytes == 0
        assert (tmp_path / "home" / name).read_bytes() == b""


def test_a_missing_or_unfit_remote_file_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    for name, reason in (("nothing", "missing"), ("", "unreadable")):
        with pytest.raises(TransferError) as caught:
            fetch(FolderSsh(), str(tmp_path / "pod" / name), tmp_path / "home/x")
        assert caught.value.details["reason"] == reason
    assert list((tmp_path / "home").iterdir()) == []


def test_another_file_than_expected_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"pod/w": b"1", "home/w": b"old"})
    with pytest.raises(SourceChangedError, match="not the file that was asked for"):
        fetch(FolderSsh(), str(tmp_path / "pod/w"), tmp_path / "home/w", expected_sha256="0" * 64)
    assert (tmp_path / "home/w").read_bytes() == b"old"
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["w"]


@pytest.mark.usefixtures("eager")
def test_a_file_that_changes_under_the_fetch_is_fetched_again(tmp_path: Path) -> None:
    write(tmp_path, {"pod/w": b"1" * 40_000_000})
    meddler = Meddler(lambda: (tmp_path / "pod/w").write_bytes(b"2" * 30_000_000), at=1_000_000)
    done = fetch(FolderSsh(), str(tmp_path / "pod/w"), tmp_path / "w", on_progress=meddler, clock=NoWait())
    assert done.bytes == 30_000_000
    assert (tmp_path / "w").read_bytes() == b"2" * 30_000_000
    forever = Meddler(lambda: os.utime(tmp_path / "pod/w"), at=1_000_000, always=True)
    with pytest.raises(SourceChangedError, match="keeps changing"):
        fetch(FolderSsh(), str(tmp_path / "pod/w"), tmp_path / "v", on_progress=forever, clock=NoWait())
    assert not list(tmp_path.glob("v*"))


def test_two_fetches_of_one_file_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path, {"pod/w": b"1" * 1000})

    def second(progress: Progress) -> None:
        if progress.files_done == 0:
            with pytest.raises(TransferError, match="another process is fetching"):
                fetch(FolderSsh(), str(tmp_path / "pod/w"), tmp_path / "w")

    fetch(FolderSsh(), str(tmp_path / "pod/w"), tmp_path / "w", on_progress=second)
    assert (tmp_path / "w").read_bytes() == b"1" * 1000


def test_a_disk_that_is_too_small_here_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"pod/w": b"1" * 1000, "home/w": b"old"})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(DiskFullError, match="the disk here is full") as caught:
        fetch(FolderSsh(), str(tmp_path / "pod/w"), tmp_path / "home/w")
    assert caught.value.details == {"where": "here", "free_bytes": 100, "needed_bytes": 1000}
    assert contents(tmp_path / "home") == {b"w": b"old"}


def test_a_tree_comes_home_by_patterns_with_its_folders(tmp_path: Path) -> None:
    out = write(
        tmp_path / "pod/out",
        {"best.pt": b"1", "runs/a/best.pt": b"2", "runs/a/last.pt": b"3", "runs/results.csv": b"4", "x/y.png": b"5"},
    )
    (out / "runs/link.csv").symlink_to("results.csv")
    (out / "runs/passwd.csv").symlink_to("/etc/passwd")
    seen: list[Progress] = []
    done = fetch_tree(FolderSsh(), str(out), ["**/best.pt", "runs/*.csv"], tmp_path / "home", on_progress=seen.append)
    assert sorted(str(one.path.relative_to(tmp_path / "home")) for one in done) == [
        "best.pt",
        "runs/a/best.pt",
        "runs/link.csv",
        "runs/results.csv",
    ]
    assert (seen[-1].bytes_done, seen[-1].bytes_total, seen[-1].files_done) == (4, 4, 4)
    assert fetch_tree(FolderSsh(), str(out), ["**/*.onnx"], tmp_path / "home") == []


@pytest.mark.parametrize(
    ("path", "fine"), [("a/b", True), ("../a", False), ("/etc/cron.d/x", False), ("a/../../b", False)]
)
def test_names_from_the_pod_do_not_choose_where_files_go(path: str, fine: bool) -> None:
    assert _stays_below(path) is fine
