DELETE FROM schema_compat WHERE migration = '20261129000020';
ALTER TABLE host_roster DROP COLUMN declared_labels;
ALTER TABLE host_roster DROP COLUMN declared_hostname;
ALTER TABLE host_roster DROP COLUMN declared_by;
ALTER TABLE host_roster DROP COLUMN declared_at;
