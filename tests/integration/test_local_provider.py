"""The local provider with a real engine: real containers, a real sshd, a real end."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pennypod.clock import SystemClock
from pennypod.errors import AmbiguousError, InvalidError
from pennypod.model.ids import Lease, new_run_id, random_base32
from pennypod.model.offer import Need, Offer, Order
from pennypod.model.pod import Pod, PodState
from pennypod.providers.local import LocalProvider, local_provider
from pennypod.providers.local import image as images
from pennypod.settings import Settings
from pennypod.ssh import Completed, Ssh, SshTarget, make_key_pair, trust_host_keys, wait_for_ssh

pytestmark = pytest.mark.pod

ENV = {"HELLO": "a \"b\" \\ $x 'c' äöü", "EMPTY": ""}
# A first build takes a minute or two on a quiet machine, several on a busy one.
BUILD_S = 1200


class Landlord:
    """Rents pods for one test and removes whatever that test leaves behind."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.settings = Settings(folder, "sqlite://")
        self.folder = folder
        self.provider = local_provider(self.settings, {**os.environ, **environ})
        self.key_file, self.public_key = make_key_pair(folder, "pennypod tests")
        self.names: list[str] = []

    def order(self, image: str = "stock", **env: str) -> Order:
        run = new_run_id("test", time.time(), secrets.randbelow)
        lease = Lease(run, 1, int(time.time()) + 600, random_base32(5, secrets.randbelow))
        self.names.append(lease.name)
        return Order(lease.name, image, 1, self.public_key, lease.deadline, env)

    def offer(self, number: int = 0) -> Offer:
        return self.provider.offers(Need(disk_gb=0.1))[number]

    def rent(self, **env: str) -> Pod:
        pod = self.provider.pod(self.provider.rent(self.offer(), self.order(**env)))
        assert pod is not None
        return pod

    def ssh(self, pod: Pod) -> Ssh:
        """Logged in with the host key read through the engine: a different one would be refused."""
        assert pod.address is not None
        known_hosts = self.folder / f"known_hosts-{pod.pod_id}"
        trust_host_keys(known_hosts, pod.address.host, pod.address.port, self.provider.host_keys(pod.pod_id))
        ssh = Ssh(SshTarget(pod.address.host, pod.address.port, pod.address.user, self.key_file, known_hosts))
        wait_for_ssh(ssh, deadline_s=30, clock=SystemClock(), on_wait=lambda _why: None)
        return ssh

    def clean(self) -> None:
        for name in self.names:
            self.provider.engine.remove_container(name)


@pytest.fixture
def landlord(tmp_path: Path) -> Iterator[Landlord]:
    someone = Landlord(tmp_path, {"PENNYPOD_LOCAL_USD_PER_H": "0.36"})
    someone.provider.prepare("stock", print)
    try:
        yield someone
    finally:
        someone.clean()


def text(done: Completed) -> str:
    assert done.rc == 0, done.stderr.decode()
    return done.stdout.decode()


def wait_until(condition: Callable[[], bool], limit_s: float = 15.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "did not happen in time"
        time.sleep(0.1)
    return time.monotonic() - began


# --- a pod's life --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(BUILD_S)
def test_a_pod_from_rent_to_proven_absence(landlord: Landlord, record_property: Callable[[str, object], None]) -> None:
    provider, offer, order = landlord.provider, landlord.offer(1), landlord.order(**ENV)
    began = time.monotonic()
    pod_id = provider.rent(offer, order)
    pod = provider.pod(pod_id)
    assert pod is not None
    ssh = landlord.ssh(pod)
    record_property("rent_to_login_s", round(time.monotonic() - began, 2))
    shown = text(ssh.run("printenv HELLO; printenv EMPTY; id -un; cat /etc/ssh/ssh_host_ed25519_key.pub"))
    hello, empty, user, key = shown.splitlines()
    assert (hello, empty, user) == (ENV["HELLO"], "", "root")
    assert [" ".join(key.split()[:2])] == provider.host_keys(pod_id)
    listed = next(entry for entry in provider.pods() if entry.pod_id == pod_id)
    assert listed == pod
    assert (listed.name, listed.state, listed.machine_id) == (order.name, PodState.RUNNING, offer.machine_id)
    assert listed.price_micros_per_h == offer.price_micros_per_h == 378_000
    assert abs(listed.created - time.time()) < 60
    ssh.close()

    began = time.monotonic()
    provider.destroy(pod_id)
    for _ in range(provider.timing.absence_checks):
        time.sleep(provider.timing.absence_spacing_s)
        assert provider.pod(pod_id) is None
        assert pod_id not in [entry.pod_id for entry in provider.pods()]
    record_property("destroy_to_proof_s", round(time.monotonic() - began, 2))
    provider.destroy(pod_id)


def test_only_the_runs_own_key_opens_the_door(landlord: Landlord, tmp_path: Path) -> None:
    pod = landlord.rent()
    landlord.ssh(pod).close()
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    key, _ = make_key_pair(stranger, "stranger")
    assert pod.address is not None
    argv = ["ssh", "-F", "none", "-i", str(key), "-p", str(pod.address.port), "-o", "IdentitiesOnly=yes"]
    argv += ["-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={tmp_path / f'known_hosts-{pod.pod_id}'}"]
    done = subprocess.run([*argv, "root@127.0.0.1", "true"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_a_pod_listens_on_the_loopback_interface_only(landlord: Landlord) -> None:
    pod = landlord.rent()
    landlord.ssh(pod).close()
    assert pod.address is not None
    shown = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10).stdout.split()
    for address in [a for a in shown if ":" not in a and not a.startswith("127.")]:
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((address, pod.address.port)) != 0, f"the pod answers on {address}"


def test_two_at_once_do_not_meet(landlord: Landlord) -> None:
    pods: dict[int, Pod] = {}

    def rent(number: int) -> None:
        pods[number] = landlord.rent(NUMBER=str(number))

    threads = [threading.Thread(target=rent, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({pod.pod_id for pod in pods.values()}) == 2
    assert len({pod.address for pod in pods.values()}) == 2
    for number, pod in pods.items():
        assert text(landlord.ssh(pod).run("printenv NUMBER")).strip() == str(number)
    assert landlord.provider.host_keys(pods[0].pod_id) != landlord.provider.host_keys(pods[1].pod_id)
    landlord.provider.destroy(pods[0].pod_id)
    assert landlord.provider.pod(pods[0].pod_id) is None
    assert landlord.provider.pod(pods[1].pod_id) is not None


def test_the_same_lease_twice_is_one_pod(landlord: Landlord) -> None:
    order = landlord.order()
    pod_id = landlord.provider.rent(landlord.offer(), order)
    with pytest.raises(AmbiguousError):
        landlord.provider.rent(landlord.offer(1), order)
    assert [pod.pod_id for pod in landlord.provider.pods() if pod.name == order.name] == [pod_id]


def test_a_pod_whose_first_process_dies_is_no_longer_billing(landlord: Landlord) -> None:
    pod = landlord.rent()
    landlord.ssh(pod).close()
    landlord.provider.engine.check("kill", "--signal", "KILL", pod.pod_id)

    def ended() -> bool:
        now = landlord.provider.pod(pod.pod_id)
        assert now is not None, "it is still there, and still listed"
        return now.state in (PodState.STOPPED, PodState.FAILED) and not now.address

    wait_until(ended)


def test_an_image_without_sshd_says_so_and_fails(landlord: Landlord) -> None:
    engine = landlord.provider.engine
    name = f"localhost/pennypod-test-bare:{secrets.token_hex(4)}"
    # The stock image without its server: no other image is sure to be here.
    builder = f"build-pennypod-test-{secrets.token_hex(4)}"
    try:
        stock = images.image_reference("stock")
        engine.check("run", "--name", builder, *engine.flags, "--entrypoint", "/bin/rm", stock, "/usr/sbin/sshd")
        engine.check("commit", builder, name, timeout_s=120)
        pod_id = landlord.provider.rent(landlord.offer(), landlord.order(name))

        def failed() -> bool:
            pod = landlord.provider.pod(pod_id)
            return pod is not None and pod.state is PodState.FAILED and "no OpenSSH server" in pod.progress

        wait_until(failed)
    finally:
        landlord.clean()
        engine.remove_container(builder)
        engine.call("rmi", "-f", name)


def test_a_fixed_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        port = busy.getsockname()[1]
    # And a state folder whose name has in it what engines take for separators.
    home = tmp_path / "home, sweet: home"
    home.mkdir()
    someone = Landlord(home, {"PENNYPOD_LOCAL_SSH_PORT": str(port)})
    try:
        someone.provider.prepare("stock", print)
        pod = someone.rent()
        assert pod.address is not None
        assert pod.address.port == port
        with pytest.raises(InvalidError, match=f"port {port} on 127.0.0.1 is taken") as caught:
            someone.provider.rent(someone.offer(), someone.order())
        assert caught.value.code == "invalid"
        assert [entry.pod_id for entry in someone.provider.pods() if entry.name in someone.names] == [pod.pod_id]
    finally:
        someone.clean()


def test_a_container_that_is_not_ours_is_left_alone(landlord: Landlord) -> None:
    engine = landlord.provider.engine
    name = f"pennypodding-{secrets.token_hex(4)}"
    landlord.names.append(name)
    args = ["run", "--detach", "--name", name, "--label", f"pennypod.pod={name}", *engine.flags]
    stock = images.image_reference("stock")
    made = engine.check(*args, "--entrypoint", "/bin/sleep", stock, "60").strip().splitlines()[-1]
    assert made[:12] in [pod.pod_id for pod in landlord.provider.pods()], "it is shown"
    with pytest.raises(InvalidError, match="left alone"):
        landlord.provider.destroy(made[:12])
    assert made[:12] in [pod.pod_id for pod in landlord.provider.pods()]


# --- what a stock image is -----------------------------------------------------------------------------------------


def test_the_stock_image_has_the_gaps_of_a_rented_machine(landlord: Landlord) -> None:
    ssh = landlord.ssh(landlord.rent())
    assert text(ssh.run("python3 -c 'import numpy; print(numpy.__version__)'")).startswith("2.")
    cv2 = ssh.run("python3 -c 'import cv2'")
    assert cv2.rc == 1
    assert b"libGL.so.1" in cv2.stderr
    assert ssh.run("tmux ls").rc == 1
    assert ssh.run("command -v rsync").rc != 0
    assert ssh.run("command -v tmux && command -v tar && python3 -c 'import PIL'").rc == 0


def test_pip_and_apt_in_a_pod_reach_what_the_host_reaches(landlord: Landlord) -> None:
    ssh = landlord.ssh(landlord.rent())
    text(ssh.run("cd /tmp && python3 -m pip download -q --no-deps --no-cache-dir six && ls six-*.whl", timeout_s=120))
    # No marker forbids pip to install into the system's Python.
    text(ssh.run("python3 -m pip install -q --no-cache-dir six && python3 -c 'import six'", timeout_s=120))
    text(ssh.run("apt-get -q update && apt-get -q install -y hostname less && command -v less", timeout_s=240))


def test_nothing_else_of_the_hosts_environment_is_in_a_pod(tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    someone = Landlord(tmp_path, {"VAST_API_KEY": secret, "RUNPOD_API_KEY": secret, "SOME_TOKEN": secret})
    try:
        someone.provider.prepare("stock", print)
        pod = someone.rent()
        ssh = someone.ssh(pod)
        search = f"cat /proc/*/environ 2>/dev/null | grep -ac {secret}; grep -rsl {secret} /etc /root /run | head"
        assert ssh.run(search).stdout.split() == [b"0"]
        inspected = someone.provider.engine.check("inspect", pod.pod_id)
        assert secret not in inspected
        assert json.loads(inspected)
    finally:
        someone.clean()


def test_the_image_carries_nothing_of_the_host_it_was_built_on(landlord: Landlord) -> None:
    engine, provider = landlord.provider.engine, landlord.provider
    host = provider._host()
    paths = ["/etc/pip.conf", "/etc/apt/apt.conf.d/95pennypod-host", "/root/.ssh", "/etc/ssh/ssh_host_ed25519_key"]
    paths += [path for path in host.files if path.startswith("/usr/local/share/ca-certificates/")]
    paths += [path for path in host.apt_files if "auth.conf" in path]
    script = "for path; do [ ! -e $path ] || echo $path; done"
    args = [
        "run",
        "--rm",
        *engine.flags,
        "--entrypoint",
        "/bin/sh",
        images.image_reference("stock"),
        "-c",
        script,
        "sh",
    ]
    assert engine.check(*args, *paths).split() == []
    shown = json.loads(engine.check("image", "inspect", images.image_reference("stock")))[0]["Config"]
    assert not [entry for entry in shown.get("Env") or [] if entry.startswith(("PENNYPOD", "SSL_CERT", "http"))]
    assert not shown.get("Volumes")


# --- builds that do not end well -----------------------------------------------------------------------------------


class Build:
    """A build in a process of its own: a recipe on top of the stock image that takes its time."""

    def __init__(self, folder: Path, seconds: float = 60, reply: str = "") -> None:
        self.name = f"test{secrets.token_hex(4)}"
        script = folder / "slow.sh"
        script.write_text(f". /run/pennypod-host/host.sh\nborrow\necho begun\n{reply}\nsleep {seconds}\ngive_back\n")
        recipe = f"Recipe({self.name!r}, 'stock', (), ('six',), 300, script=Path({str(script)!r}))"
        code = f"""
            import os
            from pathlib import Path
            from pennypod.providers.local import local_provider
            from pennypod.providers.local.image import RECIPES, Recipe
            from pennypod.settings import Settings
            RECIPES[{self.name!r}] = {recipe}
            provider = local_provider(Settings(Path({str(folder)!r}), "sqlite://"), os.environ)
            provider.prepare({self.name!r}, lambda text: print(text, flush=True))
        """
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        self.said: list[str] = []

    def wait_for(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if words in line:
                return
        pytest.fail(f"the build never said {words!r}: {''.join(self.said)}")

    def end(self) -> int:
        assert self.process.stdout is not None
        self.said += self.process.stdout.readlines()
        return self.process.wait(timeout=60)


def traces(landlord: Landlord, build: Build) -> list[str]:
    engine = landlord.provider.engine
    rows = engine.list_containers(f"name={images.BUILD_NAME}{build.name}")
    repository = f"localhost/pennypod-{build.name}"
    return [row["name"] for row in rows] + engine.check("images", "-q", repository).split()


@pytest.mark.xdist_group("pod-image-builds")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_build_that_is_killed_leaves_nothing(landlord: Landlord, tmp_path: Path, how: signal.Signals) -> None:
    build = Build(tmp_path)
    build.wait_for("begun")
    assert traces(landlord, build), "it was really under way"
    build.process.send_signal(how)
    assert build.end() != 0
    wait_until(lambda: traces(landlord, build) == [], 10)


@pytest.mark.xdist_group("pod-image-builds")
def test_a_build_whose_engine_client_dies_too_leaves_nothing(landlord: Landlord, tmp_path: Path) -> None:
    build = Build(tmp_path)
    build.wait_for("begun")
    shown = subprocess.run(["pgrep", "-P", str(build.process.pid)], capture_output=True, text=True, timeout=10)
    build.process.kill()
    for pid in shown.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    build.end()
    wait_until(lambda: traces(landlord, build) == [], 10)


@pytest.mark.xdist_group("pod-image-builds")
def test_a_recipe_that_fails_says_why_and_makes_no_image(landlord: Landlord, tmp_path: Path) -> None:
    build = Build(tmp_path, reply="echo 'E: the moon is full'; exit 3")
    assert build.end() != 0
    assert "E: the moon is full" in build.said[-1]
    assert traces(landlord, build) == []


@pytest.mark.xdist_group("pod-image-builds")
def test_a_finished_build_is_an_image_that_pods_start_from(landlord: Landlord, tmp_path: Path) -> None:
    build = Build(tmp_path, seconds=0, reply="echo made >/made")
    assert build.end() == 0, "".join(build.said)
    (found,) = landlord.provider.engine.check(
        "images", "--format", "{{.Repository}}:{{.Tag}}", f"localhost/pennypod-{build.name}"
    ).split()
    try:
        pod_id = landlord.provider.rent(landlord.offer(), landlord.order(found))
        pod = landlord.provider.pod(pod_id)
        assert pod is not None
        assert text(landlord.ssh(pod).run("cat /made")).strip() == "made"
    finally:
        landlord.clean()
        landlord.provider.engine.call("rmi", found)


FIRST_BUILD = """
import os
from pathlib import Path
from pennypod.providers.local import local_provider
from pennypod.settings import Settings
provider = local_provider(Settings(Path(os.environ["PENNYPOD_HOME"]), "sqlite://"), os.environ)
provider.prepare("stock", lambda text: print(text, flush=True))
print("built with", provider.engine.kind, flush=True)
"""


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="a second storage is set up for root only")
def test_a_first_build_from_nothing_killed_once_on_the_way(tmp_path: Path) -> None:
    if shutil.which("podman") is None:
        pytest.skip("only podman can be given a second storage")
    conf = tmp_path / "storage.conf"
    conf.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n')
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**os.environ, "CONTAINERS_STORAGE_CONF": str(conf), "TMPDIR": str(temporary), "PENNYPOD_ENGINE": "podman"}
    env |= {"PENNYPOD_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}

    def start() -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", FIRST_BUILD]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True)

    def podman(*args: str) -> str:
        done = subprocess.run(["podman", *args], capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        first = start()
        assert first.stdout is not None
        assert any(line.startswith(("Debian packages, ", "image stock, ")) for line in first.stdout), "it is under way"
        time.sleep(8)
        first.kill()
        first.communicate()
        wait_until(lambda: not list(temporary.glob("pennypod-image-*")), 40)
        mounts = Path("/proc/self/mountinfo").read_text()
        assert f"{temporary}/pennypod-image-" not in mounts
        assert podman("ps", "--all", "--quiet") == ""
        assert "pennypod-stock" not in podman("images")
        again = start()
        output, _ = again.communicate(timeout=BUILD_S)
        assert again.returncode == 0, output
        assert "image stock is ready" in output
        assert "pennypod-stock" in podman("images")
        assert podman("ps", "--all", "--quiet") == ""
        assert start().communicate(timeout=60)[0] == "built with podman\n", "the third time there is nothing to do"
    finally:
        subprocess.run(["podman", "rmi", "--all", "--force"], capture_output=True, env=env, timeout=120)
        subprocess.run(["umount", "--recursive", str(tmp_path / "graph/overlay")], capture_output=True, timeout=30)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_the_torch_image_has_torch_against_the_wrong_numpy(landlord: Landlord) -> None:
    landlord.provider.prepare("torch", print)
    pod = landlord.provider.pod(landlord.provider.rent(landlord.offer(), landlord.order("torch")))
    assert pod is not None
    ssh = landlord.ssh(pod)
    check = "import torch, torchvision; print(float(torch.ones(3).sum()))"
    assert text(ssh.run(f"python3 -c {shlex.quote(check)}", timeout_s=120)).strip() == "3.0"
    assert text(ssh.run("python3 -c 'import numpy; print(numpy.__version__)'")).startswith("2.")


def test_what_is_wrong_with_no_engine_is_one_line(tmp_path: Path) -> None:
    provider = LocalProvider(Settings(tmp_path, "sqlite://"), {"PENNYPOD_ENGINE": "/nonexistent/engine"})
    with pytest.raises(Exception, match="install podman or start docker") as caught:
        provider.offers(Need())
    assert getattr(caught.value, "code", "") == "no_engine"
    assert "\n" not in str(caught.value)
