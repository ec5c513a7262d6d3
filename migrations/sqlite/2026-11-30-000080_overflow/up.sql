-- Deliveries that wait as overflow, oldest first.
CREATE INDEX deliveries_shed_idx ON deliveries (received_at, id) WHERE status = 'shed';

INSERT INTO schema_compat (migration, min_version) VALUES ('20261130000080', '0.1.0');
