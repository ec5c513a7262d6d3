//! The document inside a body: JSON, or a form that holds JSON.

use serde_json::Value as Json;

use super::BodyError;
use crate::headers::Headers;

/// Whether the body is a form.
pub(crate) fn is_form(headers: &Headers) -> bool {
    let kind = headers.get("content-type").unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// The JSON object of a forge's delivery. GitHub sends forms with the document in `payload` when asked to.
pub(crate) fn document(headers: &Headers, body: &[u8]) -> Result<Json, BodyError> {
    if !is_form(headers) {
        return object(body);
    }
    let payload = form_urlencoded::parse(body).find(|(name, _)| name == "payload");
    let (_, payload) = payload.ok_or(BodyError::NoPayload)?;
    object(payload.as_bytes())
}

/// A JSON object from bytes. Nesting beyond serde_json's limit of 128 is an error, not a stack overflow.
pub(crate) fn object(bytes: &[u8]) -> Result<Json, BodyError> {
    let json: Json = serde_json::from_slice(bytes).map_err(|e| BodyError::NotJson(e.to_string()))?;
    if json.is_object() { Ok(json) } else { Err(BodyError::NotObject) }
}

/// The text at a dotted path; empty text counts as absent.
pub(crate) fn text<'a>(json: &'a Json, path: &str) -> Option<&'a str> {
    at(json, path)?.as_str().filter(|t| !t.is_empty())
}

/// The value at a dotted path; `null` counts as absent.
pub(crate) fn at<'a>(json: &'a Json, path: &str) -> Option<&'a Json> {
    let mut here = json;
    for key in path.split('.') {
        here = here.get(key)?;
    }
    (!here.is_null()).then_some(here)
}
