"""1,805 small JPEG-sized files over a loopback sshd: ours beside `tar | ssh tar` and `scp -r`, as ratios in one run.

    python tests/bench/transfer_bench.py [ROUNDS]

All three open a connection of their own. The rounds are interleaved, so that a busy machine is busy for all of them.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]

from loopback_sshd import LoopbackSshd  # noqa: E402
from pennypod.ssh import control_path  # noqa: E402
from pennypod.transfer import plan_upload, upload  # noqa: E402

FILES = 1805
SCP_EVERY = 3


def make_images(root: Path) -> int:
    """Files that do not compress, of the size small JPEGs have; returns the bytes in all."""
    source = random.Random(1805)
    total = 0
    for number in range(FILES):
        path = root / f"{'train' if number % 5 else 'val'}/class{number % 7}/img_{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        total += path.write_bytes(source.randbytes(source.randint(4_000, 24_000)))
    return total


def timed(work: Callable[[], object], pod: Path) -> float:
    shutil.rmtree(pod, ignore_errors=True)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(base: Path, rounds: int) -> dict[str, object]:
    images, pod = base / "images", base / "pod"
    total = make_images(images)
    (base / "sshd").mkdir()
    sshd = LoopbackSshd(base / "sshd", base)
    target = sshd.target()
    shared = sshd.ssh(control_path=control_path(target.host, target.port, target.user, target.key_file))
    unpack = f"mkdir -p {pod}/data && tar -C {pod}/data -xf -"
    pipe = f"tar -C {shlex.quote(str(images))} -cf - . | {shlex.join(target.command(unpack))}"
    copy = [
        "scp",
        *target.options(),
        "-q",
        "-P",
        str(target.port),
        "-r",
        f"{images}/.",
        f"{target.user}@127.0.0.1:{pod}",
    ]

    def ours() -> None:
        upload(sshd.ssh(), plan_upload(None, images), str(pod))

    def ours_shared() -> None:
        upload(shared, plan_upload(None, images), str(pod))

    def again() -> None:
        upload(shared, plan_upload(None, images), str(pod))

    def plain() -> None:
        subprocess.run(pipe, shell=True, check=True)

    def scp() -> None:
        pod.mkdir()
        subprocess.run(copy, check=True)

    seconds: dict[str, list[float]] = {}
    try:
        ours_shared()
        for number in range(rounds):
            contenders = [plain, ours, ours_shared] + ([scp] if number % SCP_EVERY == 0 else [])
            for work in contenders:
                seconds.setdefault(work.__name__, []).append(timed(work, pod))
        ours_shared()
        started = time.perf_counter()
        again()
        nothing_to_do = time.perf_counter() - started
    finally:
        shared.close()
        sshd.close()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "files": FILES,
        "bytes": total,
        "rounds": rounds,
        "seconds_median": {name: round(value, 3) for name, value in median.items()},
        "seconds_best": {name: round(value, 3) for name, value in best.items()},
        "seconds_nothing_to_do": round(nothing_to_do, 3),
        "ratio_ours_to_tar": round(median["ours"] / median["plain"], 2),
        "ratio_ours_to_tar_best": round(best["ours"] / best["plain"], 2),
        "ratio_ours_shared_to_tar": round(median["ours_shared"] / median["plain"], 2),
        "ratio_scp_to_ours": round(median["scp"] / median["ours"], 2),
    }


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    # In memory where there is such a place: the disk's own moods are not what is compared.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="pp-") as base:
        print(json.dumps(measure(Path(base), rounds), indent=2))


if __name__ == "__main__":
    main()
