#!/usr/bin/env python3
"""Tells an orchestrator how a training goes, from the pod. Standalone: Python 3.8+, standard library only.

Reads lines of JSON from standard input: first ``{"url", "token"}``, then one ``{"event", "data"}`` after the other, and
sends each as a POST. A process of its own, so that nothing here can hold up the training: what cannot be sent is tried
again for a while, then dropped. Of the events that only tell how far it is, the newest is sent. After the end of its
input it has GIVE_UP_S left.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import urllib.error
import urllib.request
from typing import Any

ANSWER_S = 5.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
GIVE_UP_S = 60.0
# A newer one replaces an older one that still waits.
PASSING = ("epoch", "checkpoint")
CHUNK = 65536


class RefusedError(Exception):
    """The other side does not want it, and would not want it again."""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token is for the address that was given, and for no other."""

    def redirect_request(self, *_args: Any, **_more: Any) -> None:
        return None


class Sender:
    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token
        self.opener = urllib.request.build_opener(NoRedirect)

    def send(self, event: dict[str, Any]) -> None:
        """Raises RefusedError, or another exception when it is worth another try."""
        headers = {"Authorization": "Bearer " + self.token, "Content-Type": "application/json"}
        body = json.dumps(event).encode()
        request = urllib.request.Request(self.url, data=body, method="POST", headers=headers)  # noqa: S310 - the control side's
        try:
            with self.opener.open(request, timeout=ANSWER_S) as answer:
                answer.read(CHUNK)
        except urllib.error.HTTPError as exc:
            if exc.code < 500 and exc.code not in (408, 429):
                raise RefusedError from None
            raise


class Input:
    """Standard input as lines, without waiting longer than it is told to."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.rest = b""
        self.ended = False

    def lines(self, wait_s: float) -> list[dict[str, Any]]:
        if self.ended:
            time.sleep(wait_s)
            return []
        if not select.select([self.handle], [], [], wait_s)[0]:
            return []
        data = os.read(self.handle, CHUNK)
        self.ended = not data
        *whole, self.rest = (self.rest + data).split(b"\n")
        found = (parsed(line) for line in whole)
        return [line for line in found if line]


def parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.decode("utf-8", "replace"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def added(waiting: list[dict[str, Any]], event: dict[str, Any]) -> list[dict[str, Any]]:
    kind = event.get("event")
    return [old for old in waiting if kind not in PASSING or old.get("event") != kind] + [event]


def work(source: Input) -> None:
    sender = None  # type: Sender | None
    waiting = []  # type: list[dict[str, Any]]
    again_at, pause, give_up_at = 0.0, FIRST_PAUSE_S, 0.0
    while waiting or not source.ended:
        now = time.monotonic()
        if source.ended:
            give_up_at = give_up_at or now + GIVE_UP_S
            if now >= give_up_at:
                return
        wait_s = max(0.0, again_at - now) if waiting else 3600.0
        for line in source.lines(wait_s):
            if sender is None:
                sender = Sender(str(line["url"]), str(line["token"]))
            else:
                waiting = added(waiting, line)
        if sender is None or not waiting or time.monotonic() < again_at:
            continue
        try:
            sender.send(waiting[0])
        except RefusedError:
            waiting = waiting[1:]
        except Exception:  # whatever a network can do
            again_at, pause = time.monotonic() + pause, min(pause * 2, LONGEST_PAUSE_S)
        else:
            waiting, again_at, pause = waiting[1:], 0.0, FIRST_PAUSE_S


def main() -> int:
    try:
        os.nice(10)  # the training comes first
        work(Input(sys.stdin.fileno()))
    except Exception:  # nobody reads what we would say
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
