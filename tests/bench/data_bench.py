"""The data path on emulated links: 1,805 files of 177 MB, ours beside scp, rsync, one tar stream and rclone.

    make bench-data                        JSON on stdout, progress on stderr
    make bench-data ARGS='--publish'       into docs/bench as well: JSON, a page, a picture
    make bench-data ARGS='--links 100x1000 --rounds 3'

Every contender opens its own connection through the link (tests/link.py) and is timed from its start to its end, set-up
included; one row of ours has the connection that a run has open by then. Just before each link's contenders, raw TCP is
measured through the same link on the same busy machine: that is the link's own limit, and what every figure is a share
of. Rounds are interleaved; the best of each contender counts, since what disturbs it is the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import psutil  # noqa: E402
from charts import OURS, THEIRS, Bar, bars  # noqa: E402
from link import WINDOW, Link, measured_bytes_per_s  # noqa: E402
from loopback_sshd import LoopbackSshd  # noqa: E402
from pennypod.clock import SystemClock  # noqa: E402
from pennypod.ssh import Ssh, SshTarget, control_path, trust_host_keys, wait_for_ssh  # noqa: E402

SENDER = Path(__file__).with_name("send.py")
DOCS = ROOT / "docs" / "bench"
FILES, BYTES = 1805, 177_000_000
LIMIT_S = 40.0  # a contender that needs longer is stopped, and what it would have needed is estimated
LIMIT_BY_FILE_S = 12.0
BY_FILE = ("rclone sftp", "scp -r")  # some round trips for each file: their estimate needs no longer
AS_IN_A_RUN = "pennypod, as in a run"
LINKS = ("20x100", "100x100", "20x1000", "100x1000")

Row = dict[str, Any]


def make_images(root: Path) -> int:
    """Files that do not compress, of sizes around the mean; returns the bytes in all."""
    source, mean = random.Random(1805), BYTES // FILES
    total = 0
    for number in range(FILES):
        path = root / f"{'train' if number % 5 else 'val'}/class{number % 7}/img_{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        total += path.write_bytes(source.randbytes(source.randint(mean // 2, mean * 3 // 2)))
    return total


class Contenders:
    """The ways to bring `images` to the folder `pod` behind a port; each returns the argument list or does it."""

    def __init__(self, images: Path, pod: Path, target: SshTarget) -> None:
        self.images, self.pod, self.target = images, pod, target

    def all(self, python: str) -> dict[str, list[str]]:
        """Command lines by name; a program that is not installed is left out."""
        target, data = replace(self.target, control_path=None), f"{self.pod}/data"
        where = f"{target.user}@{target.host}"
        unpack = f"mkdir -p {shlex.quote(data)} && tar -C {shlex.quote(data)} -xf -"
        pack = f"tar -C {shlex.quote(str(self.images))} -cf - ."
        shell = shlex.join(["ssh", *target.options(), "-p", str(target.port)])
        ours, as_in_a_run = (
            [python, str(SENDER), json.dumps([str(self.images), str(self.pod), *self._wire(), shared])]
            for shared in ("", str(self.target.control_path))
        )
        commands = {
            "pennypod": ours,
            AS_IN_A_RUN: as_in_a_run,
            "pennypod, one stream": [*ours, "1"],
            "tar | ssh tar": ["sh", "-c", f"{pack} | {shlex.join(target.command(unpack))}"],
            "rsync -a": ["rsync", "-a", "-e", shell, f"{self.images}/", f"{where}:{data}/"],
            "rclone sftp": [
                "rclone",
                "copy",
                "--config",
                "/dev/null",
                *self._rclone(),
                str(self.images),
                f":sftp:{data}",
            ],
            "scp -r": [
                "scp",
                *target.options(),
                "-q",
                "-P",
                str(target.port),
                "-r",
                str(self.images),
                f"{where}:{data}",
            ],
        }
        return {name: command for name, command in commands.items() if shutil.which(command[0])}

    def _wire(self) -> list[str]:
        target = self.target
        return [target.host, str(target.port), target.user, str(target.key_file), str(target.known_hosts)]

    def _rclone(self) -> list[str]:
        target = self.target
        named = {"host": target.host, "port": target.port, "user": target.user}
        named |= {"key-file": target.key_file, "known-hosts-file": target.known_hosts}
        return [word for name, value in named.items() for word in (f"--sftp-{name}", str(value))]


@contextlib.contextmanager
def opened(target: SshTarget) -> Iterator[None]:
    """The connections that a run has when it comes to its data: the acceptance check has opened them."""
    ssh = Ssh(target)
    login_s = wait_for_ssh(ssh, deadline_s=LIMIT_S, clock=SystemClock())
    ssh.run_checked("true")
    ssh.open_spares(login_s)
    try:
        yield
    finally:
        ssh.close()


def cpu_s(server: psutil.Process) -> float:
    """CPU seconds so far of all that takes part: this process with the link, what it has waited for, and the sshd."""
    us, its = os.times(), server.cpu_times()
    return us.user + us.system + us.children_user + us.children_system + sum(its[:4])


def timed(command: list[str], pod: Path, total: int, server: psutil.Process, limit_s: float) -> Row:
    """Run one contender, for `limit_s` at most: stopped there, `seconds` is an estimate and `done` is below 1."""
    shutil.rmtree(pod, ignore_errors=True)
    pod.mkdir()
    cpu_before = cpu_s(server)
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        took = time.monotonic() - started
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        arrived = sum(path.stat().st_size for path in pod.rglob("*.jpg"))
        done = min(arrived / total, 0.999)
        return {"seconds": round(took / max(done, 1e-3), 1), "done": round(done, 3)}
    took = time.monotonic() - started
    if process.returncode != 0:
        raise SystemExit(f"{shlex.join(command)} failed: {err.strip()[-500:]}")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.wait_procs(server.children(), timeout=5)
    cpu = round(cpu_s(server) - cpu_before, 1)
    arrived = sum(path.stat().st_size for path in pod.rglob("*.jpg"))
    if arrived != total:
        raise SystemExit(f"{shlex.join(command)} brought {arrived} of {total} bytes")
    return {"seconds": round(took, 2), "done": 1.0, "cpu_s": cpu, **(json.loads(out) if out.startswith("{") else {})}


def measure(base: Path, links: list[str], rounds: int, python: str, keep: Callable[[Row], None]) -> Row:
    """`keep` gets what is known after each link."""
    images, pod = base / "images", base / "pod"
    total = make_images(images)
    (base / "sshd").mkdir()
    sshd = LoopbackSshd(base / "sshd", base)
    host_key = (base / "sshd" / "host_key.pub").read_text()
    server = psutil.Process(sshd.process.pid)
    rows: list[Row] = []
    document: Row = {"files": FILES, "bytes": total, "rounds": rounds, "cpus": os.cpu_count(), "window": WINDOW}
    document["links"] = rows
    try:
        for name in links:
            rtt_ms, mbit = map(int, name.split("x"))
            shape = {"rtt_s": rtt_ms / 1e3, "bits_per_s": mbit * 1e6}
            limit = measured_bytes_per_s(**shape, size=int(mbit / 8 * 1e6 * 3))
            say(f"{rtt_ms} ms, {mbit} Mbit/s: raw TCP gets {limit * 8 / 1e6:.0f} Mbit/s")
            results: dict[str, Row] = {}
            with Link(sshd.port, **shape) as link:
                trust_host_keys(sshd.known_hosts, "127.0.0.1", link.port, [host_key])
                target = sshd.target(port=link.port)
                shared = replace(target, control_path=control_path("127.0.0.1", link.port, "", target.key_file))
                commands = Contenders(images, pod, shared).all(python)
                for number in range(rounds):
                    for what, command in commands.items():
                        if number and results[what]["done"] < 1:
                            continue
                        with opened(shared) if what == AS_IN_A_RUN else contextlib.nullcontext():
                            limit_s = LIMIT_BY_FILE_S if what in BY_FILE else LIMIT_S
                            result = timed(command, pod, total, server, limit_s)
                        say(f"    {what}: {result}")
                        if what not in results or result["seconds"] < results[what]["seconds"]:
                            results[what] = result
            for result in results.values():
                result["share_of_link"] = round(total / result["seconds"] / limit, 3)
            row = {"rtt_ms": rtt_ms, "mbit": mbit, "measured_mbit": round(limit * 8 / 1e6), "results": results}
            rows.append({**row, "load": round(os.getloadavg()[0], 1)})
            keep(document)
    finally:
        sshd.close()
    return document


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the page and the picture ----------------------------------------------------------------------------------------


def page(document: Row) -> str:
    lines = [
        "# The data path on emulated links",
        "",
        "<!-- written by `make bench-data ARGS='--publish'` from data.json: do not edit -->",
        "",
        f"{document['files']:,} files, {document['bytes'] / 1e6:.0f} MB, that do not compress, to a real sshd through",
        "a delay-and-rate proxy in user space ([tests/link.py](../../tests/link.py)). Seconds from the start of a",
        f"command to its end, login included; `{AS_IN_A_RUN}` has the connections open that the acceptance",
        "check leaves behind on a line with a delay. In brackets the share of what raw TCP got through the same link",
        "just before, and the CPU seconds of sender, link and receiver together: they share",
        f"{document['cpus']} CPUs with whatever else ran on the machine (its load is in the first row), so where the",
        "CPU is the limit and not the link, only the ratios within a column say something. Best of",
        f"{document['rounds']}. `~` marks an estimate, from what had arrived when a contender was stopped after",
        f"{LIMIT_BY_FILE_S:.0f} s.",
        "",
        "What is aimed at: 60 % of the link at 100 ms and 1 Gbit/s and three times one tar stream there, 90 % at 20 ms",
        "and 100 Mbit/s, and nowhere slower than one stream. " + reached(document),
        "pennypod and rsync compare what arrived with what was sent; the others do not.",
        "",
        "![share of the link by contender](data.svg)",
        "",
    ]
    names = list(dict.fromkeys(name for row in document["links"] for name in row["results"]))
    heads = [f"{row['rtt_ms']} ms, {row['mbit']} Mbit/s" for row in document["links"]]
    lines += [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    measured = [f"{row['measured_mbit']} Mbit/s, load {row['load']}" for row in document["links"]]
    lines.append(f"| raw TCP | {' | '.join(measured)} |")
    for name in names:
        cells = [_cell(row["results"].get(name)) for row in document["links"]]
        lines.append(f"| {name.replace('|', chr(92) + '|')} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def reached(document: Row) -> str:
    """What this measurement says about the aims."""
    said = []
    for row in document["links"]:
        seconds = {name: result["seconds"] for name, result in row["results"].items()}
        times = seconds["tar | ssh tar"] / seconds["pennypod"]
        share = row["results"]["pennypod"]["share_of_link"]
        said.append(f"{share:.0%} and {times:.1f} times at {row['rtt_ms']} ms, {row['mbit']} Mbit/s")
    return f"Reached here, as share of the link and as speed over one tar stream: {'; '.join(said)}."


def _cell(result: Row | None) -> str:
    if result is None:
        return "not installed"
    about = "" if result["done"] == 1 else "~"
    streams = f", {result['streams']} streams" if result.get("streams", 1) > 1 else ""
    cpu = f", {result['cpu_s']:.1f} CPU s" if "cpu_s" in result else ""
    return f"{about}{result['seconds']:.1f} s ({result['share_of_link']:.0%}{cpu}{streams})"


def picture(document: Row) -> str:
    """For each link a bar by contender: the share of the link's own limit."""
    groups = {}
    for row in document["links"]:
        title = f"{row['rtt_ms']} ms, {row['mbit']} Mbit/s: share of raw TCP's {row['measured_mbit']} Mbit/s"
        groups[title] = [
            Bar(
                name,
                result["share_of_link"],
                f"{result['share_of_link']:.0%}, {'' if result['done'] == 1 else '~'}{result['seconds']:.1f} s",
                OURS if name == "pennypod" else THEIRS,
            )
            for name, result in row["results"].items()
        ]
    return bars("Share of the link that each way to send 1,805 files reaches", groups)


def publish(document: Row) -> None:
    DOCS.mkdir(exist_ok=True)
    texts: dict[str, Callable[[], str]] = {
        "data.json": lambda: json.dumps(document, indent=2) + "\n",
        "data.md": lambda: page(document),
        "data.svg": lambda: picture(document),
    }
    document["links"].sort(key=lambda row: (row["mbit"], row["rtt_ms"]))
    for name, text in texts.items():
        (DOCS / name).write_text(text(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default=",".join(LINKS), help="RTT in ms x Mbit/s, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--publish", action="store_true", help="write docs/bench as well")
    options = parser.parse_args()
    # In memory where there is such a place: the disk's own moods are not what is compared.
    memory = Path("/dev/shm")
    keep = publish if options.publish else lambda _document: None
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="pp-") as base:
        document = measure(Path(base), options.links.split(","), options.rounds, sys.executable, keep)
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
