DELETE FROM schema_compat WHERE migration = '20261202000140';
DROP INDEX events_suspect_idx;
DROP INDEX deliveries_suspect_idx;
ALTER TABLE deliveries DROP COLUMN claims;
