"""Checkpoints and data against a real S3 server: what counts, who is let in, what a bad line costs."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pennypod.cli import main
from pennypod.errors import StoreError
from pennypod.store import Bucket, Checkpoints, keep_dataset, load_config, open_bucket
from pennypod.store.config import StoreConfig
from pennypod.store.embedded import EmbeddedStore
from pennypod.store.layout import CHECKPOINT, MARKER, Slot, slot_key
from standalone import TRAINERS, load_script
from tcp_proxy import CuttingProxy
from workspace import wait_until

RUN = "demo-1201-k3f7q"
KEEPER = Path(__file__).parents[2] / "python/pennypod/onpod/keep_checkpoint.py"
LEASE_S = 60.0

pytest.importorskip("boto3", reason="the store extra is not installed")
pytestmark = pytest.mark.xdist_group("store")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    with EmbeddedStore(tmp_path_factory.mktemp("home")) as store:
        yield store


@pytest.fixture
def bucket(server: EmbeddedStore) -> Iterator[Bucket]:
    bucket = open_bucket(server.config)
    yield bucket
    for item in list(bucket.list("")):
        bucket.delete(item.key)


def status_of(url: str, body: bytes | None = None) -> int:
    request = urllib.request.Request(url, data=body, method="GET" if body is None else "PUT")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code


class Pod:
    """What the uploader sees of a pod: a folder for the store and one for the training."""

    def __init__(self, folder: Path, bucket: Bucket, attempt: int = 1) -> None:
        self.store, self.training = folder / "store", folder / "out"
        self.checkpoints = Checkpoints(bucket, RUN)
        self.attempt = attempt
        self.training.mkdir(parents=True)
        self.store.mkdir()

    def renew(self, lifetime: float = LEASE_S, *, port: int | None = None, resume: bool = False) -> None:
        """Write new URLs; with `port` such as lead through another door to the same server."""
        plan = self.checkpoints.plan(self.attempt, time.time(), lifetime, resume=resume)
        (self.store / "urls.new").write_text(plan.as_json(), encoding="utf-8")
        (self.store / "urls.new").replace(self.store / "urls.json")

    def offer(self, epoch: int, content: bytes) -> None:
        (self.training / "last.pt").write_bytes(content)
        self.call("offer", str(epoch), str(self.training), "last.pt")

    def call(self, what: str, *args: str) -> str:
        command = [sys.executable, str(KEEPER), what, str(self.store), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr == ""
        return done.stdout

    def state(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.store / "state.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}

    def log(self) -> str:
        path = self.store / "log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait_kept(self, epoch: int) -> None:
        wait_until(lambda: self.state().get("kept_epoch") == epoch, 40, f"epoch {epoch} is kept: {self.log()}")


@pytest.fixture
def pod(tmp_path: Path, bucket: Bucket) -> Pod:
    return Pod(tmp_path / "pod", bucket)


# --- the server and the bucket ------------------------------------------------------------------------------


def test_what_was_put_can_be_got_listed_and_deleted(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("a/one", b"content")
    assert bucket.size("a/one") == 7
    assert bucket.get("a/one", 100) == b"content"
    assert [(item.key, item.bytes) for item in bucket.list("a/")] == [("a/one", 7)]
    with pytest.raises(StoreError, match="larger"):
        bucket.get("a/one", 6)
    bucket.fetch("a/one", tmp_path / "one", 7, hashlib.sha256(b"content").hexdigest())
    assert (tmp_path / "one").read_bytes() == b"content"
    with pytest.raises(StoreError, match="marker"):
        bucket.fetch("a/one", tmp_path / "two", 7, "0" * 64)
    assert [path.name for path in tmp_path.iterdir()] == ["one"], "nothing that is wrong is left"
    bucket.delete("a/one")
    bucket.delete("a/one")
    assert bucket.size("a/one") is None
    assert bucket.get("a/one", 100) is None


def test_a_url_allows_one_thing_for_a_while(bucket: Bucket) -> None:
    put, get = bucket.put_url("x", 60), bucket.get_url("x", 60)
    assert status_of(put, b"mine") == 200
    assert status_of(get) == 200
    assert status_of(get, b"other") in (400, 403), "a URL to read does not write"
    assert status_of(put.replace("/x?", "/y?"), b"other") in (400, 403), "nor does one object's URL write another"
    assert status_of(put.replace("X-Amz-Expires=60", "X-Amz-Expires=600"), b"other") in (400, 403)
    assert bucket.get("x", 10) == b"mine"
    short = bucket.put_url("x", 1)
    wait_until(lambda: status_of(short, b"late") in (400, 403), 10, "the URL expires")
    assert status_of(bucket.get_url("x", 60)) == 200
    with pytest.raises(StoreError, match="no time"):
        bucket.put_url("x", 0)


def test_wrong_keys_are_refused_and_never_repeated(server: EmbeddedStore) -> None:
    good = server.config
    wrong = StoreConfig(good.bucket, good.access_key, "wrong" * 8, endpoint=good.endpoint)
    with pytest.raises(StoreError) as caught:
        open_bucket(wrong)
    assert caught.value.details["status"] in (400, 403)
    assert "wrong" * 8 not in str(caught.value)
    missing = StoreConfig("nobodys", good.access_key, good.secret_key, endpoint=good.endpoint)
    with pytest.raises(StoreError, match="nobodys"):
        open_bucket(missing)


def test_the_embedded_server_keeps_its_keys_to_itself_and_leaves_nothing(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path) as server:
        config, pid = server.config, server.pid
        secret = config.secret_key.encode()
        assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert secret not in (tmp_path / "store/server.log").read_bytes()
        for name in ("keys.json", "embedded.json"):
            assert stat.S_IMODE((tmp_path / "store" / name).stat().st_mode) == 0o600
        assert load_config({}, tmp_path) == config
        open_bucket(config).put("kept", b"content")
        with pytest.raises(StoreError, match="runs already"):
            EmbeddedStore(tmp_path).start()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(StoreError, match="no object store"):
        load_config({}, tmp_path)
    with EmbeddedStore(tmp_path) as server:
        assert server.config.secret_key == config.secret_key
        assert open_bucket(server.config).get("kept", 100) == b"content"


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    environment = {**os.environ, "PENNYPOD_HOME": str(tmp_path)}
    command = subprocess.Popen(
        [str(Path(sys.executable).with_name("pennypod")), "store", "serve"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    ready = json.loads(command.stdout.readline())
    config = load_config({}, tmp_path)
    assert ready == {"endpoint": config.endpoint, "pod_endpoint": "", "bucket": "pennypod"}
    open_bucket(config).put("x", b"content")
    command.terminate()
    rest, _ = command.communicate(timeout=20)
    assert (command.returncode, rest) == (0, "")
    with pytest.raises(StoreError, match="no object store"):
        load_config({}, tmp_path)


def test_the_server_of_a_killed_command_is_ended_by_the_next(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time; from pennypod.store.embedded import EmbeddedStore;"
        f"s = EmbeddedStore(pathlib.Path({str(tmp_path)!r})); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    command = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    orphan = int(command.stdout.readline())
    command.kill()
    command.communicate()
    os.kill(orphan, 0)
    with EmbeddedStore(tmp_path):
        wait_until(lambda: not _runs(orphan), 10, "the orphan has ended")


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


# --- checkpoints ------------------------------------------------------------------------------


def test_an_offered_checkpoint_is_kept_and_comes_back_on_another_pod(pod: Pod, bucket: Bucket, tmp_path: Path) -> None:
    pod.renew()
    pod.offer(3, b"epoch three")
    pod.wait_kept(3)
    newest = pod.checkpoints.newest()
    assert newest is not None
    assert (newest.slot, newest.marker.epoch) == (Slot(1, 1), 3)

    other = Pod(tmp_path / "other", bucket, attempt=2)
    other.renew(resume=True)
    answer = json.loads(other.call("restore", str(tmp_path / "resume")).removeprefix("@pennypod "))
    assert answer == {"restored": True, "why": ""}
    assert (tmp_path / "resume/last.pt").read_bytes() == b"epoch three"
    assert not list((pod.store / "spool").iterdir())
    assert "Signature" not in pod.log() + json.dumps(pod.state())

    target = tmp_path / "home.tar"
    assert pod.checkpoints.fetch_newest(target) == newest
    assert target.stat().st_size == newest.marker.bytes


def test_a_half_written_checkpoint_never_counts(pod: Pod, bucket: Bucket, tmp_path: Path) -> None:
    pod.renew()
    pod.offer(1, b"whole")
    pod.wait_kept(1)
    bucket.put(slot_key(RUN, Slot(1, 2), CHECKPOINT), b"no marker yet")
    marker = {"bytes": 100, "sha256": "0" * 64, "epoch": 2}
    bucket.put(slot_key(RUN, Slot(1, 3), CHECKPOINT), b"x" * 99)
    bucket.put(slot_key(RUN, Slot(1, 3), MARKER), json.dumps(marker).encode())
    newest = pod.checkpoints.newest()
    assert newest is not None
    assert newest.slot == Slot(1, 1)
    # As long as its marker says, and yet another: seen when it is fetched, and the one before it is taken.
    bucket.put(slot_key(RUN, Slot(1, 4), CHECKPOINT), b"x" * 100)
    bucket.put(slot_key(RUN, Slot(1, 4), MARKER), json.dumps(marker).encode())
    kept = pod.checkpoints.fetch_newest(tmp_path / "home.tar")
    assert kept is not None
    assert kept.slot == Slot(1, 1)


def test_nothing_is_restored_from_what_is_not_as_its_marker_says(pod: Pod, bucket: Bucket, tmp_path: Path) -> None:
    marker = {"bytes": 100, "sha256": "0" * 64, "epoch": 2}
    bucket.put(slot_key(RUN, Slot(1, 1), CHECKPOINT), b"x" * 100)
    bucket.put(slot_key(RUN, Slot(1, 1), MARKER), json.dumps(marker).encode())
    pod.renew(resume=True)
    answer = json.loads(pod.call("restore", str(tmp_path / "resume")).removeprefix("@pennypod "))
    assert not answer["restored"]
    assert not (tmp_path / "resume").exists()


def test_a_line_that_breaks_costs_a_try(server: EmbeddedStore, bucket: Bucket, tmp_path: Path) -> None:
    port = int(server.config.endpoint.rpartition(":")[2])
    with CuttingProxy(port, up=100_000, cuts=3) as proxy:
        door = StoreConfig(
            server.config.bucket,
            server.config.access_key,
            server.config.secret_key,
            endpoint=server.config.endpoint,
            pod_endpoint=f"http://127.0.0.1:{proxy.port}",
        )
        pod = Pod(tmp_path / "pod", Bucket(door))
        pod.renew()
        content = os.urandom(2_000_000)
        pod.offer(1, content)
        pod.wait_kept(1)
        assert proxy.connections > 3
        kept = pod.checkpoints.fetch_newest(tmp_path / "home.tar")
    assert kept is not None
    assert content in (tmp_path / "home.tar").read_bytes()


def test_urls_that_have_expired_wait_for_new_ones_and_the_newest_checkpoint_goes(pod: Pod) -> None:
    pod.renew(lifetime=1)
    expired = json.loads((pod.store / "urls.json").read_text())["uploads"][0]["checkpoint"]
    wait_until(lambda: status_of(expired, b"") in (400, 403), 10, "the URLs expire")
    started = time.monotonic()
    for epoch in (1, 2, 3):
        pod.offer(epoch, b"epoch %d" % epoch)
    assert time.monotonic() - started < 15, "an offer does not wait for the upload"
    wait_until(lambda: "the store answers" in pod.log(), 20, "the refusal is written down")
    assert pod.checkpoints.newest() is None
    pod.renew()
    pod.wait_kept(3)
    newest = pod.checkpoints.newest()
    assert newest is not None
    assert newest.marker.epoch == 3


def test_a_server_that_is_killed_in_the_middle_of_an_upload_keeps_no_half(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = EmbeddedStore(home)
    first.start()
    port = int(first.config.endpoint.rpartition(":")[2])
    pod = Pod(tmp_path / "pod", Bucket(first.config))
    pod.renew()
    pod.offer(1, b"one")
    pod.wait_kept(1)
    content = os.urandom(150_000_000)
    pod.offer(2, content)
    # rclone writes into the folder as the bytes arrive: the upload is under way when there are some.
    buckets = home / "store/buckets"
    wait_until(lambda: sum(f.stat().st_size for f in buckets.rglob("*") if f.is_file()) > 5_000_000, 30, "it uploads")
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    with EmbeddedStore(home, port=port) as second:
        after = Checkpoints(open_bucket(second.config), RUN)
        pod.wait_kept(2)
        newest = after.newest()
        assert newest is not None
        assert newest.marker.epoch == 2
        assert after.fetch_newest(tmp_path / "home.tar") == newest


def test_a_store_that_is_gone_never_fails_a_training(pod: Pod) -> None:
    pod.offer(1, b"no urls at all")
    (pod.store / "urls.json").write_text("{broken", encoding="utf-8")
    pod.offer(2, b"broken urls")
    wait_until(lambda: "no unused URL is left" in pod.log(), 20, "it is written down")
    pod.renew()
    pod.wait_kept(2)


def test_the_demos_trainer_goes_on_with_its_epochs_on_another_pod(pod: Pod, bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("numpy", reason="the demo extra is not installed")
    pytest.importorskip("PIL", reason="the demo extra is not installed")
    maker = load_script("make_sample_data")
    maker.CLASSES, maker.CLASSIFY_COUNTS = ("cross", "disc"), {"train": 20, "val": 8}
    (tmp_path / "data").mkdir()
    maker.make_classify(tmp_path / "data", seed=7)
    trainer = [sys.executable, str(TRAINERS / "train_demo.py"), "--data", str(tmp_path / "data"), "--imgsz", "16"]

    def train(where: Pod, *arguments: str, **env: str) -> list[str]:
        # With a wait, so that each epoch's checkpoint is kept however fast the epochs are.
        hook = tmp_path / "hook.sh"
        offer = shlex.join([sys.executable, str(KEEPER), "offer", str(where.store)])
        told = f"grep -qs '\"kept_epoch\": '$1, {shlex.quote(str(where.store / 'state.json'))}"
        hook.write_text(f'{offer} "$@"; for i in $(seq 300); do {told} && exit; sleep 0.1; done\n')
        done = subprocess.run(
            [*trainer, *arguments],
            cwd=where.training,
            env={**os.environ, "PENNYPOD_CHECKPOINT_HOOK": f"sh {hook}", **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("epoch ")]

    pod.renew()
    assert train(pod, "--epochs", "3") == ["1/3", "2/3", "3/3"]
    pod.wait_kept(3)
    # As if the pod had been taken away after epoch 2: what came later never got its marker.
    bucket.delete(slot_key(RUN, Slot(1, 3), MARKER))
    other = Pod(tmp_path / "other", bucket, attempt=2)
    other.renew(resume=True)
    assert json.loads(other.call("restore", str(other.store / "resume")).removeprefix("@pennypod "))["restored"]
    assert train(other, "--epochs", "3", PENNYPOD_RESUME_FROM=str(other.store / "resume")) == ["3/3"]
    other.wait_kept(3)
    again = other.checkpoints.newest()
    assert again is not None
    assert (again.slot.attempt, again.marker.epoch) == (2, 3)


def test_the_command_line_shows_and_fetches_them(server: EmbeddedStore, pod: Pod, tmp_path: Path) -> None:
    pod.renew()
    pod.offer(1, b"epoch one")
    pod.wait_kept(1)
    config = server.config
    environ = {
        "PENNYPOD_HOME": str(tmp_path / "home"),
        "PENNYPOD_S3_BUCKET": config.bucket,
        "PENNYPOD_S3_ENDPOINT": config.endpoint,
        "PENNYPOD_S3_ACCESS_KEY_ID": config.access_key,
        "PENNYPOD_S3_SECRET_ACCESS_KEY": config.secret_key,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        call = CliRunner().invoke
        (found,) = json.loads(call(main, ["store", "checkpoints", RUN, "--json"]).stdout)
        assert (found["slot"], found["epoch"]) == ("001-00001", 1)
        assert "epoch 1" in call(main, ["store", "checkpoints", RUN]).stdout
        target = tmp_path / "home.tar"
        assert call(main, ["store", "fetch", RUN, str(target)]).exit_code == 0
        assert hashlib.sha256(target.read_bytes()).hexdigest() == found["sha256"]
        other = call(main, ["store", "fetch", "other-1201-aaaaa", str(tmp_path / "none")])
        assert (other.exit_code, other.stderr.count("\n")) == (1, 1)
        assert call(main, ["store", "checkpoints", "../x"]).exit_code == 1
        first = json.loads(call(main, ["store", "keep-data", str(pod.training), "--json"]).stdout)
        second = json.loads(call(main, ["store", "keep-data", str(pod.training), "--json"]).stdout)
        assert (first["packs"], second["packs"], second["name"]) == (1, 0, first["name"])


# --- data ------------------------------------------------------------------------------


def test_a_second_run_uploads_nothing(bucket: Bucket, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"image{number}.jpg").write_bytes(os.urandom(10_000))
    first = keep_dataset(bucket, tmp_path)
    before = list(bucket.list(""))
    assert first.packs == 1
    assert {item.key.partition("/")[0] for item in before} == {"packs", "datasets"}
    second = keep_dataset(bucket, tmp_path)
    assert (second.name, second.packs, second.bytes) == (first.name, 0, 0)
    assert list(bucket.list("")) == before
