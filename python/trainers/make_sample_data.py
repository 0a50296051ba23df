#!/usr/bin/env python3
"""Make the sample data sets, the same bytes for the same seed.

Standalone: needs numpy and pillow.

    make_sample_data.py classify DEST     1,805 small JPEGs of five shapes: DEST/{train,val}/<class>/*.jpg
    make_sample_data.py yolo DEST         24 + 8 images with boxes, in YOLO's layout, with a data.yaml from elsewhere

A data set appears under DEST whole or not at all: it is built beside it and renamed. Where DEST is already there, its
images are counted and it is left alone.
Exit status: 0 the data set is there, 1 it could not be made or DEST holds something else, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cross", "disc", "ring", "square", "triangle")
CLASSIFY_COUNTS = {"train": 301, "val": 60}  # per class: 5 x 361 = 1,805
CLASSIFY_PIXELS = 64

YOLO_CLASSES = ("disc", "square", "triangle")
YOLO_COUNTS = {"train": 24, "val": 8}
YOLO_PIXELS = 160
# What an export from elsewhere looks like: the path is right only on the machine that wrote it, so that a trainer finds
# nothing until somebody rewrites it. The rest must survive the rewriting as it is.
YOLO_DATA_YAML = """\
# Generated sample: shapes with boxes.
path: /content/datasets/shapes-3  # where the exporting machine kept it
train: images/train
val: images/val

nc: 3
names:
  0: disc
  1: square
  2: triangle

export:
  version: 3
  license: "CC0: generated, nobody's teeth"
"""

STALE_SECONDS = 3600


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    makers: dict[str, tuple[Callable[[Path, int], None], int]] = {
        "classify": (make_classify, len(CLASSES) * sum(CLASSIFY_COUNTS.values())),
        "yolo": (make_yolo, sum(YOLO_COUNTS.values())),
    }
    make, expected = makers[args.kind]
    dest: Path = args.dest.absolute()
    try:
        if not os.path.lexists(dest):
            with built_whole(dest) as building:
                make(building, args.seed)
        images = sum(1 for _ in dest.rglob("*.jpg"))
    except OSError as exc:
        print(f"make_sample_data: error: {exc}", file=sys.stderr)
        return 1
    if images != expected:
        print(
            f"make_sample_data: error: {dest} holds {images} images, not {expected}: remove it, or name another folder",
            file=sys.stderr,
        )
        return 1
    print(f"{images} images in {dest}")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("kind", choices=("classify", "yolo"))
    parser.add_argument("dest", type=Path, metavar="DEST")
    parser.add_argument("--seed", type=int, default=1805, help="default: %(default)s")
    return parser.parse_args(argv)


@contextmanager
def built_whole(dest: Path) -> Iterator[Path]:
    """A folder beside `dest` to build in; renamed to `dest` at the end, removed on failure."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    # What a killed process left behind. Only old ones: another process may be building the same right now.
    for left in dest.parent.glob(f".{dest.name}.*.tmp"):
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    building = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", suffix=".tmp", dir=dest.parent))
    try:
        building.chmod(0o755)
        yield building
        try:
            building.rename(dest)
        except OSError:
            # Another process finished first, and its data set is the same.
            if not dest.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


# -- images to classify -----------------------------------------------------------------------------------------------


def make_classify(folder: Path, seed: int) -> None:
    for split_index, (split, count) in enumerate(CLASSIFY_COUNTS.items()):
        for class_index, name in enumerate(CLASSES):
            place = folder / split / name
            place.mkdir(parents=True)
            for index in range(count):
                # A generator per image: no image depends on how many were made before it.
                rng = np.random.default_rng([seed, split_index, class_index, index])
                save(classify_image(rng, name), place / f"{name}_{index:04d}.jpg")


def classify_image(rng: np.random.Generator, name: str) -> np.ndarray:
    """One shape of any size, place, turn and contrast, in front of a gradient, behind a stroke, under noise."""
    size = CLASSIFY_PIXELS
    radius = rng.uniform(0.17, 0.32) * size
    cx, cy = rng.uniform(radius, size - radius, size=2)
    canvas = background(rng, size)
    # Dark on light as often as light on dark, so that mere brightness says nothing.
    canvas += (
        rng.choice([-1.0, 1.0]) * rng.uniform(45, 90) * coverage(name, size, cx, cy, radius, rng.uniform(0, np.pi))
    )
    x, y = turned(size, *rng.uniform(0, size, size=2), rng.uniform(0, np.pi))
    canvas += rng.uniform(-50, 50) * np.clip(1.5 - np.abs(y), 0, 1) * (np.abs(x) < 0.4 * size)
    return canvas + rng.normal(0, rng.uniform(8, 24), size=canvas.shape)


# -- images with boxes ------------------------------------------------------------------------------------------------


def make_yolo(folder: Path, seed: int) -> None:
    for split_index, (split, count) in enumerate(YOLO_COUNTS.items()):
        images, labels = folder / "images" / split, folder / "labels" / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for index in range(count):
            canvas, lines = yolo_image(np.random.default_rng([seed, split_index, index]))
            save(canvas, images / f"{split}_{index:03d}.jpg")
            (labels / f"{split}_{index:03d}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "data.yaml").write_text(YOLO_DATA_YAML, encoding="utf-8")


def yolo_image(rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
    """Two to four shapes, one per quadrant so that none hides another, and their boxes as YOLO label lines."""
    size = YOLO_PIXELS
    canvas, lines = background(rng, size), []
    for quadrant in rng.permutation(4)[: rng.integers(2, 5)]:
        number = int(rng.integers(len(YOLO_CLASSES)))
        radius = rng.uniform(0.09, 0.18) * size
        corner = np.array([quadrant % 2, quadrant // 2]) * size / 2
        cx, cy = corner + rng.uniform(radius + 1, size / 2 - radius - 1, size=2)
        shape = coverage(YOLO_CLASSES[number], size, cx, cy, radius, rng.uniform(0, np.pi))
        canvas += rng.uniform(60, 110) * shape
        lines.append(f"{number} {box(shape)}")
    return canvas + rng.normal(0, 6, size=canvas.shape), lines


def box(shape: np.ndarray) -> str:
    """The box around what is drawn, measured: centre x, centre y, width, height, in image sizes."""
    rows, columns = np.flatnonzero((shape > 0.5).any(axis=1)), np.flatnonzero((shape > 0.5).any(axis=0))
    size = shape.shape[0]
    left, right, top, bottom = columns[0], columns[-1] + 1, rows[0], rows[-1] + 1
    values = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
    return " ".join(f"{value / size:.6f}" for value in values)


# -- drawing ----------------------------------------------------------------------------------------------------------


def background(rng: np.random.Generator, size: int) -> np.ndarray:
    x, _ = turned(size, size / 2, size / 2, rng.uniform(0, 2 * np.pi))
    return rng.uniform(90, 165) + rng.uniform(0, 50) * x / size


def turned(size: int, cx: float, cy: float, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """The coordinates of every pixel around a centre, in a frame turned by `angle`."""
    grid = np.arange(size) + 0.5
    dx, dy = grid[None, :] - cx, grid[:, None] - cy
    return dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)


def coverage(name: str, size: int, cx: float, cy: float, radius: float, angle: float) -> np.ndarray:
    """How much of every pixel lies in the shape, 0 to 1. Every shape fits in a circle of `radius`."""
    x, y = turned(size, cx, cy, angle)
    far = np.hypot(x, y)
    if name == "disc":
        inside = 0.85 * radius - far
    elif name == "ring":
        inside = 0.2 * radius - np.abs(far - 0.75 * radius)
    elif name == "square":
        inside = 0.7 * radius - np.maximum(np.abs(x), np.abs(y))
    elif name == "triangle":
        slope = np.sqrt(0.75)
        inside = 0.5 * radius - np.maximum(y, np.maximum(slope * x - y / 2, -slope * x - y / 2))
    elif name == "cross":
        arm, length = 0.24 * radius, 0.95 * radius
        along, across = np.minimum(length - np.abs(x), arm - np.abs(y)), np.minimum(arm - np.abs(x), length - np.abs(y))
        inside = np.maximum(along, across)
    else:
        raise ValueError(f"no such shape: {name}")
    return np.clip(inside + 0.5, 0, 1)


def save(canvas: np.ndarray, path: Path) -> None:
    Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8)).save(path, "JPEG", quality=85)


if __name__ == "__main__":
    sys.exit(main())
