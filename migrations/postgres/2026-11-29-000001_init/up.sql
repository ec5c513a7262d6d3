CREATE TABLE schema_compat (
    migration text NOT NULL PRIMARY KEY,
    min_version text NOT NULL
);

CREATE TABLE meta (
    key text NOT NULL PRIMARY KEY,
    value text NOT NULL
);

CREATE TABLE cluster_instances (
    instance_id text NOT NULL PRIMARY KEY,
    incarnation uuid NOT NULL,
    role text NOT NULL,
    address text,
    version text NOT NULL,
    started_at timestamptz NOT NULL,
    last_seen_at timestamptz NOT NULL,
    draining boolean NOT NULL
);

CREATE TABLE leases (
    name text NOT NULL PRIMARY KEY,
    holder text NOT NULL,
    term bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    renewed_at timestamptz NOT NULL
);

CREATE TABLE sources (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    name text NOT NULL,
    kind text NOT NULL CONSTRAINT sources_kind_check CHECK (kind IN ('github', 'generic', 'local')),
    routing_key text NOT NULL,
    config json NOT NULL,
    sealed_secrets text,
    enabled boolean NOT NULL,
    deleted_at timestamptz,
    version bigint NOT NULL,
    created_at timestamptz NOT NULL
);
CREATE UNIQUE INDEX sources_name_key ON sources (org, name) WHERE deleted_at IS NULL;
CREATE UNIQUE INDEX sources_routing_key_key ON sources (routing_key) WHERE deleted_at IS NULL;

CREATE TABLE deliveries (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    source_id uuid NOT NULL,
    delivery_id text NOT NULL,
    event text NOT NULL,
    action text,
    provider text NOT NULL,
    channel text NOT NULL,
    status text NOT NULL CONSTRAINT deliveries_status_check CHECK (status IN ('received', 'processed', 'lockfile_missing', 'lockfile_corrupt', 'workflow_invalid', 'skipped', 'failed', 'dead', 'shed')),
    matched_count bigint NOT NULL,
    repo text,
    git_ref text,
    sha text,
    first_run_id uuid,
    error text,
    note text,
    payload_key text,
    payload_sha256 text NOT NULL,
    payload_bytes bigint NOT NULL,
    payload_omitted text,
    attempts bigint NOT NULL,
    claimed_by text,
    claimed_at timestamptz,
    next_attempt_at timestamptz,
    received_at timestamptz NOT NULL,
    finished_at timestamptz,
    request_id text NOT NULL,
    CONSTRAINT deliveries_source_delivery_key UNIQUE (source_id, delivery_id)
);
CREATE INDEX deliveries_open_idx ON deliveries (received_at, id) WHERE status = 'received';
CREATE INDEX deliveries_received_idx ON deliveries (received_at, id);
CREATE INDEX deliveries_dead_idx ON deliveries (received_at, id) WHERE status IN ('failed', 'dead');

CREATE TABLE delivery_bodies (
    delivery_id uuid NOT NULL PRIMARY KEY REFERENCES deliveries (id) ON DELETE CASCADE,
    headers json NOT NULL,
    body bytea NOT NULL
);

CREATE TABLE decision_traces (
    delivery_id uuid NOT NULL PRIMARY KEY REFERENCES deliveries (id) ON DELETE CASCADE,
    body json NOT NULL,
    created_at timestamptz NOT NULL
);

CREATE TABLE registrations (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    routing_key text NOT NULL,
    source_id uuid NOT NULL,
    repo text NOT NULL,
    workflow_name text NOT NULL,
    lock_digest text NOT NULL,
    sha text NOT NULL,
    default_branch text,
    trigger_types json NOT NULL,
    enabled boolean NOT NULL,
    disabled_by text,
    updated_at timestamptz NOT NULL,
    CONSTRAINT registrations_workflow_key UNIQUE (org, routing_key, repo, workflow_name)
);

CREATE TABLE registry_version (
    id bigint NOT NULL PRIMARY KEY CONSTRAINT registry_version_one_row CHECK (id = 1),
    version bigint NOT NULL
);
INSERT INTO registry_version (id, version) VALUES (1, 0);

CREATE TABLE lock_documents (
    digest text NOT NULL PRIMARY KEY,
    body bytea NOT NULL,
    created_at timestamptz NOT NULL
);

CREATE TABLE runs (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    source_id uuid NOT NULL,
    delivery_row_id uuid,
    dedup_key text NOT NULL CONSTRAINT runs_dedup_key_key UNIQUE,
    repo text NOT NULL,
    git_ref text,
    sha text NOT NULL,
    workflow_name text NOT NULL,
    run_name text NOT NULL,
    lock_digest text NOT NULL,
    event json NOT NULL,
    trigger_kind text NOT NULL,
    status text NOT NULL CONSTRAINT runs_status_check CHECK (status IN ('pending', 'running', 'held', 'cancelling', 'success', 'failed', 'cancelled')),
    failure_reason text,
    failure_message text,
    cancel_requested_at timestamptz,
    cancelled_by text,
    attempt bigint NOT NULL,
    parent_run_id uuid,
    inputs json NOT NULL,
    request_id text NOT NULL,
    chain_depth bigint NOT NULL,
    created_at timestamptz NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    timeout_ms bigint,
    deadline timestamptz
);
CREATE INDEX runs_created_idx ON runs (created_at, id);
CREATE INDEX runs_repo_idx ON runs (repo, created_at, id);
CREATE INDEX runs_delivery_idx ON runs (delivery_row_id) WHERE delivery_row_id IS NOT NULL;
CREATE INDEX runs_open_idx ON runs (created_at, id) WHERE status IN ('pending', 'running', 'held', 'cancelling');

CREATE TABLE jobs (
    id uuid NOT NULL PRIMARY KEY,
    run_id uuid NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    name text NOT NULL,
    base_name text NOT NULL,
    job_index bigint NOT NULL,
    position bigint NOT NULL,
    variant_label text,
    matrix json,
    display_name text NOT NULL,
    status text NOT NULL CONSTRAINT jobs_status_check CHECK (status IN ('pending', 'queued', 'held', 'waiting', 'running', 'recovering', 'cancelling', 'success', 'failed', 'cancelled', 'skipped', 'timed_out_stale', 'drift_dropped', 'unroutable')),
    needs_satisfied boolean NOT NULL,
    ready_at timestamptz,
    max_parallel bigint,
    fail_fast boolean NOT NULL,
    group_name text,
    failure_reason text,
    failure_class text,
    failure_message text,
    evidence json,
    agent_id text,
    dispatch_epoch bigint NOT NULL,
    attempt bigint NOT NULL,
    outputs json NOT NULL,
    routing_reason text,
    log_bytes bigint NOT NULL,
    created_at timestamptz NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    last_heartbeat_at timestamptz,
    timeout_ms bigint,
    cancel_deadline timestamptz,
    CONSTRAINT jobs_run_name_key UNIQUE (run_id, name)
);
CREATE INDEX jobs_running_idx ON jobs (started_at) WHERE status IN ('running', 'cancelling');

CREATE TABLE job_needs (
    run_id uuid NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    job_name text NOT NULL,
    upstream_name text NOT NULL,
    run_on json NOT NULL,
    PRIMARY KEY (run_id, job_name, upstream_name)
);
CREATE INDEX job_needs_upstream_idx ON job_needs (run_id, upstream_name);

CREATE TABLE steps (
    job_id uuid NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    epoch bigint NOT NULL,
    step_key text NOT NULL,
    ordinal bigint NOT NULL,
    name text NOT NULL,
    status text NOT NULL CONSTRAINT steps_status_check CHECK (status IN ('pending', 'running', 'success', 'failed', 'skipped', 'cancelled')),
    exit_code bigint,
    message text,
    outputs json NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    log_bytes bigint NOT NULL,
    log_lines bigint NOT NULL,
    missing_bytes bigint NOT NULL,
    missing_lines bigint NOT NULL,
    failure_allowed boolean NOT NULL,
    summary text,
    log_state text CONSTRAINT steps_log_state_check CHECK (log_state IN ('open', 'sealed')),
    PRIMARY KEY (job_id, epoch, step_key)
);
CREATE INDEX steps_log_open_idx ON steps (job_id, epoch) WHERE log_state = 'open';

CREATE TABLE queue_selectors (
    digest text NOT NULL PRIMARY KEY,
    selector json NOT NULL,
    requires_machine_id text,
    created_at timestamptz NOT NULL
);

CREATE TABLE dispatch_queue (
    id uuid NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    run_id uuid NOT NULL,
    workflow_name text NOT NULL,
    job_name text NOT NULL,
    status text NOT NULL CONSTRAINT dispatch_queue_status_check CHECK (status IN ('pending', 'dispatched', 'recovering', 'completed', 'failed', 'expired', 'cancelled')),
    priority bigint NOT NULL,
    selector_digest text NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    dispatched_at timestamptz,
    dispatch_attempts bigint NOT NULL,
    dispatch_epoch bigint NOT NULL,
    agent_id text,
    owner_instance_id text,
    ack_deadline timestamptz,
    ack_agent_id text,
    acked_at timestamptz,
    started_at timestamptz,
    recovery_deadline timestamptz,
    recovery_agent_id text,
    unroutable_since timestamptz,
    pinned_agent_id text,
    finished_at timestamptz,
    CONSTRAINT dispatch_queue_owner_check CHECK (status NOT IN ('dispatched', 'recovering') OR agent_id IS NOT NULL)
);
CREATE INDEX dispatch_queue_pending_idx ON dispatch_queue (selector_digest, priority DESC, created_at, id) WHERE status = 'pending';
CREATE INDEX dispatch_queue_held_idx ON dispatch_queue (agent_id) WHERE status IN ('dispatched', 'recovering');
CREATE INDEX dispatch_queue_run_idx ON dispatch_queue (run_id);

CREATE TABLE dispatch_history (
    job_id uuid NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    dispatch_epoch bigint NOT NULL,
    agent_id text NOT NULL,
    instance_id text NOT NULL,
    dispatched_at timestamptz NOT NULL,
    ended_at timestamptz,
    outcome text,
    reason text,
    PRIMARY KEY (job_id, dispatch_epoch)
);

CREATE TABLE agent_tokens (
    id uuid NOT NULL PRIMARY KEY,
    token_hash text NOT NULL CONSTRAINT agent_tokens_hash_key UNIQUE,
    token_prefix text NOT NULL,
    label text,
    labels json,
    mandatory_labels json,
    agent_type text NOT NULL CONSTRAINT agent_tokens_type_check CHECK (agent_type IN ('static', 'ephemeral')),
    kind text NOT NULL CONSTRAINT agent_tokens_kind_check CHECK (kind IN ('static', 'scaler', 'bootstrap')),
    bound_agent_id text,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    last_seen_at timestamptz,
    expires_at timestamptz,
    revoked_at timestamptz,
    consumed_at timestamptz
);

CREATE TABLE admin_tokens (
    id uuid NOT NULL PRIMARY KEY,
    token_hash text NOT NULL CONSTRAINT admin_tokens_hash_key UNIQUE,
    token_prefix text NOT NULL,
    label text NOT NULL,
    role text NOT NULL CONSTRAINT admin_tokens_role_check CHECK (role IN ('owner', 'admin', 'auditor')),
    routing_key text,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    last_used_at timestamptz,
    expires_at timestamptz,
    revoked_at timestamptz
);

CREATE TABLE host_roster (
    agent_id text NOT NULL PRIMARY KEY,
    token_id uuid,
    lifecycle_class text NOT NULL CONSTRAINT host_roster_lifecycle_check CHECK (lifecycle_class IN ('static', 'ephemeral')),
    scaler_managed boolean NOT NULL,
    labels json NOT NULL,
    hostname text,
    platform text,
    arch text,
    version text,
    machine_id text,
    connected_instance_id text,
    last_seen timestamptz,
    host_properties json NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL
);

CREATE TABLE access_log (
    id uuid NOT NULL PRIMARY KEY,
    org text,
    actor_type text NOT NULL,
    actor_id text NOT NULL,
    actor_meta json,
    action text NOT NULL,
    source text NOT NULL,
    outcome text NOT NULL CONSTRAINT access_log_outcome_check CHECK (outcome IN ('allowed', 'denied', 'error')),
    target_type text,
    target_id text,
    request_id text,
    routing_key text,
    error_message text,
    created_at timestamptz NOT NULL
);
CREATE INDEX access_log_created_idx ON access_log (created_at, id);
CREATE INDEX access_log_target_idx ON access_log (target_type, target_id, created_at);
CREATE INDEX access_log_actor_idx ON access_log (actor_type, actor_id, created_at);

CREATE TABLE request_keys (
    scope text NOT NULL,
    key text NOT NULL,
    result_id uuid NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (scope, key)
);

CREATE TABLE outbox (
    id uuid NOT NULL PRIMARY KEY,
    kind text NOT NULL,
    payload json NOT NULL,
    created_at timestamptz NOT NULL,
    attempts bigint NOT NULL,
    next_attempt_at timestamptz NOT NULL
);
CREATE INDEX outbox_due_idx ON outbox (next_attempt_at);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000001', '0.1.0');
