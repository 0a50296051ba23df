"""Files of one tree into one tar stream, hashed on the way; a tree may be shared out among streams."""

from __future__ import annotations

import hashlib
import os
import stat
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pennypod.errors import InputError, SourceChangedError
from pennypod.transfer import tar
from pennypod.transfer.plan import Part, SourceFile, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pennypod.transfer.session import Meter, Session

CHUNK = 1 << 18
LARGE_BYTES = 8 << 20  # a file of this size goes before the small ones, so that no stream is left alone with it

Begun = tuple[int, "hashlib._Hash"]  # noqa: SLF001 - the name typeshed has for a digest


class Outgoing:
    """The files of a part that are to be sent. Streams in several threads take them one by one, as each has room."""

    def __init__(self, part: Part, numbers: Sequence[int], begun: dict[int, Begun]) -> None:
        """`begun` has what the pod has of a file's beginning: its length, and its digest to go on with."""
        self.part, self.numbers, self.begun = part, tuple(numbers), begun
        self._left = deque(sorted(numbers, key=self._place))

    def _place(self, number: int) -> tuple[int, int]:
        size = self.part.files[number].size
        return (-size if size >= LARGE_BYTES else 0, number)

    def take(self) -> int | None:
        """The number of the next file, for the caller alone."""
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def size(self, number: int) -> int:
        """How many bytes of a file are to go."""
        return self.part.files[number].size - self.begun.get(number, (0,))[0]

    @property
    def bytes(self) -> int:
        return sum(map(self.size, self.numbers))

    def name(self, number: int) -> str:
        return f"{self.part.name}/{shown(self.part.files[number].path)}"


@dataclass(slots=True)
class Tally:
    """What one stream has sent: number and hash of each file, None for one that was not the same all the time."""

    sent: list[tuple[int, str | None]] = field(default_factory=list)
    bytes: int = 0


def stream_out(session: Session, todo: Outgoing, numbers: Iterable[int], meter: Meter, tally: Tally) -> None:
    """Send files, and the end of the stream. `numbers` may raise to stop."""
    out = TarStream(session, meter, compressed=todo.part.compressed)
    for number in numbers:
        offset, digest = todo.begun.get(number) or (0, hashlib.sha256())
        sha256 = send_file(out, todo.part, todo.part.files[number], offset, digest)
        tally.sent.append((number, sha256))
        if sha256 is not None:
            tally.bytes += todo.size(number)
        meter.add_file()
    out.put(tar.END)
    out.finish()


class TarStream:
    """Gathers small pieces into large writes, gzipped if so wished."""

    def __init__(self, session: Session, meter: Meter, *, compressed: bool) -> None:
        self._session, self._meter = session, meter
        self._zip = zlib.compressobj(6, wbits=31) if compressed else None
        self._pieces: list[bytes | memoryview] = []
        self._size = 0

    def put(self, piece: bytes | memoryview, counted: int = 0) -> None:
        """Take in a piece, of which `counted` bytes are content. A memoryview must not change before `flush`."""
        self._pieces.append(piece)
        self._size += len(piece)
        if counted:
            self._meter.add(counted)
        if self._size >= CHUNK:
            self.flush()

    def flush(self) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self._zip is not None:
            data = self._zip.compress(data)
        if data:
            self._session.write(data)

    def finish(self) -> None:
        self.flush()
        if self._zip is not None:
            self._session.write(self._zip.flush())


def send_file(out: TarStream, part: Part, file: SourceFile, offset: int, digest: hashlib._Hash) -> str | None:
    """Put one file, or what comes after `offset`, into the stream. `digest` is of what comes before.

    Returns the hash of the whole file, or None when it was not the same from the plan to the last byte.
    """
    name, mode, mtime = os.fsencode(file.path), 0o755 if file.executable else 0o644, file.mtime_ns // 1_000_000_000
    if offset:
        head = tar.header_of_rest(name, file.size - offset, mode, mtime, offset)
    else:
        head = tar.header(name, file.size, mode, mtime)
    if file.content is not None:
        out.put(head)
        out.put(file.content, file.size)
        out.put(tar.padding(file.size))
        return hashlib.sha256(file.content).hexdigest()
    handle = open_source(part, file)
    try:
        if not is_as_planned(os.fstat(handle), file):
            return None
        out.put(head)
        if offset:
            os.lseek(handle, offset, os.SEEK_SET)
        left = file.size - offset
        while left:
            data = os.read(handle, min(CHUNK, left))
            if not data:
                break
            digest.update(data)
            left -= len(data)
            out.put(data, len(data))
        for start in range(0, left, CHUNK):  # it shrank: the stream must keep to the size in the header
            out.put(bytes(min(CHUNK, left - start)))
        out.put(tar.padding(file.size - offset))
        return digest.hexdigest() if not left and is_as_planned(os.fstat(handle), file) else None
    except OSError as exc:
        raise unreadable(part, file, exc) from exc
    finally:
        os.close(handle)


def digest_of_beginning(part: Part, file: SourceFile, length: int) -> hashlib._Hash | None:
    """The digest of the first `length` bytes, or None when the file is not as planned any more."""
    if file.content is not None:
        return None  # contents made here are small: they go whole
    digest = hashlib.sha256()
    handle = open_source(part, file)
    try:
        while length and (data := os.read(handle, min(CHUNK, length))):
            digest.update(data)
            length -= len(data)
        return digest if not length and is_as_planned(os.fstat(handle), file) else None
    except OSError as exc:
        raise unreadable(part, file, exc) from exc
    finally:
        os.close(handle)


def open_source(part: Part, file: SourceFile) -> int:
    for patience_s in (0.05, 0.2, None):  # a program that replaces a file may leave a gap of an instant
        try:
            return os.open(part.source(file), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as exc:
            if patience_s is None:
                raise vanished(part, file) from exc
            time.sleep(patience_s)
        except OSError as exc:
            raise unreadable(part, file, exc) from exc
    raise AssertionError("unreachable")


def is_as_planned(info: os.stat_result, file: SourceFile) -> bool:
    return stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns, info.st_ino) == (
        file.size,
        file.mtime_ns,
        file.inode,
    )


def vanished(part: Part, file: SourceFile) -> SourceChangedError:
    path = shown(part.source(file))
    return SourceChangedError(f"{path} vanished while the {part.name} was sent: nothing may use it now", path=path)


def unreadable(part: Part, file: SourceFile, exc: OSError) -> InputError:
    path = shown(part.source(file))
    return InputError(f"cannot read {path}: {exc.strerror}", path=path)
