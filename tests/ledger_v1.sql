-- The ledger of schema version 1, as released. <id> is SERIAL in PostgreSQL, INTEGER in SQLite.
CREATE TABLE meta (
    key VARCHAR(64) NOT NULL,
    value VARCHAR(255) NOT NULL,
    PRIMARY KEY (key)
);
CREATE TABLE quarantine (
    provider VARCHAR(32) NOT NULL,
    machine_id VARCHAR(255) NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    until DOUBLE PRECISION NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (provider, machine_id)
);
CREATE TABLE runs (
    run VARCHAR(64) NOT NULL,
    job VARCHAR(64) NOT NULL,
    controller VARCHAR(64) NOT NULL,
    created DOUBLE PRECISION NOT NULL,
    deadline DOUBLE PRECISION,
    worst_case_micros BIGINT,
    artifacts_dir VARCHAR(4096) NOT NULL,
    keep_on_disconnect BOOLEAN NOT NULL,
    fenced_reason TEXT,
    outcome VARCHAR(32),
    reason TEXT,
    closed DOUBLE PRECISION,
    verdict VARCHAR(16),
    verdict_note TEXT,
    PRIMARY KEY (run)
);
CREATE INDEX ix_runs_controller ON runs (controller);
CREATE INDEX ix_runs_created ON runs (created);
CREATE INDEX ix_runs_job ON runs (job);
CREATE TABLE artifacts (
    run VARCHAR(64) NOT NULL,
    path VARCHAR(1024) NOT NULL,
    bytes BIGINT NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    PRIMARY KEY (run, path),
    FOREIGN KEY(run) REFERENCES runs (run)
);
CREATE TABLE attempts (
    id <id> NOT NULL,
    run VARCHAR(64) NOT NULL,
    attempt INTEGER NOT NULL,
    lease_name VARCHAR(255) NOT NULL,
    provider VARCHAR(32) NOT NULL,
    offer_id VARCHAR(255) NOT NULL,
    machine_id VARCHAR(255) NOT NULL,
    gpu VARCHAR(128) NOT NULL,
    gpu_count INTEGER NOT NULL,
    price_micros_per_h BIGINT NOT NULL,
    renter VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    intended DOUBLE PRECISION NOT NULL,
    pod_id VARCHAR(255),
    rented DOUBLE PRECISION,
    ready DOUBLE PRECISION,
    ssh_host VARCHAR(255),
    ssh_port INTEGER,
    ssh_user VARCHAR(64),
    destroy_requested DOUBLE PRECISION,
    gone DOUBLE PRECISION,
    outcome VARCHAR(32),
    reason TEXT,
    estimated_micros BIGINT,
    invoiced_micros BIGINT,
    receipt JSON,
    PRIMARY KEY (id),
    UNIQUE (run, attempt),
    FOREIGN KEY(run) REFERENCES runs (run),
    UNIQUE (lease_name)
);
CREATE INDEX ix_attempts_run ON attempts (run);
CREATE INDEX ix_attempts_state ON attempts (state);
CREATE TABLE stages (
    run VARCHAR(64) NOT NULL,
    stage VARCHAR(32) NOT NULL,
    started DOUBLE PRECISION NOT NULL,
    finished DOUBLE PRECISION,
    PRIMARY KEY (run, stage),
    FOREIGN KEY(run) REFERENCES runs (run)
);
INSERT INTO meta (key, value) VALUES ('schema_version', '1');
