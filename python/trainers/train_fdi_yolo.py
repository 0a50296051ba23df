#!/usr/bin/env python3
"""Train a YOLO detector of teeth by FDI number on dental radiographs.

Standalone: needs ultralytics and nothing of this project, so that it can be copied to any machine and run bare.

    train_fdi_yolo.py --data data.yaml --model yolov8m.pt --epochs 100      the real run
    train_fdi_yolo.py --data data.yaml --model yolov8n.yaml --smoke         two epochs from scratch: does the pod work?
    train_fdi_yolo.py --data data.yaml --resume                             go on after a lost pod or a killed process

It never touches the network: base weights must already lie where --model says (download them while setting the machine
up, where a failure is seen), and ultralytics' own downloads, update checks and telemetry are off.

PENNYPOD_RESUME_FROM may name a folder with what a training elsewhere has left: it goes on from there, as with --resume.
PENNYPOD_CHECKPOINT_HOOK may name a command that is called after each epoch, with what that would need.

Prints `epoch 3/100 loss 2.413 map50 0.812` after each epoch and, at the end, where best.pt is.
Exit status: 0 best.pt is written, 1 bad data or a failed training, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

SMOKE_EPOCHS = 2
HOOK_S = 120  # what a training waits at most for its checkpoint to be put aside
RESUMED_FROM = ("weights/last.pt", "weights/best.pt", "results.csv", "args.yaml")
ENVIRONMENT = dict(os.environ)  # as it was given to us: keep_offline bends the proxies
IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

AUGMENTATION: dict[str, float] = {
    # NEVER mirror. FDI numbers tell left from right: tooth 11 is the patient's right incisor and 21 the left one. A
    # mirrored radiograph shows 11 where the label still says 21, so every flipped image teaches a wrong label.
    "fliplr": 0.0,
    # An upper jaw upside down is a lower jaw: 11 would pass for 41.
    "flipud": 0.0,
    # Pasting or blending a tooth into another jaw gives it neighbours that contradict its number.
    "copy_paste": 0.0,
    "mixup": 0.0,
    # Radiographs are grey: hue and saturation carry nothing, brightness stands for exposure.
    "hsv_h": 0.0,
    "hsv_s": 0.0,
    "hsv_v": 0.35,
    # How far a head is tilted, shifted or away from the sensor; more than this does not happen in a clinic.
    "degrees": 5.0,
    "translate": 0.08,
    "scale": 0.3,
    "shear": 0.0,
    "perspective": 0.0,
    # A number follows from the place in the row: half of the images stay whole jaws, in the last epochs all of them.
    "mosaic": 0.5,
}
CLOSE_MOSAIC_EPOCHS = 10


class TrainingError(Exception):
    """Something the reader of the log can act on; printed as one line."""


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        best = train(args)
    except TrainingError as exc:
        print(f"train_fdi_yolo: error: {exc}", file=sys.stderr)
        return 1
    except Exception as exc:  # whatever the framework raises: the trace for the log, then one line that says what broke
        traceback.print_exc()
        print(f"train_fdi_yolo: error: training failed: {type(exc).__name__}: {first_line(exc)}", file=sys.stderr)
        return 1
    print(f"best weights: {best} ({best.stat().st_size / 1e6:.1f} MB)", flush=True)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="data.yaml, or the folder that holds it")
    parser.add_argument(
        "--model",
        default="yolov8n.yaml",
        help="base weights (a .pt file that is already here) or a model description (.yaml) to train from scratch "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--allow-scratch",
        action="store_true",
        help="when the .pt of --model is not here, train from scratch with the .yaml of the same name",
    )
    parser.add_argument("--epochs", type=positive, default=100)
    parser.add_argument(
        "--smoke", action="store_true", help=f"only {SMOKE_EPOCHS} epochs: proves that the machine works"
    )
    parser.add_argument("--imgsz", type=positive, default=640, help="pixels of the longer side (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="images per step (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, or GPU numbers such as 0 or 0,1 (default: auto)")
    parser.add_argument("--workers", type=int, default=None, help="processes that load images (default: what fits)")
    parser.add_argument("--project", type=Path, default=Path("runs/detect"), help="default: %(default)s")
    parser.add_argument("--name", default="fdi", help="folder of this training under --project (default: %(default)s)")
    parser.add_argument("--patience", type=positive, default=25, help="stop after so many epochs without improvement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="continue from <project>/<name>/weights/last.pt")
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> Path:
    """Train and return the path of best.pt. Raises TrainingError when the data is bad or no weights came out."""
    project = args.project.resolve()
    data = find_data_yaml(args.data)
    print(check_data(data), flush=True)
    weights = project / args.name / "weights"
    last = weights / "last.pt"
    if take_over(weights.parent, "weights/last.pt"):
        args.resume = True
    if args.resume and not last.is_file():
        raise TrainingError(f"nothing to resume: there is no {last}")
    model_source = str(last) if args.resume else find_model(args.model, args.allow_scratch)

    keep_offline(project)
    from ultralytics import YOLO

    model = YOLO(model_source, task="detect")
    if args.resume and not is_resumable(model):
        print(f"nothing left to do: the training in {weights} is complete", flush=True)
        return written_weights(weights)
    callbacks = (
        ("on_train_epoch_end", note_epoch),
        ("on_fit_epoch_end", print_epoch),
        ("on_model_save", offer_checkpoint),
    )
    for event, callback in callbacks:
        model.add_callback(event, callback)
    settings: dict[str, Any] = {
        "data": str(data),
        "imgsz": args.imgsz,
        "batch": args.batch,
        "device": choose_device(args.device),
        "workers": choose_workers(args.workers),
        "patience": args.patience,
        "plots": not args.smoke,
    }
    if args.resume:
        # The rest comes from the checkpoint. The folder is named, since the pod it was written on is gone.
        settings.update(resume=True, save_dir=str(weights.parent))
    else:
        settings.update(
            **AUGMENTATION,
            epochs=SMOKE_EPOCHS if args.smoke else args.epochs,
            project=str(project),
            name=args.name,
            seed=args.seed,
            close_mosaic=CLOSE_MOSAIC_EPOCHS,
        )
    model.train(**settings)
    # Asked for, not assumed: ultralytics counts the name up (fdi2) when the folder is taken.
    return written_weights(Path(model.trainer.save_dir) / "weights")


# -- before the training ----------------------------------------------------------------------------------------------


def keep_offline(project: Path) -> None:
    """Turn off whatever ultralytics would fetch or send. Must run before its first import."""
    # Some downloads happen whatever the settings say: a font, and a model for the mixed-precision check on a GPU. A
    # proxy that refuses at once turns each into a warning, where a firewall would make it wait.
    for name in ("http_proxy", "https_proxy"):
        os.environ[name] = os.environ[name.upper()] = "http://127.0.0.1:9"
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1"
    os.environ["YOLO_OFFLINE"] = "1"  # no update check and no telemetry
    os.environ["YOLO_AUTOINSTALL"] = "0"  # a missing package is an error, not a pip install in the middle of a training
    os.environ["YOLO_CONFIG_DIR"] = str(project / ".ultralytics")  # the image's own settings may point anywhere
    os.environ["MPLBACKEND"] = "Agg"
    from ultralytics import settings

    reporters = ("sync", "clearml", "comet", "dvc", "hub", "mlflow", "neptune", "raytune", "tensorboard", "wandb")
    settings.update(dict.fromkeys([name for name in reporters if name in settings], False))


def find_model(model: str, allow_scratch: bool) -> str:
    """What YOLO() gets: an existing .pt, or a .yaml that ultralytics carries or that exists."""
    path = Path(model)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        return model
    if path.suffix != ".pt":
        raise TrainingError(f"--model {model} is neither a .pt nor a .yaml")
    if allow_scratch:
        scratch = f"{path.stem}.yaml"
        print(f"no base weights {model} here: training from scratch with {scratch}", flush=True)
        return scratch
    raise TrainingError(
        f"the base weights {model} are not here: download them during set-up, or train from scratch with "
        f"--model {path.stem}.yaml"
    )


def choose_device(asked: str) -> str:
    import torch

    if asked != "auto":
        return asked
    device = "0" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name(0) if device == "0" else "the CPU (torch sees no GPU)"
    print(f"device: {name}, torch {torch.__version__}", flush=True)
    return device


def choose_workers(asked: int | None) -> int:
    """Loader processes hand images over through /dev/shm; in a container's usual 64 MB they die of SIGBUS."""
    if asked is not None:
        return asked
    try:
        roomy = shutil.disk_usage("/dev/shm").free > 1_000_000_000  # noqa: S108
    except OSError:
        roomy = False
    return min(8, os.cpu_count() or 1) if roomy else 0


def is_resumable(model: Any) -> bool:
    """A finished training strips the optimizer off its last.pt."""
    checkpoint = model.ckpt or {}
    return checkpoint.get("optimizer") is not None and checkpoint.get("epoch", -1) >= 0


# -- the data ---------------------------------------------------------------------------------------------------------


def find_data_yaml(data: Path) -> Path:
    path = data / "data.yaml" if data.is_dir() else data
    if not path.is_file():
        raise TrainingError(f"no data set: {path} does not exist")
    return path.resolve()


def check_data(data_yaml: Path) -> str:
    """Look at every label before a GPU does: ultralytics drops broken ones with a warning and trains on the rest."""
    import yaml

    try:
        data = yaml.safe_load(data_yaml.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise TrainingError(f"{data_yaml} is not YAML: {first_line(exc)}") from exc
    if not isinstance(data, dict):
        raise TrainingError(f"{data_yaml} is not a mapping with train, val and names")
    for key in ("train", "val", "names"):
        if not data.get(key):
            raise TrainingError(f"{data_yaml} has no {key}:")
    names = data["names"]
    classes = len(names)
    if isinstance(names, dict) and sorted(names) != list(range(classes)):
        raise TrainingError(f"{data_yaml}: the keys of names: must be 0 to {classes - 1}")
    if data.get("nc", classes) != classes:
        raise TrainingError(f"{data_yaml}: nc: {data['nc']} but {classes} names")
    root = Path(data.get("path") or data_yaml.parent)
    parts = []
    for split in ("train", "val"):
        images = [image for entry in as_list(data[split]) for image in list_images(data_yaml, root, split, entry)]
        boxes = sum(count_boxes(label_of(image), classes) for image in images)
        if boxes == 0:
            raise TrainingError(f"{split}: {len(images)} images but not one label: expected e.g. {label_of(images[0])}")
        parts.append(f"{split} {len(images)} images with {boxes} boxes")
    return f"data: {', '.join(parts)}, {classes} classes"


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def list_images(data_yaml: Path, root: Path, split: str, entry: Any) -> list[Path]:
    """The images of one `train:` or `val:` entry: a folder, or a text file that lists them."""
    place = root / str(entry)
    if not place.exists() and str(entry).startswith("../"):
        place = root / str(entry)[3:]  # Roboflow's data.yaml is written for a folder further down
    if not place.exists():
        raise TrainingError(f"{data_yaml}: the images of {split}: are not at {place}: is path: right for this machine?")
    if place.is_file():
        lines = place.read_text(encoding="utf-8").split()
        images = [(place.parent / line) for line in lines]
        missing = next((image for image in images if not image.is_file()), None)
        if missing is not None:
            raise TrainingError(f"{place} lists {missing}, which does not exist")
    else:
        images = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise TrainingError(f"{data_yaml}: no images for {split}: at {place}")
    return images


def label_of(image: Path) -> Path:
    """YOLO's rule: the last `images` folder in the path becomes `labels`."""
    parts = list(image.parts)
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == "images":
            parts[index] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def count_boxes(label: Path, classes: int) -> int:
    """Boxes in one label file; no file means an image without teeth. Raises TrainingError on the first bad line."""
    try:
        lines = label.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    boxes = 0
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields:
            continue
        try:
            values = [float(field) for field in fields]
        except ValueError:
            raise TrainingError(f"{label}:{number}: not numbers: {line.strip()[:60]}") from None
        # A box is x y w h; a polygon three points or more.
        if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
            raise TrainingError(f"{label}:{number}: {len(values)} numbers; a box has 5: class x y width height")
        if values[0] != int(values[0]) or not 0 <= values[0] < classes:
            raise TrainingError(f"{label}:{number}: class {fields[0]} but data.yaml has 0 to {classes - 1}")
        if not all(0 <= value <= 1 for value in values[1:]):
            raise TrainingError(f"{label}:{number}: coordinates outside 0 to 1: {line.strip()[:60]}")
        boxes += 1
    return boxes


# -- during and after -------------------------------------------------------------------------------------------------


def note_epoch(trainer: Any) -> None:
    trainer.epoch_to_print = trainer.epoch + 1


def print_epoch(trainer: Any) -> None:
    """One plain line per epoch, for whoever follows the log; the progress bars around it are hard to parse."""
    # The final evaluation of best.pt fires this event as well, with no epoch trained before it.
    epoch = getattr(trainer, "epoch_to_print", None)
    if epoch is None:
        return
    trainer.epoch_to_print = None
    losses = trainer.tloss
    losses = list(losses.values()) if isinstance(losses, dict) else losses.reshape(-1).tolist()
    loss = sum(float(part) for part in losses)
    map50 = float((trainer.metrics or {}).get("metrics/mAP50(B)", 0.0))
    print(f"epoch {epoch}/{trainer.epochs} loss {loss:.3f} map50 {map50:.3f}", flush=True)


def offer_checkpoint(trainer: Any) -> None:
    """last.pt is whole now, and is written over after the next epoch."""
    on_epoch_end(trainer.epoch + 1, Path(trainer.save_dir), RESUMED_FROM)


def take_over(run: Path, last: str) -> bool:
    """Whether to go on from what PENNYPOD_RESUME_FROM names, which is then in `run`. What is there already is newer."""
    source = os.environ.get("PENNYPOD_RESUME_FROM")
    if not source:
        return False
    if not (run / last).is_file():
        if not (Path(source) / last).is_file():
            raise TrainingError(f"nothing to resume: PENNYPOD_RESUME_FROM={source} has no {last}")
        shutil.copytree(source, run, dirs_exist_ok=True)
    return True


def on_epoch_end(epoch: int, run: Path, names: tuple[str, ...]) -> None:
    """Offer what a resume needs to whoever keeps it elsewhere. Whatever becomes of that, the training goes on."""
    hook = os.environ.get("PENNYPOD_CHECKPOINT_HOOK")
    if not hook:
        return
    there = [name for name in names if (run / name).is_file()]
    try:
        silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(
            [*shlex.split(hook), str(epoch), str(run), *there],
            timeout=HOOK_S,
            check=False,
            env=ENVIRONMENT,
            **silent,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        print(f"the checkpoint of epoch {epoch} was not put aside: {exc}", file=sys.stderr, flush=True)


def written_weights(weights: Path) -> Path:
    best = weights / "best.pt"
    if not best.is_file() or best.stat().st_size == 0:
        raise TrainingError(f"the training ended but wrote no weights: {best} is missing or empty")
    return best


def first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or ["no message"])[0]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
