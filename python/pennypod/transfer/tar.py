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
    return _long(name) + _block(name[:99], size, mode, mtime, b"0")


def header_of_rest(name: bytes, size: int, mode: int, mtime: int, offset: int) -> bytes:
    """What comes before the last `size` bytes of a file of which `offset` are there already: a continued member, as
    GNU tar writes it at the start of a second volume."""
    block = bytearray(_block(name[:99], size, mode, mtime, b"M"))
    block[369:381] = _number(offset)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return (_long(name) if len(name) >= 100 else b"") + bytes(block)


def padding(size: int) -> bytes:
    """What comes after `size` bytes of content."""
    return bytes(-size % BLOCK)


def _long(name: bytes) -> bytes:
    long_name = name + b"\0"
    return _block(_LONG_LINK, len(long_name), 0o644, 0, b"L") + long_name + padding(len(long_name))


def _number(value: int) -> bytes:
    return b"%011o\0" % value if value < _MAX_OCTAL_SIZE else b"\x80" + value.to_bytes(11, "big")


def _block(name: bytes, size: int, mode: int, mtime: int, kind: bytes) -> bytes:
    front = b"%s%s%07o\0%s%s%011o\0" % (
        name,
        bytes(100 - len(name)),
        mode,
        _OWNER,
        _number(size),
        min(max(mtime, 0), _MAX_OCTAL_SIZE - 1),
    )
    checksum = sum(front) + _CHECKSUM_BLANK + kind[0] + _TAIL_SUM
    return b"%s%06o\0 %s%s" % (front, checksum, kind, _TAIL)
