"""The orchestrator's own tables, beside the ledger's and DBOS's. Times are Unix seconds. Floor 3."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

# One row: whoever has locked it decides who is let in. SQLite locks the whole file instead.
gate = sa.Table("orchestrator_gate", metadata, sa.Column("id", sa.Integer, primary_key=True))

# What was accepted. The row is the promise: once it is committed, the run will be ended and reported.
requests = sa.Table(
    "orchestrator_requests",
    metadata,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("job", sa.String(64), nullable=False),
    sa.Column("provider", sa.String(32), nullable=False),
    sa.Column("regions", sa.JSON, nullable=False),
    sa.Column("overrides", sa.JSON, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("source", sa.String(64), nullable=False),
    # The SHA-256 of it, empty before the run's launch: the token itself is in the run's own folder (callbacks.py).
    sa.Column("callback_token", sa.String(64), nullable=False),
    sa.Column("received", sa.Double, nullable=False, index=True),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("stage", sa.String(16), nullable=False),
    sa.Column("worker", sa.String(128)),
    sa.Column("admitted", sa.Double),
    sa.Column("cancel_requested", sa.Double),
    sa.Column("cancel_reason", sa.Text),
    sa.Column("failure_code", sa.String(64)),
    sa.Column("outcome", sa.String(32)),
    sa.Column("reason", sa.Text),
    sa.Column("ended", sa.Double, index=True),
)

# Deliveries seen: signatures and bodies that may come once, idempotency keys that name a delivery.
deliveries = sa.Table(
    "orchestrator_deliveries",
    metadata,
    sa.Column("source", sa.String(64), primary_key=True),
    sa.Column("key", sa.String(300), primary_key=True),
    sa.Column("body_sha256", sa.String(64), nullable=False),
    sa.Column("run", sa.String(64), nullable=False),
    sa.Column("action", sa.String(16), nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("expires", sa.Double, nullable=False, index=True),
)

# What happened to a run, in the order it happened.
timeline = sa.Table(
    "orchestrator_timeline",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("run", sa.String(64), nullable=False, index=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),  # stage, callback, note
    sa.Column("name", sa.String(32), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)

# Notices on their way out, one row per recipient.
notices = sa.Table(
    "orchestrator_notices",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("run", sa.String(64), nullable=False),
    sa.Column("event", sa.String(32), nullable=False),
    sa.Column("recipient", sa.String(64), nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("due", sa.Double, nullable=False, index=True),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.UniqueConstraint("run", "event", "recipient"),
)

# Orchestrators that share the work, by their process's identity and its last sign of life by the database's clock; 0
# says that the others have given it up. Such rows stay: the ledger may name that process as a run's controller.
workers = sa.Table(
    "orchestrator_workers",
    metadata,
    sa.Column("worker", sa.String(128), primary_key=True),
    sa.Column("seen", sa.Double, nullable=False),
)
