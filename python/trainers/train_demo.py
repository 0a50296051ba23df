#!/usr/bin/env python3
"""Train a small image classifier: a convolutional network in numpy, so that no pod has to install a framework.

Standalone: needs numpy (1 or 2) and pillow, and nothing of this project.

    train_demo.py --data DIR              DIR/{train,val}/<class>/*.jpg
    train_demo.py --data DIR --smoke      two epochs: does the pod work?
    train_demo.py --data DIR --resume     go on after a lost pod or a killed process

Writes <project>/<name>/weights/{best,last}.npz after each epoch, each whole or not at all, results.csv beside them and,
once the training is over, export/model_card.json with what best.npz really scores.
Prints `epoch 3/8 loss 0.412 val_acc 0.930` after each epoch and, at the end, where best.npz is.
PENNYPOD_RESUME_FROM may name a folder with what a training elsewhere has left: it goes on from there, as with --resume.
PENNYPOD_CHECKPOINT_HOOK may name a command that is called after each epoch, with what that would need.
Exit status: 0 best.npz is written, 1 bad data or nothing to resume, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

SMOKE_EPOCHS = 2
EXPORT_TOLERANCE = 1e-6
HOOK_S = 120  # what a training waits at most for its checkpoint to be put aside


class TrainingError(Exception):
    """Something the reader of the log can act on; printed as one line."""


class Split(NamedTuple):
    images: np.ndarray  # (count, height, width, 1), each image with mean 0 and deviation 1
    labels: np.ndarray


# -- the program ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        best = train(args)
    except TrainingError as exc:
        print(f"train_demo: error: {exc}", file=sys.stderr)
        return 1
    print(f"best weights: {best} ({best.stat().st_size / 1e3:.0f} kB)", flush=True)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train/<class>/ and val/<class>/")
    parser.add_argument("--epochs", type=positive, default=8, help="default: %(default)s")
    parser.add_argument(
        "--smoke", action="store_true", help=f"only {SMOKE_EPOCHS} epochs: proves that the machine works"
    )
    parser.add_argument("--imgsz", type=size, default=32, help="pixels, a multiple of 8 (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="images per step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at the start (default: %(default)s)")
    parser.add_argument("--project", type=Path, default=Path("runs/classify"), help="default: %(default)s")
    parser.add_argument("--name", default="demo", help="folder of this training under --project (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="continue from <project>/<name>/weights/last.npz")
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> Path:
    """Train and return the path of best.npz. Raises TrainingError on bad data or when there is nothing to resume."""
    project = args.project.resolve()
    if take_over(project / args.name, "weights/last.npz") or args.resume:
        run = project / args.name
        state = load_checkpoint(run / "weights/last.npz")
        epochs, imgsz, seed = state.meta["epochs"], state.meta["imgsz"], state.meta["seed"]
    else:
        state, epochs, imgsz, seed = None, SMOKE_EPOCHS if args.smoke else args.epochs, args.imgsz, args.seed

    classes, train_set, val_set = load_data(args.data, imgsz)
    print(
        f"data: train {len(train_set.labels)} images, val {len(val_set.labels)} images, {len(classes)} classes",
        flush=True,
    )
    if state is None:
        run = free_folder(project, args.name)
        net = Network.new(len(classes), seed)
        adam = Adam(net.params)
        first, best_acc, rows = 1, -1.0, []
    else:
        if state.meta["classes"] != classes:
            raise TrainingError(f"{args.data} has the classes {classes}, the checkpoint {state.meta['classes']}")
        net, adam = Network(state.params), Adam(state.params, state.moments, state.meta["step"])
        first, best_acc = state.meta["epoch"] + 1, state.meta["best_acc"]
        rows = [row for row in read_rows(run / "results.csv") if int(row["epoch"]) < first]
        if first > epochs:
            print(f"nothing left to do: the training in {run} is complete", flush=True)

    (run / "weights").mkdir(parents=True, exist_ok=True)
    for epoch in range(first, epochs + 1):
        started = time.monotonic()
        # A generator per epoch: a resumed training sees the very batches an uninterrupted one would have seen.
        rng = np.random.default_rng([seed, epoch])
        losses = []
        for images, labels in batches(rng, train_set, args.batch):
            loss, gradients = net.loss_and_gradients(augment(rng, images), labels)
            adam.step(net.params, gradients, learning_rate(args.lr, epoch, epochs))
            losses.append(loss)
        loss, val_acc = float(np.mean(losses)), accuracy(net, val_set)
        print(f"epoch {epoch}/{epochs} loss {loss:.3f} val_acc {val_acc:.3f}", flush=True)

        seconds = time.monotonic() - started
        rows.append({"epoch": epoch, "loss": f"{loss:.5f}", "val_acc": f"{val_acc:.5f}", "seconds": f"{seconds:.2f}"})
        write_rows(run / "results.csv", rows)
        meta = {"classes": classes, "imgsz": imgsz, "seed": seed, "epoch": epoch, "epochs": epochs, "val_acc": val_acc}
        if val_acc > best_acc:
            best_acc = val_acc
            save_checkpoint(run / "weights/best.npz", net.params, meta)
        # Last, since resuming trusts that everything else of this epoch is already written.
        meta = {**meta, "best_acc": best_acc, "step": adam.count}
        save_checkpoint(run / "weights/last.npz", net.params, meta, adam.moments)
        on_epoch_end(epoch, run, ("weights/last.npz", "weights/best.npz", "results.csv"))

    best = run / "weights/best.npz"
    export(best, run / "export/model_card.json", val_set)
    return best


def export(best: Path, card: Path, val_set: Split) -> None:
    """Write what the checkpoint is and what it scores, measured on the file as it lies there."""
    state = load_checkpoint(best)
    net, classes = Network(state.params), state.meta["classes"]
    started = time.perf_counter()
    guesses = predict(net, val_set.images)
    seconds = time.perf_counter() - started
    score = float(np.mean(guesses == val_set.labels))
    if abs(score - state.meta["val_acc"]) > EXPORT_TOLERANCE:
        raise TrainingError(f"{best} scores {score:.4f}, but {state.meta['val_acc']:.4f} when it was written")
    confusion = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(confusion, (val_set.labels, guesses), 1)
    content = {
        "task": "image classification",
        "weights": {"file": best.name, "bytes": best.stat().st_size, "sha256": sha256(best)},
        "parameters": sum(value.size for value in state.params.values()),
        "classes": classes,
        "imgsz": state.meta["imgsz"],
        "seed": state.meta["seed"],
        "epoch": state.meta["epoch"],
        "epochs": state.meta["epochs"],
        "metrics": {
            "val_accuracy": round(score, 5),
            "recall": {name: round(float(confusion[i, i] / confusion[i].sum()), 5) for i, name in enumerate(classes)},
            "confusion": confusion.tolist(),  # rows: what it is, columns: what it was taken for
            "milliseconds_per_image": round(seconds * 1000 / len(guesses), 3),
        },
        "numpy": np.__version__,
    }
    card.parent.mkdir(exist_ok=True)
    write_whole(card, (json.dumps(content, indent=2) + "\n").encode())
    print(f"exported {card}", flush=True)


# -- checkpoints that outlive the machine ----------------------------------------------------------------------------


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
        subprocess.run([*shlex.split(hook), str(epoch), str(run), *there], timeout=HOOK_S, check=False, **silent)
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        print(f"the checkpoint of epoch {epoch} was not put aside: {exc}", file=sys.stderr, flush=True)


# -- the data ---------------------------------------------------------------------------------------------------------


def load_data(data: Path, imgsz: int) -> tuple[list[str], Split, Split]:
    if not (data / "train").is_dir() or not (data / "val").is_dir():
        raise TrainingError(f"no data set: {data} has no train/ and val/")
    classes = class_names(data / "train")
    if classes != class_names(data / "val"):
        raise TrainingError(f"{data}: train/ has the classes {classes}, val/ has {class_names(data / 'val')}")
    if len(classes) < 2:
        raise TrainingError(f"{data}/train has {len(classes)} class folders; at least 2 are needed")
    return classes, load_split(data / "train", classes, imgsz), load_split(data / "val", classes, imgsz)


def class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def load_split(folder: Path, classes: list[str], imgsz: int) -> Split:
    images, labels = [], []
    for label, name in enumerate(classes):
        paths = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in {".jpg", ".jpeg"})
        if not paths:
            raise TrainingError(f"no *.jpg in {folder / name}")
        images += [load_image(path, imgsz) for path in paths]
        labels += [label] * len(paths)
    return Split(np.stack(images), np.array(labels))


def load_image(path: Path, imgsz: int) -> np.ndarray:
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L").resize((imgsz, imgsz), Image.BILINEAR), dtype=np.float32)
    except (OSError, SyntaxError) as exc:  # pillow raises SyntaxError for some broken files
        raise TrainingError(f"{path} is not a readable image: {exc}") from exc
    pixels = (pixels - pixels.mean()) / (pixels.std() + 1e-3)
    return pixels[:, :, None]


def batches(rng: np.random.Generator, split: Split, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    order = rng.permutation(len(split.labels))
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield split.images[chosen], split.labels[chosen]


def augment(rng: np.random.Generator, images: np.ndarray) -> np.ndarray:
    """Turn, mirror, shift and invert each image: none of that changes which shape it shows."""
    changed = np.empty_like(images)
    for index, image in enumerate(images):
        turned = np.rot90(image, rng.integers(4))
        if rng.integers(2):
            turned = turned[:, ::-1]
        changed[index] = np.roll(turned, rng.integers(-3, 4, size=2), axis=(0, 1))
    signs = rng.choice(np.array([-1, 1], dtype=images.dtype), size=(len(images), 1, 1, 1))
    return changed * signs


# -- the network ------------------------------------------------------------------------------------------------------


class Network:
    """Three times convolution, pooling and ReLU, the strongest response of each channel, then two dense layers.

    Arrays are (batch, height, width, channels).
    """

    CHANNELS = (1, 12, 24, 48)
    HIDDEN = 48

    def __init__(self, params: dict[str, np.ndarray]) -> None:
        self.params = params

    @classmethod
    def new(cls, classes: int, seed: int) -> Network:
        rng = np.random.default_rng([seed, 0])
        params = {}
        for index, before in enumerate(cls.CHANNELS[:-1]):
            after = cls.CHANNELS[index + 1]
            params[f"conv{index}.weight"] = random_weights(rng, 9 * before, after)
            params[f"conv{index}.bias"] = np.zeros(after, dtype=np.float32)
        for name, before, after in (("hidden", cls.CHANNELS[-1], cls.HIDDEN), ("output", cls.HIDDEN, classes)):
            params[f"{name}.weight"] = random_weights(rng, before, after)
            params[f"{name}.bias"] = np.zeros(after, dtype=np.float32)
        return cls(params)

    def forward(self, images: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        """The scores of every class, and what the way back needs."""
        kept: list[Any] = []
        x = images
        for index in range(len(self.CHANNELS) - 1):
            patches = patches_of(x)
            responses = patches @ self.params[f"conv{index}.weight"] + self.params[f"conv{index}.bias"]
            largest = pool(responses)
            x = np.maximum(largest, 0)  # after the pooling: the same result on a quarter of the numbers
            kept.append((patches, responses, largest))
        # Where the response is does not matter, only how strong it is: a shape may be anywhere in the picture.
        strongest = x.max(axis=(1, 2))
        hidden = np.maximum(strongest @ self.params["hidden.weight"] + self.params["hidden.bias"], 0)
        kept += [x, strongest, hidden]
        return hidden @ self.params["output.weight"] + self.params["output.bias"], kept

    def loss_and_gradients(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """The mean cross entropy and its derivative by every parameter."""
        scores, kept = self.forward(images)
        scores = scores - scores.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        loss = float(np.mean(log_sums[:, 0] - scores[rows, labels]))

        gradients: dict[str, np.ndarray] = {}
        *convolutions, x, strongest, hidden = kept
        slope = np.exp(scores - log_sums)
        slope[rows, labels] -= 1
        slope /= len(labels)
        gradients["output.weight"], gradients["output.bias"] = hidden.T @ slope, slope.sum(axis=0)
        slope = slope @ self.params["output.weight"].T * (hidden > 0)
        gradients["hidden.weight"], gradients["hidden.bias"] = strongest.T @ slope, slope.sum(axis=0)
        slope = slope @ self.params["hidden.weight"].T
        slope = slope[:, None, None, :] * (x == strongest[:, None, None, :])
        for index in reversed(range(len(convolutions))):
            patches, responses, largest = convolutions[index]
            slope = pool_back(slope * (largest > 0), responses, largest)
            by_pixel = slope.reshape(-1, slope.shape[-1])
            gradients[f"conv{index}.weight"] = patches.reshape(len(by_pixel), -1).T @ by_pixel
            gradients[f"conv{index}.bias"] = by_pixel.sum(axis=0)
            if index:
                slope = patches_back(slope @ self.params[f"conv{index}.weight"].T)
        return loss, gradients


def random_weights(rng: np.random.Generator, before: int, after: int) -> np.ndarray:
    return rng.normal(0, np.sqrt(2 / before), size=(before, after)).astype(np.float32)


def patches_of(x: np.ndarray) -> np.ndarray:
    """The 3x3 neighbourhood of every pixel, zeros beyond the edge: (batch, height, width, 9 * channels)."""
    _, height, width, _ = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, row : row + height, column : column + width] for row in range(3) for column in range(3)]
    return np.concatenate(shifted, axis=-1)


def patches_back(slopes: np.ndarray) -> np.ndarray:
    """The transpose of `patches_of`: add up what every pixel got from the neighbourhoods it is in."""
    count, height, width, wide = slopes.shape
    channels = wide // 9
    total = np.zeros((count, height + 2, width + 2, channels), dtype=slopes.dtype)
    for index in range(9):
        row, column = divmod(index, 3)
        part = slopes[..., index * channels : (index + 1) * channels]
        total[:, row : row + height, column : column + width] += part
    return total[:, 1:-1, 1:-1]


def pool(x: np.ndarray) -> np.ndarray:
    """The largest of every 2x2 square."""
    rows = np.maximum(x[:, 0::2], x[:, 1::2])
    return np.maximum(rows[:, :, 0::2], rows[:, :, 1::2])


def pool_back(slope: np.ndarray, x: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Hand every slope to the pixel that was the largest of its square."""
    result = np.zeros_like(x)
    for row in (0, 1):
        for column in (0, 1):
            result[:, row::2, column::2] = slope * (x[:, row::2, column::2] == largest)
    return result


class Adam:
    """Kingma and Ba, 2015. `moments` holds two running means per parameter and goes into the checkpoint."""

    def __init__(
        self, params: dict[str, np.ndarray], moments: dict[str, np.ndarray] | None = None, count: int = 0
    ) -> None:
        self.count = count
        self.moments = moments or {
            f"{kind}.{name}": np.zeros_like(value) for name, value in params.items() for kind in ("mean", "square")
        }

    def step(self, params: dict[str, np.ndarray], gradients: dict[str, np.ndarray], rate: float) -> None:
        self.count += 1
        for name, gradient in gradients.items():
            mean, square = self.moments[f"mean.{name}"], self.moments[f"square.{name}"]
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            unbiased_mean, unbiased_square = mean / (1 - 0.9**self.count), square / (1 - 0.999**self.count)
            params[name] -= (rate * unbiased_mean / (np.sqrt(unbiased_square) + 1e-8)).astype(params[name].dtype)


def learning_rate(start: float, epoch: int, epochs: int) -> float:
    """Half a cosine, from `start` down to a twentieth of it."""
    part = (epoch - 1) / max(epochs - 1, 1)
    return start * (0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * part))))


def predict(net: Network, images: np.ndarray) -> np.ndarray:
    chunks = [images[start : start + 128] for start in range(0, len(images), 128)]
    return np.concatenate([net.forward(chunk)[0].argmax(axis=1) for chunk in chunks])


def accuracy(net: Network, split: Split) -> float:
    return float(np.mean(predict(net, split.images) == split.labels))


# -- files ------------------------------------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    params: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]  # empty in best.npz
    meta: dict[str, Any]


def save_checkpoint(
    path: Path, params: dict[str, np.ndarray], meta: dict[str, Any], moments: dict[str, np.ndarray] | None = None
) -> None:
    arrays = {f"param/{name}": value for name, value in params.items()}
    arrays.update({f"moment/{name}": value for name, value in (moments or {}).items()})
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        np.savez(file, meta=np.array(json.dumps(meta)), **arrays)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load_checkpoint(path: Path) -> Checkpoint:
    if not path.is_file():
        raise TrainingError(f"nothing to resume: there is no {path}")
    with np.load(path, allow_pickle=False) as arrays:
        parts: dict[str, dict[str, np.ndarray]] = {"param": {}, "moment": {}}
        for key in arrays.files:
            kind, _, name = key.partition("/")
            if kind in parts:
                parts[kind][name] = arrays[key]
        return Checkpoint(parts["param"], parts["moment"], json.loads(str(arrays["meta"])))


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def write_whole(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def free_folder(project: Path, name: str) -> Path:
    """<project>/<name>, or <name>2, <name>3... so that no training overwrites another's weights."""
    folder, count = project / name, 1
    while folder.exists():
        count += 1
        folder = project / f"{name}{count}"
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def size(text: str) -> int:
    value = positive(text)
    if value % 8:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 8")
    return value


if __name__ == "__main__":
    sys.exit(main())
