-- Failures that a registered workflow collects until its window closes. One window at a time; it goes when its event is stored.
CREATE TABLE batch_windows (
    registration_id uuid NOT NULL PRIMARY KEY REFERENCES registrations (id) ON DELETE CASCADE,
    opened_at timestamptz NOT NULL,
    closes_at timestamptz NOT NULL,
    total bigint NOT NULL,
    runs json NOT NULL
);
CREATE INDEX batch_windows_closes_idx ON batch_windows (closes_at);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000091', '0.1.0');
