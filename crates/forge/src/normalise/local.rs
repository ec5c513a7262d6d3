//! Pushes to a repository on this machine: what our hook and `source trigger` send.

use kici_engine::event::EventKind;
use serde::{Deserialize, Serialize};

use super::{BodyError, Normalised, blank, body, set_pushed_ref};
use crate::headers::Headers;
use crate::source::{LocalConfig, Source};

/// The one event of a local source; the header `x-event-type` may be left out.
pub const PUSH: &str = "push";

/// Body of a push to a local source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalPush {
    /// Full ref, `refs/heads/…` or `refs/tags/…`.
    #[serde(rename = "ref")]
    pub git_ref: String,
    /// Commit before; all zeros or absent when not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Commit after; all zeros when the ref was deleted.
    pub after: String,
    /// Default branch of the repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_branch: Option<String>,
    /// Message of the commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Who pushed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sender: Option<String>,
}

pub(super) fn normalise(
    source: &Source,
    config: &LocalConfig,
    headers: &Headers,
    raw: &[u8],
) -> Result<Normalised, BodyError> {
    let name = headers.get("x-event-type").unwrap_or(PUSH);
    if name != PUSH {
        return Ok(Normalised::Ignored(format!("a local source knows only `push`, not `{name}`")));
    }
    let document = body::document(headers, raw)?;
    let missing = |field| BodyError::Missing { event: PUSH.to_owned(), field };
    let git_ref = body::text(&document, "ref").ok_or_else(|| missing("ref"))?;
    let after = body::text(&document, "after").ok_or_else(|| missing("after"))?;
    let mut event = blank(source, EventKind::Push, PUSH);
    if let Some(reason) = set_pushed_ref(&mut event, git_ref, body::text(&document, "before"), after) {
        return Ok(Normalised::Ignored(reason));
    }
    event.default_branch =
        body::text(&document, "default_branch").map(str::to_owned).or_else(|| config.default_branch.clone());
    event.commit_message = body::text(&document, "message").map(str::to_owned);
    event.sender.username = body::text(&document, "sender").map(str::to_owned);
    event.payload = document;
    Ok(Normalised::Event(Box::new(event)))
}
