"""Waiting for the image that a pod's host pushes: for this very pod's, and not for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import FakeClock
from pennypod.errors import TransientError
from pennypod.golden import Bake, Recipe
from pennypod.model.image import RegistryLogin, Repository
from pennypod.oci.client import Manifest
from pennypod.settings import load_settings
from pennypod.snapshots import PATIENCE_S, Place, Snapshots

HERE = Repository("ghcr.io", "me/golden")
BAKE = Bake("demo-1201-aaaaa", "17", Recipe("demo", "vast", "base", {}), "", "python3", "/root/pennypod")


class FakeRegistry:
    """Shows one after the other, the last one for ever: a pod's number, None for nothing, or an error."""

    def __init__(self, *shown: str | Exception | None) -> None:
        self.shown = list(shown)

    def manifest(self, _repository: Repository, _reference: str) -> Manifest | None:
        shown = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        if isinstance(shown, Exception):
            raise shown
        content = json.dumps({"config": {"digest": shown}}).encode()
        return None if shown is None else Manifest(f"sha256:{shown}", "", content)

    def blob(self, _repository: Repository, digest: str) -> bytes:
        return json.dumps({"config": {"Env": [f"CONTAINER_ID={digest}"]}}).encode()


class FakeHost:
    def take_snapshot(self, pod_id: str, to: Repository, login: RegistryLogin) -> None:
        raise AssertionError("not asked for in here")


def pushed(tmp_path: Path, registry: FakeRegistry, said: list[str]) -> Manifest:
    settings = load_settings({"PENNYPOD_HOME": str(tmp_path)})
    place = Place(HERE, RegistryLogin("ghcr.io", "me", "x"), registry)  # type: ignore[arg-type]
    manifest, config = Snapshots(settings, FakeHost(), FakeClock())._pushed(
        BAKE, place, "sha256:11", lambda: None, said.append
    )
    assert config["config"]["Env"] == [f"CONTAINER_ID={BAKE.pod_id}"]
    return manifest


def test_an_image_of_another_pod_is_passed_over_and_a_silent_registry_asked_again(tmp_path: Path) -> None:
    said: list[str] = []
    registry = FakeRegistry("11", None, "16", TransientError("silent"), "17")
    assert pushed(tmp_path, registry, said).digest == "sha256:17"
    assert said[0].startswith("waiting for the host's push to ghcr.io/me/golden")


def test_a_host_that_never_pushes_is_given_up_in_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(TransientError, match="no image of the pod after 60 min: the host did not push"):
        pushed(tmp_path, FakeRegistry("11"), said)
    assert 60 < len(said) < PATIENCE_S / 25, "told of now and then"
