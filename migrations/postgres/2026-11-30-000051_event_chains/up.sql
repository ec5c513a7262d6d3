-- Where a chain of events began, so that one that branches out can be stopped, and how often an event was claimed without an
-- end of its delivery: such an event may end the process that delivers it.
ALTER TABLE events ADD COLUMN chain_root UUID;
ALTER TABLE events ADD COLUMN claims BIGINT NOT NULL DEFAULT 0;
CREATE INDEX events_chain_idx ON events (chain_root, chain_depth);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261130000051', '0.1.0');
