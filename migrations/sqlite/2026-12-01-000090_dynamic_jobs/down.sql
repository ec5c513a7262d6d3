DROP TABLE job_gates;
DROP TABLE generated_jobs;
ALTER TABLE job_needs DROP COLUMN resolved;
ALTER TABLE job_needs DROP COLUMN generator;
ALTER TABLE job_needs DROP COLUMN group_name;
DELETE FROM schema_compat WHERE migration = '20261201000090';
