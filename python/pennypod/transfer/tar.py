"""Tar headers in GNU format, made by hand: tarfile needs several times as long per file, and small files are many."""

from __future__ import annotations

BLOCK = 512
END = bytes(2 * BLOCK)
_MAX_OCTAL_SIZE = 8**11
_LONG_LINK = b"././@LongLink"
_OWNER = b"0000000\0" * 2  # root, whoever made the file here
_TAIL = (bytes(100) + b"ustar  \0" + b"root".ljust(32, b"\0") * 2).ljust(BLOCK - 157, b"\0")
_TAIL_SUM = sum(_TAIL)
_CHECKSUM_BLANK = 8 * ord(" ")  # the checksum counts its own field as blanks


def header(name: bytes, size: int, mode: int, mtime: int) -> bytes:
    """What comes before a regular file's content. Names of any bytes and length, sizes of any number."""
    if len(name) < 100:
        return _block(name, size, mode, mtime, b"0")
    long_name = name + b"\0"
    return (
        _block(_LONG_LINK, len(long_name), 0o644, 0, b"L")
        + long_name
        + padding(len(long_name))
        + _block(name[:99], size, mode, mtime, b"0")
    )


def padding(size: int) -> bytes:
    """What comes after `size` bytes of content."""
    return bytes(-size % BLOCK)


def _block(name: bytes, size: int, mode: int, mtime: int, kind: bytes) -> bytes:
    size_field = b"%011o\0" % size if size < _MAX_OCTAL_SIZE else b"\x80" + size.to_bytes(11, "big")
    front = b"%s%s%07o\0%s%s%011o\0" % (
        name,
        bytes(100 - len(name)),
        mode,
        _OWNER,
        size_field,
        min(max(mtime, 0), _MAX_OCTAL_SIZE - 1),
    )
    checksum = sum(front) + _CHECKSUM_BLANK + kind[0] + _TAIL_SUM
    return b"%s%06o\0 %s%s" % (front, checksum, kind, _TAIL)
