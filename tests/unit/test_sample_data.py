"""The generated data sets: the same bytes again, whole or absent, labels that fit the pictures."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from standalone import TRAINERS, load_script

np = pytest.importorskip("numpy", reason="the demo extra is not installed")
pytest.importorskip("PIL", reason="the demo extra is not installed")

SCRIPT = TRAINERS / "make_sample_data.py"


@pytest.fixture
def maker() -> ModuleType:
    return load_script("make_sample_data")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def test_classify_makes_1805_jpegs_the_same_every_time(maker: ModuleType, tmp_path: Path) -> None:
    dest = tmp_path / "demo"
    done = run("classify", dest)
    assert (done.returncode, done.stdout) == (0, f"1805 images in {dest}\n"), done.stderr
    assert list(tmp_path.iterdir()) == [dest]
    images = list(dest.rglob("*.jpg"))
    assert len(images) == 1805
    places = Counter(str(path.parent.relative_to(dest)) for path in images)
    classes = ("cross", "disc", "ring", "square", "triangle")
    assert places == {f"{split}/{name}": n for split, n in (("train", 301), ("val", 60)) for name in classes}
    assert all(path.read_bytes()[:3] == b"\xff\xd8\xff" for path in images)
    assert len({path.read_bytes() for path in images}) == 1805, "no picture twice, so nothing of val is in train"
    # No image depends on how many are made, so a few of them are enough to compare.
    maker.CLASSIFY_COUNTS = {"train": 4, "val": 2}
    maker.make_classify(tmp_path / "few", seed=1805)
    few = list((tmp_path / "few").rglob("*.jpg"))
    assert len(few) == 30
    assert all(path.read_bytes() == (dest / path.relative_to(tmp_path / "few")).read_bytes() for path in few)


def test_only_another_seed_makes_other_images(maker: ModuleType, tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert maker.main(["yolo", str(tmp_path / name), "--seed", seed]) == 0
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_yolo_layout_boxes_and_the_foreign_path(tmp_path: Path) -> None:
    assert run("yolo", tmp_path / "shapes").returncode == 0
    folder = tmp_path / "shapes"
    data = yaml.safe_load((folder / "data.yaml").read_text())
    assert Path(data["path"]).is_absolute()
    assert not Path(data["path"]).exists(), "the sample must need erratum 3"
    seen = set()
    for split, count in (("train", 24), ("val", 8)):
        images = sorted((folder / data[split]).glob("*.jpg"))
        labels = sorted((folder / "labels" / split).glob("*.txt"))
        assert len(images) == count
        assert [path.stem for path in labels] == [path.stem for path in images]
        for label in labels:
            lines = label.read_text().splitlines()
            assert 2 <= len(lines) <= 4
            for line in lines:
                number, x, y, width, height = line.split()
                seen.add(int(number))
                for centre, size in ((float(x), float(width)), (float(y), float(height))):
                    assert 0 < size < 0.5
                    assert size / 2 <= centre <= 1 - size / 2
    assert seen == set(data["names"])


def test_a_box_encloses_its_shape_and_nothing_else(maker: ModuleType) -> None:
    shape = maker.coverage("triangle", 100, 40.0, 60.0, 20.0, 0.7)
    x, y, width, height = (float(value) * 100 for value in maker.box(shape).split())
    rows, columns = np.nonzero(shape > 0.5)
    assert (x - width / 2, x + width / 2) == pytest.approx((columns.min(), columns.max() + 1))
    assert (y - height / 2, y + height / 2) == pytest.approx((rows.min(), rows.max() + 1))


def test_leaves_a_whole_data_set_alone_and_refuses_a_short_one(tmp_path: Path) -> None:
    dest = tmp_path / "shapes"
    assert run("yolo", dest).returncode == 0
    before = digest(dest)
    assert run("yolo", dest).returncode == 0
    assert digest(dest) == before
    next(dest.rglob("*.jpg")).unlink()
    done = run("yolo", dest)
    assert done.returncode == 1
    assert "holds 31 images, not 32: remove it" in done.stderr


def test_a_killed_generator_leaves_no_short_data_set(tmp_path: Path) -> None:
    dest = tmp_path / "demo"
    process = subprocess.Popen([sys.executable, str(SCRIPT), "classify", str(dest)])
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".demo.*.tmp/train/cross/*.jpg")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not dest.exists()

    assert len(list(tmp_path.glob(".demo.*.tmp"))) == 1


def test_cleans_up_after_the_killed_but_not_under_the_living(maker: ModuleType, tmp_path: Path) -> None:
    dest = tmp_path / "shapes"
    killed, living, other = (tmp_path / f".{name}.tmp" for name in ("shapes.a", "shapes.b", "demo.a"))
    for folder in (killed, living, other):
        folder.mkdir()
    for folder in (killed, other):
        os.utime(folder, (1, 1))
    assert maker.main(["yolo", str(dest)]) == 0
    assert not killed.exists()
    assert living.exists()
    assert other.exists()


def test_two_at_once_both_succeed(maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = tmp_path / "shapes"
    make = maker.make_yolo

    def slow(folder: Path, seed: int) -> None:
        make(folder, seed)
        assert run("yolo", dest).returncode == 0  # another one finishes first

    monkeypatch.setattr(maker, "make_yolo", slow)
    assert maker.main(["yolo", str(dest)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_no_trace_after_an_error(maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(maker, "save", full_disk)
    assert maker.main(["yolo", str(tmp_path / "shapes")]) == 1
    assert list(tmp_path.iterdir()) == []
