"""What the YOLO trainer decides before a framework is needed. The training itself runs on a pod, under HEAVY=1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from standalone import TRAINERS, load_script

SCRIPT = TRAINERS / "train_fdi_yolo.py"


@pytest.fixture
def trainer() -> ModuleType:
    return load_script("train_fdi_yolo")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A good data set of one image with one box per split."""
    folder = tmp_path / "data"
    for split in ("train", "val"):
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        (folder / "images" / split / "1.jpg").write_bytes(b"")
        (folder / "labels" / split / "1.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    (folder / "data.yaml").write_text(f'path: {folder}\ntrain: images/train\nval: images/val\nnames: ["11", "21"]\n')
    return folder


def test_good_data_is_summed_up(trainer: ModuleType, data: Path) -> None:
    (data / "images/train/empty.PNG").write_bytes(b"")  # an image without teeth
    (data / "labels/train/1.txt").write_text("1 0.5 0.5 0.2 0.2\n\n0 .1 .1 .2 .1 .2 .2\n")  # and a polygon
    said = trainer.check_data(trainer.find_data_yaml(data))
    assert said == "data: train 2 images with 2 boxes, val 1 images with 1 boxes, 2 classes"


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("2 0.5 0.5 0.2 0.2", "1.txt:1: class 2 but data.yaml has 0 to 1"),
        ("-1 0.5 0.5 0.2 0.2", "1.txt:1: class -1"),
        ("0 0.5 0.5 0.2 0.2\n0 0.5 1.5 0.2 0.2", "1.txt:2: coordinates outside 0 to 1"),
        ("0 0.5 nan 0.2 0.2", "coordinates outside 0 to 1"),
        ("0 0.5 0.5 0.2", "4 numbers; a box has 5"),
        ("tooth 0.5 0.5 0.2 0.2", "not numbers"),
        ("", "train: 1 images but not one label"),
    ],
)
def test_a_bad_label_is_named(trainer: ModuleType, data: Path, label: str, said: str) -> None:
    (data / "labels/train/1.txt").write_text(label)
    with pytest.raises(trainer.TrainingError) as caught:
        trainer.check_data(data / "data.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "path: /content/teeth\ntrain: images/train\nval: images/val\nnames: [a, b]\n",
            "is path: right for this machine",
        ),
        ("train: images/train\nval: images/nowhere\nnames: [a, b]\n", "images of val: are not at"),
        ("train: images/train\nnames: [a, b]\n", "has no val:"),
        ("train: images/train\nval: images/val\n", "has no names:"),
        ("train: images/train\nval: images/val\nnc: 3\nnames: [a, b]\n", "nc: 3 but 2 names"),
        ("train: images/train\nval: images/val\nnames: {1: a, 2: b}\n", "must be 0 to 1"),
        ("train: labels/train\nval: images/val\nnames: [a, b]\n", "no images for train:"),
        ("just words\n", "is not a mapping"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_a_bad_data_yaml_is_named(trainer: ModuleType, data: Path, text: str, said: str) -> None:
    (data / "data.yaml").write_text(text)
    with pytest.raises(trainer.TrainingError) as caught:
        trainer.check_data(data / "data.yaml")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_data_set_or_missing_weights_end_it_with_one_line(data: Path, tmp_path: Path) -> None:
    for arguments, said in (
        (["--data", str(tmp_path / "none.yaml")], "no data set"),
        (["--data", str(data), "--model", "yolov8n.pt"], "train from scratch with --model yolov8n.yaml"),
        (["--data", str(data), "--model", "yolov8n"], "neither a .pt nor a .yaml"),
        (["--data", str(data), "--resume"], "nothing to resume"),
    ):
        command = [sys.executable, str(SCRIPT), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("train_fdi_yolo: error: ")
        assert done.stderr.count("\n") == 1
        assert said in done.stderr


def test_falls_back_to_scratch_only_when_told(trainer: ModuleType, tmp_path: Path) -> None:
    assert trainer.find_model(str(tmp_path / "yolov8m.pt"), allow_scratch=True) == "yolov8m.yaml"
    weights = tmp_path / "yolov8s.pt"
    weights.write_bytes(b"w")
    assert trainer.find_model(str(weights), allow_scratch=True) == str(weights)


# -- with a stand-in for ultralytics ----------------------------------------------------------------------------------

ULTRALYTICS = '''
"""Records what it is asked for and writes the weights it is told to."""
import json, os
from pathlib import Path
from types import SimpleNamespace

SEEN = os.environ.copy()
settings = {"sync": True, "wandb": True, "runs_dir": "/somewhere"}


class YOLO:
    def __init__(self, model, task):
        self.model, self.ckpt, self.callbacks = model, {"epoch": 3, "optimizer": {}}, {}

    def add_callback(self, event, callback):
        self.callbacks[event] = callback

    def train(self, **asked):
        print(json.dumps({"model": self.model, "asked": asked, "settings": settings, "environment": dict(SEEN)}))
        folder = Path(asked.get("save_dir") or Path(asked["project"]) / (asked["name"] + "2"))
        trainer = SimpleNamespace(epochs=2, epoch=0, tloss={"a": 1.0, "b": 0.5}, metrics={"metrics/mAP50(B)": 0.25})
        for trainer.epoch in range(2):
            self.callbacks["on_train_epoch_end"](trainer)
            trainer.save_dir = folder
            (folder / "weights").mkdir(parents=True, exist_ok=True)
            (folder / "weights/last.pt").write_bytes(b"state %d" % trainer.epoch)
            self.callbacks["on_model_save"](trainer)
            self.callbacks["on_fit_epoch_end"](trainer)
        trainer.epoch += 1
        self.callbacks["on_fit_epoch_end"](trainer)  # the final evaluation
        (folder / "weights").mkdir(parents=True, exist_ok=True)
        if os.environ.get("FAKE_FAULT") == "raise":
            raise RuntimeError("CUDA out of memory\\nand more")
        if os.environ.get("FAKE_FAULT") != "no weights":
            (folder / "weights/best.pt").write_bytes(b"weights")
        self.trainer = SimpleNamespace(save_dir=folder)
'''


def run_with_stand_in(
    tmp_path: Path, *arguments: str, fault: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    site = tmp_path / "site"
    site.mkdir(exist_ok=True)
    (site / "ultralytics.py").write_text(ULTRALYTICS)
    (site / "torch.py").write_text(
        "from types import SimpleNamespace\n__version__ = '2'\ncuda = SimpleNamespace(is_available=lambda: False)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(site), "FAKE_FAULT": fault, **more}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)


def test_trains_offline_never_mirrors_and_names_the_weights(data: Path, tmp_path: Path) -> None:
    done = run_with_stand_in(tmp_path, "--data", str(data), "--smoke")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    seen = json.loads(next(line for line in lines if line.startswith("{")))
    asked, environment = seen["asked"], seen["environment"]
    assert seen["model"] == "yolov8n.yaml"
    assert asked["epochs"] == 2
    assert asked["device"] == "cpu"
    for switch in ("fliplr", "flipud", "mixup", "copy_paste", "hsv_h", "hsv_s"):
        assert asked[switch] == 0.0, switch
    assert environment["YOLO_OFFLINE"] == "1"
    assert environment["https_proxy"] == environment["HTTPS_PROXY"] == "http://127.0.0.1:9"
    assert seen["settings"] == {"sync": False, "wandb": False, "runs_dir": "/somewhere"}
    assert [line for line in lines if line.startswith("epoch ")] == [
        "epoch 1/2 loss 1.500 map50 0.250",
        "epoch 2/2 loss 1.500 map50 0.250",
    ], "one line per epoch, none for the final evaluation"
    # The folder was taken, so the framework counted the name up; the line must say where the weights really are.
    assert lines[-1] == f"best weights: {tmp_path}/runs/detect/fdi2/weights/best.pt (0.0 MB)"


def test_resumes_into_the_same_folder(data: Path, tmp_path: Path) -> None:
    last = tmp_path / "runs/detect/fdi/weights/last.pt"
    last.parent.mkdir(parents=True)
    last.write_bytes(b"state")
    done = run_with_stand_in(tmp_path, "--data", str(data), "--resume")
    assert done.returncode == 0, done.stderr
    assert f'"model": "{last}"' in done.stdout
    assert '"resume": true' in done.stdout
    assert '"fliplr"' not in done.stdout, "the checkpoint knows how it was trained"
    assert done.stdout.rstrip().endswith(f"{last.parent}/best.pt (0.0 MB)")


def test_goes_on_from_what_was_kept_elsewhere(data: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept/weights"
    kept.mkdir(parents=True)
    (kept / "last.pt").write_bytes(b"state")
    done = run_with_stand_in(tmp_path, "--data", str(data), PENNYPOD_RESUME_FROM=str(kept.parent))
    assert done.returncode == 0, done.stderr
    assert f'"model": "{tmp_path}/runs/detect/fdi/weights/last.pt"' in done.stdout
    assert '"resume": true' in done.stdout

    done = run_with_stand_in(tmp_path, "--data", str(data), "--name", "other", PENNYPOD_RESUME_FROM=str(tmp_path))
    assert done.returncode == 1
    assert "nothing to resume" in done.stderr


def test_offers_each_checkpoint_with_the_proxies_it_was_given(data: Path, tmp_path: Path) -> None:
    hook = tmp_path / "hook.sh"
    hook.write_text('echo "$@" "$https_proxy" >> "$(dirname "$0")/seen"; cat "$2/$3" >> "$(dirname "$0")/seen"\n')
    given = {"PENNYPOD_CHECKPOINT_HOOK": f"sh {hook}", "https_proxy": "http://proxy.example:3128"}
    done = run_with_stand_in(tmp_path, "--data", str(data), "--smoke", **given)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/detect/fdi2"
    assert (tmp_path / "seen").read_text() == "".join(
        f"{epoch} {folder} weights/last.pt http://proxy.example:3128\nstate {epoch - 1}" for epoch in (1, 2)
    ), "best.pt is not there yet, so it is not named"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no weights", "the training ended but wrote no weights"),
        ("raise", "training failed: RuntimeError: CUDA out of memory"),
    ],
)
def test_a_failed_training_exits_1_with_a_last_line_that_says_why(
    data: Path, tmp_path: Path, fault: str, said: str
) -> None:
    done = run_with_stand_in(tmp_path, "--data", str(data), "--smoke", fault=fault)
    assert done.returncode == 1
    assert "best weights" not in done.stdout
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("train_fdi_yolo: error: ")
    assert said in last


def test_loaders_stay_in_the_process_where_shared_memory_is_small(
    trainer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, expected in ((64_000_000, 0), (8_000_000_000, 4)):
        monkeypatch.setattr(trainer.shutil, "disk_usage", lambda _path, free=free: SimpleNamespace(free=free))
        monkeypatch.setattr(trainer.os, "cpu_count", lambda: 4)
        assert trainer.choose_workers(None) == expected
    assert trainer.choose_workers(3) == 3
