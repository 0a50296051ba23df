"""A request and its answer, without any server around them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Request:
    """One call. Header names are lower case; `query` keeps repeated keys."""

    method: str
    path: str
    query: dict[str, list[str]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def get(self, name: str, default: str = "") -> str:
        values = self.query.get(name)
        return values[0] if values else default

    def json(self) -> Any:
        """The body as JSON; an empty body is an empty object. Raises ValueError."""
        return json.loads(self.body) if self.body.strip() else {}

    @property
    def bearer(self) -> str:
        """The key in the Authorization header, "" when there is none."""
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""


@dataclass(slots=True)
class Reply:
    """An answer. `body` None means no body at all, bytes go out as they are, everything else as JSON.

    With `open_s` it is a stream: it has no length, and stays open for so long (real seconds) unless the client leaves.
    """

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    open_s: float = 0.0

    def payload(self) -> bytes:
        if self.body is None:
            return b""
        if isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body, ensure_ascii=False, separators=(",", ":")).encode()

    def with_headers(self, extra: Mapping[str, str]) -> Reply:
        self.headers = {**extra, **self.headers}
        return self


class Refusal(Exception):  # noqa: N818 - an answer, not a mistake of ours
    """Raised inside a handler to answer at once."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply
