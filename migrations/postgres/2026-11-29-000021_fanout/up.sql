ALTER TABLE jobs ADD COLUMN fanout json;
ALTER TABLE queue_selectors ADD COLUMN pinned_agent_id text;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000021', '0.1.0');
