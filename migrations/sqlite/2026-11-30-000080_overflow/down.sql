DELETE FROM schema_compat WHERE migration = '20261130000080';
DROP INDEX deliveries_shed_idx;
