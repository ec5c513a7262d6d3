//! Who did something, as the logs keep it: `type:id`, with ` via agent:<label>` when an agent acted for them.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What an actor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActorType {
    /// A person who logged in.
    User,
    /// An admin token.
    ApiKey,
    /// A program with an account.
    ServiceAccount,
    /// Whoever runs the platform around the installation.
    PlatformOperator,
    /// An agent.
    Agent,
    /// The installation itself.
    System,
    /// A stored text that this version does not understand.
    Unknown,
}

impl ActorType {
    const KNOWN: [Self; 6] =
        [Self::User, Self::ApiKey, Self::ServiceAccount, Self::PlatformOperator, Self::Agent, Self::System];

    /// The word in storage and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::ApiKey => "api_key",
            Self::ServiceAccount => "service_account",
            Self::PlatformOperator => "platform_operator",
            Self::Agent => "agent",
            Self::System => "system",
            Self::Unknown => "unknown",
        }
    }

    /// The type for a word; older rows say `operator` for the platform's operator.
    fn read(word: &str) -> Option<Self> {
        if word == "operator" {
            return Some(Self::PlatformOperator);
        }
        Self::KNOWN.into_iter().find(|t| t.as_str() == word)
    }
}

const VIA: &str = " via agent:";

/// Who did something.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Actor {
    /// What they are.
    pub kind: ActorType,
    /// Their id; may hold `:` and spaces. For [`ActorType::Unknown`] the whole stored text.
    pub id: String,
    /// Label of the agent that acted for them.
    pub via: Option<String>,
}

impl Actor {
    /// An actor that acts itself.
    pub fn new(kind: ActorType, id: impl Into<String>) -> Self {
        Self { kind, id: id.into(), via: None }
    }

    /// The installation itself; `part` names what acted (`sweep`, `boot`).
    pub fn system(part: impl Into<String>) -> Self {
        Self::new(ActorType::System, part)
    }

    /// The same actor, through an agent.
    #[must_use]
    pub fn via(mut self, label: impl Into<String>) -> Self {
        self.via = Some(label.into());
        self
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == ActorType::Unknown {
            return f.write_str(&self.id);
        }
        write!(f, "{}:{}", self.kind.as_str(), self.id)?;
        match &self.via {
            Some(label) => write!(f, "{VIA}{label}"),
            None => Ok(()),
        }
    }
}

/// Never fails: a text that does not parse is [`ActorType::Unknown`] with the raw text, so that one odd row never
/// breaks a list.
impl FromStr for Actor {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let parsed = text.split_once(':').and_then(|(word, rest)| {
            let kind = ActorType::read(word)?;
            let (id, via) = match rest.rsplit_once(VIA) {
                Some((id, label)) if !label.is_empty() => (id, Some(label.to_owned())),
                _ => (rest, None),
            };
            (!id.is_empty()).then(|| Self { kind, id: id.to_owned(), via })
        });
        Ok(parsed.unwrap_or_else(|| Self::new(ActorType::Unknown, text)))
    }
}

impl Serialize for Actor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Actor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let Ok(actor) = text.parse();
        Ok(actor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Actor {
        let Ok(actor) = text.parse();
        actor
    }

    #[test]
    fn every_actor_round_trips() {
        for kind in ActorType::KNOWN {
            for id in ["a", "a:b c", "https://id.example|user 7"] {
                for actor in [Actor::new(kind, id), Actor::new(kind, id).via("build 1")] {
                    assert_eq!(parse(&actor.to_string()), actor);
                }
            }
        }
    }

    #[test]
    fn odd_rows_are_shown_as_they_are() {
        for text in ["", "x", "robot:7", "user:", "user"] {
            let actor = parse(text);
            assert_eq!((actor.kind, actor.to_string()), (ActorType::Unknown, text.to_owned()));
        }
        assert_eq!(parse("operator:x").kind, ActorType::PlatformOperator);
    }
}
