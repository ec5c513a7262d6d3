//! Claim codes: an agent that cannot be handed a token when it is started exchanges its code for one, once.

use std::net::IpAddr;
use std::sync::PoisonError;

use kici_access::{Token, TokenKind as Prefix};
use kici_engine::ids::AgentId;
use kici_store::StoreError;
use kici_store::model::{AgentType, Claim, ClaimRefused, NewAccess, NewAgentToken, Redeemed, TokenKind};
use secrecy::{ExposeSecret, SecretString};

use crate::dispatcher::Dispatcher;
use crate::meters;

/// What an agent gets for its code.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// Its token, bound to its id and labels.
    pub agent_token: SecretString,
    /// Its id.
    pub agent_id: AgentId,
    /// Where it goes.
    pub orchestrator_url: String,
    /// The labels that it registers with.
    pub labels: Vec<String>,
}

/// A code that got nothing.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// It never will.
    #[error("the claim code is {0}")]
    Refused(ClaimRefused),
    /// Its address tried too often.
    #[error("too many claim codes from this address; try again in a minute")]
    TooMany,
    /// It was looked up in vain; the code may still be good.
    #[error("the claim code cannot be checked now; try again")]
    Unavailable(#[source] StoreError),
    /// It is used up and no token could be made.
    #[error("no token could be made; start the agent with another claim code")]
    Lost,
}

impl Dispatcher {
    /// Exchanges a claim code that came from an address. The code is used up, for good, before the token is made: whatever
    /// happens in between, it never buys two.
    ///
    /// # Errors
    /// [`ClaimError`].
    pub async fn redeem_claim(&self, code: &str, from: IpAddr) -> Result<Credentials, ClaimError> {
        let now = self.started.elapsed();
        if !self.claim_attempts.lock().unwrap_or_else(PoisonError::into_inner).take(from, now) {
            meters::claim_redeemed("rate_limited");
            return Err(ClaimError::TooMany);
        }
        // What is no code is not worth a look at the database.
        let parsed = Token::parse(code).ok().filter(|token| token.kind() == Prefix::Claim);
        let answer = match &parsed {
            None => Redeemed::Refused(ClaimRefused::Invalid),
            Some(code) => {
                let redeemed = self.store.claim_redeem(code.hash(), from.to_string()).await;
                redeemed.map_err(|error| {
                    tracing::warn!(%from, %error, "a claim code could not be looked up");
                    ClaimError::Unavailable(error)
                })?
            }
        };
        let shown = parsed.as_ref().map_or_else(String::new, |code| code.display_prefix().to_owned());
        match answer {
            Redeemed::Refused(refused) => {
                tracing::warn!(%from, code = shown, %refused, "a claim code was refused");
                meters::claim_redeemed(refused.as_str());
                self.audit_claim(from, shown, None, Some(refused)).await;
                Err(ClaimError::Refused(refused))
            }
            Redeemed::Claim(claim) => {
                self.audit_claim(from, shown, Some(&claim.agent_id), None).await;
                let minted = self.mint(claim).await;
                meters::claim_redeemed(if minted.is_ok() { "redeemed" } else { "lost" });
                minted
            }
        }
    }

    async fn mint(&self, claim: Claim) -> Result<Credentials, ClaimError> {
        let lost = |error: &dyn std::fmt::Display| {
            tracing::error!(agent = %claim.agent_id, %error, "no token could be made for a claim code, which is used up");
            ClaimError::Lost
        };
        let token = Token::generate(Prefix::Agent, getrandom::fill).map_err(|error| lost(&error))?;
        let new = NewAgentToken {
            token_hash: token.hash(),
            token_prefix: token.display_prefix().to_owned(),
            label: Some(format!("scaler {}", claim.scaler_name)),
            labels: Some(claim.labels.clone()),
            mandatory_labels: (!claim.mandatory_labels.is_empty()).then(|| claim.mandatory_labels.clone()),
            agent_type: AgentType::Ephemeral,
            kind: TokenKind::Scaler,
            bound_agent_id: Some(claim.agent_id.clone()),
            created_by: format!("scaler:{}", claim.scaler_name),
            expires_at: Some(self.clock.now().plus(claim.agent_token_ttl)),
        };
        self.store.agent_token_create(new).await.map_err(|error| lost(&error))?;
        tracing::info!(agent = %claim.agent_id, scaler = claim.scaler_name, "a claim code was exchanged for a token");
        let agent_token = SecretString::from(token.secret().expose_secret().to_owned());
        let Claim { agent_id, orchestrator_url, labels, .. } = claim;
        Ok(Credentials { agent_token, agent_id, orchestrator_url, labels })
    }

    /// A code is used up whether or not this is written: the log of the process has it too.
    async fn audit_claim(&self, from: IpAddr, shown: String, agent: Option<&AgentId>, refused: Option<ClaimRefused>) {
        let entry = NewAccess {
            org: None,
            actor_type: "agent".to_owned(),
            actor_id: agent.map_or_else(|| from.to_string(), ToString::to_string),
            actor_meta: Some(serde_json::json!({ "address": from.to_string() })),
            action: "scaler_claim.redeem".to_owned(),
            source: "agent".to_owned(),
            outcome: if refused.is_none() { "allowed" } else { "denied" }.to_owned(),
            target_type: Some("scaler_claim".to_owned()),
            target_id: Some(shown).filter(|shown| !shown.is_empty()),
            request_id: None,
            routing_key: None,
            error_message: refused.map(|refused| refused.to_string()),
        };
        if let Err(error) = self.store.access_log_insert(vec![entry]).await {
            tracing::warn!(%error, "the use of a claim code is missing in the access log");
        }
    }
}
