"""Errors with a machine-readable code. Floor 0: knows nothing else, does no I/O.

Every error a user can meet is a :class:`PennypodError`: one line that says what happened and what to do.
`code` is public: modules return it as ``failure.code`` and tests assert on it, never on the prose.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PennypodError(Exception):
    """Base of all our errors. `details` must be JSON-serialisable and must never hold a secret."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def __str__(self) -> str:
        return self.message

    def as_failure(self) -> dict[str, Any]:
        """The public shape of a failure: ``{"code", "message", "details"}``."""
        return {"code": self.code, "message": self.message, "details": self.details}


# --- what a provider may answer (design.md section 2); each says what the caller may do ---------------------------


class ProviderError(PennypodError):
    """Anything a provider's API or engine answers that is not success."""

    code = "provider"


class NoCapacityError(ProviderError):
    """Nothing to rent just now: try the next offer, region or GPU type."""

    code = "no_capacity"


class OfferGoneError(ProviderError):
    """The offer was taken by somebody else: try the next one."""

    code = "offer_gone"


class AuthError(ProviderError):
    """The key is missing, wrong or lacks a scope: stop and tell the user."""

    code = "auth"


class FundsError(ProviderError):
    """Not enough credit: stop and tell the user."""

    code = "funds"


class RateLimitedError(ProviderError):
    """Asked to wait `retry_after_s` seconds before the same call."""

    code = "rate_limited"

    def __init__(self, message: str, retry_after_s: float, **details: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)
        self.retry_after_s = retry_after_s


class InvalidError(ProviderError):
    """The request itself is wrong: repeating it cannot help."""

    code = "invalid"


class TransientError(ProviderError):
    """A passing fault; a call that changes nothing may be repeated."""

    code = "transient"


class AmbiguousError(ProviderError):
    """A create that may have happened: look the lease up in the names before doing anything else."""

    code = "ambiguous"


# --- what our own parts may meet ------------------------------------------------------------------------------------


class InputError(PennypodError):
    """The user's input is wrong: unknown job, malformed job file, missing data set."""

    code = "input"


class BudgetError(PennypodError):
    """The worst-case cost breaks a cap; nothing was rented."""

    code = "over_budget"


class EngineError(PennypodError):
    """No container engine that can start a pod."""

    code = "no_engine"


class FencedError(PennypodError):
    """Another actor (the guard, a second controller) has taken the run away from us: stop at once, rent nothing."""

    code = "fenced"


class GuardError(PennypodError):
    """The guard could not be started, so nothing may be rented."""

    code = "no_guard"


class NotReadyError(PennypodError):
    """A pod did not become usable within its limits."""

    code = "not_ready"


class GateError(PennypodError):
    """The pod failed the acceptance check."""

    code = "gate_failed"


class LadderExhaustedError(PennypodError):
    """Every offer was tried and none gave a usable pod; `details["attempts"]` says why, rung by rung."""

    code = "no_pod"


class UnprovenError(PennypodError):
    """A destroy could not be proven: the pod may still be billing."""

    code = "may_still_be_billing"


class SshError(PennypodError):
    """The pod could not be reached or the SSH session broke."""

    code = "ssh"


class HostKeyError(SshError):
    """The pod showed another host key than its provider tells: nothing is sent to whoever answers there."""

    code = "host_key"


class TransferError(PennypodError):
    """Bytes did not arrive whole."""

    code = "transfer"


class SourceChangedError(TransferError):
    """A source file vanished or changed while it was being sent."""

    code = "source_changed"


class DiskFullError(TransferError):
    """No room left, on the pod or here."""

    code = "disk_full"


def no_room(exc: OSError) -> DiskFullError:
    """A write that failed for want of room, whoever wrote: it is the user's to mend and no fault of ours."""
    return DiskFullError(f"no room left on the disk of {exc.filename or 'this machine'}: free some room on it")


class TrainingError(PennypodError):
    """The trainer failed; `details` carries exit_code and the last lines of its log."""

    code = "training_failed"


class WeightsError(PennypodError):
    """No valid checkpoint was found, or it could not be verified."""

    code = "no_weights"


class StoreError(PennypodError):
    """The object store cannot be reached, refuses, or is not configured; `details["status"]` where it answered."""

    code = "store"
