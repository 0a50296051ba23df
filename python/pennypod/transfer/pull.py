"""Files that the pod fetches by itself, from URLs that hold for a while: one conversation with pull_data.py there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pennypod.errors import TransferError
from pennypod.ssh import Ssh, harmless
from pennypod.transfer.session import STALL_S, LineBrokenError, Meter, Progress, Session, lost

SCRIPT = Path(__file__).parent.parent / "onpod" / "pull_data.py"
MARK = "pennypod-pull-1"
_TRIES = 3


@dataclass(frozen=True, slots=True)
class PullFile:
    """A file as it must arrive; `mtime` in Unix seconds."""

    path: str
    size: int
    sha256: str
    executable: bool
    mtime: int

    def as_row(self) -> list[Any]:
        return [self.path, self.size, self.sha256, self.executable, self.mtime]


@dataclass(frozen=True, slots=True)
class PullPack:
    """A tar file of `bytes` bytes at `url`, and the files of it that are wanted."""

    name: str
    url: str = field(repr=False)  # whoever has it may fetch
    bytes: int
    files: tuple[PullFile, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What became of it, by the pod's word: `files` came with `bytes` bytes of content, `there` were there before,
    `left` did not come. `reached` is whether the store answered; `why` says what was wrong first."""

    files: int
    bytes: int
    there: int
    left: int
    reached: bool
    why: str
    damaged: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def pull(
    ssh: Ssh,
    pod_home: str,
    name: str,
    packs: Sequence[PullPack],
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stall_s: float = STALL_S,
) -> Pulled:
    """Have the pod fetch the files into `pod_home`/`name`. What does not come is no error: see `Pulled.left`.

    Raises SshError when the line breaks again and again, TransferError when the program cannot be run there.
    """
    order = {
        "home": pod_home,
        "name": name,
        "packs": [
            {"name": pack.name, "url": pack.url, "bytes": pack.bytes, "files": [file.as_row() for file in pack.files]}
            for pack in packs
        ],
    }
    files = [file for pack in packs for file in pack.files]
    meter = Meter(on_progress, sum(file.size for file in files), len(files))
    for strike in range(1, _TRIES + 1):
        try:
            with Session(ssh, "pull", stall_s=stall_s, script=SCRIPT, mark=MARK) as session:
                return _converse(session, order, meter)
        except LineBrokenError as exc:
            if strike == _TRIES:
                raise lost(ssh, "the pod fetched its data", strike, exc) from exc
        meter.bytes_done = 0
    raise AssertionError("unreachable")


def _converse(session: Session, order: dict[str, Any], meter: Meter) -> Pulled:
    session.begin(order)
    while True:
        answer = session.message()
        if "pulled" in answer:
            meter.add(max(0, int(answer["pulled"]) - meter.bytes_done))
            continue
        try:
            return _as_pulled(answer, {pack["name"] for pack in order["packs"]})
        except (KeyError, TypeError, ValueError) as exc:
            raise TransferError("the pod's answer is garbled: something else writes to the same output") from exc


def _as_pulled(answer: dict[str, Any], names: set[str]) -> Pulled:
    """Only packs that were asked for can be damaged: what we do about it is not for a pod to choose."""
    return Pulled(
        files=int(answer["files"]),
        bytes=int(answer["bytes"]),
        there=int(answer["there"]),
        left=int(answer["left"]),
        reached=bool(answer["reached"]),
        why=harmless(str(answer["why"])),
        damaged=tuple(name for name in answer["damaged"] if name in names),
        gone=tuple(name for name in answer["gone"] if name in names),
    )
