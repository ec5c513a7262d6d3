ALTER TABLE runs ADD COLUMN logs_expired_at INTEGER;
-- Runs whose logs may still be there, by their end.
CREATE INDEX runs_logs_kept_idx ON runs (finished_at) WHERE logs_expired_at IS NULL AND finished_at IS NOT NULL;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000011', '0.1.0');
