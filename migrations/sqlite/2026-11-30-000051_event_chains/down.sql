DELETE FROM schema_compat WHERE migration = '20261130000051';
DROP INDEX events_chain_idx;
ALTER TABLE events DROP COLUMN claims;
ALTER TABLE events DROP COLUMN chain_root;
