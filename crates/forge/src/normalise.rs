//! From a forge's document to the one event model. Pure: no look-ups, only what the delivery itself says.

pub(crate) mod body;
pub mod generic;
pub(crate) mod github;
pub mod local;

use kici_engine::event::{Event, EventKind, ForkState, Sender};
use serde_json::Value as Json;

use crate::headers::Headers;
use crate::source::{Source, SourceConfig};

/// What became of a delivery.
#[derive(Clone, Debug, PartialEq)]
pub enum Normalised {
    /// An event to match.
    Event(Box<Event>),
    /// Nothing to match; the reason belongs into the delivery's note.
    Ignored(String),
}

/// A verified body that cannot be read. The delivery ends as `failed` and is not tried again: the bytes stay the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// Not JSON.
    #[error("the body is not JSON: {0}; send application/json, or a form with the document in `payload`")]
    NotJson(String),
    /// JSON, but not an object.
    #[error("the body is not a JSON object")]
    NotObject,
    /// A form without the document.
    #[error("the form has no field `payload`; put the JSON document there")]
    NoPayload,
    /// A field that the event must have.
    #[error("`{event}` event without `{field}`")]
    Missing {
        /// Event name.
        event: String,
        /// Dotted path.
        field: &'static str,
    },
}

/// The event's name as the sender calls it, for the delivery's row; known before the body is understood.
pub fn event_name(source: &Source, headers: &Headers, body: &[u8]) -> String {
    let name = match &source.config {
        SourceConfig::Github(_) => headers.get("x-github-event").map(str::to_owned),
        SourceConfig::Generic(config) => {
            Some(generic::extract_raw(&config.event_from, headers, body).unwrap_or_else(|| generic::DEFAULT.to_owned()))
        }
        SourceConfig::Local(_) => Some(headers.get("x-event-type").unwrap_or(local::PUSH).to_owned()),
    };
    name.map_or_else(|| "unknown".to_owned(), |n| n.chars().filter(|c| !c.is_control()).take(100).collect())
}

/// The action of a GitHub or generic delivery, for its row.
pub fn action(source: &Source, headers: &Headers, body: &[u8]) -> Option<String> {
    let action = match &source.config {
        SourceConfig::Github(_) => {
            let json = body::document(headers, body).ok()?;
            json.get("action")?.as_str().map(str::to_owned)
        }
        SourceConfig::Generic(config) => generic::extract_raw(config.action_from.as_ref()?, headers, body),
        SourceConfig::Local(_) => None,
    }?;
    Some(action.chars().filter(|c| !c.is_control()).take(100).collect())
}

/// Reads a verified delivery.
///
/// # Errors
/// [`BodyError`] when the body is not what its event name promises.
pub fn normalise(source: &Source, headers: &Headers, body: &[u8]) -> Result<Normalised, BodyError> {
    match &source.config {
        SourceConfig::Github(_) => github::normalise(source, headers, body),
        SourceConfig::Generic(config) => generic::normalise(source, config, headers, body),
        SourceConfig::Local(config) => local::normalise(source, config, headers, body),
    }
}

/// An event with everything unknown but its origin.
pub fn blank(source: &Source, kind: EventKind, raw_name: &str) -> Event {
    Event {
        kind,
        raw_name: raw_name.to_owned(),
        action: None,
        org: source.org.clone(),
        routing_key: source.routing_key(),
        provider: source.config.kind().as_str().to_owned(),
        source: source.name.clone(),
        repo: source.local_repo(),
        git_ref: None,
        sha: None,
        target_branch: None,
        source_branch: None,
        base_sha: None,
        tag: None,
        default_branch: None,
        is_fork_pr: ForkState::No,
        pr_number: None,
        sender: Sender::default(),
        commit_message: None,
        inputs: std::collections::BTreeMap::new(),
        requested_workflow: None,
        payload: Json::Null,
        check_mode: Default::default(),
        chain_depth: 0,
    }
}

/// Whether `sha` is the all-zero id that stands for "no commit".
pub fn is_zero_sha(sha: &str) -> bool {
    sha.len() >= 40 && sha.bytes().all(|b| b == b'0')
}

/// Puts the meaning of a pushed ref into `event`. Returns why it is ignored when it is neither branch nor tag.
///
/// A ref that was deleted becomes [`EventKind::Delete`] with the former commit as `base_sha`, never a push (R9).
pub(crate) fn set_pushed_ref(event: &mut Event, git_ref: &str, before: Option<&str>, after: &str) -> Option<String> {
    let deleted = is_zero_sha(after);
    if let Some(branch) = git_ref.strip_prefix("refs/heads/") {
        event.kind = EventKind::Push;
        event.target_branch = Some(branch.to_owned());
    } else if let Some(tag) = git_ref.strip_prefix("refs/tags/") {
        event.kind = EventKind::Tag;
        event.tag = Some(tag.to_owned());
    } else {
        return Some(format!("`{git_ref}` is neither a branch nor a tag"));
    }
    event.git_ref = Some(git_ref.to_owned());
    event.base_sha = before.map(str::to_owned);
    if deleted {
        event.kind = EventKind::Delete;
    } else {
        event.sha = Some(after.to_owned());
    }
    None
}
