"""What the entry point host of golden_image leaves on a machine: checked repositories, packages on demand only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
SOURCES = "/etc/apt/sources.list.d/nvidia.sources"
NO_GPU = "__golden_image_host_pci=/srv/nvidia/bus/none"
A_GPU = "__golden_image_host_pci=/srv/nvidia/bus/one"
SEAL = "golden_image_host_seal=true"
WANTED = ["nvidia-open", "cuda-toolkit-12-9", "cudnn9-cuda-12", "nvidia-container-toolkit"]

testinfra_hosts = ["ansible://control_node"]


def play(*options: str, callback: str = "pennypod") -> subprocess.CompletedProcess[str]:
    """The playbook that the documents name, on the scenario's own inventory."""
    inventory = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "inventory"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
    environment |= {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_STDOUT_CALLBACK": callback}
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory), "playbooks/gpu_host.yml"]
    command += [word for option in options for word in ([option] if option.startswith("--") else ["-e", option])]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that tells why it failed."""
    assert done.returncode != 0, done.stdout
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    return line


def changed(done: subprocess.CompletedProcess[str]) -> int:
    found = re.search(r"changed=(\d+)", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found, done.stdout
    return int(found[1])


def installed(host: Any) -> list[str]:
    return [name for name in WANTED if host.package(name).is_installed]


def variables(host: Any) -> dict[str, str]:
    made: dict[str, str] = json.loads(host.file("/srv/nvidia/made.json").content_string)
    return made


def test_each_source_counts_one_key_alone(host: Any) -> None:
    text, made = host.file(SOURCES).content_string, variables(host)
    assert "URIs: http://127.0.0.1:8089/cuda/debian12/x86_64\n" in text
    assert "URIs: http://127.0.0.1:8089/toolkit\n" in text
    for name, keyring in (("cuda", "nvidia-cuda"), ("toolkit", "nvidia-container-toolkit")):
        fingerprint = made[f"golden_image_host_{name}_fingerprint"]
        assert f"Signed-By: /etc/apt/keyrings/{keyring}.asc {fingerprint}\n" in text
        shown = host.check_output(f"gpg --show-keys --with-colons /etc/apt/keyrings/{keyring}.asc")
        assert fingerprint in shown


def test_without_a_gpu_there_are_candidates_and_nothing_is_installed(host: Any) -> None:
    assert installed(host) == []
    policy = host.check_output("apt-cache policy nvidia-open nvidia-container-toolkit dkms")
    assert "590.1 600" in policy
    assert "Candidate: 1.0\n" in policy, "the toolkit from its own repository, though the other one's is newer"
    assert "Candidate: 0.1\n" in policy, "NVIDIA's package before the system's of the same name"
    assert host.run("ls /var/lib/apt/lists/*system*").rc == 0, "the lists of the system's own sources stay"


def test_a_package_that_is_not_there_is_named(host: Any) -> None:
    error = error_of(play(NO_GPU, '{"golden_image_host_packages": ["nvidia-open", "cuda-toolkit-99-1=7"]}'))
    assert "cuda-toolkit-99-1: not in http://127.0.0.1:8089/cuda/debian12/x86_64 or http" in error


def test_another_system_is_refused(host: Any) -> None:
    error = error_of(play(NO_GPU, '{"__golden_image_host_systems": ["ubuntu2404"]}'))
    assert "runs Debian 12" in error
    assert "this needs Debian 12 or Ubuntu 22.04 or 24.04 on x86_64" in error


def test_a_mirror_that_signs_by_itself_is_refused(host: Any) -> None:
    """It serves the key that it has signed with, so only the fingerprint tells."""
    error = error_of(play(A_GPU, "golden_image_host_toolkit_repository=http://127.0.0.1:8089/forged"))
    assert "apt does not take NVIDIA's repositories" in error
    assert variables(host)["golden_image_host_toolkit_fingerprint"] in error
    assert "127.0.0.1:8089/forged" in error
    assert installed(host) == []


def test_check_mode_changes_nothing(host: Any) -> None:
    """The mirror of the test before is still there: sources, key, packages, Docker, and the three steps of sealing."""
    before = host.check_output(f"cat {SOURCES} /etc/machine-id; ls /etc/ssh /etc/apt/keyrings")
    done = play(A_GPU, SEAL, "--check", "--diff", callback="default")
    assert changed(done) == 7
    assert "-URIs: http://127.0.0.1:8089/forged\n+URIs: http://127.0.0.1:8089/toolkit\n" in done.stdout
    assert host.check_output(f"cat {SOURCES} /etc/machine-id; ls /etc/ssh /etc/apt/keyrings") == before
    assert installed(host) == []


def test_on_demand_all_of_it_is_installed(host: Any) -> None:
    done = play(NO_GPU, "golden_image_host_install=always")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "control_node has no NVIDIA GPU to try the driver on" in done.stdout
    assert installed(host) == WANTED
    assert host.package("nvidia-container-toolkit").version == "1.0"
    assert host.package("dkms").version == "0.1"
    assert "nvidia" in json.loads(host.file("/etc/docker/daemon.json").content_string)["runtimes"]
    assert host.service("docker").is_running, "restarted, so that it reads what it is told"


def test_a_gpu_that_does_not_answer_yet_needs_a_restart(host: Any) -> None:
    """Nothing else is left to do where a GPU is found."""
    done = play(A_GPU, callback="default")
    assert changed(done) == 0
    assert "control_node has to be restarted before its GPU can be used; nvidia-smi says: no driver" in done.stdout


def test_a_machine_whose_gpu_answers_is_sealed_on_demand(host: Any) -> None:
    """Last: afterwards nobody can log in."""
    host.check_output("echo secret >~/.bash_history")
    host.check_output("touch /run/restarted")
    done = play(A_GPU, SEAL, callback="default")
    assert "control_node is ready: NVIDIA Make-Believe 4090" in done.stdout
    assert changed(done) == 3
    left = "find /etc/ssh/ssh_host_* ~/.bash_history /var/lib/apt/lists /var/cache/apt -type f -not -name lock"
    assert host.run(left).stdout == ""
    assert host.file("/etc/machine-id").size == 0
