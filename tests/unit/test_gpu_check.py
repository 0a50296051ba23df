"""The acceptance check on machines that are broken: a wrong product, no device, a hang, a crash.

The check has no switch for tests. What breaks is its surroundings: a torch package of ours on PYTHONPATH, a libcuda of
ours in LD_LIBRARY_PATH, an nvidia-smi of ours on PATH.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "python/pennypod/onpod/gpu_check.py"

# Enough of torch for the check; what a test breaks, it appends.
TORCH = """
__version__ = "2.9.9+fake"
float32 = "float32"


class Tensor:
    def __init__(self, rows, place="cpu"):
        self.rows, self.place = rows, place

    def __matmul__(self, other):
        columns = list(zip(*other.rows))
        rows = [[sum(a * b for a, b in zip(row, column)) for column in columns] for row in self.rows]
        return Tensor(rows, self.place)

    def cuda(self, index):
        return Tensor(self.rows, f"cuda:{index}")

    def cpu(self):
        return Tensor(self.rows)

    def tolist(self):
        return self.rows


def tensor(rows, dtype):
    assert dtype == float32
    return Tensor(rows)


class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda index: "Fake GPU")
    synchronize = staticmethod(lambda index: None)
"""

ONE_ELEMENT_WRONG = """
right = Tensor.__matmul__
def wrong(self, other):
    product = right(self, other)
    product.rows[-1][-1] += 0.5
    return product
Tensor.__matmul__ = wrong
"""
WRONG_ON_GPU_ONLY = """
right = Tensor.__matmul__
def wrong(self, other):
    product = right(self, other)
    if product.place != "cpu":
        product.rows[3][5] += 1
    return product
Tensor.__matmul__ = wrong
"""
ONE_NAN = ONE_ELEMENT_WRONG.replace("+= 0.5", "= float('nan')")
WRONG_SHAPE = "Tensor.tolist = lambda self: self.rows[:-1]\n"
HANG_IN_MATMUL = "import time\nTensor.__matmul__ = lambda self, other: time.sleep(600)\n"
HANG_AT_IMPORT = "import time\ntime.sleep(600)\n"
CRASH_IN_MATMUL = """
import os, signal, sys
def crash(self, other):
    print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
Tensor.__matmul__ = crash
"""

LIBCUDA = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) {
    const char *fault = getenv("FAKE_CUINIT");
    if (fault && !strcmp(fault, "hang")) for (;;) pause();
    if (fault && !strcmp(fault, "crash")) abort();
    return fault ? atoi(fault) : 0;
}
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Fake GPU", size); return 0; }
"""


without_gpu = pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a GPU")


class Machine:
    """The surroundings the check runs in, and the run itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        # Only PATH and what the test adds: no nvidia-smi and no library of the host gets in.
        self.env = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(folder)}

    def add_torch(self, extra: str = "") -> None:
        package = self.folder / "site/torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(TORCH + extra)
        self.env["PYTHONPATH"] = str(package.parent)

    def add_libcuda(self, fault: str = "") -> None:
        if shutil.which("gcc") is None:
            pytest.skip("no C compiler to build a libcuda with")
        library = self.folder / "lib/libcuda.so.1"
        library.parent.mkdir()
        build = ["gcc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"]
        subprocess.run(build, input=LIBCUDA, text=True, check=True)
        self.env["LD_LIBRARY_PATH"] = str(library.parent)
        if fault:
            self.env["FAKE_CUINIT"] = fault

    def add_command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def check(self, *arguments: str, source: str | None = None) -> tuple[int, dict[str, Any]]:
        """Feed the script to a Python without site-packages over standard input, as a pod gets it."""
        done = subprocess.run(
            [sys.executable, "-S", "-", "--json", *arguments],
            input=source or SCRIPT.read_text(),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.count("\n") == 1, done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in report["checks"]}


def test_needs_only_the_standard_library_of_python_3_8() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)


# -- on the CPU -------------------------------------------------------------------------------------------------------


def test_cpu_passes_and_says_so(machine: Machine) -> None:
    rc, report = machine.check("--device", "cpu")
    assert (rc, report["ok"], report["device"], report["reason"]) == (0, True, "cpu", "")
    names = ["driver", "device_nodes", "cuda_init", "torch", "matmul", "disk", "memory"]
    assert [check["name"] for check in report["checks"]] == names
    assert all(set(check) == {"name", "ok", "seconds", "detail"} for check in report["checks"])
    assert "on the CPU with plain Python" in by_name(report)["matmul"]["detail"]
    assert "tolerance 0.001" in by_name(report)["matmul"]["detail"]


def test_cpu_uses_torch_when_it_is_there(machine: Machine) -> None:
    machine.add_torch()
    rc, report = machine.check("--device", "cpu")
    assert rc == 0
    assert "torch 2.9.9+fake" in by_name(report)["matmul"]["detail"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (ONE_ELEMENT_WRONG, "WRONG: off by 0.5, tolerance 0.001"),
        (ONE_NAN, "WRONG"),
        (WRONG_SHAPE, "wrong shape"),
    ],
    ids=["one element", "nan", "shape"],
)
def test_a_wrong_product_fails(machine: Machine, fault: str, said: str) -> None:
    machine.add_torch(fault)
    rc, report = machine.check("--device", "cpu")
    assert (rc, report["ok"]) == (1, False)
    assert report["reason"].startswith("matmul: ")
    assert said in report["reason"]
    assert by_name(report)["torch"]["ok"]


def test_a_hang_is_killed_and_named(machine: Machine) -> None:
    machine.add_torch(HANG_IN_MATMUL)
    started = time.monotonic()
    rc, report = machine.check("--device", "cpu", "--time-limit", "matmul=0.5")
    assert time.monotonic() - started < 10
    assert rc == 1
    assert report["reason"] == "matmul: no answer within 0.5 s: hung and killed"
    assert by_name(report)["torch"]["ok"]
    assert by_name(report)["disk"]["ok"], "the other checks still run"


def test_an_import_that_hangs_fails_what_needs_it(machine: Machine) -> None:
    machine.add_torch(HANG_AT_IMPORT)
    rc, report = machine.check("--device", "cpu", "--time-limit", "torch=0.5")
    assert rc == 1
    assert report["reason"].startswith("torch: no answer within 0.5 s")
    assert by_name(report)["matmul"]["detail"] == "not run: torch failed"


def test_a_crash_is_named_with_its_last_words(machine: Machine) -> None:
    machine.add_torch(CRASH_IN_MATMUL)
    rc, report = machine.check("--device", "cpu")
    assert rc == 1
    assert report["reason"] == "matmul: the check crashed with SIGSEGV: CUDA error: an illegal memory access"


def test_a_torch_that_cannot_be_imported_is_not_taken_for_no_torch(machine: Machine) -> None:
    machine.add_torch("import torch._C\n")
    rc, report = machine.check("--device", "cpu")
    assert rc == 1
    assert report["reason"].startswith("torch: ModuleNotFoundError")


# -- on a GPU ---------------------------------------------------------------------------------------------------------

# The only thing that cannot be brought along is a device node, so the check of a good GPU finds one elsewhere.
WITH_DEVICE_NODE = SCRIPT.read_text().replace('glob.glob("/dev/nvidia[0-9]*")', 'glob.glob("/dev/nul[l]")')


def test_a_good_gpu_passes(machine: Machine) -> None:
    machine.add_torch()
    machine.add_libcuda()
    machine.add_command("nvidia-smi", "echo 'Fake GPU, 550.54, 24576 MiB'")
    rc, report = machine.check("--device", "cuda", source=WITH_DEVICE_NODE)
    assert (rc, report["reason"], report["device"]) == (0, "", "cuda")
    details = {name: check["detail"] for name, check in by_name(report).items()}
    assert details["driver"] == "Fake GPU, 550.54, 24576 MiB"
    assert details["device_nodes"] == "/dev/null"
    assert details["cuda_init"] == "CUDA 12.4: Fake GPU"
    assert details["torch"] == "torch 2.9.9+fake: Fake GPU"
    assert details["matmul"].endswith("on cuda:0")


def test_a_gpu_that_multiplies_wrongly_fails_though_everything_else_is_fine(machine: Machine) -> None:
    machine.add_torch(WRONG_ON_GPU_ONLY)
    machine.add_libcuda()
    machine.add_command("nvidia-smi", "echo 'Fake GPU, 550.54, 24576 MiB'")
    rc, report = machine.check("--device", "cuda", source=WITH_DEVICE_NODE)
    assert rc == 1
    assert [check["name"] for check in report["checks"] if not check["ok"]] == ["matmul"]
    assert "on cuda:0 is WRONG: off by 1" in report["reason"]


def test_fewer_gpus_than_rented_fail(machine: Machine) -> None:
    machine.add_torch()
    machine.add_libcuda()
    machine.add_command("nvidia-smi", "echo 'Fake GPU, 550.54, 24576 MiB'")
    rc, report = machine.check("--device", "cuda", "--gpus", "2", source=WITH_DEVICE_NODE)
    assert (rc, report["reason"]) == (1, "driver: nvidia-smi lists 1 of 2 GPUs")
    assert by_name(report)["cuda_init"]["detail"] == "cuInit finds 1 of 2 GPUs"


@without_gpu
def test_no_gpu_at_all_fails_when_one_was_rented(machine: Machine) -> None:
    machine.add_torch("cuda.is_available = staticmethod(lambda: False)\n")
    rc, report = machine.check("--device", "cuda")
    assert (rc, report["device"]) == (1, "cuda")
    checks = by_name(report)
    assert not any(checks[name]["ok"] for name in ("driver", "device_nodes", "cuda_init", "torch", "matmul"))
    assert checks["torch"]["detail"] == "not run: cuda_init failed"


def test_torch_without_a_device_fails(machine: Machine) -> None:
    machine.add_torch("cuda.is_available = staticmethod(lambda: False)\n")
    machine.add_libcuda()
    machine.add_command("nvidia-smi", "echo 'Fake GPU, 550.54, 24576 MiB'")
    rc, report = machine.check("--device", "cuda", source=WITH_DEVICE_NODE)
    assert rc == 1
    assert report["reason"] == "torch: torch 2.9.9+fake sees no GPU: torch.cuda.is_available() is false"


def test_a_gpu_without_torch_fails_unless_that_is_allowed(machine: Machine) -> None:
    machine.add_libcuda()
    machine.add_command("nvidia-smi", "echo 'Fake GPU, 550.54, 24576 MiB'")
    rc, report = machine.check("--device", "cuda", source=WITH_DEVICE_NODE)
    assert rc == 1
    assert report["reason"].startswith("torch: torch is not installed")
    rc, report = machine.check("--device", "cuda", "--allow-no-torch", source=WITH_DEVICE_NODE)
    assert rc == 0
    assert by_name(report)["matmul"]["detail"].startswith("NOT RUN")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("999", "cuInit fails with 999 (CUDA_ERROR_UNKNOWN)"),
        ("hang", "no answer within 0.5 s: hung and killed"),
        ("crash", "the check crashed with SIGABRT: it printed nothing"),
    ],
)
def test_a_driver_that_does_not_start_is_a_broken_gpu_and_not_no_gpu(machine: Machine, fault: str, said: str) -> None:
    """`auto` must not fall back to the CPU here: somebody pays for this GPU."""
    machine.add_torch(HANG_AT_IMPORT)  # never reached: where cuInit fails torch would only fail slower
    machine.add_libcuda(fault)
    started = time.monotonic()
    rc, report = machine.check("--device", "auto", "--time-limit", "cuda_init=0.5")
    assert time.monotonic() - started < 10
    assert (rc, report["device"]) == (1, "cuda")
    assert by_name(report)["cuda_init"]["detail"] == said
    assert by_name(report)["matmul"]["detail"] == "not run: cuda_init failed"


@without_gpu
def test_a_cuda_image_on_a_machine_without_gpu_is_a_cpu(machine: Machine) -> None:
    machine.add_libcuda("100")  # CUDA_ERROR_NO_DEVICE
    rc, report = machine.check("--device", "auto")
    assert (rc, report["device"]) == (0, "cpu")


def test_an_nvidia_smi_that_fails_or_hangs(machine: Machine) -> None:
    machine.add_command("nvidia-smi", "echo 'Unable to determine the device handle for GPU0'; exit 15")
    _, report = machine.check("--device", "cuda")
    assert report["reason"] == "driver: nvidia-smi exits 15: Unable to determine the device handle for GPU0"

    machine.add_command("nvidia-smi", f"echo $$ > {machine.folder}/pid; exec sleep 600")
    _, report = machine.check("--device", "cuda", "--time-limit", "driver=0.5")
    assert report["reason"] == "driver: no answer within 0.5 s: hung and killed"
    pid = int((machine.folder / "pid").read_text())
    assert not is_running(pid), "what the check started must die with it"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# -- disk, memory, usage ----------------------------------------------------------------------------------------------


def test_too_little_disk_or_memory_fails(machine: Machine, tmp_path: Path) -> None:
    missing = tmp_path / "not/made/yet"
    rc, report = machine.check("--device", "cpu", "--min-disk-gb", "1e9", "--disk-path", str(missing))
    assert rc == 1
    assert report["reason"].startswith("disk: ")
    assert f"GB free at {tmp_path}, 1e+09 GB needed" in report["reason"]

    rc, report = machine.check("--device", "cpu", "--min-memory-gb", "1e9")
    assert rc == 1
    assert report["reason"].startswith("memory: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "tpu"],
        ["--gpus", "0"],
        ["--min-disk-gb", "lots"],
        ["--min-memory-gb", "nan"],
        ["--time-limit", "x=1"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""


def test_prints_lines_for_people_without_json() -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT), "--device", "cpu", "--min-disk-gb", "1e9"],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "\nFAIL disk" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("device cpu: NOT GOOD: disk: ")
