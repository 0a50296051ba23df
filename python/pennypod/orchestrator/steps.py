"""What each step of a run does, apart from how steps are made durable. Floor 3.

Every step may be repeated from its start: it first looks at what is so, then does what is missing. None of them raises
for what can go wrong with a run; how a run ended stands in the ledger, and `report` reads it there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pennypod import processes
from pennypod.callbacks import give_access, plan_access, take_access
from pennypod.clock import Clock
from pennypod.ending import Ending
from pennypod.errors import FencedError, InputError, PennypodError
from pennypod.escrow import Escrow
from pennypod.events import Events
from pennypod.guard import ensure_guard
from pennypod.ledger import ABANDONED, Ledger, Outcome, RunRecord
from pennypod.model.money import micros_to_usd
from pennypod.orchestrator.notices import Notices
from pennypod.orchestrator.playbooks import Playbooks, Played
from pennypod.orchestrator.store import Request, Store
from pennypod.providers.base import Provider
from pennypod.rental import Rental
from pennypod.report import run_document, write_results
from pennypod.settings import Settings

# How often a playbook that ended without ending its run is tried again: by then something is wrong for good.
MOST_TRIES = 3
_DESTROY_PATIENCE_S = 60.0
_REASONS = ("playbook", "watched")
OVER, TRAINING, BROKEN = "over", "training", "broken"


@dataclass(frozen=True, slots=True)
class Steps:
    """The work of one run, step by step. All methods block; call them from a thread."""

    settings: Settings
    store: Store
    ledger: Ledger
    providers: Mapping[str, Provider]
    playbooks: Playbooks
    notices: Notices
    is_training: Callable[[str], bool]
    clock: Clock
    artifacts_dir: str
    public_url: str = ""

    # --- launch -----------------------------------------------------------------------------------------------------

    def launch(self, run: str) -> str:
        """Rent and start the training, or go on with what an orchestrator before us has begun.

        Returns where that leaves the run: OVER, TRAINING (it goes on without us), or BROKEN (nothing more to try).
        """
        request = self.store.request(run)
        if request.cancel_requested is not None:
            return OVER
        self.enter(run, "launch", "starting")
        self._let_call_back(run)
        for _ in range(MOST_TRIES):
            ended = self.playbooks.end_leftovers(run)
            if ended:
                self.store.note(run, "takeover", f"ended {ended} processes left by another orchestrator", self._now())
            self._inherit(run)
            record = self._record(run)
            if record is not None and _is_over(record):
                return OVER
            if record is not None and self.has_pod(run) and self.is_training(run):
                return TRAINING
            played = self._play(request, record)
            self._remember_failure(run, played)
            record = self._record(run)
            if record is None or record.closed is not None or _is_over(record):
                return OVER
            if self.has_pod(run) and played.rc == 0:
                return TRAINING
        return BROKEN

    def _let_call_back(self, run: str) -> None:
        """Before anything is on a pod. Without an address that pods reach, the token stays here and nobody calls."""
        url = f"{self.public_url}/hooks/callback/{run}" if self.public_url else ""
        folder = self.settings.run_dir(run)
        access = plan_access(folder, url)
        self.store.set_callback_token(run, access.digest)  # first: who finds the token may use it
        give_access(folder, access)

    def _play(self, request: Request, record: RunRecord | None) -> Played:
        if record is None or not self._has_something_to_resume(request.run):
            return self.playbooks.launch(request.run, self._variables(request))
        self.store.note(request.run, "resume", "going on with the pod that is there", self._now())
        return self.playbooks.resume(request.run, self._variables(request))

    def _has_something_to_resume(self, run: str) -> bool:
        """A pod that is there, also one whose create call nobody has seen answered, or what one has left."""
        rental = Rental(self.providers, self.ledger, self.clock)
        there = [rental.settle(attempt) for attempt in self.ledger.attempts(run)]
        return any(there) or any(attempt.ready is not None for attempt in self.ledger.attempts(run))

    def _variables(self, request: Request) -> dict[str, Any]:
        variables = {
            **request.overrides,
            "job": request.job,
            "provider": request.provider,
            "artifacts_dir": self.artifacts_dir,
        }
        if request.regions:
            variables["pod_region"] = request.regions
        return variables

    def _remember_failure(self, run: str, played: Played) -> None:
        if played.rc == 0:
            return
        self.store.note(run, "playbook", f"ended with {played.rc}: {played.message or 'no reason given'}", self._now())
        if played.code:
            self.store.set_failure(run, played.code)
        if played.code == "over_budget":
            self.notices.tell(run, "over_budget", {"reason": played.message})

    # --- finish -----------------------------------------------------------------------------------------------------

    def finish(self, run: str) -> None:
        """Bring home what there is; the playbook that does so destroys the pod, too."""
        self.enter(run, "finish", "bringing the weights home")
        request = self.store.request(run)
        for _ in range(MOST_TRIES):
            self.playbooks.end_leftovers(run)
            self._inherit(run)
            record = self._record(run)
            if record is None or _is_over(record):
                return
            self._remember_failure(run, self.playbooks.resume(run, self._variables(request)))

    # --- destroy ----------------------------------------------------------------------------------------------------

    def destroy(self, run: str) -> bool:
        """End every pod of the run and prove it. Returns whether that is done; if not, call it again."""
        self.playbooks.end_leftovers(run)
        record = self._record(run)
        self.enter(run, "destroy", "making sure that nothing bills")
        if record is None:
            return True
        request = self.store.request(run)
        reason = request.cancel_reason or record.reason or self._last_note(run) or "the orchestrator has ended the run"
        done = self._end_attempts(run, reason)
        if done:
            outcome = Outcome.CANCELLED if request.cancel_requested is not None else Outcome.FAILED
            self.ledger.close_run(run, outcome, reason, self._now())
        return done

    def end_pods(self, run: str, reason: str) -> bool:
        """The same for a run that is not carried out here; returns whether every pod is proven gone."""
        done = self._end_attempts(run, reason)
        if done:
            self.ledger.close_run(run, Outcome.CANCELLED, reason, self._now())
        return done

    def _end_attempts(self, run: str, reason: str) -> bool:
        if self.ledger.run(run).closed is None:
            self.ledger.fence(run, reason)
        pending = [attempt for attempt in self.ledger.attempts(run) if not attempt.final]
        results = Rental(self.providers, self.ledger, self.clock).destroy_all(
            [Ending(attempt, "cancelled", reason) for attempt in pending],
            Events(self.settings.run_dir(run), run).emit,
            patience_s=_DESTROY_PATIENCE_S,
            # What weights can be saved within the grace are saved first.
            release=Escrow(self.settings, self.ledger, self.clock).release,
        )
        unproven = [ended.error for ended in results if ended.error is not None]
        for error in unproven:
            self.tell(run, "destroy", str(error))
        return not unproven

    # --- report -----------------------------------------------------------------------------------------------------

    def report(self, run: str) -> str:
        """Write down how the run ended and tell those who asked to be told; the outcome."""
        record, request = self._record(run), self.store.request(run)
        if record is None:
            outcome = "cancelled" if request.cancel_requested is not None else "failed"
            reason = request.cancel_reason or self._last_note(run) or "the run was never opened"
            document: dict[str, Any] = {"run": run, "job": request.job}
        else:
            outcome, reason = record.outcome or "failed", record.reason or ""
            if request.cancel_requested is not None and outcome != "succeeded":
                outcome, reason = "cancelled", request.cancel_reason or reason
            with contextlib.suppress(OSError):
                write_results(self.ledger, run, self._now())
            document = run_document(self.ledger, run, self._now())
        if outcome == "failed":
            self.notices.tell(run, "failed", {"reason": reason, **_summary(document)})
        if document.get("attempts"):
            receipts = [attempt.receipt for attempt in self.ledger.attempts(run) if attempt.receipt is not None]
            self.notices.tell(run, "destroyed", {**_summary(document), "outcome": outcome, "receipts": receipts})
        take_access(self.settings.run_dir(run))
        self.store.end(run, outcome, reason, self._now())
        return outcome

    # --- shared -----------------------------------------------------------------------------------------------------

    def hold(self, run: str) -> None:
        """Make this process the controller of a run that trains without a playbook, with a guard for the deadline."""
        controller = processes.own_identity()
        try:
            ensure_guard(self.settings, controller)
            self._inherit(run)
            self.ledger.take_over(run, controller, processes.is_alive)
        except PennypodError as exc:
            self.store.note(run, "hold", str(exc), self._now())

    def _inherit(self, run: str) -> None:
        """Become the controller of a run whose orchestrator was given up by all who share the database.

        That orchestrator may have run on a machine whose processes cannot be judged from here. If something of it is
        left there, the ledger no longer lets it rent.
        """
        record, own = self._record(run), processes.own_identity()
        if record is None or record.controller == own or not self.store.was_given_up(record.controller):
            return
        with contextlib.suppress(FencedError):  # it was stopped or is over: nobody needs to be its controller
            self.ledger.take_over(run, own, partial(_lives_here, other_than=record.controller))
            self.tell(run, "takeover", "going on in place of an orchestrator that has ended")

    def cancel(self, run: str, reason: str) -> None:
        """Whoever works on the run stops at its next step and ends its pod."""
        with contextlib.suppress(InputError):
            if self.ledger.run(run).closed is None:
                self.ledger.fence(run, reason)

    def tell_progress(self, run: str) -> None:
        """Notices of what the ledger shows: a pod was rented, it is ready."""
        for attempt in self.ledger.attempts(run):
            details = {
                "provider": attempt.provider,
                "gpu": attempt.gpu,
                "price_usd_per_h": micros_to_usd(attempt.price_now),
                "pod": attempt.lease_name,
            }
            if attempt.rented is not None:
                self.notices.tell(run, "rented", details)
            if attempt.ready is not None:
                self.notices.tell(run, "ready", details)

    def tell(self, run: str, name: str, text: str) -> None:
        self.store.note(run, name, text, self._now())

    def is_known(self, run: str) -> bool:
        return self._record(run) is not None

    def has_pod(self, run: str) -> bool:
        return any(not attempt.final for attempt in self.ledger.attempts(run))

    def _record(self, run: str) -> RunRecord | None:
        try:
            return self.ledger.run(run)
        except InputError:
            return None

    def _last_note(self, run: str) -> str:
        """The newest of what went wrong or ended the watch."""
        said = [entry.text for entry in self.store.timeline(run) if entry.kind == "note" and entry.name in _REASONS]
        return said[-1] if said else ""

    def enter(self, run: str, stage: str, text: str) -> None:
        self.store.enter_stage(run, stage, text, self._now())

    def _now(self) -> float:
        return self.clock.now()


def _lives_here(process: str, other_than: str) -> bool:
    return process != other_than and processes.can_judge(process) and processes.is_alive(process)


def _is_over(record: RunRecord) -> bool:
    """Closed or stopped for good. One whose command died before it rented is not: the launch opens it again."""
    return record.fenced_reason != ABANDONED and (record.closed is not None or record.fenced_reason is not None)


def _summary(document: Mapping[str, Any]) -> dict[str, Any]:
    names = ("job", "provider", "gpu", "price_usd_per_h", "cost_usd", "billed_seconds", "pods_still_billing")
    return {name: document[name] for name in names if name in document}
