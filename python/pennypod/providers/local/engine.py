"""The container engine: which one answers, with which flags it starts a container here, and time-limited calls to it.

Nothing is assumed: the flags are found by really starting a throw-away container (an image of one tiny program, so that
no registry is needed), and remembered until the engine or the boot changes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pennypod.errors import EngineError, InvalidError, PennypodError, TransientError
from pennypod.settings import home_advice

ENGINE_VARIABLE = "PENNYPOD_ENGINE"
KNOWN_ENGINES = ("podman", "docker")
QUICK_S = 20.0
PROBE_S = 30.0
LISTING_S = 60.0
LISTING_TRIES = 4
PROBE_LABEL = "pennypod.probe"

_WHAT_TO_DO = "install podman or start docker, then try again (PENNYPOD_ENGINE=podman|docker|/path picks one)"
# Only what an engine needs to find its storage, socket and proxy; API keys in our environment stay here.
_ENGINE_ENV = re.compile(
    r"PATH|HOME|USER|LOGNAME|TMPDIR|LANG|LC_\w+|TZ|XDG_\w+|DOCKER_\w+|CONTAINERS?_\w+|STORAGE_\w+|REGISTRY_AUTH_FILE"
    r"|DBUS_SESSION_BUS_ADDRESS|SSL_CERT_(FILE|DIR)|(https?|no|all|ftp)_proxy",
    re.IGNORECASE,
)
_VANISHED = re.compile(
    r"no such (container|object)|no container with (name|id)|does not exist in database", re.IGNORECASE
)
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Completed:
    rc: int
    stdout: str
    stderr: str


class Runner(Protocol):
    def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
        """Run `argv`. Raises TimeoutError past the limit and OSError when it cannot be started."""


def run_command(argv: Sequence[str], stdin: bytes | None = None, timeout_s: float = QUICK_S) -> Completed:
    """The real Runner. Its own session, so that a Ctrl-C meant for us does not cut a create in half."""
    try:
        done = subprocess.run(
            list(argv),
            input=stdin if stdin is not None else b"",
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=engine_environment(os.environ),
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as exc:
        raise TimeoutError(f"no answer in {timeout_s:.0f} s") from exc
    return Completed(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if _ENGINE_ENV.fullmatch(key)}


def error_line(stderr: str) -> str:
    """The line of an engine's stderr that says what went wrong, past its warnings (CNI, cgroups, retries)."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    loud = [line for line in lines if "level=warning" not in line and "level=info" not in line]
    for line in reversed(loud):
        if line.lower().startswith(("error", "docker:")):
            return re.sub(r"^(error|docker):\s*(error response from daemon:\s*)?", "", line, flags=re.IGNORECASE)[:400]
    return (loud or lines or ["no message"])[-1][:400]


def is_vanished(stderr: str) -> bool:
    """Whether the engine says plainly that the container is not there."""
    return _VANISHED.search(stderr) is not None


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answered, with the `flags` under which `run` works here."""

    kind: str
    path: str
    version: str
    rootless: bool
    storage: str
    flags: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    runner: Runner = run_command

    @property
    def major(self) -> int:
        head = re.match(r"\d+", self.version)
        return int(head[0]) if head else 0

    def call(self, *args: str, stdin: bytes | None = None, timeout_s: float = QUICK_S) -> Completed:
        """One engine command, whatever it returns. Raises TransientError when it does not answer in time."""
        try:
            return self.runner([self.path, *args], stdin, timeout_s)
        except TimeoutError as exc:
            raise TransientError(f"{self.kind} {args[0]}: {exc}", command=args[0]) from exc
        except OSError as exc:
            raise EngineError(f"{self.path} cannot be started ({exc.strerror or exc}): {_WHAT_TO_DO}") from exc

    def check(self, *args: str, stdin: bytes | None = None, timeout_s: float = QUICK_S) -> str:
        """The stdout of an engine command that must succeed. Raises TransientError with the engine's own words."""
        done = self.call(*args, stdin=stdin, timeout_s=timeout_s)
        if done.rc != 0:
            raise TransientError(
                f"{self.kind} {args[0]} failed: {error_line(done.stderr)}", command=args[0], rc=done.rc
            )
        return done.stdout

    def list_containers(self, *filters: str) -> list[dict[str, Any]]:
        """Containers in every state, by one `ps`.

        Asked again when it fails: a container that comes or goes under the listing has many wordings. And asked with
        patience: saving an image keeps every other command waiting.
        """
        wanted = [part for text in filters for part in ("--filter", text)]
        ask = ("ps", "--all", "--no-trunc", *wanted, "--format", "json" if self.kind == "podman" else "{{json .}}")
        done = self.call(*ask, timeout_s=LISTING_S)
        for attempt in range(1, LISTING_TRIES):
            if done.rc == 0:
                break
            time.sleep(0.1 * attempt)
            done = self.call(*ask, timeout_s=LISTING_S)
        if done.rc == 0:
            return parse_ps(done.stdout)
        raise TransientError(f"{self.kind} ps failed: {error_line(done.stderr)}", command="ps", rc=done.rc)

    def image_id(self, reference: str) -> str | None:
        """The id of a local image, None when the engine has none of that name."""
        done = self.call("image", "inspect", "--format", "{{.Id}}", reference)
        if done.rc == 0:
            return done.stdout.strip().removeprefix("sha256:") or None
        text = done.stderr.lower()
        if "no such image" in text or "image not known" in text or "no such object" in text or "unable to find" in text:
            return None
        raise TransientError(f"{self.kind} image inspect failed: {error_line(done.stderr)}", command="image")

    def remove_container(self, name: str) -> None:
        """End and delete a container at once; one that is not there is fine."""
        wait = ["-t", "0"] if self.kind == "podman" and self.major >= 4 else []
        last = ""
        for attempt in range(3):
            if attempt:
                time.sleep(0.3)
            done = self.call("rm", "-f", "-v", *wait, name, timeout_s=30)
            if done.rc == 0 or is_vanished(done.stderr) or "already in progress" in done.stderr:
                return
            last = error_line(done.stderr)
        raise TransientError(f"{self.kind} could not remove {name}: {last}", command="rm")

    def storage_free_bytes(self) -> int | None:
        """Room where the engine keeps its containers, None when it is not visible from here."""
        try:
            return shutil.disk_usage(self.storage).free if self.storage else None
        except OSError:
            return None


def parse_ps(stdout: str) -> list[dict[str, Any]]:
    """podman prints one JSON array, docker one object a line; both become plain rows of the same shape.

    Row: id, name, state, exit_code (None if unknown), labels, ports (container port -> (host, port)).
    """
    text = stdout.strip()
    if not text or text == "null":
        return []
    try:
        raw: list[dict[str, Any]]
        raw = (
            json.loads(text)
            if text.startswith("[")
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except json.JSONDecodeError as exc:
        raise TransientError("the engine's listing is not JSON", command="ps") from exc
    return [_row(item) for item in raw]


def _row(item: Mapping[str, Any]) -> dict[str, Any]:
    names = item.get("Names") or ""
    name = names[0] if isinstance(names, list) and names else str(names).split(",")[0]
    labels = item.get("Labels") or {}
    if isinstance(labels, str):
        labels = dict(part.partition("=")[::2] for part in labels.split(",") if part)
    status = str(item.get("Status") or "")
    exit_code = item.get("ExitCode")
    state = str(item.get("State") or "").lower()
    if exit_code is None:
        found = re.match(r"Exited \((-?\d+)\)", status)
        exit_code = int(found[1]) if found else None
    return {
        "id": str(item.get("Id") or item.get("ID") or ""),
        "name": name,
        "state": state,
        "exit_code": exit_code if state in ("exited", "stopped", "dead") else None,
        "labels": labels,
        "ports": _ports(item.get("Ports")),
    }


def _ports(ports: Any) -> dict[int, tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    if isinstance(ports, str):
        for host, outside, inside in re.findall(r"([\d.]+):(\d+)->(\d+)/tcp", ports):
            found[int(inside)] = (host, int(outside))
    elif isinstance(ports, list):
        for item in ports:
            outside = item.get("host_port") or item.get("hostPort")
            inside = item.get("container_port") or item.get("containerPort")
            if outside and inside:
                found[int(inside)] = (item.get("host_ip") or item.get("hostIP") or "127.0.0.1", int(outside))
    return found


def read_only_mount(source: str, target: str) -> list[str]:
    """Flags for a bind mount. The value is one line of CSV, which also carries colons and commas in a path."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(["type=bind", f"source={source}", f"target={target}", "readonly"])
    return ["--mount", buffer.getvalue()]


def container_id(stdout: str) -> str | None:
    """The id a `run --detach` printed, among whatever else it said."""
    found = _CONTAINER_ID.findall(stdout)
    return found[-1] if found else None


# --- which engine, and with which flags -----------------------------------------------------------------------------


def find_engine(
    environ: Mapping[str, str],
    cache_dir: Path,
    *,
    runner: Runner = run_command,
    which: Callable[[str], str | None] = shutil.which,
    on_progress: Callable[[str], None] | None = None,
    to_start: bool = True,
) -> Engine:
    """The engine that answers and starts containers here. Raises EngineError with one line that says what to do.

    Without `to_start` it is only to list and end containers: where there is one engine to choose from, it is not asked
    to start any, so that a full disk or a broken runtime hides no pod.
    """
    wanted = environ.get(ENGINE_VARIABLE, "").strip()
    candidates = [wanted] if wanted else list(KNOWN_ENGINES)
    no_choice = len([name for name in candidates if which(name) is not None]) == 1
    refused: list[str] = []
    for candidate in candidates:
        path = which(candidate)
        if path is None:
            refused.append(f"{candidate}: not installed")
            continue
        key = _cache_key(path)
        cached = _read_cache(cache_dir, key, path, runner)
        if cached is not None:
            return cached
        try:
            engine = describe_engine(path, runner)
            if no_choice and not to_start:
                return engine
            engine = with_flags(engine, probe_flags(engine, on_progress=on_progress))
        except PennypodError as exc:
            refused.append(f"{candidate}: {exc.message}")
            continue
        _write_cache(cache_dir, key, engine)
        return engine
    raise EngineError(
        f"no container engine can start a pod here ({'; '.join(refused)}): {_WHAT_TO_DO}", refused=refused
    )


def engine_installed(environ: Mapping[str, str]) -> bool:
    """Whether there is any engine program at all; without one there are no local pods."""
    wanted = environ.get(ENGINE_VARIABLE, "").strip()
    return bool(wanted) or any(shutil.which(name) for name in KNOWN_ENGINES)


def forget_engine(cache_dir: Path) -> None:
    """Drop what was learned, so that the next use probes again: after a start that failed for the engine's own sake."""
    (cache_dir / "engine.json").unlink(missing_ok=True)


def with_flags(engine: Engine, flags: Iterable[str]) -> Engine:
    return Engine(
        kind=engine.kind,
        path=engine.path,
        version=engine.version,
        rootless=engine.rootless,
        storage=engine.storage,
        flags=tuple(flags),
        runtimes=engine.runtimes,
        runner=engine.runner,
    )


def describe_engine(path: str, runner: Runner) -> Engine:
    """Ask the engine who it is. `docker` may well be podman's alias, so the answer's shape decides, not the name."""
    bare = Engine(kind=Path(path).name, path=path, version="", rootless=False, storage="", runner=runner)
    done = bare.call("info", "--format", "{{json .}}")
    if done.rc != 0:
        raise EngineError(f"does not answer: {error_line(done.stderr)}")
    try:
        info: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError as exc:
        raise EngineError("its `info` is not JSON") from exc
    if "host" in info:
        return Engine(
            kind="podman",
            path=path,
            version=str((info.get("version") or {}).get("Version") or ""),
            rootless=bool((info["host"].get("security") or {}).get("rootless")),
            storage=str((info.get("store") or {}).get("graphRoot") or ""),
            runtimes=(str((info["host"].get("ociRuntime") or {}).get("name") or ""),),
            runner=runner,
        )
    if not info.get("ServerVersion"):
        errors = info.get("ServerErrors") or ["its daemon is not running"]
        raise EngineError(f"does not answer: {str(errors[0])[:200]}")
    return Engine(
        kind="docker",
        path=path,
        version=str(info["ServerVersion"]),
        rootless=any("rootless" in str(option) for option in info.get("SecurityOptions") or []),
        storage=str(info.get("DockerRootDir") or ""),
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        runner=runner,
    )


def flag_variants(engine: Engine, *, nofile: int, nproc: int, installed: Sequence[str]) -> list[tuple[str, ...]]:
    """What to try, plainest first: other limits, another runtime, another network.

    Without CAP_SYS_RESOURCE a limit above the caller's own is refused, and podman lowers its own number of processes
    to the kernel's pid_max.
    """
    limits: list[tuple[str, ...]] = [
        (),
        ("--ulimit", f"nofile={nofile}:{nofile}", "--ulimit", f"nproc={nproc}:{nproc}"),
        ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"),
    ]
    base: tuple[str, ...] = ()
    runtimes: list[tuple[str, ...]] = [()]
    networks: list[tuple[str, ...]] = [()]
    if engine.kind == "podman":
        # Labels would keep a confined container from reading the read-only settings that are mounted into it.
        base = ("--security-opt", "label=disable")
        runtimes += [("--runtime", name) for name in installed if name not in engine.runtimes]
        networks += [("--network", "slirp4netns"), ("--network", "pasta")]
    return [(*base, *net, *runtime, *limit) for net in networks for runtime in runtimes for limit in limits]


def probe_flags(
    engine: Engine,
    *,
    variants: Sequence[tuple[str, ...]] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[str, ...]:
    """The first flag variant under which a throw-away container really runs. Raises EngineError when none does."""
    if variants is None:
        installed = [name for name in ("runc", "crun") if shutil.which(name, path=_program_path())]
        variants = flag_variants(
            engine, nofile=_hard_limit(resource.RLIMIT_NOFILE), nproc=_process_limit(), installed=installed
        )
    program = probe_program()
    if program is None:
        return variants[0]
    image = _probe_image(engine, program)
    seen: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pennypod-probe-") as mount:
        for number, flags in enumerate(variants):
            if on_progress is not None:
                on_progress(f"trying how {engine.kind} starts containers here ({number + 1}/{len(variants)})")
            args = ["run", "--rm", "--pull", "never", "--label", f"{PROBE_LABEL}=1", *flags]
            args += ["--shm-size", "64m", "-p", "127.0.0.1::22", *read_only_mount(mount, "/settings"), image, "/probe"]
            try:
                done = engine.call(*args, timeout_s=PROBE_S)
            except TransientError as exc:
                seen.append(exc.message)
                continue
            if done.rc == 0:
                return flags
            line = error_line(done.stderr)
            if line not in seen:
                seen.append(line)
    raise EngineError(
        f"{engine.kind} {engine.version} starts no container: {seen[0] if seen else 'no variant'}", tried=seen
    )


def _program_path() -> str:
    """A plain user's PATH often lacks the folders where runtimes lie."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def probe_program() -> bytes | None:
    """A static program that exits 0, as ELF bytes; None on a processor we have no five instructions for."""
    code, machine = {
        "x86_64": (bytes.fromhex("b83c00000031ff0f05"), 0x3E),
        "aarch64": (bytes.fromhex("a80b80d2000080d2010000d4"), 0xB7),
    }.get(platform.machine(), (b"", 0))
    if not code:
        return None
    base, header = 0x400000, 64 + 56
    elf = b"\x7fELF\x02\x01\x01" + bytes(9)
    elf += (2).to_bytes(2, "little") + machine.to_bytes(2, "little") + (1).to_bytes(4, "little")
    elf += (base + header).to_bytes(8, "little") + (64).to_bytes(8, "little") + bytes(8 + 4)
    elf += b"".join(n.to_bytes(2, "little") for n in (64, 56, 1, 0, 0, 0))
    elf += (1).to_bytes(4, "little") + (5).to_bytes(4, "little") + bytes(8) + base.to_bytes(8, "little") * 2
    elf += (header + len(code)).to_bytes(8, "little") * 2 + (0x1000).to_bytes(8, "little")
    return elf + code


def _probe_image(engine: Engine, program: bytes) -> str:
    reference = f"localhost/pennypod-probe:{hashlib.sha256(program).hexdigest()[:12]}"
    if engine.image_id(reference) is None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name in ("settings", "etc", "run", "dev", "proc", "sys"):
                folder = tarfile.TarInfo(name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(folder)
            file = tarfile.TarInfo("probe")
            file.size, file.mode = len(program), 0o755
            tar.addfile(file, io.BytesIO(program))
        engine.check("import", "-", reference, stdin=buffer.getvalue(), timeout_s=60)
    return reference


def _hard_limit(which: int) -> int:
    hard = resource.getrlimit(which)[1]
    return 1_048_576 if hard in (resource.RLIM_INFINITY, -1) else min(hard, 1_048_576)


def _process_limit() -> int:
    limit = _hard_limit(resource.RLIMIT_NPROC)
    with suppress(OSError, ValueError):
        limit = min(limit, int(Path("/proc/sys/kernel/pid_max").read_text()))
    return limit


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _cache_key(path: str) -> str:
    """Changes with the boot, the user and the engine's binary (an upgrade changes its size or its time)."""
    try:
        stat = os.stat(path)
        file = f"{stat.st_size}:{stat.st_mtime_ns}"
    except OSError:
        file = "?"
    return f"{path}:{file}:{_boot_id()}:{os.getuid()}:{_hard_limit(resource.RLIMIT_NOFILE)}:{_process_limit()}"


def _read_cache(cache_dir: Path, key: str, path: str, runner: Runner) -> Engine | None:
    try:
        saved = json.loads((cache_dir / "engine.json").read_text(encoding="utf-8"))[key]
        return Engine(
            kind=saved["kind"],
            path=path,
            version=saved["version"],
            rootless=saved["rootless"],
            storage=saved["storage"],
            flags=tuple(saved["flags"]),
            runtimes=tuple(saved["runtimes"]),
            runner=runner,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(cache_dir: Path, key: str, engine: Engine) -> None:
    saved = {name: getattr(engine, name) for name in ("kind", "version", "rootless", "storage", "flags", "runtimes")}
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cache_dir, prefix="engine-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({key: saved}, file)
        os.replace(temporary, cache_dir / "engine.json")
    except OSError as exc:
        raise InvalidError(f"cannot write below {cache_dir} ({exc.strerror}): {home_advice(exc)}") from exc
