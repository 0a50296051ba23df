"""Trees to a pod: tar streams over SSH, verified by hash, until the pod has exactly the plan.

One attempt is one conversation: the pod says what it has already (by hash), gets what is missing (code gzipped, data as
it is), then the hashes of what was sent, and answers what did not arrive whole. On a long line further connections take
shares of the data (`shares`). A broken line starts another attempt, which sends only what the pod cannot show. After an
attempt the source is looked at once more: what changed goes again.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pennypod.clock import Clock, SystemClock
from pennypod.errors import InputError, SourceChangedError, TransferError
from pennypod.transfer.outgoing import (
    Begun,
    Outgoing,
    Tally,
    digest_of_beginning,
    is_as_planned,
    stream_out,
    unreadable,
    vanished,
)
from pennypod.transfer.plan import Part, SourceFile, UploadPlan, shown
from pennypod.transfer.session import STALL_S, LineBrokenError, Meter, Progress, Session, lost
from pennypod.transfer.shares import MAX_STREAMS, Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pennypod.ssh import Ssh

MAX_STRIKES = 5  # broken lines in a row without anything more on the pod
MAX_ROUNDS = 4  # looks at a source that keeps changing, or a pod whose disk returns other bytes than it got
FS_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class UploadResult:
    """`bytes` and `files` went over the line in this call, repeats included. `unchanged_files` were on the pod before
    it, `resumed_files` are those that a broken line did not cost again, `removed_files` did not belong to the plan,
    `streams` is the number of connections that carried files at once, `by_part` what each part had of `bytes`."""

    bytes: int
    files: int
    seconds: float
    resumed_files: int
    unchanged_files: int
    removed_files: int = 0
    reconnects: int = 0
    made_directories: int = 0
    streams: int = 1
    by_part: Mapping[str, int] = field(default_factory=dict)

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


@dataclass(slots=True)
class _Survey:
    """What the pod has: for each part the numbers of the files that are there and verified, and those whose beginning
    is, with its length and its digest to go on with."""

    have: list[set[int]]
    begun: list[dict[int, Begun]]
    verified: tuple[int, int]  # bytes, whole files
    extra: int
    missing_dirs: int
    free: int
    locked: bool  # the pod keeps shares waiting until it is ready for them, so there may be some


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

    def __init__(self, known: Mapping[tuple[str, SourceFile], str] | None = None) -> None:
        self._known = dict(known or {})

    def of(self, part: Part, file: SourceFile) -> str | None:
        """The hash, or None when the file is not as planned any more."""
        known = self._known.get((part.name, file))
        if known is None and file.content is not None:
            known = hashlib.sha256(file.content).hexdigest()
        if known is None:
            try:
                with open(part.source(file), "rb") as opened:  # noqa: PTH123
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
                    known = digest if is_as_planned(os.fstat(opened.fileno()), file) else None
            except FileNotFoundError:
                return None
            except OSError as exc:
                raise unreadable(part, file, exc) from exc
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
    known: Mapping[tuple[str, SourceFile], str] | None = None,
    most_streams: int = MAX_STREAMS,
) -> UploadResult:
    """Make the trees under `pod_home` equal to the plan's.

    `known` are hashes that the caller has already, by the part's name and the file: they hold for that very file, its
    size, time and inode included. `most_streams` is for one who knows that there is little to send.

    Raises SourceChangedError when a file vanished or would not keep still, DiskFullError when the pod has no room,
    SshError when the line broke too often, TransferError for anything else; never returns with less than all of it.
    """
    hashes = _Hashes(known)
    return _Upload(ssh, plan, pod_home, on_progress, clock or SystemClock(), stall_s, hashes, most_streams).run()


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
        hashes: _Hashes,
        most_streams: int,
    ) -> None:
        self.ssh, self.plan, self.pod_home, self.clock, self.stall_s = ssh, plan, pod_home, clock, stall_s
        self.meter = Meter(on_progress, plan.bytes, plan.files)
        self.hashes, self.most_streams = hashes, most_streams
        self.sent_files = self.sent_bytes = 0
        self.by_part: Counter[str] = Counter()
        self.streams = 1

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
            streams=self.streams,
            by_part=dict(self.by_part),
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
                    raise vanished(before, file)
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
        data = [part for part in parts if not part.compressed]
        size, most = sum(part.bytes for part in data), min(self.most_streams, sum(len(part.files) for part in data))
        with (
            Session(self.ssh, "receive", stall_s=self.stall_s) as session,
            Shares(self.ssh, self.meter, size, most=most, stall_s=self.stall_s) as shares,
        ):
            survey = attempt.survey = _survey(session, self.plan, self.pod_home, self.hashes, dry_run=False)
            todo = [
                Outgoing(part, [number for number in range(len(part.files)) if number not in have], begun)
                for part, have, begun in zip(parts, survey.have, survey.begun, strict=True)
            ]
            sizes = [one.size(number) for one in todo for number in one.numbers]
            self.meter.start_from(self.plan.bytes - sum(sizes), self.plan.files - len(sizes))
            # What the files will take on disk, so that a pod without room refuses before the first byte.
            room = sum(-(-size // FS_BLOCK) * FS_BLOCK for size in sizes)
            go_on = [list(begun) for begun in survey.begun]
            token = shares.token() if survey.locked else None
            session.tell({"send": [one.numbers for one in todo], "go_on": go_on, "bytes": room, "token": token})
            if survey.locked:
                for one in todo:
                    if not one.part.compressed:
                        shares.begin(one, self.pod_home, room)
            try:
                sent = [self._send(session, one, shares, attempt) for one in todo]
                session.tell({"sha256": sent, "shares": shares.last_call()})
                shares.finish(session.touch)
            except LineBrokenError:
                self.most_streams = max(1, self.most_streams // 2)
                raise
            finally:
                self._count_shares(shares, attempt)
            for one, own in zip(todo, sent, strict=True):
                others = (number for tally in shares.tallies_of(one) for number, _ in tally.sent)
                if {number for number, _ in own} | {*others} != {*one.numbers}:
                    raise LineBrokenError("a share of the files was taken and not sent")
            attempt.now = self._look_again()  # while the pod looks at what it has
            answer = session.message()
        attempt.removed = int(answer["removed"])
        attempt.bad += [todo[place].name(number) for place, number in answer["bad"]]
        attempt.bad = [name for name in attempt.bad if name not in attempt.changed]

    def _send(
        self, session: Session, todo: Outgoing, shares: Shares, attempt: _Attempt
    ) -> list[tuple[int, str | None]]:
        """Send one part as a tar stream; number and hash of each file that went over the conversation itself."""
        tally = Tally()

        def numbers() -> Iterator[int]:
            for number in iter(todo.take, None):
                shares.check()
                yield number

        if todo.numbers:
            try:
                stream_out(session, todo, numbers(), self.meter, tally)
            finally:
                self._count(todo, tally, attempt)
        return tally.sent

    def _count_shares(self, shares: Shares, attempt: _Attempt) -> None:
        """What went over the further connections, and what of it the pod refused."""
        todo = shares.shared
        if todo is not None:
            tallies = shares.tallies_of(todo)
            self.streams = max(self.streams, 1 + len(tallies))
            for tally in tallies:
                self._count(todo, tally, attempt)
            attempt.bad += [todo.name(number) for number in shares.bad]

    def _count(self, todo: Outgoing, tally: Tally, attempt: _Attempt) -> None:
        for number, sha256 in tally.sent:
            if sha256 is None:
                attempt.changed.append(todo.name(number))
            else:
                self.hashes.keep(todo.part, todo.part.files[number], sha256)
                self.sent_files += 1
        self.sent_bytes += tally.bytes
        self.by_part[todo.part.name] += tally.bytes


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
    begun: list[dict[int, Begun]] = []
    for part, found in zip(plan.parts, answer["parts"], strict=True):
        have.append({number for number, sha256 in found["have"] if hashes.of(part, part.files[number]) == sha256})
        begun.append({})
        for number, length, sha256 in found["begun"]:
            digest = digest_of_beginning(part, part.files[number], length)
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
        locked=bool(answer["locked"]),
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
