"""The pod's end of a transfer. Standalone: standard library only, Python 3.8 or newer, imports nothing of ours.

    manifest.py check ROOT     a manifest on stdin; prints what is missing, mismatched or extra under ROOT
    manifest.py hash FILE...   prints size and sha256 of each file
    manifest.py list ROOT      a JSON list of glob patterns on stdin; prints the matching files
    manifest.py receive        makes the trees under a folder equal to a manifest, from tar streams on stdin
    manifest.py share          unpacks a share of what a `receive` under the same folder is to get, from a tar stream
    manifest.py send           streams files to stdout, from an offset each
    manifest.py blocks         writes parts of a file to stdout as they are asked for, one by one

A manifest is ``{"files": [[path, size, sha256], ...]}``; a null size or sha256 is not compared. Every answer is one
line of JSON, after a line that holds MARK: whatever a login shell prints first is told apart by that.
Names are bytes here and UTF-8 with surrogate escapes in JSON, so any name a file system takes survives the way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import glob
import hashlib
import json
import os
import select
import signal
import stat
import sys
import time
import zlib

TYPE_CHECKING = False  # importing typing would make every start slower
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Set, Tuple

    # relative path -> (kind, size, executable); kind is "file", "dir" or "other"
    Tree = Dict[bytes, Tuple[str, int, bool]]

MARK = "pennypod-manifest-1"
CHUNK = 1 << 18
BLOCK = 512
NAMED = 20  # how many names an answer spells out where a count would do
TICK_S = 1.0
BEGUN_BYTES = 4 << 20  # a file that broke off is worth going on with from this size
SETTLE_S = 10.0  # how long the shares of an upload whose line broke may take to notice
READY = b".pennypod-upload"  # beside the trees, while shares may write into them: which upload they must belong to
SILENCE_S = 60  # a share that gets no byte for this long has lost its line, and ends so that nobody waits for it


class RefusedError(Exception):
    """Something the other end has to know about; the arguments become the JSON answer."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.answer = dict(details, error=code, message=message)


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def to_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def say(answer: Dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode("ascii") + b"\n")
    sys.stdout.buffer.flush()


# --- trees and hashes ------------------------------------------------------------------------------------------------


def walk(root: bytes, sizes: bool = True) -> Tree:
    """Everything under `root`; symbolic links are never followed. A missing root is an empty tree."""
    tree: Tree = {}
    waiting = [b""]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except FileNotFoundError:
            continue
        for entry in entries:
            path = folder + b"/" + entry.name if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                tree[path] = ("dir", 0, False)
                waiting.append(path)
            elif entry.is_file(follow_symlinks=False):
                info = entry.stat(follow_symlinks=False) if sizes else None
                tree[path] = ("file", info.st_size, bool(info.st_mode & stat.S_IXUSR)) if info else ("file", 0, False)
            else:
                tree[path] = ("other", 0, False)
    return tree


def sha256_of(path: bytes, on_bytes: Any = None) -> str:
    return str(digest_of(path, on_bytes=on_bytes).hexdigest())


def digest_of(path: bytes, limit: Optional[int] = None, on_bytes: Any = None) -> Any:
    """The sha256 of a file, or of its first `limit` bytes, to go on with."""
    digest = hashlib.sha256()
    left = limit
    with open(path, "rb", buffering=0) as file:
        while left is None or left > 0:
            chunk = file.read(CHUNK if left is None else min(CHUNK, left))
            if not chunk:
                break
            digest.update(chunk)
            if left is not None:
                left -= len(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest


class Ticker:
    """Says how many bytes are hashed, so that the other end sees a long silence is work."""

    def __init__(self) -> None:
        self.bytes = 0
        self.next = time.monotonic() + TICK_S

    def __call__(self, count: int) -> None:
        self.bytes += count
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + TICK_S
            say({"hashed": self.bytes})


def check(root: bytes, manifest: Dict[str, Any]) -> Dict[str, Any]:
    """Compare the files under `root` with a manifest."""
    tree = walk(root)
    missing: List[str] = []
    mismatched: List[str] = []
    wanted: Set[bytes] = set()
    for text, size, sha256 in manifest["files"]:
        path = to_bytes(text)
        wanted.add(path)
        kind, found_size, _ = tree.get(path, ("none", 0, False))
        if kind != "file":
            missing.append(text)
        elif (size is not None and size != found_size) or (
            sha256 is not None and sha256_of(os.path.join(root, path)) != sha256
        ):
            mismatched.append(text)
    extra = sorted(to_text(path) for path, (kind, _, _) in tree.items() if kind != "dir" and path not in wanted)
    return {"missing": missing, "mismatched": mismatched, "extra": extra, "files": len(wanted)}


def hashes(names: List[bytes]) -> Dict[str, Any]:
    """Size and sha256 by name; a file that cannot be read has `error` instead."""
    return {"files": {to_text(name): _size_and_hash(name) for name in names}}


def _size_and_hash(name: bytes) -> Dict[str, Any]:
    try:
        return {"size": os.stat(name).st_size, "sha256": sha256_of(name)}
    except OSError as exc:
        return {"error": os.strerror(exc.errno or 0)}


def matching(root: bytes, patterns: List[str]) -> Dict[str, Any]:
    """Regular files under `root` that match a pattern (`**` spans folders), never by a link that leads out of it."""
    real_root = os.path.realpath(root)
    found: Dict[bytes, int] = {}
    for pattern in patterns:
        for path in glob.glob(os.path.join(glob.escape(root), to_bytes(pattern)), recursive=True):
            real = os.path.realpath(path)
            if os.path.isfile(real) and real.startswith(real_root + b"/"):
                found[os.path.relpath(path, root)] = os.stat(real).st_size
    return {"files": [[to_text(path), size] for path, size in sorted(found.items())]}


# --- receive ---------------------------------------------------------------------------------------------------------


class Source:
    """Bytes from stdin, taken as they come. Raises EOFError when the line ends too early."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.buffer = memoryview(b"")
        self.patience_s = 0  # end the process after a silence of so long; 0 is for ever

    def more(self) -> bytes:
        signal.alarm(self.patience_s)
        data: bytes = self.file.read1(CHUNK)
        signal.alarm(0)
        return data

    def some(self, limit: int) -> memoryview:
        """Between one and `limit` bytes."""
        if not self.buffer:
            data = self.more()
            if not data:
                raise EOFError
            self.buffer = memoryview(data)
        part, self.buffer = self.buffer[:limit], self.buffer[limit:]
        return part

    def exactly(self, count: int) -> bytes:
        part = self.some(count) if count else b""
        if len(part) == count:
            return bytes(part)
        parts = [part]
        left = count - len(part)
        while left:
            part = self.some(left)
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def line(self) -> bytes:
        parts = []
        while True:
            part = bytes(self.some(CHUNK))
            end = part.find(b"\n")
            if end < 0:
                parts.append(part)
                continue
            self.give_back(part[end + 1 :])
            return b"".join(parts) + part[:end]

    def give_back(self, data: bytes) -> None:
        if data:
            self.buffer = memoryview(data + bytes(self.buffer))


class Unzipped(Source):
    """The gzip stream that comes next in another source; what follows it is given back."""

    def __init__(self, packed: Source) -> None:
        super().__init__(None)
        self.packed = packed
        self.engine = zlib.decompressobj(wbits=31)

    def more(self) -> bytes:
        while not self.engine.eof:
            data = self.engine.decompress(self.engine.unconsumed_tail or self.packed.some(CHUNK), CHUNK)
            if data:
                return data
        return b""

    def finish(self) -> None:
        while self.more():
            pass
        self.packed.give_back(self.engine.unused_data)


def tar_members(source: Source) -> Iterator[Tuple[bytes, int, int, int, bool]]:
    """(name, size, mode, mtime, goes on) of each regular file; whoever iterates reads the content in between.

    A member that goes on holds the rest of a file that is here in part, as in the second volume of an archive.
    """
    name = b""
    while True:
        header = source.exactly(BLOCK)
        if not header.strip(b"\0"):
            source.exactly(BLOCK)  # the archive ends with two empty blocks
            return
        size = tar_number(header[124:136])
        kind = header[156:157]
        if kind == b"L":  # GNU: the real name of the next member
            name = source.exactly(size).rstrip(b"\0")
            source.exactly(-size % BLOCK)
            continue
        if kind not in (b"0", b"M"):
            raise RefusedError("protocol", "unexpected kind %r in the tar stream" % kind)
        mode, mtime = tar_number(header[100:108]), tar_number(header[136:148])
        yield name or header[:100].rstrip(b"\0"), size, mode, mtime, kind == b"M"
        source.exactly(-size % BLOCK)
        name = b""


def tar_number(field: bytes) -> int:
    if field[0] == 0x80:  # GNU: base 256, for what octal cannot hold
        return int.from_bytes(field[1:], "big")
    return int(field.rstrip(b"\0 ") or b"0", 8)


def matches(path: bytes, is_dir: bool, patterns: List[bytes]) -> bool:
    """The upload's rule for leaving out: a plain pattern fits a name anywhere, one with a slash the path from the root,
    one that ends in a slash fits folders only."""
    for pattern in patterns:
        if pattern.endswith(b"/") and not is_dir:
            continue
        bare = pattern.rstrip(b"/")
        subject = path if b"/" in bare else path.rpartition(b"/")[2]
        if fnmatch.fnmatchcase(subject, bare.lstrip(b"/")):
            return True
    return False


class Part:
    """One tree that is made equal to its manifest."""

    def __init__(self, home: bytes, request: Dict[str, Any]) -> None:
        self.root = os.path.join(home, to_bytes(request["name"]))
        self.files: List[Tuple[bytes, int, bool]] = [(to_bytes(p), size, bool(x)) for p, size, x in request["files"]]
        self.dirs = {to_bytes(path) for path in request["dirs"]}
        self.keep: List[bytes] = [to_bytes(pattern) for pattern in request["keep"]]
        self.compressed: bool = request["compressed"]
        self.index = {path: number for number, (path, _, _) in enumerate(self.files)}
        self.extra: List[bytes] = []
        self.order: List[int] = []  # numbers of the files that come, here or in shares
        self.hashed: Dict[int, str] = {}
        self.found: Tree = {}
        self.begun: Dict[int, Any] = {}  # digests of the files that are here in part, by number
        self.goes_on: Set[int] = set()

    def survey(self, tick: Ticker) -> Dict[str, Any]:
        """What is there already: hashes of the files that look right, and what does not belong."""
        tree = self.found = walk(self.root)
        have = []
        begun = []
        for number, (path, size, executable) in enumerate(self.files):
            kind, found_size, found_executable = tree.get(path, ("none", 0, False))
            full = os.path.join(self.root, path)
            if (kind, found_executable) != ("file", executable):
                continue
            if found_size == size:
                have.append([number, sha256_of(full, on_bytes=tick)])
            elif BEGUN_BYTES <= found_size < size:
                digest = self.begun[number] = digest_of(full, found_size, on_bytes=tick)
                begun.append([number, found_size, digest.hexdigest()])
        self.extra = self.extras(tree)
        return {
            "have": have,
            "begun": begun,
            "extra": [to_text(path) for path in self.extra[:NAMED]],
            "extra_count": len(self.extra),
            "missing_dirs": sum(tree.get(path, ("",))[0] != "dir" for path in self.dirs)
            + (not os.path.isdir(self.root)),
        }

    def extras(self, tree: Tree) -> List[bytes]:
        """What is not in the manifest, nor of a kind the upload leaves out on purpose (a cache beside the code)."""
        extra: Set[bytes] = set()
        kept: Set[bytes] = set()
        for path, (kind, _, _) in sorted(tree.items()):  # a folder comes before what is in it
            parent = path.rpartition(b"/")[0]
            if (kind == "file" and path in self.index) or (kind == "dir" and path in self.dirs):
                continue
            if parent not in extra and (parent in kept or matches(path, kind == "dir", self.keep)):
                kept.add(path)
            else:
                extra.add(path)
        return sorted(extra)

    def unfit(self, sent: List[List[Any]]) -> Set[int]:
        """Numbers of the files that did not arrive here as `sent` ([number, hash] each) or are not there; shares answer
        for the hashes of what they got."""
        tree = walk(self.root, sizes=False)
        bad = {number for number, (path, _, _) in enumerate(self.files) if tree.get(path, ("none",))[0] != "file"}
        for number, sha256 in sent:
            if sha256 is None or self.hashed.get(number) != sha256:
                bad.add(number)
        return bad

    def prepare(self) -> int:
        """Make room: extras and files to be replaced go, folders are made. Returns how many extras were removed."""
        removed = 0
        for path in reversed(self.extra):  # children before their folder
            full = os.path.join(self.root, path)
            if os.path.isdir(full) and not os.path.islink(full):
                os.rmdir(full)
            else:
                os.unlink(full)
                removed += 1
        os.makedirs(self.root, exist_ok=True)
        for path in sorted(self.dirs):
            os.makedirs(os.path.join(self.root, path), exist_ok=True)
        for number in self.order:
            if self.files[number][0] in self.found and number not in self.goes_on:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.root, self.files[number][0]))
        return removed

    def receive(self, source: Source) -> None:
        """Unpack one tar stream, hashing what is written."""
        stream = Unzipped(source) if self.compressed else source
        for name, sha256 in unpack(self.root, stream, lambda name: self.begun[self.index[name]]):
            self.hashed[self.index[name]] = sha256
        if isinstance(stream, Unzipped):
            stream.finish()


def unpack(root: bytes, stream: Source, begun: Callable[[bytes], Any]) -> Iterator[Tuple[bytes, str]]:
    """Write the members of a tar stream; (name, sha256) of each once it is whole. `begun` gives the digest of what is
    here of a member that goes on."""
    for name, size, mode, mtime, goes_on in tar_members(stream):
        path = os.path.join(root, name)
        digest = begun(name) if goes_on else hashlib.sha256()
        how = os.O_APPEND | os.O_NOFOLLOW if goes_on else os.O_CREAT | os.O_EXCL
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | how, mode)
        except FileExistsError as exc:
            raise RefusedError("raced", "another upload writes there", path=to_text(path)) from exc
        try:
            left = size
            while left:
                part = stream.some(left)
                left -= len(part)
                digest.update(part)
                while part:
                    part = part[os.write(handle, part) :]
            os.utime(handle, (mtime, mtime))
        except OSError:
            os.unlink(path)  # a full disk: give back what the half file took
            raise
        finally:
            os.close(handle)
        yield name, digest.hexdigest()


def free_space(path: bytes) -> Tuple[int, Optional[int]]:
    """(free bytes, free inodes or None where the file system does not count them) for whoever runs this."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize, info.f_favail if info.f_files else None


def receive(source: Source) -> None:
    """Survey, take what the other end says it sends, answer what did not arrive whole."""
    request = json.loads(source.line())
    home = to_bytes(request["home"])
    parts = [Part(home, part) for part in request["parts"]]
    os.umask(0o022)
    say({"mark": MARK})
    lock = None if request["dry_run"] else _settled(home)
    tick = Ticker()
    surveys = [part.survey(tick) for part in parts]
    say({"parts": surveys, "free": free_space(home)[0], "locked": lock is not None})
    if request["dry_run"]:
        return
    order = json.loads(source.line())
    with _told_when_full(home, order["bytes"]):
        _take(home, parts, order, source, lock)


def share(source: Source) -> None:
    """Take what the other end sends here, hashing it; `receive` looks that nothing is missing in the end."""
    os.umask(0o022)
    say({"mark": MARK})
    order = json.loads(source.line())
    home, root = to_bytes(order["home"]), os.path.join(to_bytes(order["home"]), to_bytes(order["name"]))
    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_SH)  # waits until `receive` has made room; held until this process ends
    if not _joined(home, order["token"]):
        return  # `receive` has refused, or its line broke before there was room
    source.patience_s = SILENCE_S
    with _told_when_full(home, order["bytes"]):
        hashed = [sha256 for _, sha256 in unpack(root, source, lambda name: digest_of(os.path.join(root, name)))]
    sent = json.loads(source.line())["sha256"]
    if len(sent) != len(hashed):
        raise RefusedError("protocol", "%d files came, %d were announced" % (len(hashed), len(sent)))
    say({"bad": [place for place, sha256 in enumerate(sent) if sha256 is None or sha256 != hashed[place]]})


def _joined(home: bytes, token: str) -> bool:
    """Whether a share belongs to the upload that is under way; it is counted then, by one byte behind the token."""
    try:
        handle = os.open(os.path.join(home, READY), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    joined = os.read(handle, len(token)) == token.encode()
    if joined:
        os.write(handle, b".")
    os.close(handle)
    return joined


def _wait_for_shares(home: bytes, joined_size: int, source: Source) -> None:
    """Until READY has grown to this size, and all who made it grow have ended."""
    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    while os.stat(os.path.join(home, READY)).st_size < joined_size or not _locked(handle):
        if select.select([source.file], [], [], 0.005)[0]:
            raise EOFError  # nothing is due from the other end: it has hung up
    os.close(handle)


@contextlib.contextmanager
def _told_when_full(home: bytes, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RefusedError("disk_full", "no space left", free=free_space(home)[0], needed=needed) from exc


def _settled(home: bytes) -> Optional[int]:
    """A lock that keeps shares waiting, got when those of an upload that broke off are gone. None where the file system
    has no locks: then there can be no shares."""
    os.makedirs(home, exist_ok=True)
    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    give_up_at = time.monotonic() + SETTLE_S
    try:
        while not _locked(handle):
            if time.monotonic() > give_up_at:
                raise RefusedError("raced", "another upload writes there", path=to_text(home))
            time.sleep(0.02)
    except OSError:
        os.close(handle)
        return None
    return handle


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take(home: bytes, parts: List[Part], order: Dict[str, Any], source: Source, lock: Optional[int]) -> None:
    removed = 0
    for place, part in enumerate(parts):
        part.order = order["send"][place]
        part.goes_on = set(order["go_on"][place])
        removed += part.prepare()
    free, inodes = free_space(home)
    count = sum(len(part.order) for part in parts)
    if free < order["bytes"]:
        raise RefusedError("disk_full", "not enough space", free=free, needed=order["bytes"])
    if inodes is not None and inodes < count:
        raise RefusedError(
            "disk_full", "not enough inodes", free=free, needed=order["bytes"], inodes=inodes, files=count
        )
    if lock is not None:
        if order["token"] is not None:
            with open(os.path.join(home, READY), "w") as file:
                file.write(order["token"])
        os.close(lock)  # shares may begin
    for part in parts:
        if part.order:
            part.receive(source)
    done = json.loads(source.line())
    if done["shares"]:
        _wait_for_shares(home, len(order["token"]) + done["shares"], source)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(home, READY))
    bad = [[place, number] for place, part in enumerate(parts) for number in sorted(part.unfit(done["sha256"][place]))]
    say({"bad": bad, "removed": removed})


# --- send ------------------------------------------------------------------------------------------------------------


def send(source: Source) -> None:
    """Stream the asked files, each from its offset: a line about it, the bytes, a line with the hash of all of it.

    With `apart` the bytes are left out: other connections fetch them by `blocks`.
    """
    request = json.loads(source.line())
    say({"mark": MARK})
    for text, offset in request["files"]:
        try:
            file: BinaryIO = open(to_bytes(text), "rb", buffering=0)  # noqa: SIM115
        except OSError as exc:
            code = "missing" if exc.errno == errno.ENOENT else "unreadable"
            say({"error": code, "message": os.strerror(exc.errno or 0), "path": text})
            continue
        with file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                _send_file(file, offset, apart=request["apart"])
            else:
                say({"error": "unreadable", "message": "not a regular file", "path": text})


def _send_file(file: BinaryIO, offset: int, apart: bool) -> None:
    before = os.fstat(file.fileno())
    size = before.st_size
    digest = hashlib.sha256()
    tick = Ticker()
    if offset > size:
        offset = 0
    left = offset
    while left:
        data = file.read(min(CHUNK, left))
        if not data:
            break
        digest.update(data)
        left -= len(data)
        tick(len(data))
    say({"size": size, "offset": offset, "prefix_sha256": digest.hexdigest()})
    left = size - offset
    out = sys.stdout.buffer
    while left:
        data = file.read(min(CHUNK, left)) or bytes(
            min(CHUNK, left)
        )  # a file that shrank is filled up, and reported below
        digest.update(data)
        if apart:
            tick(len(data))
        else:
            out.write(data)
        left -= len(data)
    after = os.fstat(file.fileno())
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    say({"sha256": digest.hexdigest(), "same": same})


def blocks(source: Source) -> None:
    """Answer each line that asks for a block with a line about its length, then its bytes, until the input ends."""
    say({"mark": MARK})
    name, file = None, None  # type: Optional[str], Optional[BinaryIO]
    while True:
        wanted = json.loads(source.line())
        if file is None or wanted["path"] != name:
            name, file = wanted["path"], open(to_bytes(wanted["path"]), "rb", buffering=0)  # noqa: SIM115
        file.seek(wanted["offset"])
        data = file.read(wanted["length"])
        say({"length": len(data)})
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


# --- main ------------------------------------------------------------------------------------------------------------


def main(args: List[str]) -> int:
    command, rest = args[0], [os.fsencode(arg) for arg in args[1:]]
    source = Source(sys.stdin.buffer)
    try:
        if command == "receive":
            receive(source)
        elif command == "share":
            share(source)
        elif command == "send":
            send(source)
        elif command == "blocks":
            blocks(source)
        else:
            say({"mark": MARK})
            if command == "check":
                say(check(rest[0], json.loads(sys.stdin.buffer.read())))
            elif command == "hash":
                say(hashes(rest))
            elif command == "list":
                say(matching(rest[0], json.loads(sys.stdin.buffer.read())))
            else:
                raise RefusedError("usage", "no such command: " + command)
    except RefusedError as exc:
        say(exc.answer)
        return 3
    except EOFError:
        return 4  # the line broke; nobody is left to tell
    except OSError as exc:
        name = to_text(exc.filename) if isinstance(exc.filename, bytes) else str(exc.filename or "")
        say({"error": "os", "message": os.strerror(exc.errno or 0), "path": name})
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
