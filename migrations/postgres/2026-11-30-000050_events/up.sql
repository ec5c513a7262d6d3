-- The internal bus: what steps and people emit, ends of runs and jobs, schedules that fire. A row is the work item, as a
-- delivery is.
CREATE TABLE events (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    name text NOT NULL,
    payload json NOT NULL,
    routing_key text,
    source_repo text,
    run_id uuid,
    job_id uuid,
    emitted_by text NOT NULL,
    registration_id uuid,
    target_repos json NOT NULL,
    chain_depth bigint NOT NULL,
    emit_key text CONSTRAINT events_emit_key UNIQUE,
    status text NOT NULL CONSTRAINT events_status_check CHECK (status IN ('pending', 'processed', 'dead', 'discarded')),
    matched_count bigint NOT NULL,
    attempts bigint NOT NULL,
    claimed_by text,
    claimed_at timestamptz,
    next_attempt_at timestamptz,
    last_error text,
    note text,
    trace json,
    run_ids json NOT NULL,
    dlq_reason text,
    request_id text NOT NULL,
    created_at timestamptz NOT NULL,
    finished_at timestamptz
);
CREATE INDEX events_open_idx ON events (created_at, id) WHERE status = 'pending';
CREATE INDEX events_dead_idx ON events (created_at, id) WHERE status = 'dead';
CREATE INDEX events_created_idx ON events (created_at, id);
CREATE INDEX events_rate_idx ON events (routing_key, name, created_at);

-- How far the times of each schedule have been looked at. One row per schedule, however many instances look.
CREATE TABLE schedule_state (
    registration_id uuid NOT NULL REFERENCES registrations (id) ON DELETE CASCADE,
    schedule_key text NOT NULL,
    cursor_at timestamptz NOT NULL,
    last_fired_at timestamptz,
    last_event_id uuid,
    PRIMARY KEY (registration_id, schedule_key)
);

-- Which repositories may start workflows of others by events. Repositories of one source trust each other.
CREATE TABLE event_trust (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    source_routing_key text NOT NULL,
    source_repo text NOT NULL,
    target_routing_key text NOT NULL,
    target_repo text NOT NULL,
    allowed_events json,
    enabled boolean NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT event_trust_pair_key UNIQUE (org, source_routing_key, source_repo, target_routing_key, target_repo)
);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261130000050', '0.1.0');
