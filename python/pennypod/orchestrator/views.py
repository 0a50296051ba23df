"""What the status page and the status URL show. Floor 3: reads the store, the ledger and the runs' progress files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pennypod.errors import InputError
from pennypod.events import EVENTS_FILE
from pennypod.ledger import STAGES, AttemptRecord, AttemptState
from pennypod.model.money import format_usd, micros_to_usd
from pennypod.model.offer import place
from pennypod.orchestrator.problems import ProblemError
from pennypod.orchestrator.service import Service
from pennypod.orchestrator.spend import is_billing, month_start, spend
from pennypod.orchestrator.store import ENDED, RUNNING, WAITING, Request
from pennypod.receipts import as_written
from pennypod.report import receipts_of, run_document

_TAIL_BYTES = 16_384
_TAIL_LINES = 12
_MOST_ENDED = 20


def status_document(service: Service, run: str) -> dict[str, Any]:
    """What `GET /runs/RUN` answers. Raises ProblemError unknown_run."""
    request = service.store.request(run)
    try:
        document = run_document(service.ledger, run, service.clock.now())
    except InputError:
        document = None
    return {
        "run": request.run,
        "job": request.job,
        "state": request.state,
        "stage": request.stage,
        "outcome": request.outcome,
        "reason": request.reason,
        "received": request.received,
        "admitted": request.admitted,
        "ended": request.ended,
        "priority": request.priority,
        "cancel_requested": request.cancel_requested is not None,
        "timeline": [
            {"at": entry.at, "kind": entry.kind, "name": entry.name, "text": entry.text}
            for entry in service.store.timeline(run)
        ],
        "log_tail": log_tail(service.settings.runs_dir / run),
        "document": document,
    }


def status_text(document: Mapping[str, Any]) -> str:
    """The same for a shell: one `name: value` per line, one line per value."""
    names = ("run", "job", "state", "stage", "outcome", "reason")
    return "".join(f"{name}: {' '.join(str(document[name] or '').split())}\n" for name in names)


def receipt_text(service: Service, run: str) -> str:
    """What `GET /runs/RUN/receipt.json` answers, as `pennypod verify` wants it. Raises ProblemError unknown_run."""
    service.store.request(run)
    try:
        service.ledger.run(run)
    except InputError as exc:
        raise ProblemError("not_found", f"{run} has rented nothing yet") from exc
    return as_written(receipts_of(service.ledger, run, service.clock.now()))


def page(service: Service) -> dict[str, Any]:
    """Everything the status page shows."""
    now = service.clock.now()
    attempts = service.ledger.attempts_since(month_start(now))
    money = spend(attempts, now)
    billing = [attempt for attempt in attempts if is_billing(attempt)]
    return {
        "now": now,
        "pods": [_pod(service, attempt, now) for attempt in billing],
        "burn": format_usd(money.burn_per_h, 2),
        "today": format_usd(money.today, 4),
        "month": format_usd(money.month, 4),
        "always_on": None if money.always_on is None else format_usd(money.always_on, 2),
        "saved": None if money.saved is None else format_usd(max(0, money.saved), 2),
        "saved_share": None if money.saved_share is None else f"{max(0.0, money.saved_share):.0%}",
        "queue": [_row(service, request, now) for request in reversed(service.store.requests(WAITING))],
        "running": [_row(service, request, now) for request in service.store.requests(RUNNING)],
        "ended": [_row(service, request, now) for request in service.store.requests(ENDED, limit=_MOST_ENDED)],
        "limits": service.limits,
    }


def _pod(service: Service, attempt: AttemptRecord, now: float) -> dict[str, Any]:
    deadline = service.ledger.run(attempt.run).deadline
    return {
        "run": attempt.run,
        "pod": attempt.pod_id or attempt.lease_name,
        "name": attempt.lease_name,
        "gpu": attempt.gpu,
        "provider": attempt.provider,
        "state": attempt.state.value,
        "price": f"${micros_to_usd(attempt.price_now):.2f}/h",
        "cost": format_usd(attempt.cost_micros(now)),
        "deadline": deadline,
        "left": None if deadline is None else duration(deadline - now),
    }


def _row(service: Service, request: Request, now: float) -> dict[str, Any]:
    document = None
    if request.state != WAITING:
        try:
            document = run_document(service.ledger, request.run, now)
        except InputError:
            document = None
    return {
        "request": request,
        "since": duration(now - request.received),
        "received": moment(request.received),
        "cost": None if document is None else f"${document['cost_usd']:.4f}",
        "stages": _stages(document),
        "tries": _tries(document),
        "tail": log_tail(service.settings.runs_dir / request.run) if request.state == RUNNING else [],
        "artifacts": [] if document is None else document["artifacts"],
        "still_billing": 0 if document is None else document["pods_still_billing"],
        "proven_gone": 0 if document is None else _proven_gone(document),
    }


def _proven_gone(document: Mapping[str, Any]) -> int:
    """How many pods have a receipt; an attempt of which no pod came has none."""
    return sum(attempt["state"] == AttemptState.GONE.value for attempt in document["attempts"])


def _stages(document: dict[str, Any] | None) -> list[tuple[str, str]]:
    seconds = {} if document is None else document["stages"]
    return [(name, duration(seconds[name])) for name in STAGES if name in seconds]


def _tries(document: dict[str, Any] | None) -> list[str]:
    """What was tried for a run beside the pod it is on or ended on: pods that came to nothing, offers passed over."""
    if document is None:
        return []
    tried = [
        f"attempt {a['attempt']}: {a['gpu']} on {place(a)}: {a['outcome']}, {a['reason']}"
        for a in document["attempts"]
        if a["reason"] and a["outcome"] not in ("ready", "done")
    ]
    passed = [f"{o['gpu']} on {place(o)}: {o['reason']}" for o in document["passed_over"]]
    return [*tried, *passed]


def log_tail(folder: Path) -> list[str]:
    """The newest progress lines of a run, oldest first; empty when there are none."""
    try:
        with (folder / EVENTS_FILE).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [text for line in lines[-_TAIL_LINES:] if (text := _progress_line(line))]


def _progress_line(line: str) -> str:
    try:
        event = json.loads(line)
        return f"{moment(float(event['t']))[11:]} {event['stage']:<9} {event['text']}"
    except (ValueError, KeyError, TypeError):
        return ""  # half a line at the cut


def moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """`2h05m`, `3m07s`, `12s`; what is past counts as nothing."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{left:02}s" if minutes else f"{left}s"
