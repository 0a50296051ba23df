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
    assert note == (
        "neither VAST_API_KEY nor RUNPOD_API_KEY nor CLOUD_API_KEY is set: using local pods on this machine"
    )


@pytest.mark.usefixtures("cloud")
def test_a_provider_by_name_needs_its_key(settings: Settings) -> None:
    with pytest.raises(AuthError, match="CLOUD_API_KEY is not set"):
        registry.select_providers("cloud", settings, {})
    assert list(registry.select_providers("local", settings, {"CLOUD_API_KEY": "k"})[0]) == ["local"]


def test_an_unknown_provider_is_told_what_there_is(settings: Settings) -> None:
    with pytest.raises(InputError, match="no provider 'moon': use auto or vast, runpod, local"):
        registry.select_providers("moon", settings, {})


def test_both_clouds_open_with_their_keys_and_ask_for_nothing_yet(settings: Settings) -> None:
    keys = {"VAST_API_KEY": "v", "RUNPOD_API_KEY": "r", "VAST_URL": "http://127.0.0.1:1"}
    providers, note = registry.select_providers("auto", settings, keys)
    assert (list(providers), note) == (["vast", "runpod"], "")
    assert [provider.name for provider in providers.values()] == ["vast", "runpod"]
    assert list(registry.select_providers("auto", settings, {"RUNPOD_API_KEY": "r"})[0]) == ["runpod"]


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "sch\u00f6n"])
def test_a_key_that_is_none_is_refused_without_being_shown(settings: Settings, key: str) -> None:
    with pytest.raises(AuthError) as caught:
        registry.select_providers("vast", settings, {"VAST_API_KEY": key})
    assert key not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://x", "https://user:pw@host", "console.vast.ai", "https://host/?api_key=1"])
def test_an_address_that_is_none_is_refused_without_being_shown(settings: Settings, url: str) -> None:
    with pytest.raises(InputError) as caught:
        registry.select_providers("vast", settings, {"VAST_API_KEY": "k", "VAST_URL": url})
    assert url not in str(caught.value)


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


@pytest.mark.parametrize(
    ("name", "environ", "rehearsal"),
    [
        ("vast", {"VAST_URL": "http://127.0.0.1:8400"}, True),
        ("vast", {"VAST_URL": "http://localhost:8400/"}, True),
        ("runpod", {"RUNPOD_API_BASE_URL": "http://[::1]:8400/v2"}, True),
        ("vast", {}, False),
        ("vast", {"VAST_URL": "https://console.vast.ai"}, False),
        ("vast", {"RUNPOD_API_BASE_URL": "http://127.0.0.1:8400/v2"}, False),
        ("vast", {"VAST_URL": "https://127.0.0.1.example.com"}, False),
        ("local", {"VAST_URL": "http://127.0.0.1:8400"}, False),
    ],
)
def test_only_a_provider_on_this_machine_is_a_rehearsal(name: str, environ: dict[str, str], rehearsal: bool) -> None:
    assert registry.is_rehearsal(name, environ) is rehearsal
