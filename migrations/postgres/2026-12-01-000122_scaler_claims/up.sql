-- Codes that one agent of a scaler exchanges for its token, once. Only their hashes are kept.
CREATE TABLE scaler_claims (
    claim_hash text NOT NULL PRIMARY KEY,
    claim_prefix text NOT NULL,
    agent_id text NOT NULL,
    scaler_name text NOT NULL,
    labels json NOT NULL,
    mandatory_labels json NOT NULL,
    agent_token_ttl_ms bigint NOT NULL,
    orchestrator_url text NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    consumed_at timestamptz,
    consumed_by text,
    revoked_at timestamptz
);
CREATE INDEX scaler_claims_expires_idx ON scaler_claims (expires_at);
CREATE INDEX scaler_claims_agent_idx ON scaler_claims (agent_id);

INSERT INTO schema_compat (migration, min_version) VALUES ('20261201000122', '0.1.0');
