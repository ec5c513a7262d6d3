DELETE FROM schema_compat WHERE migration = '20261129000010';
DROP TABLE concurrency_slots;
ALTER TABLE runs DROP COLUMN concurrency;
