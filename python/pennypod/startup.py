"""What a pod runs at its start, before anybody can log in: shell text made of small parts. Floor 1; no I/O.

A provider takes one start command in its create call (Vast `onstart`, RunPod `args`, a local container's command). Each
part here is a few lines of POSIX shell that do one thing, may run again at every start of the container, never end the
script and never wait; the provider's own file says which parts it needs and in which order.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

# Images keep python3 in places that neither a non-interactive login nor a start command searches.
MORE_PATH = "/usr/local/bin:/usr/bin:/bin:/opt/conda/bin:/venv/main/bin:/opt/venv/bin"

_HOST_KEYS_MARK = "pennypod-host-keys"
_HOST_KEYS_TRIES = 300  # two seconds apart
_HOST_KEY = re.compile(r"(?:ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/]{40,}={0,2}")


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


def tell_host_keys(lease_name: str) -> str:
    """Print the pod's public host keys into the container's log, which only the provider's own API shows.

    In the background, for the first minutes, and anew whenever they change: sshd may come, and make its keys, later.
    The lease's name, with the nonce in it, tells these lines from those of any other pod; `host_keys_told` reads
    them. Process 1 has the log as its output, whatever the output of a start command is.
    """
    mark = shlex.quote(f"{_HOST_KEYS_MARK} {lease_name}")
    return script(  # as short as can be: Vast takes 4,000 characters of everything
        [
            f"(m={mark};s=;n={_HOST_KEYS_TRIES};while [ $n -gt 0 ];do",
            "k=$(cut -d' ' -f1,2 /etc/ssh/ssh_host_*_key.pub 2>/dev/null||:)",
            '[ "$k" = "$s" ]||(echo $m begin;echo "$k"|sed "s|^|$m |";echo $m end)>/proc/1/fd/1',
            "s=$k;n=$((n-1));sleep 2;done)>/dev/null 2>&1&",
        ]
    )


def host_keys_told(log: str, lease_name: str) -> list[str]:
    """The host keys in the last whole block that `tell_host_keys` has printed; empty while there is none."""
    told: list[str] = []
    block: list[str] = []
    for line in log.splitlines():
        _, found, words = line.partition(f"{_HOST_KEYS_MARK} {lease_name} ")
        words = words.strip()
        if not found:
            continue
        if words == "begin":
            block, told = [], []
        elif words == "end":
            told = block
        elif _HOST_KEY.fullmatch(words):
            block.append(words)
    return told
