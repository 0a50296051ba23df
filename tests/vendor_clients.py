"""The vendors' own clients, in an environment of their own: their dependencies are many and none of ours."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PINS = ("vastai==1.9.1", "runpod==1.11.0")
ROOT = Path(__file__).parents[1]
_LIMIT_S = 900
_NO_INDEX = re.compile(
    r"NewConnectionError|ConnectTimeout|Temporary failure in name resolution|Name or service not known|ProxyError"
    r"|Network is unreachable|Connection refused|Read timed out|Could not find a version|No matching distribution",
    re.IGNORECASE,
)


def environment() -> Path:
    """The bin folder of a virtual environment with both clients; made once, then kept under .cache/.

    Skips the test where no package index has them; any other failure to install is a failure.
    """
    digest = hashlib.sha256(repr((PINS, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = ROOT / ".cache" / f"vendor-clients-{digest}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "vendor-clients.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
            install = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *PINS]
            done = subprocess.run(install, capture_output=True, text=True, timeout=_LIMIT_S)
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                if _NO_INDEX.search(done.stderr):
                    last = done.stderr.strip().splitlines()[-1]
                    pytest.skip(f"no package index here has {' and '.join(PINS)}: {last}")
                raise AssertionError(done.stderr)
            (folder / "done").touch()
    return folder / "bin"


class VendorClients:
    """Runs them as a user would: by the documented variables, with a home of their own."""

    def __init__(self, bin_folder: Path, home: Path, url: str, key: str) -> None:
        self.folder = bin_folder
        self.home = home
        self.env = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "VAST_URL": url,
            "VAST_API_KEY": key,
            "RUNPOD_API_BASE_URL": url,
            "RUNPOD_API_KEY": key,
            "COLUMNS": "240",
            "NO_COLOR": "1",
        }

    def vastai(self, *args: Any, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.folder / "vastai"), *map(str, args)]
        return subprocess.run(argv, env=self.env | env, capture_output=True, text=True, timeout=120, input="")

    def python(self, text: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.folder / "python"), "-c", text]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=120)
