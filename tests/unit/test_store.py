"""Which checkpoints count, where things lie in the bucket, how long URLs hold, and that no key is shown."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod.errors import InputError, StoreError
from pennypod.store.checkpoints import Checkpoints
from pennypod.store.config import StoreConfig, load_config
from pennypod.store.datasets import DataFile, into_packs, keep_dataset, write_pack
from pennypod.store.layout import (
    CHECKPOINT,
    MARKER,
    MARKER_LIMIT_BYTES,
    Slot,
    StoredObject,
    next_number,
    parse_marker,
    parse_slot,
    slot_key,
    slots,
)
from pennypod.store.urls import LONGEST_S, Download, UploadSlot, UrlPlan, lifetime_s, renew_at

RUN = "demo-1201-k3f7q"
SLOTS = st.builds(Slot, st.integers(0, 20), st.integers(1, 300))
KEYS = {"PENNYPOD_S3_ACCESS_KEY_ID": "AKIAOFTHISTEST", "PENNYPOD_S3_SECRET_ACCESS_KEY": "secret-of-this-test"}


class FakeBucket:
    """A bucket in a dict; URLs are readable."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts: list[str] = []

    def put(self, name: str, content: bytes) -> None:
        self.objects[name] = content
        self.puts.append(name)

    def put_stream(self, name: str, content: io.BufferedIOBase) -> None:
        self.put(name, content.read())

    def size(self, name: str) -> int | None:
        return len(self.objects[name]) if name in self.objects else None

    def get(self, name: str, limit: int) -> bytes | None:
        return self.objects.get(name)

    def list(self, prefix: str) -> list[StoredObject]:
        return [StoredObject(key, len(value)) for key, value in sorted(self.objects.items()) if key.startswith(prefix)]

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def put_url(self, name: str, seconds: float) -> str:
        return f"put:{name}:{seconds:g}"

    def get_url(self, name: str, seconds: float) -> str:
        return f"get:{name}:{seconds:g}"

    def keep(self, slot: Slot, content: bytes, *, whole: bool = True, marked: bool = True) -> None:
        self.put(slot_key(RUN, slot, CHECKPOINT), content if whole else content[:-1])
        if marked:
            marker = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "epoch": 3}
            self.put(slot_key(RUN, slot, MARKER), json.dumps(marker).encode())


def checkpoints(bucket: FakeBucket) -> Checkpoints:
    return Checkpoints(bucket, RUN)  # type: ignore[arg-type]


@given(SLOTS)
def test_a_slot_is_found_again_by_its_key(slot: Slot) -> None:
    assert parse_slot(RUN, slot_key(RUN, slot, MARKER)) == (slot, MARKER)


@given(st.text(max_size=60))
def test_what_we_did_not_put_there_is_no_slot(text: str) -> None:
    found = parse_slot(RUN, f"runs/{RUN}/checkpoints/{text}")
    assert found is None or slot_key(RUN, *found).endswith(text)


@given(SLOTS, SLOTS)
def test_keys_sort_as_slots_do(one: Slot, other: Slot) -> None:
    assert (one < other) == (slot_key(RUN, one, MARKER) < slot_key(RUN, other, MARKER))


@given(
    st.dictionaries(SLOTS, st.sampled_from(["whole", "half", "unmarked", "marker alone", "bad marker"]), max_size=20)
)
def test_the_newest_is_the_last_slot_that_is_whole_and_marked(states: dict[Slot, str]) -> None:
    bucket = FakeBucket()
    for slot, state in states.items():
        bucket.keep(slot, f"checkpoint {slot}".encode(), whole=state != "half", marked=state != "unmarked")
        if state == "marker alone":
            bucket.delete(slot_key(RUN, slot, CHECKPOINT))
        if state == "bad marker":
            bucket.put(slot_key(RUN, slot, MARKER), b'{"bytes": 1')
    newest = checkpoints(bucket).newest()
    whole = [slot for slot, state in states.items() if state == "whole"]
    assert (newest.slot if newest else None) == max(whole, default=None)

    removed = checkpoints(bucket).prune()
    left = slots(RUN, bucket.list(""))
    assert checkpoints(bucket).newest() == newest, "what counts as the newest is never removed"
    assert [slot for slot in sorted(whole)[-2:] if slot not in left] == []
    assert removed == len(states) - len(left)


@given(st.sets(SLOTS, max_size=20), st.integers(0, 20))
def test_no_plan_names_a_slot_that_was_used(used: set[Slot], attempt: int) -> None:
    number = next_number(used, attempt)
    assert all(slot.number < number for slot in used if slot.attempt == attempt)
    bucket = FakeBucket()
    for slot in used:
        bucket.keep(slot, b"x", marked=False)
    plan = checkpoints(bucket).plan(attempt, 1000.0, 60.0)
    named = [upload.checkpoint for upload in plan.uploads] + [upload.marker for upload in plan.uploads]
    assert not {f"put:{key}:60" for key in bucket.objects} & set(named)
    assert len(set(named)) == len(named)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_marker(text: bytes) -> None:
    assert parse_marker(text) is None


@pytest.mark.parametrize(
    "change",
    [{"bytes": 0}, {"bytes": True}, {"bytes": "7"}, {"epoch": -1}, {"epoch": None}, {"sha256": "ab"}, {"sha256": 5}],
)
def test_a_marker_is_whole_and_sensible(change: dict[str, object]) -> None:
    marker = {"bytes": 7, "sha256": "ab" * 32, "epoch": 0}
    assert parse_marker(json.dumps(marker).encode()) is not None
    assert parse_marker(json.dumps({**marker, **change}).encode()) is None
    assert parse_marker(json.dumps({**marker, "more": "x" * MARKER_LIMIT_BYTES}).encode()) is None


def test_a_run_id_cannot_reach_another_runs_objects() -> None:
    for run in ("", "../other", "a/b", ".hidden", "x" * 101):
        with pytest.raises(ValueError, match="run id"):
            slot_key(run, Slot(1, 1), MARKER)


@given(st.floats(0, 1e7), st.floats(0, 1e7), st.floats(-1e7, 1e7))
def test_urls_hold_as_long_as_the_lease_and_never_beyond_the_deadline(now: float, lease: float, left: float) -> None:
    lifetime = lifetime_s(now, lease, now + left)
    assert 0 <= lifetime <= min(lease, LONGEST_S)
    assert lifetime <= max(0.0, left) + 1e-6
    assert now <= renew_at(now, lifetime) <= now + lifetime / 4 + 1e-6


def test_a_resume_is_offered_when_it_is_asked_for_and_there_is_one() -> None:
    bucket = FakeBucket()
    assert checkpoints(bucket).plan(1, 0.0, 60.0, resume=True).resume is None
    bucket.keep(Slot(1, 4), b"whole")
    bucket.keep(Slot(2, 1), b"half", marked=False)
    assert checkpoints(bucket).plan(2, 0.0, 60.0).resume is None
    resume = checkpoints(bucket).plan(2, 0.0, 60.0, resume=True).resume
    assert resume is not None
    assert resume.url == f"get:{slot_key(RUN, Slot(1, 4), CHECKPOINT)}:60"


def test_neither_keys_nor_urls_are_shown() -> None:
    config = StoreConfig("bucket", "the-access-key", "the-secret-key")
    plan = UrlPlan(1.0, (UploadSlot(1, "https://signed/1", "https://signed/2"),), Download("https://signed/3", 1, "ab"))
    shown = f"{config!r} {config} {plan!r} {plan}"
    assert "the-" not in shown
    assert "signed" not in shown
    assert json.loads(plan.as_json())["uploads"][0]["marker"] == "https://signed/2"


def test_the_bucket_is_that_of_the_environment(tmp_path: Path) -> None:
    environ = {
        **KEYS,
        "PENNYPOD_S3_BUCKET": "weights",
        "PENNYPOD_S3_ENDPOINT": "https://store.example/",
        "PENNYPOD_S3_PREFIX": "/team/",
    }
    config = load_config(environ, tmp_path)
    assert (config.bucket, config.endpoint) == ("weights", "https://store.example")
    assert config.key("runs/x") == "team/runs/x"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"PENNYPOD_S3_BUCKET": ""}, "no object store"),
        ({"PENNYPOD_S3_SECRET_ACCESS_KEY": ""}, "PENNYPOD_S3_SECRET_ACCESS_KEY is not"),
        ({"PENNYPOD_S3_ENDPOINT": "store.example"}, "not an http"),
        ({"PENNYPOD_S3_ENDPOINT": "https://me:hunter2@store.example"}, "must not hold keys"),
        ({"PENNYPOD_S3_POD_ENDPOINT": "https://[bad"}, "not an http"),
    ],
)
def test_settings_that_cannot_work_are_refused_without_a_secret(
    tmp_path: Path, change: dict[str, str], says: str
) -> None:
    with pytest.raises(StoreError, match=says) as caught:
        load_config({**KEYS, "PENNYPOD_S3_BUCKET": "weights", **change}, tmp_path)
    assert "hunter2" not in str(caught.value)
    assert "secret-of" not in str(caught.value)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_packs_hold_every_file_once_and_stay_below_the_limit(sizes: list[int], limit: int) -> None:
    files = [DataFile(f"{number:03d}", size, "0" * 64) for number, size in enumerate(sizes)]
    packs = into_packs(reversed(files), limit)
    assert [file for pack in packs for file in pack.files] == files
    assert all(len(pack.files) == 1 or sum(file.bytes for file in pack.files) <= limit for pack in packs)
    assert packs == into_packs(files, limit), "the order of finding them changes nothing"


def test_a_data_set_is_sent_once_and_then_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pennypod.store.datasets.into_packs", lambda files: into_packs(files, 10))
    bucket = FakeBucket()
    for name in ("a/1", "a/2", "b/3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 3)
    first = keep_dataset(bucket, tmp_path)  # type: ignore[arg-type]
    assert (first.files, first.packs) == (3, 3)
    assert bucket.puts[-1] == f"datasets/{first.name}.json", "what makes it count comes last"

    again = keep_dataset(bucket, tmp_path)  # type: ignore[arg-type]
    assert (again.name, again.packs, again.bytes) == (first.name, 0, 0)
    assert len(bucket.puts) == 4

    (tmp_path / "b/4").write_bytes(b"new")
    more = keep_dataset(bucket, tmp_path)  # type: ignore[arg-type]
    assert more.name != first.name
    assert more.packs == 1


def test_a_pack_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    made = []
    for place in ("here", "there"):
        (tmp_path / place / "d").mkdir(parents=True)
        (tmp_path / place / "d/f").write_bytes(b"content")
        out = io.BytesIO()
        (pack,) = into_packs([DataFile("d/f", 7, hashlib.sha256(b"content").hexdigest())])
        write_pack(tmp_path / place, pack, out)
        made.append(out.getvalue())
    assert made[0] == made[1]
    with tarfile.open(fileobj=io.BytesIO(made[0])) as tar:
        assert tar.getnames() == ["d/f"]


@pytest.mark.parametrize("content", [b"contenT", b"conten", b"contents"])
def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    (pack,) = into_packs([DataFile("f", 7, hashlib.sha256(b"content").hexdigest())])
    with pytest.raises(Exception, match="was changed"):
        write_pack(tmp_path, pack, io.BytesIO())


def test_a_data_set_without_files_and_one_with_a_way_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no files"):
        keep_dataset(FakeBucket(), tmp_path)  # type: ignore[arg-type]
    (tmp_path / "out").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="leaves the data set"):
        keep_dataset(FakeBucket(), tmp_path)  # type: ignore[arg-type]
