"""What pods are made of: containers with a real sshd on loopback, or ghosts that only look like it."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pennypod import processes
from pennypod.errors import PennypodError
from pennypod.model.ids import parse_lease
from pennypod.model.image import RegistryLogin, is_loopback, parse_repository
from pennypod.model.netdev import received_and_sent
from pennypod.providers.local.engine import Engine, container_id, error_line, find_engine
from pennypod.providers.local.hostsettings import HostSettings, read_host_settings, write_tree
from pennypod.providers.local.image import MOUNT, ensure_image, run_arguments, scripts
from pennypod.providers.local.pushing import push_image
from pennypod.settings import Settings
from pennypod.simulator.pulling import is_pulled, pull
from pennypod.simulator.state import RUNPOD, VAST, Pod

LABEL = "pennypod.simulator"
_GHOST_PORTS = 20_000
_CREATE_S = 60.0
_COMMIT_S = 900.0
_PORT_TRIES = 4
_REMOVE_TRIES = 3
_SSHD_WORDS = ("sshd", "ssh start", "ssh restart", "/start.sh", "openssh-server")
_IDENTITY = re.compile(r"[0-9]+:[0-9]+:")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a dead card answers: enough for a check that asks the driver, whatever the machine under it really has.
_DEAD_NVIDIA_SMI = (
    "#!/bin/sh\necho 'Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.'\nexit 15\n"
)


class Ghosts:
    """No machine behind it: an address where nobody is, at once."""

    def __init__(self) -> None:
        self._next = 0

    def create(self, pod: Pod) -> None:
        self._next += 1
        host = getattr(pod.machine, "ipaddr", None) or f"198.51.100.{self._next % 250 + 1}"
        pod.address = (host, _GHOST_PORTS + self._next % 40_000)
        pod.up = True
        pod.log.append(f"{pod.image}: ghost pod, no container")

    def start(self, pod: Pod) -> None:
        if pod.provider == RUNPOD:
            self.create(pod)  # a new public port with every start
        pod.up = True

    def stop(self, pod: Pod) -> None:
        pod.up = False

    def destroy(self, pod: Pod) -> None:
        pod.up = False

    def set_keys(self, pod: Pod) -> None:
        pass

    def lose_keys(self, pod: Pod) -> None:
        pass

    def snapshot(self, pod: Pod, to: str, login: RegistryLogin | None) -> None:
        pass

    def logs(self, pod: Pod, tail: int) -> list[str]:
        return pod.log[-tail:]

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Made:
    """The container of one pod. Whoever makes, starts, stops or removes it holds the lock; once ended it stays so."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    container: str | None = None
    ended: bool = False


class Containers:
    """Pods as containers of the local engine, named like the lease they were rented under."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        *,
        image: str = "stock",
        engine: Engine | None = None,
        speed: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._cache = settings.cache_dir / "local"
        self._environ = dict(environ)
        self._image = image
        self._speed = speed
        self._engine = engine
        self._made: dict[str, _Made] = {}
        self._pulled: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.api_url = ""
        """Where containers reach the simulator's API; told to them, since no real provider's address would do."""
        self._mark = processes.own_identity()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = find_engine(self._environ, self._cache)
        return self._engine

    def prepare(self, on_progress: Callable[[str], None]) -> None:
        """Find the engine, build the image if need be, remove what a killed simulator left behind."""
        self._engine = self._engine or find_engine(self._environ, self._cache, on_progress=on_progress)
        ensure_image(self.engine, self._image, self._host(), self._cache, self._environ, on_progress)
        for row in self.engine.list_containers(f"label={LABEL}"):
            mark = str(row["labels"].get(LABEL) or "")
            if not _may_live(mark):
                self.engine.remove_container(row["id"])

    def host_address(self) -> str:
        """The address at which containers find this host, "" where the engine's network has none that is ours."""
        return "" if self.engine.rootless else gateway(self.engine)

    def _host(self) -> HostSettings:
        return read_host_settings(self._environ)

    def _entry(self, pod: Pod) -> _Made:
        with self._lock:
            return self._made.setdefault(f"{pod.provider}/{pod.id}", _Made())

    # --- life ---------------------------------------------------------------------------------------------------------

    def create(self, pod: Pod) -> None:
        """In a thread of its own: an engine takes a second or two, and the API answers at once."""
        entry = self._entry(pod)
        entry.lock.acquire()
        threading.Thread(target=self._bring_up, args=(pod, entry), name=f"pod-{pod.id}", daemon=True).start()

    start = create

    def _bring_up(self, pod: Pod, entry: _Made) -> None:
        """Make the pod's container, or start the one that it has. The caller has taken the entry's lock."""
        try:
            if entry.ended or self._closed:
                return
            if entry.container is None:
                self._run(pod, entry)
            else:
                self._start_again(pod, entry.container)
        except PennypodError as exc:
            pod.failure = f"Error response from daemon: {exc.message}"
            pod.log.append(exc.message)
        finally:
            entry.lock.release()

    def _run(self, pod: Pod, entry: _Made) -> None:
        host = self._host()
        image = self._image_of(pod, host)
        if image is None:
            return
        tree = write_tree(host, self._cache, scripts("host.sh", "start.sh"))
        # Simulators of one seed give their pods the same ids, and one engine may serve several of them.
        own = f"pennypod-simulated-{pod.provider}-{pod.id}-{os.getpid()}"
        name = pod.name if parse_lease(pod.name) is not None else own
        failure = ""
        for _attempt in range(_PORT_TRIES):
            if entry.ended:
                return
            port = _free_port()
            args = [*self._arguments(pod, host, port), *run_arguments(host, tree), "--entrypoint", "/bin/sh"]
            start = ["--name", name, image, "-c", self._start_script(pod)]
            done = self.engine.call(*args, *start, timeout_s=_CREATE_S)
            made = container_id(done.stdout)
            if done.rc == 0 and made is not None:
                entry.container = made
                self._start_command(pod, made)
                pod.log.append(f"container started from {image}")
                pod.address = ("127.0.0.1", port)
                pod.up = True
                return
            self._remove_all(pod)  # the engine keeps a container that it could make but not start
            failure = f"Error response from daemon: {error_line(done.stderr)}"
            pod.log.append(failure)
            if "address already in use" in done.stderr:
                continue
            if "already in use" not in done.stderr:
                break
            # A name need not be unique at a provider; here a second pod of the same name gets its id added.
            name = f"{name}-{pod.id}"
        pod.failure = failure

    def _image_of(self, pod: Pod, host: HostSettings) -> str | None:
        """What the container is made of; None when the pod's image cannot be pulled, which the pod then tells."""
        if not is_pulled(pod.image):
            return ensure_image(self.engine, self._image, host, self._cache, self._environ, lambda _text: None)
        pod.pull_failure = pull(self.engine, pod.image, pod.login)
        if pod.pull_failure:
            return None
        with self._lock:
            self._pulled.add(pod.image)
        return pod.image

    def _arguments(self, pod: Pod, host: HostSettings, port: int) -> list[str]:
        env = {name: value for name, value in pod.env.items() if _ENV_NAME.fullmatch(name) and "\n" not in value}
        env |= host.env | self._told(pod, port)
        keys = "" if "key_missing" in pod.faults else "\n".join(key["public_key"] for key in pod.keys)
        env |= {"PENNYPOD_PUBLIC_KEY": keys, "PENNYPOD_LEASE": f"{pod.provider}-{pod.id}"}
        env["PENNYPOD_ENV_NAMES"] = " ".join(sorted(host.env))
        args = ["run", "--detach", "--pull", "never", "--shm-size", "1g", "--label", f"{LABEL}={self._mark}"]
        args += ["--label", f"{LABEL}.pod={self._mark}/{pod.provider}/{pod.id}"]
        args += [part for key, value in env.items() for part in ("-e", f"{key}={value}")]
        return [*args, *self.engine.flags, "-p", f"127.0.0.1:{port}:22"]

    def _start_script(self, pod: Pod) -> str:
        """What PID 1 does before (or instead of) sshd, as the faults and the provider's own rules have it."""
        lines = []
        if "bad_gpu" in pod.faults:
            lines.append(f"f=/usr/local/bin/nvidia-smi; printf %s {shlex.quote(_DEAD_NVIDIA_SMI)} >$f; chmod 755 $f")
        if pod.provider == RUNPOD:
            # The image's own start script of RunPod's images; sshd is PID 1 here, so it has nothing left to do.
            lines.append("printf '#!/bin/sh\\nexec sleep infinity\\n' >/start.sh; chmod 755 /start.sh")
            lines.append("mkdir -p /workspace")
        late = pod.fault_seconds("sshd_late", 20.0)
        if late is not None:
            lines.append(f"sleep {late / (self._speed() or 1.0):.1f}")
        if "no_sshd" in pod.faults or not _has_sshd(pod):
            lines.append("exec sleep infinity")
        lines.append(f"exec /bin/sh {MOUNT}/start.sh")
        return "\n".join(lines)

    def _told(self, pod: Pod, port: int) -> dict[str, str]:
        """The variables the provider itself puts there, with the key that is good for this pod only."""
        if pod.provider == VAST:
            return {
                "CONTAINER_ID": pod.id,
                "CONTAINER_API_KEY": pod.api_key,
                "VAST_CONTAINERLABEL": f"C.{pod.id}",
                "VAST_TCP_PORT_22": str(port),
                "PUBLIC_IPADDR": "127.0.0.1",
                "SSH_PUBLIC_KEY": pod.keys[0]["public_key"] if pod.keys else "",
                "VAST_URL": self.api_url,
            }
        return {
            "RUNPOD_API_BASE_URL": self.api_url,
            "RUNPOD_POD_ID": pod.id,
            "RUNPOD_API_KEY": pod.api_key,
            "RUNPOD_POD_HOSTNAME": f"{pod.id}-64411eb2",
            "RUNPOD_DC_ID": str(pod.details.get("center") or ""),
            "RUNPOD_GPU_COUNT": str(pod.gpus),
            "RUNPOD_CPU_COUNT": "8",
            "RUNPOD_PUBLIC_IP": "127.0.0.1",
            "RUNPOD_TCP_PORT_22": str(port),
        }

    def _start_command(self, pod: Pod, container: str) -> None:
        """Vast runs `onstart` beside sshd; RunPod's start command replaces the image's. Either way it runs, once."""
        if not pod.command:
            return
        words = ["-c", f"({pod.command}\n) >/var/log/onstart.log 2>&1"]
        done = self.engine.call("exec", "--detach", container, "/bin/sh", *words)
        if done.rc != 0:
            pod.log.append(f"start command: {error_line(done.stderr)}")

    def stop(self, pod: Pod) -> None:
        """RunPod wipes a container's disk when it stops, Vast keeps it."""
        entry = self._entry(pod)
        with entry.lock:
            pod.up = False
            if entry.container is None:
                return
            with suppress(PennypodError):
                if pod.provider == RUNPOD:
                    self.engine.remove_container(entry.container)
                    entry.container = None
                else:
                    self._count_traffic(pod, entry.container)
                    self.engine.call("stop", "-t", "1", entry.container)

    def _start_again(self, pod: Pod, container: str) -> None:
        done = self.engine.call("start", container, timeout_s=_CREATE_S)
        if done.rc != 0:
            pod.failure = f"Error response from daemon: {error_line(done.stderr)}"
            return
        self._start_command(pod, container)
        pod.up = True

    def destroy(self, pod: Pod) -> None:
        """A start that is under way ends first, and leaves nothing: not even what it made without telling."""
        entry = self._entry(pod)
        entry.ended = True
        with entry.lock:
            pod.up = False
            container, entry.container = entry.container, None
            with suppress(PennypodError):
                if container is not None:
                    self._count_traffic(pod, container)
                    self.engine.remove_container(container)
            for _attempt in range(_REMOVE_TRIES):
                with suppress(PennypodError):
                    self._remove_all(pod)
                    return

    def _remove_all(self, pod: Pod) -> None:
        """Whatever container bears the pod's label: a `run` that failed or took too long may have made one."""
        for row in self.engine.list_containers(f"label={LABEL}.pod={self._mark}/{pod.provider}/{pod.id}"):
            self.engine.remove_container(row["id"])

    def _count_traffic(self, pod: Pod, container: str) -> None:
        """What went through the container's interfaces as the kernel counts; nothing where that is out of sight."""
        done = self.engine.call("inspect", "--format", "{{.State.Pid}}", container)
        pid = done.stdout.strip()
        if done.rc != 0 or not pid.isdigit() or pid == "0":
            return
        with suppress(OSError):
            counted = received_and_sent(Path(f"/proc/{pid}/net/dev").read_text())
            if counted is not None:
                pod.moved(*counted)

    # --- inside -------------------------------------------------------------------------------------------------------

    def set_keys(self, pod: Pod) -> None:
        """Vast writes the instance's keys into the box; keys that were put there by hand are lost, as in the field."""
        if "key_missing" not in pod.faults:
            self._write_keys(pod, "".join(f"{key['public_key']}\n" for key in pod.keys))

    def lose_keys(self, pod: Pod) -> None:
        """Nobody can log in any more; who is logged in stays."""
        self._write_keys(pod, "")

    def _write_keys(self, pod: Pod, text: str) -> None:
        entry = self._entry(pod)
        with entry.lock:
            if entry.container is not None:
                script = "mkdir -p -m 700 /root/.ssh; umask 077; cat >/root/.ssh/authorized_keys"
                with suppress(PennypodError):
                    self.engine.call("exec", "-i", entry.container, "/bin/sh", "-c", script, stdin=text.encode())

    def snapshot(self, pod: Pod, to: str, login: RegistryLogin | None) -> None:
        """In a thread of its own, as hosts do it: nobody is told how it went."""
        work = (pod, self._entry(pod), to, login)
        threading.Thread(target=self._snapshot, args=work, name=f"snapshot-{pod.id}", daemon=True).start()

    def _snapshot(self, pod: Pod, entry: _Made, to: str, login: RegistryLogin | None) -> None:
        made = f"localhost/pennypod-simulated-snapshot:{pod.id}-{os.getpid()}"
        try:
            with entry.lock:
                if entry.container is None:
                    return
                commit = ["commit", "--quiet", *(["--format", "docker"] if self.engine.kind == "podman" else [])]
                self.engine.check(*commit, entry.container, made, timeout_s=_COMMIT_S)
            repository = parse_repository(to)
            if not is_loopback(repository.host):
                pod.log.append(f"the simulator pushes to registries on this machine only, not to {repository.host}")
                return
            push_image(self.engine, made, repository, "latest", login)
        except PennypodError as exc:
            pod.log.append(f"snapshot: {exc.message}")
        finally:
            with suppress(PennypodError):
                self.engine.call("rmi", made, timeout_s=60)

    def logs(self, pod: Pod, tail: int) -> list[str]:
        entry = self._entry(pod)
        if entry.container is None:
            return pod.log[-tail:]
        done = self.engine.call("logs", "--tail", str(tail), entry.container)
        return (done.stdout + done.stderr).splitlines()[-tail:]

    def close(self) -> None:
        """Remove every container of this simulator, whatever its state, and what it has pulled."""
        self._closed = True
        if self._engine is None:
            return
        for _attempt in range(3):
            with suppress(PennypodError):
                rows = self.engine.list_containers(f"label={LABEL}={self._mark}")
                for row in rows:
                    self.engine.remove_container(row["id"])
                if not rows and not any(entry.lock.locked() for entry in self._made.values()):
                    for image in self._pulled:
                        self.engine.call("rmi", image, timeout_s=60)
                    return
            time.sleep(0.5)


def gateway(engine: Engine) -> str:
    """The address of the engine's default bridge, "" when it tells none. Podman and Docker lay it out differently."""
    done = engine.call("network", "inspect", "podman" if engine.kind == "podman" else "bridge")
    try:
        network = json.loads(done.stdout)[0]
        if "subnets" in network:
            return str(network["subnets"][0]["gateway"])
        if "IPAM" in network:
            return str(network["IPAM"]["Config"][0]["Gateway"])
        (plugin,) = [item for item in network["plugins"] if item.get("type") == "bridge"]  # Podman 3, with CNI
        return str(plugin["ipam"]["ranges"][0][0]["gateway"])
    except (ValueError, LookupError, TypeError):
        return ""


def _has_sshd(pod: Pod) -> bool:
    """Who starts sshd. Vast's ssh types inject it; at RunPod it is the image's or the start command's business."""
    if pod.provider == VAST:
        return bool(pod.details["runtype"] != "args")
    if pod.command:
        return any(word in pod.command for word in _SSHD_WORDS)
    return pod.image.startswith(("runpod/", "docker.io/runpod/"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _may_live(mark: str) -> bool:
    """Whether the simulator that left that mark may still run; the wall clock has no part in it.

    Former versions wrote `<pid>-<time>`, and that time moves with the clock: there the pid alone counts.
    """
    if _IDENTITY.match(mark):
        return processes.is_alive(mark)
    pid = mark.partition("-")[0]
    return pid.isdigit() and Path(f"/proc/{pid}").exists()
