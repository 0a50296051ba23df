"""`pennypod ledger`: what was run, what it cost, and what became of it. Floor 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pennypod.cli.app import MAY_STILL_BILL, OK, App, json_option, pass_app
from pennypod.cli.times import end_moment, format_moment, moment
from pennypod.model.money import format_usd, micros_to_usd

if TYPE_CHECKING:
    from pennypod.ledger import Ledger, RunRecord
    from pennypod.unwatched import Neglect


@click.group(invoke_without_command=True)
@click.option("--job", metavar="JOB", help="Only runs of this job.")
@click.option(
    "--since", metavar="WHEN", callback=moment, help="Runs opened since a day, a moment (UTC), or 7d for a week."
)
@click.option("--until", metavar="WHEN", callback=end_moment, help="Runs opened before; a bare day counts in full.")
@json_option
@pass_app
@click.pass_context
def ledger(
    ctx: click.Context, app: App, job: str | None, since: float | None, until: float | None, as_json: bool
) -> int:
    """Show the runs, their cost and outcome, with totals per job.

    Cost is what the meter must have counted by our own clock, until an invoice says otherwise. Exit code 3 when a pod
    of one of these runs should be gone and is not proven to be, or when nobody sees to it any more: such a run is
    "overdue" (its deadline has passed) or "unwatched" (its command and its guard are dead).
    """
    from pennypod.report import unproven

    if ctx.invoked_subcommand is not None:
        return OK
    app.close_abandoned()
    records = app.ledger.runs(job=job, since=since, until=until)
    neglected = {record.run: found for record in records if (found := app.neglect(record)) is not None}
    rows = [_row(app.ledger, record, app.clock.now(), neglected.get(record.run)) for record in records]
    totals = _totals(rows)
    if as_json:
        app.print_json({"runs": [_public(row) for row in rows], "totals": {k: _public(v) for k, v in totals.items()}})
    else:
        _print_table(app, rows, totals)
    for run, found in neglected.items():
        app.say(f"{run} is {found.state}: {found.advice}")
    left = any(unproven(record, app.ledger.attempts(record.run)) for record in records)
    return MAY_STILL_BILL if neglected or left else OK


@ledger.command()
@click.argument("run")
@click.argument("verdict", type=click.Choice(["adopt", "skip"]))
@click.option("--note", default="", metavar="TEXT", help="Why, for whoever looks later.")
@pass_app
def verdict(app: App, run: str, verdict: str, note: str) -> None:
    """Write down whether the result of RUN is used. The last word counts."""
    app.ledger.set_verdict(run, verdict, note)
    click.echo(f"{run}: {verdict}" + (f" ({note})" if note else ""))


def _row(ledger: Ledger, record: RunRecord, now: float, neglect: Neglect | None) -> dict[str, Any]:
    from pennypod.report import winning_attempt

    attempts = ledger.attempts(record.run)
    winner = winning_attempt(attempts)
    costs = [a.invoiced_micros if a.invoiced_micros is not None else a.cost_micros(now) for a in attempts]
    return {
        "run": record.run,
        "job": record.job,
        "started": record.created,
        "closed": record.closed,
        "gpu": winner.gpu if winner else None,
        "provider": winner.provider if winner else None,
        "attempts": len(attempts),
        "seconds": round(sum(attempt.billed_seconds(now) for attempt in attempts), 3),
        "micros": sum(costs),
        "outcome": neglect.state if neglect else record.outcome or "running",
        "reason": neglect.advice if neglect else record.reason,
        "verdict": record.verdict,
        "note": record.verdict_note,
        "pods_still_billing": sum(not attempt.final for attempt in attempts),
    }


def _totals(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per job, and over all under "": sums of micro-dollars, so that they do not drift."""
    totals: dict[str, dict[str, Any]] = {}
    for job in [*sorted({row["job"] for row in rows}), ""]:
        chosen = [row for row in rows if job in ("", row["job"])]
        totals[job] = {
            "runs": len(chosen),
            "succeeded": sum(row["outcome"] == "succeeded" for row in chosen),
            "seconds": round(sum(row["seconds"] for row in chosen), 3),
            "micros": sum(row["micros"] for row in chosen),
        }
    return totals


def _public(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "micros"} | {
        "cost_usd": micros_to_usd(values["micros"])
    }


def _print_table(app: App, rows: list[dict[str, Any]], totals: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        click.echo("no runs")
        return
    table = Table(show_edge=False, pad_edge=False)
    for name in ("run", "job", "started (UTC)", "gpu", "provider"):
        table.add_column(name, no_wrap=name == "run")
    table.add_column("seconds", justify="right")
    table.add_column("cost", justify="right")
    for name in ("outcome", "verdict"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row["run"],
            row["job"],
            format_moment(row["started"]),
            row["gpu"] or "",
            row["provider"] or "",
            f"{row['seconds']:.0f}",
            format_usd(row["micros"]),
            Text(row["outcome"], style=_style(row)),
            row["verdict"] or "",
        )
    table.add_section()
    for job, total in totals.items():
        runs = f"{total['runs']} runs, {total['succeeded']} succeeded"
        table.add_row(runs, job or "all", "", "", "", f"{total['seconds']:.0f}", format_usd(total["micros"]), "", "")
    app.out.print(table)


def _style(row: dict[str, Any]) -> str:
    if row["pods_still_billing"]:
        return "bold yellow"
    return {"succeeded": "green", "failed": "red"}.get(row["outcome"], "")
