"""What the bootstrap role leaves behind, erratum by erratum. prepare.yml proved that each one bit before."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

SCENARIO = Path(__file__).resolve().parents[1]
REPOSITORY = SCENARIO.parents[2]
HOME = "/root/pennypod"

testinfra_hosts = ["ansible://bootstrap_pod"]


def python(host: Any, code: str) -> str:
    return str(host.check_output("python3 -c %s", code))


def fresh_ssh(host: Any, command: str) -> subprocess.CompletedProcess[str]:
    """One command through a connection of its own, which is closed when it returns."""
    known = host.ansible.get_variables()
    argv = ["ssh", "-i", known["ansible_ssh_private_key_file"], "-p", str(known["ansible_port"])]
    argv += ["-o", f"UserKnownHostsFile={Path(known['ansible_ssh_private_key_file']).with_name('known_hosts')}"]
    argv += [
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "BatchMode=yes",
        "-o",
        "ControlMaster=no",
        "-o",
        "ControlPath=none",
    ]
    argv += [f"root@{known['ansible_host']}", command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30)


def test_1_numpy_is_below_2_and_the_module_built_against_numpy_1_computes(host: Any) -> None:
    assert python(host, "import numpy; print(numpy.__version__)").startswith("1.")
    assert python(host, "import bottleneck, numpy; print(bottleneck.nansum(numpy.arange(4.0)))") == "6.0"


def test_1_pip_finds_no_conflict(host: Any) -> None:
    assert host.run("python3 -m pip check").stdout.strip() == "No broken requirements found."


def test_2_cv2_imports_works_and_misses_no_library(host: Any) -> None:
    code = "import cv2, numpy; print(cv2.resize(numpy.zeros((4, 4, 3), 'uint8'), (2, 2)).shape)"
    assert python(host, code) == "(2, 2, 3)"
    extension = python(host, "import cv2, glob, os; print(glob.glob(os.path.dirname(cv2.__file__) + '/*.so')[0])")
    assert "not found" not in host.check_output("ldd %s", extension)
    assert host.package("libgl1").is_installed
    assert host.package("libglib2.0-0").is_installed


def test_3_data_yaml_is_pointed_at_the_data_and_every_other_byte_stays(host: Any) -> None:
    before = base64.b64decode((SCENARIO / "data.yaml.b64").read_text("ascii"))
    old = b"/home/somebody/datasets/teeth"
    expected = (
        before.replace(b"train: " + old + b"/train/images", b"train: train/images")
        .replace(b"'/content/drive/other/valid/images'", b"'valid/images'")
        .replace(b"path: " + old, f"path: {HOME}/data".encode())
    )
    assert expected != before
    assert base64.b64decode(host.check_output("base64 %s", f"{HOME}/data/data.yaml")) == expected


def test_3_data_yaml_names_folders_that_exist(host: Any) -> None:
    found = yaml.safe_load(host.file(f"{HOME}/data/data.yaml").content)
    for split in (found["train"], found["val"][0]):
        assert host.file(f"{found['path']}/{split}").is_directory


def test_3_a_malformed_data_yaml_was_left_alone(host: Any) -> None:
    assert host.file(f"{HOME}/data/broken.yaml").content == b"path: /somewhere\ntrain: [a\n"


def test_4_ssh_logs_in_with_the_host_key_checked(host: Any) -> None:
    done = fresh_ssh(host, 'echo "$SSH_CONNECTION" && id -un')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "root"


def test_5_a_tmux_session_outlives_the_connection_that_started_it(host: Any) -> None:
    made = fresh_ssh(host, "tmux start-server \\; new-session -d -s proof 'sleep 120'")
    assert made.returncode == 0, made.stderr
    assert fresh_ssh(host, "tmux has-session -t proof").returncode == 0
    fresh_ssh(host, "tmux kill-session -t proof")


def test_5_the_probe_left_no_tmux_server_behind(host: Any) -> None:
    assert host.run("pgrep -f pennypod-probe-").rc == 1


def test_6_the_newest_whole_checkpoint_is_found_however_deep(host: Any, tmp_path: Path) -> None:
    whole = tmp_path / "best.pt"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("best/data.pkl", b"weights")
    content = base64.b64encode(whole.read_bytes()).decode("ascii")
    old, new, torn = (
        f"{HOME}/out/{name}/best.pt" for name in ("runs/detect/a/weights", "p/n/weights", "q/r/s/t/weights")
    )
    for age, path in ((300, old), (200, new), (100, torn)):
        host.check_output("mkdir -p $(dirname %s) && echo %s | base64 -d > %s", path, content, path)
        host.check_output("touch -d %s %s", f"-{age} seconds", path)
    host.check_output("truncate -s 20 %s && touch -d '-100 seconds' %s", torn, torn)
    script = (REPOSITORY / "python/pennypod/onpod/find_files.py").read_text("utf-8")
    request = json.dumps({"root": f"{HOME}/out", "patterns": ["**/best.pt"], "best": True})
    said = host.check_output("python3 -c %s %s", script, request)
    found = json.loads(said.splitlines()[-1].removeprefix("@pennypod "))["files"]
    assert [item["path"].removeprefix(f"{HOME}/out/") for item in found] == ["p/n/weights/best.pt"]


@pytest.mark.parametrize(("path", "last"), [(f"{HOME}/cache/base.pt", 200000), (f"{HOME}/out/home.pt", 100000)])
def test_7_base_weights_are_there_whole(host: Any, path: str, last: int) -> None:
    content = "".join(f"{number}\n" for number in range(1, last + 1)).encode()
    assert host.file(path).sha256sum == hashlib.sha256(content).hexdigest()
    assert host.file(path).size == len(content)


def test_7_nothing_is_left_of_weights_with_a_wrong_hash(host: Any) -> None:
    assert host.check_output("ls %s", f"{HOME}/cache") == "base.pt"


def test_8_the_wallclock_budget_is_two_to_three_times_the_estimate() -> None:
    defaults = yaml.safe_load((REPOSITORY / "roles/pod/defaults/main.yml").read_text("utf-8"))
    assert 2 <= defaults["pod_budget_factor"] <= 3


def test_what_the_job_asked_for_is_there(host: Any) -> None:
    assert host.package("tree").is_installed
    assert host.package("tmux").is_installed
    assert int(python(host, "import yaml; print(yaml.__version__)").split(".")[0]) >= 6


def test_a_ready_pod_costs_one_round_trip(host: Any) -> None:
    known = host.ansible.get_variables()
    argv = ["ansible-playbook", "-vvv", "-i", str(Path(known["ansible_ssh_private_key_file"]).with_name("inventory"))]
    done = subprocess.run([*argv, str(SCENARIO / "converge.yml")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "changed=0" in done.stdout
    assert (done.stdout + done.stderr).count("SSH: EXEC") == 1  # molecule sends verbose lines to stderr
