#!/usr/bin/env python3
"""A thousand pods in the inventory beside the vendor's own client listing them, and the start of each command.

    make bench-commands                    JSON on stdout, progress on stderr
    make bench-commands ARGS='--publish'   into docs/bench as well: JSON, a page, a picture

The pods are the simulator's, without containers, at Vast.ai: there the vendor has a client of its own, `vastai`, which
is installed into an environment of its own when a package index is at hand, else left out. Each figure is the median of
its rounds, which are interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
from charts import OURS, THEIRS, Bar, bars
from crowd import COUNT, crowded, environment
from pennypod.cli import main as pennypod_command
from simulated import KEYS
from vendor_clients import PINS, VendorClients
from vendor_clients import environment as vendor_environment
from workspace import BIN, REPOSITORY

DOCS = REPOSITORY / "docs" / "bench"
ROUNDS, LISTING_ROUNDS = 5, 1
_LIMIT_S = 120

Row = dict[str, Any]


def timed(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Seconds of a command that must succeed."""
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    took = time.monotonic() - started
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    return took


def starts(folder: Path) -> dict[str, float]:
    """Seconds of each command, where there is nothing to tell of: what is left is its start."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("VAST_", "RUNPOD_", "PENNYPOD_"))}
    env = bare | {"PENNYPOD_HOME": str(folder / "home"), "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")}
    pennypod = str(BIN / "pennypod")
    commands = {"pennypod --help": [pennypod, "--help"]}
    commands |= {f"pennypod {name} --help": [pennypod, name, "--help"] for name in sorted(pennypod_command.commands)}
    commands |= {"pennypod ledger": [pennypod, "ledger"], "pennypod images": [pennypod, "images"]}
    commands |= {"pennypod sweep --dry-run": [pennypod, "sweep", "--dry-run"]}
    commands |= {"ansible-inventory --graph": [str(BIN / "ansible-inventory"), "--graph"]}
    commands |= {"ansible-playbook --version": [str(BIN / "ansible-playbook"), "--version"]}
    for command in commands.values():
        timed(command, env)  # the first use compiles, and finds the container engine
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            found[name].append(timed(command, env))
    return {name: round(median(seconds), 3) for name, seconds in found.items()}


def listing(folder: Path) -> Row:
    """A thousand pods, by our inventory and by the vendor's client, on the same simulator."""
    with crowded(folder, "vast") as sim:
        ours = environment(sim, "vast", folder / "home")
        commands = {
            "ansible-inventory --list": ([str(BIN / "ansible-inventory"), "-i", "pods.pennypod.yml", "--list"], ours),
            "ansible-inventory --graph": ([str(BIN / "ansible-inventory"), "-i", "pods.pennypod.yml", "--graph"], ours),
        }
        client = vendor_client(folder, sim.url)
        if client is not None:
            words = [str(client.folder / "vastai"), "show", "instances", "--raw"]
            commands["vastai show instances"] = (words, client.env)
        found: dict[str, list[float]] = {name: [] for name in commands}
        calls: dict[str, int] = {}
        for number in range(LISTING_ROUNDS):
            for name, (command, env) in commands.items():
                before = len(sim.get("requests")["requests"])
                found[name].append(timed(command, env))
                calls[name] = len(sim.get("requests")["requests"]) - before
                say(f"round {number + 1}: {name} takes {found[name][-1]:.2f} s and {calls[name]} calls")
    return {name: {"seconds": round(median(all_), 3), "calls": calls[name]} for name, all_ in found.items()}


def vendor_client(folder: Path, url: str) -> VendorClients | None:
    """None where it cannot be installed."""
    try:
        return VendorClients(vendor_environment(), folder, url, KEYS["vast"])
    except pytest.skip.Exception as exc:
        say(str(exc))
        return None


def measure() -> Row:
    with tempfile.TemporaryDirectory(prefix="pennypod-bench-") as scratch:
        load = round(os.getloadavg()[0], 1)
        folder = Path(scratch)
        document: Row = {
            "measured": time.strftime("%Y-%m-%d", time.gmtime()),
            "cores": os.cpu_count(),
            "load": load,
            "client": PINS[0],
            "pods": COUNT,
            "starts": starts(folder),
            "listing": listing(folder),
        }
    return document


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the page and the picture ----------------------------------------------------------------------------------------


def page(document: Row) -> str:
    lines = [
        "# Commands: their start, and a thousand pods",
        "",
        "<!-- written by `make bench-commands ARGS='--publish'` from commands.json: do not edit -->",
        "",
        f"Measured on {document['measured']} on {document['cores']} CPUs at a load of {document['load']}.",
        "Medians, in seconds.",
        "",
        "![seconds by command](commands.svg)",
        "",
        f"## {document['pods']:,} pods at a simulated Vast.ai",
        "",
        "The inventory shows what bills with price, age, cost and login, of every provider that is set up. At Vast.ai",
        "it asks for 25 rows a page and waits a second between two pages, the limit that the service enforces. The",
        f"vendor's client, {document['client']}, does not wait.",
        "",
        "| command | seconds | HTTP calls |",
        "| --- | ---: | ---: |",
        *(f"| `{name}` | {row['seconds']:.2f} | {row['calls']} |" for name, row in document["listing"].items()),
        "",
        "## The start of each command",
        "",
        "| command | seconds |",
        "| --- | ---: |",
        *(f"| `{name}` | {seconds:.2f} |" for name, seconds in document["starts"].items()),
        "",
    ]
    return "\n".join(lines)


def picture(document: Row) -> str:
    listed = {name: row["seconds"] for name, row in document["listing"].items()}
    groups = {
        f"{document['pods']:,} pods at a simulated Vast.ai": _bars(listed),
        "start of each command": _bars(document["starts"]),
    }
    return bars("Seconds of each command", groups)


def _bars(seconds: Mapping[str, float]) -> list[Bar]:
    longest = max(seconds.values())
    return [
        Bar(name, took / longest, f"{took:.2f} s", THEIRS if name.startswith("vastai") else OURS)
        for name, took in seconds.items()
    ]


def publish(document: Row) -> None:
    DOCS.mkdir(exist_ok=True)
    (DOCS / "commands.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (DOCS / "commands.md").write_text(page(document), encoding="utf-8")
    (DOCS / "commands.svg").write_text(picture(document), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--publish", action="store_true", help="write docs/bench as well")
    options = parser.parse_args()
    document = measure()
    if options.publish:
        publish(document)
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
