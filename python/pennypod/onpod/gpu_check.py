"""Acceptance check of a freshly rented pod: may this machine train, or must it go back?

Standalone: standard library only, Python 3.8 or newer, fed to the pod over SSH, so that nothing has to be installed:

    ssh POD 'python3 - --json --device cuda --gpus 1 --min-disk-gb 20 --min-memory-gb 8' < gpu_check.py

Checks, in this order:

    driver        nvidia-smi (or the kernel module's version file) sees the GPUs
    device_nodes  /dev/nvidia* is there and can be opened
    cuda_init     cuInit, device count and names, straight from libcuda without any framework
    torch         torch, if installed, sees the GPUs
    matmul        a matrix product on every GPU, compared with one computed here in plain Python
    disk, memory  enough of both is free

Every check runs in a child process with a time limit of its own: a broken GPU hangs or crashes the process that touches
it, and that must become an answer. `--device cpu` takes the same path on the CPU, with torch, else numpy, else plain
Python. `--device auto` means cuda when anything on the machine speaks of an NVIDIA GPU, so a broken GPU is never taken
for no GPU; a caller who pays for a GPU says `cuda`.

With --json one line: {"ok", "device", "checks": [{"name", "ok", "seconds", "detail"}], "reason"}.
Exit status: 0 the pod is good, 1 it is not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import glob
import importlib
import json
import operator
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GB = 1_000_000_000

TIME_LIMITS = {
    "driver": 20.0,
    "device_nodes": 5.0,
    "cuda_init": 30.0,
    # The first import on a cold network disk takes most of a minute.
    "torch": 120.0,
    "matmul": 60.0,
    "disk": 10.0,
    "memory": 5.0,
}

MATRIX_SIZE = 128
MATMUL_ROUNDS = 3
# The entries are integers of at most 4 bits and the sums stay below 2**14: exact in float32 and in TF32. A right answer
# is off by nothing at all; the tolerance only forgives how a float is printed.
TOLERANCE = 1e-3

CUDA_ERROR_NO_DEVICE = 100
CUDA_ERRORS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    34: "CUDA_ERROR_STUB_LIBRARY",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    802: "CUDA_ERROR_SYSTEM_NOT_READY",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
    999: "CUDA_ERROR_UNKNOWN",
}


class Check(NamedTuple):
    """One line of the answer."""

    name: str
    ok: bool
    seconds: float
    detail: str


class CheckError(Exception):
    """Raised inside a check: its text becomes the detail."""


class Options(NamedTuple):
    device: str
    gpus: int
    min_disk_gb: float
    min_memory_gb: float
    disk_path: str
    allow_no_torch: bool
    time_limits: dict[str, float]


# These two are evaluated, so they are spelled as Python 3.8 knows them.
Matrix = List[List[float]]
# A check returns the detail of its success, or raises. The checks of one child share a dictionary.
Probe = Callable[[Options, Dict[str, Any]], str]


# -- the checks -------------------------------------------------------------------------------------------------------


def check_driver(options: Options, _state: dict[str, Any]) -> str:
    if options.device == "cpu":
        return "not needed: the device is the CPU"
    smi = shutil.which("nvidia-smi")
    if smi is None:
        # Some images leave nvidia-smi out; the kernel module still says that it is loaded.
        version = read_text("/proc/driver/nvidia/version")
        if version is None:
            raise CheckError("no nvidia-smi and no /proc/driver/nvidia/version: no NVIDIA driver is visible")
        return version.splitlines()[0]
    query = [smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode != 0:
        raise CheckError(f"nvidia-smi exits {done.returncode}: {one_line(text)}")
    gpus = [line.strip() for line in text.splitlines() if line.strip()]
    require_count(len(gpus), options.gpus, "nvidia-smi lists")
    return "; ".join(gpus)


def check_device_nodes(options: Options, _state: dict[str, Any]) -> str:
    nodes = device_nodes()
    if options.device == "cpu":
        return "not needed: the device is the CPU" + (f"; present: {' '.join(nodes)}" if nodes else "")
    if not nodes:
        raise CheckError("no /dev/nvidia0 or any other GPU node: the machine gave this pod no GPU")
    # A GPU at a node other than 0 is normal on a shared machine; one that cannot be opened is not.
    try:
        for node in nodes:
            os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        raise CheckError(f"{exc.filename} cannot be opened: {exc.strerror}; present: {' '.join(nodes)}") from exc
    return " ".join(nodes)


def check_cuda_init(options: Options, _state: dict[str, Any]) -> str:
    if options.device == "cpu":
        return "not needed: the device is the CPU"
    cuda = load_libcuda()
    if cuda is None:
        raise CheckError("libcuda.so.1 cannot be loaded: the driver's library is not in this pod")
    call_cuda(cuda, "cuInit", ctypes.c_uint(0))
    version, count = ctypes.c_int(), ctypes.c_int()
    call_cuda(cuda, "cuDriverGetVersion", ctypes.byref(version))
    call_cuda(cuda, "cuDeviceGetCount", ctypes.byref(count))
    require_count(count.value, options.gpus, "cuInit finds")
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        call_cuda(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        call_cuda(cuda, "cuDeviceGetName", name, ctypes.c_int(len(name)), device)
        names.append(name.value.decode(errors="replace"))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}: {', '.join(names)}"


def check_torch(options: Options, state: dict[str, Any]) -> str:
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError as exc:
        # Only torch itself may be absent; a torch that misses one of its own modules is a broken torch.
        if exc.name != "torch":
            raise
        state["torch"] = None
        if options.device == "cuda" and not options.allow_no_torch:
            raise CheckError("torch is not installed, so no matmul can be run on the GPU (--allow-no-torch)") from exc
        return "not installed"
    state["torch"] = torch
    about = f"torch {torch.__version__}"
    if options.device == "cpu":
        return f"{about}, on the CPU"
    if not torch.cuda.is_available():
        raise CheckError(f"{about} sees no GPU: torch.cuda.is_available() is false")
    count = torch.cuda.device_count()
    require_count(count, options.gpus, f"{about} sees")
    return f"{about}: {', '.join(str(torch.cuda.get_device_name(index)) for index in range(count))}"


def check_matmul(options: Options, state: dict[str, Any]) -> str:
    left, right, expected = matmul_problem()
    torch = state["torch"]
    if options.device == "cpu":
        name, multiply = cpu_backend(torch)
        return f"{compare(multiply, left, right, expected, 'the CPU')} on the CPU with {name}"
    if torch is None:
        return "NOT RUN: torch is not installed and --allow-no-torch was given"
    answers = []
    for index in range(torch.cuda.device_count()):
        where = f"cuda:{index}"
        answers.append(f"{compare(torch_on_gpu(torch, index), left, right, expected, where)} on {where}")
    return "; ".join(answers)


def check_disk(options: Options, _state: dict[str, Any]) -> str:
    path = os.path.abspath(options.disk_path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    free = shutil.disk_usage(path).free
    detail = f"{free / GB:.1f} GB free at {path}, {options.min_disk_gb:g} GB needed"
    if free < options.min_disk_gb * GB:
        raise CheckError(detail)
    return detail


def check_memory(options: Options, _state: dict[str, Any]) -> str:
    usable, why = usable_memory()
    detail = f"{usable / GB:.1f} GB usable ({why}), {options.min_memory_gb:g} GB needed"
    if usable < options.min_memory_gb * GB:
        raise CheckError(detail)
    return detail


# One child per group. torch and matmul share theirs, since importing torch twice would double the bill for the gate.
GROUPS: list[list[tuple[str, Probe]]] = [
    [("driver", check_driver)],
    [("device_nodes", check_device_nodes)],
    [("cuda_init", check_cuda_init)],
    [("torch", check_torch), ("matmul", check_matmul)],
    [("disk", check_disk)],
    [("memory", check_memory)],
]

# torch hangs wherever cuInit hangs; waiting for it again would only cost money.
NEEDS = {"torch": "cuda_init", "matmul": "torch"}


# -- matrices ---------------------------------------------------------------------------------------------------------


def matmul_problem() -> tuple[Matrix, Matrix, Matrix]:
    """Two matrices and their product. The product is computed in plain Python: it trusts no library of the pod."""
    left, right = (
        [
            [float((3 * i * i + step * j * j + 7 * i * j) % 17 - 8) for j in range(MATRIX_SIZE)]
            for i in range(MATRIX_SIZE)
        ]
        for step in (5, 11)
    )
    return left, right, multiply_plain(left, right)


def multiply_plain(left: Matrix, right: Matrix) -> Matrix:
    columns = [[row[j] for row in right] for j in range(len(right[0]))]
    return [[sum(map(operator.mul, row, column)) for column in columns] for row in left]


def cpu_backend(torch: Any) -> tuple[str, Callable[[Matrix, Matrix], Matrix]]:
    """The best matrix product this pod has for its CPU, and what it is called."""
    if torch is not None:

        def with_torch(left: Matrix, right: Matrix) -> Matrix:
            product = torch.tensor(left, dtype=torch.float32) @ torch.tensor(right, dtype=torch.float32)
            return product.tolist()  # type: ignore[no-any-return]

        return f"torch {torch.__version__}", with_torch
    try:
        np: Any = importlib.import_module("numpy")
    except ModuleNotFoundError:
        return "plain Python", multiply_plain

    def with_numpy(left: Matrix, right: Matrix) -> Matrix:
        product = np.array(left, dtype=np.float32) @ np.array(right, dtype=np.float32)
        return product.tolist()  # type: ignore[no-any-return]

    return f"numpy {np.__version__}", with_numpy


def torch_on_gpu(torch: Any, index: int) -> Callable[[Matrix, Matrix], Matrix]:
    def multiply(left: Matrix, right: Matrix) -> Matrix:
        product = torch.tensor(left, dtype=torch.float32).cuda(index) @ torch.tensor(right, dtype=torch.float32).cuda(
            index
        )
        torch.cuda.synchronize(index)
        return product.cpu().tolist()  # type: ignore[no-any-return]

    return multiply


def compare(
    multiply: Callable[[Matrix, Matrix], Matrix], left: Matrix, right: Matrix, expected: Matrix, where: str
) -> str:
    """Multiply a few times and compare every element. Raises CheckError on the first wrong product."""
    worst = 0.0
    for _ in range(MATMUL_ROUNDS):
        product = multiply(left, right)
        if len(product) != MATRIX_SIZE or any(len(row) != MATRIX_SIZE for row in product):
            raise CheckError(f"the matmul on {where} has the wrong shape")
        errors = [abs(product[i][j] - expected[i][j]) for i in range(MATRIX_SIZE) for j in range(MATRIX_SIZE)]
        worst = max(errors)
        # `<=` on each, since a NaN is neither larger nor smaller than anything and max() may pass it over.
        if not all(error <= TOLERANCE for error in errors):
            raise CheckError(f"the matmul on {where} is WRONG: off by {worst:g}, tolerance {TOLERANCE:g}")
    size = f"{MATRIX_SIZE}x{MATRIX_SIZE}"
    return f"{size} matmul right {MATMUL_ROUNDS} times (off by {worst:g}, tolerance {TOLERANCE:g})"


# -- the machine ------------------------------------------------------------------------------------------------------


def device_nodes() -> list[str]:
    """The GPU nodes, without the control nodes beside them."""
    return sorted(glob.glob("/dev/nvidia[0-9]*"))


def load_libcuda() -> Any:
    for name in ("libcuda.so.1", "libcuda.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def call_cuda(cuda: Any, name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise CheckError(f"{name} fails with {code} ({CUDA_ERRORS.get(code, 'see the CUDA driver API')})")


def require_count(found: int, wanted: int, what: str) -> None:
    if found < wanted:
        raise CheckError(f"{what} {found} of {wanted} GPUs")


def usable_memory() -> tuple[float, str]:
    """Bytes that can still be had, and what limits them: the machine's free memory or the container's own limit."""
    meminfo = {}
    for line in (read_text("/proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        meminfo[key] = int(value.split()[0]) * 1024
    if "MemAvailable" not in meminfo:
        raise CheckError("/proc/meminfo does not say how much memory is available")
    best: tuple[float, str] = (float(meminfo["MemAvailable"]), "available on the machine")
    for limit_file, used_file, stat_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        limit, used = read_text(limit_file), read_text(used_file)
        if limit is None or used is None or not limit.strip().isdigit():
            continue
        # Page cache that nobody uses is given back under pressure, so it counts as free.
        cache = 0
        for line in (read_text(stat_file) or "").splitlines():
            key, _, value = line.partition(" ")
            if key in ("inactive_file", "total_inactive_file"):
                cache = int(value)
        left = float(int(limit) - int(used) + cache)
        if left < best[0]:
            best = (left, "the container's limit")
    return best


def read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def one_line(text: str, limit: int = 400) -> str:
    return " ".join(text.split())[:limit]


def resolve_device(asked: str, time_limit: float) -> str:
    """`auto` becomes cuda or cpu."""
    if asked != "auto":
        return asked
    if device_nodes() or os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi"):
        return "cuda"
    # CUDA images carry libcuda even on a machine without a GPU; there the library itself says that it has no device.
    state = run_group([("cuda_init", probe_no_device)], Options("cuda", 1, 0, 0, "/", False, {"cuda_init": time_limit}))
    return "cpu" if state[0].ok else "cuda"


def probe_no_device(_options: Options, _state: dict[str, Any]) -> str:
    cuda = load_libcuda()
    if cuda is not None and cuda.cuInit(0) != CUDA_ERROR_NO_DEVICE:
        raise CheckError("there is a CUDA driver")
    return "no GPU"


# -- children with a time limit ---------------------------------------------------------------------------------------


def run_group(group: Sequence[tuple[str, Probe]], options: Options) -> list[Check]:
    """Run the checks of `group` in one child process. A hang, a crash or an exception becomes a failed check."""
    reader, writer = os.pipe()
    noise = os.memfd_create("noise") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        run_child(group, options, writer, noise)
    os.close(writer)
    names = [name for name, _ in group]
    checks: list[Check] = []
    next_line = line_reader(reader)
    line: str | None = ""
    seconds = 0.0
    for name in names:
        started = time.monotonic()
        line = next_line(options.time_limits[name])
        seconds = time.monotonic() - started
        if not line:
            break
        checks.append(Check(name, *json.loads(line)))
        if not checks[-1].ok:
            break
    status = end_child(pid)
    if not line:
        name = names[len(checks)]
        if line is None:
            detail = f"no answer within {options.time_limits[name]:g} s: hung and killed"
            if status is None:
                detail += "; even SIGKILL does not end it, it is stuck in the kernel"
        else:
            detail = f"{describe_death(status)}: {last_line(noise)}"
        checks.append(Check(name, False, seconds, detail))
    skipped = f"not run: {checks[-1].name} failed"
    checks += [Check(name, False, 0.0, skipped) for name in names[len(checks) :]]
    os.close(reader)
    os.close(noise)
    return checks


def run_child(group: Sequence[tuple[str, Probe]], options: Options, writer: int, noise: int) -> NoReturn:
    """The child's whole life. Whatever libraries print goes to `noise`, and a hung child holds no SSH channel open."""
    status = 1
    try:
        # Its own process group, so that a kill also reaches what the check has started.
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((devnull, 0), (noise, 1), (noise, 2)):
            os.dup2(source, target)
        state: dict[str, Any] = {}
        for _, probe in group:
            started = time.monotonic()
            try:
                ok, detail = True, probe(options, state)
            except CheckError as exc:
                ok, detail = False, str(exc)
            except Exception as exc:  # a check that breaks is a check that failed
                ok, detail = False, f"{type(exc).__name__}: {exc}"
            answer = json.dumps([ok, time.monotonic() - started, one_line(detail)])
            os.write(writer, answer.encode() + b"\n")
            if not ok:
                break
        status = 0
    finally:
        os._exit(status)


def line_reader(reader: int) -> Callable[[float], str | None]:
    """A function that waits so many seconds for one line: the line, "" at the end of the pipe, None when time is up."""
    buffer = bytearray()

    def next_line(seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while b"\n" not in buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                return None
            chunk = os.read(reader, 65536)
            if not chunk:
                return ""
            buffer.extend(chunk)
        line, _, rest = bytes(buffer).partition(b"\n")
        buffer[:] = rest
        return line.decode()

    return next_line


def end_child(pid: int) -> int | None:
    """Kill the child with all it started and return its wait status; None when it sits in an uninterruptible call.

    A child that is already dying keeps the status it is dying with.
    """
    # Group and process: the child may not have made its group yet, or the group may outlive the child.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done == pid:
            return status
        time.sleep(0.005)
    return None


def describe_death(status: int | None) -> str:
    """How a child that closed its pipe without an answer ended."""
    if status is None:
        return "the check gave no answer and cannot be ended"
    if os.WIFSIGNALED(status):
        return f"the check crashed with {signal.Signals(os.WTERMSIG(status)).name}"
    return f"the check ended without an answer, exit status {os.WEXITSTATUS(status)}"


def last_line(noise: int) -> str:
    with contextlib.suppress(OSError):
        size = os.lseek(noise, 0, os.SEEK_END)
        os.lseek(noise, max(0, size - 4096), os.SEEK_SET)
        lines = os.read(noise, 4096).decode(errors="replace").split("\n")
        for line in reversed(lines):
            if line.strip():
                return one_line(line)
    return "it printed nothing"


# -- the program ------------------------------------------------------------------------------------------------------


def run_checks(options: Options) -> Iterator[Check]:
    """Every check in order. What depends on a failed one is answered without being run."""
    failed: set[str] = set()
    for group in GROUPS:
        need = NEEDS.get(group[0][0])
        if need in failed:
            checks = [Check(name, False, 0.0, f"not run: {need} failed") for name, _ in group]
        else:
            checks = run_group(group, options)
        failed.update(check.name for check in checks if not check.ok)
        yield from checks


def time_limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in TIME_LIMITS:
        raise argparse.ArgumentTypeError(f"unknown check {name!r}; one of {', '.join(TIME_LIMITS)}")
    return name, at_least_zero(seconds)


def at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Check that a rented machine can train. Exit status: 0 good, 1 not good, 2 usage."
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: %(default)s")
    parser.add_argument("--gpus", type=at_least_one, default=1, metavar="N", help="GPUs rented (default: %(default)s)")
    parser.add_argument("--min-disk-gb", type=at_least_zero, default=0.0, metavar="GB", help="free disk, 10^9 bytes")
    parser.add_argument("--min-memory-gb", type=at_least_zero, default=0.0, metavar="GB", help="memory, 10^9 bytes")
    parser.add_argument("--disk-path", default="/root", metavar="DIR", help="where the disk is (default: %(default)s)")
    parser.add_argument(
        "--allow-no-torch",
        action="store_true",
        help="accept a GPU on which no matmul could be run since the image has no torch",
    )
    parser.add_argument(
        "--time-limit",
        type=time_limit,
        action="append",
        default=[],
        metavar="CHECK=S",
        help="seconds for one check; repeat for more. Default: "
        + ", ".join(f"{name}={seconds:g}" for name, seconds in TIME_LIMITS.items()),
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    time_limits = {**TIME_LIMITS, **dict(arguments.time_limit)}
    options = Options(
        device=resolve_device(arguments.device, time_limits["cuda_init"]),
        gpus=arguments.gpus,
        min_disk_gb=arguments.min_disk_gb,
        min_memory_gb=arguments.min_memory_gb,
        disk_path=arguments.disk_path,
        allow_no_torch=arguments.allow_no_torch,
        time_limits=time_limits,
    )
    checks = []
    for check in run_checks(options):
        checks.append(check)
        if not arguments.json:
            word = "ok  " if check.ok else "FAIL"
            print(f"{word} {check.name:<13}{check.seconds:6.2f} s  {check.detail}", flush=True)
    bad = [check for check in checks if not check.ok]
    reason = f"{bad[0].name}: {bad[0].detail}" if bad else ""
    if arguments.json:
        answer = {
            "ok": not bad,
            "device": options.device,
            "checks": [{**check._asdict(), "seconds": round(check.seconds, 3)} for check in checks],
            "reason": reason,
            "python": platform.python_version(),
            "executable": sys.executable,
        }
        print(json.dumps(answer))
    else:
        print(f"device {options.device}: " + (f"NOT GOOD: {reason}" if bad else "good"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
