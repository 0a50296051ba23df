"""Removes from a rented pod what must not be in an image of it. Standalone: standard library only, Python 3.8 or newer.

    seal.py RULES    a JSON object: home (our folder there), python (whose packages to tell)

First tells, as one line of JSON, what is installed. Then keys, logins, histories, caches and logs go, our folder but
for base weights, and what the provider has written for this pod only. Who is logged in stays so; nobody else gets in.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List

_DEBIAN = ("dpkg-query", "-W", "-f", "${Package} ${Version}\n")
_PYTHON = (
    "import importlib.metadata, json;"
    "print(json.dumps({d.metadata['Name']: d.version for d in importlib.metadata.distributions()}))"
)
_LIMIT_S = 120
# Patterns of what goes, whoever made it. Nothing in here is read by a pod that starts from the image.
_GONE = (
    *("/tmp/*", "/tmp/.*", "/var/tmp/*", "/var/log/*", "/var/spool/cron/*"),  # noqa: S108 - places on a pod
    *("/var/cache/apt/*.bin", "/var/cache/apt/archives/*.deb", "/var/lib/apt/lists/*"),
    *("/root/onstart.sh", "/.launch", "/etc/netrc", "/etc/ssh/ssh_host_*"),
)
_HOMES = ("/root", "/home/*")
_GONE_AT_HOME = (".ssh", ".cache", ".config", ".netrc", ".docker", ".aws", ".vast*", ".*_history", ".*hst")
_EMPTIED = ("/etc/machine-id",)
_VARIABLES = ("/etc/environment",)
_OF_A_POD = re.compile(r"^\s*(?:export\s+)?(?:CONTAINER_|VAST_|SSH_|PUBLIC_IP|JUPYTER_|OPEN_BUTTON|PENNYPOD_|DATA_DIR)")


def installed(python: str) -> Dict[str, Any]:
    """Packages by name with their versions: Debian's, and those of that Python."""
    debian = dict(line.split(" ", 1) for line in _said(_DEBIAN).splitlines() if " " in line)
    try:
        found = json.loads(_said((python, "-c", _PYTHON)))
    except ValueError:
        found = {}
    return {"debian": debian, "python": found}


def _said(argv: Any) -> str:
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def seal(home: str) -> List[str]:
    """Remove it; what could not be removed."""
    kept = os.path.join(home, "cache")
    ours = [path for path in glob.glob(os.path.join(glob.escape(home), "*")) if path != kept]
    ours += glob.glob(os.path.join(glob.escape(home), ".*"))
    left = []
    patterns = [*_GONE, *(os.path.join(place, name) for place in _HOMES for name in _GONE_AT_HOME)]
    for path in [*ours, *(path for pattern in patterns for path in glob.glob(pattern))]:
        if os.path.basename(path) in (".", "..") or os.path.ismount(path):
            continue
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except OSError as exc:
            left.append("%s (%s)" % (path, exc.strerror))
    for path in _EMPTIED:
        if os.path.isfile(path) and not os.path.ismount(path):
            with contextlib.suppress(OSError), open(path, "w"):
                pass
    for path in _VARIABLES:
        _without_variables(path)
    return left


def _without_variables(path: str) -> None:
    """Take out the lines that tell of one pod only."""
    with contextlib.suppress(OSError):
        with open(path) as file:
            lines = file.readlines()
        kept = [line for line in lines if not _OF_A_POD.match(line)]
        if kept != lines:
            with open(path, "w") as file:
                file.writelines(kept)


def main(rules: Dict[str, Any]) -> int:
    print(json.dumps(installed(rules["python"])), flush=True)
    left = seal(rules["home"])
    print(json.dumps({"left": left}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
