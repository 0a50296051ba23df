"""Ring 2: ends what has outlived the deadline in its own name. Floor 2: providers and ledger are passed in.

Needs no local state: any machine with the provider's key can sweep, with an empty ledger. Where the ledger does know
the pod, the end is recorded there. Only pods whose name begins with our prefix are ever touched: one whose lease cannot
be read (renamed by hand, cut short, written by another version) is ended when its provider has shown no change of it
for hours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pennypod.clock import Clock
from pennypod.ending import Ended, Ending
from pennypod.errors import InputError, PennypodError
from pennypod.escrow import Escrow
from pennypod.ledger import AttemptRecord, AttemptState, Ledger, Outcome
from pennypod.model.ids import PREFIX, Lease, parse_lease
from pennypod.model.meter import PodMeter
from pennypod.model.money import micros_to_usd
from pennypod.model.pod import Pod, PodState
from pennypod.providers.base import Provider
from pennypod.rental import Rental
from pennypod.report import close_with_results

DEADLINE_PASSED = "the deadline passed"
WOULD_DESTROY = "would destroy"
DESTROYED = "destroyed"
NEVER_EXISTED = "never existed"
UNPROVEN = "not proven gone"
UNREADABLE_AFTER_S = 4 * 3600

Report = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Target:
    """Something whose end may be due: a listed pod, an attempt of the ledger, or both for the same lease.

    `name` is the pod's own; `lease` is None when nobody can read one in it.
    """

    provider: str
    name: str
    lease: Lease | None
    pod: Pod | None
    attempt: AttemptRecord | None
    reason: str = ""

    @property
    def run(self) -> str | None:
        return None if self.lease is None else self.lease.run

    @property
    def deadline(self) -> int | None:
        return None if self.lease is None else self.lease.deadline

    @property
    def pod_id(self) -> str | None:
        return self.pod.pod_id if self.pod is not None else (self.attempt.pod_id if self.attempt is not None else None)


@dataclass(frozen=True, slots=True)
class Swept:
    """What became of one target. `error` is why it is not proven gone, or has left no receipt."""

    target: Target
    action: str
    usd: float
    error: str = ""

    def as_document(self) -> dict[str, Any]:
        target = self.target
        return {
            "provider": target.provider,
            "pod_id": target.pod_id,
            "pod_name": target.name,
            "run": target.run,
            "deadline": target.deadline,
            "reason": target.reason,
            "action": self.action,
            "cost_usd": self.usd,
            "error": self.error or None,
        }


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is: `due` must end, `kept` is ours and within its time, `unlisted` names who could not be asked."""

    due: list[Target] = field(default_factory=list)
    kept: list[Target] = field(default_factory=list)
    unlisted: dict[str, str] = field(default_factory=dict)

    @property
    def stopped(self) -> list[str]:
        """Pods within their time that compute no more: a fuse that may not delete its pod leaves them so."""
        return [target.name for target in self.kept if target.pod is not None and target.pod.state is PodState.STOPPED]


def survey(
    providers: Mapping[str, Provider],
    ledger: Ledger,
    judged_at: float,
    *,
    unreadable_after_s: float = UNREADABLE_AFTER_S,
    runs: Collection[str] = (),
) -> Survey:
    """Judge every deadline as of `judged_at`. A provider that cannot be listed is told, and hides no other one.

    With `runs`, everything else is left out of the survey.
    """
    found = Survey()
    pending = ledger.pending_attempts()
    targets = []
    for name, provider in providers.items():
        try:
            listed = [_listed_target(name, pod, ledger, pending) for pod in provider.pods()]
        except PennypodError as exc:
            found.unlisted[name] = str(exc)
        except Exception as exc:  # noqa: BLE001 - a fault of ours in one client must not hide another's pods
            found.unlisted[name] = f"a fault in pennypod: {type(exc).__name__}: {exc}"
        else:
            targets += [target for target in listed if target is not None]
    seen = {target.name if target.attempt is None else target.attempt.lease_name for target in targets}
    targets += [
        Target(attempt.provider, attempt.lease_name, parse_lease(attempt.lease_name), None, attempt)
        for attempt in pending
        if attempt.lease_name not in seen and attempt.provider not in found.unlisted
    ]
    for target in targets:
        if runs and target.run not in runs:
            continue
        if target.provider not in providers:
            found.unlisted[target.provider] = "it is not configured here, and the ledger has an unproven pod of it"
            continue
        reason = _why_due(target, judged_at, unreadable_after_s)
        if reason is None:
            found.kept.append(target)
        else:
            found.due.append(replace(target, reason=reason))
    return found


def _listed_target(provider: str, pod: Pod, ledger: Ledger, pending: Collection[AttemptRecord]) -> Target | None:
    """A listed pod with what the ledger knows of it; None for somebody else's."""
    if not pod.name.startswith(PREFIX):
        return None
    lease = parse_lease(pod.name)
    if lease is not None:
        return Target(provider, pod.name, lease, pod, _attempt_of(lease, ledger))
    # Renamed since, perhaps: our own record knows it by its id, and under which lease it was rented.
    known = next((a for a in pending if (a.provider, a.pod_id) == (provider, pod.pod_id)), None)
    return Target(provider, pod.name, None if known is None else parse_lease(known.lease_name), pod, known)


def _attempt_of(lease: Lease, ledger: Ledger) -> AttemptRecord | None:
    return next((attempt for attempt in ledger.attempts(lease.run) if attempt.lease_name == lease.name), None)


def _attempt_now(target: Target, ledger: Ledger) -> AttemptRecord | None:
    return None if target.lease is None else _attempt_of(target.lease, ledger)


def _why_due(target: Target, judged_at: float, unreadable_after_s: float) -> str | None:
    attempt = target.attempt
    if target.lease is None:
        return _why_unreadable_is_due(target.pod, judged_at, unreadable_after_s)
    if judged_at > target.lease.deadline:
        return DEADLINE_PASSED
    if attempt is not None and attempt.state is AttemptState.DESTROYING:
        return attempt.reason or "its end was asked for and not proven"
    if attempt is not None and attempt.final:
        return "the ledger says that it is over, yet it is listed"
    return None


def _why_unreadable_is_due(pod: Pod | None, judged_at: float, after_s: float) -> str | None:
    if pod is None:
        return None
    changed = max(pod.created, pod.changed)
    if changed <= 0:
        # Only a pod that is still being made may lack every date.
        return None if pod.state is PodState.STARTING else "no lease can be read in its name, and it shows no age"
    if judged_at - changed <= after_s:
        return None
    return f"no lease can be read in its name, and nothing has changed for {(judged_at - changed) / 3600:.1f} h"


def sweep(
    found: Survey,
    providers: Mapping[str, Provider],
    ledger: Ledger,
    clock: Clock,
    *,
    dry_run: bool,
    report: Report,
    patience_s: float = 120.0,
    escrow: Escrow | None = None,
) -> list[Swept]:
    """End every due target; `dry_run` takes the same way up to the destroying itself.

    With `escrow`, the pods of runs whose key is on this machine get their grace for a checkpoint that is not home.
    """
    if dry_run:
        return [Swept(target, WOULD_DESTROY, _cost(target, clock.now())) for target in found.due]
    work = [(target, _endings_for(target, ledger, clock.now())) for target in found.due]
    every = [ending for _, endings in work for ending in endings]
    release = None if escrow is None else escrow.release
    results = iter(Rental(providers, ledger, clock).destroy_all(every, report, patience_s=patience_s, release=release))
    return [_swept(target, [next(results) for _ in endings], ledger, clock.now()) for target, endings in work]


def _endings_for(target: Target, ledger: Ledger, now: float) -> list[Ending]:
    """What has to end for a target: the attempt that the ledger has open, and the listed pod where that is another."""
    attempt, pod = _attempt_now(target, ledger), target.pod
    endings = []
    if attempt is not None and attempt.state is AttemptState.NEVER and pod is not None:
        # It was given up before its create call had arrived. On the books first: if we die now, others go on.
        with contextlib.suppress(PennypodError):
            ledger.record_late(attempt.id, pod.pod_id, now)
        attempt = _attempt_now(target, ledger) or attempt
    if attempt is not None and not attempt.final:
        with contextlib.suppress(PennypodError):  # a ledger that cannot be written to must not keep a pod alive
            if target.reason == DEADLINE_PASSED:
                # Whoever still works on the run must not rent again: its time is over.
                ledger.fence(attempt.run, target.reason)
            if pod is not None and attempt.pod_id is None:
                ledger.record_pod(attempt.id, pod.pod_id, now)
        attempt = _attempt_now(target, ledger) or attempt
        endings.append(Ending(attempt, "cancelled", target.reason))
    if pod is not None and (attempt is None or attempt.final or attempt.pod_id != pod.pod_id):
        # No attempt of ours is open for it: the ledger is another one, or was wrong about this pod.
        endings.append(Ending(pod, "cancelled", target.reason))
    return endings


def _swept(target: Target, ended: Sequence[Ended], ledger: Ledger, now: float) -> Swept:
    error = next((one.error for one in ended if one.error is not None), None)
    done = target
    try:
        if error is None and target.reason == DEADLINE_PASSED and target.run is not None:
            _close(target.run, ledger, now)
        done = replace(target, attempt=_attempt_now(target, ledger))
    except PennypodError as exc:
        error = error or exc
    if error is not None:
        return Swept(target, UNPROVEN, _cost(target, now), str(error))
    existed = target.pod is not None or any(one.receipt is not None for one in ended)
    unkept = next((f"its receipt could not be kept: {one.unkept}" for one in ended if one.unkept is not None), "")
    return Swept(done, DESTROYED if existed else NEVER_EXISTED, _cost(done, now) if existed else 0.0, unkept)


def _close(run: str, ledger: Ledger, now: float) -> None:
    """The run has nothing left and no time left: say so, unless this ledger does not know it."""
    with contextlib.suppress(InputError):
        ledger.run(run)
        if all(attempt.final for attempt in ledger.attempts(run)):
            close_with_results(ledger, run, Outcome.CANCELLED, DEADLINE_PASSED, now)


def _cost(target: Target, now: float) -> float:
    if target.attempt is not None:
        return micros_to_usd(target.attempt.cost_micros(now))
    if target.pod is None:
        return 0.0
    made = target.pod.created
    return micros_to_usd(PodMeter(target.pod.price_micros_per_h, made=made, computing=made).micros(now))
