"""Repeatable chance: the same seed and the same question give the same answer, in any order. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def draw(seed: int, *question: object) -> float:
    """A number in [0, 1) that depends on nothing but the arguments."""
    text = "\x1f".join(str(part) for part in (seed, *question))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def between(low: float, high: float, seed: int, *question: object) -> float:
    return low + (high - low) * draw(seed, *question)


def pick(items: Sequence[T], seed: int, *question: object) -> T:
    return items[int(draw(seed, *question) * len(items))]


def text(alphabet: str, length: int, seed: int, *question: object) -> str:
    return "".join(pick(alphabet, seed, *question, index) for index in range(length))
