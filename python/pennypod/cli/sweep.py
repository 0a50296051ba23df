"""`pennypod sweep` and `pennypod sentinel`: the end of everything past its deadline, from any machine. Floor 3."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from pennypod.cli.app import MAY_STILL_BILL, OK, App, json_option, pass_app
from pennypod.cli.times import ahead, duration, format_moment

if TYPE_CHECKING:
    from pennypod.clock import Clock
    from pennypod.sentinel import Look

unreadable_option = click.option(
    "--unreadable-after",
    "unreadable_after_s",
    callback=duration,
    default="4h",
    show_default=True,
    metavar="DURATION",
    help="End a pod that is named like ours, without a lease that can be read, when nothing has changed for so long.",
)


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
@click.option("--run", "runs", multiple=True, metavar="RUN", help="Only pods of this run; may be given several times.")
@unreadable_option
@json_option
@pass_app
def sweep(app: App, dry_run: bool, ahead_s: int, runs: tuple[str, ...], unreadable_after_s: int, as_json: bool) -> int:
    """Destroy every pod whose deadline has passed, and prove it.

    The deadline is read from the pod's own name, so no local state is needed. Pods whose end the ledger has asked for
    but not proven are tried again. Nothing that is not named like ours is touched.

    Exit code 3 when a pod could not be proven gone or a provider could not be listed.
    """
    from pennypod.sentinel import Manner, look

    manner = Manner(unreadable_after_s=unreadable_after_s, ahead_s=ahead_s, dry_run=dry_run, runs=runs)
    seen = look(app.providers, lambda: app.ledger, app.settings, app.clock, manner)
    if seen.warning:
        app.say(f"warning: {seen.warning}")
    if as_json:
        app.print_json(_document(seen, dry_run))
    else:
        _print(app, seen)
    for provider, why in seen.found.unlisted.items():
        app.say(f"error: {provider} cannot be looked at: {why}")
    for item in seen.swept:
        if item.error:
            app.say(f"error: {item.error}")
    return OK if seen.complete else MAY_STILL_BILL


@click.command()
@click.option(
    "--interval",
    "interval_s",
    callback=duration,
    default="5m",
    show_default=True,
    metavar="DURATION",
    help="How often to look. When something was left undone: every minute.",
)
@click.option("--once", is_flag=True, help="Look once and end, with the exit code of a sweep.")
@unreadable_option
@pass_app
def sentinel(app: App, interval_s: int, once: bool, unreadable_after_s: int) -> int:
    """Sweep again and again, with one line for each look.

    Nothing but TERM or Ctrl-C ends it: a provider that does not answer is asked again. One sentinel works on a state
    folder at a time; `pennypod doctor` tells when the last look was. Let cron or systemd start it:
    playbooks/control_node.yml sets that up.
    """
    from pennypod.sentinel import Manner, StoppableClock, keep_watch, look, only_one

    manner = Manner(unreadable_after_s=unreadable_after_s)

    def take_look(clock: Clock) -> Look:
        return look(app.providers, lambda: app.ledger, app.settings, clock, manner)

    with only_one(app.settings):
        if once:
            seen = take_look(app.clock)
            _log(seen.line())
            return OK if seen.complete else MAY_STILL_BILL
        with _told_to_stop() as stop:
            _log(f"on watch, every {interval_s} s")
            keep_watch(take_look, StoppableClock(app.clock, stop), interval_s, _log)
            _log("told to end")
    return OK


@contextlib.contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """An event that TERM and Ctrl-C set."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_a: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log(text: str) -> None:
    click.echo(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}")


def _document(seen: Look, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "judged_at": seen.judged_at,
        "pods": [item.as_document() for item in seen.swept],
        "kept": [{"pod_name": t.name, "provider": t.provider, "deadline": t.deadline} for t in seen.found.kept],
        "stopped": seen.found.stopped,
        "not_listed": dict(seen.found.unlisted),
    }


def _print(app: App, seen: Look) -> None:
    from rich.table import Table

    if seen.swept:
        table = Table(show_edge=False, pad_edge=False)
        for name in ("pod", "provider", "deadline (UTC)", "why", "cost", "action"):
            table.add_column(name, justify="right" if name == "cost" else "left", overflow="fold")
        for item in seen.swept:
            target = item.target
            deadline = "unreadable"
            with contextlib.suppress(ValueError, OverflowError, OSError):  # a name can hold any number
                deadline = deadline if target.deadline is None else format_moment(target.deadline)
            table.add_row(target.name, target.provider, deadline, target.reason, f"${item.usd:.4f}", item.action)
        app.out.print(table)
    unreadable = sum(target.lease is None for target in seen.found.kept)
    more = f", {unreadable} of them with a name that cannot be read" if unreadable else ""
    click.echo(f"{len(seen.swept)} due, {len(seen.found.kept)} within their time{more}")
    for name in seen.found.stopped:
        app.say(f"stopped before its time, and may bill for its disk until a sweep after its deadline ends it: {name}")
