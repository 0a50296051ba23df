"""`pennypod offers`: what a job would be rented on, and what it may cost. Floor 3. Rents nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import pennypod
from pennypod.cli.app import App, json_option, pass_app
from pennypod.errors import AuthError, InputError, ProviderError
from pennypod.jobs import read_mapping
from pennypod.model.money import cap_micros, micros_to_usd
from pennypod.model.offer import Need

if TYPE_CHECKING:
    from pennypod.market import Estimate
    from pennypod.planning import Limits
    from pennypod.providers.base import Provider


def checked_cap(_ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A cap is a finite number, 0 or more; a wrong one is wrong usage and no matter of the job file."""
    try:
        return None if value is None else micros_to_usd(cap_micros(param.opts[0], value))
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


@click.command()
@click.option("-j", "--job", required=True, metavar="JOB", help="A job: group_vars/job_JOB.yml.")
@click.option("--provider", default="auto", show_default=True, help="auto, or one provider.")
@click.option("--smoke", is_flag=True, help="Plan the job's smoke training.")
@click.option(
    "--max-cost-usd", type=float, callback=checked_cap, metavar="USD", help="Cap on the worst case of the whole run."
)
@click.option("--max-price-usd-per-h", type=float, callback=checked_cap, metavar="USD", help="Cap on the hourly price.")
@click.option(
    "--root", type=click.Path(exists=True, file_okay=False, path_type=Path), help="The repository; found by itself."
)
@json_option
@pass_app
def offers(
    app: App,
    job: str,
    provider: str,
    smoke: bool,
    max_cost_usd: float | None,
    max_price_usd_per_h: float | None,
    root: Path | None,
    as_json: bool,
) -> None:
    """Rank what could be rented for JOB now, with the worst-case cost. Rents nothing.

    Reads the job file and the role's defaults as they stand. Values that are Jinja templates are left at their default:
    ansible-playbook train.yml -e job=JOB -e plan_only=true plans with those too.
    """
    from pennypod.planning import make_plan, plan_document

    variables, templated = job_variables(root or find_root(), job)
    caps = {"pod_max_cost_usd": max_cost_usd, "pod_max_price_usd_per_h": max_price_usd_per_h}
    variables |= {name: value for name, value in caps.items() if value is not None}
    need, estimate, limits = wishes(variables, smoke)
    chosen, note = _providers(app, provider)
    quarantined, secondary = app.ledger.quarantined(app.clock.now()), variables.get("pod_secondary") or {}
    plan = plan_document(make_plan(chosen, need, estimate, limits, quarantined, secondary))
    plan["notes"] = [*([note] if note else []), *refused_keys(chosen), *plan["notes"]]
    if templated:
        plan["notes"].append(f"templates, taken at their default: {', '.join(templated)}")
    if as_json:
        app.print_json(plan)
    else:
        _print(app, plan)


def _providers(app: App, wanted: str) -> tuple[dict[str, Any], str]:
    from pennypod.providers.registry import AUTO, select_providers

    if app.has_own_providers:
        own = dict(app.providers)
        return (own if wanted == AUTO else {wanted: own[wanted]}), ""
    return select_providers(wanted, app.settings)


def refused_keys(providers: Mapping[str, Provider]) -> list[str]:
    """A sentence for each provider that refuses our key: a market can be searched without one, but nothing rented.

    Asked by the listing of our pods, one call, which every command that rents makes first.
    """
    notes = []
    for name, provider in providers.items():
        with contextlib.suppress(ProviderError):  # a passing fault says nothing of the key
            try:
                provider.pods()
            except AuthError as exc:
                notes.append(f"nothing can be rented at {name} with this key: {exc}")
    return notes


def find_root() -> Path:
    """The repository: the folder we are in, else the one this package is installed from."""
    for folder in (Path.cwd(), Path(pennypod.__file__).resolve().parents[2]):
        if (folder / "group_vars").is_dir() and (folder / "roles").is_dir():
            return folder
    raise InputError("no group_vars/ here: run this from the repository, or name it with --root")


def job_variables(root: Path, job: str) -> tuple[dict[str, Any], list[str]]:
    """The job's `pod_*` variables as Ansible would rank their sources, and the names of those that are templates."""
    from pennypod.jobs import load_job

    merged: dict[str, Any] = {}
    templated: set[str] = set()
    own = load_job(root / "group_vars", job)
    for source in (read_mapping(root / "roles/pod/defaults/main.yml"), read_mapping(root / "group_vars/all.yml"), own):
        for name, value in source.items():
            if not name.startswith("pod_"):
                continue
            if "{{" in str(value):
                templated.add(name)
                continue
            merged[name] = value
            templated.discard(name)
    # The defaults are templates only where a playbook input may set them, and those inputs are options here.
    return merged, sorted(name for name in templated if name in own)


def wishes(variables: dict[str, Any], smoke: bool) -> tuple[Need, Estimate, Limits]:
    """What a job's variables ask for. Raises InputError."""
    from pennypod.market import DEFAULT_BUDGET_FACTOR, Estimate
    from pennypod.planning import Limits

    def value(name: str, default: Any = None) -> Any:
        found = variables.get(f"pod_{name}")
        return default if found is None else found

    def micros(name: str) -> int | None:
        return None if value(name) is None else cap_micros(f"pod_{name}", value(name))

    try:
        minutes = float(value("smoke_minutes", 5) if smoke else value("train_minutes", 60))
        need = Need(
            gpu=_names(value("gpu", ())),
            gpu_count=int(value("gpu_count", 1)),
            gpu_ram_gb=value("gpu_ram_gb"),
            reliability=value("reliability"),
            inet_down_mbps=value("inet_down_mbps"),
            inet_up_mbps=value("inet_up_mbps"),
            disk_gb=float(value("disk_gb", 20)),
            cuda_min=value("cuda_min"),
            region=_names(value("region", ())),
            secure=bool(value("secure", False)),
            max_price_micros_per_h=micros("max_price_usd_per_h"),
            vast_query=str(value("vast_query", "")),
        )
        estimate = Estimate(
            boot_s=float(value("boot_minutes", 3)) * 60,
            train_s=minutes * 60,
            upload_bytes=int(value("upload_bytes", 0)),
            fetch_bytes=int(value("fetch_bytes", 0)),
        )
        limits = Limits(
            budget_factor=float(value("budget_factor", DEFAULT_BUDGET_FACTOR)),
            max_attempts=int(value("max_attempts", 8)),
            max_cost_micros=micros("max_cost_usd"),
            allow_community=bool(value("allow_community", False)),
        )
    except (TypeError, ValueError) as exc:
        raise InputError(f"the job file holds a value that will not do: {exc}") from exc
    return need, estimate, limits


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(str(item) for item in value)


def _print(app: App, plan: dict[str, Any]) -> None:
    from pennypod.report import offers_table, offers_words

    app.out.print(offers_table(plan))
    for line in offers_words(plan):
        click.echo(line)
