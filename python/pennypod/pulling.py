"""A run's data set by way of the bucket: kept there once, fetched from there by the run's pod. Floor 2.

It touches the data set, the bucket, the pod over SSH, and a file in the run's folder. The bucket's keys stay here: the
pod gets a URL for each pack, which allows one GET for a while. Whatever does not come this way goes over SSH, which
compares every file on the pod in any case: nothing here can make a data set short or wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pennypod.clock import Clock
from pennypod.errors import InputError, SourceChangedError, StoreError
from pennypod.files import write_atomically
from pennypod.settings import Settings
from pennypod.ssh import Ssh
from pennypod.store import Bucket, Pack, into_packs, keep_packs, lifetime_s, load_config, open_bucket
from pennypod.store.datasets import DataFile, dataset_name, forget_packs, hashed, is_kept, pack_bytes
from pennypod.store.layout import pack_key
from pennypod.transfer import Progress, Pulled, PullFile, PullPack, UploadResult, pull
from pennypod.transfer.plan import Part, SourceFile

FILE = "dataset.json"
"""In the run's folder: what `keep` has found out, for `fetch`, whose seconds are billed."""
URLS_S = 6 * 3600.0
"""How long a pod may take to begin with the last pack; never beyond the run's deadline."""

Hashes = dict[SourceFile, str]
OnTick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """A data set that the bucket has: what `keep` uploaded of it, and the hash of each file it was made from."""

    name: str
    packs: tuple[Pack, ...]
    hashes: Hashes
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Way:
    """How a data set came to its pod, for `run.json`: bytes are contents of files, but for what went to the bucket.

    `sent_bytes` is all that left this machine for it; `why` says why not all of it came from the bucket, if it should.
    """

    by: str
    name: str | None
    files: int
    bytes: int
    sent_bytes: int
    bucket_bytes: int
    ssh_bytes: int
    pulled_files: int
    pulled_bytes: int
    why: str

    def as_document(self) -> dict[str, object]:
        return asdict(self)


def keep(settings: Settings, environ: Mapping[str, str], run: str, part: Part, on_tick: OnTick) -> Kept:
    """Make sure that the bucket has the data set, and remember it for `fetch`.

    `on_tick` may raise to stop. Raises StoreError, InputError, SourceChangedError; these are remembered, too, so that
    no pod bills while a bucket is tried that does not work.
    """
    return _keep(settings, environ, run, part, on_tick)[1]


def _keep(settings: Settings, environ: Mapping[str, str], run: str, part: Part, on_tick: OnTick) -> tuple[Bucket, Kept]:
    """`keep`, with the bucket that it has opened."""
    folder = settings.run_dir(run)
    known = _remembered(folder)
    try:
        bucket = open_bucket(load_config(environ, settings.home))
        packs, hashes = _packs(part, known, on_tick)
        sent = keep_packs(bucket, Path(part.base), packs, lambda _bytes: on_tick())
    except (StoreError, InputError, SourceChangedError) as exc:
        _write(folder, {"failed": exc.message})
        raise
    kept = Kept(sent.name, tuple(packs), hashes, sent.bytes)
    rows = [[*file[:5], sha256] for file, sha256 in hashes.items()]
    _write(folder, {"sent_bytes": sent.bytes + _sent_before(folder), "hashes": rows})
    return bucket, kept


def would_send(settings: Settings, environ: Mapping[str, str], part: Part, on_tick: OnTick) -> bool:
    """Whether `keep` would upload anything. Raises as that does."""
    bucket = open_bucket(load_config(environ, settings.home))
    return not is_kept(bucket, dataset_name(_packs(part, {}, on_tick)[0]))


def fetch(
    settings: Settings,
    environ: Mapping[str, str],
    run: str,
    part: Part,
    ssh: Ssh,
    pod_home: str,
    deadline: float | None,
    clock: Clock,
    on_progress: Callable[[Progress], None],
    on_tick: OnTick,
) -> tuple[Kept, Pulled]:
    """Have the pod fetch the data set from the bucket, after `keep`. Raises StoreError and the like when it cannot."""
    failed = _read(settings.run_dir(run)).get("failed")
    if failed:
        raise StoreError(str(failed))
    bucket, kept = _keep(settings, environ, run, part, on_tick)
    now = clock.now()
    lifetime = lifetime_s(now, URLS_S, now + URLS_S if deadline is None else deadline)
    pulled = pull(ssh, pod_home, part.name, _order(bucket, kept, part, lifetime), on_progress=on_progress)
    if pulled.damaged or pulled.gone:
        forget_packs(bucket, kept.name, {*pulled.damaged, *pulled.gone})
    return kept, pulled


def way_of(
    settings: Settings, run: str, part: Part, done: UploadResult, fetched: tuple[Kept, Pulled] | None, why: str
) -> Way:
    """How it came; what `keep` has uploaded counts once, for the first pod."""
    kept, pulled = fetched or (None, None)
    folder = settings.run_dir(run)
    in_bucket, over_ssh = _sent_before(folder), done.by_part.get(part.name, 0)
    if in_bucket:
        _write(folder, {**_read(folder), "sent_bytes": 0})
    ways = [*(["bucket"] if pulled and pulled.files else []), *(["ssh"] if over_ssh else [])]
    return Way(
        by=" and ".join(ways) or "was there",
        name=kept.name if kept else None,
        files=len(part.files),
        bytes=part.bytes,
        sent_bytes=in_bucket + over_ssh,
        bucket_bytes=in_bucket,
        ssh_bytes=over_ssh,
        pulled_files=pulled.files if pulled else 0,
        pulled_bytes=pulled.bytes if pulled else 0,
        why=why or (pulled.why if pulled and pulled.left else ""),
    )


def known_hashes(part: Part, kept: Kept) -> dict[tuple[str, SourceFile], str]:
    """What an upload of the part need not hash again."""
    return {(part.name, file): sha256 for file, sha256 in kept.hashes.items()}


def _order(bucket: Bucket, kept: Kept, part: Part, lifetime: float) -> list[PullPack]:
    """What the pod is to fetch: all but the files that are sent with another content than they have here."""
    files = {file.path: file for file in part.files if file.content is None}
    order = []
    for pack in kept.packs:
        wanted = tuple(
            PullFile(item.path, item.bytes, item.sha256, source.executable, max(0, source.mtime_ns // 1_000_000_000))
            for item in pack.files
            if (source := files.get(item.path)) is not None
        )
        if wanted:
            url = bucket.get_url(pack_key(pack.name), lifetime)
            order.append(PullPack(pack.name, url, pack_bytes(pack), wanted))
    return order


def _packs(part: Part, known: Hashes, on_tick: OnTick) -> tuple[list[Pack], Hashes]:
    """The packs of what is on disk, and the hashes of the files that are sent as they are there."""
    files, hashes = [], {}
    for file in part.files:
        on_tick()
        sha256 = known.get(file)
        found = DataFile(file.path, file.size, sha256) if sha256 else hashed(Path(part.base), file.path)
        files.append(found)
        # One that is being written to meanwhile has another size, or is found out when it is sent.
        if file.content is None and found.bytes == file.size:
            hashes[file] = found.sha256
    return into_packs(files), hashes


def _remembered(folder: Path) -> Hashes:
    rows = _read(folder).get("hashes")
    try:
        return {SourceFile(*row[:5]): str(row[5]) for row in rows} if isinstance(rows, list) else {}
    except (TypeError, IndexError):
        return {}


def _sent_before(folder: Path) -> int:
    sent = _read(folder).get("sent_bytes")
    return sent if isinstance(sent, int) else 0


def _read(folder: Path) -> dict[str, object]:
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(folder: Path, content: Mapping[str, object]) -> None:
    try:
        write_atomically(folder / FILE, json.dumps(content) + "\n", 0o600)
    except OSError as exc:  # a disk without room: what it would save is seconds
        raise StoreError(f"{folder / FILE} cannot be written: {exc.strerror}") from exc
