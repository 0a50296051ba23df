"""The demo's trainer really learns, goes on where it stopped, and leaves only whole files."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from standalone import TRAINERS, load_script

np = pytest.importorskip("numpy", reason="the demo extra is not installed")
pytest.importorskip("PIL", reason="the demo extra is not installed")

SCRIPT = TRAINERS / "train_demo.py"
EPOCH = re.compile(r"^epoch (\d+)/(\d+) loss (\d+\.\d{3}) val_acc ([01]\.\d{3})$", re.MULTILINE)


@pytest.fixture(scope="session")
def trainer() -> ModuleType:
    return load_script("train_demo")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller edition of the demo's data: three classes, 60 images each to learn from."""
    maker = load_script("make_sample_data")
    folder = tmp_path_factory.mktemp("data")
    maker.CLASSES = ("cross", "disc", "ring")
    maker.CLASSIFY_COUNTS = {"train": 60, "val": 20}
    maker.make_classify(folder, seed=7)
    return folder


def run(cwd: Path, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, **env}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False, env=env)


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of one whole training."""
    cwd = tmp_path_factory.mktemp("trained")
    done = run(cwd, "--data", data, "--epochs", "5", "--imgsz", "24")
    assert done.returncode == 0, done.stderr
    return cwd, done.stdout


def test_learns(trained: tuple[Path, str]) -> None:
    epochs = EPOCH.findall(trained[1])
    assert [(int(number), int(total)) for number, total, _, _ in epochs] == [(n, 5) for n in range(1, 6)]
    losses, accuracies = [float(loss) for _, _, loss, _ in epochs], [float(acc) for _, _, _, acc in epochs]
    assert losses[-1] < 0.7 * losses[0]
    assert max(accuracies) > 0.6, "chance is a third"
    assert max(accuracies) > accuracies[0] + 0.1


def test_leaves_weights_a_table_and_a_model_card(trained: tuple[Path, str]) -> None:
    cwd, output = trained
    folder = cwd / "runs/classify/demo"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "export/model_card.json",
        "results.csv",
        "weights/best.npz",
        "weights/last.npz",
    ]
    printed = [(number, float(acc)) for number, _, _, acc in EPOCH.findall(output)]
    with (folder / "results.csv").open(newline="") as file:
        assert [(row["epoch"], round(float(row["val_acc"]), 3)) for row in csv.DictReader(file)] == printed

    best = folder / "weights/best.npz"
    with np.load(best, allow_pickle=False) as arrays:
        assert all(np.isfinite(arrays[name]).all() for name in arrays.files if name != "meta")
        meta = json.loads(str(arrays["meta"]))
    assert meta["classes"] == ["cross", "disc", "ring"]
    assert round(meta["val_acc"], 3) == max(acc for _, acc in printed)

    card = json.loads((folder / "export/model_card.json").read_text())
    assert card["weights"]["sha256"] == hashlib.sha256(best.read_bytes()).hexdigest()
    assert card["metrics"]["val_accuracy"] == pytest.approx(meta["val_acc"], abs=1e-4)
    assert np.sum(card["metrics"]["confusion"]) == 60
    assert output.rstrip().splitlines()[-1] == f"best weights: {best} ({best.stat().st_size / 1e3:.0f} kB)"


def test_resumes_after_a_kill_as_if_nothing_had_happened(data: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    arguments = ["--data", str(data), "--epochs", "5", "--imgsz", "24"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 3/5"):
            break
    process.send_signal(signal.SIGKILL)
    rest = process.communicate(timeout=30)[0]
    assert "best weights" not in rest

    last = tmp_path / "runs/classify/demo/weights/last.npz"
    finished = load_script("train_demo").load_checkpoint(last).meta["epoch"]
    assert finished in {2, 3}, "the line of an epoch comes just before its checkpoint"
    done = run(tmp_path, "--data", data, "--resume")
    assert done.returncode == 0, done.stderr
    assert [int(number) for number, *_ in EPOCH.findall(done.stdout)] == list(range(finished + 1, 6))
    assert EPOCH.findall(done.stdout)[-1] == EPOCH.findall(trained[1])[-1], "the same batches give the same network"
    rows = (tmp_path / "runs/classify/demo/results.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["epoch", "1", "2", "3", "4", "5"]

    again = run(tmp_path, "--data", data, "--resume")
    assert again.returncode == 0
    assert "nothing left to do" in again.stdout


def test_goes_on_elsewhere_from_what_was_kept(data: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    kept, here, there = tmp_path / "kept", tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    # Called as: hook EPOCH FOLDER FILE...; only epoch 3 comes through.
    hook = tmp_path / "hook.sh"
    hook.write_text(f'[ "$1" = 3 ] || exit 1\ncd "$2" && shift 2 && mkdir {kept} && cp --parents "$@" {kept}\n')
    arguments = ["--data", data, "--epochs", "5", "--imgsz", "24"]
    done = run(here, *arguments, PENNYPOD_CHECKPOINT_HOOK=f"sh {hook}")
    assert done.returncode == 0, done.stderr
    assert sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()) == [
        "results.csv",
        "weights/best.npz",
        "weights/last.npz",
    ]
    done = run(there, *arguments, PENNYPOD_RESUME_FROM=str(kept))
    assert done.returncode == 0, done.stderr
    assert [int(number) for number, *_ in EPOCH.findall(done.stdout)] == [4, 5]
    assert EPOCH.findall(done.stdout)[-1] == EPOCH.findall(trained[1])[-1], "the same batches give the same network"
    rows = (there / "runs/classify/demo/results.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["epoch", "1", "2", "3", "4", "5"]

    kept.rename(tmp_path / "moved")
    again = run(there, *arguments, PENNYPOD_RESUME_FROM=str(kept))
    assert "nothing left to do" in again.stdout, "what is here already is newer"
    (there / "runs").rename(tmp_path / "gone")
    done = run(there, *arguments, PENNYPOD_RESUME_FROM=str(kept))
    assert done.returncode == 1
    assert "nothing to resume" in done.stderr


def test_a_hook_that_cannot_run_fails_no_training(data: Path, tmp_path: Path) -> None:
    for hook in ("/nowhere/hook", '"unbalanced'):
        done = run(tmp_path, "--data", data, "--smoke", "--imgsz", "16", PENNYPOD_CHECKPOINT_HOOK=hook)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("was not put aside") == 2


def test_smoke_is_two_epochs_and_overwrites_nobody(data: Path, tmp_path: Path) -> None:
    for folder in ("demo", "demo2"):
        done = run(tmp_path, "--data", data, "--smoke", "--imgsz", "16")
        assert done.returncode == 0, done.stderr
        assert [number for number, *_ in EPOCH.findall(done.stdout)] == ["1", "2"]
        assert f"/runs/classify/{folder}/weights/best.npz" in done.stdout


def test_the_gradients_are_the_slopes_of_the_loss(trainer: ModuleType) -> None:
    rng = np.random.default_rng(3)
    net = trainer.Network.new(classes=3, seed=1)
    net.params = {name: value.astype(np.float64) for name, value in net.params.items()}
    images, labels = rng.normal(size=(4, 16, 16, 1)), np.array([0, 1, 2, 1])
    _, gradients = net.loss_and_gradients(images, labels)
    step = 1e-6
    for name, value in net.params.items():
        for _ in range(5):
            place = tuple(int(rng.integers(size)) for size in value.shape)
            losses = []
            for sign in (1, -1):
                value[place] += sign * step
                losses.append(net.loss_and_gradients(images, labels)[0])
                value[place] -= sign * step
            slope = (losses[0] - losses[1]) / (2 * step)
            assert gradients[name][place] == pytest.approx(slope, rel=1e-3, abs=1e-7), f"{name}{place}"


def test_a_checkpoint_is_whole_or_absent(trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "best.npz"
    trainer.save_checkpoint(path, {"a": np.ones(3)}, {"epoch": 1})

    def full_disk(file: Any, **arrays: Any) -> None:
        file.write(b"half a")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.save_checkpoint(path, {"a": np.zeros(3)}, {"epoch": 2})
    assert trainer.load_checkpoint(path).meta == {"epoch": 1}


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda data: (data / "train").rename(data / "training"), "has no train/ and val/"),
        (lambda data: (data / "val/b").rename(data / "val/c"), "val/ has ['a', 'c']"),
        (lambda data: next((data / "val/b").iterdir()).unlink(), "no *.jpg in"),
        (lambda data: (data / "train/a/0.jpg").write_bytes(b"\xff\xd8 not a picture"), "is not a readable image"),
    ],
    ids=["no split", "other classes", "empty class", "broken image"],
)
def test_bad_data_is_one_clear_line(tmp_path: Path, break_it: Any, said: str) -> None:
    from PIL import Image

    data = tmp_path / "data"
    for split in ("train", "val"):
        for name in ("a", "b"):
            (data / split / name).mkdir(parents=True)
            Image.new("L", (16, 16), 99).save(data / split / name / "0.jpg")
    break_it(data)
    done = run(tmp_path, "--data", data)
    assert done.returncode == 1
    assert done.stderr.startswith("train_demo: error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_nothing_to_resume_is_an_error(tmp_path: Path, data: Path) -> None:
    done = run(tmp_path, "--data", data, "--resume")
    assert done.returncode == 1
    assert "nothing to resume" in done.stderr
