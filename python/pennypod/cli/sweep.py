"""`pennypod sweep`: the end of everything past its deadline, from any machine. Floor 3."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from pennypod.cli.app import MAY_STILL_BILL, OK, App, json_option, pass_app
from pennypod.cli.times import ahead, format_moment
from pennypod.errors import PennypodError

if TYPE_CHECKING:
    from pennypod.ledger import Ledger
    from pennypod.sweep import Survey, Swept


@click.command()
@click.option("--dry-run", is_flag=True, help="Look and judge, destroy nothing.")
@click.option(
    "--now",
    "ahead_s",
    callback=ahead,
    default="+0s",
    metavar="+DURATION",
    help="Judge deadlines as of that much later.",
)
@json_option
@pass_app
def sweep(app: App, dry_run: bool, ahead_s: int, as_json: bool) -> int:
    """Destroy every pod whose deadline has passed, and prove it.

    The deadline is read from the pod's own name, so no local state is needed. Pods whose end the ledger has asked for
    but not proven are tried again. Nothing without a lease of ours in its name is touched.

    Exit code 3 when a pod could not be proven gone or a provider could not be listed.
    """
    from pennypod.escrow import Escrow
    from pennypod.sweep import UNPROVEN, survey
    from pennypod.sweep import sweep as run_sweep

    ledger = _ledger(app)
    judged_at = app.clock.now() + ahead_s
    found = survey(app.providers, ledger, judged_at)
    swept = run_sweep(
        found,
        app.providers,
        ledger,
        app.clock,
        dry_run=dry_run,
        report=lambda *_a, **_k: None,
        escrow=Escrow(app.settings, ledger, app.clock),
    )
    if as_json:
        app.print_json(_document(found, swept, judged_at, dry_run))
    else:
        _print(app, found, swept)
    for provider, why in found.unlisted.items():
        app.say(f"error: {provider} cannot be looked at: {why}")
    for item in swept:
        if item.action == UNPROVEN:
            app.say(f"error: {item.error}")
    unproven = any(item.action == UNPROVEN for item in swept)
    return MAY_STILL_BILL if unproven or found.unlisted else OK


def _ledger(app: App) -> Ledger:
    """The ledger, or an empty one in memory: a broken ledger must not keep a pod alive."""
    from pennypod.ledger import open_ledger
    from pennypod.settings import Settings

    try:
        app.ledger.pending_attempts()
    except PennypodError as exc:
        app.say(f"warning: {exc}; sweeping by the pods' names alone")
        return open_ledger(Settings(app.settings.home, "sqlite://"))
    return app.ledger


def _document(found: Survey, swept: list[Swept], judged_at: float, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "judged_at": judged_at,
        "pods": [item.as_document() for item in swept],
        "kept": [{"pod_name": t.lease.name, "provider": t.provider, "deadline": t.lease.deadline} for t in found.kept],
        "not_listed": dict(found.unlisted),
    }


def _print(app: App, found: Survey, swept: list[Swept]) -> None:
    from rich.table import Table

    if swept:
        table = Table(show_edge=False, pad_edge=False)
        for name in ("pod", "provider", "deadline (UTC)", "why", "cost", "action"):
            table.add_column(name, justify="right" if name == "cost" else "left", overflow="fold")
        for item in swept:
            target = item.target
            deadline = ""
            with contextlib.suppress(ValueError, OverflowError, OSError):  # a name can hold any number
                deadline = format_moment(target.lease.deadline)
            table.add_row(target.lease.name, target.provider, deadline, target.reason, f"${item.usd:.4f}", item.action)
        app.out.print(table)
    click.echo(f"{len(swept)} due, {len(found.kept)} within their time")
