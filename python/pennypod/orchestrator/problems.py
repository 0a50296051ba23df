"""What a caller is told when a request is refused: `application/problem+json` (RFC 9457). Floor 3; no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MEDIA_TYPE = "application/problem+json"

# Every code that may come in a problem body, with its status and its title. Public: docs/orchestrator.md lists them.
CODES: dict[str, tuple[int, str]] = {
    "signature_missing": (401, "The request is not signed"),
    "timestamp_stale": (401, "The timestamp is outside the allowed window"),
    "signature_invalid": (401, "The signature does not fit"),
    "token_invalid": (401, "The token does not fit"),
    "login_required": (401, "Log in first"),
    "csrf": (403, "The form did not come from this page"),
    "unknown_source": (404, "No such webhook source"),
    "unknown_run": (404, "No such run"),
    "not_found": (404, "No such page"),
    "method_not_allowed": (405, "This method has no meaning here"),
    "body_timeout": (408, "The body took too long"),
    "replayed": (409, "This delivery was taken before"),
    "idempotency_conflict": (409, "The idempotency key belongs to another delivery"),
    "run_over": (409, "The run is over"),
    "too_large": (413, "The body is too large"),
    "invalid_payload": (422, "The payload is not usable"),
    "unknown_job": (422, "No such job for webhooks"),
    "override_forbidden": (422, "The job does not let this be overridden"),
    "queue_full": (429, "The queue is full"),
    "rate_limited": (429, "Too many requests"),
    "internal": (500, "Something broke on our side"),
    "not_ready": (503, "Not ready"),
}


@dataclass
class ProblemError(Exception):
    """A refusal. `extra` goes into the body beside the standard members; it never holds a secret."""

    code: str
    detail: str
    extra: dict[str, Any] = field(default_factory=dict)
    retry_after_s: float | None = None

    @property
    def status(self) -> int:
        return CODES[self.code][0]

    def body(self) -> dict[str, Any]:
        status, title = CODES[self.code]
        return {
            "type": f"urn:pennypod:problem:{self.code}",
            "title": title,
            "status": status,
            "detail": self.detail,
            "code": self.code,
            **self.extra,
        }

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        if self.code in ("too_large", "body_timeout"):
            headers["Connection"] = "close"  # or the rest of the body would be read, if only to be thrown away
        return headers
