#!/usr/bin/env python3
"""Ring 3, on the pod: ends the pod when its time is over or nobody renews its lease. Standalone: Python 3.8+.

    fuse.py [UPTIME AT THE START]

The pod's own start command starts it, so it runs although nobody ever logs in. Its settings are JSON in the environment
variable C, see `pennypod.fuse.part`:

    at      Unix time of the deadline
    for     seconds from the start after which the deadline has come whatever this pod's clock says
    lease   seconds that one renewal is worth, 0 when only the deadline counts
    url     base address of the provider's API, and the environment variable that overrides it
    id, key environment variables in which the provider tells this pod its id and its own key
    ends    the ends, the best first: [method, path, body] with @ID for the id; without an API ["KILL", pid, null]

Everything is in memory once it runs: a full or broken disk does not stop it. What it has to say goes to the log of the
container and to /dev/shm/pennypod-fuse. A renewal overwrites /dev/shm/pennypod-lease in place, which works on a full
/dev/shm as well, with the uptime until which the lease holds. `pennypod.fuse` packs this file into the start command
without comments and annotations, so that it fits the 4,000 characters that Vast takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from typing import Any

LOG = "/proc/1/fd/1"  # what the container's first process prints is its log
NAME = "/proc/self/comm"
STATE = "/dev/shm/pennypod-fuse"  # noqa: S108 - the pod is ours alone
LEASE = "/dev/shm/pennypod-lease"  # noqa: S108
# Tries before a milder end (stopping) is taken from an API that neither refuses the best one nor acts on it.
PATIENCE = 5
LONGEST_PAUSE_S = 60
# Made while the disk works. A pod whose clock is wrong, or that has no certificates, must end as well; its key can do
# no more than end it, so a second try goes without them.
CONTEXTS = ssl.create_default_context(), ssl._create_unverified_context()  # noqa: S323, SLF001

state: dict[str, Any] = {"pid": os.getpid(), "said": []}


def uptime() -> float:
    """Seconds since the machine's boot: a wrong clock that is set right does not move them."""
    try:
        with open("/proc/uptime") as file:
            return float(file.read().split()[0])
    except Exception:
        return time.monotonic()


def environment() -> dict[str, str]:
    """Ours, and below it that of PID 1: not every launcher hands all variables on to the start command."""
    found = {}
    with contextlib.suppress(Exception), open("/proc/1/environ") as file:
        found = dict(item.split("=", 1) for item in file.read().split("\0") if "=" in item)
    found.update(os.environ)
    return found


def say(text: str) -> None:
    """To the container's log and to the state file. Neither may stop us, so a full pipe or disk loses the words."""
    state["said"] = [*state["said"][-9:], text]
    for path, flags, line in (
        (LOG, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK, "pennypod-fuse: " + text + "\n"),
        (STATE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, json.dumps(state)),
    ):
        with contextlib.suppress(Exception), open(os.open(path, flags, 0o644), "wb", 0) as file:
            file.write(line.encode())


def leased_until() -> float:
    """The uptime that the last renewal wrote; 0 before the first. Makes the file when it is not there."""
    try:
        with open(LEASE) as file:
            return float(file.read())
    except Exception:
        with open(LEASE, "w") as file:
            file.write("%-15d\n" % 0)
        return 0


def ask(url: str, key: str, method: str, path: str, body: Any) -> tuple[int, str]:
    """The status and the text of one answer. Raises OSError when there is none."""
    if method == "KILL":
        os.kill(int(path), 15)
        return 200, ""
    headers = {
        "Authorization": "Bearer " + key,
        "Content-Type": "application/json",
        "User-Agent": "pennypod-fuse",  # Cloudflare turns Python's own away
    }
    for context in CONTEXTS:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as reply:  # noqa: S310 - our own settings
                return reply.status, reply.read(9999).decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read(9999).decode("utf-8", "replace")
        except OSError as error:
            if "CERTIFICATE" not in str(error):
                raise
    raise OSError("no certificate")


def accepted(status: int, text: str) -> bool:
    """Whether it is a yes: both providers also say no with status 200."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = {}
    refused = isinstance(fields, dict) and (fields.get("errors") or fields.get("success") is False)
    return 200 <= status < 300 and not refused


def blow(url: str, key: str, pod_id: str, ends: list[list[Any]]) -> None:
    """End this pod. Returns never: when it works, there is nobody left to return to."""
    tries = 0
    while True:
        for end in ends:
            method, path, body = json.loads(json.dumps(end).replace("@ID", pod_id))
            try:
                status, text = ask(url, key, method, path, body)
            except Exception as error:
                status, text = 0, str(error)
            done = accepted(status, text)
            told = "%s %s: %d %s" % (method, path, status, " ".join(text.split())[:200])
            say(told.replace(key, "***") if key else told)
            refused = not done and 200 <= status < 500 and status not in (408, 429)
            if not refused and tries < PATIENCE:
                break
            if end is not ends[-1]:
                say("THIS POD COULD NOT END ITSELF THIS WAY AND MAY GO ON BILLING: trying the next one")
        time.sleep(min(2**tries, LONGEST_PAUSE_S))
        tries = min(tries + 1, 9)


def main() -> None:
    with contextlib.suppress(Exception), open(NAME, "w") as file:
        file.write("pennypod-fuse")  # whoever ends all of Python does not mean us
    env = environment()
    settings = json.loads(env["C"])
    key, pod_id = env.get(settings["key"], ""), env.get(settings["id"], "")
    url = (env.get(settings["url"][1]) or settings["url"][0]).rstrip("/")
    now = uptime()
    ends_at = (float(sys.argv[1]) if sys.argv[1:] else now) + settings["for"]
    lease_s = settings["lease"]
    try:
        leased_until()
    except Exception:
        lease_s = 0  # nobody could renew it
    state.update(at=settings["at"], ends_at=ends_at, lease_s=lease_s, key=bool((key and pod_id) or not settings["key"]))
    say("armed: %d s left, a lease of %d s" % (ends_at - now, lease_s))
    with contextlib.suppress(Exception):
        socket.getaddrinfo(url.split("/")[-1].split(":")[0], 443)  # loads what later lookups need
    lease = now + lease_s
    why = ""
    while not why:
        now = uptime()
        if lease_s:
            with contextlib.suppress(Exception):
                lease = max(lease, leased_until())
        if time.time() >= settings["at"] or now >= ends_at:
            why = "the deadline has passed"
        elif lease_s and now >= lease:
            why = "nobody has renewed the lease"
        else:
            time.sleep(1)
    say("ending this pod: " + why)
    blow(url, key, pod_id, settings["ends"])


if __name__ == "__main__":
    main()
