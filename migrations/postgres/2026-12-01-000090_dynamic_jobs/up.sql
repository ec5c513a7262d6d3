-- Edges to groups of generated jobs. A row with a generator stands for the whole group, and counts until the jobs of the group are
-- known: then they have rows of their own.
ALTER TABLE job_needs ADD COLUMN group_name text;
ALTER TABLE job_needs ADD COLUMN generator text;
ALTER TABLE job_needs ADD COLUMN resolved boolean NOT NULL DEFAULT false;

-- What generators reported. The jobs themselves lie in lock_documents, by their digest.
CREATE TABLE generated_jobs (
    job_id uuid NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    run_id uuid NOT NULL,
    epoch bigint NOT NULL,
    digest text NOT NULL,
    job_count bigint NOT NULL,
    wants_hosts boolean NOT NULL,
    reported_at timestamptz NOT NULL
);

-- Jobs that wait for runs which they started by an event.
CREATE TABLE job_gates (
    job_id uuid NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    run_id uuid NOT NULL,
    event_id uuid,
    event_name text NOT NULL,
    optional boolean NOT NULL,
    refused text,
    created_at timestamptz NOT NULL,
    settled_at timestamptz
);
CREATE INDEX job_gates_open_idx ON job_gates (created_at, job_id) WHERE settled_at IS NULL;
CREATE INDEX job_gates_event_idx ON job_gates (event_id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000090', '0.1.0');
