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
    with pod_bridge(settings) as address:
        server = EmbeddedStore(home, pod_address=address)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def pod_bridge(settings: Settings) -> Iterator[str]:
    """This machine's address as its pods find it, there before the first of them is. Skips the test where none is.

    Podman's bridge has its address only while a container is on it: here one that does nothing.
    """
    provider = LocalProvider(settings, os.environ)
    engine, name = provider.engine, f"build-pennypod-bridge-{secrets.token_hex(4)}"
    address = "" if engine.rootless else gateway(engine)
    if not address:
        pytest.skip("this engine's containers find no host address of ours")
    provider.prepare("stock", lambda _said: None)
    args = ["run", "--detach", "--rm", "--pull", "never", "--name", name, *engine.flags]
    engine.check(*args, "--entrypoint", "/bin/sleep", image_reference("stock"), "900")
    try:
        yield address
    finally:
        engine.remove_container(name)
