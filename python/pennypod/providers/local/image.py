"""Pod images: a base system, the stock image on top of it, and variants on top of that; each built once, on demand.

An image's tag is the hash of its recipe and of everything below it, so a changed recipe is a new image and an unchanged
one is never built twice. A build that is cut off leaves nothing: the build container lives only as long as our pipe to
it, and a tag is set only on a finished image.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import secrets
import selectors
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pennypod.errors import InvalidError, NoCapacityError, TransientError
from pennypod.providers.local.engine import Engine, engine_environment, error_line, read_only_mount
from pennypod.providers.local.hostsettings import HostSettings, write_tree
from pennypod.settings import disk_is_full

OnProgress = Callable[[str], None]
"""Told what happens, at least every two seconds while something is being built; it may raise to stop the build."""

HERE = Path(__file__).parent
MOUNT = "/run/pennypod-host"
BUILD_NAME = "build-pennypod-"
"""How build containers are called: not like a pod, since nothing here bills and no sweep may touch it."""
REGISTRY_BASE = "docker.io/library/debian:bookworm-slim"
FALLBACK_SUITE = "bookworm"
PACKAGES = ("openssh-server", "python3", "python3-pip", "ca-certificates", "tmux", "tar", "procps")

PULL_S = 90.0
BOOTSTRAP_S = 900.0
STALL_S = 600.0
_NO_HOST_KEYS = 'rm -f "$1"/etc/ssh/ssh_host_*'
_TICK_S = 1.0
_KEPT_IMAGES = 3


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one image adds to its parent. `instead` are Python packages for where the Debian ones cannot be had."""

    name: str
    parent: str | None
    packages: tuple[str, ...]
    requirements: tuple[str, ...]
    limit_s: float
    instead: tuple[str, ...] = ()
    script: Path = HERE / "recipe.sh"

    def text(self) -> str:
        told = {"PACKAGES": self.packages, "REQUIREMENTS": self.requirements, "INSTEAD": self.instead}
        lines = [f"export PENNYPOD_{name}={shlex.quote(' '.join(words))}" for name, words in told.items()]
        return "\n".join(lines) + "\n" + self.script.read_text(encoding="utf-8")


RECIPES: dict[str, Recipe] = {
    # What a rented machine's image typically has, with its typical gaps, on purpose: numpy is 2.x, cv2 is there without
    # the libraries it loads, no tmux server runs, and there is no rsync.
    "stock": Recipe(
        name="stock",
        parent=None,
        packages=PACKAGES,
        requirements=("numpy>=2,<3", "opencv-python>=4.11,<4.12", "pillow>=10"),
        limit_s=1800,
    ),
    # Debian's own torch for CPUs is small and built against numpy 1, like the torch of many an old image.
    "torch": Recipe(
        name="torch",
        parent="stock",
        packages=("python3-torch", "python3-torchvision"),
        requirements=("ultralytics>=8.3,<9", "opencv-python>=4.11,<4.12"),
        instead=("torch", "torchvision"),
        limit_s=5400,
    ),
}


def image_reference(name: str) -> str:
    """The full name of one of our images, with the hash of all that goes into it."""
    recipe = RECIPES[name]
    parts = [platform.machine(), recipe.text(), (HERE / "host.sh").read_text(encoding="utf-8")]
    parts += [image_reference(recipe.parent)] if recipe.parent else [REGISTRY_BASE, _NO_HOST_KEYS]
    return f"localhost/pennypod-{name}:{_short_hash(*parts)}"


def _short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def ensure_image(
    engine: Engine,
    wanted: str,
    host: HostSettings,
    cache_dir: Path,
    environ: Mapping[str, str],
    on_progress: OnProgress,
) -> str:
    """The reference of an image that is there: one of ours, built if need be, or one the engine already has."""
    wanted = wanted.strip() or "stock"
    if wanted not in RECIPES:
        if engine.image_id(wanted) is None:
            names = ", ".join(RECIPES)
            raise InvalidError(f"{engine.kind} has no image {wanted!r}: use one of {names}, or pull or build it first")
        return wanted
    reference = image_reference(wanted)
    if engine.image_id(reference) is not None:
        return reference
    with build_lock(on_progress):
        if engine.image_id(reference) is None:
            sweep_leftovers(engine)
            _build(engine, RECIPES[wanted], host, cache_dir, environ, on_progress)
    return reference


def _build(
    engine: Engine,
    recipe: Recipe,
    host: HostSettings,
    cache_dir: Path,
    environ: Mapping[str, str],
    on_progress: OnProgress,
) -> None:
    began = time.monotonic()
    if recipe.parent is None:
        parent = _base(engine, host, environ, on_progress)
    else:
        parent = image_reference(recipe.parent)
        if engine.image_id(parent) is None:
            _build(engine, RECIPES[recipe.parent], host, cache_dir, environ, on_progress)
    _run_recipe(engine, recipe, parent, host, cache_dir, on_progress)
    _forget_old_images(engine, recipe.name)
    on_progress(f"image {recipe.name} is ready after {time.monotonic() - began:.0f} s; it is kept for the next pods")


def _forget_old_images(engine: Engine, name: str) -> None:
    """Recipes change and images are big: of each, the three newest stay. One in use is left alone by the engine."""
    with suppress(TransientError):
        listed = engine.check("images", "--format", "{{.Repository}}:{{.Tag}}", f"localhost/pennypod-{name}")
        for reference in listed.split()[_KEPT_IMAGES:]:
            engine.call("rmi", reference, timeout_s=60)


# --- one build at a time ---------------------------------------------------------------------------------------------


@contextmanager
def build_lock(on_progress: OnProgress) -> Iterator[None]:
    """One build at a time for this user, whatever their PENNYPOD_HOME, since the engine's images are shared."""
    folder = Path(tempfile.gettempdir()) / f"pennypod-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise InvalidError(f"{folder} belongs to somebody else: remove it or set TMPDIR")
        file = (folder / "image.lock").open("w")
    except OSError as exc:
        advice = "free some room on its disk" if disk_is_full(exc) else "set TMPDIR to a folder you own"
        raise InvalidError(f"cannot use {folder} ({exc.strerror}): {advice}") from exc
    with file:
        waited = 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited % 2 < 0.5:
                    on_progress("waiting for another run to finish building the pod image")
                time.sleep(0.5)
                waited += 0.5
        yield


def sweep_leftovers(engine: Engine) -> None:
    """Remove what a build left that was killed: we hold the lock, so nothing of this is in use."""
    for row in engine.list_containers(f"name={BUILD_NAME}"):
        if row["name"].startswith(BUILD_NAME):
            engine.remove_container(row["id"])
    for folder in Path(tempfile.gettempdir()).glob("pennypod-image-*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                _remove_folder(engine, folder)


def _remove_folder(engine: Engine, folder: Path) -> None:
    # Never into a file system that was mounted below: it may be the host's own. shutil.rmtree does not look.
    remove = ["rm", "-rf", "--one-file-system", str(folder)]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(remove, capture_output=True, timeout=120)
    if folder.exists() and engine.kind == "podman" and engine.rootless:
        # Made as "root" of a user namespace: only from inside one can it be removed.
        engine.call("unshare", *remove, timeout_s=120)


# --- the base system --------------------------------------------------------------------------------------------


def _base(engine: Engine, host: HostSettings, environ: Mapping[str, str], on_progress: OnProgress) -> str:
    """A plain Debian: the registry's image when a registry answers, else one made from the distribution's packages."""
    if engine.image_id(REGISTRY_BASE) is not None:
        return REGISTRY_BASE
    made = f"localhost/pennypod-base:{_short_hash(platform.machine(), host.release, _NO_HOST_KEYS, *PACKAGES)}"
    if engine.image_id(made) is not None:
        return made
    why = "no image registry answers"
    if _registry_answers(environ):
        on_progress(f"pulling {REGISTRY_BASE}")
        try:
            pulled = _watched(
                [engine.path, "pull", REGISTRY_BASE],
                "pulling the base image",
                on_progress,
                limit_s=PULL_S,
                stall_s=PULL_S,
            )
            if pulled.rc == 0 and engine.image_id(REGISTRY_BASE) is not None:
                return REGISTRY_BASE
            why = f"the registry gave no image ({error_line(pulled.tail)})"
        except TransientError as exc:
            why = exc.message
    if shutil.which("mmdebstrap") is None:
        raise InvalidError(
            f"{why} and mmdebstrap is not installed, so no pod image can be made: install mmdebstrap (Debian) or"
            f" load {REGISTRY_BASE} into {engine.kind}"
        )
    on_progress(f"{why}: building the pod image from Debian packages")
    _bootstrap(engine, host, made, on_progress)
    return made


def _registry_answers(environ: Mapping[str, str]) -> bool:
    """Whether it is worth asking: a name that does not resolve or a silent port is known in three seconds."""
    if any(environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return True
    try:
        with socket.create_connection(("registry-1.docker.io", 443), timeout=3):
            return True
    except OSError:
        return False


def _bootstrap(engine: Engine, host: HostSettings, reference: str, on_progress: OnProgress) -> None:
    work = Path(tempfile.mkdtemp(prefix="pennypod-image-"))
    try:
        # apt drops its rights while it downloads and must be able to walk in.
        work.chmod(0o755)
        suite, mirrors = FALLBACK_SUITE, list[str]()
        for number, (path, content) in enumerate(sorted(host.apt_files.items())):
            if path.startswith("/etc/apt/sources.list"):
                suite = host.release.partition(" ")[2]
                file = work / f"{number}{Path(path).suffix}"
                file.write_bytes(content)
                mirrors.append(str(file))
        options = work / "apt.conf"
        options.write_text(host.apt_options, encoding="utf-8")
        tar = work / "base.tar"
        argv = ["mmdebstrap", "--variant=minbase", "--format=tar", f"--include={','.join(PACKAGES)}"]
        argv += [f"--aptopt={options}"] if host.apt_options else []
        for tree in ("man", "doc", "info", "locale"):
            argv.append(f"--dpkgopt=path-exclude=/usr/share/{tree}/*")
        # A half-made system is thrown away, so nothing has to be on disk before the next step.
        argv.append("--dpkgopt=force-unsafe-io")
        # Made by the installation; removed only later they would stay in this layer.
        argv.append(f"--customize-hook={_NO_HOST_KEYS}")
        argv += [suite, str(tar), *mirrors]
        made = _watched(
            lifeline(work, argv), "Debian packages", on_progress, limit_s=BOOTSTRAP_S, env={"TMPDIR": str(work)}
        )
        if made.rc != 0:
            _raise_build_error("Debian packages", made)
        on_progress("importing the base system")
        engine.check("import", str(tar), reference, timeout_s=300)
    except OSError as exc:
        raise NoCapacityError(f"cannot write below {work} ({exc.strerror}): free some room or set TMPDIR") from exc
    finally:
        _remove_folder(engine, work)


def lifeline(work: Path, argv: Sequence[str]) -> list[str]:
    """The command so that it ends with us, however we end, and takes its processes, mounts and files along."""
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    wrapper = ["sh", str(HERE / "lifeline.sh"), str(work)]
    if _works([*apart, "true"]):
        # Mounts and processes of its own: nothing of them outlives the one that made them.
        return [*wrapper, "KILL", *apart, *argv]
    return [*wrapper, "TERM", *argv]


def _works(argv: Sequence[str]) -> bool:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


# --- running a recipe -------------------------------------------------------------------------------------------


def run_arguments(host: HostSettings, tree: Path) -> list[str]:
    """The mounts every container of ours gets: the host's settings, and its wheel folders at their own paths."""
    args = read_only_mount(str(tree), MOUNT)
    for folder in host.mounts:
        args += read_only_mount(folder, folder)
    return args


def scripts(*names: str) -> dict[str, str]:
    return {name: (HERE / name).read_text(encoding="utf-8") for name in names}


def _run_recipe(
    engine: Engine, recipe: Recipe, parent: str, host: HostSettings, cache_dir: Path, on_progress: OnProgress
) -> None:
    # Variables go into the script, not into the container's environment, which a commit would keep.
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(host.env.items()))
    tree = write_tree(host, cache_dir, scripts("host.sh", "build.sh") | {"recipe.sh": exports + recipe.text()})
    changes = ["--change", 'CMD ["/bin/sh"]', "--change", "ENTRYPOINT []"]
    on_progress(f"building image {recipe.name}: {', '.join(recipe.packages + recipe.requirements)}")
    build_layer(
        engine,
        recipe.name,
        parent,
        image_reference(recipe.name),
        run_arguments(host, tree),
        changes,
        on_progress,
        limit_s=recipe.limit_s,
    )


def build_layer(
    engine: Engine,
    name: str,
    parent: str,
    reference: str,
    mounts: Sequence[str],
    changes: Sequence[str],
    on_progress: OnProgress,
    *,
    limit_s: float,
) -> None:
    """Run the mounted build.sh, which runs recipe.sh, in a container of `parent` and commit that as `reference`.

    The container lives no longer than this call. The caller holds the `build_lock`.
    """
    container = f"{BUILD_NAME}{name}-{secrets.token_hex(4)}"
    argv = [engine.path, "run", "--rm", "-i", "--pull", "never", "--name", container]
    argv += [*engine.flags, *mounts, "--entrypoint", "/bin/sh", parent, f"{MOUNT}/build.sh"]
    what = f"image {name}"

    def commit() -> None:
        on_progress(f"saving {what}")
        engine.check("commit", *changes, container, reference, timeout_s=900)

    try:
        done = _watched(argv, what, on_progress, limit_s=limit_s, at_exit_mark=commit)
        if done.marked != 0:
            _raise_build_error(what, done)
    finally:
        with suppress(TransientError):
            engine.remove_container(container)


def _raise_build_error(what: str, done: _Watched) -> None:
    lines = [line for line in done.tail.splitlines() if line.strip()]
    telling = [line for line in lines if line.lstrip().lower().startswith(("error", "e:"))]
    text = (telling or lines or ["no output"])[-1].strip()[:300]
    if "no space left" in done.tail.lower():
        raise NoCapacityError(f"no room left while building the pod image ({what}): free some disk", log=lines[-20:])
    raise TransientError(f"the pod image could not be built ({what}): {text}", log=lines[-20:])


@dataclass(frozen=True, slots=True)
class _Watched:
    """How a watched command ended; `marked` is the exit code its exit line told, None when there was none."""

    rc: int
    tail: str
    marked: int | None


_MARK = b"pennypod-build-exit "


def _watched(
    argv: Sequence[str],
    what: str,
    on_progress: OnProgress,
    *,
    limit_s: float,
    stall_s: float = STALL_S,
    env: Mapping[str, str] | None = None,
    at_exit_mark: Callable[[], None] | None = None,
) -> _Watched:
    """Run a long command with its last output line shown every two seconds; it never outlives this call.

    With `at_exit_mark`, that is called when the command says its work succeeded, before its stdin is closed.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=engine_environment(os.environ) | dict(env or {}),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    tail, marked, line = b"", None, ""
    began = heard = told = time.monotonic()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                ready = selector.select(_TICK_S)
                now = time.monotonic()
                if ready:
                    chunk = os.read(process.stdout.fileno(), 65536)
                    if not chunk:
                        break
                    heard = now
                    tail = (tail + chunk)[-65536:]
                    shown = [text for text in tail.decode(errors="replace").splitlines() if text.strip()]
                    line = shown[-1].strip()[:100] if shown else ""
                    found = tail.rpartition(_MARK)
                    if at_exit_mark is not None and marked is None and found[1] and b"\n" in found[2]:
                        marked = int(found[2].split()[0])
                        if marked == 0:
                            at_exit_mark()
                        process.stdin.close()
                if now - told >= 2 and marked is None:
                    told = now
                    on_progress(f"{what}, {now - began:.0f} s: {line}" if line else f"{what}, {now - began:.0f} s")
                if now - began > limit_s or now - heard > stall_s:
                    raise TransientError(f"{what}: given up after {now - began:.0f} s", last=line)
        return _Watched(process.wait(timeout=30), tail.decode(errors="replace"), marked)
    except subprocess.TimeoutExpired as exc:
        raise TransientError(f"{what}: did not end") from exc
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe, ask, then insist."""
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    for stop, patience in ((process.terminate, 5.0), (process.kill, 5.0)):
        if process.poll() is not None:
            break
        stop()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
    if process.stdout is not None:
        process.stdout.close()
