"""Sends an image of the engine to a registry. Floor 1: the engine, and a folder that lives as long as the push.

The login is in a file in that folder, for its owner only, never among a process's arguments. What the registry took is
named by the digest that the engine tells; whether it is really there is for the caller to ask the registry.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from pennypod.errors import TransientError
from pennypod.model.image import RegistryLogin, Repository, is_digest, is_loopback
from pennypod.oci.logins import auth_document
from pennypod.providers.local.engine import Engine, error_line

PUSH_S = 3600.0
_DOCKER_DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})")


def push_image(engine: Engine, reference: str, to: Repository, tag: str, login: RegistryLogin | None) -> str:
    """Send the image under a tag of its own and return the digest it has there. Raises TransientError.

    Without a login, the engine uses those that it knows by itself, from a credential helper, say.
    """
    target = f"{to}:{tag}"
    with tempfile.TemporaryDirectory(prefix="pennypod-push-") as folder:
        config = Path(folder, "config.json")  # podman takes any name, docker only this one
        config.touch(mode=0o600)
        if login is not None:
            config.write_text(auth_document(login), encoding="utf-8")
        push = _with_podman if engine.kind == "podman" else _with_docker
        digest = push(engine, reference, target, Path(folder), login is not None)
    if not is_digest(digest):
        raise TransientError(f"{engine.kind} does not tell under which digest {target} was pushed")
    return digest


def _with_podman(engine: Engine, reference: str, target: str, folder: Path, has_login: bool) -> str:
    told = folder / "digest"
    flags = ["--quiet", "--digestfile", str(told)]
    flags += ["--authfile", str(folder / "config.json")] if has_login else []
    flags += ["--tls-verify=false"] if is_loopback(target.partition("/")[0]) else []
    _check(engine, target, "push", *flags, reference, f"docker://{target}")
    return told.read_text(encoding="ascii").strip() if told.exists() else ""


def _with_docker(engine: Engine, reference: str, target: str, folder: Path, has_login: bool) -> str:
    """Docker pushes by a local name only, which goes again; that a registry is on loopback it sees by itself."""
    config = ["--config", str(folder)] if has_login else []
    _check(engine, target, "tag", reference, target)
    try:
        said = _check(engine, target, *config, "push", target)
    finally:
        engine.call("rmi", target)
    found = _DOCKER_DIGEST.search(said)
    return found[1] if found else ""


def _check(engine: Engine, target: str, *args: str) -> str:
    done = engine.call(*args, timeout_s=PUSH_S)
    if done.rc != 0:
        raise TransientError(f"{engine.kind} could not push {target}: {error_line(done.stderr)}")
    return done.stdout
