DROP TABLE uploads;
DROP TABLE artifacts;
DROP TABLE cache_entries;
DROP TABLE stored_objects;
DELETE FROM schema_compat WHERE migration = '20261201000100';
