ALTER TABLE runs ADD COLUMN concurrency TEXT CHECK (json_valid(concurrency));

-- Who has a slot of a group, who waits for one, and who had one. The holder is a job, or the run itself. `applied` is false
-- while the holder's run has yet to learn of it: that it got the slot, or that a newer run wants it to stop.
CREATE TABLE concurrency_slots (
    id TEXT NOT NULL PRIMARY KEY,
    org TEXT NOT NULL,
    repo TEXT NOT NULL,
    group_key TEXT NOT NULL,
    run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    holder_id TEXT NOT NULL,
    max_active INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('queued', 'active', 'completed', 'cancelled')),
    superseded_by TEXT,
    applied INTEGER NOT NULL CHECK (applied IN (0, 1)),
    run_created_at INTEGER NOT NULL,
    position INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    acquired_at INTEGER,
    ended_at INTEGER
) STRICT;
CREATE UNIQUE INDEX concurrency_slots_holder_key ON concurrency_slots (holder_id) WHERE status IN ('queued', 'active');
CREATE INDEX concurrency_slots_group_idx ON concurrency_slots (org, repo, group_key, run_created_at, run_id, position) WHERE status IN ('queued', 'active');
CREATE INDEX concurrency_slots_waiting_idx ON concurrency_slots (created_at) WHERE status = 'queued';
CREATE INDEX concurrency_slots_news_idx ON concurrency_slots (run_id) WHERE NOT applied;
CREATE INDEX concurrency_slots_run_idx ON concurrency_slots (run_id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261129000010', '0.1.0');
