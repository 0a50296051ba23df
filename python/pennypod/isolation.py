"""What a run's pod may talk to, put in force on the pod in one round trip. Floor 2: SSH and the run's own folder.

The rules are made on the pod (`onpod/isolate.py`), which knows its name servers, its package hosts and where its fuse
ends it. From here come the addresses that it cannot know: the object store's and the callback's.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pennypod.callbacks import read_access
from pennypod.errors import InputError, StoreError
from pennypod.settings import Settings
from pennypod.ssh import Ssh, harmless
from pennypod.store import load_config
from pennypod.store.bucket import Bucket
from pennypod.weights import parse_answer

SCRIPT = Path(__file__).parent / "onpod" / "isolate.py"
INSTALL_S = 120
_LIMIT_S = 420.0
_FOR_EVER_S = 30 * 24 * 3600.0  # a run without a deadline that anybody knows
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_URL = re.compile(r"https?://[^\s'\"]+")

Target = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Isolation:
    """Whether the pod is held to `hosts`, and if not, why. `phase` is "setup", with the package hosts, or "closed"."""

    enforced: bool
    phase: str
    reason: str
    hosts: tuple[str, ...]
    changed: bool = False

    def as_document(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["changed"]
        return {**fields, "hosts": list(self.hosts)}


def allowed(
    settings: Settings, environ: Mapping[str, str], run: str, hosts: Sequence[str], *, store: bool
) -> list[Target]:
    """What the pod of a run may talk to all the time. Raises InputError for what is no host."""
    found = [parse_host(text) for text in hosts]
    access = read_access(settings.run_dir(run))
    if access is not None and access.url:
        found.append(_of_url(access.url))
    if store:
        # Signed here, so that the host is the one that the pod's URLs will have; nothing is asked of the store. Where
        # there is none, whoever wants to use it says so.
        with contextlib.suppress(StoreError):
            found.append(_of_url(Bucket(load_config(environ, settings.home)).get_url("x", 60)))
    return list(dict.fromkeys(found))


def parse_host(text: str) -> Target:
    """NAME, NAME:PORT or the address of a page; 443 where no port is given."""
    if _URL.fullmatch(text):
        return _of_url(text)
    found = _HOST.fullmatch(text.strip())
    port = int(found[2] or 443) if found else 0
    if found is None or not 0 < port < 65536:
        raise InputError(f"{text!r} is no host that a pod could talk to: write NAME or NAME:PORT")
    return found[1].strip("[]"), port


def urls_in(texts: Sequence[str]) -> list[str]:
    """The web addresses in some texts, such as arguments of pip."""
    return [url for text in texts for url in _URL.findall(text)]


def isolate(
    ssh: Ssh, phase: str, allow: Sequence[Target], setup: Sequence[Target], deadline: float | None, now: float
) -> Isolation:
    """Put the rules of a phase in force. Raises SshError when the pod does not answer; one that cannot is no error."""
    order = {
        "phase": phase,
        "allow": [list(target) for target in allow],
        "setup": [list(target) for target in setup],
        "until": now + _FOR_EVER_S if deadline is None else deadline,
        "install": INSTALL_S,
    }
    done = ssh.run_script(SCRIPT, ["apply"], _LIMIT_S, stdin=json.dumps(order).encode() + b"\n")
    answer = parse_answer(done.stdout) or {"reason": f"the pod gave no answer (exit status {done.rc})"}
    enforced = answer.get("enforced") is True
    hosts = answer.get("hosts")
    return Isolation(
        enforced=enforced,
        phase=phase,
        reason="" if enforced else harmless(str(answer.get("reason") or "no reason given")),
        hosts=tuple(harmless(str(host)) for host in hosts) if enforced and isinstance(hosts, list) else (),
        changed=bool(answer.get("changed")),
    )


def _of_url(url: str) -> Target:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
