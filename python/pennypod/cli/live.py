"""`pennypod live`: one small paid run at a real provider, and where it differs from the simulator. Floor 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pennypod.cli.app import App, pass_app
from pennypod.cli.offers import find_root, job_variables, wishes
from pennypod.errors import BudgetError, FundsError, InputError
from pennypod.model.money import format_usd, usd_to_micros

if TYPE_CHECKING:
    from pennypod.providers.base import Provider

CONFIRM_VARIABLE = "PENNYPOD_LIVE_IN_CI"
CONFIRMED = "spend-money"
MOST_USD = 20.0


@click.command()
@click.option("--provider", type=click.Choice(["vast", "runpod"]), required=True)
@click.option("--max-usd", type=float, required=True, metavar="USD", help="What the run may cost at the very most.")
@click.option("-j", "--job", default="demo", show_default=True, metavar="JOB", help="The job to run.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the report goes.  [default: artifacts/live-...]")
@click.option(
    "--root", type=click.Path(exists=True, file_okay=False, path_type=Path), help="The repository; found by itself."
)
@pass_app
def live(app: App, provider: str, max_usd: float, job: str, out: Path | None, root: Path | None) -> int:
    """Run JOB once on the cheapest fit of a real account, for real money, and compare.

    First checks the key, the balance and that the worst case fits --max-usd; then rents, trains and destroys like
    train.yml. Every call is kept, with keys, ids, addresses, names and amounts taken out, beside what the simulator
    would have answered, and the differences are listed in report.md: send them to the project.

    The exit code is that of the run. In CI it refuses, unless PENNYPOD_LIVE_IN_CI=spend-money says that this is meant.
    """
    from pennypod.recording import VARIABLE, start_recording, stop_recording

    refuse_in_ci(os.environ)
    if not 0 < max_usd <= MOST_USD:
        raise InputError(f"--max-usd is above 0 and at most {MOST_USD:.0f}: this is a trial, not a training")
    root = root or find_root()
    stamp = time.strftime("%m%d-%H%M%S", time.gmtime(app.clock.now()))
    folder = (out or root / "artifacts" / f"live-{provider}-{stamp}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "exchanges.jsonl"
    environment = {**os.environ, VARIABLE: str(record)}
    start_recording(record)
    try:
        check_money(app, provider, job, root, usd_to_micros(max_usd), environment)
        return _train(root, job, provider, max_usd, folder, environment)
    finally:
        stop_recording(record)
        found = write_report(provider, record, folder)
        click.echo(f"{found} differences between {provider} and the simulator: {folder / 'report.md'}")


def refuse_in_ci(environ: Mapping[str, str]) -> None:
    """Raises InputError in CI, where nobody sees what is being spent."""
    in_ci = environ.get("CI", "").casefold() not in ("", "0", "false", "no")
    if in_ci and environ.get(CONFIRM_VARIABLE) != CONFIRMED:
        raise InputError(f"this spends real money and CI is set: {CONFIRM_VARIABLE}={CONFIRMED} if that is meant")


def check_money(app: App, name: str, job: str, root: Path, cap_micros: int, environ: Mapping[str, str]) -> Provider:
    """Raises before anything is spent: no key, a worst case over the cap, or a balance that does not carry it."""
    from pennypod.planning import make_plan
    from pennypod.providers.registry import open_provider

    provider = open_provider(name, app.settings, environ)
    balance = provider.balance_micros()
    variables, _templated = job_variables(root, job)
    variables["pod_max_cost_usd"] = cap_micros / 1e6
    need, estimate, limits = wishes(variables, smoke=False)
    plan = make_plan({name: provider}, need, estimate, limits, app.ledger.quarantined(app.clock.now()))
    if plan.worst_case_micros > cap_micros:  # make_plan has seen to it; this is the last look before money is spent
        raise BudgetError(f"the run may cost {format_usd(plan.worst_case_micros)}, over {format_usd(cap_micros)}")
    if balance is None:
        click.echo(f"{name} does not tell the balance; the worst case is {format_usd(plan.worst_case_micros)}")
    elif balance < plan.worst_case_micros:
        raise FundsError(
            f"{format_usd(balance, 2)} are left at {name} and the run may cost {format_usd(plan.worst_case_micros)}:"
            " add credit, or the pod is ended with its data"
        )
    else:
        click.echo(
            f"{name}: {format_usd(balance, 2)} left, the run may cost {format_usd(plan.worst_case_micros)} at worst,"
            f" the cap is {format_usd(cap_micros, 2)}"
        )
    return provider


def _train(root: Path, job: str, provider: str, max_usd: float, folder: Path, environ: Mapping[str, str]) -> int:
    """train.yml as a person would start it; its own checks, guard and teardown hold as always."""
    extra = {"job": job, "provider": provider, "max_cost_usd": f"{max_usd:g}", "artifacts_dir": str(folder)}
    options = [part for name, value in extra.items() for part in ("-e", f"{name}={value}")]
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "train.yml", *options]
    process = subprocess.Popen(command, cwd=root, env={"ANSIBLE_CONFIG": str(root / "ansible.cfg"), **environ})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the run has got it too, and is ending its pod


def write_report(provider: str, record: Path, folder: Path) -> int:
    """exchanges.json, differences.json and report.md from a recording; how many differences there are."""
    from pennypod.recording import read_exchanges
    from pennypod.simulator.compare import as_document, as_markdown, differences
    from pennypod.simulator.replay import replay

    replayed = replay([item for item in read_exchanges(record) if item.provider == provider])
    found = differences(replayed)
    _write(folder / "exchanges.json", [item.as_document() for item in replayed])
    _write(folder / "differences.json", as_document(replayed, found))
    (folder / "report.md").write_text(as_markdown(provider, replayed, found), encoding="utf-8")
    record.unlink(missing_ok=True)
    return len(found)


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
