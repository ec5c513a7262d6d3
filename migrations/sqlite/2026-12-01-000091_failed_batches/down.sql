DROP TABLE batch_windows;
DELETE FROM schema_compat WHERE migration = '20261201000091';
