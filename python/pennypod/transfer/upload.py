"""Trees to a pod: two tar streams over one SSH session, verified by hash, until the pod has exactly the plan.

One attempt is one conversation: the pod says what it has already (by hash), gets what is missing (code gzipped, data as
it is), then the hashes of what was sent, and answers what did not arrive whole. A broken line starts another attempt,
which sends only what the pod cannot show. After an attempt the source is looked at once more: what changed goes again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pennypod.clock import Clock, SystemClock
from pennypod.errors import InputError, SourceChangedError, TransferError
from pennypod.transfer import tar
from pennypod.transfer.plan import Part, SourceFile, UploadPlan, shown
from pennypod.transfer.session import STALL_S, LineBrokenError, Meter, Progress, Session, lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from pennypod.ssh import Ssh

CHUNK = 1 << 18
MAX_STRIKES = 5  # broken lines in a row without anything more on the pod
MAX_ROUNDS = 4  # looks at a source that keeps changing, or a pod whose disk returns other bytes than it got
FS_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class UploadResult:
    """`bytes` and `files` went over the line in this call, repeats included. `unchanged_files` were on the pod before
    it, `resumed_files` are those that a broken line did not cost again, `removed_files` did not belong to the plan."""

    bytes: int
    files: int
    seconds: float
    resumed_files: int
    unchanged_files: int
    removed_files: int = 0
    reconnects: int = 0
    made_directories: int = 0

    @property
    def changed(self) -> bool:
        return bool(self.files or self.removed_files or self.made_directories)


@dataclass(frozen=True, slots=True)
class Preview:
    """What an upload would do now. `paths` are the first few it would send."""

    files: int
    bytes: int
    unchanged_files: int
    extra_files: int
    free_bytes: int | None
    changed: bool
    paths: tuple[str, ...] = ()


_Begun = tuple[int, "hashlib._Hash"]  # noqa: SLF001 - the name typeshed has for a digest


@dataclass(slots=True)
class _Survey:
    """What the pod has: for each part the numbers of the files that are there and verified, and those whose beginning
    is, with its length and its digest to go on with."""

    have: list[set[int]]
    begun: list[dict[int, _Begun]]
    verified: tuple[int, int]  # bytes, whole files
    extra: int
    missing_dirs: int
    free: int


@dataclass(slots=True)
class _Attempt:
    """What one conversation came to, filled while it goes so that a broken line leaves what is known."""

    survey: _Survey | None = None
    changed: list[str] = field(default_factory=list)  # sources that were not the same before and after reading
    bad: list[str] = field(default_factory=list)  # files that the pod does not have as they were sent
    removed: int = 0
    now: UploadPlan | None = None  # the source after the last byte was sent


class _Hashes:
    """Hashes of local files, kept for as long as size, time and inode stay the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, SourceFile], str] = {}

    def of(self, part: Part, file: SourceFile) -> str | None:
        """The hash, or None when the file is not as planned any more."""
        known = self._known.get((part.name, file))
        if known is None and file.content is not None:
            known = hashlib.sha256(file.content).hexdigest()
        if known is None:
            try:
                with open(part.source(file), "rb") as opened:  # noqa: PTH123
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
                    known = digest if _is_as_planned(os.fstat(opened.fileno()), file) else None
            except FileNotFoundError:
                return None
            except OSError as exc:
                raise _unreadable(part, file, exc) from exc
        if known is not None:
            self.keep(part, file, known)
        return known

    def keep(self, part: Part, file: SourceFile, sha256: str) -> None:
        self._known[part.name, file] = sha256


def upload(
    ssh: Ssh,
    plan: UploadPlan,
    pod_home: str,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
    stall_s: float = STALL_S,
) -> UploadResult:
    """Make the trees under `pod_home` equal to the plan's.

    Raises SourceChangedError when a file vanished or would not keep still, DiskFullError when the pod has no room,
    SshError when the line broke too often, TransferError for anything else; never returns with less than all of it.
    """
    return _Upload(ssh, plan, pod_home, on_progress, clock or SystemClock(), stall_s).run()


def preview(ssh: Ssh, plan: UploadPlan, pod_home: str, *, stall_s: float = STALL_S) -> Preview:
    """Say what `upload` would do, changing nothing on the pod."""
    with Session(ssh, "receive", stall_s=stall_s) as session:
        try:
            survey = _survey(session, plan, pod_home, _Hashes(), dry_run=True)
        except LineBrokenError as exc:
            raise ssh.error(str(exc)) from exc
    todo = [
        (part, file)
        for part, have in zip(plan.parts, survey.have, strict=True)
        for number, file in enumerate(part.files)
        if number not in have
    ]
    return Preview(
        files=len(todo),
        bytes=sum(file.size for _, file in todo),
        unchanged_files=plan.files - len(todo),
        extra_files=survey.extra,
        free_bytes=survey.free,
        changed=bool(todo or survey.extra or survey.missing_dirs),
        paths=tuple(f"{part.name}/{shown(file.path)}" for part, file in todo[:20]),
    )


class _Upload:
    def __init__(
        self,
        ssh: Ssh,
        plan: UploadPlan,
        pod_home: str,
        on_progress: Callable[[Progress], None] | None,
        clock: Clock,
        stall_s: float,
    ) -> None:
        self.ssh, self.plan, self.pod_home, self.clock, self.stall_s = ssh, plan, pod_home, clock, stall_s
        self.meter = Meter(on_progress, plan.bytes, plan.files)
        self.hashes = _Hashes()
        self.sent_files = self.sent_bytes = 0

    def run(self) -> UploadResult:
        rounds = strikes = reconnects = removed = resumed = 0
        first: _Survey | None = None
        best = (-1, -1)
        while True:
            attempt = _Attempt()
            broken: LineBrokenError | None = None
            try:
                self._attempt(attempt)
            except LineBrokenError as exc:
                broken = exc
            removed += attempt.removed
            if attempt.survey is not None:
                first = first or attempt.survey
                if reconnects and attempt.survey.verified > best:
                    resumed = max(resumed, attempt.survey.verified[1] - first.verified[1])
                    strikes = 0
                best = max(best, attempt.survey.verified)
            if broken is not None:
                strikes += 1
                reconnects += 1
                if strikes > MAX_STRIKES:
                    raise lost(self.ssh, "uploading", strikes, broken) from broken
                self.meter.show()  # a caller that wants to stop says so from its callback
                self.clock.sleep(min(0.5 * 2 ** (strikes - 1), 8.0))
                continue
            assert attempt.now is not None
            if not self._again(attempt, attempt.now):
                break
            rounds += 1
            if rounds >= MAX_ROUNDS:
                raise self._given_up(attempt)
            self.clock.sleep(0.2 * 2**rounds)
        assert first is not None
        self.meter.start_from(self.plan.bytes, self.plan.files)
        return UploadResult(
            bytes=self.sent_bytes,
            files=self.sent_files,
            seconds=round(self.meter.seconds, 3),
            resumed_files=resumed,
            unchanged_files=first.verified[1],
            removed_files=removed,
            reconnects=reconnects,
            made_directories=first.missing_dirs,
        )

    def _look_again(self) -> UploadPlan:
        try:
            return self.plan.rescan()
        except FileNotFoundError as exc:
            path = shown(str(exc.filename))
            raise SourceChangedError(f"{path} vanished while it was sent: nothing may use it now", path=path) from exc
        except (InputError, OSError) as exc:
            raise SourceChangedError(f"the source changed while it was sent: {exc}") from exc

    def _again(self, attempt: _Attempt, now: UploadPlan) -> bool:
        """Whether another round is due, with the plan brought up to date. A file that is gone ends it all."""
        for before, after in zip(self.plan.parts, now.parts, strict=True):
            there = {file.path for file in after.files}
            for file in before.files:
                if file.path not in there:
                    raise _vanished(before, file)
        moved = now != self.plan
        if moved:
            attempt.changed += _differences(self.plan, now)
            self.plan = now
            self.meter.bytes_total, self.meter.files_total = now.bytes, now.files
        return moved or bool(attempt.changed or attempt.bad)

    def _given_up(self, attempt: _Attempt) -> TransferError:
        if attempt.changed:
            names = sorted(set(attempt.changed))
            return SourceChangedError(
                f"{names[0]} keeps changing while it is sent"
                + (f", and {len(names) - 1} more" if len(names) > 1 else "")
                + ": wait until it is finished, then run again",
                paths=names[:20],
            )
        names = sorted(attempt.bad)
        return TransferError(
            f"{len(names)} files arrive damaged on the pod again and again, first {names[0]}", paths=names[:20]
        )

    def _attempt(self, attempt: _Attempt) -> None:
        parts = self.plan.parts
        with Session(self.ssh, "receive", stall_s=self.stall_s) as session:
            survey = attempt.survey = _survey(session, self.plan, self.pod_home, self.hashes, dry_run=False)
            todo = [
                [number for number in range(len(part.files)) if number not in have]
                for part, have in zip(parts, survey.have, strict=True)
            ]
            work = list(zip(parts, todo, survey.begun, strict=True))
            sizes = [
                part.files[number].size - begun.get(number, (0,))[0]
                for part, numbers, begun in work
                for number in numbers
            ]
            self.meter.start_from(self.plan.bytes - sum(sizes), self.plan.files - len(sizes))
            # What the files will take on disk, so that a pod without room refuses before the first byte.
            room = sum(-(-size // FS_BLOCK) * FS_BLOCK for size in sizes)
            session.tell({"send": todo, "go_on": [list(begun) for begun in survey.begun], "bytes": room})
            sent = [self._send(session, part, numbers, begun, attempt) for part, numbers, begun in work]
            session.tell({"sha256": sent})
            attempt.now = self._look_again()  # while the pod looks at what it has
            answer = session.message()
        attempt.removed = int(answer["removed"])
        attempt.bad = [
            f"{parts[place].name}/{shown(parts[place].files[number].path)}" for place, number in answer["bad"]
        ]
        attempt.bad = [name for name in attempt.bad if name not in attempt.changed]

    def _send(
        self, session: Session, part: Part, numbers: list[int], begun: dict[int, _Begun], attempt: _Attempt
    ) -> list[str | None]:
        """Send one part as a tar stream; the hashes in the order of `numbers`, None for what must go again."""
        if not numbers:
            return []
        out = _Out(session, self.meter, compressed=part.compressed)
        hashes: list[str | None] = []
        for number in numbers:
            file = part.files[number]
            offset, digest = begun.get(number) or (0, hashlib.sha256())
            sha256 = _send_file(out, part, file, offset, digest)
            hashes.append(sha256)
            if sha256 is None:
                attempt.changed.append(f"{part.name}/{shown(file.path)}")
            else:
                self.hashes.keep(part, file, sha256)
                self.sent_files += 1
                self.sent_bytes += file.size - offset
            self.meter.files_done += 1
        out.put(tar.END)
        out.finish()
        return hashes


class _Out:
    """Gathers small pieces into large writes, gzipped if so wished."""

    def __init__(self, session: Session, meter: Meter, *, compressed: bool) -> None:
        self._session, self._meter = session, meter
        self._zip = zlib.compressobj(6, wbits=31) if compressed else None
        self._pieces: list[bytes | memoryview] = []
        self._size = 0

    def put(self, piece: bytes | memoryview, counted: int = 0) -> None:
        """Take in a piece, of which `counted` bytes are content. A memoryview must not change before `flush`."""
        self._pieces.append(piece)
        self._size += len(piece)
        if counted:
            self._meter.add(counted)
        if self._size >= CHUNK:
            self.flush()

    def flush(self) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self._zip is not None:
            data = self._zip.compress(data)
        if data:
            self._session.write(data)

    def finish(self) -> None:
        self.flush()
        if self._zip is not None:
            self._session.write(self._zip.flush())


def _send_file(out: _Out, part: Part, file: SourceFile, offset: int, digest: hashlib._Hash) -> str | None:
    """Put one file, or what comes after `offset`, into the stream. `digest` is of what comes before.

    Returns the hash of the whole file, or None when it was not the same from the plan to the last byte.
    """
    name, mode, mtime = os.fsencode(file.path), 0o755 if file.executable else 0o644, file.mtime_ns // 1_000_000_000
    if offset:
        head = tar.header_of_rest(name, file.size - offset, mode, mtime, offset)
    else:
        head = tar.header(name, file.size, mode, mtime)
    if file.content is not None:
        out.put(head)
        out.put(file.content, file.size)
        out.put(tar.padding(file.size))
        return hashlib.sha256(file.content).hexdigest()
    handle = _open(part, file)
    try:
        if not _is_as_planned(os.fstat(handle), file):
            return None
        out.put(head)
        if offset:
            os.lseek(handle, offset, os.SEEK_SET)
        left = file.size - offset
        while left:
            data = os.read(handle, min(CHUNK, left))
            if not data:
                break
            digest.update(data)
            left -= len(data)
            out.put(data, len(data))
        for start in range(0, left, CHUNK):  # it shrank: the stream must keep to the size in the header
            out.put(bytes(min(CHUNK, left - start)))
        out.put(tar.padding(file.size - offset))
        return digest.hexdigest() if not left and _is_as_planned(os.fstat(handle), file) else None
    except OSError as exc:
        raise _unreadable(part, file, exc) from exc
    finally:
        os.close(handle)


def _digest_of_beginning(part: Part, file: SourceFile, length: int) -> hashlib._Hash | None:
    """The digest of the first `length` bytes, or None when the file is not as planned any more."""
    if file.content is not None:
        return None  # contents made here are small: they go whole
    digest = hashlib.sha256()
    handle = _open(part, file)
    try:
        while length and (data := os.read(handle, min(CHUNK, length))):
            digest.update(data)
            length -= len(data)
        return digest if not length and _is_as_planned(os.fstat(handle), file) else None
    except OSError as exc:
        raise _unreadable(part, file, exc) from exc
    finally:
        os.close(handle)


def _open(part: Part, file: SourceFile) -> int:
    for patience_s in (0.05, 0.2, None):  # a program that replaces a file may leave a gap of an instant
        try:
            return os.open(part.source(file), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as exc:
            if patience_s is None:
                raise _vanished(part, file) from exc
            time.sleep(patience_s)
        except OSError as exc:
            raise _unreadable(part, file, exc) from exc
    raise AssertionError("unreachable")


def _is_as_planned(info: os.stat_result, file: SourceFile) -> bool:
    return stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns, info.st_ino) == (
        file.size,
        file.mtime_ns,
        file.inode,
    )


def _survey(session: Session, plan: UploadPlan, pod_home: str, hashes: _Hashes, *, dry_run: bool) -> _Survey:
    """Ask what the pod has and compare it with the files here."""
    request = {
        "home": pod_home,
        "dry_run": dry_run,
        "parts": [
            {
                "name": part.name,
                "files": [[_wire(file.path), file.size, file.executable] for file in part.files],
                "dirs": [_wire(path) for path in part.directories],
                "keep": list(part.excludes),
                "compressed": part.compressed,
            }
            for part in plan.parts
        ],
    }
    session.begin(request)
    answer = session.message()
    have: list[set[int]] = []
    begun: list[dict[int, _Begun]] = []
    for part, found in zip(plan.parts, answer["parts"], strict=True):
        have.append({number for number, sha256 in found["have"] if hashes.of(part, part.files[number]) == sha256})
        begun.append({})
        for number, length, sha256 in found["begun"]:
            digest = _digest_of_beginning(part, part.files[number], length)
            if digest is not None and digest.hexdigest() == sha256:
                begun[-1][number] = (length, digest)
    return _Survey(
        have=have,
        begun=begun,
        verified=(
            sum(part.files[number].size for part, numbers in zip(plan.parts, have, strict=True) for number in numbers)
            + sum(length for found in begun for length, _ in found.values()),
            sum(map(len, have)),
        ),
        extra=sum(found["extra_count"] for found in answer["parts"]),
        missing_dirs=sum(found["missing_dirs"] for found in answer["parts"]),
        free=int(answer["free"]),
    )


def _differences(before: UploadPlan, after: UploadPlan) -> list[str]:
    """Names of what is new or not the same in `after`."""
    names = []
    for old, new in zip(before.parts, after.parts, strict=True):
        names += [f"{new.name}/{shown(path)}" for path in sorted({f.path for f in {*new.files} ^ {*old.files}})]
        names += [f"{new.name}/{shown(path)}" for path in sorted({*new.directories} ^ {*old.directories})]
    return names


def _wire(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "surrogateescape")


def _vanished(part: Part, file: SourceFile) -> SourceChangedError:
    path = shown(part.source(file))
    return SourceChangedError(f"{path} vanished while the {part.name} was sent: nothing may use it now", path=path)


def _unreadable(part: Part, file: SourceFile, exc: OSError) -> InputError:
    path = shown(part.source(file))
    return InputError(f"cannot read {path}: {exc.strerror}", path=path)
