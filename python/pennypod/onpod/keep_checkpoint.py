#!/usr/bin/env python3
"""Keeps a training's checkpoints in object storage, from the pod. Standalone: Python 3.8+, standard library only.

    keep_checkpoint.py offer STORE EPOCH FOLDER FILE...   put the files, named relative to FOLDER, aside for the upload
    keep_checkpoint.py drain STORE                        upload what was put aside; `offer` starts it in the background
    keep_checkpoint.py restore STORE TARGET               fetch the checkpoint to go on from into the folder TARGET

STORE is a folder of ours. `urls.json` in it holds URLs that each allow one PUT or GET for a while; it is replaced from
outside before they expire, and read anew before each try. A checkpoint is uploaded first, then a marker with its length
and hash: without the marker it does not count. Each pair of URLs is used for one checkpoint.

A training calls `offer` after each epoch. That copies the files, so that they may change at once, and returns. When
uploads are slower than epochs, the newest checkpoint is what goes next. No fault is passed on to the training:
`state.json` and `log` in STORE say what became of the uploads. Neither holds a URL.

restore prints one line ``@pennypod {"restored": true|false, "why": text}``; the exit status is 0 either way.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from typing import Any

MARK = "@pennypod "
CHUNK = 1 << 20
ANSWER_S = 60.0  # for one step of a connection, not for a whole upload
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
GIVE_UP_S = 1800.0
LOG_BYTES = 200000
ROOM = 2  # a checkpoint is copied only where this many of it have room


class StoreFaultError(Exception):
    """What may be said of a failed request: never its URL."""


# -- the training's side ----------------------------------------------------------------------------------------------


def offer(store: str, epoch: int, folder: str, names: list[str]) -> None:
    spool = os.path.join(store, "spool")
    os.makedirs(spool, exist_ok=True)
    paths = [os.path.join(folder, name) for name in names]
    size = sum(os.path.getsize(path) for path in paths)
    if shutil.disk_usage(spool).free < ROOM * size:
        say(store, "epoch %d: no room to put %d bytes aside" % (epoch, size))
        return
    name = "%020d-%d.tar" % (time.time_ns(), epoch)
    part = os.path.join(spool, name + ".part-%d" % os.getpid())
    try:
        with tarfile.open(part, "w", dereference=True) as tar:
            for path, inside in zip(paths, names):
                tar.add(path, arcname=inside, recursive=False)
        os.rename(part, os.path.join(spool, name))
    finally:
        if os.path.exists(part):
            os.unlink(part)
    subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "drain", store],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the end of the training must not cut the last upload
    )


# -- the upload -------------------------------------------------------------------------------------------------------


def drain(store: str) -> None:
    """Upload until nothing waits. One process at a time: another one that holds the lock will find what is there."""
    while waiting(store):
        with open(os.path.join(store, "lock"), "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            while True:
                name = newest(store)
                if name is None:
                    break
                Upload(store, name).run()
        # What came between the last look and the end of the lock has met a lock that was held: look again.


def waiting(store: str) -> list[str]:
    try:
        names = os.listdir(os.path.join(store, "spool"))
    except OSError:
        return []
    return sorted(name for name in names if name.endswith(".tar"))


def newest(store: str) -> str | None:
    """What goes next. What is older than it is given up."""
    names = waiting(store)
    for name in names[:-1]:
        os.unlink(os.path.join(store, "spool", name))
    return names[-1] if names else None


class Upload:
    """One checkpoint on its way, and the slot that is its own."""

    def __init__(self, store: str, name: str) -> None:
        self.store = store
        self.name = name
        self.path = os.path.join(store, "spool", name)
        self.epoch = int(name.partition("-")[2].partition(".")[0])
        self.slot = None  # type: int | None

    def run(self) -> None:
        """Until it is there, a newer one waits, or too long."""
        marker = json.dumps({"bytes": os.path.getsize(self.path), "sha256": sha256(self.path), "epoch": self.epoch})
        until, pause, why = time.monotonic() + GIVE_UP_S, FIRST_PAUSE_S, ""
        while time.monotonic() < until:
            try:
                self.attempt(marker.encode())
            except StoreFaultError as exc:
                if str(exc) != why:
                    say(self.store, "epoch %d: %s" % (self.epoch, exc))
                why = str(exc)
            else:
                self.finish("")
                return
            if waiting(self.store)[-1:] != [self.name]:
                break
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)
        self.finish(why)

    def attempt(self, marker: bytes) -> None:
        urls = self.urls()
        with open(self.path, "rb") as file:
            put(urls["checkpoint"], file, os.path.getsize(self.path))
        put(urls["marker"], marker, len(marker))

    def urls(self) -> dict[str, Any]:
        """The slot that this checkpoint has begun with, while its URLs are there; else the next one."""
        uploads = read_json(os.path.join(self.store, "urls.json")).get("uploads") or []
        state = read_json(os.path.join(self.store, "state.json"))
        used = int(state.get("used", 0))
        for upload in uploads:
            if upload["number"] == self.slot:
                return dict(upload)
        free = [upload for upload in uploads if upload["number"] > used]
        if not free:
            raise StoreFaultError("no unused URL is left")
        upload = min(free, key=lambda item: int(item["number"]))
        # Before the first byte: a slot that was begun is never taken for another checkpoint, whatever happens to us.
        self.slot = int(upload["number"])
        write_json(os.path.join(self.store, "state.json"), dict(state, used=self.slot))
        return dict(upload)

    def finish(self, why: str) -> None:
        state = read_json(os.path.join(self.store, "state.json"))
        if why:
            state["error"] = "epoch %d: %s" % (self.epoch, why)
        else:
            state.update(kept_epoch=self.epoch, kept_at=time.time(), error="")
            say(self.store, "epoch %d is kept" % self.epoch)
        write_json(os.path.join(self.store, "state.json"), state)
        if os.path.exists(self.path):
            os.unlink(self.path)


def put(url: str, body: Any, length: int) -> None:
    headers = {"Content-Length": str(length), "Content-Type": "application/octet-stream"}
    try:
        request = urllib.request.Request(url, data=body, method="PUT", headers=headers)  # noqa: S310 - the control side's
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            answer.read()
    except Exception as exc:
        raise StoreFaultError(reason(exc)) from None


def reason(exc: Exception) -> str:
    if isinstance(exc, urllib.error.HTTPError):
        return "the store answers %d" % exc.code
    why = getattr(exc, "reason", exc)
    return "the store cannot be reached: %s" % (
        os.strerror(why.errno) if isinstance(why, OSError) and why.errno else type(why).__name__
    )


# -- going on from one ------------------------------------------------------------------------------------------------


def restore(store: str, target: str) -> dict[str, Any]:
    found = read_json(os.path.join(store, "urls.json")).get("resume")
    if not found:
        return {"restored": False, "why": "the bucket has no checkpoint of this run"}
    part, folder = os.path.join(store, "resume.tar"), target + ".new"
    shutil.rmtree(folder, ignore_errors=True)
    pause, why = FIRST_PAUSE_S, ""
    try:
        for _ in range(6):
            try:
                get(found["url"], part, int(found["bytes"]))
            except StoreFaultError as exc:
                why = str(exc)
                time.sleep(pause)
                pause *= 2
                continue
            if os.path.getsize(part) != found["bytes"] or sha256(part) != found["sha256"]:
                return {"restored": False, "why": "the checkpoint in the bucket is not what its marker says"}
            unpack(part, folder)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(folder, target)
            return {"restored": True, "why": ""}
    except (OSError, ValueError, tarfile.TarError) as exc:
        why = str(exc)
    finally:
        if os.path.exists(part):
            os.unlink(part)
        shutil.rmtree(folder, ignore_errors=True)
    return {"restored": False, "why": why}


def get(url: str, path: str, size: int) -> None:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer, open(path, "wb") as file:  # noqa: S310
            count = 0
            while count <= size:
                data = answer.read(CHUNK)
                if not data:
                    break
                file.write(data)
                count += len(data)
    except Exception as exc:
        raise StoreFaultError(reason(exc)) from None
    if count < size:
        raise StoreFaultError("the connection was cut after %d bytes" % count)


def unpack(path: str, folder: str) -> None:
    """Plain files in plain folders: the tar comes from a pod that may have been anybody's."""
    os.makedirs(folder)
    with tarfile.open(path) as tar:
        for member in tar:
            parts = member.name.split("/")
            if not member.isfile() or ".." in parts or "" in parts:
                raise ValueError("the checkpoint holds something that is no plain file")
            place = os.path.join(folder, *parts)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, open(place, "wb") as file:
                shutil.copyfileobj(source, file, CHUNK)


# -- files ------------------------------------------------------------------------------------------------------------


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            data = file.read(CHUNK)
            if not data:
                return digest.hexdigest()
            digest.update(data)


def read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: str, content: dict[str, Any]) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(path + ".new", path)


def say(store: str, text: str) -> None:
    try:
        path = os.path.join(store, "log")
        full = os.path.exists(path) and os.path.getsize(path) > LOG_BYTES
        with open(path, "w" if full else "a", encoding="utf-8") as file:
            file.write("%s %s\n" % (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text))
    except OSError:
        pass


def main(argv: list[str]) -> int:
    os.umask(0o077)
    try:
        if argv[0] == "offer":
            offer(argv[1], int(argv[2]), argv[3], argv[4:])
        elif argv[0] == "drain":
            os.nice(10)  # the training comes first
            drain(argv[1])
        elif argv[0] == "restore":
            print(MARK + json.dumps(restore(argv[1], argv[2])), flush=True)
        else:
            raise IndexError
    except (IndexError, ValueError):
        print("usage: " + (__doc__ or "").split("\n\n")[1], file=sys.stderr)
        return 2
    except Exception as exc:
        say(argv[1], "%s: a fault: %r" % (argv[0], exc))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
