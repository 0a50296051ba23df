"""Who may press the buttons of the status page. Floor 3; pure.

A session is a signed cookie; its key is derived from the admin token, so changing the token ends every session, and
several orchestrators that share the token share the sessions. A form carries a token that only this session's page has.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SESSION_S = 12 * 3600
COOKIE = "pennypod_session"


class Sessions:
    """Raises nothing: a session is good or it is not."""

    def __init__(self, admin_token: str | None) -> None:
        self._token = admin_token
        self._key = hashlib.sha256(f"pennypod session {admin_token}".encode()).digest()

    @property
    def can_log_in(self) -> bool:
        return self._token is not None

    def token_fits(self, given: str) -> bool:
        return self._token is not None and self.same(given, self._token)

    @staticmethod
    def same(given: str, wanted: str) -> bool:
        """In constant time."""
        return hmac.compare_digest(given.encode(), wanted.encode())

    def new(self, now: float) -> str:
        """The value of a fresh session's cookie."""
        claim = f"{int(now) + SESSION_S}.{secrets.token_hex(16)}"
        return f"{claim}.{self._mac('session', claim)}"

    def is_good(self, cookie: str | None, now: float) -> bool:
        claim, _, mac = (cookie or "").rpartition(".")
        expires = claim.partition(".")[0]
        if not self.can_log_in or not expires.isascii() or not expires.isdigit():
            return False
        return hmac.compare_digest(mac, self._mac("session", claim)) and int(expires) > now

    def form_token(self, cookie: str) -> str:
        return self._mac("form", cookie)

    def form_fits(self, cookie: str, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.form_token(cookie).encode())

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()
