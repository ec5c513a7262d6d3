CREATE TABLE schema_compat (
    migration TEXT NOT NULL PRIMARY KEY,
    min_version TEXT NOT NULL
) STRICT;

CREATE TABLE meta (
    key TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

CREATE TABLE cluster_instances (
    instance_id TEXT NOT NULL PRIMARY KEY,
    incarnation TEXT NOT NULL,
    role TEXT NOT NULL,
    address TEXT,
    version TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    last_seen_at INTEGER NOT NULL,
    draining INTEGER NOT NULL CHECK (draining IN (0, 1))
) STRICT;

CREATE TABLE leases (
    name TEXT NOT NULL PRIMARY KEY,
    holder TEXT NOT NULL,
    term INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    renewed_at INTEGER NOT NULL
) STRICT;

CREATE TABLE sources (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    name TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('github', 'generic', 'local')),
    routing_key TEXT NOT NULL,
    config TEXT NOT NULL CHECK (json_valid(config)),
    sealed_secrets TEXT,
    enabled INTEGER NOT NULL CHECK (enabled IN (0, 1)),
    deleted_at INTEGER,
    version INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX sources_name_key ON sources (org, name) WHERE deleted_at IS NULL;
CREATE UNIQUE INDEX sources_routing_key_key ON sources (routing_key) WHERE deleted_at IS NULL;

CREATE TABLE deliveries (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    source_id TEXT NOT NULL,
    delivery_id TEXT NOT NULL,
    event TEXT NOT NULL,
    action TEXT,
    provider TEXT NOT NULL,
    channel TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('received', 'processed', 'lockfile_missing', 'lockfile_corrupt', 'workflow_invalid', 'skipped', 'failed', 'dead', 'shed')),
    matched_count INTEGER NOT NULL,
    repo TEXT,
    git_ref TEXT,
    sha TEXT,
    first_run_id TEXT,
    error TEXT,
    note TEXT,
    payload_key TEXT,
    payload_sha256 TEXT NOT NULL,
    payload_bytes INTEGER NOT NULL,
    payload_omitted TEXT,
    attempts INTEGER NOT NULL,
    claimed_by TEXT,
    claimed_at INTEGER,
    next_attempt_at INTEGER,
    received_at INTEGER NOT NULL,
    finished_at INTEGER,
    request_id TEXT NOT NULL,
    CONSTRAINT deliveries_source_delivery_key UNIQUE (source_id, delivery_id)
) STRICT;
CREATE INDEX deliveries_open_idx ON deliveries (received_at, id) WHERE status = 'received';
CREATE INDEX deliveries_received_idx ON deliveries (received_at, id);
CREATE INDEX deliveries_dead_idx ON deliveries (received_at, id) WHERE status IN ('failed', 'dead');

CREATE TABLE delivery_bodies (
    delivery_id TEXT NOT NULL PRIMARY KEY REFERENCES deliveries (id) ON DELETE CASCADE,
    headers TEXT NOT NULL CHECK (json_valid(headers)),
    body BLOB NOT NULL
) STRICT;

CREATE TABLE decision_traces (
    delivery_id TEXT NOT NULL PRIMARY KEY REFERENCES deliveries (id) ON DELETE CASCADE,
    body TEXT NOT NULL CHECK (json_valid(body)),
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE registrations (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    source_id TEXT NOT NULL,
    repo TEXT NOT NULL,
    workflow_name TEXT NOT NULL,
    lock_digest TEXT NOT NULL,
    sha TEXT NOT NULL,
    default_branch TEXT,
    trigger_types TEXT NOT NULL CHECK (json_valid(trigger_types)),
    enabled INTEGER NOT NULL CHECK (enabled IN (0, 1)),
    disabled_by TEXT,
    updated_at INTEGER NOT NULL,
    CONSTRAINT registrations_workflow_key UNIQUE (org, routing_key, repo, workflow_name)
) STRICT;

CREATE TABLE registry_version (
    id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    version INTEGER NOT NULL
) STRICT;
INSERT INTO registry_version (id, version) VALUES (1, 0);

CREATE TABLE lock_documents (
    digest TEXT NOT NULL PRIMARY KEY,
    body BLOB NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE runs (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    source_id TEXT NOT NULL,
    delivery_row_id TEXT,
    dedup_key TEXT NOT NULL UNIQUE,
    repo TEXT NOT NULL,
    git_ref TEXT,
    sha TEXT NOT NULL,
    workflow_name TEXT NOT NULL,
    run_name TEXT NOT NULL,
    lock_digest TEXT NOT NULL,
    event TEXT NOT NULL CHECK (json_valid(event)),
    trigger_kind TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'running', 'held', 'cancelling', 'success', 'failed', 'cancelled')),
    failure_reason TEXT,
    failure_message TEXT,
    cancel_requested_at INTEGER,
    cancelled_by TEXT,
    attempt INTEGER NOT NULL,
    parent_run_id TEXT,
    inputs TEXT NOT NULL CHECK (json_valid(inputs)),
    request_id TEXT NOT NULL,
    chain_depth INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER,
    timeout_ms INTEGER,
    deadline INTEGER
) STRICT;
CREATE INDEX runs_created_idx ON runs (created_at, id);
CREATE INDEX runs_repo_idx ON runs (repo, created_at, id);
CREATE INDEX runs_delivery_idx ON runs (delivery_row_id) WHERE delivery_row_id IS NOT NULL;
CREATE INDEX runs_open_idx ON runs (created_at, id) WHERE status IN ('pending', 'running', 'held', 'cancelling');

CREATE TABLE jobs (
    id TEXT NOT NULL PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    base_name TEXT NOT NULL,
    job_index INTEGER NOT NULL,
    position INTEGER NOT NULL,
    variant_label TEXT,
    matrix TEXT CHECK (json_valid(matrix)),
    display_name TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'queued', 'held', 'waiting', 'running', 'recovering', 'cancelling', 'success', 'failed', 'cancelled', 'skipped', 'timed_out_stale', 'drift_dropped', 'unroutable')),
    needs_satisfied INTEGER NOT NULL CHECK (needs_satisfied IN (0, 1)),
    ready_at INTEGER,
    max_parallel INTEGER,
    fail_fast INTEGER NOT NULL CHECK (fail_fast IN (0, 1)),
    group_name TEXT,
    failure_reason TEXT,
    failure_class TEXT,
    failure_message TEXT,
    evidence TEXT CHECK (json_valid(evidence)),
    agent_id TEXT,
    dispatch_epoch INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    outputs TEXT NOT NULL CHECK (json_valid(outputs)),
    routing_reason TEXT,
    log_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER,
    last_heartbeat_at INTEGER,
    timeout_ms INTEGER,
    cancel_deadline INTEGER,
    CONSTRAINT jobs_run_name_key UNIQUE (run_id, name)
) STRICT;
CREATE INDEX jobs_running_idx ON jobs (started_at) WHERE status IN ('running', 'cancelling');

CREATE TABLE job_needs (
    run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    job_name TEXT NOT NULL,
    upstream_name TEXT NOT NULL,
    run_on TEXT NOT NULL CHECK (json_valid(run_on)),
    PRIMARY KEY (run_id, job_name, upstream_name)
) STRICT;
CREATE INDEX job_needs_upstream_idx ON job_needs (run_id, upstream_name);

CREATE TABLE steps (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    step_key TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    name TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'running', 'success', 'failed', 'skipped', 'cancelled')),
    exit_code INTEGER,
    message TEXT,
    outputs TEXT NOT NULL CHECK (json_valid(outputs)),
    started_at INTEGER,
    finished_at INTEGER,
    log_bytes INTEGER NOT NULL,
    log_lines INTEGER NOT NULL,
    missing_bytes INTEGER NOT NULL,
    missing_lines INTEGER NOT NULL,
    failure_allowed INTEGER NOT NULL CHECK (failure_allowed IN (0, 1)),
    summary TEXT,
    log_state TEXT CHECK (log_state IN ('open', 'sealed')),
    PRIMARY KEY (job_id, epoch, step_key)
) STRICT;
CREATE INDEX steps_log_open_idx ON steps (job_id, epoch) WHERE log_state = 'open';

CREATE TABLE queue_selectors (
    digest TEXT NOT NULL PRIMARY KEY,
    selector TEXT NOT NULL CHECK (json_valid(selector)),
    requires_machine_id TEXT,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE dispatch_queue (
    id TEXT NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    run_id TEXT NOT NULL,
    workflow_name TEXT NOT NULL,
    job_name TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'dispatched', 'recovering', 'completed', 'failed', 'expired', 'cancelled')),
    priority INTEGER NOT NULL,
    selector_digest TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    dispatched_at INTEGER,
    dispatch_attempts INTEGER NOT NULL,
    dispatch_epoch INTEGER NOT NULL,
    agent_id TEXT,
    owner_instance_id TEXT,
    ack_deadline INTEGER,
    ack_agent_id TEXT,
    acked_at INTEGER,
    started_at INTEGER,
    recovery_deadline INTEGER,
    recovery_agent_id TEXT,
    unroutable_since INTEGER,
    pinned_agent_id TEXT,
    finished_at INTEGER,
    CONSTRAINT dispatch_queue_owner_check CHECK (status NOT IN ('dispatched', 'recovering') OR agent_id IS NOT NULL)
) STRICT;
CREATE INDEX dispatch_queue_pending_idx ON dispatch_queue (selector_digest, priority DESC, created_at, id) WHERE status = 'pending';
CREATE INDEX dispatch_queue_held_idx ON dispatch_queue (agent_id) WHERE status IN ('dispatched', 'recovering');
CREATE INDEX dispatch_queue_run_idx ON dispatch_queue (run_id);

CREATE TABLE dispatch_history (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    dispatch_epoch INTEGER NOT NULL,
    agent_id TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    dispatched_at INTEGER NOT NULL,
    ended_at INTEGER,
    outcome TEXT,
    reason TEXT,
    PRIMARY KEY (job_id, dispatch_epoch)
) STRICT;

CREATE TABLE agent_tokens (
    id TEXT NOT NULL PRIMARY KEY,
    token_hash TEXT NOT NULL UNIQUE,
    token_prefix TEXT NOT NULL,
    label TEXT,
    labels TEXT CHECK (json_valid(labels)),
    mandatory_labels TEXT CHECK (json_valid(mandatory_labels)),
    agent_type TEXT NOT NULL CHECK (agent_type IN ('static', 'ephemeral')),
    kind TEXT NOT NULL CHECK (kind IN ('static', 'scaler', 'bootstrap')),
    bound_agent_id TEXT,
    created_by TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    last_seen_at INTEGER,
    expires_at INTEGER,
    revoked_at INTEGER,
    consumed_at INTEGER
) STRICT;

CREATE TABLE admin_tokens (
    id TEXT NOT NULL PRIMARY KEY,
    token_hash TEXT NOT NULL UNIQUE,
    token_prefix TEXT NOT NULL,
    label TEXT NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('owner', 'admin', 'auditor')),
    routing_key TEXT,
    created_by TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    last_used_at INTEGER,
    expires_at INTEGER,
    revoked_at INTEGER
) STRICT;

CREATE TABLE host_roster (
    agent_id TEXT NOT NULL PRIMARY KEY,
    token_id TEXT,
    lifecycle_class TEXT NOT NULL CHECK (lifecycle_class IN ('static', 'ephemeral')),
    scaler_managed INTEGER NOT NULL CHECK (scaler_managed IN (0, 1)),
    labels TEXT NOT NULL CHECK (json_valid(labels)),
    hostname TEXT,
    platform TEXT,
    arch TEXT,
    version TEXT,
    machine_id TEXT,
    connected_instance_id TEXT,
    last_seen INTEGER,
    host_properties TEXT NOT NULL CHECK (json_valid(host_properties)),
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT;

CREATE TABLE access_log (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT,
    actor_type TEXT NOT NULL,
    actor_id TEXT NOT NULL,
    actor_meta TEXT CHECK (json_valid(actor_meta)),
    action TEXT NOT NULL,
    source TEXT NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('allowed', 'denied', 'error')),
    target_type TEXT,
    target_id TEXT,
    request_id TEXT,
    routing_key TEXT,
    error_message TEXT,
    created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX access_log_created_idx ON access_log (created_at, id);
CREATE INDEX access_log_target_idx ON access_log (target_type, target_id, created_at);
CREATE INDEX access_log_actor_idx ON access_log (actor_type, actor_id, created_at);

CREATE TABLE request_keys (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    result_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT;

CREATE TABLE outbox (
    id TEXT NOT NULL PRIMARY KEY,
    kind TEXT NOT NULL,
    payload TEXT NOT NULL CHECK (json_valid(payload)),
    created_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    next_attempt_at INTEGER NOT NULL
) STRICT;
CREATE INDEX outbox_due_idx ON outbox (next_attempt_at);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000001', '0.1.0');
