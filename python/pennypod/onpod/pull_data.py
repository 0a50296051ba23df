"""Fetches a data set from object storage, on the pod. Standalone: Python 3.8 or newer, standard library only.

    pull_data.py pull

Asked for on stdin, one line of JSON, since URLs are secrets and arguments are for everybody to see::

    {"home": FOLDER, "name": NAME, "packs": [{"name": ..., "url": ..., "bytes": ..., "files": [FILE, ...]}, ...]}

A pack is a plain tar at a URL that holds for a while, FILE is [path, size, sha256, executable, mtime]. Each file that
is not under FOLDER/NAME as it should be is written under another name, compared with its hash, and moved to its place;
what else a pack holds is passed over. Packs come over several connections at once. No key is needed, nothing but the
files stays on the pod, and no answer repeats a URL.

Answers are lines of JSON: {"mark": MARK}, then {"pulled": bytes so far} about once a second, and in the end
{"files", "bytes": what came, "there": files that were there, "left": files that did not come, "damaged", "gone": names
of packs that are not what they should be or are not there, "reached": whether the store answered, "why": in one line}.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request

TYPE_CHECKING = False  # importing typing would make every start slower
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

    Wanted = Dict[str, "File"]

MARK = "pennypod-pull-1"
CHUNK = 1 << 18
BLOCK = 4096
STREAMS = 8
KNOCK_S = 8.0  # for the first byte: a pod that cannot reach the store bills meanwhile
ANSWER_S = 60.0  # for one step of a connection, not for a whole pack
TRIES = 4
FIRST_PAUSE_S = 0.5
TICK_S = 1.0
SCRATCH = ".pennypod-pull-"


class StoreFaultError(Exception):
    """A request that failed or was cut off: worth another try unless the store has answered with a no."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


class File:
    def __init__(self, row: List[Any]) -> None:
        self.path, self.size, self.sha256, self.executable, self.mtime = row


class Body:
    """What a pack's URL gives, for tarfile: it counts, and says that a connection was cut in words of its own."""

    def __init__(self, url: str) -> None:
        self.answer = request(url, ANSWER_S)
        self.count = 0

    def read(self, size: int) -> bytes:
        try:
            data: bytes = self.answer.read(size)
        except Exception as exc:
            raise StoreFaultError(reason(exc)) from None
        self.count += len(data)
        return data

    def close(self) -> None:
        self.answer.close()


def request(url: str, limit_s: float, headers: Optional[Dict[str, str]] = None) -> Any:
    try:
        asked = urllib.request.Request(url, headers=headers or {})  # noqa: S310 - the control side's own
        return urllib.request.urlopen(asked, timeout=limit_s)  # noqa: S310
    except urllib.error.HTTPError as exc:
        raise StoreFaultError(reason(exc), exc.code) from None
    except Exception as exc:
        raise StoreFaultError(reason(exc)) from None


def reason(exc: Exception) -> str:
    """What may be said of a failed request: never its URL."""
    if isinstance(exc, urllib.error.HTTPError):
        return "the store answers %d" % exc.code
    why = getattr(exc, "reason", exc)
    return "the store cannot be reached: %s" % (
        os.strerror(why.errno) if isinstance(why, OSError) and why.errno else type(why).__name__
    )


class Pull:
    """One data set on its way. Threads take pack after pack; what they have come to is under `lock`."""

    def __init__(self, order: Dict[str, Any]) -> None:
        home = order["home"].encode()
        self.root = os.path.join(home, order["name"].encode())
        self.scratch = os.path.join(home, (SCRATCH + str(os.getpid())).encode())
        self.packs: List[Dict[str, Any]] = list(order["packs"])
        self.waiting = list(reversed(self.packs))
        self.lock = threading.Lock()
        self.stop = False
        self.reached = False
        self.why = ""
        self.files = self.bytes = self.there = self.left = self.moved = 0
        self.damaged: List[str] = []
        self.gone: List[str] = []

    def answer(self) -> Dict[str, Any]:
        names = ("files", "bytes", "there", "left", "damaged", "gone", "reached", "why")
        return {name: getattr(self, name) for name in names}

    def run(self) -> None:
        """Until each pack was tried, or none is worth trying."""
        clean(os.path.dirname(self.scratch))
        os.makedirs(self.root, exist_ok=True)
        os.makedirs(self.scratch, exist_ok=True)
        try:
            if self.has_room() and self.knock():
                threads = [threading.Thread(target=self.work, daemon=True) for _ in self.packs[:STREAMS]]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(TICK_S)
                        say({"pulled": self.moved})
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.left = sum(len(pack["files"]) for pack in self.packs) - self.files - self.there

    def has_room(self) -> bool:
        """A data set that does not fit is refused before its first byte, by whoever sends what did not come."""
        needed = 0
        for pack in self.packs:
            for file in map(File, pack["files"]):
                if not self.looks_right(file):
                    needed += -(-file.size // BLOCK) * BLOCK
        free = shutil.disk_usage(self.scratch).free
        if free < needed:
            self.note("%d bytes are free and %d needed" % (free, needed))
        return free >= needed

    def knock(self) -> bool:
        """Whether the store can be reached from here at all, by the first byte of one pack."""
        for pack in self.packs:
            if any(not self.looks_right(File(row)) for row in pack["files"]):
                try:
                    request(pack["url"], KNOCK_S, {"Range": "bytes=0-0"}).close()
                except StoreFaultError as exc:
                    self.reached = exc.status > 0
                    self.note(str(exc))
                    return self.reached  # of one pack it says no: others may be there
                break
        self.reached = True
        return True

    def work(self) -> None:
        while True:
            with self.lock:
                if self.stop or not self.waiting:
                    return
                pack = self.waiting.pop()
            try:
                self.take(pack)
            except OSError as exc:  # of this pod's own disk
                self.note("%s on the pod" % os.strerror(exc.errno or 0))
                if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                    self.stop = True
            except Exception as exc:
                self.note("a fault in pull_data.py: %s" % type(exc).__name__)

    def take(self, pack: Dict[str, Any]) -> None:
        wanted = {}
        for file in map(File, pack["files"]):
            if self.has(file):
                with self.lock:
                    self.there += 1
            else:
                wanted[file.path] = file
        pause = FIRST_PAUSE_S
        for _ in range(TRIES):
            if not wanted or self.stop:
                return
            try:
                whole = self.unpack(pack, wanted)
            except StoreFaultError as exc:
                self.note(str(exc))
                if 400 <= exc.status < 500 and exc.status not in (408, 429):
                    if exc.status == 404:
                        self.gone.append(pack["name"])
                    return
            else:
                if whole and wanted:
                    self.damaged.append(pack["name"])
                    self.note("a pack in the store is not what its name says")
                if whole:
                    return
                self.note("the connection to the store was cut")
            time.sleep(pause)
            pause *= 2

    def unpack(self, pack: Dict[str, Any], wanted: Wanted) -> bool:
        """Take the wanted files out of a pack; those that are in place are no longer wanted. Whether all of it came."""
        body = Body(pack["url"])
        if body.answer.headers.get("Content-Length", str(pack["bytes"])) != str(pack["bytes"]):
            body.close()
            return True  # all of what there is, and it cannot be right
        try:
            with tarfile.open(fileobj=body, mode="r|", bufsize=CHUNK, encoding="utf-8") as tar:  # type: ignore[call-overload]
                for member in tar:
                    file = wanted.get(member.name)
                    if file is None or not member.isfile() or member.size != file.size:
                        continue
                    if self.write(tar, member, file):
                        del wanted[member.name]
                    if not wanted:
                        return True
        except (tarfile.TarError, EOFError, ValueError):
            pass  # cut, or no tar at all: how much has come tells
        finally:
            body.close()
        return bool(body.count >= pack["bytes"])

    def write(self, tar: Any, member: Any, file: File) -> bool:
        """Whether the file is whole and in its place. Nothing half is ever there under its name."""
        part = os.path.join(self.scratch, str(threading.get_ident()).encode())
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        source, digest, count = tar.extractfile(member), hashlib.sha256(), 0
        handle = os.open(part, flags, 0o755 if file.executable else 0o644)
        try:
            while count < file.size:
                data = source.read(min(CHUNK, file.size - count))
                if not data:
                    break
                digest.update(data)
                count += len(data)
                self.moved += len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
            os.utime(handle, (file.mtime, file.mtime))
        except BaseException:
            os.unlink(part)  # a full disk: give back what the half file took
            raise
        finally:
            os.close(handle)
        if digest.hexdigest() != file.sha256:
            os.unlink(part)
            return False
        place = self.place(file)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.rename(part, place)
        with self.lock:
            self.files += 1
            self.bytes += file.size
        return True

    def place(self, file: File) -> bytes:
        place: bytes = os.path.join(self.root, file.path.encode())
        return place

    def looks_right(self, file: File) -> bool:
        try:
            info = os.lstat(self.place(file))
        except OSError:
            return False
        right = stat.S_ISREG(info.st_mode) and info.st_size == file.size
        return bool(right and bool(info.st_mode & stat.S_IXUSR) == file.executable)

    def has(self, file: File) -> bool:
        if not self.looks_right(file):
            return False
        digest = hashlib.sha256()
        with open(self.place(file), "rb", buffering=0) as opened:
            while True:
                data = opened.read(CHUNK)
                if not data:
                    return bool(digest.hexdigest() == file.sha256)
                digest.update(data)

    def note(self, why: str) -> None:
        """The first reason is the one to tell."""
        with self.lock:
            self.why = self.why or why


def clean(home: bytes) -> None:
    """Remove what a pull that was killed has left."""
    try:
        names = os.listdir(home)
    except OSError:
        return
    for name in names:
        if name.startswith(SCRATCH.encode()) and not os.path.exists(b"/proc/" + name[len(SCRATCH) :]):
            shutil.rmtree(os.path.join(home, name), ignore_errors=True)


def say(answer: Dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(args: List[str]) -> int:
    if args != ["pull"]:
        print("usage: " + (__doc__ or "").split("\n\n")[1].strip(), file=sys.stderr)
        return 2
    os.umask(0o022)
    order = json.loads(sys.stdin.buffer.readline())
    say({"mark": MARK})
    pull = Pull(order)
    try:
        pull.run()
        say(pull.answer())
    except BrokenPipeError:
        os._exit(4)  # nobody is left to tell, and the threads must not go on
    except OSError as exc:
        pull.note("%s on the pod" % os.strerror(exc.errno or 0))
        say(pull.answer())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
