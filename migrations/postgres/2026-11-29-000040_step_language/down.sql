ALTER TABLE steps DROP COLUMN group_name;
ALTER TABLE steps DROP COLUMN drift;
ALTER TABLE steps DROP COLUMN check_result;
ALTER TABLE steps DROP COLUMN attempt;
DELETE FROM schema_compat WHERE migration = '20261129000040';
