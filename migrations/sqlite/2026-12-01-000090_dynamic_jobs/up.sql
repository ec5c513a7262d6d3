-- Edges to groups of generated jobs. A row with a generator stands for the whole group, and counts until the jobs of the group are
-- known: then they have rows of their own.
ALTER TABLE job_needs ADD COLUMN group_name TEXT;
ALTER TABLE job_needs ADD COLUMN generator TEXT;
ALTER TABLE job_needs ADD COLUMN resolved INTEGER NOT NULL DEFAULT 0;

-- What generators reported. The jobs themselves lie in lock_documents, by their digest.
CREATE TABLE generated_jobs (
    job_id TEXT NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    run_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    digest TEXT NOT NULL,
    job_count INTEGER NOT NULL,
    wants_hosts INTEGER NOT NULL CHECK (wants_hosts IN (0, 1)),
    reported_at INTEGER NOT NULL
) STRICT;

-- Jobs that wait for runs which they started by an event.
CREATE TABLE job_gates (
    job_id TEXT NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    run_id TEXT NOT NULL,
    event_id TEXT,
    event_name TEXT NOT NULL,
    optional INTEGER NOT NULL CHECK (optional IN (0, 1)),
    refused TEXT,
    created_at INTEGER NOT NULL,
    settled_at INTEGER
) STRICT;
CREATE INDEX job_gates_open_idx ON job_gates (created_at, job_id) WHERE settled_at IS NULL;
CREATE INDEX job_gates_event_idx ON job_gates (event_id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000090', '0.1.0');
