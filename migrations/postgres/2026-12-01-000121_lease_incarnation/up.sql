-- Which start of the holder has the lease: a restarted process is another holder.
ALTER TABLE leases ADD COLUMN incarnation uuid;

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000121', '0.1.0');
