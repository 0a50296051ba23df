"""Removes from a rented pod what must not be in an image of it. Standalone: standard library only, Python 3.8 or newer.

    seal.py HOME    our folder there; tells as one line of JSON what could not be removed

Keys, logins, histories, caches and logs go, our folder but for base weights, and what the provider has written for this
pod only. Who is logged in stays so; nobody else gets in.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

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


def main(home: str) -> int:
    print(json.dumps({"left": seal(home)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
