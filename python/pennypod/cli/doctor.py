"""`pennypod doctor`: is this machine fit to rent from. Floor 3."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from pennypod.cli.app import FAILED, OK, App, json_option, pass_app


@click.command()
@json_option
@pass_app
def doctor(app: App, as_json: bool) -> int:
    """Check this machine: software, state folder, tools, container engine, keys, balances, clock.

    Every line says ok, warn or fail, and what to do. Each provider whose key is set is asked for its balance.
    Exit code 1 when a line says fail.
    """
    from pennypod.doctor import FAIL, Doctor

    checks = Doctor(app.settings, os.environ, app.clock).findings()
    found = []
    for finding in checks:
        found.append(finding)
        if not as_json:
            colour = {"ok": "green", "warn": "yellow"}.get(finding.level, "red")
            click.echo(f"{click.style(f'{finding.level:<4}', fg=colour)}  {finding.name}: {finding.seen}")
            if finding.advice:
                click.echo(f"      {finding.advice}")
    failed = any(finding.level == FAIL for finding in found)
    if as_json:
        app.print_json({"ok": not failed, "checks": [asdict(finding) for finding in found]})
    return FAILED if failed else OK
