#!/usr/bin/env python3
"""What pennypod costs in seconds, beside what people would use instead, in one run on one machine.

    make bench                        JSON on stdout, progress on stderr
    make bench ARGS='--publish'       the pages of docs/bench as well

The whole loop from a golden and from a stock image beside a plain shell script (loop_bench.py), the inventory of a
thousand pods beside the vendor's own client, the start of each command (commands_bench.py), and `pennypod serve` beside
`webhook` (orchestrator_bench.py). The data path has a target of its own, `make bench-data`, since it takes ten minutes.
Machines are noisy, so read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import commands_bench
import loop_bench
import orchestrator_bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--publish", action="store_true", help="write docs/bench as well")
    publish = parser.parse_args().publish
    result: dict[str, Any] = {"cores": os.cpu_count(), "serve": orchestrator_bench.measure()}
    result["commands"] = commands_bench.measure()
    result["loop"] = loop_bench.measure({"golden": 5, "stock": 3})
    if publish:
        commands_bench.publish(result["commands"])
        loop_bench.publish(result["loop"])
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
