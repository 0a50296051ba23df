"""The local provider's decisions, with an engine that is a table of answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pennypod.errors import (
    AmbiguousError,
    InvalidError,
    NoCapacityError,
    OfferGoneError,
    PennypodError,
    TransientError,
)
from pennypod.model.ids import Lease
from pennypod.model.offer import Need, Offer, Order
from pennypod.model.pod import PodState, SshAddress
from pennypod.providers.local import LocalProvider
from pennypod.providers.local import provider as module
from pennypod.providers.local.engine import Completed, Engine
from pennypod.settings import Settings

LEASE = Lease("demo-1201-k3f2q", 1, 1_796_000_000, "abcde").name
ID = "da7ec701aee6" + "0" * 52
ORDER = Order(LEASE, "some/image:1", 5, "ssh-ed25519 AAAA run", 1_796_000_000, {"HELLO": "world"})


def row(name: str = LEASE, state: str = "running", exit_code: int = 0, **labels: str) -> dict[str, object]:
    return {
        "Id": ID,
        "Names": [name],
        "State": state,
        "ExitCode": exit_code,
        "Labels": {"pennypod.pod": name, "pennypod.price": "200000", "pennypod.created": "1796000000.5", **labels},
        "Ports": [{"host_ip": "127.0.0.1", "container_port": 22, "host_port": 33015}],
    }


@dataclass
class FakeEngine:
    """Answers `run`, `ps`, `rm` and friends; a list is consumed call by call, its last answer stays."""

    rows: list[dict[str, object]] = field(default_factory=list)
    run: Completed = field(default_factory=lambda: Completed(0, ID + "\n", ""))
    exec_: list[Completed] = field(default_factory=list)
    known_image: bool = True
    calls: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
        self.calls.append(list(argv[1:]))
        match argv[1]:
            case "ps":
                return Completed(0, json.dumps(self.rows), "")
            case "run":
                return self.run
            case "image":
                return (
                    Completed(0, "sha256:1\n", "") if self.known_image else Completed(1, "", "Error: image not known")
                )
            case "exec":
                return self.exec_.pop(0) if len(self.exec_) > 1 else self.exec_[0]
            case "logs":
                return Completed(0, "", "first\npennypod: this image has no OpenSSH server\n")
            case "rm":
                return Completed(0, "", "")
        raise AssertionError(f"unexpected engine call {argv}")

    def called(self, command: str) -> list[list[str]]:
        return [call for call in self.calls if call[0] == command]


def make(tmp_path: Path, fake: FakeEngine, **environ: str) -> LocalProvider:
    engine = Engine("podman", "/bin/podman", "4.3.1", False, str(tmp_path), flags=("--flag", "x"), runner=fake)
    return LocalProvider(Settings(tmp_path, "sqlite://"), environ, engine=engine)


def an_offer(machine: str = "local-1") -> Offer:
    return Offer("local", machine, machine, "CPU", 1, 200_000, 5)


# --- offers --------------------------------------------------------------------------------------------------------


def test_machines_cost_a_little_more_one_by_one(tmp_path: Path) -> None:
    offers = make(tmp_path, FakeEngine(), PENNYPOD_LOCAL_USD_PER_H="0.40").offers(Need(disk_gb=0.001))
    assert [offer.machine_id for offer in offers] == ["local-1", "local-2", "local-3", "local-4"]
    prices = [offer.price_micros_per_h for offer in offers]
    assert prices[0] == 400_000
    assert prices == sorted(set(prices))


def test_a_price_cap_holds_here_too(tmp_path: Path) -> None:
    provider = make(tmp_path, FakeEngine(), PENNYPOD_LOCAL_USD_PER_H="0.40")
    assert len(provider.offers(Need(disk_gb=0.001, max_price_micros_per_h=420_000))) == 2
    assert provider.offers(Need(disk_gb=0.001, max_price_micros_per_h=399_999)) == []


def test_what_stands_in_for_a_gpu_says_so(tmp_path: Path) -> None:
    wish = make(tmp_path, FakeEngine()).offers(Need(gpu=("RTX 4090", "H100"), disk_gb=0.001))[0]
    assert wish.gpu == "CPU"
    assert wish.details["stands_in_for"] == ["RTX 4090", "H100"]
    assert "stands in for RTX 4090 or H100" in wish.details["note"]
    assert "stands_in_for" not in make(tmp_path, FakeEngine()).offers(Need(disk_gb=0.001))[0].details


def test_a_disk_that_is_too_small_is_said_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(NoCapacityError, match=r"asks for 1e\+09 GB .* has [\d.]+ GB free.*lower pod_disk_gb"):
        make(tmp_path, FakeEngine()).offers(Need(disk_gb=1e9))


@pytest.mark.parametrize("text", ["free", "-1", "nan", "inf"])
def test_a_price_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidError, match="PENNYPOD_LOCAL_USD_PER_H"):
        make(tmp_path, FakeEngine(), PENNYPOD_LOCAL_USD_PER_H=text).offers(Need(disk_gb=0.001))


# --- renting -------------------------------------------------------------------------------------------------------


def test_a_pod_is_a_container_named_by_its_lease(tmp_path: Path) -> None:
    fake = FakeEngine()
    assert make(tmp_path, fake, VAST_API_KEY="vast-secret").rent(an_offer("local-2"), ORDER) == ID[:12]
    (call,) = fake.called("run")
    assert call[call.index("--name") + 1] == LEASE
    assert "127.0.0.1::22" in call
    assert call[call.index("--flag") + 1] == "x"
    assert {"pennypod.price=200000", "pennypod.machine=local-2", "pennypod.deadline=1796000000"} <= set(call)
    assert "PENNYPOD_PUBLIC_KEY=ssh-ed25519 AAAA run" in call
    assert "HELLO=world" in call
    assert call[call.index("--pull") + 1] == "never"
    assert "vast-secret" not in " ".join(call)
    told = next(part for part in call if part.startswith("PENNYPOD_ENV_NAMES="))
    assert "HELLO" in told.partition("=")[2].split()


def test_a_name_without_a_lease_is_never_started(tmp_path: Path) -> None:
    fake = FakeEngine()
    order = Order("my-container", "i", 5, "k", 1)
    with pytest.raises(InvalidError, match="not a lease"):
        make(tmp_path, fake).rent(an_offer(), order)
    assert not fake.called("run")


def test_an_offer_of_no_machine_here_is_gone(tmp_path: Path) -> None:
    with pytest.raises(OfferGoneError):
        make(tmp_path, FakeEngine()).rent(an_offer("local-9"), ORDER)


@pytest.mark.parametrize("env", [{"A B": "x"}, {"": "x"}, {"A": "x\ny"}, {"PENNYPOD_PUBLIC_KEY": "x"}])
def test_an_environment_that_cannot_be_carried_is_refused(tmp_path: Path, env: dict[str, str]) -> None:
    fake = FakeEngine()
    with pytest.raises(InvalidError):
        make(tmp_path, fake).rent(an_offer(), Order(LEASE, "i", 5, "k", 1, env))
    assert not fake.called("run")


def test_an_unknown_image_is_said_before_anything_starts(tmp_path: Path) -> None:
    fake = FakeEngine(known_image=False)
    with pytest.raises(InvalidError, match="podman has no image 'some/image:1': use one of stock, torch"):
        make(tmp_path, fake).rent(an_offer(), ORDER)
    assert not fake.called("run")


def test_a_fixed_port_that_is_taken_is_said_with_its_variable(tmp_path: Path) -> None:
    fake = FakeEngine()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        with pytest.raises(InvalidError, match=f"port {port} on 127.0.0.1 is taken: free it or unset PENNYPOD_LOCAL"):
            make(tmp_path, fake, PENNYPOD_LOCAL_SSH_PORT=port).rent(an_offer(), ORDER)
    assert not fake.called("run")
    make(tmp_path, fake, PENNYPOD_LOCAL_SSH_PORT=port).rent(an_offer(), ORDER)
    assert f"127.0.0.1:{port}:22" in fake.called("run")[0]


@pytest.mark.parametrize("text", ["x", "0", "70000", "-1"])
def test_a_port_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidError, match="is not a port"):
        make(tmp_path, FakeEngine(), PENNYPOD_LOCAL_SSH_PORT=text).rent(an_offer(), ORDER)


@pytest.mark.parametrize(
    ("answer", "error", "removed"),
    [
        # The engine keeps a container that it made but could not start: it has to go.
        (Completed(126, ID, "Error: runc: runc create failed: rlimit"), TransientError, True),
        (Completed(126, "", "Error: cannot listen on the TCP port: address already in use"), TransientError, True),
        (Completed(125, "", "Error: write /x: no space left on device"), NoCapacityError, True),
        # Somebody else's create of this very name, or one of ours whose answer was lost: it must not be removed here.
        (Completed(125, "", f'Error: the container name "{LEASE}" is already in use by 12'), AmbiguousError, False),
        (Completed(-9, "", ""), AmbiguousError, False),
    ],
)
def test_a_create_that_fails(tmp_path: Path, answer: Completed, error: type[PennypodError], removed: bool) -> None:
    fake = FakeEngine(run=answer)
    with pytest.raises(error) as caught:
        make(tmp_path, fake).rent(an_offer(), ORDER)
    assert type(caught.value) is error
    assert bool(fake.called("rm")) is removed
    if removed:
        assert fake.called("rm")[0][-1] == LEASE


def test_a_create_without_an_answer_is_ambiguous(tmp_path: Path) -> None:
    class Hanging(FakeEngine):
        def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
            if argv[1] == "run":
                raise TimeoutError("no answer in 60 s")
            return super().__call__(argv, stdin, timeout_s)

    fake = Hanging()
    with pytest.raises(AmbiguousError, match="may exist"):
        make(tmp_path, fake).rent(an_offer(), ORDER)
    assert not fake.called("rm")


# --- what exists ---------------------------------------------------------------------------------------------------


def test_a_running_pod(tmp_path: Path) -> None:
    fake = FakeEngine([row(**{"pennypod.machine": "local-3", "pennypod.gpu": "CPU"})])
    (pod,) = make(tmp_path, fake).pods()
    assert (pod.pod_id, pod.name, pod.state, pod.machine_id) == (ID[:12], LEASE, PodState.RUNNING, "local-3")
    assert (pod.created, pod.price_micros_per_h) == (1796000000.5, 200_000)
    assert pod.address == SshAddress("127.0.0.1", 33015)
    assert len(fake.calls) == 1, "a listing is one engine call"


@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [
        ("created", 0, PodState.STARTING),
        ("initialized", 0, PodState.STARTING),
        ("restarting", 0, PodState.STARTING),
        ("paused", 0, PodState.STOPPED),
        ("exited", 0, PodState.STOPPED),
        ("exited", 137, PodState.STOPPED),
        ("stopped", 143, PodState.STOPPED),
        ("exited", 97, PodState.FAILED),
        ("dead", 137, PodState.FAILED),
        ("something new", 0, PodState.FAILED),
    ],
)
def test_states(tmp_path: Path, state: str, exit_code: int, expected: PodState) -> None:
    (pod,) = make(tmp_path, FakeEngine([row(state=state, exit_code=exit_code)])).pods()
    assert pod.state is expected
    assert pod.address is None


def test_why_a_pod_failed_is_in_its_last_words(tmp_path: Path) -> None:
    pod = make(tmp_path, FakeEngine([row(state="exited", exit_code=97)])).pod(ID[:12])
    assert pod is not None
    assert pod.progress == "pennypod: this image has no OpenSSH server"


def test_a_container_from_an_image_saved_from_a_pod_is_no_pod(tmp_path: Path) -> None:
    fake = FakeEngine([row(name="somebodys", **{"pennypod.pod": LEASE})])
    provider = make(tmp_path, fake)
    assert provider.pods() == []
    assert provider.pod(ID[:12]) is None
    provider.destroy(ID[:12])
    assert not fake.called("rm")


def test_damaged_labels_do_not_hide_a_pod(tmp_path: Path) -> None:
    fake = FakeEngine([row(**{"pennypod.price": "?", "pennypod.created": ""})])
    (pod,) = make(tmp_path, fake).pods()
    assert (pod.name, pod.price_micros_per_h, pod.created) == (LEASE, 0, 0.0)


def test_no_such_pod_is_none_only_for_a_plain_answer(tmp_path: Path) -> None:
    assert make(tmp_path, FakeEngine()).pod(ID[:12]) is None
    with pytest.raises(InvalidError):
        make(tmp_path, FakeEngine()).pod("not-an-id")


# --- the end -------------------------------------------------------------------------------------------------------


def test_destroy_is_idempotent(tmp_path: Path) -> None:
    fake = FakeEngine([row()])
    provider = make(tmp_path, fake)
    provider.destroy(ID[:12])
    assert fake.called("rm")[0][-1] == ID
    fake.rows = []
    provider.destroy(ID[:12])
    assert len(fake.called("rm")) == 1


def test_a_container_that_is_not_named_like_ours_is_left_alone(tmp_path: Path) -> None:
    fake = FakeEngine([row(name="database-of-somebody")])
    with pytest.raises(InvalidError, match="left alone"):
        make(tmp_path, fake).destroy(ID[:12])
    assert not fake.called("rm")


# --- host keys -----------------------------------------------------------------------------------------------------


def test_the_host_key_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _s: None)
    missing = Completed(1, "", "cat: /etc/ssh/ssh_host_ed25519_key.pub: No such file or directory")
    fake = FakeEngine(exec_=[missing, missing, Completed(0, "ssh-ed25519 AAAAC3 pod\n", "")])
    assert make(tmp_path, fake).host_keys(ID[:12]) == ["ssh-ed25519 AAAAC3"]


def test_the_host_key_of_an_ended_pod_is_not_waited_for(tmp_path: Path) -> None:
    ended = Completed(255, "", "Error: can only create exec sessions on running containers: container state improper")
    fake = FakeEngine(exec_=[ended])
    with pytest.raises(TransientError, match="no host key"):
        make(tmp_path, fake).host_keys(ID[:12])
    assert len(fake.calls) == 1


# --- a GPU of this host --------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a driver's device, the toolkit's list, and an nvidia-smi that knows two cards."""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia.yaml").touch()
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf 'NVIDIA GeForce RTX 4090, 24564\\nNVIDIA GeForce RTX 4090, 24564\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path


def find(folder: Path, kind: str = "podman", runtimes: tuple[str, ...] = ()) -> module.Hardware:
    engine = Engine(kind, "/bin/e", "4", False, "", runtimes=runtimes, runner=FakeEngine())
    return module.find_gpu(engine, control=folder / "nvidiactl", cdi_folders=[folder])


def test_a_gpu_is_named_and_handed_on_as_the_engine_wants_it(gpu_host: Path) -> None:
    flags = ("--device", "nvidia.com/gpu=all")
    assert find(gpu_host) == module.Hardware("RTX 4090", 2, 25.8, flags)
    assert find(gpu_host, "docker", ("nvidia", "runc")).flags == ("--gpus", "all")


def test_a_gpu_that_cannot_be_handed_on_does_not_count(gpu_host: Path) -> None:
    cpu = module.Hardware("CPU", 1, None, ())
    assert find(gpu_host, "docker", ("runc",)) == cpu
    (gpu_host / "nvidia.yaml").unlink()
    assert find(gpu_host) == cpu


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "echo 'Tesla, [N/A]'", ""])
def test_a_driver_that_shows_no_card_counts_as_a_cpu(gpu_host: Path, script: str) -> None:
    (gpu_host / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    assert find(gpu_host).gpu == "CPU"


def test_without_a_driver_this_host_is_a_cpu(tmp_path: Path) -> None:
    assert find(tmp_path) == module.Hardware("CPU", 1, None, ())


def test_the_right_gpu_stands_in_for_nothing(tmp_path: Path) -> None:
    provider = make(tmp_path, FakeEngine())
    provider._found = module.Hardware("RTX 4090", 1, 25.8, ("--gpus", "all"))
    (offer, *_) = provider.offers(Need(gpu=("rtx 4090", "H100"), disk_gb=0.001))
    assert (offer.gpu, offer.gpu_ram_gb) == ("RTX 4090", 25.8)
    assert "stands_in_for" not in offer.details
    (two, *_) = provider.offers(Need(gpu=("RTX 4090",), gpu_count=2, disk_gb=0.001))
    assert two.details["note"] == "this host's RTX 4090 stands in for 2 x RTX 4090"


def test_link_speed_is_only_told_where_the_kernel_knows_it(tmp_path: Path) -> None:
    for name, text in (("lo", ""), ("eth0", "-1\n"), ("eth1", "1000\n"), ("podman0", "10000\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(text)
        if name.startswith("eth"):
            (tmp_path / name / "device").mkdir()
    assert module._link_mbps(tmp_path) == 1000
    (tmp_path / "eth1" / "speed").write_text("-1\n")
    assert module._link_mbps(tmp_path) is None
