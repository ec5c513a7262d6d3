-- The internal bus: what steps and people emit, ends of runs and jobs, schedules that fire. A row is the work item, as a
-- delivery is.
CREATE TABLE events (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    name TEXT NOT NULL,
    payload TEXT NOT NULL CHECK (json_valid(payload)),
    routing_key TEXT,
    source_repo TEXT,
    run_id TEXT,
    job_id TEXT,
    emitted_by TEXT NOT NULL,
    registration_id TEXT,
    target_repos TEXT NOT NULL CHECK (json_valid(target_repos)),
    chain_depth INTEGER NOT NULL,
    emit_key TEXT CONSTRAINT events_emit_key UNIQUE,
    status TEXT NOT NULL CHECK (status IN ('pending', 'processed', 'dead', 'discarded')),
    matched_count INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    claimed_by TEXT,
    claimed_at INTEGER,
    next_attempt_at INTEGER,
    last_error TEXT,
    note TEXT,
    trace TEXT CHECK (json_valid(trace)),
    run_ids TEXT NOT NULL CHECK (json_valid(run_ids)),
    dlq_reason TEXT,
    request_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    finished_at INTEGER
) STRICT;
CREATE INDEX events_open_idx ON events (created_at, id) WHERE status = 'pending';
CREATE INDEX events_dead_idx ON events (created_at, id) WHERE status = 'dead';
CREATE INDEX events_created_idx ON events (created_at, id);
CREATE INDEX events_rate_idx ON events (routing_key, name, created_at);

-- How far the times of each schedule have been looked at. One row per schedule, however many instances look.
CREATE TABLE schedule_state (
    registration_id TEXT NOT NULL REFERENCES registrations (id) ON DELETE CASCADE,
    schedule_key TEXT NOT NULL,
    cursor_at INTEGER NOT NULL,
    last_fired_at INTEGER,
    last_event_id TEXT,
    PRIMARY KEY (registration_id, schedule_key)
) STRICT;

-- Which repositories may start workflows of others by events. Repositories of one source trust each other.
CREATE TABLE event_trust (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    source_routing_key TEXT NOT NULL,
    source_repo TEXT NOT NULL,
    target_routing_key TEXT NOT NULL,
    target_repo TEXT NOT NULL,
    allowed_events TEXT CHECK (json_valid(allowed_events)),
    enabled INTEGER NOT NULL CHECK (enabled IN (0, 1)),
    created_by TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    CONSTRAINT event_trust_pair_key UNIQUE (org, source_routing_key, source_repo, target_routing_key, target_repo)
) STRICT;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261130000050', '0.1.0');
