"""A pod that is taken away in mid-training: the run ends on a second one, from its newest checkpoint in the bucket."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import canaries
import pytest
from pennypod.model.ids import parse_lease
from pennypod.store import Checkpoints, open_bucket
from pennypod.store.embedded import EmbeddedStore
from pod_bucket import pod_bucket
from serving import SECRET, Served, Serving
from simulated import KEYS, Simulator, simulator
from workspace import TINY_JOB, Workspace, wait_until

pytest.importorskip("boto3", reason="the store extra is not installed")
pytestmark = [pytest.mark.pod, pytest.mark.heavy, pytest.mark.xdist_group("store"), pytest.mark.timeout(900)]

CAP_USD = 0.5
# Endless where it begins, three epochs where it goes on: only a run that resumes comes to an end.
TRAINER = """\
mkdir -p runs/tiny/weights
first=1 last=600
if [ -n "${PENNYPOD_RESUME_FROM:-}" ]; then
  first=$(($(cat "$PENNYPOD_RESUME_FROM/last") + 1))
  last=$((first + 2))
fi
for epoch in $(seq "$first" "$last"); do
  echo "epoch $epoch/$last loss 0.5"
  echo "$epoch" > runs/tiny/last
  $PENNYPOD_CHECKPOINT_HOOK "$epoch" "$PWD/runs/tiny" last
  sleep 1
done
echo "epoch,loss" > runs/tiny/results.csv
python3 -c "
import zipfile
with zipfile.ZipFile('runs/tiny/weights/best.npz', 'w') as file:
    file.writestr('w.npy', bytes(100000))
"
"""


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator("--pods", "container", "--speed", "1", "--seed", "11") as running:
        yield running


class Cloud(Workspace):
    """A workspace whose commands find the simulated clouds."""

    def __init__(self, root: Path, sim: Simulator) -> None:
        super().__init__(root)
        self.sim = sim
        self.bucket: dict[str, str] = {}
        (self.root / "code" / "train.sh").write_text(TRAINER)
        job = f"{TINY_JOB}checkpoint_store: true\npod_max_cost_usd: {CAP_USD}\nwebhook_overrides: []\n"
        (self.root / "group_vars" / "job_tiny.yml").write_text(job)

    @property
    def environment(self) -> dict[str, str]:
        keys = {"VAST_API_KEY": KEYS["vast"], "RUNPOD_API_KEY": KEYS["runpod"]} | self.bucket
        return super().environment | keys | {"VAST_URL": self.sim.url, "RUNPOD_API_BASE_URL": f"{self.sim.url}/v2"}


@pytest.fixture
def cloud(tmp_path: Path, sim: Simulator) -> Cloud:
    return Cloud(tmp_path, sim)


@pytest.fixture
def bucket(cloud: Cloud) -> Iterator[EmbeddedStore]:
    # Not the home's own: its keys come by the environment, as those of a bucket elsewhere, and lie nowhere in the home.
    elsewhere = cloud.root / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    with pod_bucket(cloud.settings, elsewhere) as server:
        cloud.bucket = {
            "PENNYPOD_S3_BUCKET": server.config.bucket,
            "PENNYPOD_S3_ACCESS_KEY_ID": server.config.access_key,
            "PENNYPOD_S3_SECRET_ACCESS_KEY": server.config.secret_key,
            "PENNYPOD_S3_ENDPOINT": server.config.endpoint,
            "PENNYPOD_S3_POD_ENDPOINT": server.config.pod_endpoint,
        }
        yield server


class Eviction:
    """What the test did, and when the bucket had what."""

    def __init__(self, sim: Simulator, bucket: EmbeddedStore) -> None:
        self._sim = sim
        self._bucket = open_bucket(bucket.config)
        self.run = ""
        self.kept = 0

    def kept_epoch(self, run: str) -> int:
        newest = Checkpoints(self._bucket, run).newest()
        return 0 if newest is None else newest.marker.epoch or 0

    def strike(self, lowest: int = 2) -> None:
        """Wait until the only pod's run has a checkpoint of epoch `lowest`, and take that pod away."""
        wait_until(lambda: self._trains(lowest), 400, "a checkpoint is kept")
        (pod,) = self._sim.live()
        self.kept = self.kept_epoch(self.run)
        self._sim.post("evict", {"id": pod["id"]})

    def _trains(self, lowest: int) -> bool:
        leases = [lease for pod in self._sim.live() if (lease := parse_lease(pod["name"])) is not None]
        self.run = leases[0].run if leases else ""
        return bool(self.run) and self.kept_epoch(self.run) >= lowest


def epochs_in(log: Path) -> list[int]:
    return [int(found) for found in re.findall(r"^epoch (\d+)/", log.read_text(), re.MULTILINE)]


def check(cloud: Cloud, eviction: Eviction, sim: Simulator, provider: str) -> None:
    """Two pods, one after the other, of one run: resumed, proven gone, within the caps, and all of it written down."""
    document: dict[str, Any] = cloud.document()
    events = (cloud.home / "runs" / eviction.run / "events.jsonl").read_text()
    assert (document["run"], document["outcome"], document["pods_still_billing"]) == (eviction.run, "succeeded", 0)
    folder = Path(document["artifacts_dir"])
    after = epochs_in(folder / "train.log")
    (resumed,) = re.findall(r"goes on from the checkpoint of epoch (\d+)", events)
    assert eviction.kept <= int(resumed) == after[0] - 1, "no epoch is done again that has a checkpoint"
    assert len(after) == 3
    first, second = [attempt for attempt in document["attempts"] if attempt["pod_id"]]
    assert [first["outcome"], second["outcome"]] == ["lost", "done"]
    assert first["provider"] == second["provider"] == provider
    said = {"vast": "shows pod .* as stopped", "runpod": "is no longer listed at runpod"}[provider]
    assert re.search(said, first["reason"])
    pods = [pod for pod in sim.ever() if parse_lease(pod["name"]).run == eviction.run]  # type: ignore[union-attr]
    assert [pod["name"] for pod in pods] == [first["pod_name"], second["pod_name"]]
    assert pods[0]["gone_at"] <= pods[1]["created"], "never two at a time"
    assert sim.live() == []
    leases = [parse_lease(attempt["pod_name"]) for attempt in (first, second)]
    assert len({lease.deadline for lease in leases if lease}) == 1, "the second pod buys no time"
    receipts = json.loads((folder / "receipt.json").read_text())["pods"]
    assert [receipt["pod_name"] for receipt in receipts] == [first["pod_name"], second["pod_name"]]
    meter = {row["name"]: row["micros"] for row in sim.get("meter")["pods"]}
    spent = sum(meter[pod["name"]] for pod in pods)
    assert spent <= document["cost_usd"] * 1e6 + 2000 <= CAP_USD * 1e6


def assert_no_key_is_left(keys: list[str], cloud: Cloud, served: Serving, bucket: EmbeddedStore) -> None:
    """Neither in the ledger, the tables and the runs' folders, nor in logs, results, or the bucket's own objects."""
    store = cloud.root / "elsewhere"
    places = [cloud.home, cloud.artifacts, served.log_file, store, Path.home() / ".ansible"]
    # The bucket's own set-up: its server is started with it, and finds its keys there again.
    private = [store / "store" / "keys.json", store / "store" / "embedded.json"]
    assert canaries.in_files(keys, places, allowed=private) == []
    assert sorted(canaries.in_files([bucket.config.secret_key], [store])) == sorted(map(str, private))
    assert any((store / "store" / "buckets").rglob("*")), "there are objects to search"


def test_a_run_of_the_playbook_ends_on_a_second_pod(
    cloud: Cloud, sim: Simulator, bucket: EmbeddedStore, tmp_path: Path
) -> None:
    eviction, log = Eviction(sim, bucket), tmp_path / "play.log"
    with cloud.playing(job="tiny", provider="vast", log=log) as playing:
        eviction.strike()
        assert playing.wait(400) == 0, log.read_text()[-6000:]
    check(cloud, eviction, sim, "vast")
    (first,) = cloud.artifacts.glob("*/train.log.1")
    assert epochs_in(first)[0] == 1, "the lost pod's log is kept"


def test_a_run_of_the_orchestrator_fails_over_and_ends_on_a_second_pod(
    cloud: Cloud, sim: Simulator, bucket: EmbeddedStore
) -> None:
    # Of its own: other tests have the shared ones in processes of theirs.
    own = {name: canaries.new_key(name) for name in ("webhook", "admin", "read")}
    served = Served(
        cloud,
        "poll_s: 2\nprovider: runpod",
        PENNYPOD_WEBHOOK_SECRET=f"{SECRET},{own['webhook']}",
        PENNYPOD_ADMIN_TOKEN=own["admin"],
        PENNYPOD_READ_TOKEN=own["read"],
    )
    served.http.headers["Authorization"] = f"Bearer {own['read']}"
    try:
        served.start()
        eviction = Eviction(sim, bucket)
        sim.fault("runpod.create", "no_capacity", times=1)
        keys = [*KEYS.values(), *own.values(), bucket.config.secret_key]
        with canaries.Watch(keys, sim.pid, own=own.values()) as watch:
            run = served.start_run()
            served.wait_for(run, stage="watch", limit_s=400)
            eviction.strike()
            status = served.wait_for(run, limit_s=400)
        assert status["outcome"] == "succeeded", json.dumps(status, indent=1) + served.log()
        check(cloud, eviction, sim, "runpod")
        refused = cloud.document()["attempts"][0]
        assert (refused["outcome"], refused["pod_id"]) == ("no_capacity", None)
        page = served.http.get(served.url, timeout=30).text
        for shown in (f"{refused['machine_id']}: no_capacity", ": lost, pod "):
            assert shown in page, "what was tried is on the page"
        assert watch.found == set()
        assert watch.looked_at_pods
        assert_no_key_is_left(keys, cloud, served, bucket)
        shown = served.shown(run, admin=own["admin"], read=own["read"])
        assert canaries.in_texts(keys, shown) == []
    finally:
        served.close()
