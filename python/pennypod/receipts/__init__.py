"""Receipts: what they say, how they are sealed, how anybody checks them. Floor 1: files, and one key under the home."""

from pennypod.receipts.checking import Finding, check_chain, check_document, check_together
from pennypod.receipts.content import (
    ABSENT,
    ACCEPTED,
    DESTROY,
    LISTING,
    LOOK,
    NOT_TOLD,
    SPENDING,
    SPENDS,
    STILL,
    billed_seconds,
    content_problems,
    gone_since,
    meter_document,
    total_micros,
)
from pennypod.receipts.files import read_document, write_json
from pennypod.receipts.sealing import GENESIS, ReceiptError, Sealer, receipt_document, seal_problems

__all__ = [
    "ABSENT",
    "ACCEPTED",
    "DESTROY",
    "GENESIS",
    "LISTING",
    "LOOK",
    "NOT_TOLD",
    "SPENDING",
    "SPENDS",
    "STILL",
    "Finding",
    "ReceiptError",
    "Sealer",
    "billed_seconds",
    "check_chain",
    "check_document",
    "check_together",
    "content_problems",
    "gone_since",
    "meter_document",
    "read_document",
    "receipt_document",
    "seal_problems",
    "total_micros",
    "write_json",
]
