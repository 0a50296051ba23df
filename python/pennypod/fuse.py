"""Ring 3 from this side: how the fuse gets on a pod, how it is asked and how its lease is renewed. Floor 1; no I/O but
reading the fuse's own source.

The fuse itself is `onpod/fuse.py`. It is packed into the create call's start command, so it needs nobody to log in; it
holds only the key that the provider puts into the pod, which can end that pod and nothing else.
"""

from __future__ import annotations

import ast
import base64
import functools
import json
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pennypod.errors import SshError
from pennypod.model.offer import FuseTerms
from pennypod.ssh import Ssh
from pennypod.startup import MORE_PATH

_SOURCE = Path(__file__).parent / "onpod" / "fuse.py"
_STATE = "/dev/shm/pennypod-fuse"  # noqa: S108 - on the pod; the fuse names both of them too
_LEASE = "/dev/shm/pennypod-lease"  # noqa: S108
_NAME = "pennypod-fuse"
AFTER_DEADLINE_S = 10
"""How long a fuse leaves the end of a pod to the guard, in seconds of billing."""
_ASK_S = 15  # a provider may run its start command a little after sshd


@dataclass(frozen=True, slots=True)
class Ending:
    """How a pod of one provider ends itself: `id_variable` and `key_variable` are what the provider puts into the pod.

    `ends`, the best first, are [method, path, body] of its API with @ID for the pod's id. Where there is no API,
    ["KILL", "1", None] ends the container's first process.
    """

    ends: Sequence[Sequence[Any]]
    url: str = ""
    url_variable: str = ""
    id_variable: str = ""
    key_variable: str = ""


@dataclass(frozen=True, slots=True)
class FuseState:
    """What a pod said about its fuse: whether it runs, has the key it needs (None: no word) and takes renewals.

    `said` are its last words.
    """

    armed: bool
    has_key: bool | None = None
    renewable: bool = False
    said: tuple[str, ...] = ()

    def as_document(self) -> dict[str, Any]:
        return {"armed": self.armed, "has_key": self.has_key, "renewable": self.renewable, "said": list(self.said)}


def part(terms: FuseTerms, deadline: int, ending: Ending) -> str:
    """The part of a start command that starts the fuse, in one line of POSIX shell.

    A small shell keeps it: one that a job kills (`pkill -9 python`) is back within a second. Neither of the two listens
    to HUP, INT or TERM, or has `python` in the name of its process. The count begins with the keeper, so a fuse that
    comes back counts on.
    """
    settings = {
        "at": deadline + terms.after_s,
        "for": terms.seconds_left + terms.after_s,
        "lease": terms.lease_s,
        "url": [ending.url, ending.url_variable],
        "id": ending.id_variable,
        "key": ending.key_variable,
        "ends": [list(end) for end in ending.ends],
    }
    start = 'import os,zlib,base64 as b;exec(zlib.decompress(b.b85decode(os.environ["F"]),-15))'
    keep = f"read u x</proc/uptime;while :;do python3 -ISc {shlex.quote(start)} $u;sleep 1;done"
    env = {"F": packed(), "C": json.dumps(settings, separators=(",", ":")), "K": keep}
    given = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    run = f'sh -c \'trap "" HUP INT TERM;eval "$K"\' {_NAME}'
    return f'{given} PATH="$PATH:{MORE_PATH}" $(command -v setsid) {run} </dev/null >/dev/null 2>&1 &'


@functools.cache
def packed() -> str:
    """The fuse's program without what a machine does not read, compressed, in characters that need no shell quoting."""
    tree = _Bare().visit(ast.parse(_SOURCE.read_text(encoding="utf-8")))
    lines = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
    narrow = "\n".join(" " * ((len(line) - len(line.lstrip())) // 4) + line.lstrip() for line in lines)
    squeeze = zlib.compressobj(9, wbits=-15)
    return base64.b85encode(squeeze.compress(narrow.encode()) + squeeze.flush()).decode()


class _Bare(ast.NodeTransformer):
    """Takes docstrings, annotations and the imports that only they need out of a program."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        return ast.Module(_without_docstring(node.body), node.type_ignores)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        node.body = _without_docstring(node.body)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign:
        assert node.value is not None
        return ast.Assign([node.target], node.value)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        return None if node.module in ("typing", "__future__") else node


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    head = body[0]
    is_docstring = isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant)
    return body[1:] if is_docstring else body


# --- on a pod that lets us in -----------------------------------------------------------------------------------------


def ask(ssh: Ssh, wait_s: int = _ASK_S) -> FuseState:
    """Whether the fuse runs on a pod, which is waited for a little. Raises SshError when the pod does not answer."""
    look = f"grep -qsx {_NAME} /proc/[0-9]*/comm && [ -s {_STATE} ]"
    script = f"i=0;until {look};do [ $i -ge {wait_s} ]&&break;i=$((i+1));sleep 1;done;"
    script += f"grep -qsx {_NAME} /proc/[0-9]*/comm&&echo armed||echo none;cat {_STATE}"
    told = ssh.run(f"exec sh -c {shlex.quote(script)}", timeout_s=wait_s + 30).stdout.decode("utf-8", "replace")
    head, _, rest = told.partition("\n")
    return parse_state(head == "armed", rest)


def parse_state(armed: bool, text: str) -> FuseState:
    """The state from what the fuse wrote down; no word of it, or half of one, is no reason to doubt that it runs."""
    try:
        fields = json.loads(text)
        said = tuple(str(line) for line in fields["said"])
        return FuseState(armed, bool(fields["key"]), fields["lease_s"] > 0, said)
    except (ValueError, KeyError, TypeError):
        return FuseState(armed)


def renew(ssh: Ssh, seconds: float, timeout_s: float = 30.0) -> None:
    """Let the lease of the pod's fuse hold for `seconds` from now. Raises SshError when that could not be said."""
    # Written over in place: a full /dev/shm has room for what is there already.
    write = f"printf '%-15s\\n' $((${{u%.*}}+{int(seconds)})) 1<>{_LEASE}"
    script = f"[ -s {_LEASE} ]&&read u x</proc/uptime&&{write}"
    done = ssh.run(f"exec sh -c {shlex.quote(script)}", timeout_s=timeout_s)
    if done.rc != 0:
        raise SshError("the pod has no fuse whose lease could be renewed", rc=done.rc)
