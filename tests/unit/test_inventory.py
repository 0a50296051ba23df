"""The inventory as plain data: who is listed, under which name, in which groups, with which variables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock, FakeProvider, offer
from pennypod import inventory
from pennypod.errors import InputError, ProviderError, TransientError
from pennypod.glance import nothing_open
from pennypod.ledger import AttemptRecord, AttemptState, Ledger, Outcome, RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.settings import Settings

NOW = 1_764_600_000.0
RUN = "demo-1201-abcde"
DEADLINE = int(NOW) + 600


class World:
    """A ledger and one fake provider; `show` is what a user would see."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}")
        self.clock = FakeClock(NOW)
        self.provider = FakeProvider(self.clock)
        self.ledger: Ledger = open_ledger(self.settings)

    def rent(self, run: str = RUN, attempt: int = 1, at: float = NOW, ready: bool = True) -> AttemptRecord:
        """A run of this ledger with a pod that its provider shows."""
        if run not in [record.run for record in self.ledger.runs()]:
            self.ledger.open_run(RunRecord(run, run.split("-", maxsplit=1)[0], "1:1", at, "/tmp/artifacts"))
        lease = Lease(run, attempt, DEADLINE, "aaaaa")
        record = self.ledger.open_attempt(lease, offer(attempt, 360_000), renter="1:1", at=at)
        self.ledger.record_pod(record.id, f"pod-{attempt}", at)
        if ready:
            self.ledger.record_ready(record.id, SshAddress("10.0.0.9", 2299), at)
        self.add(f"pod-{attempt}", lease.name)
        return record

    def add(self, pod_id: str, name: str, state: PodState = PodState.RUNNING, **values: Any) -> None:
        self.provider.live[pod_id] = replace(
            Pod(
                provider="fake",
                pod_id=pod_id,
                name=name,
                state=state,
                created=NOW,
                price_micros_per_h=360_000,
                machine_id="machine-1",
                gpu="RTX 4090",
                address=SshAddress("127.0.0.1", 2222),
            ),
            **values,
        )

    def taken(self) -> inventory.Snapshot:
        return inventory.look_up(inventory.list_pods({"fake": self.provider}), self.ledger, self.settings.runs_dir, NOW)

    def show(self, after_s: float = 0.0) -> dict[str, dict[str, Any]]:
        through_a_cache = json.loads(json.dumps(self.taken()))
        return inventory.hosts(through_a_cache, self.settings.runs_dir, NOW + after_s)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_with_its_pod(world: World) -> None:
    world.rent()
    key = world.settings.run_dir(RUN) / "id_ed25519"
    key.write_text("secret")
    shown = world.show(after_s=100)
    assert shown == {
        RUN: {
            "groups": ["billing", "provider_fake", "job_demo", "gpu_rtx_4090"],
            "vars": {
                "pennypod_run": RUN,
                "pennypod_job": "demo",
                "pennypod_artifacts_dir": "/tmp/artifacts",
                "pennypod_provider": "fake",
                "pennypod_pod_id": "pod-1",
                "pennypod_pod_name": Lease(RUN, 1, DEADLINE, "aaaaa").name,
                "pennypod_machine_id": "machine-1",
                "pennypod_gpu": "RTX 4090",
                "pennypod_gpu_count": 1,
                "pennypod_state": "running",
                "pennypod_price_usd_per_h": 0.36,
                "pennypod_age_s": 100.0,
                "pennypod_cost_so_far_usd": 0.01,
                "pennypod_deadline": DEADLINE,
                "pennypod_overdue": False,
                "pennypod_may_still_be_billing": True,
                "ansible_connection": "ssh",
                "ansible_host": "127.0.0.1",
                "ansible_port": 2222,
                "ansible_user": "root",
                "ansible_python_interpreter": "auto_silent",
                "ansible_ssh_private_key_file": str(key),
                "ansible_ssh_common_args": f"-o 'UserKnownHostsFile=\"{key.parent / 'known_hosts'}\"'"
                " -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes",
            },
        }
    }
    assert "secret" not in json.dumps(world.taken())


def test_the_meter_starts_with_the_create_call_by_our_own_clock(world: World) -> None:
    world.rent(at=NOW - 50)
    assert world.show()[RUN]["vars"]["pennypod_age_s"] == 50.0


def test_past_the_deadline_it_says_so(world: World) -> None:
    world.rent()
    assert world.show(after_s=600)[RUN]["vars"]["pennypod_overdue"] is False
    assert world.show(after_s=601)[RUN]["vars"]["pennypod_overdue"] is True


def test_foreign_machines_are_never_listed(world: World) -> None:
    world.add("pod-9", "someone-elses-machine")
    world.add("pod-8", "my-pennypod-demo")
    assert world.show() == {}


@pytest.mark.parametrize("how", ["unknown run", "closed run", "attempt on record as gone", "lease not on record"])
def test_orphans_are_ours_by_name_but_not_of_a_run_that_goes_on(world: World, how: str) -> None:
    if how == "unknown run":
        world.add("pod-1", Lease(RUN, 1, DEADLINE, "aaaaa").name)
    else:
        record = world.rent()
        if how == "closed run":
            world.ledger.close_run(RUN, Outcome.FAILED, "x", NOW)
        elif how == "lease not on record":
            world.provider.live.clear()
            world.ledger.record_gone(record.id, {}, NOW - 5, 0)
            world.add("pod-7", Lease(RUN, 2, DEADLINE, "bbbbb").name)
        else:
            world.ledger.record_gone(record.id, {}, NOW - 5, 0)
    shown = world.show()
    assert list(shown) == [RUN]
    assert "orphans" in shown[RUN]["groups"]
    assert "billing" in shown[RUN]["groups"]


def test_a_proof_newer_than_the_listing_counts(world: World) -> None:
    record = world.rent()
    world.ledger.record_gone(record.id, {}, NOW + 0.1, 0)
    assert world.show() == {}


def test_a_stopped_pod_is_not_said_to_bill_at_the_full_price(world: World) -> None:
    world.add("pod-1", Lease(RUN, 1, DEADLINE, "aaaaa").name, PodState.STOPPED)
    shown = world.show()[RUN]
    assert "stopped" in shown["groups"]
    assert "billing" not in shown["groups"]
    assert shown["vars"]["pennypod_may_still_be_billing"] is False


def test_a_name_without_a_readable_lease_is_listed_as_it_is_and_holds_no_patterns(world: World) -> None:
    world.add("pod-1", "pennypod-{{ evil }}:[0:9],all")
    (host,) = world.show()
    assert host == "pennypod-___evil_____0_9__all"
    assert world.show()[host]["groups"] == ["billing", "provider_fake", "orphans", "gpu_rtx_4090"]
    assert world.show()[host]["vars"]["pennypod_pod_name"] == "pennypod-{{ evil }}:[0:9],all"
    assert "ansible_ssh_private_key_file" not in world.show()[host]["vars"]


def test_the_run_id_goes_to_the_pod_that_serves_the_run(world: World) -> None:
    first = world.rent(attempt=1)
    world.ledger.record_gone(first.id, {}, NOW - 5, 0)  # on record as gone, yet its provider still shows it
    world.rent(attempt=2)
    shown = world.show()
    assert shown[RUN]["vars"]["pennypod_pod_id"] == "pod-2"
    assert "orphans" not in shown[RUN]["groups"]
    other = Lease(RUN, 1, DEADLINE, "aaaaa").name
    assert set(shown) == {RUN, other}
    assert "orphans" in shown[other]["groups"]


def test_two_pods_of_the_very_same_name_are_two_hosts(world: World) -> None:
    for pod_id in ("pod-1", "pod-2", "pod-3"):
        world.add(pod_id, "pennypod-odd")
    assert {entry["vars"]["pennypod_pod_id"] for entry in world.show().values()} == {"pod-1", "pod-2", "pod-3"}


def test_what_no_listing_shows_and_nobody_proved_gone_is_shown_all_the_same(world: World) -> None:
    world.rent()
    world.provider.live.clear()
    shown = world.show(after_s=36)
    assert shown[RUN]["groups"] == ["unproven", "provider_fake", "job_demo", "gpu_cpu"]
    assert shown[RUN]["vars"]["pennypod_may_still_be_billing"] is True
    assert shown[RUN]["vars"]["pennypod_state"] == "ready"
    assert shown[RUN]["vars"]["pennypod_cost_so_far_usd"] == 0.0036
    assert shown[RUN]["vars"]["ansible_host"] == "10.0.0.9"


def test_a_pod_that_has_no_address_yet_has_none_in_its_variables(world: World) -> None:
    world.rent(ready=False)
    world.add("pod-1", Lease(RUN, 1, DEADLINE, "aaaaa").name, PodState.STARTING, address=None)
    assert not [name for name in world.show()[RUN]["vars"] if name.startswith("ansible_")]


def test_a_failed_listing_is_an_error_that_names_the_provider(world: World) -> None:
    world.rent()
    world.provider.list_faults = [TransientError("HTTP 500")]
    with pytest.raises(ProviderError, match="the pods of fake cannot be listed: HTTP 500"):
        world.show()
    broken = FakeProvider(world.clock, "other")
    broken.list_faults = [TransientError("HTTP 502")]
    with pytest.raises(ProviderError, match="the pods of other"):
        inventory.list_pods({"fake": world.provider, "other": broken})


@pytest.mark.parametrize("place", ["plain", "with a blank", "100%", "it's", "a{{b}}"])
def test_ssh_reads_the_path_of_known_hosts_as_it_is(tmp_path: Path, place: str) -> None:
    import shlex
    import subprocess

    world = World(tmp_path / place)
    world.rent()
    words = shlex.split(world.show()[RUN]["vars"]["ansible_ssh_common_args"])
    told = subprocess.run(["ssh", "-G", *words, "host"], capture_output=True, text=True, check=True).stdout
    settings = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    assert settings["stricthostkeychecking"] in ("true", "yes")
    path = settings["userknownhostsfile"].replace("%%", "%").strip('"')
    assert path == str(world.settings.runs_dir / RUN / "known_hosts")


# --- asking -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(inventory, "all_providers", lambda _settings: {"fake": world.provider})
    return world


def test_without_a_ledger_nothing_is_made_and_pods_are_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home=tmp_path / "none", database_url=f"sqlite:///{tmp_path / 'none' / 'ledger.sqlite3'}")
    provider = FakeProvider(FakeClock(NOW))
    monkeypatch.setattr(inventory, "all_providers", lambda _settings: {"fake": provider})
    assert inventory.take(settings, [], NOW)["hosts"] == []
    assert not settings.home.exists()


def test_a_quiet_ledger_is_believed_and_a_broken_one_is_not_taken_for_quiet(asked: World) -> None:
    assert inventory.take(asked.settings, [], NOW)["hosts"] == []
    asked.rent()
    asked.provider.live.clear()
    assert [entry["host"] for entry in inventory.take(asked.settings, [], NOW)["hosts"]] == [RUN]
    asked.ledger.close()
    assert asked.settings.ledger_file is not None
    asked.settings.ledger_file.write_bytes(b"no database" * 1000)
    with pytest.raises(Exception, match="ledger"):
        inventory.take(asked.settings, [], NOW)


def test_the_quick_look_knows_every_state_that_may_bill(asked: World) -> None:
    record = asked.rent()
    asked.provider.live.clear()
    quiet = {}
    for state in AttemptState:
        with asked.ledger._transaction() as tx:
            tx.exec_driver_sql("UPDATE attempts SET state = ? WHERE id = ?", (state.value, record.id))
        quiet[state] = nothing_open(asked.settings.ledger_file)
    assert [state for state, is_quiet in quiet.items() if is_quiet] == [AttemptState.GONE, AttemptState.NEVER]


def test_only_the_wanted_providers_are_asked_and_a_misspelt_one_is_an_error(asked: World) -> None:
    asked.provider.list_faults = [TransientError("HTTP 500")]
    with pytest.raises(InputError, match=r"vsat is not configured here \(configured: fake\)"):
        inventory.take(asked.settings, ["vsat"], NOW)
    assert asked.provider.list_faults  # it was not even asked


def test_every_write_to_the_ledger_changes_its_mark(asked: World) -> None:
    marks = [inventory.ledger_mark(asked.settings)]
    record = asked.rent()
    marks.append(inventory.ledger_mark(asked.settings))
    asked.ledger.record_gone(record.id, {}, NOW, 0)
    marks.append(inventory.ledger_mark(asked.settings))
    assert marks[0] != marks[1] != marks[2]
    assert inventory.ledger_mark(asked.settings) == marks[2]
    assert inventory.ledger_mark(Settings(home=Path("/"), database_url="postgresql://host/db")) is None
