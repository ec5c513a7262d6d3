-- What is kept once in the object store, whoever points to it. Found by its content within a space, whose members share it.
CREATE TABLE stored_objects (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    size INTEGER NOT NULL,
    blob_key TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,
    UNIQUE (space, sha256)
) STRICT;

-- Entries of caches. Of an isolated one the run is the one that wrote it, else the nil id.
CREATE TABLE cache_entries (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    source_id TEXT NOT NULL,
    repo TEXT NOT NULL,
    scope TEXT NOT NULL CHECK (scope IN ('shared', 'isolated')),
    run_id TEXT NOT NULL,
    key TEXT NOT NULL,
    object_id TEXT NOT NULL REFERENCES stored_objects (id) ON DELETE RESTRICT,
    size INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    last_read_at INTEGER NOT NULL,
    UNIQUE (org, source_id, repo, scope, run_id, key)
) STRICT;
CREATE INDEX cache_entries_read_idx ON cache_entries (last_read_at, id);
CREATE INDEX cache_entries_created_idx ON cache_entries (created_at, id);
CREATE INDEX cache_entries_object_idx ON cache_entries (object_id);

-- Artifacts of runs. They are removed with their objects, so they may outlive their runs for a moment.
CREATE TABLE artifacts (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    run_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    job_name TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    name TEXT NOT NULL,
    object_id TEXT NOT NULL REFERENCES stored_objects (id) ON DELETE RESTRICT,
    size INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    UNIQUE (run_id, name)
) STRICT;
CREATE INDEX artifacts_expires_idx ON artifacts (expires_at, id);
CREATE INDEX artifacts_object_idx ON artifacts (object_id);

-- Uploads under way. Nothing points to what they bring until they are committed, and nothing evicts it.
CREATE TABLE uploads (
    id TEXT NOT NULL PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('cache', 'artifact')),
    org TEXT NOT NULL,
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    source_id TEXT NOT NULL,
    repo TEXT NOT NULL,
    scope TEXT NOT NULL CHECK (scope IN ('shared', 'isolated')),
    job_name TEXT NOT NULL,
    name TEXT NOT NULL,
    keep_until INTEGER,
    max_bytes INTEGER NOT NULL,
    blob_prefix TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    received INTEGER,
    sha256 TEXT,
    size INTEGER,
    created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX uploads_created_idx ON uploads (created_at, id);
CREATE INDEX uploads_job_idx ON uploads (job_id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000100', '0.1.0');
