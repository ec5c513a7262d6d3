DELETE FROM schema_compat WHERE migration = '20261201000121';
ALTER TABLE leases DROP COLUMN incarnation;
