"""What a run was: run.json, receipt.json and the summary for people. Floor 2: the ledger and the artifacts folder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pennypod.ledger import (
    STAGES,
    AttemptRecord,
    AttemptState,
    Ledger,
    Outcome,
    PassedOverRecord,
    RunRecord,
    StageRecord,
    WeightsAtEnd,
    WeightsState,
)
from pennypod.model import economics
from pennypod.model.economics import Span
from pennypod.model.meter import uncounted_words
from pennypod.model.money import format_usd, micros_to_usd
from pennypod.model.offer import located, place
from pennypod.receipts import receipt_document, write_json

WORTH_BAKING_S = 5.0  # a bootstrap that finds nothing to do takes less
RUN_FILE = "run.json"
RECEIPT_FILE = "receipt.json"


def run_document(ledger: Ledger, run: str, now: float) -> dict[str, Any]:
    """The public `run.json` (design.md section 7) from the ledger alone. Seconds, dollars, Unix times."""
    record = ledger.run(run)
    attempts = ledger.attempts(run)
    winner = winning_attempt(attempts)
    stages = {stage.stage: stage for stage in ledger.stages(run)}
    cost = sum(attempt.cost_micros(now) for attempt in attempts)
    return {
        "run": run,
        "job": record.job,
        "provider": winner.provider if winner else None,
        "gpu": winner.gpu if winner else None,
        "price_usd_per_h": micros_to_usd(winner.price_now) if winner else None,
        "started": record.created,
        "deadline": record.deadline,
        "closed": record.closed,
        "worst_case_usd": None if record.worst_case_micros is None else micros_to_usd(record.worst_case_micros),
        "stages": {name: _seconds(stages[name], record.closed, now) for name in STAGES if name in stages},
        "attempts": [_attempt_document(attempt, now) for attempt in attempts],
        "passed_over": [_passed_over_document(record) for record in ledger.passed_over(run)],
        "image": winner.image if winner else None,
        "ssh": _ssh_document(winner),
        "fuse": _fuse_document(winner),
        "dataset": winner.dataset if winner else None,
        "isolation": (winner.isolation if winner else None) or {"enforced": False, "reason": "not asked for"},
        "billed_seconds": round(sum(attempt.billed_seconds(now) for attempt in attempts), 3),
        "cost_usd": micros_to_usd(cost),
        "spent": _spent_document(winner, attempts, stages.values(), record.closed, now),
        "traffic_known": all(attempt.traffic_known(now) for attempt in attempts),
        "artifacts": [
            {"path": item.path, "bytes": item.bytes, "sha256": item.sha256, "kind": item.kind}
            for item in ledger.artifacts(run)
        ],
        "artifacts_dir": record.artifacts_dir,
        "weights_at_end": weights_at_end(ledger, record),
        "outcome": record.outcome or "running",
        "reason": record.reason,
        "verdict": record.verdict,
        "pods_still_billing": sum(not attempt.final for attempt in attempts),
    }


def _seconds(stage: StageRecord, closed: float | None, now: float) -> float:
    """A stage that nobody finished ended with its run at the latest."""
    end = stage.finished if stage.finished is not None else (closed if closed is not None else now)
    return round(max(0.0, end - stage.started), 3)


def _spent_document(
    winner: AttemptRecord | None,
    attempts: Iterable[AttemptRecord],
    stages: Iterable[StageRecord],
    closed: float | None,
    now: float,
) -> dict[str, dict[str, float]]:
    """Seconds and dollars of each part of the run's pods' lives; the dollars add up to `cost_usd`."""
    spans = [Span(stage.stage, stage.started, stage.started + _seconds(stage, closed, now)) for stage in stages]
    others = [attempt.meter for attempt in attempts if attempt.meter is not None and attempt is not winner]
    cut = economics.parts(winner.meter if winner else None, others, spans, now)
    return {part.name: {"seconds": round(part.seconds, 3), "usd": micros_to_usd(part.micros)} for part in cut}


def winning_attempt(attempts: Iterable[AttemptRecord]) -> AttemptRecord | None:
    """The attempt that gave a usable pod, else the last one that rented anything at all."""
    rented = [attempt for attempt in attempts if attempt.rented is not None]
    usable = [attempt for attempt in rented if attempt.ready is not None]
    candidates = usable or rented
    return candidates[-1] if candidates else None


def weights_at_end(ledger: Ledger, record: RunRecord) -> dict[str, Any] | None:
    """What had become of the run's newest checkpoint when its pod went; None while the run goes on."""
    if record.weights_at_end is not None:
        return record.weights_at_end
    if record.closed is None:
        return None
    weights = [item for item in ledger.artifacts(record.run) if item.kind == "weights"]
    if weights:
        return WeightsAtEnd(WeightsState.HOME, "home and verified", path=weights[0].path).as_document()
    usable = any(attempt.ready is not None for attempt in ledger.attempts(record.run))
    if not usable or not any(stage.stage == "training" for stage in ledger.stages(record.run)):
        return WeightsAtEnd(WeightsState.NONE, "no training was started").as_document()
    return WeightsAtEnd(WeightsState.LOST, "the pod went before anybody could look for a checkpoint").as_document()


def weights_are_home(ledger: Ledger, run: str) -> bool:
    """Whether the ledger's weights of the run lie in its artifacts folder as they were verified, hash and all."""
    folder = Path(ledger.run(run).artifacts_dir)
    weights = [item for item in ledger.artifacts(run) if item.kind == "weights"]
    return bool(weights) and all(_is_intact(folder / item.path, item.bytes, item.sha256) for item in weights)


def had_its_weights(ledger: Ledger, run: str) -> bool:
    """Whether the stage of the weights did its work; what a failed training left comes home without that stage."""
    return any(stage.stage == "weights" for stage in ledger.stages(run)) and weights_are_home(ledger, run)


def _is_intact(path: Path, size: int, sha256: str) -> bool:
    try:
        if path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def write_results(ledger: Ledger, run: str, now: float) -> dict[str, Any]:
    """Write run.json and receipt.json into the run's artifacts folder, each in one atomic step; returns run.json."""
    folder = Path(ledger.run(run).artifacts_dir)
    folder.mkdir(parents=True, exist_ok=True)
    document = run_document(ledger, run, now)
    write_json(folder / RECEIPT_FILE, receipts_of(ledger, run, now))
    write_json(folder / RUN_FILE, document)
    return document


def close_with_results(ledger: Ledger, run: str, outcome: Outcome, reason: str, now: float) -> bool:
    """Close a run in the name of a command that is dead, and write its results; whether this call closed it."""
    closed = ledger.close_run(run, outcome, reason, now)
    if closed:
        with contextlib.suppress(OSError):  # the artifacts may lie on another machine
            write_results(ledger, run, now)
    return closed


def receipts_of(ledger: Ledger, run: str, now: float) -> dict[str, Any]:
    """The run's `receipt.json` from the ledger alone, sealed now."""
    attempts = ledger.attempts(run)
    receipts = [attempt.receipt for attempt in attempts if attempt.receipt is not None]
    still_open = [attempt.lease_name for attempt in attempts if not attempt.final]
    return receipt_document(ledger.sealer, run, receipts, still_open, now)


def summary(document: dict[str, Any], *, closing: bool = True, interrupted: bool = False) -> RenderableType:
    """The table a run ends with: stages, cost, weights, verdict and, when `closing`, what still bills.

    `interrupted`: its command was, so that a run which the ledger still calls running is so no more.
    """
    cut_off = interrupted and document["outcome"] == "running"
    outcome = "interrupted" if cut_off else document["outcome"]
    title = Text(f"{document['run']}: {outcome}", style="italic")  # the table's own would wrap at its width
    table = Table(show_edge=False)
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for stage, seconds in document["stages"].items():
        table.add_row(stage, f"{seconds:.1f}")
    lines: list[RenderableType] = [title, table, Text()]
    if document["outcome"] not in (Outcome.SUCCEEDED, "running") and document["reason"]:
        lines.append(Text(f"reason      {document['reason']}", style="red"))
    # One that is not over, or whose end only follows from the run's, has no reason of its own to tell.
    lost = [a for a in document["attempts"] if a["outcome"] not in ("ready", "done") and a["reason"]]
    for attempt in lost:
        lines.append(Text(f"attempt     {place(attempt)}: {attempt['reason']}"))
    for offer in document["passed_over"]:
        lines.append(Text(f"passed over {place(offer)}: {offer['reason']}"))
    if document["gpu"]:
        lines.append(
            Text(
                f"pod         {document['gpu']} on {document['provider']}, ${document['price_usd_per_h']:.4f}/h"
                + _host_key_words(document["ssh"])
            )
        )
    cost = f"${document['cost_usd']:.6f} for {document['billed_seconds']:.0f} s billed"
    lines.append(Text(f"cost        {cost}{_traffic_words(document)}"))
    for item in document["artifacts"]:
        if item["kind"] == "weights":
            lines.append(Text(f"weights     {document['artifacts_dir']}/{item['path']} ({item['bytes']} bytes)"))
            lines.append(Text(f"            sha256 {item['sha256']}"))
    lines += _fuse_words(document.get("fuse"))
    lines += _isolation_words(document.get("isolation"))
    lines += _weights_words(document.get("weights_at_end"))
    if cut_off:
        lines.append(Text(f"look        pennypod report {document['run']} tells how its guard has ended it"))
    elif document["verdict"]:
        lines.append(Text(f"verdict     {document['verdict']}"))
    elif document["outcome"] == Outcome.SUCCEEDED:
        lines.append(Text(f"verdict     open: pennypod ledger verdict {document['run']} adopt|skip"))
    if closing:
        lines.append(closing_line(document))
    return Group(*lines)


def closing_line(document: Mapping[str, Any]) -> Text:
    billing = document["pods_still_billing"]
    return Text(f"pods still billing: {billing}", style="bold red" if billing else "bold green")


def spending_table(document: Mapping[str, Any]) -> RenderableType:
    """Where the cents went, and what a golden image, which needs no bootstrap, would have saved."""
    table = Table(show_edge=False)
    table.add_column("where the cents went")
    for name in ("seconds", "dollars", "share"):
        table.add_column(name, justify="right")
    total = document["cost_usd"]
    for name, part in document["spent"].items():
        share = f"{part['usd'] / total:.0%}" if total else ""
        table.add_row(name, f"{part['seconds']:.1f}", f"{part['usd']:.6f}", share)
    lines: list[RenderableType] = [table]
    lines += _dataset_words(document.get("dataset"))
    bootstrap = document["spent"].get("bootstrap")
    if bootstrap is not None and bootstrap["seconds"] >= WORTH_BAKING_S:
        saved = f"up to {bootstrap['seconds']:.0f} s and ${bootstrap['usd']:.6f} of each run"
        hint = f": ansible-playbook bake.yml -e job={document['job']}" if document["provider"] == "local" else ""
        lines.append(Text(f"a golden image would save {saved}{hint}"))
    return Group(Text(), *lines, Text())


def _dataset_words(way: Mapping[str, Any] | None) -> list[Text]:
    """Which way the data set came, and what that cost the line here."""
    if way is None:
        return []
    sent = f"{way['sent_bytes'] / 1e6:.1f} MB sent from here"
    why = f" ({way['why']})" if way["why"] else ""
    return [Text(f"data set {way['bytes'] / 1e6:.1f} MB by {way['by']}: {sent}{why}")]


def _traffic_words(document: Mapping[str, Any]) -> str:
    """Nothing when the cost is all; a pod at work will still tell."""
    unknown = [a for a in document["attempts"] if not a["traffic_known"]]
    if not unknown:
        return ""
    if document["pods_still_billing"]:
        return ", traffic since its last count not included"
    return uncounted_words(
        min(a["traffic_counted"] for a in unknown) if all(a["traffic_counted"] for a in unknown) else None
    )


def _host_key_words(ssh: Mapping[str, Any] | None) -> str:
    known = (ssh or {}).get("host_key")
    return f", host key {known}" if known else ""


def _weights_words(end: Mapping[str, Any] | None) -> list[Text]:
    """A checkpoint that came home at the last moment, or did not: what a person must not overlook."""
    if end is None or end["state"] not in (WeightsState.ESCROWED, WeightsState.LOST):
        return []
    lost = end["state"] == WeightsState.LOST
    about = [f"of {end['age_s']:.0f} s before the end"] if end["age_s"] is not None else []
    about += [f"the log is at epoch {end['epoch']}"] if end["epoch"] is not None else []
    text = end["reason"] + (f" ({', '.join(about)})" if about else "")
    return [Text(f"{'lost' if lost else 'checkpoint':12}{text}", style="bold red" if lost else "")]


def offers_table(plan: Mapping[str, Any]) -> Table:
    """The ladder of `planning.plan_document`, the first rung first."""
    table = Table(show_edge=False, pad_edge=False)
    for name in ("", "gpu", "provider", "machine", "$/h", "minutes", "expected", "worst case"):
        table.add_column(name, justify="left" if name in ("gpu", "provider", "machine") else "right")
    for rung, offer in enumerate(plan["offers"], start=1):
        table.add_row(
            str(rung),
            f"{offer['gpu_count']}x {offer['gpu']}",
            offer["provider"],
            located(offer["machine_id"], offer["region"]),
            f"${offer['price_usd_per_h']:.4f}",
            f"{offer['expected_s'] / 60:.1f}",
            f"${offer['expected_usd']:.4f}",
            f"${offer['worst_case_usd']:.4f}",
        )
    return table


def offers_words(plan: Mapping[str, Any]) -> list[str]:
    """What belongs under that table."""
    minutes = plan["deadline_s"] / 60
    return [
        *(f"note: {note}" for note in plan["notes"]),
        f"worst case ${plan['worst_case_usd']:.4f}: the pod ends after {minutes:.1f} min in any case",
    ]


def _attempt_document(attempt: AttemptRecord, now: float) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "provider": attempt.provider,
        "pod_id": attempt.pod_id,
        "pod_name": attempt.lease_name,
        "machine_id": attempt.machine_id,
        "region": attempt.region,
        "host_key": attempt.host_key,
        "gpu": attempt.gpu,
        "price_usd_per_h": micros_to_usd(attempt.price_now),
        "state": attempt.state.value,
        "outcome": attempt.outcome or attempt.state.value,
        "reason": attempt.reason,
        "billed_seconds": round(attempt.billed_seconds(now), 3),
        "cost_usd": micros_to_usd(attempt.cost_micros(now)),
        "cost_parts_usd": {} if attempt.meter is None else _usd(attempt.meter.parts(now)),
        "sent_bytes": attempt.sent_bytes or 0,
        "fetched_bytes": attempt.fetched_bytes or 0,
        "traffic_known": attempt.traffic_known(now),
        "traffic_counted": attempt.traffic_counted,
    }


def _usd(parts: Mapping[str, int]) -> dict[str, float]:
    return {kind: micros_to_usd(micros) for kind, micros in parts.items()}


def _passed_over_document(record: PassedOverRecord) -> dict[str, Any]:
    return {
        "at": record.at,
        "provider": record.provider,
        "machine_id": record.machine_id,
        "region": record.region,
        "gpu": record.gpu,
        "price_usd_per_h": micros_to_usd(record.price_micros_per_h),
        "outcome": record.code,
        "reason": record.reason,
    }


def _ssh_document(attempt: AttemptRecord | None) -> dict[str, Any] | None:
    if attempt is None or attempt.ssh_host is None:
        return None
    return {
        "host": attempt.ssh_host,
        "port": attempt.ssh_port,
        "user": attempt.ssh_user,
        "host_key": attempt.host_key,
    }


def _fuse_document(attempt: AttemptRecord | None) -> dict[str, Any] | None:
    """Whether the pod would have ended itself, as it said at the gate; None before anybody could ask."""
    if attempt is None or attempt.fuse is None:
        return None
    return {"lease_s": attempt.lease_s or 0.0, **attempt.fuse}


def _fuse_words(fuse: Mapping[str, Any] | None) -> list[Text]:
    """Nothing while all is well."""
    if fuse is None or (fuse["armed"] and fuse["has_key"] is not False):
        return []
    return [Text("fuse        the pod could not have ended itself", style="yellow")]


def _isolation_words(isolation: Mapping[str, Any] | None) -> list[Text]:
    """Nothing where nobody asked for it; one that was asked for and is not there must not be overlooked."""
    if isolation is None or "phase" not in isolation:
        return []
    if not isolation["enforced"]:
        return [Text(f"isolation   none: {isolation['reason']}", style="yellow")]
    held = "to what it needs" if isolation["phase"] == "closed" else "to what it needs and the hosts of packages"
    return [Text(f"isolation   the pod could talk {held}")]


def unproven(run: RunRecord, attempts: Iterable[AttemptRecord]) -> list[AttemptRecord]:
    """The pods of a run that should be gone and are not proven to be; a pod at work is none of them."""
    over = run.closed is not None or run.fenced_reason is not None
    return [a for a in attempts if not a.final and (over or a.state is AttemptState.DESTROYING)]


def still_billing_line(pending: Sequence[AttemptRecord], now: float, runs: Collection[str] = ()) -> str:
    """What to say at the end of every command; empty when nothing may be billing.

    With `runs`, the command was about these: pods of other ones are told apart, on a line of their own.
    """
    own = [attempt for attempt in pending if not runs or attempt.run in runs]
    others = [attempt for attempt in pending if attempt not in own]
    lines = [
        _billing_words("may still be billing", own, now),
        _billing_words("may still be billing, of other runs", others, now),
    ]
    return "\n".join(line for line in lines if line)


def _billing_words(what: str, pending: Sequence[AttemptRecord], now: float) -> str:
    if not pending:
        return ""
    cost = format_usd(sum(attempt.cost_micros(now) for attempt in pending))
    names = ", ".join(attempt.lease_name for attempt in pending)
    ending = sum(attempt.state is AttemptState.DESTROYING for attempt in pending)
    being = f" ({ending} being destroyed)" if ending else ""
    return f"{what}: {len(pending)} {'pod' if len(pending) == 1 else 'pods'}{being}, {cost} so far: {names}"
