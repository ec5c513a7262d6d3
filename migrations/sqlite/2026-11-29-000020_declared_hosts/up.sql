ALTER TABLE host_roster ADD COLUMN declared_at INTEGER;
ALTER TABLE host_roster ADD COLUMN declared_by TEXT;
ALTER TABLE host_roster ADD COLUMN declared_hostname TEXT;
ALTER TABLE host_roster ADD COLUMN declared_labels TEXT CHECK (json_valid(declared_labels));

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000020', '0.1.0');
