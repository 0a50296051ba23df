"""Which providers there are, and which of them can be used now. Floor 1. A new provider is one line here.

`auto` means every provider whose key is set; when none is, the local one, and the choice says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pennypod.errors import AuthError, InputError
from pennypod.providers.base import Provider
from pennypod.providers.local import engine_installed, local_provider
from pennypod.settings import Settings

AUTO = "auto"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Entry:
    """How a provider is made, and the environment variables with its key and its address ("" where it has none)."""

    factory: Callable[[Settings, Mapping[str, str]], Provider]
    key_variable: str
    url_variable: str = ""


# Loaded when they are used: the HTTP library costs a tenth of a second, which every local command would pay.
def _vast(settings: Settings, environ: Mapping[str, str]) -> Provider:
    from pennypod.providers.vast import vast_provider

    return vast_provider(settings, environ)


def _runpod(settings: Settings, environ: Mapping[str, str]) -> Provider:
    from pennypod.providers.runpod import runpod_provider

    return runpod_provider(settings, environ)


PROVIDERS: dict[str, Entry] = {
    "vast": Entry(_vast, "VAST_API_KEY", "VAST_URL"),
    "runpod": Entry(_runpod, "RUNPOD_API_KEY", "RUNPOD_API_BASE_URL"),
    LOCAL: Entry(local_provider, ""),
}


def configured(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Providers whose key is set, or the local one when none is."""
    keyed = tuple(name for name, entry in PROVIDERS.items() if entry.key_variable and environ.get(entry.key_variable))
    return keyed or (LOCAL,)


def open_provider(name: str, settings: Settings, environ: Mapping[str, str] | None = None) -> Provider:
    """A provider by name; nothing is asked of it yet. InputError for an unknown name, AuthError for a missing key."""
    env = os.environ if environ is None else environ
    check_choice(name, env)
    return PROVIDERS[name].factory(settings, env)


def check_choice(wanted: str, environ: Mapping[str, str]) -> None:
    """Raises InputError for what is neither a provider nor `auto`, AuthError for one without its key. Makes nothing."""
    entry = PROVIDERS.get(wanted)
    if entry is None:
        if wanted == AUTO:
            return
        raise InputError(f"there is no provider {wanted!r}: use {AUTO} or {', '.join(PROVIDERS)}")
    if entry.key_variable and not environ.get(entry.key_variable):
        raise AuthError(f"{entry.key_variable} is not set: put it into the environment or use another provider")


def select_providers(
    wanted: str, settings: Settings, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Provider], str]:
    """The providers a run may use, and a sentence for the user when the choice is not what they might expect."""
    env = os.environ if environ is None else environ
    if wanted != AUTO:
        return {wanted: open_provider(wanted, settings, env)}, ""
    names = configured(env)
    keys = " nor ".join(entry.key_variable for entry in PROVIDERS.values() if entry.key_variable)
    note = ""
    if names == (LOCAL,):
        missing = f"neither {keys} is set" if " nor " in keys else f"{keys} is not set" if keys else "no key is set"
        note = f"{missing}: using local pods on this machine"
    return {name: open_provider(name, settings, env) for name in names}, note


def all_providers(settings: Settings, environ: Mapping[str, str] | None = None) -> dict[str, Provider]:
    """Every provider where something of ours may exist: those with a key, and this machine if it has an engine."""
    env = os.environ if environ is None else environ
    names = list(configured(env))
    if LOCAL not in names and engine_installed(env):
        names.append(LOCAL)
    return {name: open_provider(name, settings, env) for name in names}


def prepare(
    names: Iterable[str],
    images: Mapping[str, str],
    providers: Mapping[str, Provider],
    on_progress: Callable[[str], None],
) -> None:
    """Have each provider make what its image needs, before anything is rented."""
    for name in sorted(set(names)):
        providers[name].prepare(images.get(name, ""), on_progress)


def is_rehearsal(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a provider's address is on this machine: then it is a simulator, whose machines have no GPU to check."""
    env = os.environ if environ is None else environ
    url = env.get(PROVIDERS[name].url_variable, "") if PROVIDERS[name].url_variable else ""
    return (urlsplit(url).hostname or "") in ("localhost", "127.0.0.1", "::1")
