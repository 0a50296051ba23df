"""Which providers there are. Floor 1: the only module that knows every provider's name.

Adding a provider means its own file and one line here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from pennypod.errors import InputError
from pennypod.providers.base import Provider
from pennypod.providers.local import local_provider
from pennypod.settings import Settings

LOCAL = "local"
AUTO = "auto"

_FACTORIES: Mapping[str, Callable[[Settings, Mapping[str, str]], Provider]] = {
    LOCAL: local_provider,
}
_KEYS: Mapping[str, str] = {}
"""The environment variable whose presence sets a provider up; local pods need none."""


def all_providers(settings: Settings, environ: Mapping[str, str] | None = None) -> dict[str, Provider]:
    """Every provider that is set up here: those whose key is in the environment, and local pods."""
    env = os.environ if environ is None else environ
    return {name: make(settings, env) for name, make in _FACTORIES.items() if name not in _KEYS or env.get(_KEYS[name])}


def select_providers(
    wanted: str, settings: Settings, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Provider], str]:
    """The providers to look at for `-e provider=wanted`, and a note for people (may be empty).

    `auto` is every provider with a key, and local pods when there is no key at all. Raises InputError for a name that is
    unknown or not set up.
    """
    available = all_providers(settings, environ)
    if wanted == AUTO:
        rented = {name: provider for name, provider in available.items() if name != LOCAL}
        if rented:
            return rented, ""
        return {LOCAL: available[LOCAL]}, "no provider's key is set: using a local pod"
    if wanted not in _FACTORIES:
        raise InputError(f"unknown provider {wanted!r}: choose {AUTO}, {', '.join(sorted(_FACTORIES))}")
    if wanted not in available:
        raise InputError(f"provider {wanted!r} needs its key: set {_KEYS[wanted]} (see .env.example)")
    return {wanted: available[wanted]}, ""


def prepare(
    names: Iterable[str], images: Mapping[str, str], providers: Mapping[str, Provider], on_progress: Callable[[str], None]
) -> None:
    """Make whatever must exist before the first create of these providers; costs time here, never money there."""
    for name in sorted(set(names)):
        providers[name].prepare(images.get(name, ""), on_progress)
