//! Generic webhooks: the source says where the values are (R61).

use kici_engine::event::EventKind;
use serde_json::{Map, Value as Json};
use serde_json_path::JsonPath;

use super::{BodyError, Normalised, blank, body};
use crate::headers::Headers;
use crate::source::{Extract, GenericConfig, Source};

/// Event name when the call gives none.
pub const DEFAULT: &str = "webhook";

/// A value from the call before its body is understood. A body that does not parse has no values.
pub fn extract_raw(from: &Extract, headers: &Headers, raw: &[u8]) -> Option<String> {
    match from {
        Extract::Header(_) => extract(from, headers, &Json::Null),
        Extract::Path(_) => extract(from, headers, &document(headers, raw).ok()?),
    }
}

/// A value from the call; absent, `null`, empty, and objects or lists are all "no value".
fn extract(from: &Extract, headers: &Headers, document: &Json) -> Option<String> {
    let text = match from {
        Extract::Header(name) => headers.get(name)?.trim().to_owned(),
        // Paths were parsed when the source was stored.
        Extract::Path(path) => match JsonPath::parse(path).ok()?.query(document).first()? {
            Json::String(text) => text.clone(),
            Json::Number(number) => number.to_string(),
            Json::Bool(flag) => flag.to_string(),
            Json::Null | Json::Array(_) | Json::Object(_) => return None,
        },
    };
    (!text.is_empty()).then_some(text)
}

/// JSON of any type, a form as an object of its fields (or the document in `payload`), nothing as `{}`.
fn document(headers: &Headers, raw: &[u8]) -> Result<Json, BodyError> {
    if body::is_form(headers) {
        let fields: Map<String, Json> =
            form_urlencoded::parse(raw).map(|(n, v)| (n.into_owned(), Json::String(v.into_owned()))).collect();
        return match fields.get("payload") {
            Some(Json::String(payload)) => body::object(payload.as_bytes()),
            _ => Ok(Json::Object(fields)),
        };
    }
    if raw.iter().all(u8::is_ascii_whitespace) {
        return Ok(Json::Object(Map::new()));
    }
    serde_json::from_slice(raw).map_err(|e| BodyError::NotJson(e.to_string()))
}

pub(super) fn normalise(
    source: &Source,
    config: &GenericConfig,
    headers: &Headers,
    raw: &[u8],
) -> Result<Normalised, BodyError> {
    let document = document(headers, raw)?;
    let get = |from: &Option<Extract>| from.as_ref().and_then(|f| extract(f, headers, &document));
    let name = extract(&config.event_from, headers, &document).unwrap_or_else(|| DEFAULT.to_owned());
    if !config.allowed_events.is_empty() && !config.allowed_events.contains(&name) {
        return Ok(Normalised::Ignored(format!("event `{name}` is not in allowed_events of the source")));
    }
    let mut event = blank(source, EventKind::Hook, &name);
    event.action = get(&config.action_from);
    event.repo = get(&config.repo_from);
    event.sha = get(&config.sha_from);
    if let Some(text) = get(&config.ref_from) {
        let full = if text.starts_with("refs/") { text } else { format!("refs/heads/{text}") };
        event.target_branch = full.strip_prefix("refs/heads/").map(str::to_owned);
        event.tag = full.strip_prefix("refs/tags/").map(str::to_owned);
        event.git_ref = Some(full);
    }
    event.payload = document;
    Ok(Normalised::Event(Box::new(event)))
}
