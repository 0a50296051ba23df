"""Who sent a webhook, and is it fresh. Floor 3; pure: headers, bytes and the time in, a Delivery or a ProblemError out.

Three schemes. `pennypod`: HMAC-SHA256 over ``timestamp.body``. `github`: `X-Hub-Signature-256` over the body, with the
delivery's id in `X-GitHub-Delivery`. `gitlab`: a token in `X-Gitlab-Token`, the delivery's id in `Idempotency-Key` or
`X-Gitlab-Event-UUID` (docs.github.com and docs.gitlab.com, "Webhooks"). The last two carry no timestamp, so what they
sent is remembered for much longer.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pennypod.orchestrator.problems import ProblemError

WINDOW_S = 300
NATIVE = "pennypod"
# Twice the window: a delivery may be stamped ahead of our clock and come again behind it.
NATIVE_MEMORY_S = 2 * WINDOW_S + 60
FOREIGN_MEMORY_S = 90 * 86_400
KEY_MEMORY_S = 30 * 86_400

_TIMESTAMP = re.compile(r"\d{1,12}")
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class Delivery:
    """An authentic delivery.

    `once` is what may come only once within `once_for_s`; `key`, where the sender gave one, names the delivery over
    repeats with a fresh signature. Both are already told apart by source.
    """

    source: str
    body_sha256: str
    once: str
    once_for_s: float
    key: str | None = None


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The value of `X-Pennypod-Signature`."""
    mac = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"sha256={mac.hexdigest()}"


def check_stamp(headers: Mapping[str, str], now: float) -> None:
    """What can be refused before a byte of the body is read. Raises ProblemError."""
    timestamp = headers.get("x-pennypod-timestamp", "")
    if not timestamp or not headers.get("x-pennypod-signature"):
        raise ProblemError(
            "signature_missing",
            "send X-Pennypod-Timestamp in Unix seconds, and X-Pennypod-Signature: sha256=HEX of timestamp.body",
        )
    if not _TIMESTAMP.fullmatch(timestamp):
        raise ProblemError("timestamp_stale", "X-Pennypod-Timestamp must be whole Unix seconds")
    if abs(now - int(timestamp)) > WINDOW_S:
        raise ProblemError(
            "timestamp_stale",
            f"the timestamp is more than {WINDOW_S} s away from this server's clock: sign anew, and check the clocks",
            {"server_time": int(now)},
        )


def verify_native(headers: Mapping[str, str], body: bytes, secrets: Sequence[str], now: float) -> Delivery:
    """A delivery signed with any of `secrets`. Raises ProblemError."""
    check_stamp(headers, now)
    timestamp, given = headers["x-pennypod-timestamp"], headers["x-pennypod-signature"]
    if not _matches_any(given, [sign(secret, timestamp, body) for secret in secrets]):
        raise ProblemError("signature_invalid", "the signature is not that of this timestamp and this body")
    return Delivery(NATIVE, _sha256(body), f"sig:{given}", NATIVE_MEMORY_S, _key(headers.get("idempotency-key")))


def verify_github(source: str, headers: Mapping[str, str], body: bytes, secrets: Sequence[str]) -> Delivery:
    given = headers.get("x-hub-signature-256", "")
    if not given:
        raise ProblemError("signature_missing", "X-Hub-Signature-256 is missing: give the webhook a secret on GitHub")
    expected = [f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}" for secret in secrets]
    if not _matches_any(given, expected):
        raise ProblemError("signature_invalid", "the signature is not that of this body")
    return _foreign(source, headers.get("x-github-delivery"), "X-GitHub-Delivery", body)


def verify_gitlab(source: str, headers: Mapping[str, str], body: bytes, secrets: Sequence[str]) -> Delivery:
    given = headers.get("x-gitlab-token", "")
    if not given:
        raise ProblemError("signature_missing", "X-Gitlab-Token is missing: give the webhook a secret token on GitLab")
    if not _matches_any(given, secrets):
        raise ProblemError("signature_invalid", "the token is not the one of this source")
    sent_id = headers.get("idempotency-key") or headers.get("x-gitlab-event-uuid")
    return _foreign(source, sent_id, "Idempotency-Key or X-Gitlab-Event-UUID", body)


def _foreign(source: str, sent_id: str | None, header: str, body: bytes) -> Delivery:
    """The id is not signed, so the body counts too: the same bytes under another id are still a repeat."""
    key = _key(sent_id)
    if key is None:
        raise ProblemError("signature_missing", f"{header} is missing: without a delivery's id a repeat cannot be told")
    digest = _sha256(body)
    return Delivery(source, digest, f"body:{digest}", FOREIGN_MEMORY_S, key)


def _matches_any(given: str, expected: Sequence[str]) -> bool:
    """Compares with each one, in constant time, whichever fits."""
    found = False
    for value in expected:
        found |= hmac.compare_digest(given.encode(), value.encode())
    return found


def _key(text: str | None) -> str | None:
    if not text:
        return None
    if not _KEY.fullmatch(text):
        raise ProblemError(
            "invalid_payload", "the idempotency key must be 1 to 255 printable characters without blanks"
        )
    return text


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
