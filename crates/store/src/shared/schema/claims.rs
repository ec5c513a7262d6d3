//! The table of claim codes.

use super::backend;

diesel::table! {
    use diesel::sql_types::{BigInt, Binary, Bool, Json, Nullable, Text};
    use super::backend::sql::{Id, Ts};

    scaler_claims (claim_hash) {
        claim_hash -> Text,
        claim_prefix -> Text,
        agent_id -> Text,
        scaler_name -> Text,
        labels -> Json,
        mandatory_labels -> Json,
        agent_token_ttl_ms -> BigInt,
        orchestrator_url -> Text,
        created_at -> Ts,
        expires_at -> Ts,
        consumed_at -> Nullable<Ts>,
        consumed_by -> Nullable<Text>,
        revoked_at -> Nullable<Ts>,
    }
}
