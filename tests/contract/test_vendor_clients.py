"""The official `vastai` CLI and SDK and the `runpod` SDK, driven against the simulator through whole lifecycles.

They are the judges: what they cannot tell from the service in what they use is good enough for our own clients. Exit
codes prove nothing here, the CLI ends with 0 on most errors; what it prints and what the simulator holds do.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oci_registry import PASSWORD, USER, oci_registry
from pennypod.model.image import RegistryLogin, parse_repository
from pennypod.model.offer import Need, Order
from pennypod.oci.client import Registry
from pennypod.vastquery import parse
from simulated import RentingWorld, Simulator, simulator
from vendor_clients import VendorClients, environment
from workspace import wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("vendor_clients"), pytest.mark.timeout(1200)]
KEY = "canary-vendor-5c1e"
LEASE = "pennypod-demo-1201-abcde-a1-tt2abcd-nabcde"
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0oxLPVh6nQ9xVU1h0Wl9M1s3JzYkq3TnWbBz4sXq1P someone"


@pytest.fixture(scope="module")
def bin_folder() -> Path:
    return environment()


@pytest.fixture
def world() -> Iterator[Simulator]:
    with simulator("--seed", "3") as running:
        yield running


@pytest.fixture
def clients(bin_folder: Path, world: Simulator, tmp_path: Path) -> VendorClients:
    return VendorClients(bin_folder, tmp_path, world.url, KEY)


def raw(clients: VendorClients, *args: Any) -> Any:
    done = clients.vastai(*args, "--raw")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def later(world: Simulator, seconds: float) -> None:
    for step in (seconds, 1, 1):
        world.post("clock", {"advance": step})


def bodies(world: Simulator, endpoint: str) -> list[Any]:
    return [row["body"] for row in world.get(f"requests?endpoint={endpoint}")["requests"]]


# --- vastai -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ("gpu_name=RTX_3090 reliability>0.9 inet_down>200 disk_space>60", lambda o: o["gpu_name"] == "RTX 3090"),
        ("gpu_ram>=48 num_gpus=1", lambda o: o["gpu_ram"] >= 48000 and o["num_gpus"] == 1),
        ("gpu_name in [RTX_4090,RTX_5090] verified=any", lambda o: o["gpu_name"] in ("RTX 4090", "RTX 5090")),
        ("geolocation notin [US,CA] dph<2", lambda o: o["geolocation"][-2:] not in ("US", "CA") and o["dph_total"] < 2),
        ("cuda_vers>=12.6 datacenter=true", lambda o: o["cuda_max_good"] >= 12.6 and o["hosting_type"] == 1),
        ("driver_version >= 560.35.03", lambda o: o["driver_vers"] >= 560035003),
        ("direct_port_count>=4 duration>10", lambda o: o["direct_port_count"] >= 4 and o["duration"] > 864000),
    ],
)
def test_the_cli_searches_in_its_own_language(clients: VendorClients, query: str, holds: Any) -> None:
    offers = raw(clients, "search", "offers", query, "-o", "dph_total", "--limit", "40")
    assert offers
    assert all(holds(offer) for offer in offers)
    prices = [offer["dph_total"] for offer in offers]
    assert prices == sorted(prices)


def test_the_cli_prints_offers_as_a_table(clients: VendorClients) -> None:
    done = clients.vastai("search", "offers", "gpu_name=RTX_4090", "-o", "dph_total", "--limit", "3")
    assert done.returncode == 0
    assert "RTX_4090" in done.stdout
    assert "mach_id" in done.stdout


@pytest.mark.parametrize("order", ["dph_total", "dph_total-", "reliability-,dph_total"])
def test_the_cli_sends_the_body_that_our_own_reader_of_its_language_makes(
    clients: VendorClients, world: Simulator, order: str
) -> None:
    text = (
        "gpu_name=RTX_3090 reliability>0.98 inet_down>200 disk_space>60 gpu_ram>=24 geolocation in [US,CA] cuda_vers>12"
    )
    clients.vastai("search", "offers", text, "-o", order)
    sent = bodies(world, "vast.search")[-1]
    defaults: dict[str, Any] = {"verified": {"eq": True}, "external": {"eq": False}, "rentable": {"eq": True}}
    expected = parse(text, defaults)
    assert {name: value for name, value in sent.items() if name in expected} == expected
    assert set(sent) - set(expected) == {"order", "type", "allocated_storage"}


def test_a_whole_life_by_the_cli(clients: VendorClients, world: Simulator) -> None:
    offer = raw(clients, "search", "offers", "gpu_name=RTX_4090 num_gpus=1", "-o", "dph_total", "--limit", "1")[0]["id"]
    create = ("create", "instance", offer, "--image", "an/image:1", "--disk", "30", "--ssh", "--direct")
    made = raw(clients, *create, "--label", "pennypod-x", "--env", "-e A=b -p 8080:8080", "--cancel-unavail")
    assert made["success"] is True
    number = made["new_contract"]
    again = clients.vastai(*create, "--cancel-unavail")
    assert "no_such_ask" in again.stderr + again.stdout, "an offer is good for one rental"

    assert raw(clients, "show", "instance", number)["actual_status"] is None
    later(world, 30)
    shown = raw(clients, "show", "instance", number)
    assert (shown["actual_status"], shown["label"], shown["disk_space"]) == ("running", "pennypod-x", 30.0)
    assert shown["extra_env"] == {"A": "b", "-p 8080:8080": "1"}, "the CLI makes an object of the list of pairs"
    assert [row["id"] for row in raw(clients, "show", "instances")] == [number]
    assert str(number)[:3] in clients.vastai("show", "instances").stdout

    port = shown["ports"]["22/tcp"][0]["HostPort"]
    assert clients.vastai("ssh-url", number).stdout.strip() == f"ssh://root@{shown['public_ipaddr']}:{port}"
    assert clients.vastai("scp-url", number).stdout.strip() == f"scp://root@{shown['public_ipaddr']}:{port}"

    clients.vastai("label", "instance", number, "pennypod-y")
    assert raw(clients, "show", "instance", number)["label"] == "pennypod-y"

    for word, status in (("stop", "exited"), ("start", "running")):
        clients.vastai(word, "instance", number)
        later(world, 30)
        assert raw(clients, "show", "instance", number)["actual_status"] == status

    done = clients.vastai("destroy", "instance", number, "-y")
    assert "destroying instance" in done.stdout
    assert world.live() == []
    assert "not found" in clients.vastai("destroy", "instance", number, "-y").stderr
    assert raw(clients, "show", "instances") == []


def test_many_at_once_by_the_cli(clients: VendorClients, world: Simulator) -> None:
    found = raw(clients, "search", "offers", "num_gpus=1 gpu_name in [RTX_4090,A40]", "--limit", "2")
    clients.vastai("create", "instances", *(offer["id"] for offer in found), "--image", "an/image:1", "--disk", "20")
    launched = clients.vastai(
        "launch", "instance", "-g", "RTX_3090", "-n", "1", "-i", "an/image:1", "-d", "20", "--ssh"
    )
    assert "launched successfully" in launched.stdout
    numbers = [pod["id"] for pod in world.live()]
    assert len(numbers) == 3
    clients.vastai("destroy", "instances", *numbers, "-y")
    assert world.live() == []


def test_price_requests_by_the_cli(clients: VendorClients, world: Simulator) -> None:
    found = raw(clients, "search", "offers", "num_gpus=1 gpu_name in [RTX_4090,A40]", "--limit", "2")
    clients.vastai("create", "instances", *(offer["id"] for offer in found), "--image", "an/image:1", "--disk", "20")
    first, second = (pod["id"] for pod in world.live())
    later(world, 30)
    for number in (first, second):
        world.post("price_request", {"id": number, "usd_per_h": 7.5})
    assert "7.5" in clients.vastai("show", "pending-price-increases").stdout
    clients.vastai("reject", "price-increase", first, "--yes")
    clients.vastai("accept", "price-increase", second, "--yes")
    rates = {pod["id"]: pod["rate_micros_per_h"] for pod in world.live()}
    assert rates[first] < 7_500_000 < rates[second]
    assert clients.vastai("show", "pending-price-increases", "-q").stdout.strip() == ""


@pytest.mark.pod
def test_a_snapshot_by_the_cli_is_in_the_registry_in_the_end(bin_folder: Path, tmp_path: Path) -> None:
    with (
        oci_registry(tmp_path / "registry") as host,
        simulator("--pods", "container", "--speed", "1", "--seed", "3") as world,
    ):
        clients = VendorClients(bin_folder, tmp_path, world.url, KEY)
        offer = raw(clients, "search", "offers", "num_gpus=1", "--limit", "1")[0]["id"]
        made = raw(clients, "create", "instance", offer, "--image", "an/image:1", "--disk", "30", "--ssh")
        number = made["new_contract"]
        shown = ("show", "instance", number)
        wait_until(lambda: raw(clients, *shown)["actual_status"] == "running", 120, "the pod runs")
        login = ("--docker_login_user", USER, "--docker_login_pass", PASSWORD, "--container_registry", host)
        said = clients.vastai("take", "snapshot", number, "--repo", "me/snapshot", *login)
        assert "Snapshot request sent successfully" in said.stdout
        registry = Registry(host, RegistryLogin(host, USER, PASSWORD))
        place = parse_repository(f"{host}/me/snapshot")
        wait_until(lambda: registry.manifest(place, "latest"), 120, "the host has pushed it")
        manifest = json.loads(registry.manifest(place, "latest").content)  # type: ignore[union-attr]
        config = json.loads(registry.blob(place, manifest["config"]["digest"]))
        assert f"CONTAINER_ID={number}" in config["config"]["Env"], "the pod's own environment comes with it"
        assert PASSWORD not in json.dumps(bodies(world, "vast.snapshot"))


def test_templates_by_the_cli(clients: VendorClients, world: Simulator) -> None:
    def found(number: int) -> Any:
        done = clients.vastai("search", "templates", f"id={number}")
        (row,) = json.loads(done.stdout)
        return row

    container = ("--image", "me/golden", "--image_tag", "v3", "--ssh", "--direct")
    parts = (*container, "--env", "-e A=template -e B='two words'")
    said = clients.vastai("create", "template", "--name", "detector", *parts, "--disk_space", "33")
    assert said.stdout.startswith("New Template: "), said.stdout
    made = ast.literal_eval(said.stdout.removeprefix("New Template: "))
    assert found(made["id"])["hash_id"] == made["hash_id"]
    offer = raw(clients, "search", "offers", "num_gpus=1", "--limit", "1")[0]["id"]
    create = ("create", "instance", offer, "--template_hash", made["hash_id"], "--env", "-e A=mine", "--disk", "30")
    row = raw(clients, "show", "instance", raw(clients, *create)["new_contract"])
    assert (row["image_uuid"], row["template_hash_id"]) == ("me/golden:v3", made["hash_id"])
    env = dict(row["extra_env"])
    assert (env["A"], env["B"]) == ("mine", "two words")
    assert "ssh" in row["image_runtype"]

    edited = clients.vastai("update", "template", made["hash_id"], "--name", "detector 2", *parts)
    after = json.loads(edited.stdout.removeprefix("updated template: "))
    assert (after["id"], after["name"]) == (made["id"], "detector 2")
    assert found(made["id"])["hash_id"] == after["hash_id"] != made["hash_id"]
    gone = clients.vastai("delete", "template", "--hash-id", after["hash_id"])
    assert "Deleted Successfully" in gone.stdout
    assert json.loads(clients.vastai("search", "templates", f"id={made['id']}").stdout) == []
    assert "No template found" in clients.vastai("update", "template", after["hash_id"], "--name", "x", *parts).stdout
    assert len(world.live()) == 1


def test_logs_by_the_cli(clients: VendorClients, world: Simulator) -> None:
    offer = raw(clients, "search", "offers", "num_gpus=1", "--limit", "1")[0]["id"]
    number = raw(clients, "create", "instance", offer, "--image", "an/image:1", "--disk", "30", "--ssh")["new_contract"]
    world.post("clock", {"speed": 1})  # the CLI asks the log's place again and again until it is there
    later(world, 30)
    assert "an/image:1: ghost pod, no container" in clients.vastai("logs", number, "--tail", "10").stdout


def test_an_instance_that_is_reached_by_proxy_only(clients: VendorClients, world: Simulator) -> None:
    offer = raw(clients, "search", "offers", "num_gpus=1", "--limit", "1")[0]["id"]
    number = raw(clients, "create", "instance", offer, "--image", "an/image:1", "--disk", "30", "--ssh")["new_contract"]
    later(world, 30)
    shown = raw(clients, "show", "instance", number)
    assert shown["ports"] == {}
    assert clients.vastai("ssh-url", number).stdout.strip() == f"ssh://root@{shown['ssh_host']}:{shown['ssh_port']}"


def test_keys_and_account_by_the_cli(clients: VendorClients, world: Simulator) -> None:
    user = raw(clients, "show", "user")
    assert user["credit"] == 100.0
    assert "api_key" not in user
    clients.vastai("create", "ssh-key", SSH_KEY, "-y")
    assert [key["public_key"] for key in raw(clients, "show", "ssh-keys")] == [SSH_KEY]
    offer = raw(clients, "search", "offers", "num_gpus=1", "--limit", "1")[0]["id"]
    number = raw(clients, "create", "instance", offer, "--image", "an/image:1", "--disk", "30", "--ssh")["new_contract"]
    file = clients.home / "key.pub"
    file.write_text(SSH_KEY.replace("someone", "other") + "\n")
    assert "added" in clients.vastai("attach", "ssh", number, file).stdout
    assert "already associated" in clients.vastai("attach", "ssh", number, file).stdout
    later(world, 3600)
    charges = raw(clients, "show", "invoices-v1", "--charges", "--start-date", "2020-01-01", "--end-date", "2099-01-01")
    assert f"instance-{number}" in json.dumps(charges)
    invoices = raw(
        clients, "show", "invoices-v1", "--invoices", "--start-date", "2020-01-01", "--end-date", "2099-01-01"
    )
    assert "-100.0" in json.dumps(invoices), "a top-up counts backwards"


def test_the_cli_on_a_bad_key(clients: VendorClients) -> None:
    done = clients.vastai("show", "user", VAST_API_KEY="bad-key")
    assert "Invalid user key" in done.stderr
    assert "credit" not in done.stdout


def test_the_clis_own_retries_meet_a_busy_service(clients: VendorClients, world: Simulator) -> None:
    world.fault("vast.list", "rate_limited", times=2)
    assert raw(clients, "show", "instances") == []
    assert len(bodies(world, "vast.list")) == 3


def test_a_create_that_the_cli_repeats_blindly_rents_twice(clients: VendorClients, world: Simulator) -> None:
    """Why our client sends a create once: an answer that was lost on the way back, and the official retry."""
    offer = raw(clients, "search", "offers", "num_gpus=1", "--limit", "1")[0]["id"]
    world.fault("vast.create", "error_after_commit", nth=1, status=503)
    clients.vastai(
        "create", "instance", offer, "--image", "an/image:1", "--disk", "30", "--ssh", "--label", "pennypod-x"
    )
    assert len(bodies(world, "vast.create")) == 2
    assert len(world.ever()) == 2, "without cancel_unavail the second one is left stopped, and billed for its disk"


def test_the_key_is_in_the_header_only(clients: VendorClients, world: Simulator) -> None:
    clients.vastai("show", "instances")
    clients.vastai("search", "offers", "num_gpus=1", "--limit", "1")
    assert {row["key_in"] for row in world.get("requests")["requests"]} <= {"header", ""}


_SDK = """
import json
from vastai import VastAI
sdk = VastAI(raw=True, quiet=True)
offers = sdk.search_offers(query="num_gpus=1 gpu_name=RTX_3090", order="dph_total", limit=1)
made = sdk.create_instance(id=offers[0]["id"], image="an/image:1", disk=20, ssh=True, direct=True, label="pennypod-sdk")
number = made["new_contract"]
shown = sdk.show_instance(id=number)
listed = [row["id"] for row in sdk.show_instances()]
gone = sdk.destroy_instance(id=number)
left = sdk.show_instances()
print(json.dumps({"made": made["success"], "label": shown["label"], "listed": listed == [number], "left": left}))
"""


def test_a_whole_life_by_the_vast_sdk(clients: VendorClients, world: Simulator) -> None:
    done = clients.python(_SDK)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said == {"made": True, "label": "pennypod-sdk", "listed": True, "left": []}
    assert world.live() == []


# --- our own request beside the official one --------------------------------------------------------------------------

# Every difference between our create and the official CLI's for the same intent, and why it is there.
DELIBERATE = {
    "cancel_unavail": "the CLI's explicit false leaves a stopped contract behind when the machine is taken",
    "target_state": "running is the default; said aloud, since a stopped contract bills for its disk",
    "onstart": "ours switches tmux off at login, which Vast's images switch on",
}


def test_our_create_differs_from_the_official_one_only_where_it_is_meant_to(
    clients: VendorClients, world: Simulator, tmp_path: Path
) -> None:
    ours = RentingWorld(tmp_path, world)
    offer = ours.offers("vast", Need(gpu=("RTX 4090",), disk_gb=30))[0]
    order = Order(LEASE, "an/image:1", 30.0, SSH_KEY, int(ours.clock.now()) + 3600, env={"A": "b"})
    ours.providers["vast"].rent(offer, order)
    number = raw(clients, "search", "offers", "gpu_name=RTX_4090 num_gpus=1", "--limit", "1")[0]["id"]
    intent = ("--image", "an/image:1", "--disk", "30", "--ssh", "--direct", "--label", LEASE, "--env", "-e A=b")
    clients.vastai("create", "instance", number, *intent)
    mine, theirs = bodies(world, "vast.create")
    fields = {
        name
        for name in {*mine, *theirs}
        # The CLI sends null and false for what was not asked; leaving a field out means the same to the server.
        if (mine.get(name) or None) != (theirs.get(name) or None)
    }
    assert fields == set(DELIBERATE), {name: (mine.get(name), theirs.get(name)) for name in fields ^ set(DELIBERATE)}


# --- runpod -----------------------------------------------------------------------------------------------------------

_RUNPOD = """
import json, os, runpod
runpod.api_key = os.environ["RUNPOD_API_KEY"]
gpu = "NVIDIA GeForce RTX 4090"
out = {"gpus": len(runpod.get_gpus()), "gpu": runpod.get_gpu(gpu), "user": runpod.get_user()}
made = runpod.create_pod("pennypod-x", "runpod/pytorch:1", gpu, ports="22/tcp", env={"A": "b"}, container_disk_in_gb=20)
out["made"] = made
out["pod"] = runpod.get_pod(made["id"])
out["pods"] = [pod["id"] for pod in runpod.get_pods()]
out["stopped"] = runpod.stop_pod(made["id"])["desiredStatus"]
out["resumed"] = runpod.resume_pod(made["id"], 1)["desiredStatus"]
runpod.terminate_pod(made["id"])
out["left"], out["gone"] = runpod.get_pods(), runpod.get_pod(made["id"])
print(json.dumps(out))
"""


def test_a_whole_life_by_the_runpod_sdk(clients: VendorClients, world: Simulator) -> None:
    done = clients.python(_RUNPOD)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.strip().splitlines()[-1])
    assert out["gpus"] > 10
    assert (out["gpu"]["displayName"], out["gpu"]["memoryInGb"]) == ("RTX 4090", 24)
    assert out["gpu"]["lowestPrice"]["uninterruptablePrice"] > 0
    assert (out["pod"]["name"], out["pod"]["env"], out["pod"]["uptimeSeconds"]) == ("pennypod-x", ["A=b"], 0)
    assert out["pods"] == [out["made"]["id"]]
    assert (out["stopped"], out["resumed"], out["left"], out["gone"]) == ("EXITED", "RUNNING", [], None)
    assert world.live() == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("runpod.api_key = 'bad-key'; runpod.get_pods()", "Unauthorized"),
        ("runpod.create_pod('x', 'i', 'NVIDIA GeForce RTX 4090', gpu_count=64)", "no longer any instances available"),
        ("runpod.create_pod('x', 'i', 'NVIDIA Nothing')", "No GPU found"),
        ("runpod.resume_pod('nothing', 1)", "pod not found"),
    ],
)
def test_the_runpod_sdk_reads_the_errors(clients: VendorClients, text: str, says: str) -> None:
    done = clients.python(f"import os, runpod; runpod.api_key = os.environ['RUNPOD_API_KEY']; {text}")
    assert done.returncode != 0
    assert says in done.stderr
