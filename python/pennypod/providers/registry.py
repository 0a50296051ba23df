"""Which providers there are, and which of them can be used now. Floor 1. A new provider is one line here.

`auto` means every provider whose key is set; when none is, the local one, and the choice says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pennypod.errors import AuthError, InputError
from pennypod.providers.base import Provider
from pennypod.providers.local import local_provider
from pennypod.settings import Settings

AUTO = "auto"
LOCAL = "local"

Factory = Callable[[Settings, Mapping[str, str]], Provider]


@dataclass(frozen=True, slots=True)
class Entry:
    """How a provider is made, and the environment variable that holds its key ("" where it needs none)."""

    factory: Factory
    key_variable: str


PROVIDERS: dict[str, Entry] = {
    LOCAL: Entry(local_provider, ""),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The providers a run may use, and a sentence for the user when that is not what the words say."""

    names: tuple[str, ...]
    note: str = ""


def configured(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Providers whose key is set, or the local one when none is."""
    keyed = tuple(name for name, entry in PROVIDERS.items() if entry.key_variable and environ.get(entry.key_variable))
    return keyed or (LOCAL,)


def choose(wanted: str, environ: Mapping[str, str]) -> Choice:
    """What `provider=` means now. Raises InputError for an unknown name and AuthError for a missing key."""
    if wanted == AUTO:
        names = configured(environ)
        if names == (LOCAL,):
            keys = " or ".join(entry.key_variable for entry in PROVIDERS.values() if entry.key_variable)
            hint = f" ({keys})" if keys else ""
            return Choice(names, f"no provider key is set{hint}: using local pods on this machine")
        return Choice(names)
    entry = PROVIDERS.get(wanted)
    if entry is None:
        raise InputError(f"there is no provider {wanted!r}: use {AUTO}, {', '.join(PROVIDERS)}")
    if entry.key_variable and not environ.get(entry.key_variable):
        raise AuthError(f"{entry.key_variable} is not set: put it into the environment or use another provider")
    return Choice((wanted,))


def open_provider(name: str, settings: Settings, environ: Mapping[str, str]) -> Provider:
    """A provider by name, after the checks of `choose`; nothing is asked of it yet."""
    choose(name, environ)
    return PROVIDERS[name].factory(settings, environ)
