//! Tokens: who a caller is, and making and revoking tokens of agents and operators.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kici_access::{Actor, ActorType, Role, Token, TokenKind};
use kici_api::dto::SecretText;
use kici_api::dto::tokens::{
    AdminTokenView, AgentTokenUse, AgentTokenView, CreateAdminToken, CreateAgentToken, TokenCreated, TokenRevoked,
};
use kici_api::ports::{AdminTokens, AgentTokens, Answer, Authenticator, Caller, Principal};
use kici_api::problem::{Code, Problem};
use kici_engine::ids::TokenId;
use kici_engine::labels::CanonicalLabel;
use kici_engine::time::{Clock, Ts};
use kici_store::{Store, model};
use secrecy::ExposeSecret as _;

use super::fault;

/// Longest life of a token that ends.
const MAX_LIFE: u64 = 10 * 365 * 86_400;

/// Life of a bootstrap token, and the longest.
const BOOTSTRAP_LIFE: u64 = 600;
/// Life of an ephemeral token that names none.
const EPHEMERAL_LIFE: u64 = 3600;

/// Tokens over the store.
pub(crate) struct Tokens {
    pub(crate) store: Store,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Tokens {
    fn expiry(&self, seconds: Option<u64>) -> Answer<Option<Ts>> {
        match seconds {
            Some(0) => {
                Err(Problem::rejected("expires_in_s", "must be at least 1; leave it out for a token without end"))
            }
            Some(s) if s > MAX_LIFE => Err(Problem::rejected("expires_in_s", format!("must be at most {MAX_LIFE}"))),
            seconds => Ok(seconds.map(|s| self.clock.now().plus(Duration::from_secs(s)))),
        }
    }
}

/// A token from the system's randomness.
fn fresh(kind: TokenKind) -> Answer<Token> {
    Token::generate(kind, getrandom::fill).map_err(|error| {
        tracing::error!(%error, "the system gives no randomness");
        Problem::internal()
    })
}

fn alive(expires_at: Option<Ts>, revoked_at: Option<Ts>, now: Ts) -> bool {
    revoked_at.is_none() && expires_at.is_none_or(|at| at > now)
}

/// The role as the store writes it.
fn stored_role(role: Role) -> model::Role {
    match role {
        Role::Owner => model::Role::Owner,
        Role::Admin => model::Role::Admin,
        Role::Auditor => model::Role::Auditor,
    }
}

/// The role as the rules of access know it.
fn access_role(role: model::Role) -> Role {
    match role {
        model::Role::Owner => Role::Owner,
        model::Role::Admin => Role::Admin,
        model::Role::Auditor => Role::Auditor,
    }
}

#[async_trait]
impl Authenticator for Tokens {
    async fn authenticate(&self, token: &Token) -> Answer<Option<Principal>> {
        let found = self.store.admin_token_by_hash(token.hash()).await.map_err(|error| {
            tracing::warn!(%error, "a token cannot be looked up");
            Problem::new(Code::AuthUnavailable, "the token cannot be checked now; try again")
        })?;
        let now = self.clock.now();
        let found = found.filter(|token| alive(token.expires_at, token.revoked_at, now));
        Ok(found.map(|token| Principal {
            actor: Actor::new(ActorType::ApiKey, token.id.to_string()),
            role: access_role(token.role),
            routing_key: token.routing_key,
        }))
    }
}

#[async_trait]
impl AdminTokens for Tokens {
    async fn create(&self, caller: &Caller, request: &CreateAdminToken) -> Answer<TokenCreated> {
        let label = request.label.trim();
        if label.is_empty() || label.chars().count() > 100 {
            return Err(Problem::rejected("label", "must have 1 to 100 characters"));
        }
        if let Some(key) = &request.routing_key
            && self.store.source_by_routing_key(key.clone()).await.map_err(fault::store)?.is_none()
        {
            let detail = format!("no source has the routing key `{key}`; `source list` shows those there are");
            return Err(Problem::rejected("routing_key", detail));
        }
        let token = fresh(TokenKind::Admin)?;
        let new = model::NewAdminToken {
            token_hash: token.hash(),
            token_prefix: token.display_prefix().to_owned(),
            label: label.to_owned(),
            role: stored_role(request.role),
            routing_key: request.routing_key.clone(),
            created_by: caller.actor.to_string(),
            expires_at: self.expiry(request.expires_in_s)?,
        };
        let stored = self.store.admin_token_create(new).await.map_err(fault::store)?;
        Ok(TokenCreated {
            id: stored.id,
            token: SecretText::new(token.secret().expose_secret()),
            prefix: stored.token_prefix,
        })
    }

    async fn list(&self, _caller: &Caller) -> Answer<Vec<AdminTokenView>> {
        let tokens = self.store.admin_token_list().await.map_err(fault::store)?;
        Ok(tokens
            .into_iter()
            .map(|token| AdminTokenView {
                id: token.id,
                label: token.label,
                prefix: token.token_prefix,
                role: access_role(token.role),
                routing_key: token.routing_key,
                created_by: token.created_by,
                created_at: token.created_at,
                last_used_at: token.last_used_at,
                expires_at: token.expires_at,
                revoked_at: token.revoked_at,
            })
            .collect())
    }

    async fn revoke(&self, _caller: &Caller, id: TokenId) -> Answer<TokenRevoked> {
        match self.store.admin_token_revoke(id).await.map_err(fault::store)? {
            true => Ok(TokenRevoked { revoked: true, sessions_closed: 0, peers_notified: 0 }),
            false => Err(Problem::not_found(format!("an open token {id}"))),
        }
    }
}

/// Tokens of agents; revoking one closes its sessions.
pub(crate) struct AgentTokenBook {
    pub(crate) tokens: Tokens,
    pub(crate) dispatcher: Arc<kici_dispatch::Dispatcher>,
}

/// Labels of a token, canonical; what is wrong is named with its place.
fn labels(field: &str, texts: &[String]) -> Answer<Vec<String>> {
    texts
        .iter()
        .enumerate()
        .map(|(at, text)| {
            CanonicalLabel::parse_user(text)
                .map(|label| label.as_str().to_owned())
                .map_err(|error| Problem::rejected(format!("{field}[{at}]"), error.to_string()))
        })
        .collect()
}

/// How long a token lives, checked against what it is for.
fn life(request: &CreateAgentToken) -> Answer<Option<u64>> {
    match (request.kind, &request.agent_id) {
        (AgentTokenUse::Static, Some(_)) => {
            return Err(Problem::rejected("agent_id", "only an `ephemeral` or `bootstrap` token is for one agent"));
        }
        (AgentTokenUse::Ephemeral | AgentTokenUse::Bootstrap, None) => {
            return Err(Problem::rejected("agent_id", "name the one agent that may use the token"));
        }
        _ => {}
    }
    match (request.kind, request.expires_in_s) {
        (AgentTokenUse::Bootstrap, Some(seconds)) if seconds > BOOTSTRAP_LIFE => {
            let detail = format!("a bootstrap token lives for at most {BOOTSTRAP_LIFE} s");
            Err(Problem::rejected("expires_in_s", detail))
        }
        (AgentTokenUse::Bootstrap, seconds) => Ok(seconds.or(Some(BOOTSTRAP_LIFE))),
        (AgentTokenUse::Ephemeral, seconds) => Ok(seconds.or(Some(EPHEMERAL_LIFE))),
        (AgentTokenUse::Static, seconds) => Ok(seconds),
    }
}

#[async_trait]
impl AgentTokens for AgentTokenBook {
    async fn create(&self, caller: &Caller, request: &CreateAgentToken) -> Answer<TokenCreated> {
        let mandatory = labels("mandatory_labels", &request.mandatory_labels)?;
        let mut scope = request.labels.as_deref().map(|texts| labels("labels", texts)).transpose()?;
        if let Some(scope) = &mut scope {
            // A token must be able to grant what it demands.
            scope.extend(mandatory.iter().cloned());
            if request.privileged_root {
                scope.push("kici:privileged:root".to_owned());
            }
            scope.sort_unstable();
            scope.dedup();
        }
        let seconds = life(request)?;
        let token = fresh(TokenKind::Agent)?;
        let (agent_type, kind) = match request.kind {
            AgentTokenUse::Static => (model::AgentType::Static, model::TokenKind::Static),
            AgentTokenUse::Ephemeral => (model::AgentType::Ephemeral, model::TokenKind::Static),
            AgentTokenUse::Bootstrap => (model::AgentType::Static, model::TokenKind::Bootstrap),
        };
        let new = model::NewAgentToken {
            token_hash: token.hash(),
            token_prefix: token.display_prefix().to_owned(),
            label: request.note.clone(),
            labels: scope,
            mandatory_labels: (!mandatory.is_empty()).then_some(mandatory),
            agent_type,
            kind,
            bound_agent_id: request.agent_id.clone(),
            created_by: caller.actor.to_string(),
            expires_at: self.tokens.expiry(seconds)?,
        };
        let stored = self.tokens.store.agent_token_create(new).await.map_err(fault::store)?;
        Ok(TokenCreated {
            id: stored.id,
            token: SecretText::new(token.secret().expose_secret()),
            prefix: stored.token_prefix,
        })
    }

    async fn list(&self, _caller: &Caller, agent_type: Option<&str>) -> Answer<Vec<AgentTokenView>> {
        let wanted: Option<model::AgentType> = agent_type
            .map(|text| {
                text.parse().map_err(|e: kici_engine::state::UnknownWord| Problem::rejected("type", e.to_string()))
            })
            .transpose()?;
        let tokens = self.tokens.store.agent_token_list().await.map_err(fault::store)?;
        Ok(tokens
            .into_iter()
            .filter(|token| wanted.is_none_or(|kind| token.agent_type == kind))
            .map(|token| AgentTokenView {
                id: token.id,
                prefix: token.token_prefix,
                labels: token.labels,
                mandatory_labels: token.mandatory_labels.unwrap_or_default(),
                agent_type: token.agent_type.as_str().to_owned(),
                kind: token.kind.as_str().to_owned(),
                agent_id: token.bound_agent_id,
                consumed_at: token.consumed_at,
                note: token.label,
                created_by: token.created_by,
                created_at: token.created_at,
                last_seen_at: token.last_seen_at,
                expires_at: token.expires_at,
                revoked_at: token.revoked_at,
            })
            .collect())
    }

    async fn revoke(&self, _caller: &Caller, id: TokenId) -> Answer<TokenRevoked> {
        // Counted before: the wake-up that the revocation causes may close the sessions before this call does.
        let sessions = self.dispatcher.agents().iter().filter(|agent| agent.token_id == Some(id)).count();
        let sessions_closed = u32::try_from(sessions).unwrap_or(u32::MAX);
        if !self.tokens.store.agent_token_revoke(id).await.map_err(fault::store)? {
            return Err(Problem::not_found(format!("an open agent token {id}")));
        }
        self.dispatcher.close_token(id);
        Ok(TokenRevoked { revoked: true, sessions_closed, peers_notified: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passing_tokens_are_for_one_agent_and_end_by_themselves() {
        let agent = kici_engine::ids::AgentId::new("a1").ok();
        let life = |kind, agent_id: &Option<_>, expires_in_s| {
            life(&CreateAgentToken { kind, agent_id: agent_id.clone(), expires_in_s, ..Default::default() })
                .map_err(|problem| problem.errors[0].field.clone())
        };
        use AgentTokenUse::{Bootstrap, Ephemeral, Static};
        assert_eq!(life(Static, &None, None), Ok(None));
        assert_eq!(life(Static, &agent, None), Err("agent_id".to_owned()));
        assert_eq!(life(Ephemeral, &None, None), Err("agent_id".to_owned()));
        assert_eq!(life(Ephemeral, &agent, None), Ok(Some(3600)));
        assert_eq!(life(Ephemeral, &agent, Some(7200)), Ok(Some(7200)));
        assert_eq!(life(Bootstrap, &agent, None), Ok(Some(600)));
        assert_eq!(life(Bootstrap, &agent, Some(601)), Err("expires_in_s".to_owned()));
    }
}
