-- What is kept once in the object store, whoever points to it. Found by its content within a space, whose members share it.
CREATE TABLE stored_objects (
    id uuid NOT NULL PRIMARY KEY,
    space text NOT NULL,
    sha256 text NOT NULL,
    size bigint NOT NULL,
    blob_key text NOT NULL CONSTRAINT stored_objects_blob_key UNIQUE,
    created_at timestamptz NOT NULL,
    CONSTRAINT stored_objects_content_key UNIQUE (space, sha256)
);

-- Entries of caches. Of an isolated one the run is the one that wrote it, else the nil id.
CREATE TABLE cache_entries (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    source_id uuid NOT NULL,
    repo text NOT NULL,
    scope text NOT NULL CONSTRAINT cache_entries_scope_check CHECK (scope IN ('shared', 'isolated')),
    run_id uuid NOT NULL,
    key text NOT NULL,
    object_id uuid NOT NULL CONSTRAINT cache_entries_object_fkey REFERENCES stored_objects (id) ON DELETE RESTRICT,
    size bigint NOT NULL,
    created_at timestamptz NOT NULL,
    last_read_at timestamptz NOT NULL,
    CONSTRAINT cache_entries_name_key UNIQUE (org, source_id, repo, scope, run_id, key)
);
CREATE INDEX cache_entries_read_idx ON cache_entries (last_read_at, id);
CREATE INDEX cache_entries_created_idx ON cache_entries (created_at, id);
CREATE INDEX cache_entries_object_idx ON cache_entries (object_id);

-- Artifacts of runs. They are removed with their objects, so they may outlive their runs for a moment.
CREATE TABLE artifacts (
    id uuid NOT NULL PRIMARY KEY,
    org text NOT NULL,
    run_id uuid NOT NULL,
    job_id uuid NOT NULL,
    job_name text NOT NULL,
    epoch bigint NOT NULL,
    name text NOT NULL,
    object_id uuid NOT NULL CONSTRAINT artifacts_object_fkey REFERENCES stored_objects (id) ON DELETE RESTRICT,
    size bigint NOT NULL,
    sha256 text NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    CONSTRAINT artifacts_name_key UNIQUE (run_id, name)
);
CREATE INDEX artifacts_expires_idx ON artifacts (expires_at, id);
CREATE INDEX artifacts_object_idx ON artifacts (object_id);

-- Uploads under way. Nothing points to what they bring until they are committed, and nothing evicts it.
CREATE TABLE uploads (
    id uuid NOT NULL PRIMARY KEY,
    kind text NOT NULL CONSTRAINT uploads_kind_check CHECK (kind IN ('cache', 'artifact')),
    org text NOT NULL,
    job_id uuid NOT NULL,
    run_id uuid NOT NULL,
    epoch bigint NOT NULL,
    source_id uuid NOT NULL,
    repo text NOT NULL,
    scope text NOT NULL CONSTRAINT uploads_scope_check CHECK (scope IN ('shared', 'isolated')),
    job_name text NOT NULL,
    name text NOT NULL,
    keep_until timestamptz,
    max_bytes bigint NOT NULL,
    blob_prefix text NOT NULL,
    attempts bigint NOT NULL,
    received bigint,
    sha256 text,
    size bigint,
    created_at timestamptz NOT NULL
);
CREATE INDEX uploads_created_idx ON uploads (created_at, id);
CREATE INDEX uploads_job_idx ON uploads (job_id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000100', '0.1.0');
