#!/usr/bin/env python3
"""How long the demo takes, beside the same work done by a plain shell script, in one run on one machine.

    make bench                    JSON on stdout, progress on stderr

Four runs: {stock, bootstrapped image} x {pennypod, plain.sh}. A bootstrapped image is a pod saved after its bootstrap.
Machines are noisy, so read the ratios. `ratio_without_training` leaves out what no orchestrator can change. The figures
of `pennypod serve` come first (orchestrator_bench.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orchestrator_bench
from bootstrapped import PodSaver
from workspace import REPOSITORY, Workspace

BOOTSTRAPPED = "localhost/pennypod-bench:bootstrapped"


class Bench:
    def __init__(self, root: Path) -> None:
        self.workspace = Workspace(root)
        self.data = root / "data" / "demo"
        self.pods = PodSaver(self.workspace)

    def prepare(self) -> None:
        """Everything that is made once and shared by all four runs: the image, the data set, the saved pod."""
        self.pods.provider.prepare("stock", say)
        say("making the demo's data set")
        script = REPOSITORY / "python" / "trainers" / "make_sample_data.py"
        subprocess.run([sys.executable, script, "classify", self.data], check=True, stdout=sys.stderr)
        say("saving a bootstrapped pod as an image")
        self.pods.save(BOOTSTRAPPED)

    def pennypod(self, image: str) -> dict[str, float]:
        """Seconds by stage of `ansible-playbook train.yml -e job=demo`, and of the whole command."""
        say(f"pennypod on {image}")
        before = {document["run"] for document in self.workspace.documents()}
        started = time.monotonic()
        done = self.workspace.play("-e", json.dumps({"pod_image": {"local": image}}), job="demo", dataset=self.data)
        total = time.monotonic() - started
        if done.returncode != 0:
            raise SystemExit(f"the demo failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
        (document,) = [d for d in self.workspace.documents() if d["run"] not in before]
        return {**document["stages"], "total": round(total, 3), "billed": document["billed_seconds"]}

    def plain(self, image: str) -> dict[str, float]:
        """Seconds by stage of plain.sh, with the rent and the destroy around it."""
        say(f"plain.sh on {image}")
        started = time.monotonic()
        pod_id, _name, host, port = self.pods.rent(image)
        rented = time.monotonic()
        known_hosts = self.workspace.root / f"known_hosts-{port}"
        out = self.workspace.root / f"plain-{port}"
        script = Path(__file__).parent / "plain.sh"
        code = REPOSITORY / "python" / "trainers"
        try:
            words = [script, host, port, self.pods.key, known_hosts, code, self.data, out]
            done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"plain.sh failed:\n{done.stdout}{done.stderr[-3000:]}")
        finally:
            ended = time.monotonic()
            self.pods.provider.destroy(pod_id)
        finished = time.monotonic()
        stages = {name: int(ms) / 1000 for name, ms in (line.split() for line in done.stdout.splitlines())}
        rent = rented - started + stages.pop("ssh")
        total = {"teardown": round(finished - ended, 3), "total": round(finished - started, 3)}
        return {"rent": round(rent, 3), **stages, **total}


def compare(ours: dict[str, float], plain: dict[str, float]) -> dict[str, Any]:
    return {
        "pennypod": ours,
        "plain": plain,
        "ratio": round(ours["total"] / plain["total"], 3),
        "ratio_without_training": round((ours["total"] - ours["training"]) / (plain["total"] - plain["training"]), 3),
        "ratio_dataset": round(ours["dataset"] / plain["dataset"], 3),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    result: dict[str, Any] = {"cores": os.cpu_count(), "serve": orchestrator_bench.measure()}
    with tempfile.TemporaryDirectory(prefix="pennypod-bench-") as scratch:
        bench = Bench(Path(scratch))
        bench.prepare()
        for label, image in (("stock", "stock"), ("bootstrapped", BOOTSTRAPPED)):
            result[label] = compare(bench.pennypod(image), bench.plain(image))
        stock, saved = result["stock"]["pennypod"]["total"], result["bootstrapped"]["pennypod"]["total"]
        result["bootstrapped_over_stock"] = round(saved / stock, 3)
        bench.pods.provider.engine.call("rmi", BOOTSTRAPPED)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
