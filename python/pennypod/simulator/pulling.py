"""Pulls of images: as a provider's machine makes them, with the login that its pod was ordered with and no other.

Only an image in a registry on this machine is really pulled, by the engine; what a daemon says of one that it cannot
pull is told in the daemon's words.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pennypod.errors import InputError
from pennypod.model.image import RegistryLogin, is_loopback, registry_of
from pennypod.oci.logins import auth_document
from pennypod.providers.local.engine import Engine, error_line

PULL_S = 1800.0
_NO_LOGINS = '{"auths": {}}'
_DAEMON = "Error response from daemon:"


def is_pulled(image: str) -> bool:
    """Whether the image is in a registry on this machine, and not one that the simulator's own image stands for."""
    return is_loopback(registry_of(image))


def login_of_vast(text: str, image: str) -> RegistryLogin | None:
    """From `image_login`, words of `docker login` parted at blanks; None when it is for another registry."""
    words = text.split()
    if len(words) != 5 or words[0] != "-u" or words[2] != "-p":
        return None
    login = RegistryLogin(words[4], words[1], words[3])
    return login if login.registry == registry_of(image) else None


def path_of(image: str) -> str:
    """The repository as a pull names it: without host, tag and digest."""
    path = image.partition("@")[0]
    host, slash, rest = path.partition("/")
    path = rest if slash and registry_of(image) == host else path
    head, _, last = path.rpartition("/")
    return f"{head}/{last.partition(':')[0]}".lstrip("/")


def refused(image: str, login: RegistryLogin | None) -> str:
    """What a daemon says when a registry does not let it in."""
    path, reference = path_of(image), image.partition("@")[2] or "latest"
    where = f'Head "https://{registry_of(image)}/v2/{path}/manifests/{reference}"'
    return f"{_DAEMON} {where}: {'unauthorized: authentication required' if login else 'no basic auth credentials'}"


def not_found(image: str) -> str:
    return f"{_DAEMON} manifest for {image} not found: manifest unknown"


def private_registries(market: Mapping[str, Any]) -> dict[str, RegistryLogin]:
    """The market file's `registries`, each with the one login that it lets in. Raises InputError."""
    try:
        given = dict(market.get("registries") or {}).items()
        return {str(host): RegistryLogin(str(host), str(who["user"]), str(who["password"])) for host, who in given}
    except (KeyError, TypeError, ValueError) as exc:
        raise InputError("market file: registries holds user and password by host") from exc


def pull(engine: Engine, image: str, login: RegistryLogin | None) -> str:
    """Bring an image to the engine; returns what went wrong, "" when it is there. No login of this machine is used."""
    with tempfile.TemporaryDirectory(prefix="pennypod-pull-") as folder:
        config = Path(folder, "config.json")
        config.touch(mode=0o600)
        config.write_text(auth_document(login) if login else _NO_LOGINS, encoding="utf-8")
        if engine.kind == "podman":
            flags = ["pull", "--quiet", "--authfile", str(config), "--tls-verify=false"]
        else:
            flags = ["--config", folder, "pull", "--quiet"]
        done = engine.call(*flags, image, timeout_s=PULL_S)
    if done.rc == 0:
        return ""
    said = done.stderr.lower()
    if "unauthorized" in said or "authentication required" in said or "no basic auth" in said:
        return refused(image, login)
    return not_found(image) if "manifest unknown" in said else f"{_DAEMON} {error_line(done.stderr)}"
