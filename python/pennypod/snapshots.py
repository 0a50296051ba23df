"""Golden images of rented pods: sealed, committed and pushed by their host, then rid of what it put in. Floor 2: the
pod over SSH, the provider's snapshot call, the registry, the manifests in the state folder.

A host commits the container as it is, with the environment that its provider gave it, and pushes that with the login it
is handed: asynchronously, and no call tells how far it is. So the registry is asked until it has an image whose
environment names this very pod. Its layers are kept, since `seal` has left nothing in them; its configuration is not: a
new one of the same layers, without the pod's environment, start command and history, is written beside it and is what
runs start from. An image counts from its manifest in the state folder on, which is written last.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pennypod import fuse
from pennypod.clock import Clock
from pennypod.errors import InvalidError, SshError, TransientError
from pennypod.golden import (
    Bake,
    Golden,
    GoldenStore,
    OnProgress,
    begun,
    installed,
    labels_of,
    mark_begun,
    raise_if_cut_off,
)
from pennypod.ledger import Ledger
from pennypod.model.image import RegistryLogin, Repository
from pennypod.providers.base import TakesSnapshots
from pennypod.settings import Settings
from pennypod.ssh import Ssh

if TYPE_CHECKING:
    from pennypod.oci.client import Manifest, Registry  # its HTTP library costs a tenth of a second

PATIENCE_S = 3600.0  # the provider's own client speaks of five to ten minutes, and of more
_LOOK_S = 10.0
_TELL_S = 30.0
_SEAL = Path(__file__).parent / "onpod" / "seal.py"
_SEAL_S = 300.0
_ASK_S = 120.0
TAG = "latest"  # the call knows no tag, so the host pushes the one that is meant without
# Whose values belong to an image and not to one pod. Everything else that a container has was given to it.
_OF_AN_IMAGE = re.compile(
    r"PATH|LANG|LC_\w+|LANGUAGE|TZ|DEBIAN_FRONTEND|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|PYTHON\w*|CUDA\w*|NV_\w+|NVIDIA_\w+"
    r"|NVARCH|NCCL_\w+|CONDA_\w+|VIRTUAL_ENV|UV_\w+|PIP_(?:NO_|ROOT_|BREAK_)\w+"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an image goes to, who pushes it, and the registry to ask."""

    repository: Repository
    login: RegistryLogin
    registry: Registry


class Snapshots:
    """Bakes images of rented pods."""

    def __init__(self, settings: Settings, provider: TakesSnapshots, clock: Clock) -> None:
        self._settings, self._provider, self._clock = settings, provider, clock
        self._store = GoldenStore(settings.home)

    def bake(self, bake: Bake, ssh: Ssh, place: Place, ledger: Ledger, on_progress: OnProgress) -> Golden:
        """Make an image of the pod and give it its name. The pod lets nobody in afterwards.

        Raises FencedError when the run was taken away, TransientError when no image came in time; then none counts.
        """
        controller = ledger.run(bake.run).controller
        mark_begun(self._settings, bake)
        before = _digest(place.registry.manifest(place.repository, TAG))
        on_progress("taking keys, logins, caches and logs off the pod: nobody can log in from here on")
        there = installed(lambda argv: _said(ssh, argv), bake.python)
        self._seal(bake, ssh)
        self._hold(ledger.run(bake.run).deadline, ssh)
        on_progress(f"the host commits the pod and pushes it to {place.repository}")
        self._provider.take_snapshot(bake.pod_id, place.repository, place.login)
        raw, config = self._pushed(bake, place, before, lambda: ledger.raise_if_fenced(bake.run), on_progress)
        name, version = self._store.take_name(bake.recipe.job)
        golden = _cleaned(begun(bake, name, version, there, self._clock.now()), raw, config, place)
        with self._store.naming():
            raise_if_cut_off(ledger, bake.run, controller)
            self._store.write(golden)
        return golden

    def _seal(self, bake: Bake, ssh: Ssh) -> None:
        done = ssh.run_script(_SEAL, [bake.pod_home], _SEAL_S)
        try:
            left = list(json.loads(done.stdout)["left"])
        except (ValueError, KeyError, TypeError) as exc:
            raise TransientError(
                f"the pod could not be sealed (exit status {done.rc}): no image is made of it"
            ) from exc
        if left:
            raise TransientError(f"the pod could not be sealed, {left[0]} is left on it: no image is made of it")

    def _hold(self, deadline: float | None, ssh: Ssh) -> None:
        """Nobody can renew the lease of the pod's fuse any more: let it last until the run's deadline. The connection
        that stands carries that; a pod without a fuse has no lease."""
        if deadline is not None:
            with suppress(SshError):
                fuse.renew(ssh, max(0.0, deadline + fuse.AFTER_DEADLINE_S - self._clock.now()))

    def _pushed(
        self, bake: Bake, place: Place, before: str, should_stop: Callable[[], None], on_progress: OnProgress
    ) -> tuple[Manifest, dict[str, Any]]:
        """Wait for the image of this very pod, and its configuration: of what the registry shows meanwhile, somebody
        else's does not count."""
        began = told = self._clock.now()
        passed = before
        while True:
            should_stop()
            found = self._shown(place)
            if found is not None and found.digest != passed:
                passed = found.digest
                config = _config_of(found, place)
                if _is_of(bake.pod_id, config):
                    return found, config
            now = self._clock.now()
            if now - began > PATIENCE_S:
                raise TransientError(
                    f"{place.repository} has no image of the pod after {PATIENCE_S / 60:.0f} min: the host did not push"
                )
            if now - told > _TELL_S or told == began:
                told = now
                on_progress(f"waiting for the host's push to {place.repository}, {now - began:.0f} s")
            self._clock.sleep(_LOOK_S)

    def _shown(self, place: Place) -> Manifest | None:
        try:
            return place.registry.manifest(place.repository, TAG)
        except TransientError:
            return None  # asked again


def _said(ssh: Ssh, argv: Sequence[str]) -> str:
    """The stdout of a command on the pod, empty when it fails there."""
    done = ssh.run(shlex.join(argv), timeout_s=_ASK_S)
    return done.stdout.decode(errors="replace") if done.rc == 0 else ""


def _cleaned(golden: Golden, raw: Manifest, config: Mapping[str, Any], place: Place) -> Golden:
    """Write an image of the same layers that is nobody's pod; the tag that the host pushed to names it, too."""
    manifest = json.loads(raw.content)
    clean = json.dumps(cleaned(config, labels_of(golden)), sort_keys=True).encode()
    digest = place.registry.put_blob(place.repository, clean)
    manifest["config"] = {**manifest["config"], "digest": digest, "size": len(clean)}
    content = json.dumps(manifest).encode()
    made = place.registry.put_manifest(place.repository, golden.tag, content, raw.media_type)
    place.registry.put_manifest(place.repository, TAG, content, raw.media_type)
    if not place.registry.has(place.repository, made):
        raise TransientError(f"{place.repository.host} does not have {golden.name} after it was written")
    at = place.repository.at(made)
    sizes = [int(layer.get("size") or 0) for layer in manifest["layers"]]
    return replace(
        golden, reference=at, remote=at, digest=made, image_id=digest, bytes=sum(sizes), layer_bytes=sizes[-1]
    )


def cleaned(config: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """An image's configuration without what one container had: environment, command, names, history of commands."""
    inner = dict(config.get("config") or {})
    env = [item for item in inner.get("Env") or [] if _OF_AN_IMAGE.fullmatch(item.partition("=")[0])]
    kept = {name: inner[name] for name in ("User", "WorkingDir", "Shell", "StopSignal") if inner.get(name)}
    history = [
        {name: value for name, value in entry.items() if name in ("created", "empty_layer")}
        for entry in config.get("history") or []
    ]
    outer = ("architecture", "variant", "os", "os.version", "os.features", "created", "rootfs")
    return {
        **{name: config[name] for name in outer if name in config},
        "config": {**kept, "Env": env, "Cmd": ["/bin/sh"], "Labels": dict(labels)},
        "history": history,
    }


def _config_of(found: Manifest, place: Place) -> dict[str, Any]:
    try:
        manifest = json.loads(found.content)
        config = json.loads(place.registry.blob(place.repository, manifest["config"]["digest"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise InvalidError(f"{place.repository}:{TAG} is no image of one system: use a repository of its own") from exc
    if not isinstance(config, dict):
        raise InvalidError(f"{place.repository}:{TAG} has no configuration")
    return config


def _is_of(pod_id: str, config: Mapping[str, Any]) -> bool:
    """By the variables that Vast gives each container."""
    env = (config.get("config") or {}).get("Env") or []
    return f"CONTAINER_ID={pod_id}" in env or f"VAST_CONTAINERLABEL=C.{pod_id}" in env


def _digest(manifest: Manifest | None) -> str:
    return manifest.digest if manifest is not None else ""
