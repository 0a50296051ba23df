"""Which providers a run may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock, FakeProvider
from pennypod.errors import AuthError, InputError
from pennypod.providers import registry
from pennypod.providers.local import LocalProvider
from pennypod.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path, "sqlite://")


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider with a key, as the ones to come have."""

    def make(_settings: Settings, _environ: Mapping[str, str]) -> Any:
        return FakeProvider(FakeClock(), "cloud")

    monkeypatch.setitem(registry.PROVIDERS, "cloud", registry.Entry(make, "CLOUD_API_KEY"))


def test_without_any_key_auto_is_local_and_says_so(settings: Settings) -> None:
    providers, note = registry.select_providers("auto", settings, {})
    assert list(providers) == ["local"]
    assert isinstance(providers["local"], LocalProvider)
    assert "using local pods" in note


@pytest.mark.usefixtures("cloud")
def test_with_a_key_auto_is_that_provider(settings: Settings) -> None:
    providers, note = registry.select_providers("auto", settings, {"CLOUD_API_KEY": "k"})
    assert (list(providers), note) == (["cloud"], "")
    _, note = registry.select_providers("auto", settings, {"CLOUD_API_KEY": ""})
    assert note == "CLOUD_API_KEY is not set: using local pods on this machine"


@pytest.mark.usefixtures("cloud")
def test_a_provider_by_name_needs_its_key(settings: Settings) -> None:
    with pytest.raises(AuthError, match="CLOUD_API_KEY is not set"):
        registry.select_providers("cloud", settings, {})
    assert list(registry.select_providers("local", settings, {"CLOUD_API_KEY": "k"})[0]) == ["local"]


def test_an_unknown_provider_is_told_what_there_is(settings: Settings) -> None:
    with pytest.raises(InputError, match="no provider 'moon': use auto or local"):
        registry.select_providers("moon", settings, {})


@pytest.mark.usefixtures("cloud")
def test_everything_that_may_hold_a_pod_is_looked_at(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "engine_installed", lambda _environ: True)
    assert set(registry.all_providers(settings, {"CLOUD_API_KEY": "k"})) == {"cloud", "local"}
    monkeypatch.setattr(registry, "engine_installed", lambda _environ: False)
    assert set(registry.all_providers(settings, {"CLOUD_API_KEY": "k"})) == {"cloud"}
    assert set(registry.all_providers(settings, {})) == {"local"}


def test_each_provider_prepares_its_own_image_once() -> None:
    prepared: list[tuple[str, str]] = []

    class Recording(FakeProvider):
        def prepare(self, image: str, on_progress: Any) -> None:
            prepared.append((self.name, image))

    both = {name: Recording(FakeClock(), name) for name in ("a", "b")}
    registry.prepare(["b", "a", "b"], {"a": "image-a"}, both, lambda _text: None)
    assert prepared == [("a", "image-a"), ("b", "")]
