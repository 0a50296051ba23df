"""Whose pods a key sees: a mark of the account that an attempt was made with. Floor 0; no I/O.

Another account's listing is no evidence of anything: a pod is missing there from its first second on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Account:
    """`key` is a mark of the key itself, `holder` the provider's own id of the account, None where it is not told.

    Two keys may be of one account, so only `holder` tells accounts apart; a key that is the same is proof enough.
    """

    key: str
    holder: str | None = None

    def __str__(self) -> str:
        return self.holder or f"key {self.key}"

    def is_same(self, other: Account) -> bool | None:
        """None when it cannot be told: the keys differ, and not both accounts are known."""
        if self.key == other.key:
            return True
        return None if self.holder is None or other.holder is None else self.holder == other.holder

    def as_document(self) -> dict[str, str | None]:
        return {"key": self.key, "holder": self.holder}


def account_from(document: Mapping[str, Any]) -> Account:
    """From `Account.as_document`."""
    return Account(document["key"], document["holder"])


def mark(*parts: str) -> str:
    """A short one-way mark of what must be written nowhere. A key has far too many bits to be guessed from it."""
    return hashlib.sha256("\0".join(("pennypod account", *parts)).encode()).hexdigest()[:16]
