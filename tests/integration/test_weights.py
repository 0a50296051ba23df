"""The best checkpoint, wherever a trainer nested it: found on a pod over a real sshd, brought home whole."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from loopback_sshd import LoopbackSshd
from pennypod.errors import InputError, SourceChangedError, WeightsError
from pennypod.ssh import Ssh
from pennypod.transfer import Fetched, Progress
from pennypod.weights import (
    FIND_SCRIPT,
    INLINE_BYTES,
    RemoteFile,
    Search,
    bring_extras,
    bring_home,
    bring_log,
    brought_home,
    find_all,
    find_best,
    find_files,
    log_search,
    no_weights,
    parse_answer,
    safe_relative,
)

LAYOUTS = ("runs/detect/train/weights/best.pt", "fdi/exp3/weights/best.pt", "runs/detect/fdi/a/b/c/weights/best.pt")


def a_zip(path: Path, content: str = "weights") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", os.urandom(5000))


def a_torn_zip(path: Path) -> None:
    a_zip(path)
    path.write_bytes(path.read_bytes()[:-40])


def a_damaged_zip(path: Path) -> None:
    a_zip(path)
    whole = bytearray(path.read_bytes())
    whole[2000] ^= 0xFF
    path.write_bytes(bytes(whole))


def a_safetensors(path: Path, missing: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16 - missing))


def an_onnx(path: Path, missing: int = 0) -> None:
    graph = bytes([0x08, 0x09, 0x12, 0x03]) + b"pyt" + bytes([0x3A, 0x80, 0x01]) + bytes(128)
    path.write_bytes(graph[: len(graph) - missing])


def an_hdf5(path: Path, missing: int = 0) -> None:
    head = b"\x89HDF\r\n\x1a\n" + bytes([0, 0, 0, 0, 0, 8, 8, 0]) + bytes(24) + struct.pack("<Q", 200)
    path.write_bytes(head.ljust(200 - missing, b"\0"))


@dataclass
class Pod:
    ssh: Ssh
    home: Path
    artifacts: Path

    def put(self, relative: str, make: Callable[[Path], None] = a_zip, age_s: float = 100) -> Path:
        path = self.home / "out" / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        stamp = 1_764_600_000 - age_s
        os.utime(path, (stamp, stamp))
        return path

    def best(self, *patterns: str) -> str | None:
        found = find_best(self.ssh, str(self.home), patterns or ("**/best.pt",))
        return found.relative if found else None

    def bring(self, remote: RemoteFile) -> Fetched:
        return bring_home(self.ssh, remote, self.artifacts, on_progress=lambda _progress: None)


@pytest.fixture
def pod(sshd: LoopbackSshd, tmp_path: Path) -> Pod:
    (tmp_path / "pod" / "out").mkdir(parents=True)
    # One shared connection: these tests are about files, not about broken lines.
    return Pod(sshd.ssh(control_path=sshd.tmux_dir / "ssh"), tmp_path / "pod", tmp_path / "artifacts")


def test_newest_whole_checkpoint_wins_in_every_layout(pod: Pod) -> None:
    assert pod.best() is None
    for age, layout in zip((30, 20, 10), LAYOUTS, strict=True):
        pod.put(layout, age_s=age)
        assert pod.best() == layout
    os.utime(pod.home / "out" / LAYOUTS[0])
    assert pod.best() == LAYOUTS[0], "by time, not by name or depth"


def test_half_written_files_do_not_win_however_new_they_are(pod: Pod) -> None:
    pod.put(LAYOUTS[0], age_s=1000)
    pod.put("a/best.pt", lambda path: path.write_bytes(b""), age_s=1)
    pod.put("b/best.pt", a_torn_zip, age_s=2)
    pod.put("c/best.pt", a_damaged_zip, age_s=3)
    pod.put("d/best.pt", lambda path: path.write_bytes(b"<html>quota exceeded</html>"), age_s=4)
    pod.put("e/best.pt.part", age_s=5)
    pod.put("f/best.pt.tmp", age_s=6)
    found = find_files(pod.ssh, str(pod.home), ["**/best.pt*"], best=True, deep=True)
    assert [file.relative for file in found.files] == [LAYOUTS[0]]
    assert {Path(entry.path).parent.name: entry.why for entry in found.rejected} == {
        "a": "empty",
        "b": "File is not a zip file",
        "c": "damaged member archive/data/0",
        "d": "not a zip container",
        "e": "half-written by its name",
        "f": "half-written by its name",
    }


def test_file_that_is_being_written_is_not_taken(pod: Pod) -> None:
    growing = pod.put("best.any", lambda path: path.write_bytes(b"x"))
    enough = threading.Event()

    def write() -> None:
        with growing.open("ab", buffering=0) as file:
            while not enough.wait(0.01):
                file.write(b"x")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = find_files(pod.ssh, str(pod.home), ["best.any"])
    finally:
        enough.set()
        writer.join()
    assert found.files == ()
    assert found.rejected[0].why == "still being written"


@pytest.mark.parametrize(
    ("name", "make"),
    [("best.safetensors", a_safetensors), ("best.onnx", an_onnx), ("best.h5", an_hdf5)],
)
def test_other_containers_are_looked_into(pod: Pod, name: str, make: Callable[..., None]) -> None:
    pod.put(f"whole/{name}", make, age_s=100)
    pod.put(f"cut/{name}", lambda path: make(path, missing=7), age_s=1)
    assert pod.best(f"**/{name}") == f"whole/{name}"


def test_old_torch_pickles_and_npz_are_accepted(pod: Pod) -> None:
    pod.put("old/best.pt", lambda path: path.write_bytes(b"\x80\x02}q\x00."))
    assert pod.best() == "old/best.pt"
    pod.put("new/best.npz")
    assert pod.best("**/best.npz") == "new/best.npz"


def test_patterns_are_in_order_of_preference(pod: Pod) -> None:
    pod.put("w/last.pt", age_s=1)
    assert pod.best("**/best.pt", "**/last.pt") == "w/last.pt"
    pod.put("w/best.pt", age_s=500)
    assert pod.best("**/best.pt", "**/last.pt") == "w/best.pt"


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "a/../../*", " "])
def test_patterns_stay_inside_the_output_folder(pod: Pod, pattern: str) -> None:
    with pytest.raises(InputError, match="relative to the trainer's output folder"):
        pod.best(pattern)
    options = json.dumps({"root": str(pod.home / "out"), "patterns": [pattern]})
    answer = parse_answer(pod.ssh.run_script(FIND_SCRIPT, [options], 30).stdout)
    assert answer is not None
    assert "without .." in answer["error"], "the pod's side does not rely on ours"


def test_links_that_lead_out_are_not_followed(pod: Pod, tmp_path: Path) -> None:
    outside = tmp_path / "outside.pt"
    a_zip(outside)
    (pod.home / "out" / "best.pt").symlink_to(outside)
    assert pod.best() is None
    pod.put("runs/epoch7.pt")
    (pod.home / "out" / "best.pt").unlink()
    (pod.home / "out" / "best.pt").symlink_to("runs/epoch7.pt")
    assert pod.best() == "best.pt"


def test_brought_home_verified_and_not_twice(pod: Pod) -> None:
    path = pod.put(LAYOUTS[1])
    remote = find_best(pod.ssh, str(pod.home), ["**/best.pt"])
    assert remote is not None
    assert (remote.bytes, remote.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    fetched = pod.bring(remote)
    assert fetched.path == pod.artifacts / "weights" / "best.pt"
    assert fetched.path.read_bytes() == path.read_bytes()
    assert path.exists(), "the file stays on the pod"
    assert brought_home(pod.artifacts) == (remote, fetched)
    stamp = fetched.path.stat().st_mtime_ns
    pod.bring(remote)
    assert fetched.path.stat().st_mtime_ns == stamp, "the second time nothing is fetched"
    fetched.path.write_bytes(b"spoilt")
    assert brought_home(pod.artifacts) is None
    assert pod.bring(remote).path.read_bytes() == path.read_bytes()


def test_checkpoint_that_changed_since_it_was_found_is_refused(pod: Pod) -> None:
    path = pod.put("best.pt")
    remote = find_best(pod.ssh, str(pod.home), ["best.pt"])
    assert remote is not None
    a_zip(path, "the next epoch")
    with pytest.raises(SourceChangedError):
        pod.bring(remote)
    assert not (pod.artifacts / "weights" / "best.pt").exists()


@pytest.mark.parametrize("with_the_answer", [True, False])
def test_log_and_extras_come_home_and_one_bad_file_is_no_end(pod: Pod, with_the_answer: bool) -> None:
    (pod.home / "train.log").write_text("epoch 1/1\n")
    pod.put("runs/a/results.csv", lambda path: path.write_text("epoch,loss\n"))
    pod.put("runs/b/results.csv", lambda path: path.write_text(""))
    pod.put("best.pt")
    on_progress: Callable[[Progress], None] = lambda _progress: None  # noqa: E731
    patterns = ["**/results.csv", "**/*.pt"]
    found_log, found = find_all(pod.ssh, str(pod.home), [log_search(), Search(patterns, inline=with_the_answer)])
    assert bool(found.contents) == with_the_answer
    log = bring_log(pod.ssh, found_log, pod.artifacts, on_progress=on_progress)
    assert log is not None
    assert (log[0].path.read_text(), log[1]) == ("epoch 1/1\n", True)
    again = bring_log(pod.ssh, found_log, pod.artifacts, on_progress=on_progress)
    assert again == (log[0], False)

    def extras() -> tuple[list[str], bool, tuple[str, ...]]:
        got = bring_extras(
            pod.ssh,
            found,
            pod.artifacts,
            skip=frozenset([str(pod.home / "out" / "best.pt")]),
            should_stop=lambda: None,
            on_progress=on_progress,
        )
        return [str(f.path.relative_to(pod.artifacts)) for f in got.files], got.changed, got.problems

    problem = f"{pod.home}/out/runs/b/results.csv: empty"
    assert extras() == (["extra/runs/a/results.csv"], True, (problem,))
    assert extras() == (["extra/runs/a/results.csv"], False, (problem,))
    assert (pod.artifacts / "extra/runs/a/results.csv").read_text() == "epoch,loss\n"


def test_small_files_come_with_the_answer_and_large_ones_are_only_counted(pod: Pod) -> None:
    small = pod.put("small.csv", lambda path: path.write_bytes(os.urandom(1000)))
    pod.put("large.csv", lambda path: path.write_bytes(bytes(INLINE_BYTES + 1)))
    (found,) = find_all(pod.ssh, str(pod.home), [Search(["*.csv"], small=True)])
    assert ([file.relative for file in found.files], found.left) == (["small.csv"], 1)
    assert found.contents == {str(small): small.read_bytes()}
    (found,) = find_all(pod.ssh, str(pod.home), [Search(["*.csv"], inline=True)])
    assert (len(found.files), list(found.contents), found.left) == (2, [str(small)], 0)


def test_an_answer_holds_a_megabyte_of_files_at_most(pod: Pod) -> None:
    for number in range(6):
        pod.put(f"{number}.csv", lambda path: path.write_bytes(os.urandom(INLINE_BYTES)))
    (found,) = find_all(pod.ssh, str(pod.home), [Search(["*.csv"], small=True)])
    assert (len(found.files), len(found.contents), found.left) == (4, 4, 2)


def test_content_that_is_not_what_its_hash_says_is_fetched_instead(pod: Pod) -> None:
    path = pod.put("best.pt")
    remote = find_best(pod.ssh, str(pod.home), ["best.pt"])
    assert remote is not None
    fetched = bring_home(pod.ssh, remote, pod.artifacts, on_progress=lambda _: None, content=b"something else")
    assert fetched.path.read_bytes() == path.read_bytes()


def test_files_that_nobody_has_touched_are_not_waited_for(pod: Pod) -> None:
    pod.put("best.pt")
    search = Search(["best.pt"], settle_s=2.0)
    assert timed(lambda: find_all(pod.ssh, str(pod.home), [search])) > 2.0
    assert timed(lambda: find_all(pod.ssh, str(pod.home), [search])) < 2.0, "it has kept still for that long by now"


def timed(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def test_no_weights_says_why(pod: Pod) -> None:
    pod.put("runs/best.pt", a_torn_zip)
    found = find_files(pod.ssh, str(pod.home), ["**/best.pt"], best=True)
    assert "best.pt: File is not a zip file" in no_weights(["**/best.pt"], found.rejected).message
    assert "left no file that matches **/best.npz" in no_weights(["**/best.npz"], ()).message


@pytest.mark.parametrize("name", ["../../.bashrc", "/etc/passwd", "a/../../b", ""])
def test_a_pod_cannot_name_a_place_outside(name: str) -> None:
    with pytest.raises(WeightsError):
        safe_relative(name)
