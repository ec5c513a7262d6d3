DELETE FROM schema_compat WHERE migration = '20261129000011';
DROP INDEX runs_logs_kept_idx;
ALTER TABLE runs DROP COLUMN logs_expired_at;
