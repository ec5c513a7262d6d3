-- How often a delivery was claimed without an end of its processing: such a delivery may end the process that processes it.
ALTER TABLE deliveries ADD COLUMN claims BIGINT NOT NULL DEFAULT 0;
CREATE INDEX deliveries_suspect_idx ON deliveries (claims, received_at, id) WHERE status = 'received' AND claims >= 2;
CREATE INDEX events_suspect_idx ON events (claims, created_at, id) WHERE status = 'pending' AND claims >= 2;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261202000140', '0.1.0');
