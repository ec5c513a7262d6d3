-- What the workflow of a job declares for git; no row is the default. Read for each credential, so that no workflow has to be.
CREATE TABLE job_git_credentials (
    job_id uuid NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    declared json NOT NULL
);

-- Who got, or was refused, which secret. Never a part of one. Outlives the runs that it names.
CREATE TABLE secret_audit_log (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    actor_type text NOT NULL,
    actor_id text NOT NULL,
    role text,
    action text NOT NULL,
    scope text,
    key text,
    context_name text,
    run_id uuid,
    job_id uuid,
    outcome text NOT NULL CONSTRAINT secret_audit_log_outcome_check CHECK (outcome IN ('allowed', 'denied', 'error')),
    metadata json,
    created_at timestamptz NOT NULL
);
CREATE INDEX secret_audit_log_created_idx ON secret_audit_log (created_at, id);
CREATE INDEX secret_audit_log_run_idx ON secret_audit_log (run_id, created_at, id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261130000060', '0.1.0');
