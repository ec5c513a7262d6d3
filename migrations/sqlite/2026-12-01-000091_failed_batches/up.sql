-- Failures that a registered workflow collects until its window closes. One window at a time; it goes when its event is stored.
CREATE TABLE batch_windows (
    registration_id TEXT NOT NULL PRIMARY KEY REFERENCES registrations (id) ON DELETE CASCADE,
    opened_at INTEGER NOT NULL,
    closes_at INTEGER NOT NULL,
    total INTEGER NOT NULL,
    runs TEXT NOT NULL CHECK (json_valid(runs))
) STRICT;
CREATE INDEX batch_windows_closes_idx ON batch_windows (closes_at);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000091', '0.1.0');
