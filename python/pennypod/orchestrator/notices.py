"""Notices out: signed webhooks, ntfy, Slack. Floor 3: the orchestrator's tables and HTTP are its outside things.

A notice is a row before it is sent, so that none is lost by a restart; it is sent at least once, with its id in
`Idempotency-Key`. A recipient that does not answer holds up no run: nobody waits for a notice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import requests

from pennypod.clock import Clock
from pennypod.orchestrator.config import Config, Recipient
from pennypod.orchestrator.signing import sign
from pennypod.orchestrator.store import Notice, Store

_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 5.0
_MOST_TRIES = 12  # with doubling pauses that is about six hours

_WORDS = {
    "rented": "rented a pod",
    "ready": "is training",
    "failed": "failed",
    "destroyed": "is over, its pods are proven gone",
    "over_budget": "would break its budget: nothing was rented",
}


class Notices:
    """Writes notices down and sends what is due."""

    def __init__(self, config: Config, store: Store, clock: Clock) -> None:
        self._config = config
        self._store = store
        self._clock = clock

    def tell(self, run: str, event: str, details: Mapping[str, Any]) -> None:
        """One notice per run and event to everybody who asked for that event."""
        recipients = [
            name for name, item in self._config.file.notify.items() if not item.events or event in item.events
        ]
        if recipients:
            now = self._clock.now()
            document = {"event": event, "run": run, "at": now, **details}
            self._store.add_notices(run, event, recipients, document, now)

    def send_due(self) -> int:
        """Send what is due, once each; how many arrived. Call it again and again."""
        arrived = 0
        for notice in self._store.due_notices(self._clock.now()):
            recipient = self._config.file.notify.get(notice.recipient)
            if recipient is None or notice.tries >= _MOST_TRIES or self._send(notice, recipient):
                self._store.notice_done(notice.id)
                arrived += 1
            else:
                self._store.notice_again(notice.id, self._clock.now() + _FIRST_PAUSE_S * 2**notice.tries)
        return arrived

    def _send(self, notice: Notice, recipient: Recipient) -> bool:
        body, headers = self._message(notice, recipient)
        try:
            answer = requests.post(
                self._config.recipient_urls[notice.recipient],
                data=body,
                headers=headers,
                timeout=_TIMEOUT_S,
                allow_redirects=False,
            )
        except requests.RequestException:
            return False
        return answer.status_code < 300

    def _message(self, notice: Notice, recipient: Recipient) -> tuple[bytes, dict[str, str]]:
        headers = {"Idempotency-Key": f"pennypod-{notice.id}", "Content-Type": "application/json"}
        line = notice_line(notice.run, notice.event, notice.document)
        if recipient.kind == "slack":
            return json.dumps({"text": line}).encode(), headers
        if recipient.kind == "ntfy":
            urgent = notice.event in ("failed", "over_budget")
            return line.encode(), {
                "Idempotency-Key": headers["Idempotency-Key"],
                "Content-Type": "text/plain; charset=utf-8",
                "Title": f"pennypod {notice.event}",
                "Priority": "high" if urgent else "default",
            }
        body = json.dumps(notice.document).encode()
        secret = self._config.recipient_secrets.get(notice.recipient)
        if secret:
            timestamp = str(int(self._clock.now()))
            headers |= {"X-Pennypod-Timestamp": timestamp, "X-Pennypod-Signature": sign(secret, timestamp, body)}
        return body, headers


def notice_line(run: str, event: str, document: Mapping[str, Any]) -> str:
    """One line for people."""
    parts = [f"{run} {_WORDS[event]}"]
    if document.get("outcome"):
        parts.append(str(document["outcome"]))
    if document.get("gpu"):
        parts.append(f"{document['gpu']} on {document.get('provider')}")
    if document.get("cost_usd") is not None:
        parts.append(f"${document['cost_usd']:.4f}")
    if document.get("reason"):
        parts.append(str(document["reason"]))
    return "; ".join(parts)
