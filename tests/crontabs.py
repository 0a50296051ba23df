"""A crontab of a test's own, and what cron does with it: be there, and run a line in next to no environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Keeps to crontab(1): -l prints or says that there is none, a file or - replaces it, -r removes it.
CRONTAB = """\
#!/bin/sh
case $1 in
-l) [ -f "{file}" ] && exec cat "{file}"; echo "no crontab for tester" >&2; exit 1 ;;
-r) rm -f "{file}" ;;
-) cat >"{file}.new" && mv "{file}.new" "{file}" ;;
*) cat "$1" >"{file}.new" && mv "{file}.new" "{file}" ;;
esac
"""


class Crontab:
    """`path` comes first in PATH of whatever is to use it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "cron-bin"
        self.path.mkdir()
        self.file = folder / "crontab"
        program = self.path / "crontab"
        program.write_text(CRONTAB.format(file=self.file))
        program.chmod(0o755)

    def lines(self) -> list[str]:
        """What cron would run."""
        if not self.file.exists():
            return []
        return [line for line in self.file.read_text().splitlines() if line.strip() and not line.startswith("#")]

    def commands(self) -> list[str]:
        return [line.split(maxsplit=5)[5].replace(r"\\%", "%") for line in self.lines()]

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """One turn of one line, as cron gives it."""
        env = {
            "HOME": os.environ["HOME"],
            "LOGNAME": "tester",
            "SHELL": "/bin/sh",
            "PATH": f"{self.path}:/usr/bin:/bin",
        }
        return subprocess.Popen(
            ["/bin/sh", "-c", command], env=env, cwd=env["HOME"], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def turn(self) -> list[int]:
        """One turn of every line; their exit codes."""
        return [self.start(command).wait(timeout=280) for command in self.commands()]


@contextmanager
def cron_daemon(folder: Path) -> Iterator[None]:
    """A process that looks like a cron daemon in the process table."""
    program = folder / "cron"
    shutil.copy("/bin/sleep", program)
    process = subprocess.Popen([str(program), "1000"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
