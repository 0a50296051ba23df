"""Seals documents with this home's key, and tells whether a seal holds. The key's file is its one outside thing.

A seal is an ed25519 signature over the document's canonical JSON (keys sorted, no blanks, ASCII, numbers as Python
writes them), with the SHA-256 of that text and the public key beside it, so that it can be checked anywhere, offline.
The key is made at first use and never leaves the home.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from pennypod.errors import PennypodError
from pennypod.receipts.files import write_json

GENESIS = "0" * 64
"""What the first receipt of a ledger names as the one before it."""

KEY_FILE = "receipt-key"
_ALGORITHM = "ed25519"
_HEX = {"public_key": 64, "hash": 64, "signature": 128, "key_id": 16}


class ReceiptError(PennypodError):
    """A receipt could not be sealed or kept. The pod is gone all the same, but nobody could prove it later."""

    code = "receipt"


class Sealer:
    """Seals with the key of one home. `home` need not exist before the first seal."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @property
    def public_key(self) -> str | None:
        """This home's own public key in hex, None while there is none; makes nothing."""
        if not (self._home / KEY_FILE).exists():
            return None
        return self._key.public_key().public_bytes_raw().hex()

    def seal(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The document with its seal under "seal". Raises ReceiptError when the key cannot be read or made."""
        body = json.loads(_canonical({name: value for name, value in document.items() if name != "seal"}))
        public = self._key.public_key().public_bytes_raw().hex()
        seal = {"algorithm": _ALGORITHM, "key_id": key_id(public), "public_key": public}
        sealed = _canonical({**body, "seal": seal})
        seal["hash"] = hashlib.sha256(sealed).hexdigest()
        seal["signature"] = self._key.sign(sealed).hex()
        return {**body, "seal": seal}

    def keep(self, name: str, document: Mapping[str, Any]) -> Path:
        """Keep a document as a file of its own under the home; for receipts that belong to no run here."""
        path = self._home / "receipts" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, document)
        except OSError as exc:
            raise ReceiptError(f"the receipt {path} cannot be written: {exc}") from exc
        return path

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        path = self._home / KEY_FILE
        try:
            if not path.exists():
                _make_key(path)
            return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text(encoding="ascii").strip()))
        except OSError as exc:
            raise ReceiptError(f"the key that receipts are signed with cannot be read or made: {exc}") from exc
        except ValueError as exc:
            raise ReceiptError(f"{path} is no ed25519 key: move it away, and a new one is made") from exc


def receipt_document(
    sealer: Sealer, run: str, pods: Sequence[Mapping[str, Any]], still_open: Sequence[str], at: float
) -> dict[str, Any]:
    """A receipt.json: the sealed receipts of a run's pods and the names of those that are not proven gone, sealed."""
    return sealer.seal({"run": run, "pods": list(pods), "open": list(still_open), "written_at": at})


def _make_key(path: Path) -> None:
    """Whole or not at all, and for the owner only; of two processes one makes it and both use it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
            file.write(Ed25519PrivateKey.generate().private_bytes_raw().hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


def key_id(public_key: str) -> str:
    """A short name for a public key."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[: _HEX["key_id"]]


def seal_problems(document: Mapping[str, Any]) -> list[str]:
    """Why a document's seal does not hold; empty when it does. Says nothing about whose key it is."""
    seal = document.get("seal")
    if not isinstance(seal, dict):
        return ["it carries no seal"]
    if set(seal) != {"algorithm", *_HEX} or seal["algorithm"] != _ALGORITHM:
        return ["its seal is none of ours"]
    for name, length in _HEX.items():
        # Only one spelling each: other cases or blanks would be another text for the same bytes.
        if not isinstance(seal[name], str) or not re.fullmatch(rf"[0-9a-f]{{{length}}}", seal[name]):
            return [f"its seal's {name} is none"]
    if seal["key_id"] != key_id(seal["public_key"]):
        return ["its seal names another key than it carries"]
    named = {name: seal[name] for name in ("algorithm", "key_id", "public_key")}
    try:
        sealed = _canonical({**document, "seal": named})
    except (ValueError, TypeError, RecursionError):
        return ["it holds what no receipt does"]
    found = []
    if hashlib.sha256(sealed).hexdigest() != seal["hash"]:
        found.append("its hash is another one: it was changed after it was sealed")
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(seal["public_key"]))
        key.verify(bytes.fromhex(seal["signature"]), sealed)
    except (InvalidSignature, ValueError):
        found.append("its signature does not hold")
    return found


def _canonical(document: Any) -> bytes:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")
