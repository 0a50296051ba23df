"""`pennypod sample-data`: the generated data sets of the demo and of the tests. Floor 3."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

import pennypod
from pennypod.cli.app import FAILED, OK
from pennypod.errors import InputError

SCRIPT = Path(pennypod.__file__).resolve().parents[1] / "trainers" / "make_sample_data.py"


@click.command("sample-data")
@click.argument("kind", type=click.Choice(["classify", "yolo"]))
@click.argument("folder", type=click.Path(path_type=Path))
def sample_data(kind: str, folder: Path) -> int:
    """Make a small data set in FOLDER: images of shapes, sorted by class or in YOLO's layout.

    The same bytes every time. A FOLDER that already holds it is left alone.
    """
    if not SCRIPT.is_file():
        raise InputError(f"{SCRIPT} is missing: sample data comes with the repository, not with the bare package")
    # A program of its own, since it imports nothing of ours; it says itself what it did.
    done = subprocess.run([sys.executable, str(SCRIPT), kind, str(folder)])
    return OK if done.returncode == 0 else FAILED
