"""An embedded store that pods on this machine reach from their containers, whatever else runs here."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pennypod.providers.local.image import image_reference
from pennypod.providers.local.provider import LocalProvider
from pennypod.settings import Settings
from pennypod.simulator.pods import gateway
from pennypod.store.embedded import EmbeddedStore


@contextmanager
def pod_bucket(settings: Settings, home: Path) -> Iterator[EmbeddedStore]:
    """A running store whose state is in `home`. Skips the test where containers find no address of this machine."""
    provider = LocalProvider(settings, os.environ)
    address = "" if provider.engine.rootless else gateway(provider.engine)
    if not address:
        pytest.skip("this engine's containers find no host address of ours")
    with _bridge(provider):
        server = EmbeddedStore(home, pod_address=address)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def _bridge(provider: LocalProvider) -> Iterator[None]:
    """Podman's bridge has its address only while a container is on it: here one that does nothing."""
    provider.prepare("stock", lambda _said: None)
    engine, name = provider.engine, f"build-pennypod-bridge-{secrets.token_hex(4)}"
    args = ["run", "--detach", "--rm", "--pull", "never", "--name", name, *engine.flags]
    engine.check(*args, "--entrypoint", "/bin/sleep", image_reference("stock"), "900")
    try:
        yield
    finally:
        engine.remove_container(name)
