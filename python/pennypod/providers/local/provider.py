"""The local provider: machines that are this host, pods that are containers. Floor 1.

It behaves like any other provider: offers at a price, a lease in the pod's name, a listing in which pods appear and
from which they vanish. Everything it knows about a pod is in the container's own labels; it keeps no state of its own.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pennypod import fuse, startup
from pennypod.errors import AmbiguousError, InvalidError, NoCapacityError, OfferGoneError, TransientError
from pennypod.model.account import mark
from pennypod.model.ids import PREFIX, parse_lease
from pennypod.model.image import RegistryLogin, Repository
from pennypod.model.money import usd_to_micros
from pennypod.model.offer import Need, Offer, Order
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.providers.base import SavedImage, Timing
from pennypod.providers.local import pushing, saving
from pennypod.providers.local.engine import Engine, container_id, error_line, find_engine, forget_engine, is_vanished
from pennypod.providers.local.hostsettings import HostSettings, read_host_settings, write_tree
from pennypod.providers.local.image import (
    MOUNT,
    RECIPES,
    OnProgress,
    build_lock,
    ensure_image,
    image_reference,
    run_arguments,
    scripts,
)
from pennypod.settings import Settings

PRICE_VARIABLE = "PENNYPOD_LOCAL_USD_PER_H"
PORT_VARIABLE = "PENNYPOD_LOCAL_SSH_PORT"
NET_ADMIN_VARIABLE = "PENNYPOD_LOCAL_NET_ADMIN"
DEFAULT_USD_PER_H = "0.20"
MACHINES = ("local-1", "local-2", "local-3", "local-4")
LABEL = "pennypod.pod"

_ID_LENGTH = 12
_DEARER = 5  # percent a machine costs more than the one before it
_CREATE_S = 60.0
_HOST_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STATES = {
    "created": PodState.STARTING,
    "configured": PodState.STARTING,
    "initialized": PodState.STARTING,
    "restarting": PodState.STARTING,
    "running": PodState.RUNNING,
    "paused": PodState.STOPPED,
    "removing": PodState.STOPPED,
    "stopping": PodState.STOPPED,
}


class LocalProvider:
    """Pods as containers on this host. The engine is looked for at first use, so making one costs nothing."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], *, engine: Engine | None = None) -> None:
        self._cache = settings.cache_dir / "local"
        self._environ = dict(environ)
        self._engine = engine
        self._looker: Engine | None = None
        self._found: Hardware | None = None

    @property
    def name(self) -> str:
        return "local"

    @property
    def timing(self) -> Timing:
        return Timing(
            listing_lag_s=2.0,
            absence_checks=2,
            absence_spacing_s=0.5,
            poll_s=0.3,
            start_patience_s=60.0,
            start_limit_s=120.0,
        )

    @property
    def engine(self) -> Engine:
        """To start containers with."""
        if self._engine is None:
            self._engine = find_engine(self._environ, self._cache)
        return self._engine

    @property
    def looker(self) -> Engine:
        """To look at containers and to end them with: needs no proof that any can be started."""
        if self._engine is not None:
            return self._engine
        if self._looker is None:
            self._looker = find_engine(self._environ, self._cache, to_start=False)
        return self._looker

    # --- whose pods are seen ------------------------------------------------------------------------------------------

    def key_mark(self) -> str:
        """Of the engine on this machine: elsewhere, and by another engine, other containers are listed."""
        engine = self.looker
        machine = _machine_id() or socket.gethostname()
        return mark(self.name, machine, engine.kind, str(os.getuid()) if engine.rootless else "")

    def holder(self) -> str | None:
        """The same: whoever asks another engine asks another account."""
        engine = self.looker
        return f"{engine.kind} on {socket.gethostname()} ({self.key_mark()})"

    # --- offers -------------------------------------------------------------------------------------------------------

    def offers(self, need: Need) -> list[Offer]:
        """Four machines, all of them this host. Any GPU wish is met by what is here, and `details` says so."""
        engine = self.engine
        free = engine.storage_free_bytes()
        if free is not None and free < need.disk_gb * 1e9:
            raise NoCapacityError(
                f"the job asks for {need.disk_gb:g} GB of disk and {engine.storage} has {free / 1e9:.1f} GB free:"
                " free some room or lower pod_disk_gb",
                free_bytes=free,
            )
        has = self._hardware()
        speed = _link_mbps()
        details: dict[str, Any] = {"engine": f"{engine.kind} {engine.version}"}
        if _is_stand_in(has, need):
            wish = " or ".join(need.gpu) or "a GPU"
            wish = f"{need.gpu_count} x {wish}" if need.gpu_count > 1 else wish
            details["stands_in_for"] = list(need.gpu)
            details["note"] = f"this host's {has.gpu} stands in for {wish}"
        found = []
        for number, machine in enumerate(MACHINES):
            price = _price_micros(self._environ) * (100 + _DEARER * number) // 100
            if need.max_price_micros_per_h is not None and price > need.max_price_micros_per_h:
                continue
            found.append(
                Offer(
                    provider=self.name,
                    offer_id=machine,
                    machine_id=machine,
                    gpu=has.gpu,
                    gpu_count=has.count,
                    price_micros_per_h=price,
                    disk_gb=need.disk_gb,
                    secure=True,
                    gpu_ram_gb=has.ram_gb,
                    inet_down_mbps=speed,
                    inet_up_mbps=speed,
                    details=dict(details),
                )
            )
        return found

    def _hardware(self) -> Hardware:
        if self._found is None:
            self._found = find_gpu(self.engine)
        return self._found

    # --- renting ------------------------------------------------------------------------------------------------------

    def prepare(self, image: str, on_progress: OnProgress) -> None:
        """Find out how containers start here and build the image if it is not there yet; `rent` then only starts it."""
        if self._engine is None:
            self._engine = find_engine(self._environ, self._cache, on_progress=on_progress)
        try:
            self._image(image, self._host(), on_progress)
        except TransientError:
            # Perhaps containers start differently by now: the next try finds out again.
            forget_engine(self._cache)
            raise

    def _image(self, image: str, host: HostSettings, on_progress: OnProgress) -> str:
        return ensure_image(self.engine, image, host, self._cache, self._environ, on_progress)

    def rent(self, offer: Offer, order: Order) -> str:
        """Start a container named by the lease. A start that fails leaves no container behind."""
        if parse_lease(order.name) is None:
            raise InvalidError(f"{order.name!r} is not a lease of ours: nothing was rented")
        if offer.machine_id not in MACHINES:
            raise OfferGoneError(f"there is no local machine {offer.machine_id!r}")
        names = _env_names(order.env)
        port = _fixed_port(self._environ)
        if port and not _port_is_free(port):
            raise InvalidError(f"port {port} on 127.0.0.1 is taken: free it or unset {PORT_VARIABLE}", port=port)
        host = self._host()
        image = self._image(order.image, host, lambda _text: None)
        tree = write_tree(host, self._cache, scripts("host.sh", "start.sh"))
        labels = {
            LABEL: order.name,
            "pennypod.price": str(offer.price_micros_per_h),
            "pennypod.machine": offer.machine_id,
            "pennypod.gpu": re.sub(r"[,=]", " ", offer.gpu),
            "pennypod.gpus": str(offer.gpu_count),
            "pennypod.created": f"{time.time():.3f}",
            "pennypod.deadline": str(order.deadline),
        }
        env = host.env | order.env
        told = {"PENNYPOD_PUBLIC_KEY": order.public_key.strip(), "PENNYPOD_LEASE": order.name}
        told["PENNYPOD_ENV_NAMES"] = " ".join(sorted(set(names) | set(host.env)))
        args = ["run", "--detach", "--pull", "never", "--name", order.name, "--shm-size", "1g"]
        args += [part for key, value in labels.items() for part in ("--label", f"{key}={value}")]
        args += [part for key, value in (env | told).items() for part in ("-e", f"{key}={value}")]
        args += [
            *self.engine.flags,
            *self._hardware().flags,
            *(["--cap-add", "NET_ADMIN"] if self._environ.get(NET_ADMIN_VARIABLE) == "1" else []),
            "-p",
            f"127.0.0.1:{port or ''}:22",
            *run_arguments(host, tree),
        ]
        return self._create(order.name, [*args, "--entrypoint", "/bin/sh", image, "-c", _start_command(order)], port)

    def _create(self, name: str, args: list[str], port: int) -> str:
        try:
            done = self.engine.call(*args, timeout_s=_CREATE_S)
        except TransientError as exc:
            raise AmbiguousError(f"{exc.message}: the pod may exist", name=name) from exc
        made = container_id(done.stdout)
        if done.rc == 0 and made:
            return made[:_ID_LENGTH]
        line = error_line(done.stderr)
        lower = done.stderr.lower()
        if "already in use" in lower and name in done.stderr:
            raise AmbiguousError(f"a pod named {name} exists already", name=name)
        if done.rc < 0:
            raise AmbiguousError(f"{self.engine.kind} run was killed: the pod may exist", name=name)
        # The engine keeps a container that it could make but not start.
        self.engine.remove_container(name)
        if "address already in use" in lower or "port is already allocated" in lower:
            if port:
                raise InvalidError(f"port {port} on 127.0.0.1 is taken: free it or unset {PORT_VARIABLE}", port=port)
            raise TransientError(f"the port {self.engine.kind} picked was taken meanwhile: {line}")
        if "no space left" in lower:
            raise NoCapacityError(f"no room left for a pod: {line}")
        forget_engine(self._cache)
        raise TransientError(f"{self.engine.kind} could not start the pod: {line}", rc=done.rc)

    def _host(self) -> HostSettings:
        return read_host_settings(self._environ)

    # --- what exists --------------------------------------------------------------------------------------------------

    def pods(self) -> list[Pod]:
        return [_pod(row) for row in self.looker.list_containers(f"label={LABEL}") if _is_pod(row)]

    def pod(self, pod_id: str) -> Pod | None:
        row = self._row(pod_id)
        if row is None:
            return None
        pod = _pod(row)
        if pod.state in (PodState.FAILED, PodState.STOPPED):
            logs = self.looker.call("logs", "--tail", "5", row["id"])
            lines = (logs.stdout + logs.stderr).strip().splitlines()[-5:]
            pod = replace(pod, progress=lines[-1] if lines else "", details=pod.details | {"log": lines})
        return pod

    def _row(self, pod_id: str) -> dict[str, Any] | None:
        if not re.fullmatch(r"[0-9a-f]{12,64}", pod_id):
            raise InvalidError(f"{pod_id!r} is not the id of a local pod")
        rows = self.looker.list_containers(f"label={LABEL}", f"id={pod_id}")
        return next((row for row in rows if row["id"].startswith(pod_id) and _is_pod(row)), None)

    def host_keys(self, pod_id: str, name: str = "") -> list[str]:  # noqa: ARG002
        """Read inside the container, through the engine. The pod makes its key in its first second: waited for."""
        last = ""
        for attempt in range(25):
            if attempt:
                time.sleep(0.2)
            done = self.looker.call("exec", pod_id, "cat", _HOST_KEY)
            if done.rc == 0 and done.stdout.startswith("ssh-"):
                return [" ".join(done.stdout.split()[:2])]
            last = error_line(done.stderr)
            if is_vanished(done.stderr) or "not running" in last or "state improper" in last:
                break
        raise TransientError(f"pod {pod_id} shows no host key: {last}")

    # --- images of pods -----------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self, on_progress: OnProgress) -> Iterator[None]:
        with build_lock(on_progress):
            saving.settle(self.looker)
            yield

    def image_base(self, image: str) -> str:
        wanted = image.strip() or "stock"
        return image_reference(wanted) if wanted in RECIPES else f"{wanted}@{self.looker.image_id(wanted)}"

    def save_image(
        self, pod_id: str, run: str, labels: Mapping[str, str], pod_home: str, on_progress: OnProgress
    ) -> SavedImage:
        row = self._row(pod_id)
        if row is None:
            raise InvalidError(f"there is no pod {pod_id} to make an image of")
        host = self._host()
        lent = {*host.files, *host.apt_files}
        marked = {**labels, saving.RUN_LABEL: run}
        draft = f"{saving.DRAFT}:{run}"
        return saving.save_pod(self.engine, row["id"], draft, marked, lent, pod_home, on_progress)

    def publish_image(self, run: str, name: str) -> str:
        draft, reference = f"{saving.DRAFT}:{run}", f"{saving.REPOSITORY}:{name}"
        self.looker.check("tag", draft, reference)
        self.looker.check("rmi", draft)  # the name only: the image has another one now
        return reference

    def discard_images(self, run: str) -> None:
        saving.discard_of(self.looker, run)

    def saved_images(self) -> dict[str, str]:
        return saving.tags(self.looker)

    def push_image(self, name: str, to: Repository, tag: str, login: RegistryLogin | None) -> str:
        return pushing.push_image(self.looker, f"{saving.REPOSITORY}:{name}", to, tag, login)

    def remove_image(self, name: str) -> None:
        saving.remove(self.looker, f"{saving.REPOSITORY}:{name}")

    def ask_pod(self, pod_id: str, argv: Sequence[str]) -> str:
        return saving.in_container(self.looker, pod_id, argv)

    def balance_micros(self) -> int | None:
        return None

    # --- the end ------------------------------------------------------------------------------------------------------

    def destroy(self, pod_id: str) -> None:
        """Kill and delete. Only a container with our label and our prefix to its name is ever touched."""
        row = self._row(pod_id)
        if row is None:
            return
        if not str(row["name"]).startswith(PREFIX):
            raise InvalidError(f"container {row['name']} is not named like ours and is left alone", pod_id=pod_id)
        self.looker.remove_container(row["id"])


def local_provider(settings: Settings, environ: Mapping[str, str] | None = None) -> LocalProvider:
    """The factory the registry names."""
    return LocalProvider(settings, os.environ if environ is None else environ)


def _start_command(order: Order) -> str:
    """What PID 1 of the container does before it becomes sshd."""
    parts = [f"exec /bin/sh {MOUNT}/start.sh"]
    if order.fuse is not None:
        # There is no API to ask: the container ends with its first process, and whoever lists it removes it.
        parts.insert(0, fuse.part(order.fuse, order.deadline, fuse.Ending(ends=(("KILL", "1", None),))))
    return startup.script(parts)


def _is_stand_in(has: Hardware, need: Need) -> bool:
    wanted = {name.casefold() for name in need.gpu}
    return bool(wanted and has.gpu.casefold() not in wanted) or need.gpu_count > has.count


def _is_pod(row: Mapping[str, Any]) -> bool:
    """An image saved from a pod hands its labels on to whatever is started from it; the name tells them apart."""
    return bool(row["labels"].get(LABEL) == row["name"])


def _pod(row: Mapping[str, Any]) -> Pod:
    labels = row["labels"]
    state = _STATES.get(row["state"])
    if state is None:
        # An exit that was asked for is a stop, any other a failure.
        state = PodState.STOPPED if row["exit_code"] in (0, 137, 143) and row["state"] != "dead" else PodState.FAILED
    host, port = row["ports"].get(22, ("", 0))
    return Pod(
        provider="local",
        pod_id=str(row["id"])[:_ID_LENGTH],
        name=row["name"],
        state=state,
        created=_number(labels.get("pennypod.created"), 0.0),
        price_micros_per_h=int(_number(labels.get("pennypod.price"), 0.0)),
        machine_id=str(labels.get("pennypod.machine") or ""),
        gpu=str(labels.get("pennypod.gpu") or ""),
        gpu_count=int(_number(labels.get("pennypod.gpus"), 1.0)),
        address=SshAddress(host, port) if port and state is PodState.RUNNING else None,
        # Written right before the engine is asked to start it: its image was there by then.
        computing_since=_number(labels.get("pennypod.created"), 0.0) or None,
        details={"state": row["state"], "exit_code": row["exit_code"]},
    )


def _number(text: Any, default: float) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return default


def _price_micros(environ: Mapping[str, str]) -> int:
    text = environ.get(PRICE_VARIABLE) or DEFAULT_USD_PER_H
    try:
        price = usd_to_micros(text)
    except ValueError:
        price = -1
    if price < 0:
        raise InvalidError(f"{PRICE_VARIABLE}={text!r} is not a price: give dollars per hour, like {DEFAULT_USD_PER_H}")
    return price


def _fixed_port(environ: Mapping[str, str]) -> int:
    text = environ.get(PORT_VARIABLE, "").strip()
    if not text:
        return 0
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise InvalidError(f"{PORT_VARIABLE}={text!r} is not a port number")
    return int(text)


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _env_names(env: Mapping[str, str]) -> list[str]:
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name) or name.startswith(("PENNYPOD_PUBLIC", "PENNYPOD_ENV_")):
            raise InvalidError(f"{name!r} cannot be an environment variable of a pod")
        if "\n" in value or "\0" in value:
            raise InvalidError(f"the value of {name} has a line break, which a pod's environment cannot carry")
    return list(env)


def _link_mbps(root: Path = Path("/sys/class/net")) -> float | None:
    """The fastest real link the kernel knows the speed of; None where it does not (most virtual machines).

    Only a real interface has a device: a container engine's bridge claims 10 Gbit/s out of thin air.
    """
    speeds = []
    for file in (device.with_name("speed") for device in root.glob("*/device")):
        with suppress(OSError, ValueError):
            speeds.append(float(file.read_text()))
    best = max(speeds, default=0.0)
    return best if best > 0 else None


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the machines of this host have, and the engine's flags that bring it into a container."""

    gpu: str = "CPU"
    count: int = 1
    ram_gb: float | None = None
    flags: tuple[str, ...] = ()


def find_gpu(
    engine: Engine,
    *,
    control: Path = Path("/dev/nvidiactl"),
    cdi_folders: Sequence[Path] = (Path("/etc/cdi"), Path("/var/run/cdi")),
) -> Hardware:
    """This host's NVIDIA GPUs, where the driver and the engine's toolkit for it are both there; else its CPU."""
    if not control.exists():
        return Hardware()
    if engine.kind == "docker":
        flags: tuple[str, ...] = ("--gpus", "all") if "nvidia" in engine.runtimes else ()
    else:
        listed = any((folder / "nvidia.yaml").exists() for folder in cdi_folders)
        flags = ("--device", "nvidia.com/gpu=all") if listed else ()
    if not flags:
        return Hardware()
    argv = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(argv, capture_output=True, text=True, timeout=15, check=True).stdout
        cards = [line.split(",") for line in text.splitlines() if line.strip()]
        name = re.sub(r"^(NVIDIA |GeForce )*", "", cards[0][0].strip())
        return Hardware(name, len(cards), round(float(cards[0][1]) * 1024 * 1024 / 1e9, 1), flags)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return Hardware()


def _machine_id() -> str:
    with suppress(OSError):
        return Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    return ""
