"""Files from a pod: resumed at the byte where the line broke, compared by hash, and put in place in one step.

On a long line a large file comes over several connections (`blocks`). What is here is always its beginning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from pennypod.clock import Clock, SystemClock
from pennypod.errors import DiskFullError, SourceChangedError, TransferError
from pennypod.transfer.blocks import Blocks
from pennypod.transfer.plan import megabytes, shown
from pennypod.transfer.session import MARK, SCRIPT, STALL_S, LineBrokenError, Meter, Progress, Session, lost
from pennypod.transfer.shares import FIRST_STREAMS, SHARED_FROM, streams_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pennypod.ssh import Ssh

CHUNK = 1 << 18
MAX_STRIKES = 5  # broken lines in a row without a single new byte
MAX_ROUNDS = 4  # readings of a file that keeps changing
BUSY = "busy"  # details["reason"] when another process is at it


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that is here, whole and verified. `bytes` is its size, whatever part of it was here before."""

    path: Path
    bytes: int
    sha256: str


class _ChangedError(Exception):
    """The file on the pod was not the same from the first byte to the last."""


def fetch(
    ssh: Ssh,
    remote_path: str,
    local_path: Path,
    *,
    size: int = 0,
    expected_sha256: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
    stall_s: float = STALL_S,
) -> Fetched:
    """Bring one file home. `local_path` appears in one step, after its hash was compared with the pod's. `size` is what
    it may have in bytes, where that is known: only then are more connections opened for a large one.

    Until then the bytes are in ``<local_path>.part``, where a later call goes on; it is removed when the disk here is
    full, so that the rest of the program can still write. Raises SourceChangedError when the file will not keep still
    or is not `expected_sha256`, DiskFullError, SshError when the line broke too often, TransferError for the rest.
    """
    meter = Meter(on_progress, 0, 1)
    fetched = _fetch(ssh, remote_path, local_path, size, expected_sha256, meter, clock or SystemClock(), stall_s)
    meter.files_done = 1
    meter.show()
    return fetched


def fetch_tree(
    ssh: Ssh,
    remote_dir: str,
    patterns: Sequence[str],
    local_dir: Path,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
    stall_s: float = STALL_S,
) -> list[Fetched]:
    """Bring every file under `remote_dir` that fits one of the glob `patterns` home, with its path below `local_dir`.

    No match is no error: the list is then empty.
    """
    found = [(path, size) for path, size in _list(ssh, remote_dir, patterns) if _stays_below(path)]
    meter = Meter(on_progress, sum(size for _, size in found), len(found))
    fetched = []
    for path, size in found:
        local, remote = local_dir / path, f"{remote_dir}/{path}"
        before = meter.bytes_done
        done = _fetch(ssh, remote, local, size, None, meter, clock or SystemClock(), stall_s, whole=False)
        fetched.append(done)
        meter.bytes_done = before + done.bytes
        meter.files_done += 1
    meter.show()
    return fetched


def _list(ssh: Ssh, remote_dir: str, patterns: Sequence[str]) -> list[tuple[str, int]]:
    wanted = json.dumps(list(patterns)).encode()
    done = ssh.run_script(SCRIPT, ["list", remote_dir], timeout_s=STALL_S, stdin=wanted)
    answers = done.stdout.rpartition(json.dumps({"mark": MARK}).encode())[2].strip()
    try:
        return [
            (os.fsdecode(path.encode("utf-8", "surrogateescape")), size) for path, size in json.loads(answers)["files"]
        ]
    except (ValueError, KeyError, TypeError) as exc:
        raise TransferError(f"the pod could not list {shown(remote_dir)}") from exc


def _stays_below(path: str) -> bool:
    """The names come from the pod, which is not trusted to choose where here a file is written."""
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts


def _fetch(
    ssh: Ssh,
    remote_path: str,
    local_path: Path,
    size: int,
    expected: str | None,
    meter: Meter,
    clock: Clock,
    stall_s: float,
    *,
    whole: bool = True,
) -> Fetched:
    with _put_in_place(local_path) as file:
        part = _part_of(local_path)
        one = _One(ssh, remote_path, size, part, file, meter, clock, stall_s, whole=whole)
        size, sha256 = one.run()
        if expected is not None and sha256 != expected:
            file.truncate(0)
            raise SourceChangedError(
                f"{one.name} on the pod is not the file that was asked for: its sha256 is {sha256}",
                path=one.name,
                sha256=sha256,
                expected_sha256=expected,
            )
    return Fetched(local_path, size, sha256)


def keep(data: bytes, local_path: Path) -> None:
    """Put a file whose bytes have come with an answer in place, as `fetch` does it.

    Raises DiskFullError and TransferError.
    """
    with _put_in_place(local_path) as file:
        file.truncate(0)
        _write(file, data)


def _part_of(local_path: Path) -> Path:
    return local_path.with_name(local_path.name + ".part")


@contextlib.contextmanager
def _put_in_place(local_path: Path) -> Iterator[BinaryIO]:
    """The .part file, to be made whole; what is in it then becomes `local_path` in one step."""
    part = _part_of(local_path)
    try:
        local_path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(part, local_path) as file:
            yield file
            os.fsync(file.fileno())
            part.replace(local_path)
        _sync_directory(local_path.parent)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(local_path, needed=None) from exc
        raise TransferError(f"cannot write {local_path}: {exc.strerror}", path=str(local_path)) from exc


@contextlib.contextmanager
def _locked(part: Path, local_path: Path) -> Iterator[BinaryIO]:
    """The .part file, ours alone. It goes when it is empty or the disk is full, else it stays for a later call."""
    with part.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            busy = f"another process is fetching {local_path} now"
            raise TransferError(busy, path=str(local_path), reason=BUSY) from exc
        try:
            yield file
        except BaseException as exc:
            full = isinstance(exc, DiskFullError) or (isinstance(exc, OSError) and exc.errno == errno.ENOSPC)
            if full or not os.fstat(file.fileno()).st_size:
                part.unlink(missing_ok=True)
            raise


class _One:
    """The bytes of one file, however many conversations they take."""

    def __init__(
        self,
        ssh: Ssh,
        remote_path: str,
        size: int,
        part: Path,
        file: BinaryIO,
        meter: Meter,
        clock: Clock,
        stall_s: float,
        *,
        whole: bool,
    ) -> None:
        self.ssh, self.remote_path, self.part, self.file = ssh, remote_path, part, file
        self.meter, self.clock, self.stall_s = meter, clock, stall_s
        self.expected_size = size
        self.most_streams = FIRST_STREAMS
        self.whole = whole  # the meter counts this file alone
        self.start = meter.bytes_done
        self.name = shown(remote_path)

    def run(self) -> tuple[int, str]:
        """Returns the size and the verified hash."""
        rounds = strikes = 0
        while True:
            had = self.size()
            self.meter.bytes_done = self.start
            try:
                return self.once()
            except LineBrokenError as exc:
                strikes = 1 if self.size() > had else strikes + 1
                self.most_streams = max(1, self.most_streams // 2)
                if strikes > MAX_STRIKES:
                    raise lost(self.ssh, f"fetching {self.name}", strikes, exc) from exc
                self.meter.show()  # a caller that wants to stop says so from its callback
                self.clock.sleep(min(0.5 * 2 ** (strikes - 1), 8.0))
            except _ChangedError as exc:
                rounds += 1
                self.file.truncate(0)
                if rounds >= MAX_ROUNDS:
                    why = f"{self.name} on the pod keeps changing while it is fetched"
                    raise SourceChangedError(why, path=self.name) from exc
                self.clock.sleep(0.2 * 2**rounds)

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def once(self) -> tuple[int, str]:
        """One conversation: append what is missing."""
        with (
            Session(self.ssh, "send", stall_s=self.stall_s) as session,  # logs in while the streams are counted
            Blocks(self.ssh, self.remote_path, self.streams(), stall_s=self.stall_s) as blocks,
        ):
            wire = os.fsencode(self.remote_path).decode("utf-8", "surrogateescape")
            session.begin({"files": [[wire, self.size()]], "apart": blocks.several})
            head = session.message()
            digest = self.begin(head)
            left = int(head["size"]) - int(head["offset"])
            blocks.begin(int(head["offset"]), int(head["size"]))
            free = shutil.disk_usage(self.part.parent).free
            if free < left:
                raise _no_room(self.part, needed=left)
            while left:
                data = blocks.read(self.meter.tick) if blocks.several else session.read(min(CHUNK, left))
                self.append(data)
                digest.update(data)
                left -= len(data)
                self.meter.add(len(data))
            tail = session.message()
        if not tail["same"] or tail["sha256"] != digest.hexdigest():
            raise _ChangedError
        return int(head["size"]), digest.hexdigest()

    def streams(self) -> int:
        """How many connections are worth while for what is missing."""
        missing = self.expected_size - self.size()
        if missing < SHARED_FROM or self.most_streams == 1:
            return 1
        return min(streams_for(self.ssh.round_trip_s() or 0.0, missing), self.most_streams)

    def begin(self, head: dict[str, Any]) -> hashlib._Hash:
        """Check that what is here is the beginning of what the pod has; the hash of it, to go on with."""
        offset = int(head["offset"])
        had = self.size()
        digest = hashlib.sha256()
        if offset:
            self.file.seek(0)
            for chunk in iter(lambda: self.file.read(CHUNK), b""):
                digest.update(chunk)
            if offset != had or digest.hexdigest() != head["prefix_sha256"]:
                raise _ChangedError
        elif had:
            self.file.truncate(0)  # longer than the pod's file, so of another time
        if self.whole:
            self.meter.bytes_total = int(head["size"])
        self.meter.bytes_done += offset
        return digest

    def append(self, data: bytes) -> None:
        _write(self.file, data)


def _write(file: BinaryIO, data: bytes) -> None:
    """All of it: an unbuffered file may take less at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _no_room(path: Path, needed: int | None) -> DiskFullError:
    free = shutil.disk_usage(path.parent).free
    return DiskFullError(
        f"the disk here is full: {megabytes(free)} free in {path.parent}"
        + (f", {megabytes(needed)} needed" if needed is not None else "")
        + "; make room, then fetch again",
        where="here",
        free_bytes=free,
        needed_bytes=needed,
    )


def _sync_directory(path: Path) -> None:
    """Make the new name survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
