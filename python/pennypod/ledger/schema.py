"""The ledger's tables. Money is integer micro-dollars, times are Unix seconds. Floor 1.

The schema is public: `SCHEMA_VERSION` changes with it. A ledger of an older version is brought up to date in place
(`ledger.upgrade`), so what is new here is a table, an index or a nullable column; one of a newer version is refused.
"""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA_VERSION = 4

UPGRADING, DESTROYING, RECEIPTS, ADMITTING = (0x70656E6E79 + number for number in range(4))
"""Locks of whole subjects, where the database has such by number: what other programs in it do not use."""

metadata = sa.MetaData()

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(255), nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("job", sa.String(64), nullable=False, index=True),
    sa.Column("controller", sa.String(64), nullable=False, index=True),
    sa.Column("created", sa.Double, nullable=False, index=True),
    sa.Column("deadline", sa.Double),
    sa.Column("worst_case_micros", sa.BigInteger),
    sa.Column("artifacts_dir", sa.String(4096), nullable=False),
    sa.Column("keep_on_disconnect", sa.Boolean, nullable=False, default=False),
    sa.Column("fenced_reason", sa.Text),
    sa.Column("outcome", sa.String(32)),
    sa.Column("reason", sa.Text),
    sa.Column("closed", sa.Double),
    sa.Column("verdict", sa.String(16)),
    sa.Column("verdict_note", sa.Text),
    sa.Column("weights_at_end", sa.JSON),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("run", sa.String(64), sa.ForeignKey("runs.run"), nullable=False, index=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("lease_name", sa.String(255), nullable=False, unique=True),
    sa.Column("provider", sa.String(32), nullable=False),
    sa.Column("offer_id", sa.String(255), nullable=False),
    sa.Column("machine_id", sa.String(255), nullable=False),
    sa.Column("gpu", sa.String(128), nullable=False),
    sa.Column("gpu_count", sa.Integer, nullable=False),
    sa.Column("price_micros_per_h", sa.BigInteger, nullable=False),
    sa.Column("renter", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("intended", sa.Double, nullable=False),
    sa.Column("pod_id", sa.String(255)),
    sa.Column("rented", sa.Double),
    sa.Column("ready", sa.Double),
    sa.Column("ssh_host", sa.String(255)),
    sa.Column("ssh_port", sa.Integer),
    sa.Column("ssh_user", sa.String(64)),
    sa.Column("host_key", sa.String(16)),
    sa.Column("destroy_requested", sa.Double),
    sa.Column("gone", sa.Double),
    sa.Column("outcome", sa.String(32)),
    sa.Column("reason", sa.Text),
    sa.Column("estimated_micros", sa.BigInteger),
    sa.Column("invoiced_micros", sa.BigInteger),
    sa.Column("receipt", sa.JSON),
    sa.Column("disk_micros_per_h", sa.BigInteger),
    sa.Column("traffic_in_micros_per_gb", sa.BigInteger),
    sa.Column("traffic_out_micros_per_gb", sa.BigInteger),
    sa.Column("computing_from", sa.Double),
    sa.Column("computing_seen", sa.Double),
    sa.Column("price_steps", sa.JSON),
    sa.Column("sent_bytes", sa.BigInteger),
    sa.Column("fetched_bytes", sa.BigInteger),
    sa.Column("lease_s", sa.Double),
    sa.Column("fuse", sa.JSON),
    sa.Column("image", sa.JSON),
    sa.Column("worst_case_micros", sa.BigInteger),
    sa.Column("allowance_micros", sa.BigInteger),
    sa.Column("price_cap_micros_per_h", sa.BigInteger),
    sa.Column("traffic_counted", sa.Double),
    sa.Column("account", sa.JSON),
    sa.Column("dataset", sa.JSON),
    sa.Column("isolation", sa.JSON),
    sa.Column("region", sa.Text),
    sa.UniqueConstraint("run", "attempt"),
)

passed_over = sa.Table(
    "passed_over",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("run", sa.String(64), sa.ForeignKey("runs.run"), nullable=False, index=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("offer_id", sa.String(255), nullable=False),
    sa.Column("provider", sa.String(32), nullable=False),
    sa.Column("machine_id", sa.String(255), nullable=False),
    sa.Column("gpu", sa.String(128), nullable=False),
    sa.Column("price_micros_per_h", sa.BigInteger, nullable=False),
    sa.Column("code", sa.String(32), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("region", sa.Text),
)

stages = sa.Table(
    "stages",
    metadata,
    sa.Column("run", sa.String(64), sa.ForeignKey("runs.run"), primary_key=True),
    sa.Column("stage", sa.String(32), primary_key=True),
    sa.Column("started", sa.Double, nullable=False),
    sa.Column("finished", sa.Double),
)

artifacts = sa.Table(
    "artifacts",
    metadata,
    sa.Column("run", sa.String(64), sa.ForeignKey("runs.run"), primary_key=True),
    sa.Column("path", sa.String(1024), primary_key=True),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
)

quarantine = sa.Table(
    "quarantine",
    metadata,
    sa.Column("provider", sa.String(32), primary_key=True),
    sa.Column("machine_id", sa.String(255), primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("until", sa.Double, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
)

# When a pod's destroy was asked for, by whom ever, to pace the next call. Rows older than an hour are dropped.
destroy_calls = sa.Table(
    "destroy_calls",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("provider", sa.String(32), nullable=False),
    sa.Column("pod_id", sa.String(255), nullable=False, index=True),
    sa.Column("at", sa.Double, nullable=False),
)

# One row per pod that is proven gone, hash-chained: `document` is the sealed receipt as JSON, `seq` counts from 1.
receipts = sa.Table(
    "receipts",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("previous", sa.String(64), nullable=False, unique=True),
    sa.Column("pod_name", sa.String(255), nullable=False, index=True),
    sa.Column("document", sa.Text, nullable=False),
)
