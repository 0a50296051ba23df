"""Our record of intents, pods, stages, money, receipts and verdicts. Floor 1: the database is its one outside thing."""

from pennypod.ledger.records import (
    FINAL_STATES,
    STAGES,
    ArtifactRecord,
    AttemptRecord,
    AttemptState,
    Outcome,
    PassedOverRecord,
    QuarantineRecord,
    RunRecord,
    StageRecord,
    WeightsAtEnd,
    WeightsState,
)
from pennypod.ledger.store import ABANDONED, Ledger, LedgerError, open_ledger

__all__ = [
    "ABANDONED",
    "FINAL_STATES",
    "STAGES",
    "ArtifactRecord",
    "AttemptRecord",
    "AttemptState",
    "Ledger",
    "LedgerError",
    "Outcome",
    "PassedOverRecord",
    "QuarantineRecord",
    "RunRecord",
    "StageRecord",
    "WeightsAtEnd",
    "WeightsState",
    "open_ledger",
]
