DELETE FROM schema_compat WHERE migration = '20261129000021';
ALTER TABLE queue_selectors DROP COLUMN pinned_agent_id;
ALTER TABLE jobs DROP COLUMN fanout;
