"""Pods' lives in virtual time: no server, no sleep, a clock that only moves when told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pennypod.errors import InputError
from pennypod.model.image import RegistryLogin
from pennypod.simulator.clock import VirtualClock
from pennypod.simulator.faults import CALL_FAULTS, ENDPOINTS, POD_FAULTS, Faults, parse_rule
from pennypod.simulator.pods import Ghosts
from pennypod.simulator.pulling import login_of_vast, path_of
from pennypod.simulator.runpod_rows import pod_row
from pennypod.simulator.state import RUNPOD, VAST, Boot, Pod, Stage, World
from pennypod.simulator.vast_rows import instance_row

ROOT = Path(__file__).resolve().parents[2]
T0 = 1_796_000_000.0


def make_world(market: dict[str, Any] | None = None, **options: Any) -> World:
    clock = VirtualClock(0, start=T0)
    return World(clock, Ghosts(), market=market, boot=Boot(assign_s=1, loading_s=10), **options)


def advance(world: World, seconds: float) -> None:
    for step in (0.0, seconds):
        world.clock.advance(step)
        world.tick()
        for job in world.take_jobs():
            job()


def rent(world: World, provider: str = VAST, *faults: dict[str, Any], **values: Any) -> Pod:
    account = world.account(provider)
    struck = [parse_rule({"endpoint": f"{provider}.create", **fault}) for fault in faults]
    common: dict[str, Any] = {"name": "pennypod-x", "image": "an/image:1", "disk_gb": 72.0, "struck": struck} | values
    if provider == VAST:
        offer = next(offer for offer in world.vast.offers(world.clock.now()) if offer.gpus == 1)
        details = {"runtype": "ssh_direct"}
        pod = world.rent_vast(account, offer, **({"details": details} | common))
    else:
        gpu = world.runpod.gpus["NVIDIA GeForce RTX 4090"]
        center = world.runpod.take(gpu, "SECURE", 1, None)
        details = {"cloud": "SECURE", "center": center, "rate": gpu.secure, "full_rate": 0}
        pod = world.rent_runpod(account, gpu, **({"ports": ["22/tcp"], "details": details} | common))
    for job in world.take_jobs():
        job()
    return pod


ONE_MACHINE = {
    "vast": {
        "drift": 0,
        "machines": [{"gpu_name": "RTX 4090", "num_gpus": 1, "dph_per_gpu": 0.36, "storage_cost": 0.1}],
    },
    "runpod": {"gpus": [{"id": "NVIDIA GeForce RTX 4090", "secure": 0.72, "stock": 2}]},
}


def test_a_vast_pod_goes_through_its_stages_and_only_then_has_ports() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world)
    row = instance_row(pod, world.clock.now())
    assert (row["actual_status"], row["intended_status"], row["ports"], row["direct_port_start"]) == (
        None,
        "running",
        None,
        -1,
    )
    advance(world, 2)
    row = instance_row(pod, world.clock.now())
    assert row["actual_status"] == "loading"
    assert "Pulling" in row["status_msg"] or "Downloading" in row["status_msg"]
    advance(world, 10)
    row = instance_row(pod, world.clock.now())
    assert row["actual_status"] == "running"
    assert row["status_msg"] == "success, running an/image_1/ssh"
    assert isinstance(row["ports"]["22/tcp"][0]["HostPort"], str)


def test_vast_bills_the_disk_from_creation_and_the_gpu_only_while_running() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world)
    # 72 GB at 0.1 $/GB and month of 720 h: 0.01 $/h. 11 s of it before the container runs.
    advance(world, 11)
    assert pod.stage is Stage.RUNNING
    assert pod.meter.micros(world.clock.now()) == round(11 / 3600 * 0.01 * 1e6)
    advance(world, 3600)
    now = world.clock.now()
    assert pod.meter.micros(now, "gpu") == 360_000
    assert pod.meter.micros(now, "disk") == round(3611 / 3600 * 0.01 * 1e6)
    world.stop(pod)
    advance(world, 3600)
    now = world.clock.now()
    assert pod.meter.micros(now, "gpu") == 360_000
    assert pod.meter.micros(now, "disk") == round(7211 / 3600 * 0.01 * 1e6)
    world.destroy(pod)
    advance(world, 3600)
    assert pod.meter.micros(world.clock.now(), "disk") == round(7211 / 3600 * 0.01 * 1e6)


def test_runpod_bills_from_the_moment_it_says_running_though_the_image_still_pulls() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world, RUNPOD, disk_gb=72.0)
    advance(world, 2)
    row = pod_row(pod, world.clock.now())
    assert (row["status"], row["runtime"], row["ssh"]["direct"]) == ("RUNNING", None, None)
    assert row["ssh"]["proxy"] is not None
    assert pod.meter.micros(world.clock.now(), "gpu") == 200
    advance(world, 3599)
    assert pod.meter.micros(world.clock.now(), "gpu") == 720_000
    assert pod.meter.micros(world.clock.now(), "disk") == 10_000
    assert pod_row(pod, world.clock.now())["ssh"]["direct"]["port"] == pod.address[1]  # type: ignore[index]
    world.stop(pod)
    advance(world, 3600)
    assert pod.meter.micros(world.clock.now()) == 730_000, "a stopped pod without a volume costs nothing"


def test_a_stopped_runpod_volume_costs_double() -> None:
    world = make_world(ONE_MACHINE)
    gpu = world.runpod.gpus["NVIDIA GeForce RTX 4090"]
    details = {"cloud": "SECURE", "center": "US-TX-3", "rate": gpu.secure, "full_rate": 0, "volume_gb": 72}
    pod = rent(world, RUNPOD, details=details, disk_gb=0)
    advance(world, 1)
    world.stop(pod)
    before = pod.meter.micros(world.clock.now(), "disk")
    advance(world, 3600)
    assert pod.meter.micros(world.clock.now(), "disk") - before == 20_000


def test_the_balance_is_what_was_paid_in_less_every_meter() -> None:
    world = make_world(ONE_MACHINE)
    pods = [rent(world), rent(world, RUNPOD), rent(world, RUNPOD)]
    advance(world, 5000)
    world.destroy(pods[1])
    advance(world, 777)
    now = world.clock.now()
    for account in world.accounts():
        mine = [pod for pod in pods if pod.account is account]
        total = sum(pod.meter.micros(now) for pod in mine)
        assert abs(account.tab.micros(now) - total) <= len(mine)
        assert account.balance(now) == account.credit - account.tab.micros(now)


@pytest.mark.parametrize(("provider", "left"), [(VAST, 1), (RUNPOD, 0)])
def test_without_credit_vast_stops_and_keeps_runpod_ends(provider: str, left: int) -> None:
    world = make_world(ONE_MACHINE | {"accounts": {provider: [{"credit_usd": 0.10}]}})
    pod = rent(world, provider)
    advance(world, 300)
    assert pod.alive
    advance(world, 3600)
    assert len(world.pods[provider]) == left
    assert pod.stage is (Stage.EXITED if left else Stage.GONE)


def test_a_pod_whose_gpus_were_taken_waits_in_the_queue() -> None:
    world = make_world(ONE_MACHINE)
    first = rent(world)
    advance(world, 20)
    world.stop(first)
    second = rent(world)
    assert second.machine is first.machine
    assert world.start(first) is False
    assert (first.stage, first.wanted) == (Stage.SCHEDULING, "running")
    advance(world, 600)
    assert first.stage is Stage.SCHEDULING
    world.destroy(second)
    advance(world, 1)
    advance(world, 5)
    assert first.stage is Stage.RUNNING


def test_a_restarted_runpod_pod_has_another_port() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world, RUNPOD)
    advance(world, 20)
    before = pod.address
    world.stop(pod)
    world.start(pod)
    advance(world, 20)
    assert pod.stage is Stage.RUNNING
    assert pod.address != before


def test_a_late_event_of_an_earlier_life_is_void() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world)
    advance(world, 2)
    world.stop(pod)  # while it loads: its "up" is still due
    advance(world, 100)
    assert pod.stage is Stage.EXITED


@pytest.mark.parametrize(
    ("fault", "options", "after", "stage"),
    [
        ("stuck_loading", {}, 36_000, Stage.LOADING),
        ("slow_loading", {"seconds": 300}, 300, Stage.LOADING),
        ("slow_loading", {"seconds": 300}, 400, Stage.RUNNING),
        ("restart_loop", {}, 36_000, Stage.LOADING),
        ("exit_after", {"seconds": 30}, 40, Stage.RUNNING),
        ("exit_after", {"seconds": 30}, 42, Stage.EXITED),
        ("offline_after", {"seconds": 30}, 60, Stage.OFFLINE),
        ("evict_after", {"seconds": 30}, 60, Stage.EXITED),
    ],
)
def test_pod_faults(fault: str, options: dict[str, Any], after: float, stage: Stage) -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world, VAST, {"fault": fault, **options})
    advance(world, after)
    assert pod.stage is stage


def test_an_exited_container_keeps_its_machine_and_its_disk_bill() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world, VAST, {"fault": "exit_after", "seconds": 5})
    advance(world, 1000)
    row = instance_row(pod, world.clock.now())
    assert (row["actual_status"], row["intended_status"], row["cur_state"]) == ("exited", "running", "running")
    before = pod.meter.micros(world.clock.now(), "disk")
    advance(world, 1000)
    assert pod.meter.micros(world.clock.now(), "disk") > before
    assert pod.meter.seconds("gpu", world.clock.now()) == 5.0


def test_a_pull_error_flips_the_intention_and_says_why() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world, VAST, {"fault": "pull_error"})
    advance(world, 100)
    row = instance_row(pod, world.clock.now())
    assert (row["actual_status"], row["intended_status"]) == ("loading", "stopped")
    assert "manifest for an/image:1 not found" in row["status_msg"]


def test_an_evicted_runpod_pod_is_simply_gone() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world, RUNPOD, {"fault": "evict_after", "seconds": 5})
    advance(world, 100)
    assert not pod.alive
    assert world.pods[RUNPOD] == {}
    assert pod.gone_why == "evicted"


def test_list_lag_hides_new_pods_and_gone_lag_shows_ended_ones() -> None:
    world = make_world(ONE_MACHINE)
    me = world.identify(VAST, "k")
    assert me is not None
    pod = rent(world, VAST, {"fault": "list_lag", "seconds": 30}, {"fault": "gone_lag", "seconds": 40})
    assert world.listing(VAST, me) == []
    advance(world, 31)
    assert world.listing(VAST, me) == [pod]
    world.destroy(pod)
    advance(world, 39)
    assert world.listing(VAST, me) == [pod]
    advance(world, 2)
    assert world.listing(VAST, me) == []


def test_the_wrong_port_is_put_right_in_time() -> None:
    world = make_world(ONE_MACHINE)
    pod = rent(world, VAST, {"fault": "wrong_port", "seconds": 20})
    advance(world, 12)
    assert instance_row(pod, world.clock.now())["ports"]["22/tcp"][0]["HostPort"] == "1"
    advance(world, 20)
    assert pod.address is not None
    assert instance_row(pod, world.clock.now())["ports"]["22/tcp"][0]["HostPort"] == str(pod.address[1])


def test_a_pods_own_key_is_good_for_that_pod_while_it_lives() -> None:
    world = make_world(ONE_MACHINE)
    mine, other = rent(world), rent(world, RUNPOD)
    me = world.identify(VAST, mine.api_key)
    assert me is not None
    assert me.may_touch(mine)
    assert world.identify(VAST, other.api_key) is None, "a key is of one provider"
    assert world.listing(VAST, me) == [mine]
    world.destroy(mine)
    assert world.identify(VAST, mine.api_key) is None


def test_named_accounts_take_no_other_key_and_see_no_other_pods() -> None:
    accounts = {"vast": [{"key": "one"}, {"key": "two"}]}
    world = make_world(ONE_MACHINE | {"accounts": accounts})
    one, two = world.identify(VAST, "one"), world.identify(VAST, "two")
    assert one is not None
    assert two is not None
    assert world.identify(VAST, "three") is None
    pod = rent(world)
    assert world.find(VAST, pod.id, one) is pod
    assert world.find(VAST, pod.id, two) is None


def test_a_key_that_says_it_is_bad_is_refused() -> None:
    world = make_world()
    assert world.identify(VAST, "any-key") is not None
    for key in ("", "bad-key", "INVALID", "revoked-1", "wrong"):
        assert world.identify(VAST, key) is None


# --- fault rules ------------------------------------------------------------------------------------------------------


def strikes(rule: dict[str, Any], calls: int = 6, seed: int = 1, **facts: Any) -> list[int]:
    faults = Faults(seed, [{"endpoint": "vast.create", "fault": "error", **rule}])
    return [number for number in range(1, calls + 1) if faults.meet("vast.create", facts)]


def test_which_calls_a_rule_strikes() -> None:
    assert strikes({}) == [1, 2, 3, 4, 5, 6]
    assert strikes({"nth": 2}) == [2]
    assert strikes({"nth": [1, 4]}) == [1, 4]
    assert strikes({"after": 4}) == [5, 6]
    assert strikes({"times": 2}) == [1, 2]
    assert strikes({"where": {"gpu": "RTX 4090"}}, gpu="RTX 4090") == [1, 2, 3, 4, 5, 6]
    assert strikes({"where": {"gpu": "RTX 4090"}}, gpu="H100 SXM") == []


def test_chance_is_repeatable_and_about_right() -> None:
    hits = strikes({"probability": 0.3}, calls=2000)
    assert hits == strikes({"probability": 0.3}, calls=2000)
    assert hits != strikes({"probability": 0.3}, calls=2000, seed=2)
    assert 500 < len(hits) < 700


def test_wildcards_and_other_endpoints() -> None:
    faults = Faults(1, [{"endpoint": "*.create", "fault": "error"}])
    assert faults.meet("vast.create", {})
    assert faults.meet("runpod.create", {})
    assert faults.meet("vast.list", {}) == []


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"endpoint": "vast.create", "fault": "meteor"}, "meteor"),
        ({"fault": "error"}, "endpoint is missing"),
        (
            {"endpoint": "vast.craete", "fault": "error"},
            "no endpoint 'vast.craete': use one of vast.search, ",
        ),
        ({"endpoint": "vats.*", "fault": "error"}, "no endpoint"),
        ({"endpoint": "vast.list", "fault": "stuck_loading"}, "belongs to a pod"),
        ({"endpoint": "vast.create", "fault": "error", "nth": "soon"}, "soon"),
        ({"endpoint": "vast.create", "fault": "slow", "seconds": "long"}, "long"),
        ("error", "an object"),
    ],
)
def test_a_bad_rule_says_what_is_wrong(rule: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_rule(rule)


def test_the_endpoints_that_rules_may_name_are_those_that_are_served_and_documented() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "python/pennypod/simulator").glob("*.py"))
    served = set(re.findall(r'route\("[A-Z]+", [^"\n]*(?:"[^"]*")?, "((?:vast|runpod)\.[a-z_]+)"', sources))
    assert len(served) > 20
    assert set(ENDPOINTS) == served
    page = (ROOT / "docs/simulator.md").read_text()
    told = page.partition("Endpoints: ")[2].partition("\n\n")[0]
    assert {name.partition(".")[2] for name in ENDPOINTS} <= set(re.findall(r"[a-z_]+", told))
    assert {name for name in (*CALL_FAULTS, *POD_FAULTS) if f"`{name}`" not in page} == set()


def test_bad_rules_are_taken_back_whole() -> None:
    faults = Faults(1)
    with pytest.raises(InputError):
        faults.add([{"endpoint": "vast.list", "fault": "error"}, {"endpoint": "vast.list", "fault": "meteor"}])
    assert faults.rules == []


# --- images ---------------------------------------------------------------------------------------------------------

PRIVATE = f"ghcr.io/me/golden@sha256:{'5' * 64}"
LOGIN = RegistryLogin("ghcr.io", "pods", "secret")
WITH_REGISTRY = ONE_MACHINE | {"registries": {"ghcr.io": {"user": "pods", "password": "secret"}}}


@pytest.mark.parametrize("provider", [VAST, RUNPOD])
@pytest.mark.parametrize(
    ("login", "said"),
    [
        (None, "no basic auth credentials"),
        (replace(LOGIN, password="old"), "unauthorized: authentication required"),
    ],
)
def test_an_image_of_a_private_registry_never_comes_without_its_login(
    provider: str, login: RegistryLogin | None, said: str
) -> None:
    world = make_world(WITH_REGISTRY)
    pod = rent(world, provider, image=PRIVATE, login=login)
    advance(world, 3600)
    assert pod.stage is Stage.LOADING
    assert pod.message.startswith("Error response from daemon: ")
    assert pod.message.endswith(said)
    assert pod.log[-1] == pod.message
    if provider == VAST:
        row = instance_row(pod, world.clock.now())
        assert (row["actual_status"], row["intended_status"]) == ("loading", "stopped")
        assert row["status_msg"] == pod.message
    else:
        row = pod_row(pod, world.clock.now())
        assert (row["status"], row["runtime"], row["ssh"]["direct"]) == ("RUNNING", None, None)


@pytest.mark.parametrize("provider", [VAST, RUNPOD])
def test_with_its_login_it_comes(provider: str) -> None:
    world = make_world(WITH_REGISTRY)
    pod = rent(world, provider, image=PRIVATE, login=LOGIN)
    advance(world, 12)
    assert pod.stage is Stage.RUNNING


@pytest.mark.parametrize("provider", [VAST, RUNPOD])
def test_a_host_that_has_had_the_image_starts_the_next_pod_sooner(provider: str) -> None:
    world = make_world(ONE_MACHINE | {"boot": {name: {"loading_s": 60, "cached_s": 5} for name in (VAST, RUNPOD)}})
    first = rent(world, provider)
    advance(world, 30)
    assert first.stage is Stage.LOADING
    advance(world, 40)
    assert first.stage is Stage.RUNNING
    world.destroy(first)
    second = rent(world, provider)
    advance(world, 2)
    if provider == VAST:
        assert instance_row(second, world.clock.now())["status_msg"] == "Status: Image is up to date for an/image:1"
    advance(world, 8)
    assert second.stage is Stage.RUNNING
    world.destroy(second)
    another = rent(world, provider, image="another/image:1")
    advance(world, 10)
    assert another.stage is Stage.LOADING


def test_a_pull_names_the_repository_as_docker_does() -> None:
    names = ("an/image:1", "ubuntu", PRIVATE, "127.0.0.1:5000/golden:v1", "localhost/a/b@sha256:12")
    assert [path_of(name) for name in names] == ["an/image", "ubuntu", "me/golden", "golden", "a/b"]


def test_vasts_login_is_words_and_for_one_registry() -> None:
    assert login_of_vast("-u pods -p secret ghcr.io", PRIVATE) == LOGIN
    for text in ("", "-u pods -p two words ghcr.io", "-u pods -p secret quay.io", "pods secret ghcr.io"):
        assert login_of_vast(text, PRIVATE) is None


@pytest.mark.parametrize("registries", [["ghcr.io"], {"ghcr.io": "pods"}, {"ghcr.io": {"user": "pods"}}])
def test_a_market_file_that_names_no_login_is_refused(registries: Any) -> None:
    with pytest.raises(InputError, match="registries"):
        make_world({"registries": registries})
