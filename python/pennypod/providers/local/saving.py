"""A pod's changes as one new layer on the image that it was started from, without what belongs to the pod alone.

The pod itself is left as it is: its changed files are copied into a build container of its own image, and that is
committed. So the new image has none of the pod's environment, labels or command, and no layer ever held its keys.
The caller holds the `build_lock` for every function here that changes anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pennypod.errors import NoCapacityError, TransientError
from pennypod.providers.base import SavedImage
from pennypod.providers.local.engine import Engine, engine_environment, error_line, read_only_mount
from pennypod.providers.local.image import HERE, MOUNT, OnProgress, build_layer, sweep_leftovers

REPOSITORY = "localhost/pennypod"
DRAFT = "localhost/pennypod-bake"
RUN_LABEL = "pennypod.golden.run"

_SAVE_S = 1800.0
_LOOK_S = 120.0
_CHANGE = re.compile(r"([ACD]) (/.+)")
# What is the pod's, the engine's or a moment's, and never the image's. Everything below a folder goes with it.
_NEVER = (
    *("/dev", "/proc", "/sys", "/run", "/tmp", "/mnt", "/media"),  # noqa: S108 - a place on a pod
    *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab", "/etc/machine-id"),
    *("/etc/apt", "/etc/pip.conf", "/etc/netrc"),
    *("/var/tmp", "/var/log", "/var/run", "/var/spool"),  # noqa: S108
    *("/var/cache/apt", "/var/cache/ldconfig", "/var/lib/apt"),
)
# Whatever is hidden in root's home is keys, logins, history or caches.
_NEVER_NAMED = re.compile(r"^/root/\.|/(ssh_host_[^/]*|authorized_keys\d?|pennypod_[^/]*|\.[^/]*_history)(/|$)")
_CACHE = "cache"  # base weights, in our folder on the pod: the one thing in there that the next pod wants

_UNPACK = f"""\
[ ! -s {MOUNT}/deleted ] || xargs -0 rm -rf -- <{MOUNT}/deleted
tar -x -p -f {MOUNT}/layer.tar -C / --numeric-owner
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """What a new layer takes over from a pod: paths to copy as they are, and paths of its image to delete."""

    taken: tuple[str, ...]
    deleted: tuple[str, ...]


def parse_changes(text: str) -> list[tuple[str, str]]:
    """(A|C|D, path) of an engine's `diff`, which podman and docker print alike."""
    return [(found[1], found[2]) for line in text.splitlines() if (found := _CHANGE.fullmatch(line))]


def layer_of(changes: Iterable[tuple[str, str]], lent: Iterable[str], pod_home: str) -> Layer:
    """What of a pod's changes an image may hold. `lent` are the files that the host lays over every pod."""
    lent = frozenset(lent)
    wanted = [(kind, path) for kind, path in changes if path not in lent and not is_pods_own(path, pod_home)]
    deleted = [path for kind, path in wanted if kind == "D"]
    taken = {path for kind, path in wanted if kind != "D"}
    # A folder that was removed and made anew is told as deleted only, with what is in it as added.
    taken |= {path for path in deleted if any(other.startswith(f"{path}/") for other in taken)}
    return Layer(tuple(sorted(taken)), tuple(sorted(deleted)))


def is_pods_own(path: str, pod_home: str) -> bool:
    """Whether a path on a pod is no part of an image that is made of it."""
    if _below(path, pod_home):
        return path != pod_home and not _below(path, f"{pod_home}/{_CACHE}")
    return any(_below(path, folder) for folder in _NEVER) or _NEVER_NAMED.search(path) is not None


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


# --- saving ---------------------------------------------------------------------------------------------------


def save_pod(
    engine: Engine,
    container: str,
    reference: str,
    labels: Mapping[str, str],
    lent: Iterable[str],
    pod_home: str,
    on_progress: OnProgress,
) -> SavedImage:
    """Commit the pod's changes as `reference`. Raises TransientError or NoCapacityError, leaving nothing."""
    parent = engine.check("inspect", "--format", "{{.Image}}", container).strip().removeprefix("sha256:")
    changed = engine.check("diff", container, timeout_s=_LOOK_S)
    layer = layer_of(parse_changes(changed), lent, pod_home)
    work = Path(tempfile.mkdtemp(prefix="pennypod-image-"))  # swept when we are killed, as those of other builds are
    try:
        work.chmod(0o755)
        on_progress(f"copying {len(layer.taken)} changed files of the pod")
        (work / "deleted").write_bytes(_list(layer.deleted))
        (work / "recipe.sh").write_text(_UNPACK, encoding="utf-8")
        shutil.copy(HERE / "build.sh", work)
        _pack(engine, container, layer.taken, work / "layer.tar")
        changes = _changes(inspect_image(engine, parent), labels)
        mounts = read_only_mount(str(work), MOUNT)
        build_layer(
            engine, reference.rpartition(":")[2], parent, reference, mounts, changes, on_progress, limit_s=_SAVE_S
        )
    except OSError as exc:
        raise NoCapacityError(f"cannot write below {work} ({exc.strerror}): free some room or set TMPDIR") from exc
    finally:
        shutil.rmtree(work, ignore_errors=True)
    saved, base = inspect_image(engine, reference), inspect_image(engine, parent)
    return SavedImage(
        reference=reference,
        image_id=_id(saved),
        digest=_digest(saved),
        bytes=int(saved.get("Size") or 0),
        base_digest=_digest(base),
        layer_bytes=max(0, int(saved.get("Size") or 0) - int(base.get("Size") or 0)),
    )


def _list(paths: Sequence[str]) -> bytes:
    return b"".join(path.encode() + b"\0" for path in paths)


def _pack(engine: Engine, container: str, paths: Sequence[str], target: Path) -> None:
    """The files as the pod has them. Straight into a file: a layer may be gigabytes."""
    argv = [engine.path, "exec", "-i", container, "tar", "-c", "--numeric-owner", "--no-recursion", "-C", "/"]
    argv += ["--null", "--verbatim-files-from", "-T", "-", "-f", "-"]
    names = _list([path.lstrip("/") for path in paths])
    with target.open("wb") as file:
        try:
            done = subprocess.run(
                argv,
                input=names,
                stdout=file,
                stderr=subprocess.PIPE,
                timeout=_SAVE_S,
                env=engine_environment(os.environ),
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as exc:
            raise TransientError(f"the pod's files could not be copied in {_SAVE_S:.0f} s") from exc
    if done.returncode != 0:
        raise TransientError(f"the pod's files could not be copied: {error_line(done.stderr.decode(errors='replace'))}")


def _changes(base: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """What the image is to start as its base does: the build container's own command is no part of it."""
    config = base.get("Config") or {}
    lines = [f"CMD {json.dumps(config.get('Cmd') or [])}", f"ENTRYPOINT {json.dumps(config.get('Entrypoint') or [])}"]
    lines += [f"LABEL {name}={json.dumps(value)}" for name, value in labels.items()]
    return [part for line in lines for part in ("--change", line)]


# --- what is there --------------------------------------------------------------------------------------------


def inspect_image(engine: Engine, reference: str) -> dict[str, Any]:
    """The engine's own description of an image that is there."""
    shown = json.loads(engine.check("image", "inspect", reference))
    return dict(shown[0])


def _id(image: Mapping[str, Any]) -> str:
    return _sha256(str(image.get("Id") or ""))


def _sha256(text: str) -> str:
    return "sha256:" + text.removeprefix("sha256:")


def _digest(image: Mapping[str, Any]) -> str:
    """The manifest's digest; docker has one only for what was pushed or pulled, and its id says the content as well."""
    return str(image.get("Digest") or "") or _id(image)


def tags(engine: Engine, repository: str = REPOSITORY) -> dict[str, str]:
    """The tags that images of a repository have here, each with its image's id."""
    listed = engine.check("images", "--no-trunc", "--format", "{{.Repository}} {{.Tag}} {{.ID}}", repository)
    rows = (line.split() for line in listed.splitlines())
    return {row[1]: _sha256(row[2]) for row in rows if len(row) == 3 and row[0] == repository and row[1] != "<none>"}


def settle(engine: Engine) -> None:
    """Remove what builds and bakes that were killed have left. With the lock held, nothing of this is in use."""
    sweep_leftovers(engine)
    for tag in tags(engine, DRAFT):
        remove(engine, f"{DRAFT}:{tag}")


def remove(engine: Engine, reference: str) -> None:
    """Delete an image's name, and the image with its last one. One that is not there is fine; one in use raises."""
    if engine.image_id(reference) is None:
        return
    engine.check("rmi", reference, timeout_s=120)


def discard_of(engine: Engine, run: str) -> None:
    """Delete whatever image was made of a run's pod, finished or not; never by force, which would end pods."""
    ours = ("images", "--all", "--no-trunc", "--filter", f"label={RUN_LABEL}={run}", "--format")
    for line in engine.check(*ours, "{{.ID}} {{.Repository}}:{{.Tag}}").splitlines():
        image, _, reference = line.partition(" ")
        engine.call("rmi", image if "<none>" in reference else reference, timeout_s=120)
    left = engine.check(*ours, "{{.ID}}").split()
    if left:
        raise TransientError(f"{engine.kind} keeps an image of run {run}: {left[0]}")


def in_container(engine: Engine, container: str, argv: Sequence[str]) -> str:
    """The stdout of a command in the pod, empty when it fails there: the image lacks the program, say."""
    done = engine.call("exec", container, *argv, timeout_s=_LOOK_S)
    return done.stdout if done.rc == 0 else ""
