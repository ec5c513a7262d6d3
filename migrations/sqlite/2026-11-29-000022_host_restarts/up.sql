ALTER TABLE host_roster ADD COLUMN boot_id TEXT;
ALTER TABLE host_roster ADD COLUMN reboot_pending_until INTEGER;
ALTER TABLE host_roster ADD COLUMN reboot_job_id TEXT;
ALTER TABLE host_roster ADD COLUMN reboot_boot_id TEXT;
ALTER TABLE host_roster ADD COLUMN reboot_by TEXT;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000022', '0.1.0');
