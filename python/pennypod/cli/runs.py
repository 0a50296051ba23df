"""`pennypod ssh` and `pennypod report`: one run at a time. Floor 3."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace

import click

from pennypod.cli.app import MAY_STILL_BILL, OK, App, json_option, pass_app
from pennypod.cli.times import format_moment
from pennypod.errors import InputError, SshError
from pennypod.model.pod import SshAddress

OUTPUTS = "/root/pennypod/out"


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--print", "only_print", is_flag=True, help="Print the ssh and scp lines instead of logging in.")
@pass_app
def ssh(app: App, run: str, command: tuple[str, ...], only_print: bool) -> None:
    """Log in to the pod of RUN, or run a command there: pennypod ssh RUN -- nvidia-smi

    Uses the run's own key and its pinned host key. The pod goes on billing as before.
    """
    from pennypod.acceptance import run_target

    address = _address(app, run)
    target = replace(run_target(app.settings, run, address), control_path=None)
    # One word is a line for the pod's shell, as with ssh itself; several words are one program and its arguments.
    remote = command[0] if len(command) == 1 else shlex.join(command)
    if only_print:
        click.echo(target.printable(remote))
        click.echo(shlex.join(target.scp_command(f"{OUTPUTS}/.", f"{run}-out")))
        return
    argv = target.command(remote) if remote else target.login_command()
    app.last_words()
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the terminal and its signals belong to ssh from here on
    except OSError as exc:
        raise SshError(f"the program ssh cannot be started: {exc}; install the package openssh-client") from exc


def _address(app: App, run: str) -> SshAddress:
    app.ledger.run(run)
    attempts = app.ledger.attempts(run)
    for attempt in reversed(attempts):
        if not attempt.final and attempt.ssh_host is not None and attempt.ssh_port is not None:
            return SshAddress(attempt.ssh_host, attempt.ssh_port, attempt.ssh_user or "root")
    if any(not attempt.final for attempt in attempts):
        raise InputError(f"the pod of {run} cannot be reached yet: it is still starting")
    if not attempts:
        raise InputError(f"{run} has rented no pod")
    last = attempts[-1]
    gone = f" since {format_moment(last.gone)} UTC" if last.gone is not None else ""
    raise InputError(f"the pod of {run} is gone{gone} ({last.outcome}): `pennypod report {run}` tells the rest")


@click.command()
@click.argument("run")
@json_option
@pass_app
def report(app: App, run: str, as_json: bool) -> int:
    """Show what RUN was: stages, cost and where it went, attempts, weights, verdict.

    Exit code 3 when a pod of RUN should be gone and is not proven to be, or when nobody sees to it any more: RUN is
    then "overdue" (its deadline has passed) or "unwatched" (its command and its guard are dead).
    """
    from pennypod.report import closing_line, run_document, spending_table, summary, unproven

    app.close_abandoned()
    document = run_document(app.ledger, run, app.clock.now())
    neglect = app.neglect(app.ledger.run(run))
    if neglect is not None:
        document |= {"outcome": neglect.state, "reason": neglect.advice}
    if as_json:
        app.print_json(document)
    else:
        app.out.print(summary(document, closing=False), soft_wrap=True)
        if document["spent"]:
            app.out.print(spending_table(document), soft_wrap=True)
        app.out.print(closing_line(document))
    left = unproven(app.ledger.run(run), app.ledger.attempts(run))
    return MAY_STILL_BILL if neglect or left else OK
