#!/usr/bin/env python3
"""The demo from a golden and from a stock image, beside the same work done by plain.sh on the very same images.

    make bench-golden                      JSON on stdout, progress on stderr
    make bench-golden ARGS='--publish'     into docs/bench as well: JSON, a page, a picture
    make bench-golden ARGS='--golden 3 --stock 0'

The image is baked first, as a user bakes it. Rounds are interleaved and each figure is the median of its rounds. A pod
bills from the create call until it is gone, and trains from the moment the trainer's process begins until it has ended,
as the trainer's own log tells: whatever lies between those, polling included, is outside the training. Both have the
same data set, code and training, which ends in the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bootstrapped import PodSaver
from charts import Stack, stacks
from pennypod.golden import GoldenStore
from workspace import REPOSITORY, Workspace

DOCS = REPOSITORY / "docs" / "bench"
READY_AIM_S = 10.0
# The demo's command, telling when its process begins and when it has ended.
TRAINING = (
    'date +began=%s.%N; "$PENNYPOD_PYTHON" "$PENNYPOD_CODE/train_demo.py" --data "$PENNYPOD_DATA" --name demo;'
    " status=$?; date +ended=%s.%N; exit $status"
)
# What either side calls the same part of a pod's life.
SAME = {"pull": "rent", "boot": "rent", "ssh": "rent", "weights": "fetch"}

Row = dict[str, Any]


class Loop:
    """One job, one data set, one golden image, and both ways to train with them."""

    def __init__(self, root: Path) -> None:
        self.workspace = Workspace(root)
        self.data = root / "data" / "demo"
        self.pods = PodSaver(self.workspace)
        self.golden = ""

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Everything that is made once: the stock image, the data set, the golden image, which is removed again."""
        self.pods.provider.prepare("stock", say)
        say("making the demo's data set")
        script = REPOSITORY / "python" / "trainers" / "make_sample_data.py"
        subprocess.run([sys.executable, script, "classify", self.data], check=True, stdout=sys.stderr)
        say("baking the golden image")
        try:
            done = self.workspace.play(playbook="bake.yml", job="demo")
            if done.returncode != 0:
                raise SystemExit(f"the bake failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
            (baked,) = GoldenStore(self.workspace.home).all()
            self.golden = baked.reference
            yield
        finally:
            for image in GoldenStore(self.workspace.home).all():
                self.pods.provider.remove_image(image.name)

    def pennypod(self, image: str) -> Row:
        """`ansible-playbook train.yml -e job=demo`."""
        said = [file.name for file in self.workspace.artifacts.glob("*")]
        options = json.dumps({"training_command": TRAINING, "golden": image == self.golden})
        started = time.monotonic()
        done = self.workspace.play("-e", options, job="demo", dataset=self.data)
        total = time.monotonic() - started
        if done.returncode != 0:
            raise SystemExit(f"the demo failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
        (document,) = [document for document in self.workspace.documents() if document["run"] not in said]
        reference = document["image"]["reference"]
        if reference != image:
            raise SystemExit(f"the run has started from {reference} instead of {image}")
        with contextlib.closing(self.workspace.ledger()) as ledger:
            (attempt,) = ledger.attempts(document["run"])
        if attempt.ready is None or attempt.gone is None:
            raise SystemExit("the run's pod was never ready, or is not gone")
        log = Path(document["artifacts_dir"]) / "train.log"
        spent = {name: part["seconds"] for name, part in document["spent"].items()}
        figures = _figures(attempt.intended, attempt.ready, attempt.gone, log, spent, total)
        return {**figures, "stages": document["stages"]}

    def plain(self, image: str) -> Row:
        """plain.sh, with the rent and the destroy around it."""
        before = time.monotonic()
        created = time.time()
        pod_id, _name, host, port = self.pods.rent(image)
        rented = time.time()
        out = self.workspace.root / f"plain-{port}-{int(created)}"
        known_hosts = out.with_suffix(".known_hosts")
        script, code = Path(__file__).parent / "plain.sh", REPOSITORY / "python" / "trainers"
        try:
            words = [script, host, port, self.pods.key, known_hosts, code, self.data, out]
            done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"plain.sh failed:\n{done.stdout}{done.stderr[-3000:]}")
        finally:
            ended = time.time()
            self.pods.provider.destroy(pod_id)
        gone = time.time()
        lines = [line.split() for line in done.stdout.splitlines()]
        stages = {name: (int(begin) / 1000, int(end) / 1000) for name, begin, end in lines}
        spent = {name: end - begin for name, (begin, end) in stages.items()}
        spent["ssh"] += rented - created
        spent["teardown"] = gone - ended
        figures = _figures(created, stages["ssh"][1], gone, out / "train.log", spent, time.monotonic() - before)
        return {**figures, "stages": {name: round(seconds, 3) for name, seconds in spent.items()}}


def _figures(created: float, ready: float, gone: float, log: Path, spent: dict[str, float], total: float) -> Row:
    """What is told of either side; times in Unix seconds."""
    found = dict(re.findall(r"^(began|ended)=([0-9.]+)$", log.read_text(), re.MULTILINE))
    began, ended = float(found["began"]), float(found["ended"])
    parts: dict[str, float] = {}
    for name, seconds in spent.items():
        same = SAME.get(name, name)
        parts[same] = round(parts.get(same, 0.0) + seconds, 3)
    figures = {
        "total_s": total,
        "billed_s": gone - created,
        "trained_s": ended - began,
        "outside_s": (gone - created) - (ended - began),
        "ready_s": began - ready,
    }
    return {name: round(seconds, 3) for name, seconds in figures.items()} | {"spent": parts}


def summary(rows: Sequence[Row]) -> Row:
    """The median of each figure, and every round of those that something is promised of."""
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    told: Row = {name: round(median(row[name] for row in rows), 3) for name in names}
    told |= {f"{name}_rounds": [row[name] for row in rows] for name in ("ready_s", "outside_s")}
    for table in ("spent", "stages"):
        parts = list(dict.fromkeys(name for row in rows for name in row[table]))
        told[table] = {name: round(median(row[table].get(name, 0.0) for row in rows), 3) for name in parts}
    return told


def compare(ours: Sequence[Row], plain: Sequence[Row]) -> Row:
    sides = {"pennypod": summary(ours), "plain": summary(plain)}
    names = ("total_s", "billed_s", "outside_s", "ready_s")
    ratios = {name.removesuffix("_s"): sides["pennypod"][name] / sides["plain"][name] for name in names}
    return {"rounds": len(ours), **sides, "ratio": {name: round(value, 3) for name, value in ratios.items()}}


def measure(rounds: dict[str, int]) -> Row:
    """`rounds` of each image; the load of the machine is noted before each."""
    rows: dict[str, dict[str, list[Row]]] = {image: {"pennypod": [], "plain": []} for image in rounds}
    loads = []
    with tempfile.TemporaryDirectory(prefix="pennypod-bench-") as scratch:
        loop = Loop(Path(scratch))
        with loop.prepared():
            for number in range(max(rounds.values())):
                for image in (name for name, wanted in rounds.items() if number < wanted):
                    reference = loop.golden if image == "golden" else "stock"
                    loads.append(round(os.getloadavg()[0], 1))
                    for side, work in (("pennypod", loop.pennypod), ("plain", loop.plain)):
                        row = work(reference)
                        rows[image][side].append(row)
                        say(
                            f"{image} {side}: ready {row['ready_s']:.1f} s after the login,"
                            f" billed {row['billed_s']:.1f} s, {row['outside_s']:.1f} s of it outside the training"
                        )
    found = {image: compare(sides["pennypod"], sides["plain"]) for image, sides in rows.items() if sides["plain"]}
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return {"measured": day, "cores": os.cpu_count(), "load": loads, **found}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the page and the picture ----------------------------------------------------------------------------------------


def page(document: Row) -> str:
    load = document["load"]
    lines = [
        "# The whole loop beside a shell script",
        "",
        "<!-- written by `make bench-golden ARGS='--publish'` from loop.json: do not edit -->",
        "",
        "The demo on local pods, from the golden image that `bake.yml` makes and from the stock image, and the same",
        "work on the same images by [plain.sh](../../tests/bench/plain.sh), which has ssh, scp, tar and no safety:",
        "no guard, no acceptance check, no hashes, no ledger, no proof of the end. Seconds, the median of the rounds.",
        "A pod bills from the create call until it is gone (ours: proven gone), and what is outside the training is",
        f"all of that but the trainer's own run time. Measured on {document['measured']} on {document['cores']} CPUs,",
        "which pod and control node share with whatever else runs there, at a load of",
        f"{min(load)} to {max(load)} before the rounds: read the ratios.",
        "",
        reached(document),
        "",
        "![billed seconds by part](loop.svg)",
        "",
    ]
    for image in (name for name in ("golden", "stock") if name in document):
        found = document[image]
        lines += [f"## From the {image} image, {found['rounds']} rounds", ""]
        lines += ["| | pennypod | plain.sh | ratio |", "| --- | ---: | ---: | ---: |"]
        for name, text in FIGURES.items():
            ours, plain = found["pennypod"][name], found["plain"][name]
            lines.append(f"| {text} | {ours:.1f} | {plain:.1f} | {ours / plain:.2f} |")
        parts = list(dict.fromkeys([*found["pennypod"]["spent"], *found["plain"]["spent"]]))
        for name in parts:
            cells = [found[side]["spent"].get(name) for side in ("pennypod", "plain")]
            told = ["" if cell is None else f"{cell:.1f}" for cell in cells]
            lines.append(f"| of the bill: {name} | {told[0]} | {told[1]} | |")
        lines.append("")
    return "\n".join(lines)


FIGURES = {
    "total_s": "from the command to its end",
    "billed_s": "billed",
    "trained_s": "the trainer's process",
    "outside_s": "billed outside the training",
    "ready_s": "from the login to the training",
}


def reached(document: Row) -> str:
    """What this measurement says about the aims."""
    golden = document.get("golden")
    if golden is None:
        return "The golden image was not measured."
    ready, ours, plain = golden["pennypod"]["ready_s"], golden["pennypod"]["outside_s"], golden["plain"]["outside_s"]
    return (
        f"What is aimed at: on a golden pod at most {READY_AIM_S:.0f} s from the login to the training, and no more"
        f" billed seconds outside the training than the script has. Reached here: {ready:.1f} s"
        f" ({'held' if ready <= READY_AIM_S else 'missed'}), and {ours:.1f} s against {plain:.1f} s"
        f" ({'held' if ours <= plain else 'missed'})."
    )


def picture(document: Row) -> str:
    groups = {}
    for image in (name for name in ("golden", "stock") if name in document):
        groups[f"{image} image: billed seconds by part"] = [
            Stack(
                {"pennypod": "pennypod", "plain": "plain.sh"}[side],
                document[image][side]["spent"],
                f"{document[image][side]['billed_s']:.1f} s, {document[image][side]['outside_s']:.1f} s outside the"
                f" training, ready after {document[image][side]['ready_s']:.1f} s",
            )
            for side in ("pennypod", "plain")
        ]
    return stacks("Billed seconds of the demo by what the pod was doing", groups)


def publish(document: Row) -> None:
    DOCS.mkdir(exist_ok=True)
    (DOCS / "loop.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (DOCS / "loop.md").write_text(page(document), encoding="utf-8")
    (DOCS / "loop.svg").write_text(picture(document), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--golden", type=int, default=5, help="rounds from the golden image")
    parser.add_argument("--stock", type=int, default=3, help="rounds from the stock image")
    parser.add_argument("--publish", action="store_true", help="write docs/bench as well")
    options = parser.parse_args()
    document = measure({"golden": options.golden, "stock": options.stock})
    if options.publish:
        publish(document)
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
