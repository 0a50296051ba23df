"""What bills now, as plain data. Floor 2: providers and ledger, both passed in; knows nothing of Ansible.

Three steps: `take` asks (every listing must answer, or it raises: could not list is never nothing there), `snapshot`
turns the answers into a dict that survives JSON and so a cache, `hosts` turns that dict into groups and variables.
A snapshot holds neither secrets nor host keys, and no amount that goes stale: age and cost are worked out by `hosts`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pennypod.errors import InputError, PennypodError, ProviderError
from pennypod.glance import nothing_open
from pennypod.model.ids import PREFIX, Lease, parse_lease
from pennypod.model.meter import PodMeter
from pennypod.model.money import micros_to_usd
from pennypod.providers.local import engine_installed
from pennypod.providers.registry import LOCAL, all_providers

if TYPE_CHECKING:
    # This runs at the start of every ansible command, and importing SQLAlchemy takes a third of a second.
    from pennypod.ledger import AttemptRecord, Ledger, RunRecord
    from pennypod.model.pod import Pod
    from pennypod.providers.base import Provider
    from pennypod.settings import Settings

GROUPS = ("billing", "stopped", "orphans", "unproven")
"""Groups that always exist, so that a play on an empty one is not an error."""

Snapshot = dict[str, Any]


def take(settings: Settings, wanted: Sequence[str], now: float) -> Snapshot:
    """A snapshot of everything this control node can see; `wanted` narrows it to some providers.

    Raises ProviderError when a provider cannot be listed, InputError when a wanted one is not configured here.
    """
    providers = all_providers(settings)
    if not engine_installed(os.environ):
        providers.pop(LOCAL, None)  # no engine has no pods, while one that does not answer may well have some
    unknown = sorted(set(wanted) - set(providers))
    if unknown:
        known = ", ".join(sorted(providers)) or "none"
        raise InputError(f"provider {', '.join(unknown)} is not configured here (configured: {known})")
    chosen = {name: providers[name] for name in wanted} if wanted else providers
    pods = list_pods(chosen)
    ours = [pod for pod in pods if pod.name.startswith(PREFIX)]
    file = settings.ledger_file
    if (not ours and nothing_open(file)) or (file is not None and not file.exists()):
        return look_up(ours, None, settings.runs_dir, now)
    from pennypod.ledger import open_ledger

    with contextlib.closing(open_ledger(settings)) as ledger:
        return look_up(ours, ledger, settings.runs_dir, now)


def ledger_mark(settings: Settings) -> list[list[int]] | None:
    """Changes whenever a local ledger is written to; None for a ledger on a server. A cached snapshot dies with it."""
    file = settings.ledger_file
    if file is None:
        return None
    marks = []
    for path in (file, file.with_name(file.name + "-wal")):
        with contextlib.suppress(OSError):
            status = path.stat()
            marks.append([status.st_ino, status.st_mtime_ns, status.st_size])
    return marks


def look_up(pods: Sequence[Pod], ledger: Ledger | None, runs_dir: Path, now: float) -> Snapshot:
    """Match a listing that was taken at `now` with the ledger, which may have nothing to say."""
    leases = [lease for pod in pods if (lease := parse_lease(pod.name)) is not None]
    runs: dict[str, RunRecord] = {}
    attempts: list[AttemptRecord] = []
    pending = [] if ledger is None else ledger.pending_attempts()
    for run in sorted({lease.run for lease in leases} | {attempt.run for attempt in pending}):
        if ledger is None:
            break
        with contextlib.suppress(InputError):  # not a run of this ledger
            runs[run] = ledger.run(run)
            attempts += ledger.attempts(run)
    known = {lease.run for lease in leases} | set(runs)
    with_key = {run for run in known if (runs_dir / run / "id_ed25519").exists()}
    return snapshot(pods, runs, attempts, with_key=with_key, now=now)


def list_pods(providers: Mapping[str, Provider]) -> list[Pod]:
    """Every pod of every provider. Raises ProviderError naming the provider that could not be listed."""
    if len(providers) <= 1:
        return [pod for name, provider in providers.items() for pod in _list(name, provider)]
    with ThreadPoolExecutor(max_workers=len(providers)) as pool:
        listings = pool.map(_list, providers.keys(), providers.values())
        return [pod for listing in listings for pod in listing]


def _list(name: str, provider: Provider) -> list[Pod]:
    try:
        return provider.pods()
    except PennypodError as exc:
        raise ProviderError(f"the pods of {name} cannot be listed: {exc}", provider=name, code=exc.code) from exc


def snapshot(
    pods: Iterable[Pod],
    runs: Mapping[str, RunRecord],
    attempts: Sequence[AttemptRecord],
    *,
    with_key: Iterable[str],
    now: float,
) -> Snapshot:
    """One entry per pod of ours, and one per attempt that is not proven over and that no listing shows."""
    by_lease = {attempt.lease_name: attempt for attempt in attempts}
    keys = set(with_key)
    entries = []
    listed = set()
    for pod in pods:
        if not pod.name.startswith(PREFIX):
            continue  # somebody else's
        listed.add(pod.name)
        attempt = by_lease.get(pod.name)
        if attempt is not None and attempt.gone is not None and attempt.gone >= now:
            continue  # the proof of its end is newer than the listing
        lease = parse_lease(pod.name)
        run = runs.get(lease.run) if lease else None
        entries.append(_pod_entry(pod, lease, run, attempt))
    entries += [_attempt_entry(a, runs[a.run]) for a in attempts if not a.final and a.lease_name not in listed]
    for entry in entries:
        entry["has_key"] = entry["run"] in keys
    _name_hosts(entries)
    return {"taken": now, "hosts": sorted(entries, key=lambda entry: str(entry["host"]))}


def _pod_entry(pod: Pod, lease: Lease | None, run: RunRecord | None, attempt: AttemptRecord | None) -> dict[str, Any]:
    live = run is not None and run.closed is None and attempt is not None and not attempt.final
    return {
        "run": lease.run if lease else None,
        "job": lease.job if lease else None,
        "artifacts_dir": run.artifacts_dir if run else None,
        "attempt": lease.attempt if lease else None,
        "deadline": lease.deadline if lease else None,
        "provider": pod.provider,
        "pod_id": pod.pod_id,
        "pod_name": pod.name,
        "machine_id": pod.machine_id,
        "gpu": pod.gpu,
        "gpu_count": pod.gpu_count,
        "state": pod.state.value,
        "group": "billing" if pod.billing else "stopped",
        "orphan": not live,
        # Age by the ledger's clock, which started at the create call.
        "since": attempt.intended if attempt else pod.created,
        "price_micros_per_h": pod.price_micros_per_h,
        # What the ledger knows of the meter counts, so that nobody is told two costs of one pod.
        "meter": _meter(attempt, pod),
        "address": _address(pod, attempt),
    }


def _attempt_entry(attempt: AttemptRecord, run: RunRecord) -> dict[str, Any]:
    lease = parse_lease(attempt.lease_name)
    return {
        "run": attempt.run,
        "job": run.job,
        "artifacts_dir": run.artifacts_dir,
        "attempt": attempt.attempt,
        "deadline": lease.deadline if lease else None,
        "provider": attempt.provider,
        "pod_id": attempt.pod_id,
        "pod_name": attempt.lease_name,
        "machine_id": attempt.machine_id,
        "gpu": attempt.gpu,
        "gpu_count": attempt.gpu_count,
        "state": attempt.state.value,
        "group": "unproven",
        "orphan": False,
        "since": attempt.intended,
        "price_micros_per_h": attempt.price_now,
        "meter": _meter(attempt, None),
        "address": _address(None, attempt),
    }


def _meter(attempt: AttemptRecord | None, pod: Pod | None) -> dict[str, Any] | None:
    """A `PodMeter` as a dict; None when nothing is known to have been made."""
    known = attempt.meter if attempt is not None else None
    if known is None and pod is not None:
        known = PodMeter(pod.price_micros_per_h, made=pod.created, computing=pod.created)
    return None if known is None else asdict(known)


def _cost_micros(meter: Mapping[str, Any] | None, now: float) -> int:
    return 0 if meter is None else PodMeter(**meter).micros(now)


def _address(pod: Pod | None, attempt: AttemptRecord | None) -> dict[str, Any] | None:
    if pod is not None and pod.address is not None:
        return {"host": pod.address.host, "port": pod.address.port, "user": pod.address.user}
    if attempt is not None and attempt.ssh_host is not None and attempt.ssh_port is not None:
        return {"host": attempt.ssh_host, "port": attempt.ssh_port, "user": attempt.ssh_user or "root"}
    return None


def _name_hosts(entries: list[dict[str, Any]]) -> None:
    """A host is a run: the pod that serves it best gets the run's id, every other one keeps its own name."""
    taken: set[str] = set()
    for entry in sorted(entries, key=_precedence):
        # Ansible reads some characters in a host name as a pattern, and a pod's name may hold anything.
        own = re.sub(r"[^A-Za-z0-9._-]", "_", str(entry["pod_name"]))
        choices = [own, f"{own}-{entry['provider']}-{str(entry['pod_id'])[:12]}"]
        if entry["run"] is not None:
            choices.insert(0, str(entry["run"]))
        entry["host"] = next((name for name in choices if name not in taken), f"{own}-{len(taken)}")
        taken.add(entry["host"])


def _precedence(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    order = ("billing", "stopped", "unproven").index(entry["group"])
    return (entry["orphan"], order, -(entry["attempt"] or 0), entry["pod_name"], str(entry["pod_id"]))


def hosts(taken: Snapshot, runs_dir: Path, now: float) -> dict[str, dict[str, Any]]:
    """``{host: {"groups": [...], "vars": {...}}}`` as of `now`, from a fresh or a cached snapshot."""
    return {
        entry["host"]: {"groups": _groups(entry), "vars": _variables(entry, runs_dir, now)} for entry in taken["hosts"]
    }


def _groups(entry: Mapping[str, Any]) -> list[str]:
    groups = [entry["group"], f"provider_{_group_part(entry['provider'])}"]
    if entry["orphan"]:
        groups.append("orphans")
    if entry["job"]:
        groups.append(f"job_{entry['job']}")
    if entry["gpu"]:
        groups.append(f"gpu_{_group_part(entry['gpu'])}")
    return groups


def _group_part(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _variables(entry: Mapping[str, Any], runs_dir: Path, now: float) -> dict[str, Any]:
    age = max(0.0, now - entry["since"])
    deadline = entry["deadline"]
    variables: dict[str, Any] = {
        "pennypod_run": entry["run"],
        "pennypod_job": entry["job"],
        "pennypod_artifacts_dir": entry["artifacts_dir"],
        "pennypod_provider": entry["provider"],
        "pennypod_pod_id": entry["pod_id"],
        "pennypod_pod_name": entry["pod_name"],
        "pennypod_machine_id": entry["machine_id"],
        "pennypod_gpu": entry["gpu"],
        "pennypod_gpu_count": entry["gpu_count"],
        "pennypod_state": entry["state"],
        "pennypod_price_usd_per_h": micros_to_usd(entry["price_micros_per_h"]),
        "pennypod_age_s": round(age, 1),
        "pennypod_cost_so_far_usd": micros_to_usd(_cost_micros(entry["meter"], now)),
        "pennypod_deadline": deadline,
        "pennypod_overdue": deadline is not None and now > deadline,
        "pennypod_may_still_be_billing": entry["group"] != "stopped",
    }
    return variables | _ssh_variables(entry, runs_dir)


def _ssh_variables(entry: Mapping[str, Any], runs_dir: Path) -> dict[str, Any]:
    address = entry["address"]
    if address is None:
        return {}
    variables = {
        "ansible_connection": "ssh",
        "ansible_host": address["host"],
        "ansible_port": address["port"],
        "ansible_user": address["user"],
        # Images keep Python in different places; looking costs one short command, a wrong guess costs the task.
        "ansible_python_interpreter": "auto_silent",
    }
    options = ["-o StrictHostKeyChecking=yes", "-o IdentitiesOnly=yes"]
    if entry["run"] is not None:
        run_dir = runs_dir / entry["run"]
        options.insert(0, f"-o '{_known_hosts_option(run_dir / 'known_hosts')}'")
        if entry["has_key"]:
            variables["ansible_ssh_private_key_file"] = str(run_dir / "id_ed25519")
    variables["ansible_ssh_common_args"] = " ".join(options)
    return variables


def _known_hosts_option(path: Path) -> str:
    # Read by a shell-like splitter first (hence the quotes around the whole) and by ssh's own second, which expands %.
    text = str(path).replace("%", "%%").replace("'", "'\\''")
    return f'UserKnownHostsFile="{text}"'
