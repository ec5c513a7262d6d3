DROP TABLE secret_audit_log;
DROP TABLE job_git_credentials;
DELETE FROM schema_compat WHERE migration = '20261130000060';
