-- What the workflow of a job declares for git; no row is the default. Read for each credential, so that no workflow has to be.
CREATE TABLE job_git_credentials (
    job_id TEXT NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    declared TEXT NOT NULL CHECK (json_valid(declared))
) STRICT;

-- Who got, or was refused, which secret. Never a part of one. Outlives the runs that it names.
CREATE TABLE secret_audit_log (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    actor_type TEXT NOT NULL,
    actor_id TEXT NOT NULL,
    role TEXT,
    action TEXT NOT NULL,
    scope TEXT,
    key TEXT,
    context_name TEXT,
    run_id TEXT,
    job_id TEXT,
    outcome TEXT NOT NULL CHECK (outcome IN ('allowed', 'denied', 'error')),
    metadata TEXT CHECK (json_valid(metadata)),
    created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX secret_audit_log_created_idx ON secret_audit_log (created_at, id);
CREATE INDEX secret_audit_log_run_idx ON secret_audit_log (run_id, created_at, id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261130000060', '0.1.0');
