"""One call of an API with its answer, and the same with everything private taken out. Floor 0: pure.

What is taken out is replaced by something of the same type that looks alike, and by the same thing each time, so that
a record still tells which answer belongs to which call: ids, addresses, e-mail addresses, amounts of money, names.
Whole rows about pods that are not ours are left out. Keys, tokens and commands become `***`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pennypod.model.ids import PREFIX, parse_lease

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"api_?key|token|passw|secret|authorization|image_login|docker_login|ssh_key|public_?key|^key$|^args$|onstart"
    r"|image_args|extra_env|^cmd$|^entrypoint$|url$",
    re.IGNORECASE,
)
_AMOUNT_NAME = re.compile(r"balance|credit|spend|paid|total_spent|clientLifetime", re.IGNORECASE)
_ID_NAME = re.compile(r"(?:^|_)ids?$|Ids?$|^(?:new_contract|instance|ask|cursor|nextCursor)$|_token$")
_OPAQUE = re.compile(r"(?=[a-z_-]*\d)[a-z0-9_-]{10,64}|[0-9a-f]{12,}")
_PRIVATE_PLACE = re.compile(r"/users/|/graphql|/account/|/registries|/ssh(?:/|$)")
_LISTS_OF_PODS = frozenset({"instances", "pods"})
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_IPV6 = re.compile(r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{1,4}:){3,7}[0-9A-Fa-f]{0,4}(?![0-9A-Fa-f:])")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_LONG_TOKEN = re.compile(r"[A-Za-z0-9+/=_-]{40,}|\b[0-9a-fA-F]{24,}\b")
_LONG_NUMBER = re.compile(r"(?<![\w.])\d{6,}(?![\w.])")
_POD_WORD = re.compile(r"\b(?=[a-z]*\d)(?=\d*[a-z])[a-z0-9]{14}\b")  # RunPod's pods are called so, in commands too
_SSH_KEY = re.compile(r"(?:ssh|ecdsa|sk)-\S+ \S+")
_AN_SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA someone"
_PATH_ID = re.compile(r"\d{3,}|(?=[a-z]*\d)[a-z0-9]{12,}")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call and what came back. `status` 0: no answer, and `trouble` says why. Times are Unix seconds."""

    provider: str
    at: float
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    status: int = 0
    content_type: str = ""
    answer: Any = None
    trouble: str = ""

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Exchange:
        """Raises TypeError when the document is something else."""
        return cls(**document)


class Scrubber:
    """Takes private things out. The same salt replaces the same thing by the same thing, in every process."""

    def __init__(self, salt: bytes, secret: str = "") -> None:
        self._salt = salt
        self._secret = secret

    def scrub(self, exchange: Exchange) -> Exchange:
        private = _PRIVATE_PLACE.search(exchange.path) is not None
        return replace(
            exchange,
            path="/".join(self._path_part(part) for part in exchange.path.split("/")),
            query={name: self._value(name, value, private=False) for name, value in exchange.query.items()},
            body=self._value("", exchange.body, private=private),
            answer=self._value("", exchange.answer, private=private),
            trouble=self._text(exchange.trouble),
        )

    # --- one value --------------------------------------------------------------------------------------------------

    def _value(self, name: str, value: Any, *, private: bool) -> Any:
        if isinstance(value, dict):
            hidden = name == "env"
            return {
                key: HIDDEN if hidden and isinstance(item, str) else self._value(key, item, private=private)
                for key, item in value.items()
            }
        if isinstance(value, list):
            rows = [row for row in value if name not in _LISTS_OF_PODS or _is_ours(row)]
            return [self._value(name, row, private=private) for row in rows]
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (int, float)):
            return self._number(name, value, private=private)
        return self._string(name, str(value), private=private)

    def _number(self, name: str, value: float, *, private: bool) -> float:
        if _ID_NAME.search(name) and isinstance(value, int):
            return self._other_number(str(value))
        return type(value)(1) if private or _AMOUNT_NAME.search(name) else value

    def _string(self, name: str, value: str, *, private: bool) -> str:
        if parse_lease(value) is not None:
            return value
        if _SSH_KEY.match(value):
            return _AN_SSH_KEY
        if _SECRET_NAME.search(name):
            return HIDDEN if value else value
        if _ID_NAME.search(name):
            if value.isdigit():
                return str(self._other_number(value))
            if _OPAQUE.fullmatch(value):
                return self._other_word(value)
        if private and name not in ("query", "error", "msg", "message", "detail"):
            return "text" if value else value
        return value if value.isdigit() else self._text(value)

    def _text(self, text: str) -> str:
        if self._secret:
            text = text.replace(self._secret, HIDDEN)
        text = _EMAIL.sub(lambda found: f"{self._hash(found[0])[:8]}@example.com", text)
        text = _IPV4.sub(lambda found: self._other_address(found[0]), text)
        text = _IPV6.sub("2001:db8::1", text)
        words = (word if parse_lease(word) is not None else _LONG_TOKEN.sub(HIDDEN, word) for word in text.split(" "))
        text = _POD_WORD.sub(lambda found: self._other_word(found[0]), " ".join(words))
        return _LONG_NUMBER.sub(lambda found: str(self._other_number(found[0])), text)

    def _path_part(self, part: str) -> str:
        if not _PATH_ID.fullmatch(part):
            return part
        return str(self._other_number(part)) if part.isdigit() else self._other_word(part)

    # --- what stands for it -----------------------------------------------------------------------------------------

    def _hash(self, text: str) -> str:
        return hmac.new(self._salt, text.encode(), hashlib.sha256).hexdigest()

    def _other_number(self, digits: str) -> int:
        """As long as the number itself; an id of 0 means none, and stays."""
        if not digits.strip("0"):
            return int(digits)
        low: int = 10 ** (len(digits) - 1)
        return int(low + int(self._hash(digits), 16) % (9 * low))

    def _other_word(self, word: str) -> str:
        return ("x" + self._hash(word))[: len(word)]

    def _other_address(self, address: str) -> str:
        """Of the range for documentation; one that only means "this machine" or "anything" says nothing."""
        if address.startswith(("127.", "0.")):
            return address
        number = int(self._hash(address), 16)
        return f"{('192.0.2', '198.51.100', '203.0.113')[number % 3]}.{number // 3 % 254 + 1}"


def _is_ours(row: Any) -> bool:
    if not isinstance(row, dict):
        return True
    return str(row.get("label") or row.get("name") or "").startswith(PREFIX)
