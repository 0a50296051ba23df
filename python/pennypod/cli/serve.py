"""`pennypod serve`: the webhook orchestrator. Floor 3."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pennypod.cli.app import App, pass_app
from pennypod.errors import InputError


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; TLS belongs in front.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="The repository's root, with train.yml and group_vars/. Default: the current folder.",
)
@pass_app
def serve(app: App, host: str, port: int, root: Path) -> None:
    """Take signed webhooks and carry out the runs they ask for.

    PENNYPOD_WEBHOOK_SECRET signs the webhooks. A run that was accepted is ended and reported whatever happens to this
    process: started again, it goes on where it was. docs/orchestrator.md tells the rest.
    """
    try:
        from pennypod.orchestrator import server
    except ModuleNotFoundError as exc:
        raise InputError(
            f"the orchestrator's libraries are not installed ({exc.name} is missing): install pennypod[serve]"
        ) from exc
    server.serve(host, port, root, app.settings, os.environ)
