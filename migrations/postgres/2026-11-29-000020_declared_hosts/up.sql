ALTER TABLE host_roster ADD COLUMN declared_at timestamptz;
ALTER TABLE host_roster ADD COLUMN declared_by text;
ALTER TABLE host_roster ADD COLUMN declared_hostname text;
ALTER TABLE host_roster ADD COLUMN declared_labels json;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000020', '0.1.0');
