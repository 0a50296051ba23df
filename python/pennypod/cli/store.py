"""`pennypod store`: the object store of one machine, and what lies in whichever is used. Floor 3."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pennypod.cli.app import App, json_option, pass_app
from pennypod.errors import InputError, StoreError

if TYPE_CHECKING:
    from pennypod.store import Bucket, Checkpoints

_LOOK_S = 1.0


@click.group()
def store() -> None:
    """Checkpoints and data sets in object storage (docs/store.md)."""


@store.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 takes a free one.")
@click.option("--pods", is_flag=True, help="Listen for local pods, too: at the engine's bridge, with the same port.")
@click.option("--pod-address", metavar="ADDRESS", default="", help="This host as pods find it, in place of the bridge.")
@pass_app
def serve(app: App, port: int, pods: bool, pod_address: str) -> None:
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


@store.command()
@click.argument("run")
@json_option
@pass_app
def checkpoints(app: App, run: str, as_json: bool) -> None:
    """The checkpoints of RUN that count, the newest first."""
    found = list(_checkpoints(app, run).valid())
    if as_json:
        app.print_json([{"slot": str(kept.slot), **asdict(kept.marker)} for kept in found])
        return
    for kept in found:
        app.out.print(f"{kept.slot}  epoch {kept.marker.epoch}  {kept.marker.bytes} bytes  {kept.marker.sha256[:12]}")
    if not found:
        app.say(f"the bucket has no checkpoint of {run} that counts")


@store.command()
@click.argument("run")
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@pass_app
def fetch(app: App, run: str, target: Path) -> None:
    """Bring the newest checkpoint of RUN home as the tar file TARGET, verified by its hash."""
    if not target.parent.is_dir():
        raise InputError(f"{target.parent} is no folder")
    kept = _checkpoints(app, run).fetch_newest(target)
    if kept is None:
        raise StoreError(f"the bucket has no whole checkpoint of {run}")
    app.say(f"{target}: epoch {kept.marker.epoch}, {kept.marker.bytes} bytes, sha256 {kept.marker.sha256}")


@store.command("keep-data")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@json_option
@pass_app
def keep_data(app: App, folder: Path, as_json: bool) -> None:
    """Put the data set FOLDER into the bucket; what is there already is not sent again."""
    from pennypod.store import keep_dataset

    sent = keep_dataset(_bucket(app), folder)
    if as_json:
        app.print_json(asdict(sent))
        return
    app.out.print(f"{sent.name}: {sent.files} files; sent {sent.packs} packs, {sent.bytes} bytes")


def _bucket(app: App) -> Bucket:
    from pennypod.store import load_config, open_bucket

    return open_bucket(load_config(os.environ, app.settings.home))


def _checkpoints(app: App, run: str) -> Checkpoints:
    from pennypod.store import Checkpoints

    try:
        return Checkpoints(_bucket(app), run)
    except ValueError as exc:
        raise InputError(str(exc)) from exc


def _bridge(app: App) -> str:
    from pennypod.providers.local.engine import find_engine
    from pennypod.simulator.pods import gateway

    engine = find_engine(os.environ, app.settings.cache_dir)
    address = "" if engine.rootless else gateway(engine)
    if not address:
        raise StoreError("the engine tells no bridge on which its containers find this host: give --pod-address")
    return address
