-- What steps with retries, checks and groups report.
ALTER TABLE steps ADD COLUMN attempt INTEGER NOT NULL DEFAULT 1;
ALTER TABLE steps ADD COLUMN check_result TEXT
    CHECK (check_result IN ('in_sync', 'applied', 'would_change', 'no_check'));
ALTER TABLE steps ADD COLUMN drift TEXT;
ALTER TABLE steps ADD COLUMN group_name TEXT;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000040', '0.1.0');
