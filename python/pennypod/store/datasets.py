"""Data sets in the bucket, named by their content: what is there already is not sent again. Reads the data, no more.

The files are put into packs, plain tar files, since a pod would fetch a hundred thousand small objects one by one. A
pack is named by the paths and hashes of the files in it, a data set by its packs. So a data set that has not changed
costs one question, and one that has grown sends the packs that are new.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pennypod.errors import InputError, SourceChangedError
from pennypod.store.bucket import Bucket
from pennypod.store.layout import dataset_key, pack_key

PACK_BYTES = 64_000_000
_CHUNK = 1 << 20
_IN_MEMORY = 16_000_000


@dataclass(frozen=True, slots=True)
class DataFile:
    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Pack:
    name: str
    files: tuple[DataFile, ...]


@dataclass(frozen=True, slots=True)
class DatasetSent:
    """`name` is the data set's hash; `bytes` and `packs` count what was uploaded by this call."""

    name: str
    files: int
    packs: int
    bytes: int


def keep_dataset(bucket: Bucket, root: Path) -> DatasetSent:
    """Make sure that the bucket has the data set. Raises InputError for a folder without files, SourceChangedError when
    it is written to meanwhile, StoreError."""
    files = [hashed(root, path) for path in _paths(root)]
    if not files:
        raise InputError(f"{root} has no files")
    return keep_packs(bucket, root, into_packs(files))


def keep_packs(
    bucket: Bucket, root: Path, packs: Sequence[Pack], on_pack: Callable[[int], None] = lambda _bytes: None
) -> DatasetSent:
    """The same for files that are hashed already. `on_pack` is called after each pack, with what was uploaded by then,
    and may raise to stop. Raises SourceChangedError, StoreError."""
    name, files = dataset_name(packs), sum(len(pack.files) for pack in packs)
    if is_kept(bucket, name):
        return DatasetSent(name, files, 0, 0)
    sent, count = 0, 0
    for pack in packs:
        # The length tells a pack from what is left of an upload that was cut off, where a store keeps such.
        if bucket.size(pack_key(pack.name)) != pack_bytes(pack):
            with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
                write_pack(root, pack, file)
                sent += file.tell()
                file.seek(0)
                bucket.put_stream(pack_key(pack.name), file)
            count += 1
        on_pack(sent)
    listing = {
        "version": 1,
        "packs": [
            {"name": pack.name, "files": [[file.path, file.bytes, file.sha256] for file in pack.files]}
            for pack in packs
        ],
    }
    bucket.put(dataset_key(name), json.dumps(listing, separators=(",", ":")).encode())
    return DatasetSent(name, files, count, sent)


def dataset_name(packs: Sequence[Pack]) -> str:
    return digest([pack.name for pack in packs])


def is_kept(bucket: Bucket, name: str) -> bool:
    """Whether the bucket has all of the data set, by its marker."""
    return bucket.size(dataset_key(name)) is not None


def forget_packs(bucket: Bucket, dataset: str, packs: Iterable[str]) -> None:
    """Packs that were found missing or damaged: the next `keep_packs` puts them there again. The marker goes first."""
    bucket.delete(dataset_key(dataset))
    for name in packs:
        bucket.delete(pack_key(name))


def into_packs(files: Iterable[DataFile], limit: int = PACK_BYTES) -> list[Pack]:
    """In order of their paths; a file that is larger than `limit` has a pack to itself."""
    packs: list[Pack] = []
    taken: list[DataFile] = []
    size = 0
    for file in sorted(files, key=lambda item: item.path):
        if taken and size + file.bytes > limit:
            packs.append(_pack(taken))
            taken, size = [], 0
        taken.append(file)
        size += file.bytes
    if taken:
        packs.append(_pack(taken))
    return packs


def write_pack(root: Path, pack: Pack, out: IO[bytes]) -> None:
    """The same bytes wherever and whenever it is made: no owner, no time."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in pack.files:
            info = _member(file)
            with (root / file.path).open("rb") as source:
                reader = _Reader(source)
                try:
                    tar.addfile(info, reader)  # read() is all that it calls
                except OSError as exc:  # tarfile's word for a file that has become shorter
                    raise _changed(root, file) from exc
                if reader.digest.hexdigest() != file.sha256 or source.read(1):
                    raise _changed(root, file)


def pack_bytes(pack: Pack) -> int:
    """How long the tar file of a pack is."""
    size = 2 * tarfile.BLOCKSIZE
    for file in pack.files:
        head = _member(file).tobuf(tarfile.PAX_FORMAT, tarfile.ENCODING, "surrogateescape")
        size += len(head) + _rounded(file.bytes, tarfile.BLOCKSIZE)
    return _rounded(size, tarfile.RECORDSIZE)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _member(file: DataFile) -> tarfile.TarInfo:
    info = tarfile.TarInfo(file.path)
    info.size, info.mode = file.bytes, 0o644
    return info


class _Reader:
    """Hashes what is read."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        return data


def _changed(root: Path, file: DataFile) -> SourceChangedError:
    return SourceChangedError(f"{root / file.path} was changed while it was being sent")


def digest(value: object) -> str:
    """A name for what can be written as JSON."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def _pack(files: Sequence[DataFile]) -> Pack:
    return Pack(digest([[file.path, file.bytes, file.sha256] for file in files]), tuple(files))


def _paths(root: Path) -> Iterator[str]:
    if not root.is_dir():
        raise InputError(f"{root} is no folder")
    top = root.resolve()
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = Path(folder) / name
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise InputError(f"{path} is a link that leaves the data set")
            try:
                is_file = stat.S_ISREG(path.stat().st_mode)
            except OSError as exc:
                raise InputError(f"{path} cannot be read: {exc.strerror}") from exc
            if is_file:
                yield str(PurePosixPath(path.relative_to(root)))


def hashed(root: Path, path: str) -> DataFile:
    """Raises InputError for a file that cannot be read, or whose name is not UTF-8."""
    found, count = hashlib.sha256(), 0
    try:
        path.encode()
        with (root / path).open("rb") as file:
            while data := file.read(_CHUNK):
                found.update(data)
                count += len(data)
    except UnicodeEncodeError as exc:
        raise InputError(f"{root} has a file whose name is not UTF-8: {path!r}") from exc
    except OSError as exc:
        raise InputError(f"{root / path} cannot be read: {exc.strerror}") from exc
    return DataFile(path, count, found.hexdigest())
