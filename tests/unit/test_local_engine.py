"""The container engine: what it answers is read right, and the flags it needs are found by trying."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pennypod.errors import EngineError, TransientError
from pennypod.providers.local import engine as engines
from pennypod.providers.local.engine import (
    Completed,
    Engine,
    container_id,
    engine_environment,
    error_line,
    find_engine,
    flag_variants,
    forget_engine,
    parse_ps,
    probe_program,
)

PODMAN_INFO = json.dumps(
    {
        "host": {"security": {"rootless": False}, "ociRuntime": {"name": "crun"}},
        "store": {"graphRoot": "/var/lib/containers/storage"},
        "version": {"Version": "4.3.1"},
    }
)
DOCKER_INFO = json.dumps(
    {
        "ServerVersion": "28.2.2",
        "DockerRootDir": "/var/lib/docker",
        "SecurityOptions": ["name=rootless"],
        "Runtimes": {"runc": {}, "nvidia": {}},
    }
)
DOCKER_DOWN = json.dumps({"ServerVersion": "", "ServerErrors": ["Cannot connect to the Docker daemon"]})

Answer = Callable[[Sequence[str]], Completed]


class FakeRunner:
    """Answers by the engine's sub-command; an unexpected one fails the test. Every call is kept."""

    def __init__(self, **answers: Answer | Completed) -> None:
        self.answers = answers
        self.calls: list[list[str]] = []

    def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
        assert timeout_s > 0
        self.calls.append(list(argv))
        answer = self.answers[argv[1]]
        return answer(argv) if callable(answer) else answer

    def count(self, command: str) -> int:
        return sum(call[1] == command for call in self.calls)


def fine(stdout: str = "") -> Completed:
    return Completed(0, stdout, "")


def bad(stderr: str, rc: int = 125) -> Completed:
    return Completed(rc, "", stderr)


def podman(runner: FakeRunner) -> Engine:
    return Engine("podman", "/usr/bin/podman", "4.3.1", rootless=False, storage="/", runtimes=("crun",), runner=runner)


# --- finding one ---------------------------------------------------------------------------------------------------


def limits_refused(argv: Sequence[str]) -> Completed:
    """A machine with hybrid cgroups and no CAP_SYS_RESOURCE."""
    if "--runtime" not in argv:
        return bad("Error: OCI runtime error: crun: cgroups in hybrid mode not supported", 126)
    if "--ulimit" not in argv:
        return bad("Error: runc: runc create failed: error setting rlimit type 7: operation not permitted", 126)
    return fine()


@pytest.fixture
def both_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")


@pytest.mark.usefixtures("both_runtimes")
def test_flags_are_found_by_trying_and_then_remembered(tmp_path: Path) -> None:
    runner = FakeRunner(info=fine(PODMAN_INFO), image=fine("sha256:abc\n"), run=limits_refused)
    found = find_engine({"PENNYPOD_ENGINE": "podman"}, tmp_path, runner=runner, which=lambda name: f"/usr/bin/{name}")
    assert found.kind == "podman"
    assert found.flags[found.flags.index("--runtime") + 1] == "runc"
    assert found.flags.count("--ulimit") == 2
    tried = runner.count("run")
    assert tried > 1
    for call in runner.calls:
        if call[1] == "run":
            assert {"--rm", "never"} <= set(call), "a probe leaves nothing and asks no registry"
    again = find_engine({"PENNYPOD_ENGINE": "podman"}, tmp_path, runner=runner, which=lambda name: f"/usr/bin/{name}")
    assert again.flags == found.flags
    assert runner.count("run") == tried
    forget_engine(tmp_path)
    find_engine({"PENNYPOD_ENGINE": "podman"}, tmp_path, runner=runner, which=lambda name: f"/usr/bin/{name}")
    assert runner.count("run") == 2 * tried


def test_looking_at_pods_needs_no_engine_that_can_start_any(tmp_path: Path) -> None:
    """A full disk or a broken runtime must not hide a pod that bills."""
    runner = FakeRunner(info=fine(PODMAN_INFO), run=bad("Error: no space left on device"), image=bad("no"))
    found = find_engine({}, tmp_path, runner=runner, which={"podman": "/bin/podman"}.get, to_start=False)
    assert found.kind == "podman"
    assert runner.count("run") == 0
    with pytest.raises(EngineError):
        find_engine({}, tmp_path, runner=runner, which={"podman": "/bin/podman"}.get)


def test_with_two_engines_the_one_that_starts_pods_is_the_one_that_has_them(tmp_path: Path) -> None:
    answers = {"/bin/podman": bad("Error: cannot"), "/bin/docker": fine()}
    infos = {"/bin/podman": fine(PODMAN_INFO), "/bin/docker": fine(DOCKER_INFO)}
    runner = FakeRunner(info=lambda argv: infos[argv[0]], run=lambda argv: answers[argv[0]], image=fine("sha256:abc\n"))
    which = {"podman": "/bin/podman", "docker": "/bin/docker"}.get
    assert find_engine({}, tmp_path, runner=runner, which=which, to_start=False).kind == "docker"


@pytest.mark.usefixtures("both_runtimes")
def test_what_was_learned_does_not_outlive_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(info=fine(PODMAN_INFO), image=fine("sha256:abc\n"), run=fine())
    monkeypatch.setattr(engines, "_boot_id", lambda: "first")
    find_engine({}, tmp_path, runner=runner, which=lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(engines, "_boot_id", lambda: "second")
    find_engine({}, tmp_path, runner=runner, which=lambda name: f"/usr/bin/{name}")
    assert runner.count("info") == 2


def test_a_damaged_memory_is_only_forgotten(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text("{not json")
    runner = FakeRunner(info=fine(PODMAN_INFO), image=fine("sha256:abc\n"), run=fine())
    assert find_engine({}, tmp_path, runner=runner, which=lambda name: f"/usr/bin/{name}").version == "4.3.1"


def test_docker_without_its_daemon_is_passed_over(tmp_path: Path) -> None:
    answers = {"/bin/docker": fine(DOCKER_DOWN)}
    runner = FakeRunner(info=lambda argv: answers[argv[0]])
    with pytest.raises(EngineError) as caught:
        find_engine({}, tmp_path, runner=runner, which={"docker": "/bin/docker"}.get)
    assert "podman: not installed" in caught.value.message
    assert "Cannot connect to the Docker daemon" in caught.value.message
    assert "install podman or start docker" in caught.value.message
    assert "\n" not in caught.value.message


def test_the_wish_for_an_engine_is_not_overruled(tmp_path: Path) -> None:
    runner = FakeRunner(info=fine(DOCKER_DOWN))
    with pytest.raises(EngineError) as caught:
        find_engine({"PENNYPOD_ENGINE": "docker"}, tmp_path, runner=runner, which=lambda name: f"/bin/{name}")
    assert {call[0] for call in runner.calls} == {"/bin/docker"}
    assert "podman:" not in caught.value.message


def test_the_answer_decides_which_engine_it_is_not_its_name() -> None:
    alias = engines.describe_engine("/usr/bin/docker", FakeRunner(info=fine(PODMAN_INFO)))
    assert (alias.kind, alias.major, alias.storage) == ("podman", 4, "/var/lib/containers/storage")
    docker = engines.describe_engine("/usr/bin/docker", FakeRunner(info=fine(DOCKER_INFO)))
    assert (docker.kind, docker.rootless, docker.runtimes) == ("docker", True, ("nvidia", "runc"))


def test_no_variant_works_is_said_in_the_engines_words() -> None:
    runner = FakeRunner(image=fine("sha256:abc"), run=bad("Error: crun: no way", 126))
    with pytest.raises(EngineError, match="starts no container: crun: no way"):
        engines.probe_flags(podman(runner), variants=[("--a",), ("--b",)])
    assert runner.count("run") == 2


def test_a_probe_that_hangs_counts_as_a_refusal() -> None:
    def hang_then_run(argv: Sequence[str]) -> Completed:
        if "--a" in argv:
            raise TimeoutError("no answer in 30 s")
        return fine()

    runner = FakeRunner(image=fine("sha256:abc"), run=hang_then_run)
    assert engines.probe_flags(podman(runner), variants=[("--a",), ("--b",)]) == ("--b",)


def test_variants_start_plain_and_change_one_thing_at_a_time() -> None:
    bare = podman(FakeRunner())
    variants = flag_variants(bare, nofile=20000, nproc=32768, installed=["runc", "crun"])
    assert variants[0] == ("--security-opt", "label=disable")
    assert len(set(variants)) == len(variants)
    runtimes = {v[v.index("--runtime") + 1] for v in variants if "--runtime" in v}
    assert runtimes == {"runc"}, "the default runtime is not tried twice"
    assert any("nofile=20000:20000" in v and "nproc=32768:32768" in v for v in variants)


def test_the_probe_program_is_a_program_that_exits_with_0(tmp_path: Path) -> None:
    program = probe_program()
    if program is None:
        pytest.skip("no probe program for this processor")
    file = tmp_path / "probe"
    file.write_bytes(program)
    file.chmod(0o755)
    assert subprocess.run([str(file)], check=False, timeout=10).returncode == 0


# --- reading what it says ------------------------------------------------------------------------------------------

PODMAN_PS = json.dumps(
    [
        {
            "Id": "da7ec701aee6" + "0" * 52,
            "Names": ["pennypod-demo-1201-crqgd-a1-ttpdimw-nyij2d"],
            "State": "running",
            "ExitCode": 0,
            "Labels": {"pennypod.price": "200000", "a": "b,c=d"},
            "Ports": [
                {"host_ip": "127.0.0.1", "container_port": 22, "host_port": 33015, "range": 1, "protocol": "tcp"}
            ],
        },
        {"Id": "b" * 64, "Names": ["x"], "State": "exited", "ExitCode": 97, "Labels": None, "Ports": None},
    ]
)
CNI_WARNING = 'time="2026" level=warning msg="Error validating CNI config file /etc/cni/net.d/87-podman.conflist"\n'
DOCKER_PS = (
    f'{{"ID":"{"a" * 64}","Names":"pod-a","State":"running","Status":"Up 2 hours","Labels":"pennypod.price=200000,k=v",'
    '"Ports":"127.0.0.1:49153->22/tcp, 8080/tcp"}\n'
    f'{{"ID":"{"b" * 64}","Names":"pod-b","State":"exited","Status":"Exited (97) 3 s ago","Labels":"","Ports":""}}\n'
)


def test_podmans_listing() -> None:
    running, exited = parse_ps(PODMAN_PS)
    assert running["name"] == "pennypod-demo-1201-crqgd-a1-ttpdimw-nyij2d"
    assert running["ports"] == {22: ("127.0.0.1", 33015)}
    assert running["labels"]["pennypod.price"] == "200000"
    assert running["exit_code"] is None, "a running container has no exit code yet"
    assert (exited["state"], exited["exit_code"], exited["labels"], exited["ports"]) == ("exited", 97, {}, {})


def test_dockers_listing() -> None:
    running, exited = parse_ps(DOCKER_PS)
    assert running["ports"] == {22: ("127.0.0.1", 49153)}
    assert running["labels"] == {"pennypod.price": "200000", "k": "v"}
    assert (exited["name"], exited["exit_code"]) == ("pod-b", 97)


@pytest.mark.parametrize("text", ["", "\n", "[]", "null"])
def test_an_empty_listing_is_empty(text: str) -> None:
    assert parse_ps(text) == []


def test_a_listing_that_is_cut_off_is_an_error_never_empty() -> None:
    with pytest.raises(TransientError):
        parse_ps('[{"Id": "abc", "Na')


def test_a_failed_listing_is_an_error_never_empty() -> None:
    with pytest.raises(TransientError, match="daemon"):
        podman(FakeRunner(ps=bad("Error: cannot reach the daemon"))).list_containers()


def test_a_container_that_vanishes_under_the_listing_costs_a_retry() -> None:
    answers = [bad("Error: no such container 12345"), fine(PODMAN_PS)]
    runner = FakeRunner(ps=lambda _argv: answers.pop(0))
    assert len(podman(runner).list_containers()) == 2
    assert runner.count("ps") == 2


@pytest.mark.parametrize("stderr", ["Error: container has already been removed", "Error: database is locked"])
def test_a_listing_that_fails_once_is_asked_for_again_whatever_it_says(stderr: str) -> None:
    answers = [bad(stderr), bad(stderr), fine(PODMAN_PS)]
    runner = FakeRunner(ps=lambda _argv: answers.pop(0))
    assert len(podman(runner).list_containers()) == 2


def test_removing_what_is_not_there_is_fine() -> None:
    runner = FakeRunner(rm=bad('Error: no container with name or ID "x" found: no such container', 1))
    podman(runner).remove_container("x")
    assert runner.count("rm") == 1


def test_a_removal_that_keeps_failing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.time, "sleep", lambda _s: None)
    runner = FakeRunner(rm=bad("Error: cannot remove: device or resource busy", 1))
    with pytest.raises(TransientError, match="device or resource busy"):
        podman(runner).remove_container("x")
    assert runner.count("rm") == 3


def test_a_missing_image_is_told_from_an_engine_that_fails() -> None:
    assert podman(FakeRunner(image=bad("Error: nope:1: image not known"))).image_id("nope:1") is None
    assert podman(FakeRunner(image=bad("Error: No such image: nope:1", 1))).image_id("nope:1") is None
    with pytest.raises(TransientError):
        podman(FakeRunner(image=bad("Error: database is locked"))).image_id("nope:1")


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (CNI_WARNING + "Error: the container name is already in use\n", "the container name is already in use"),
        (
            "docker: Error response from daemon: port is already allocated.\n\nRun 'docker run --help' for more\n",
            "port is already allocated.",
        ),
        ('time="2026" level=warning msg="only this"\n', 'time="2026" level=warning msg="only this"'),
        ("", "no message"),
    ],
)
def test_the_telling_line_is_found_among_the_warnings(stderr: str, line: str) -> None:
    assert error_line(stderr) == line


def test_the_id_is_found_among_what_else_was_printed() -> None:
    assert container_id(f"Trying to pull...\n{'ab' * 32}\n") == "ab" * 32
    assert container_id("no id") is None


def test_keys_in_our_environment_do_not_reach_the_engine() -> None:
    given = {
        "PATH": "/bin",
        "HOME": "/root",
        "DOCKER_HOST": "unix:///x",
        "https_proxy": "http://p",
        "XDG_RUNTIME_DIR": "/r",
    }
    keys = {"VAST_API_KEY": "k", "RUNPOD_API_KEY": "k", "PENNYPOD_WEBHOOK_SECRET": "s", "PATH_TO_KEY": "x"}
    assert engine_environment({**given, **keys}) == given


def test_an_engine_that_does_not_answer_is_a_passing_fault() -> None:
    def hang(_argv: Sequence[str]) -> Completed:
        raise TimeoutError("no answer in 20 s")

    with pytest.raises(TransientError, match="podman ps: no answer in 20 s"):
        podman(FakeRunner(ps=hang)).list_containers()


def test_the_real_runner_keeps_its_limit(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        engines.run_command(["sleep", "5"], None, 0.2)
    done = engines.run_command(["cat"], b"hello", 5)
    assert (done.rc, done.stdout) == (0, "hello")
