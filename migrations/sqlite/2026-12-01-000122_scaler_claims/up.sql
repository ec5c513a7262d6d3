-- Codes that one agent of a scaler exchanges for its token, once. Only their hashes are kept.
CREATE TABLE scaler_claims (
    claim_hash TEXT NOT NULL PRIMARY KEY,
    claim_prefix TEXT NOT NULL,
    agent_id TEXT NOT NULL,
    scaler_name TEXT NOT NULL,
    labels TEXT NOT NULL CHECK (json_valid(labels)),
    mandatory_labels TEXT NOT NULL CHECK (json_valid(mandatory_labels)),
    agent_token_ttl_ms INTEGER NOT NULL,
    orchestrator_url TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    consumed_at INTEGER,
    consumed_by TEXT,
    revoked_at INTEGER
) STRICT;
CREATE INDEX scaler_claims_expires_idx ON scaler_claims (expires_at);
CREATE INDEX scaler_claims_agent_idx ON scaler_claims (agent_id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000122', '0.1.0');
