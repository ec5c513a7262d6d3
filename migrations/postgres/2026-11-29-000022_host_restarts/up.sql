ALTER TABLE host_roster ADD COLUMN boot_id text;
ALTER TABLE host_roster ADD COLUMN reboot_pending_until timestamptz;
ALTER TABLE host_roster ADD COLUMN reboot_job_id uuid;
ALTER TABLE host_roster ADD COLUMN reboot_boot_id text;
ALTER TABLE host_roster ADD COLUMN reboot_by text;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000022', '0.1.0');
