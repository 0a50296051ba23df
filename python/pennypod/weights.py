"""The best checkpoint: found wherever the trainer nested it, brought home whole. Floor 2.

Nothing here removes or moves a file on the pod: it stays there until the pod itself goes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pennypod.errors import InputError, PennypodError, TransferError, WeightsError
from pennypod.files import write_atomically
from pennypod.transfer import Fetched, fetch, keep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pennypod.clock import Clock
    from pennypod.ssh import Ssh
    from pennypod.transfer import Progress

FIND_SCRIPT = Path(__file__).parent / "onpod" / "find_files.py"
MARK = "@pennypod "
WEIGHTS_DIR = "weights"
EXTRA_DIR = "extra"
LOG_NAME = "train.log"
RECORD_NAME = "checkpoint.json"
# Hashing and checking on a slow pod disk: 20 GB at 50 MB/s.
FIND_TIMEOUT_S = 900.0
# A conversation costs more than so many bytes do, on any line that is worth a pod.
INLINE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on the pod that was whole when it was looked at. `relative` is its path under POD_HOME/out."""

    path: str
    bytes: int
    sha256: str
    mtime: float
    relative: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A file that matched and is not taken, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Search:
    """What to look for under POD_HOME/`under`, newest first.

    With `best` only the newest whole file of the first pattern that has any: patterns are in order of preference. With
    `inline` small files come with the answer; with `small` nothing else does, and what is larger is only counted.
    """

    patterns: Sequence[str]
    under: str = "out"
    best: bool = False
    deep: bool = False
    settle_s: float = 0.3
    inline: bool = False
    small: bool = False

    def as_options(self, pod_home: str) -> dict[str, Any]:
        """As find_files.py takes it."""
        options: dict[str, Any] = {"root": str(PurePosixPath(pod_home) / self.under), "patterns": list(self.patterns)}
        options |= {"best": self.best, "deep": self.deep, "settle_s": self.settle_s, "small": self.small}
        return options | {"inline": INLINE_BYTES if self.inline or self.small else 0}


@dataclass(frozen=True, slots=True)
class Found:
    """`contents` has the bytes of files that came with the answer, by path; `left` counts those that were too large."""

    files: tuple[RemoteFile, ...]
    rejected: tuple[Rejected, ...]
    contents: Mapping[str, bytes] = field(default_factory=dict)
    left: int = 0


def find_files(
    ssh: Ssh,
    pod_home: str,
    patterns: Sequence[str],
    *,
    best: bool = False,
    deep: bool = False,
    timeout_s: float = FIND_TIMEOUT_S,
) -> Found:
    """Whole files under POD_HOME/out that match `patterns`, newest first, hashed on the pod; see Search."""
    (found,) = find_all(ssh, pod_home, [Search(patterns, best=best, deep=deep)], timeout_s=timeout_s)
    return found


def find_all(ssh: Ssh, pod_home: str, searches: Sequence[Search], *, timeout_s: float = FIND_TIMEOUT_S) -> list[Found]:
    """Make several searches in one round trip.

    Raises InputError for a pattern that finds nothing under out/, SshError for a pod that does not answer.
    """
    patterns = [pattern for search in searches for pattern in search.patterns]
    check_patterns(patterns)
    options = [search.as_options(pod_home) for search in searches]
    done = ssh.run_script(FIND_SCRIPT, [json.dumps(options)], timeout_s)
    answer = parse_answer(done.stdout)
    if answer is None:
        raise ssh.error(f"the search for {', '.join(patterns)} gave no answer (exit status {done.rc})", rc=done.rc)
    if "error" in answer:
        raise InputError(f"cannot search for {', '.join(patterns)}: {answer['error']}")
    return [_found(entry) for entry in answer["found"]]


def _found(answer: Mapping[str, Any]) -> Found:
    return Found(
        files=tuple(remote_file(entry) for entry in answer["files"]),
        rejected=tuple(Rejected(entry["path"], entry["why"]) for entry in answer["rejected"]),
        contents={entry["path"]: base64.b64decode(entry["content"]) for entry in answer["files"] if "content" in entry},
        left=int(answer["left"]),
    )


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises InputError for a pattern that could not find anything under out/; before a training is paid for."""
    for pattern in patterns:
        path = PurePosixPath(pattern)
        if not pattern.strip() or path.is_absolute() or ".." in path.parts:
            raise InputError(f"{pattern!r} is not a glob relative to the trainer's output folder, like **/best.pt")


def find_best(ssh: Ssh, pod_home: str, patterns: Sequence[str]) -> RemoteFile | None:
    """The newest valid checkpoint, or None."""
    found = find_files(ssh, pod_home, patterns, best=True, deep=True)
    return found.files[0] if found.files else None


def no_weights(patterns: Sequence[str], rejected: Sequence[Rejected]) -> WeightsError:
    """The error for a trainer that left no checkpoint, with the reasons why candidates were not taken."""
    what = ", ".join(patterns)
    if not rejected:
        return WeightsError(
            f"the trainer left no file that matches {what} under out/: check weights_patterns and the trainer's log",
            patterns=list(patterns),
            rejected=[],
        )
    why = "; ".join(f"{PurePosixPath(entry.path).name}: {entry.why}" for entry in rejected[:3])
    return WeightsError(
        f"no whole checkpoint matches {what}: {why}",
        patterns=list(patterns),
        rejected=[asdict(entry) for entry in rejected],
    )


def bring_home(
    ssh: Ssh,
    remote: RemoteFile,
    artifacts_dir: Path,
    *,
    on_progress: Callable[[Progress], None],
    content: bytes | None = None,
    early: bool = False,
) -> Fetched:
    """Copy a checkpoint to ``artifacts_dir/weights/``, verified by hash and renamed into place. No-op when it is there.

    `content` is what it holds, where that has come with the answer of the search. Beside it, ``checkpoint.json`` says
    which remote file it was, so that an early copy can stand in for a lost pod.
    """
    target = weights_target(remote, artifacts_dir)
    fetched = fetch_once(ssh, remote, target, on_progress=on_progress, content=content)
    record = {
        "path": str(target.relative_to(artifacts_dir)),
        "bytes": fetched.bytes,
        "sha256": fetched.sha256,
        "remote": asdict(remote),
        "early": early,
    }
    write_atomically(artifacts_dir / WEIGHTS_DIR / RECORD_NAME, json.dumps(record, indent=2) + "\n")
    return fetched


def weights_target(remote: RemoteFile, artifacts_dir: Path) -> Path:
    """Where a checkpoint belongs here."""
    return artifacts_dir / WEIGHTS_DIR / PurePosixPath(remote.path).name


def brought_home(artifacts_dir: Path) -> tuple[RemoteFile, Fetched] | None:
    """The verified checkpoint that is here already, or None."""
    try:
        record = json.loads((artifacts_dir / WEIGHTS_DIR / RECORD_NAME).read_text(encoding="utf-8"))
        path = artifacts_dir / record["path"]
        if path.stat().st_size != record["bytes"] or sha256_of(path) != record["sha256"]:
            return None
        return RemoteFile(**record["remote"]), Fetched(path, record["bytes"], record["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def salvage(
    ssh: Ssh,
    pod_home: str,
    patterns: Sequence[str],
    artifacts_dir: Path,
    *,
    limit_s: float,
    clock: Clock,
    on_progress: Callable[[Progress], None],
) -> Fetched | None:
    """The best checkpoint of a training that failed, if it can be had within `limit_s`; the pod bills meanwhile.

    Raises nothing but FencedError: the reason why the training failed is what the user must see.
    """
    give_up_at = clock.now() + limit_s

    def in_time(progress: Progress) -> None:
        if clock.now() > give_up_at:
            raise TransferError(f"not home within {limit_s:g} s")
        on_progress(progress)

    try:
        found = find_files(ssh, pod_home, patterns, best=True, timeout_s=limit_s)
        return bring_home(ssh, found.files[0], artifacts_dir, on_progress=in_time, early=True) if found.files else None
    except PennypodError as exc:
        if exc.code == "fenced":
            raise
        return None


@dataclass(frozen=True, slots=True)
class Extras:
    """What came home beside the checkpoint. A file that could not be fetched is a problem, never the end of the run."""

    files: tuple[Fetched, ...]
    changed: bool
    problems: tuple[str, ...]


def log_search() -> Search:
    """Looks for the whole train.log; the trainer has ended, so nothing needs to keep still."""
    return Search([LOG_NAME], under=".", settle_s=0, inline=True)


def bring_log(
    ssh: Ssh, found: Found, artifacts_dir: Path, *, on_progress: Callable[[Progress], None]
) -> tuple[Fetched, bool] | None:
    """What `log_search` has found, and whether the copy here was not whole already; None when the pod has none."""
    if not found.files:
        return None
    (remote,) = found.files
    target = artifacts_dir / LOG_NAME
    here = already_here(target, remote)
    content = found.contents.get(remote.path)
    return here or fetch_once(ssh, remote, target, on_progress=on_progress, content=content), here is None


def bring_extras(
    ssh: Ssh,
    found: Found,
    artifacts_dir: Path,
    *,
    skip: frozenset[str] = frozenset(),
    should_stop: Callable[[], None],
    on_progress: Callable[[Progress], None],
) -> Extras:
    """Copy what was found to ``artifacts_dir/extra/<path under out>``, one by one."""
    files: list[Fetched] = []
    problems = [f"{entry.path}: {entry.why}" for entry in found.rejected]
    changed = False
    for remote in found.files:
        should_stop()
        if remote.path in skip:
            continue
        target = artifacts_dir / EXTRA_DIR / safe_relative(remote.relative)
        content = found.contents.get(remote.path)
        try:
            here = already_here(target, remote)
            files.append(here or fetch_once(ssh, remote, target, on_progress=on_progress, content=content))
            changed = changed or here is None
        except PennypodError as exc:
            if exc.code in ("fenced", "ssh"):
                raise
            problems.append(f"{remote.path}: {exc}")
    return Extras(tuple(files), changed, tuple(problems))


def fetch_once(
    ssh: Ssh,
    remote: RemoteFile,
    target: Path,
    *,
    on_progress: Callable[[Progress], None],
    content: bytes | None = None,
) -> Fetched:
    here = already_here(target, remote)
    if here is not None:
        return here
    if content is not None and hashlib.sha256(content).hexdigest() == remote.sha256:
        ssh.traffic.fetched += len(content)
        keep(content, target)
        return Fetched(target, remote.bytes, remote.sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    expected = remote.sha256 or None
    return fetch(ssh, remote.path, target, size=remote.bytes, expected_sha256=expected, on_progress=on_progress)


def already_here(target: Path, remote: RemoteFile) -> Fetched | None:
    """The local copy when it is this very file, judged by its hash."""
    try:
        if not remote.sha256 or target.stat().st_size != remote.bytes or sha256_of(target) != remote.sha256:
            return None
    except OSError:
        return None
    return Fetched(target, remote.bytes, remote.sha256)


def safe_relative(relative: str) -> PurePosixPath:
    """A path from the pod that cannot leave the folder it is put under; the pod is not ours to trust."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise WeightsError(f"the pod named a file outside its output folder: {relative!r}", path=relative)
    return path


def remote_file(entry: dict[str, Any]) -> RemoteFile:
    return RemoteFile(
        path=str(entry["path"]),
        bytes=int(entry["bytes"]),
        sha256=str(entry["sha256"]),
        mtime=float(entry["mtime"]),
        relative=str(entry["relative"]),
    )


def parse_answer(stdout: bytes) -> dict[str, Any] | None:
    """The one marked line of a standalone script; login banners around it do not matter."""
    for line in stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(MARK):
            try:
                found = json.loads(line[len(MARK) :])
            except ValueError:
                return None
            return found if isinstance(found, dict) else None
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
