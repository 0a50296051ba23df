"""Tar headers in GNU format, made by hand: tarfile needs several times as long per file, and small files are many."""

from __future__ import annotations

BLOCK = 512
END = bytes(2 * BLOCK)
_MAX_OCTAL_SIZE = 8**11
_LONG_LINK = b"././@LongLink"


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
    fields = b"".join(
        (
            name.ljust(100, b"\0"),
            b"%07o\0%07o\0%07o\0" % (mode, 0, 0),
            size_field,
            b"%011o\0" % min(max(mtime, 0), _MAX_OCTAL_SIZE - 1),
            b"        ",
            kind,
            bytes(100),
            b"ustar  \0",
            b"root".ljust(32, b"\0"),
            b"root".ljust(32, b"\0"),
        )
    ).ljust(BLOCK, b"\0")
    return fields[:148] + b"%06o\0 " % sum(fields) + fields[156:]
