"""`pennypod store`: the object store of one machine, in the foreground. Floor 3."""

from __future__ import annotations

import json
import os
import signal
import threading

import click

from pennypod.cli.app import App, pass_app
from pennypod.errors import StoreError

_LOOK_S = 1.0


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 takes a free one.")
@click.option("--pods", is_flag=True, help="Listen for local pods, too: at the engine's bridge, with the same port.")
@click.option("--pod-address", metavar="ADDRESS", default="", help="This host as pods find it, in place of the bridge.")
@pass_app
def store(app: App, port: int, pods: bool, pod_address: str) -> None:
    """Serve an S3 bucket from a folder under PENNYPOD_HOME, until Ctrl-C or TERM.

    Commands of the same PENNYPOD_HOME use it unless PENNYPOD_S3_BUCKET names another. The first line on stdout is JSON
    with its address; the keys are in store/keys.json there. docs/store.md tells the rest.
    """
    from pennypod.store.embedded import EmbeddedStore

    if pods and not pod_address:
        pod_address = _bridge(app)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    with EmbeddedStore(app.settings.home, port=port, pod_address=pod_address) as server:
        config = server.config
        ready = {"endpoint": config.endpoint, "pod_endpoint": config.pod_endpoint, "bucket": config.bucket}
        click.echo(json.dumps(ready))
        while not ended.wait(_LOOK_S):
            rc = server.ended()
            if rc is not None:
                raise StoreError(f"the object store has ended by itself with {rc}: see store/server.log")


def _bridge(app: App) -> str:
    from pennypod.providers.local.engine import find_engine
    from pennypod.simulator.pods import gateway

    engine = find_engine(os.environ, app.settings.cache_dir)
    address = "" if engine.rootless else gateway(engine)
    if not address:
        raise StoreError("the engine tells no bridge on which its containers find this host: give --pod-address")
    return address
