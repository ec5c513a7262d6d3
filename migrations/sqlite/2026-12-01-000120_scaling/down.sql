DELETE FROM schema_compat WHERE migration = '20261201000120';
ALTER TABLE dispatch_queue DROP COLUMN last_provisioning_error;
