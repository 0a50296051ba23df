"""Logins for OCI registries: from environment variables, or for our own pushes the engine's auth file. Floor 1.

The environment and that file are the outside things. A provider is only ever given what was set for it by name: the
auth file holds the logins of a person, some of whom never meant them for a rented machine.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pennypod.errors import InputError
from pennypod.model.image import HUB, RegistryLogin

LOGIN_VARIABLE = "PENNYPOD_REGISTRY_LOGIN"
PULL_VARIABLE = "PENNYPOD_REGISTRY_PULL_LOGIN"
"""Both hold USER:TOKEN@HOST; the second one, where it is set, is what pods pull with: it need not be able to push."""

SNAPSHOT_VARIABLE = "PENNYPOD_REGISTRY_SNAPSHOT_LOGIN"
"""Of the same form: who the host of a rented pod pushes as. A stranger gets it, so no other one stands in for it."""

_HUB_KEYS = (HUB, "https://index.docker.io/v1/", "index.docker.io")


def push_login(registry: str, environ: Mapping[str, str]) -> RegistryLogin | None:
    """Who pushes to a registry and asks it what it has. Raises InputError for a variable that holds no login."""
    return _from_variable(LOGIN_VARIABLE, registry, environ) or _from_files(registry, environ)


def pull_login(registry: str, environ: Mapping[str, str]) -> RegistryLogin | None:
    """Who a provider's machines are to pull as; None when nothing was set for that registry. Raises InputError."""
    for variable in (PULL_VARIABLE, LOGIN_VARIABLE):
        login = _from_variable(variable, registry, environ)
        if login is not None:
            return login
    return None


def snapshot_login(registry: str, environ: Mapping[str, str]) -> RegistryLogin:
    """Who the host of a rented pod is to push as. Raises InputError when nobody was named."""
    login = _from_variable(SNAPSHOT_VARIABLE, registry, environ)
    if login is None:
        raise InputError(
            f"the pod's host pushes the image to {registry} itself: set {SNAPSHOT_VARIABLE}=USER:TOKEN@HOST to a login"
            " that is good for this repository only and ends soon"
        )
    return login


def _from_variable(variable: str, registry: str, environ: Mapping[str, str]) -> RegistryLogin | None:
    text = environ.get(variable, "").strip()
    if not text:
        return None
    who, _, host = text.rpartition("@")
    user, _, password = who.partition(":")
    if not (host and user and password) or any(letter.isspace() for letter in text):
        raise InputError(f"{variable} is no login: set it to USER:TOKEN@HOST, without blanks")
    return RegistryLogin(host, user, password) if host == registry else None


def _from_files(registry: str, environ: Mapping[str, str]) -> RegistryLogin | None:
    """As `podman login` and `docker login` write it. What only a credential helper knows is not found here."""
    for path in _files(environ):
        try:
            auths = json.loads(path.read_text(encoding="utf-8")).get("auths")
        except (OSError, ValueError, AttributeError):
            continue
        for name in _HUB_KEYS if registry == HUB else (registry,):
            login = _decoded(registry, auths.get(name) if isinstance(auths, dict) else None)
            if login is not None:
                return login
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    if environ.get("REGISTRY_AUTH_FILE"):
        yield Path(environ["REGISTRY_AUTH_FILE"])
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"], "containers", "auth.json")
    home = Path(environ.get("HOME") or "/root")
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "containers", "auth.json")
    yield Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")


def _decoded(registry: str, entry: Any) -> RegistryLogin | None:
    try:
        user, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
    except (KeyError, TypeError, ValueError):
        return None
    return RegistryLogin(registry, user, password) if user and password else None


def auth_document(login: RegistryLogin) -> str:
    """The text of an auth file with this one login, for an engine."""
    who = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
    return json.dumps({"auths": {name: {"auth": who} for name in _names(login.registry)}})


def _names(registry: str) -> tuple[str, ...]:
    return _HUB_KEYS if registry == HUB else (registry,)
