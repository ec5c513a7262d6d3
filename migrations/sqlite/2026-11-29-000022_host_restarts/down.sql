DELETE FROM schema_compat WHERE migration = '20261129000022';
ALTER TABLE host_roster DROP COLUMN reboot_by;
ALTER TABLE host_roster DROP COLUMN reboot_boot_id;
ALTER TABLE host_roster DROP COLUMN reboot_job_id;
ALTER TABLE host_roster DROP COLUMN reboot_pending_until;
ALTER TABLE host_roster DROP COLUMN boot_id;
