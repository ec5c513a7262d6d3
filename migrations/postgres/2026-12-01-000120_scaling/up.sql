-- Why an agent could not be started for a waiting job, the last time it was tried.
ALTER TABLE dispatch_queue ADD COLUMN last_provisioning_error text;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000120', '0.1.0');
