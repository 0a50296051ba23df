"""What a pod runs at its start, before anybody can log in: shell text made of small parts. Floor 1; no I/O.

A provider takes one start command in its create call (Vast `onstart`, RunPod `args`, a local container's command). Each
part here is a few lines of POSIX shell that do one thing, may run again at every start of the container, never end the
script and never wait; the provider's own file says which parts it needs and in which order.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

# Images keep python3 in places that neither a non-interactive login nor a start command searches.
MORE_PATH = "/usr/local/bin:/usr/bin:/bin:/opt/conda/bin:/venv/main/bin:/opt/venv/bin"


def script(parts: Iterable[str]) -> str:
    """The parts, one after another."""
    return "\n".join(part for part in parts if part)


def words(*argv: str) -> str:
    """An argument list as the one line of text that a provider splits again like a shell."""
    return shlex.join(argv)


def no_auto_tmux() -> str:
    """Vast opens a tmux at every login, which no program can work through, unless this file is there."""
    return "touch ~/.no_auto_tmux"


def let_in(public_key: str) -> str:
    """The run's key may log in from the first second."""
    return script(
        [
            f"k={shlex.quote(public_key.strip())} f=~/.ssh/authorized_keys",
            "mkdir -p ~/.ssh && chmod 700 ~/.ssh",
            'grep -qxF "$k" $f 2>/dev/null || printf \'%s\\n\' "$k" >> $f',
            "chmod 600 $f",
        ]
    )


def environment(env: Mapping[str, str]) -> str:
    """The pod's variables for every login: sshd gives its sessions a fresh environment."""
    lines = (shlex.quote(f'{name}="{value}"') for name, value in sorted(env.items()))
    return script(f"printf '%s\\n' {line} >> /etc/environment" for line in lines)
