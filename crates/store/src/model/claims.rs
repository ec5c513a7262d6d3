//! Claim codes: one agent of a scaler exchanges its code for a token, once.

use std::time::Duration;

use kici_engine::ids::AgentId;
use kici_engine::time::Ts;

use super::words;

words! {
    /// Why a claim code gets nothing.
    ClaimRefused("claim refusal") {
        /// There is no such code.
        Invalid = "invalid",
        /// Somebody used it before.
        Consumed = "consumed",
        /// It is too old.
        Expired = "expired",
        /// Its agent is not wanted any more.
        Revoked = "revoked",
    }
}

/// A claim code to be stored; only its hash is.
#[derive(Clone, Debug)]
pub struct NewClaim {
    /// SHA-256 (hex) of the whole code.
    pub claim_hash: String,
    /// Its first 12 characters after the prefix, for support.
    pub claim_prefix: String,
    /// What it buys.
    pub claim: Claim,
    /// Not valid from then on.
    pub expires_at: Ts,
}

/// What a claim code buys.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// The agent that its bearer becomes.
    pub agent_id: AgentId,
    /// The pool that it belongs to.
    pub scaler_name: String,
    /// All labels of the agent but those about its platform and host.
    pub labels: Vec<String>,
    /// Labels that a job must name to run there.
    pub mandatory_labels: Vec<String>,
    /// How long the agent's token admits it, from the exchange on.
    pub agent_token_ttl: Duration,
    /// Where the agent goes.
    pub orchestrator_url: String,
}

/// Answer to a claim code.
#[derive(Clone, Debug, PartialEq)]
pub enum Redeemed {
    /// It is used up now.
    Claim(Claim),
    /// It gets nothing.
    Refused(ClaimRefused),
}
