"""`pennypod simulate`: options in, a running simulator out, and no pod left when it ends."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pennypod.errors import InputError, PennypodError

if TYPE_CHECKING:
    from collections.abc import Mapping


_LOOPBACK = ("127.0.0.1", "localhost")
_MARKET_PARTS = frozenset(("seed", "vast", "runpod", "accounts", "boot", "options", "registries"))


def read_file(path: Path | None) -> Any:
    """A YAML or JSON file as plain data. Raises InputError."""
    import yaml

    if path is None:
        return None
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise InputError(f"{path} cannot be read: {' '.join(str(exc).split())}") from exc


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8400, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--pods", type=click.Choice(["container", "ghost"]), default="ghost", show_default=True)
@click.option("--market", "market_file", type=click.Path(path_type=Path), help="Market file (YAML or JSON).")
@click.option("--faults", "faults_file", type=click.Path(path_type=Path), help="Fault rules (YAML or JSON).")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same market.")
@click.option(
    "--speed", type=click.FloatRange(0, 1e6), default=1.0, show_default=True, help="Simulated seconds per second."
)
@click.option("--image", default="stock", show_default=True, help="Local image that container pods are made of.")
def simulate(
    port: int,
    host: str,
    pods: str,
    market_file: Path | None,
    faults_file: Path | None,
    seed: int,
    speed: float,
    image: str,
) -> None:
    """Run a look-alike of Vast.ai and RunPod until interrupted.

    Point clients at it with VAST_URL and RUNPOD_API_BASE_URL. Any key is accepted. Its own controls are under /_sim.
    Container pods have a real sshd on loopback; ghost pods have none, and there may be thousands of them.
    """
    run(
        port=port,
        host=host,
        pods=pods,
        market=read_file(market_file) or {},
        faults=_rules(read_file(faults_file)),
        seed=seed,
        speed=speed,
        image=image,
    )


def _rules(document: Any) -> list[Mapping[str, Any]]:
    rules = document.get("faults", []) if isinstance(document, dict) else document or []
    if not isinstance(rules, list):
        raise InputError("the faults file holds a list of rules, or an object with `faults`")
    return rules


def run(
    *,
    port: int,
    host: str,
    pods: str,
    market: Any,
    faults: list[Mapping[str, Any]],
    seed: int,
    speed: float,
    image: str,
) -> None:
    from pennypod.settings import load_settings
    from pennypod.simulator.clock import VirtualClock
    from pennypod.simulator.pods import Containers, Ghosts
    from pennypod.simulator.server import Simulator
    from pennypod.simulator.state import Boot, World

    if not isinstance(market, dict):
        raise InputError("the market file holds an object with vast, runpod, accounts, boot or options")
    unknown = sorted(set(market) - _MARKET_PARTS)
    if unknown:
        raise InputError(f"the market file has no part {', '.join(unknown)}: use {', '.join(sorted(_MARKET_PARTS))}")
    clock = VirtualClock(speed)
    backend: Ghosts | Containers = Ghosts()
    reach = ""
    if pods == "container":
        backend = Containers(load_settings(), os.environ, image=image, speed=lambda: clock.speed)
        backend.prepare(lambda text: click.echo(text, err=True))
        reach = backend.host_address()
    boot = Boot(loading_s=3.0) if pods == "container" else Boot(loading_s=20.0)
    world = World(clock, backend, seed=seed, market=market, faults=faults, boot=boot)
    try:
        simulator = Simulator(world, host=host, port=port, also=[reach] if reach and host in _LOOPBACK else [])
    except OSError as exc:
        raise InputError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    if isinstance(backend, Containers):
        backend.api_url = f"http://{reach if reach and host in (*_LOOPBACK, '0.0.0.0') else host}:{simulator.port}"  # noqa: S104
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    simulator.start()
    ready = {"url": simulator.url, "pods": pods, "seed": world.seed, "VAST_URL": simulator.url}
    click.echo(json.dumps(ready | {"RUNPOD_API_BASE_URL": simulator.url}))
    try:
        while not ended.wait(1.0):  # now and then: the thread that the kernel gives a signal to may be another one
            pass
    finally:
        simulator.stop()
        backend.close()


def main() -> None:
    """`python -m pennypod.simulator`."""
    try:
        simulate.main()
    except PennypodError as exc:
        click.echo(f"error: {exc}", err=True)
        raise SystemExit(1) from exc


if __name__ == "__main__":
    main()
