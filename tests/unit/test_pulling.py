"""A run's data set by way of the bucket: sent there once, fetched by every pod, and what fails goes over SSH."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import ObjectServer
from pennypod import pulling
from pennypod.clock import SystemClock
from pennypod.errors import StoreError
from pennypod.pulling import Way
from pennypod.settings import Settings, load_settings
from pennypod.store.datasets import into_packs
from pennypod.transfer import plan_upload, upload
from pod_folder import FolderSsh, contents

RUN, OTHER = "demo-1201-aaaaa", "demo-1201-bbbbb"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    server = ObjectServer()
    monkeypatch.setattr(pulling, "load_config", lambda *_: None)
    monkeypatch.setattr(pulling, "open_bucket", lambda _: server)
    monkeypatch.setattr(pulling, "into_packs", lambda files: into_packs(files, 2000))
    yield server
    server.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"PENNYPOD_HOME": str(tmp_path / "home")})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    (folder / "sub/empty").mkdir(parents=True)
    for number in range(6):
        (folder / f"sub/{number}.jpg").write_bytes(os.urandom(900))
    (folder / "data.yaml").write_bytes(b"path: here")
    return folder


def ship(settings: Settings, run: str, data: Path, pod: Path, *, keep: bool = True) -> Way:
    """What run_dataset does for a run with `store`, without a ledger."""
    part = plan_upload(None, data, replacements={"data.yaml": b"path: there"}).parts[0]
    if keep:
        with contextlib.suppress(StoreError):
            pulling.keep(settings, {}, run, part, lambda: None)
    ssh, fetched, why, known = FolderSsh(), None, "", None
    try:
        fetched = pulling.fetch(
            settings, {}, run, part, ssh, str(pod), None, SystemClock(), lambda _: None, lambda: None
        )
        known = pulling.known_hashes(part, fetched[0])
    except StoreError as exc:
        why = exc.message
    plan = plan_upload(None, data, replacements={"data.yaml": b"path: there"})
    done = upload(ssh, plan, str(pod), known=known)
    found = contents(pod / "data")
    assert found.pop(b"data.yaml") == b"path: there"
    here = contents(data)
    here.pop(b"data.yaml")
    assert found == here, "whichever way it comes, the pod has all of it"
    return pulling.way_of(settings, run, part, done, fetched, why)


REWRITTEN = len(b"path: there")


def test_the_second_run_sends_nothing_but_what_is_rewritten(
    server: ObjectServer, settings: Settings, data: Path, tmp_path: Path
) -> None:
    first = ship(settings, RUN, data, tmp_path / "one")
    assert (first.by, first.pulled_files, first.ssh_bytes) == ("bucket and ssh", 6, REWRITTEN)
    assert first.bucket_bytes > 5400
    assert first.sent_bytes == first.bucket_bytes + REWRITTEN
    objects = dict(server.objects)
    second = ship(settings, OTHER, data, tmp_path / "two")
    assert (second.name, second.pulled_files, second.bucket_bytes) == (first.name, 6, 0)
    assert second.sent_bytes == REWRITTEN
    assert server.objects == objects
    again = ship(settings, RUN, data, tmp_path / "three")
    assert again.sent_bytes == REWRITTEN, "the next pod of a run does not count its upload again"


def test_a_pod_that_has_it_all_fetches_nothing(
    server: ObjectServer, settings: Settings, data: Path, tmp_path: Path
) -> None:
    ship(settings, RUN, data, tmp_path / "one")
    server.asked.clear()
    assert (ship(settings, RUN, data, tmp_path / "one").by, server.asked) == ("was there", [])


def test_a_pod_that_cannot_reach_the_store_gets_it_over_ssh(
    server: ObjectServer, settings: Settings, data: Path, tmp_path: Path
) -> None:
    server.close()
    way = ship(settings, RUN, data, tmp_path / "one")
    assert (way.by, way.ssh_bytes, way.pulled_files) == ("ssh", 5400 + REWRITTEN, 0)
    assert "cannot be reached" in way.why


def test_what_was_found_damaged_or_gone_is_put_there_anew(
    server: ObjectServer, settings: Settings, data: Path, tmp_path: Path
) -> None:
    ship(settings, RUN, data, tmp_path / "one")
    packs = sorted(name for name in server.objects if name.startswith("packs/"))
    good = dict(server.objects)
    server.objects[packs[0]] = bytes(len(server.objects[packs[0]]))
    del server.objects[packs[1]]
    way = ship(settings, OTHER, data, tmp_path / "two")
    assert way.by == "bucket and ssh"
    assert 0 < way.pulled_files < 6
    assert way.ssh_bytes > REWRITTEN
    assert set(good) - set(server.objects) == {packs[0], packs[1], f"datasets/{way.name}.json"}
    ship(settings, OTHER, data, tmp_path / "three")
    assert server.objects == good


def test_a_bucket_that_does_not_work_is_not_tried_again_while_a_pod_bills(
    server: ObjectServer, settings: Settings, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def closed(_config: object) -> None:
        asked.append(1)
        raise StoreError("the object store does not let us into the bucket x")

    monkeypatch.setattr(pulling, "open_bucket", closed)
    way = ship(settings, RUN, data, tmp_path / "one")
    assert (way.by, way.sent_bytes) == ("ssh", 5400 + REWRITTEN)
    assert "does not let us in" in way.why
    assert asked == [1]


def test_a_file_that_has_changed_since_is_hashed_anew(
    server: ObjectServer, settings: Settings, data: Path, tmp_path: Path
) -> None:
    part = plan_upload(None, data, replacements={"data.yaml": b"path: there"}).parts[0]
    before = pulling.keep(settings, {}, RUN, part, lambda: None)
    (data / "sub/3.jpg").write_bytes(b"another")
    after = ship(settings, RUN, data, tmp_path / "one", keep=False)
    assert after.name != before.name
    assert after.pulled_files == 6


def test_files_that_were_hashed_before_are_not_read_again(
    server: ObjectServer, settings: Settings, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = plan_upload(None, data).parts[0]
    first = pulling.keep(settings, {}, RUN, part, lambda: None)
    monkeypatch.setattr(pulling, "hashed", lambda *_: pytest.fail("read again"))
    assert pulling.keep(settings, {}, RUN, part, lambda: None).name == first.name
