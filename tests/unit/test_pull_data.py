"""A pod fetches its data set by URLs: whole, verified, once, and never half of a file under its name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_server import ObjectServer
from pennypod.transfer import Pulled, PullFile, PullPack, pull
from pennypod.transfer.pull import _as_pulled
from pod_folder import FolderSsh, contents


@pytest.fixture
def store() -> Iterator[ObjectServer]:
    store = ObjectServer()
    yield store
    store.close()


FILES = {"a/1.jpg": b"one" * 5000, "a/ü.txt": b"", "run.sh": b"echo", "x" * 150 + "/2": b"two"}


def fetched(home: Path, *packs: PullPack) -> Pulled:
    done = pull(FolderSsh(), str(home), "data", packs)
    left = [name for name in contents(home) if b"pennypod" in name] if home.exists() else []
    assert left == [], "nothing of the fetching itself stays"
    assert "Signature" not in done.why
    return done


def test_everything_arrives_with_its_mode_and_time_and_is_fetched_once(store: ObjectServer, tmp_path: Path) -> None:
    packs = [store.pack("one", FILES), store.pack("two", {"b/3": b"three"})]
    first = fetched(tmp_path, *packs)
    assert (first.files, first.bytes, first.there, first.left) == (5, sum(map(len, FILES.values())) + 5, 0, 0)
    for path, content in FILES.items():
        assert (tmp_path / "data" / path).read_bytes() == content
    assert (tmp_path / "data/run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "data/b/3").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "data/b/3").stat().st_mtime == 1_700_000_000
    store.asked.clear()
    again = fetched(tmp_path, *packs)
    assert (again.files, again.there, again.left, store.asked) == (0, 5, 0, [])
    (tmp_path / "data/b/3").write_bytes(b"THREE")
    assert (fetched(tmp_path, *packs).files, store.asked) == (1, ["two"]), "only what is not right comes again"


def test_what_was_not_asked_for_is_not_unpacked(store: ObjectServer, tmp_path: Path) -> None:
    pack = store.pack("one", {"a": b"a", "../out": b"x", "/abs": b"x", "data.yaml": b"here"}, wanted={"a"})
    assert fetched(tmp_path, pack).files == 1
    assert contents(tmp_path) == {b"data": None, b"data/a": b"a"}


def test_a_connection_that_is_cut_costs_a_try(store: ObjectServer, tmp_path: Path) -> None:
    pack = store.pack("one", {"a": b"a" * 100, "b": os.urandom(300_000)})
    store.cuts["one"] = [200_000, 2000]
    done = fetched(tmp_path, pack)
    assert (done.files, done.left, len(store.asked)) == (2, 0, 3)


def test_a_damaged_pack_is_told_of_and_its_good_files_are_kept(store: ObjectServer, tmp_path: Path) -> None:
    pack = store.pack("one", {"a": b"a" * 600, "b": b"b" * 600})
    store.objects["one"] = store.objects["one"].replace(b"b" * 600, b"b" * 599 + b"c")
    other = store.pack("two", {"c": b"c"})
    done = fetched(tmp_path, pack, other)
    assert (done.files, done.left, done.damaged, done.gone) == (2, 1, ("one",), ())
    assert sorted(contents(tmp_path / "data")) == [b"a", b"c"], "no file is there with other bytes than it should have"
    store.objects["one"] = store.objects["one"][:1024]
    assert fetched(tmp_path, pack).damaged == ("one",), "nor is half a pack taken for a bad line"


def test_a_pack_that_is_gone_is_named_and_others_come(store: ObjectServer, tmp_path: Path) -> None:
    packs = [store.pack(name, {name: b"x"}) for name in ("one", "two", "three")]
    del store.objects["one"]
    store.status["two"] = 403
    done = fetched(tmp_path, *packs)
    assert (done.files, done.left, done.gone, done.damaged, done.reached) == (1, 2, ("one",), (), True)
    assert done.why == "the store answers 404"


def test_a_store_that_cannot_be_reached_is_given_up_at_once(store: ObjectServer, tmp_path: Path) -> None:
    packs = [store.pack(str(number), {str(number): b"x"}) for number in range(20)]
    store.close()
    started = time.monotonic()
    done = fetched(tmp_path, *packs)
    assert (done.files, done.left, done.reached) == (0, 20, False)
    assert done.why == "the store cannot be reached: Connection refused"
    assert time.monotonic() - started < 20


def test_a_pod_without_room_fetches_nothing(store: ObjectServer, tmp_path: Path) -> None:
    pack = store.pack("one", {"a": b"a"})
    huge = PullFile("huge", 1 << 60, "0" * 64, False, 0)
    done = fetched(tmp_path, PullPack("one", pack.url, pack.bytes, (*pack.files, huge)))
    assert (done.files, done.left, store.asked) == (0, 2, [])
    assert "needed" in done.why


def test_a_folder_in_the_place_of_a_file_is_left_to_the_upload(store: ObjectServer, tmp_path: Path) -> None:
    (tmp_path / "data/a").mkdir(parents=True)
    done = fetched(tmp_path, store.pack("one", {"a": b"a"}))
    assert (done.files, done.left) == (0, 1)
    assert "on the pod" in done.why


def test_what_a_killed_fetch_has_left_is_removed(store: ObjectServer, tmp_path: Path) -> None:
    (tmp_path / ".pennypod-pull-999999999").mkdir()
    (tmp_path / ".pennypod-pull-999999999/part").write_bytes(b"half")
    assert fetched(tmp_path, store.pack("one", {"a": b"a"})).files == 1


def test_a_pod_cannot_name_packs_that_nobody_asked_for() -> None:
    answer: dict[str, Any] = {"files": 0, "bytes": 0, "there": 0, "left": 1, "reached": True, "gone": ["other"]}
    told = _as_pulled({**answer, "why": "a\x1b[2Jb\n" * 200, "damaged": ["one", "../x"]}, {"one"})
    assert (told.damaged, told.gone) == (("one",), ())
    assert told.why.isprintable()
    assert len(told.why) == 200


def test_no_url_is_shown(store: ObjectServer) -> None:
    assert "Signature" not in repr(store.pack("one", {"a": b"a"}))
