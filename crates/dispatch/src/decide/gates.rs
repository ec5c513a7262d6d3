//! Whether an agent may register as what it says it is, and which labels it ends up with. The same function judges the
//! first `Register` of a session and every later one.

use kici_engine::ids::{AgentId, TokenId};
use kici_engine::labels::{
    AgentFacts, CanonicalLabel, LabelSet, host_label, is_automatic, is_self_reported, platform_labels,
};
use kici_engine::scaling::{AGENT_PREFIX, is_scaler_agent};
use kici_protocol::MIN_PROTOCOL_VERSION;
use kici_protocol::agent::Register;
use kici_protocol::close::CloseReason;
use kici_store::model::{AgentToken, AgentType, TokenKind};

/// Label of agents that run as root on purpose.
const PRIVILEGED: &str = "kici:privileged:root";
/// Most labels an agent may report.
const MAX_LABELS: usize = 200;
/// Most slots of one agent.
pub const MAX_CONCURRENCY: u32 = 256;

/// What a token says about its agents.
#[derive(Clone, Debug)]
pub struct TokenFacts {
    /// Its id.
    pub id: TokenId,
    /// SHA-256 of it, in hex.
    pub hash: String,
    /// What it is for.
    pub kind: TokenKind,
    /// How long its agents live.
    pub lifecycle: AgentType,
    /// Labels that its agents may claim; none is any.
    pub scope: Option<LabelSet>,
    /// Labels that a job must name to run there.
    pub mandatory: LabelSet,
    /// Only this agent may use it.
    pub bound: Option<AgentId>,
}

impl TokenFacts {
    /// Reads a stored token. A stored label that is none refuses the token: a lost limit is not "no limit".
    ///
    /// # Errors
    /// The text of the label.
    pub fn read(token: &AgentToken, hash: String) -> Result<Self, String> {
        let read = |labels: &Vec<String>| -> Result<LabelSet, String> {
            labels.iter().map(|text| CanonicalLabel::parse(text).map_err(|_| text.clone())).collect()
        };
        Ok(Self {
            id: token.id,
            hash,
            kind: token.kind,
            lifecycle: token.agent_type,
            scope: token.labels.as_ref().map(read).transpose()?,
            mandatory: token.mandatory_labels.as_ref().map(read).transpose()?.unwrap_or_default(),
            bound: token.bound_agent_id.clone(),
        })
    }
}

/// A registration that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// How the session is closed.
    pub reason: CloseReason,
    /// For the operator of the agent.
    pub message: String,
}

impl Refused {
    /// A refusal for want of rights.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self { reason: CloseReason::Unauthorized, message: message.into() }
    }

    fn invalid(message: impl Into<String>) -> Self {
        Self { reason: CloseReason::InvalidMessage, message: message.into() }
    }
}

/// An agent that passed the gates that need no look at other agents.
#[derive(Clone, Debug)]
pub struct Admitted {
    /// Its name.
    pub agent_id: AgentId,
    /// Its labels, with those that follow from platform and host.
    pub facts: AgentFacts,
    /// Its host, as it says.
    pub hostname: Option<String>,
    /// Its slots.
    pub max_concurrency: u32,
}

impl Admitted {
    /// Gives it the host name that an operator declared, whatever the agent says of itself.
    pub fn rename_host(&mut self, hostname: &str) {
        self.facts.labels.retain(|label| !label.as_str().starts_with("kici:host:"));
        self.facts.labels.extend(host_label(hostname));
        self.hostname = Some(hostname.to_owned());
    }
}

/// Judges a `Register`. `token` is none with authentication off.
///
/// # Errors
/// [`Refused`], by the first gate that does not hold.
pub fn admit(register: &Register, token: Option<&TokenFacts>) -> Result<Admitted, Refused> {
    if register.protocol_version < MIN_PROTOCOL_VERSION {
        let message = format!(
            "the agent speaks protocol version {} and this orchestrator needs at least {MIN_PROTOCOL_VERSION}; update the agent",
            register.protocol_version
        );
        return Err(Refused { reason: CloseReason::Protocol, message });
    }
    let agent_id =
        AgentId::new(register.agent_id.clone()).map_err(|error| Refused::invalid(format!("agent_id: {error}")))?;
    let wire = wire_labels(register)?;
    privileged(register, &wire, token)?;
    reserved(&wire, token)?;
    if token.is_some_and(|token| token.kind != TokenKind::Scaler) && is_scaler_agent(&agent_id) {
        return Err(Refused::unauthorized(format!(
            "agent ids that begin with `{AGENT_PREFIX}` are for agents that a scaler started; choose another agent id"
        )));
    }
    if let Some(token) = token {
        scope(&wire, token)?;
        if let Some(bound) = token.bound.as_ref().filter(|bound| **bound != agent_id) {
            return Err(Refused::unauthorized(format!("the token belongs to agent {bound}, not to {agent_id}")));
        }
    }
    let hostname = Some(register.hostname.trim()).filter(|host| !host.is_empty()).map(str::to_owned);
    // What an agent says about its own platform and host is derived here, never taken over.
    let mut labels: LabelSet = wire.into_iter().filter(|label| !is_self_reported(label)).collect();
    labels.extend(platform_labels(&register.platform, &register.arch));
    labels.extend(hostname.as_deref().and_then(host_label));
    let machine_id = Some(register.machine_id.clone()).filter(|id| !id.is_empty());
    let mandatory = token.map(|token| token.mandatory.clone()).unwrap_or_default();
    Ok(Admitted {
        agent_id,
        facts: AgentFacts { labels, mandatory, machine_id },
        hostname,
        max_concurrency: register.max_concurrency.clamp(1, MAX_CONCURRENCY),
    })
}

fn wire_labels(register: &Register) -> Result<LabelSet, Refused> {
    if register.labels.len() > MAX_LABELS {
        let count = register.labels.len();
        return Err(Refused::invalid(format!("the agent has {count} labels; at most {MAX_LABELS} are allowed")));
    }
    let parsed = register.labels.iter().map(|text| CanonicalLabel::parse(text));
    parsed.collect::<Result<_, _>>().map_err(|error| Refused::invalid(format!("labels: {error}")))
}

/// g0: who claims to be privileged must run as root.
fn privileged(register: &Register, wire: &LabelSet, token: Option<&TokenFacts>) -> Result<(), Refused> {
    let named = |labels: &LabelSet| labels.iter().any(|label| label.as_str() == PRIVILEGED);
    let by_token = token.is_some_and(|t| t.scope.as_ref().is_some_and(named) || named(&t.mandatory));
    if (named(wire) || by_token) && register.running_as_uid != Some(0) {
        return Err(Refused::unauthorized(format!(
            "`{PRIVILEGED}` is only for agents that run as root; run the agent as root or use another token"
        )));
    }
    Ok(())
}

/// Labels of the system are given by a token, or follow from platform and host; an agent cannot make up others.
fn reserved(wire: &LabelSet, token: Option<&TokenFacts>) -> Result<(), Refused> {
    let given = |label: &CanonicalLabel| token.and_then(|t| t.scope.as_ref()).is_some_and(|s| s.contains(label));
    let made_up = wire
        .iter()
        .find(|label| is_automatic(label) && !is_self_reported(label) && label.as_str() != PRIVILEGED && !given(label));
    match made_up {
        Some(label) => Err(Refused::unauthorized(format!(
            "the label `{}` cannot be claimed: only the system sets labels with `kici:`; remove it",
            label.as_str()
        ))),
        None => Ok(()),
    }
}

/// g1: a scoped token covers every label but those about platform and host.
fn scope(wire: &LabelSet, token: &TokenFacts) -> Result<(), Refused> {
    let Some(scope) = &token.scope else { return Ok(()) };
    let extra: Vec<_> = wire
        .iter()
        .filter(|l| !is_self_reported(l) && !scope.contains(*l))
        .map(CanonicalLabel::as_str)
        .take(10)
        .collect();
    if extra.is_empty() {
        return Ok(());
    }
    let extra = extra.join("`, `");
    Err(Refused::unauthorized(format!(
        "the token does not cover the labels `{extra}`; remove them or create another token"
    )))
}

/// Another agent that has the same name or host name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The agent.
    pub agent_id: AgentId,
    /// The token it used.
    pub token_id: Option<TokenId>,
}

/// g3 and the second half of g4: the name must not be in use with another token, and the host name must not belong to a
/// host of another token. Agents of one token are equally trusted and may share a host.
///
/// # Errors
/// [`Refused`].
pub fn no_collision(
    admitted: &Admitted,
    token: Option<TokenId>,
    same_name: Option<&Holder>,
    same_host: Option<&Holder>,
) -> Result<(), Refused> {
    if same_name.is_some_and(|holder| holder.token_id != token) {
        let id = &admitted.agent_id;
        return Err(Refused::unauthorized(format!(
            "agent {id} is connected with another token; choose another agent id or stop the other agent"
        )));
    }
    if let Some(holder) = same_host.filter(|holder| holder.token_id != token) {
        let host = admitted.hostname.as_deref().unwrap_or_default();
        return Err(Refused::unauthorized(format!(
            "host name `{host}` belongs to agent {}, which uses another token; use the same token or another host name",
            holder.agent_id
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn register(labels: &[&str]) -> Register {
        Register {
            agent_id: "build-1".into(),
            labels: labels.iter().map(|l| (*l).to_owned()).collect(),
            platform: "linux".into(),
            arch: "x86_64".into(),
            hostname: "Box-7".into(),
            protocol_version: 1,
            ..Default::default()
        }
    }

    fn token(scope: Option<&[&str]>) -> TokenFacts {
        let set = |labels: &[&str]| labels.iter().map(|l| CanonicalLabel::parse(l).unwrap()).collect();
        TokenFacts {
            id: TokenId::from_uuid(uuid::Uuid::from_u128(1)),
            hash: String::new(),
            kind: TokenKind::Static,
            lifecycle: AgentType::Static,
            scope: scope.map(set),
            mandatory: LabelSet::new(),
            bound: None,
        }
    }

    fn labels(admitted: &Admitted) -> Vec<&str> {
        admitted.facts.labels.iter().map(CanonicalLabel::as_str).collect()
    }

    #[test]
    fn platform_and_host_labels_are_derived_not_believed() {
        let wire = register(&["GPU", "kici:os:windows", "kici:host:production"]);
        let admitted = admit(&wire, Some(&token(Some(&["gpu"])))).unwrap();
        let expected = ["gpu", "kici:arch:amd64", "kici:arch:x64", "kici:host:box-7", "kici:os:linux"];
        assert_eq!(labels(&admitted), expected);
    }

    #[test]
    fn a_declared_host_name_stands_above_what_the_agent_says() {
        let mut admitted = admit(&register(&["kici:host:production"]), None).unwrap();
        admitted.rename_host("Db-1");
        assert_eq!(labels(&admitted), ["kici:arch:amd64", "kici:arch:x64", "kici:host:db-1", "kici:os:linux"]);
        assert_eq!(admitted.hostname.as_deref(), Some("Db-1"));
    }

    #[test]
    fn a_scoped_token_refuses_an_extra_label_and_an_unscoped_one_does_not() {
        let wire = register(&["gpu", "deploy"]);
        let refused = admit(&wire, Some(&token(Some(&["gpu"])))).unwrap_err();
        assert_eq!(refused.reason, CloseReason::Unauthorized);
        assert!(refused.message.contains("`deploy`"), "{}", refused.message);
        assert!(admit(&wire, Some(&token(None))).is_ok());
        assert!(admit(&wire, None).is_ok());
    }

    #[test]
    fn a_bound_token_is_for_one_agent() {
        let bound = TokenFacts { bound: Some(AgentId::new("build-2").unwrap()), ..token(None) };
        assert_eq!(admit(&register(&[]), Some(&bound)).unwrap_err().reason, CloseReason::Unauthorized);
    }

    #[test]
    fn the_ids_of_a_scalers_agents_are_for_its_tokens_only() {
        let wire = Register { agent_id: "scaler-container-0123456789abcdef".into(), ..register(&[]) };
        assert_eq!(admit(&wire, Some(&token(None))).unwrap_err().reason, CloseReason::Unauthorized);
        assert!(admit(&wire, Some(&TokenFacts { kind: TokenKind::Scaler, ..token(None) })).is_ok());
    }

    #[test]
    fn privileged_needs_root_wherever_the_label_comes_from() {
        let mut wire = register(&[PRIVILEGED]);
        assert!(admit(&wire, None).is_err());
        wire.running_as_uid = Some(1000);
        assert!(admit(&wire, None).is_err());
        wire.running_as_uid = Some(0);
        assert!(admit(&wire, None).is_ok());
        let by_token = token(Some(&[PRIVILEGED]));
        assert!(admit(&register(&[]), Some(&by_token)).is_err());
    }

    #[test]
    fn names_and_hosts_collide_only_across_tokens() {
        let mine = TokenId::from_uuid(uuid::Uuid::from_u128(1));
        let other = Holder {
            agent_id: AgentId::new("x").unwrap(),
            token_id: Some(TokenId::from_uuid(uuid::Uuid::from_u128(2))),
        };
        let same = Holder { token_id: Some(mine), ..other.clone() };
        let admitted = admit(&register(&[]), None).unwrap();
        assert!(no_collision(&admitted, Some(mine), Some(&same), Some(&same)).is_ok());
        assert!(no_collision(&admitted, Some(mine), Some(&other), None).is_err());
        assert!(no_collision(&admitted, Some(mine), None, Some(&other)).is_err());
    }

    #[test]
    fn old_protocols_bad_names_and_bad_labels_are_refused_in_words() {
        let old = Register { protocol_version: 0, ..register(&[]) };
        assert_eq!(admit(&old, None).unwrap_err().reason, CloseReason::Protocol);
        let named = Register { agent_id: "../x".into(), ..register(&[]) };
        assert!(admit(&named, None).unwrap_err().message.starts_with("agent_id: "));
        assert!(admit(&register(&["a b"]), None).unwrap_err().message.starts_with("labels: "));
    }
}
