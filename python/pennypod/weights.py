"""The best checkpoint: found wherever the trainer nested it, brought home whole. Floor 2.

Nothing here removes or moves a file on the pod: it stays there until the pod itself goes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pennypod.errors import InputError, PennypodError, TransferError, WeightsError
from pennypod.files import write_atomically
from pennypod.transfer import Fetched, fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
class Found:
    files: tuple[RemoteFile, ...]
    rejected: tuple[Rejected, ...]


def find_files(
    ssh: Ssh,
    pod_home: str,
    patterns: Sequence[str],
    *,
    under: str = "out",
    best: bool = False,
    deep: bool = False,
    settle_s: float = 0.3,
    timeout_s: float = FIND_TIMEOUT_S,
) -> Found:
    """Whole files under POD_HOME/out that match `patterns`, newest first, hashed on the pod in one round trip.

    With `best` only the newest one of the first pattern that has any: patterns are in order of preference.
    """
    check_patterns(patterns)
    root = str(PurePosixPath(pod_home) / under)
    options = {"root": root, "patterns": list(patterns), "best": best, "deep": deep, "settle_s": settle_s}
    done = ssh.run_script(FIND_SCRIPT, [json.dumps(options)], timeout_s)
    answer = parse_answer(done.stdout)
    if answer is None:
        raise ssh.error(f"the search for {', '.join(patterns)} gave no answer (exit status {done.rc})", rc=done.rc)
    if "error" in answer:
        raise InputError(f"cannot search for {', '.join(patterns)}: {answer['error']}")
    return Found(
        files=tuple(remote_file(entry) for entry in answer["files"]),
        rejected=tuple(Rejected(entry["path"], entry["why"]) for entry in answer["rejected"]),
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
    early: bool = False,
) -> Fetched:
    """Copy a checkpoint to ``artifacts_dir/weights/``, verified by hash and renamed into place. No-op when it is there.

    Beside it, ``checkpoint.json`` says which remote file it was, so that an early copy can stand in for a lost pod.
    """
    target = weights_target(remote, artifacts_dir)
    fetched = fetch_once(ssh, remote, target, on_progress=on_progress)
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


def bring_log(
    ssh: Ssh, pod_home: str, artifacts_dir: Path, *, on_progress: Callable[[Progress], None]
) -> tuple[Fetched, bool] | None:
    """The whole train.log, and whether the copy here was not whole already; None when the pod has none."""
    found = find_files(ssh, pod_home, [LOG_NAME], under=".", settle_s=0)
    if not found.files:
        return None
    target = artifacts_dir / LOG_NAME
    here = already_here(target, found.files[0])
    return here or fetch_once(ssh, found.files[0], target, on_progress=on_progress), here is None


@dataclass(frozen=True, slots=True)
class Extras:
    """What came home beside the checkpoint. A file that could not be fetched is a problem, never the end of the run."""

    files: tuple[Fetched, ...]
    changed: bool
    problems: tuple[str, ...]


def bring_extras(
    ssh: Ssh,
    pod_home: str,
    patterns: Sequence[str],
    artifacts_dir: Path,
    *,
    skip: frozenset[str] = frozenset(),
    should_stop: Callable[[], None],
    on_progress: Callable[[Progress], None],
) -> Extras:
    """Copy everything that matches `patterns` to ``artifacts_dir/extra/<path under out>``, one by one."""
    if not patterns:
        return Extras((), False, ())
    found = find_files(ssh, pod_home, patterns)
    files: list[Fetched] = []
    problems = [f"{entry.path}: {entry.why}" for entry in found.rejected]
    changed = False
    for remote in found.files:
        should_stop()
        if remote.path in skip:
            continue
        target = artifacts_dir / EXTRA_DIR / safe_relative(remote.relative)
        try:
            here = already_here(target, remote)
            files.append(here or fetch_once(ssh, remote, target, on_progress=on_progress))
            changed = changed or here is None
        except PennypodError as exc:
            if exc.code in ("fenced", "ssh"):
                raise
            problems.append(f"{remote.path}: {exc}")
    return Extras(tuple(files), changed, tuple(problems))


def fetch_once(ssh: Ssh, remote: RemoteFile, target: Path, *, on_progress: Callable[[Progress], None]) -> Fetched:
    here = already_here(target, remote)
    if here is not None:
        return here
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
