//! Error answers: RFC 9457 problem details with a stable `code`.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One field of a request that was refused, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FieldError {
    /// Where it stands: `labels[2]`, `config.path`, `?limit`.
    pub field: String,
    /// The fault and the remedy.
    pub detail: String,
}

impl FieldError {
    /// An error at `field`.
    pub fn new(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { field: field.into(), detail: detail.into() }
    }
}

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $word:literal, $status:literal, $title:literal;)*) => {
        /// The stable codes of error answers. Programs compare these; people read `detail`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code { $($(#[$doc])* $variant,)* }

        impl Code {
            /// Every code.
            pub const ALL: &'static [Code] = &[$(Self::$variant,)*];

            /// The word in JSON.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }

            /// The HTTP status that goes with it.
            pub const fn status(self) -> u16 {
                match self { $(Self::$variant => $status,)* }
            }

            /// The short human title; the same for every occurrence (RFC 9457, section 3.1.3).
            pub const fn title(self) -> &'static str {
                match self { $(Self::$variant => $title,)* }
            }
        }
    };
}

codes! {
    /// No bearer token came.
    AuthMissing = "auth.missing", 401, "Authentication required";
    /// The token is unknown, mistyped, expired or revoked.
    AuthInvalid = "auth.invalid", 401, "Token not accepted";
    /// The token's role lacks a permission.
    Forbidden = "auth.forbidden", 403, "Permission missing";
    /// Too many failed attempts from one address.
    AuthRateLimited = "auth.rate_limited", 429, "Too many failed attempts";
    /// Whether the token is good cannot be decided now.
    AuthUnavailable = "auth.unavailable", 503, "Authentication cannot be decided";
    /// The request does not parse: malformed JSON, an unknown field, a wrong type.
    RequestInvalid = "request.invalid", 400, "Request not understood";
    /// The body is larger than allowed.
    RequestTooLarge = "request.too_large", 413, "Request too large";
    /// The body is not JSON.
    UnsupportedMediaType = "request.media_type", 415, "Unsupported media type";
    /// The path exists, the method does not.
    MethodNotAllowed = "request.method", 405, "Method not allowed";
    /// A cursor that was changed, or belongs to other filters.
    CursorInvalid = "cursor.invalid", 400, "Cursor not accepted";
    /// The request parses and what it asks for is not acceptable.
    InputRejected = "input.rejected", 422, "Input rejected";
    /// It does not exist, or lies outside the token's scope.
    NotFound = "not_found", 404, "Not found";
    /// What was asked for clashes with the present state.
    Conflict = "conflict", 409, "Refused by the present state";
    /// A name is taken.
    Exists = "exists", 409, "Exists already";
    /// The run has ended.
    RunTerminal = "run.terminal", 409, "The run has ended";
    /// The run has not ended.
    RunActive = "run.active", 409, "The run is still going";
    /// The workflow has no trigger that allows a start by hand.
    NoManualTrigger = "workflow.no_manual_trigger", 409, "No manual trigger";
    /// The delivery is not among the dead letters.
    NotDeadLetter = "event_dlq.not_dead", 409, "Not a dead letter";
    /// Too many events of one name.
    EventRate = "event.rate_limited", 429, "Too many events";
    /// The object was changed by somebody else since it was read.
    VersionMismatch = "version.mismatch", 412, "Changed in between";
    /// It existed and is no longer kept.
    Gone = "gone", 410, "No longer kept";
    /// Too many deliveries at once.
    IngestBusy = "ingest.busy", 429, "Too many deliveries";
    /// A source cannot verify what it is sent.
    SourceMisconfigured = "source.misconfigured", 500, "The source is not set up";
    /// A source calls more often than it may.
    IngestRate = "ingest.rate_limited", 429, "The source calls too often";
    /// Too many topics or streams.
    StreamLimit = "stream.limit", 429, "Too many subscriptions";
    /// A dependency (database, disk, object storage) does not answer.
    Unavailable = "unavailable", 503, "Temporarily unavailable";
    /// Our fault.
    Internal = "internal", 500, "Internal error";
}

/// An error answer, `application/problem+json` (RFC 9457). Also the error type of every port: what a port returns is what
/// the caller sees, word for word. In JSON it also has `type` (`urn:kici:problem:<code>`) and the code's `title`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(into = "Document", from = "Document")]
#[error("{detail}")]
pub struct Problem {
    /// Stable, see [`Code`]; text, because a newer server may send one that this build does not know.
    pub code: Cow<'static, str>,
    /// The HTTP status.
    pub status: u16,
    /// This occurrence: the fault and the remedy.
    pub detail: String,
    /// The request's id, also in the `x-request-id` header and in the server's log. Filled in by the server.
    pub request_id: String,
    /// Fields that were refused.
    pub errors: Vec<FieldError>,
    /// Seconds after which a retry makes sense; sent as `Retry-After`.
    pub retry_after_s: Option<u32>,
}

/// The JSON form of a [`Problem`].
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = Problem)]
pub(crate) struct Document {
    /// `urn:kici:problem:<code>`.
    #[serde(rename = "type")]
    type_uri: String,
    /// Short and the same for every occurrence of the code.
    title: String,
    /// The HTTP status.
    status: u16,
    /// This occurrence: the fault and the remedy.
    detail: String,
    /// Stable; programs compare this.
    code: String,
    /// The request's id, also in the `x-request-id` header and in the server's log.
    #[serde(default)]
    request_id: String,
    /// Fields that were refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    errors: Vec<FieldError>,
}

impl From<Problem> for Document {
    fn from(problem: Problem) -> Self {
        let title = Code::ALL.iter().find(|c| c.as_str() == problem.code).map_or("Error", |c| c.title());
        Self {
            type_uri: format!("urn:kici:problem:{}", problem.code),
            title: title.to_owned(),
            status: problem.status,
            detail: problem.detail,
            code: problem.code.into_owned(),
            request_id: problem.request_id,
            errors: problem.errors,
        }
    }
}

impl From<Document> for Problem {
    fn from(document: Document) -> Self {
        Self {
            code: Cow::Owned(document.code),
            status: document.status,
            detail: document.detail,
            request_id: document.request_id,
            errors: document.errors,
            retry_after_s: None,
        }
    }
}

impl Problem {
    /// An answer with `code` and this `detail`.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self {
            code: Cow::Borrowed(code.as_str()),
            status: code.status(),
            detail: detail.into(),
            request_id: String::new(),
            errors: Vec::new(),
            retry_after_s: None,
        }
    }

    /// 404 for `what` (`run run_…`, `source \`x\``). Say the same for things outside the caller's scope.
    pub fn not_found(what: impl std::fmt::Display) -> Self {
        Self::new(Code::NotFound, format!("{what} does not exist"))
    }

    /// 422: one field is not acceptable.
    pub fn rejected(field: impl Into<String>, detail: impl Into<String>) -> Self {
        let error = FieldError::new(field, detail);
        Self::new(Code::InputRejected, format!("{}: {}", error.field, error.detail)).with_errors(vec![error])
    }

    /// 422 for several fields at once; `errors` must not be empty.
    pub fn rejected_fields(errors: Vec<FieldError>) -> Self {
        let detail = errors.iter().map(|e| format!("{}: {}", e.field, e.detail)).collect::<Vec<_>>().join("; ");
        Self::new(Code::InputRejected, detail).with_errors(errors)
    }

    /// 503 with a hint when to try again.
    pub fn unavailable(detail: impl Into<String>, retry_after_s: u32) -> Self {
        Self { retry_after_s: Some(retry_after_s), ..Self::new(Code::Unavailable, detail) }
    }

    /// 500. The cause is for the log and never part of the answer.
    pub fn internal() -> Self {
        Self::new(Code::Internal, "the server failed; its log names the cause under this request id")
    }

    /// With the refused fields.
    #[must_use]
    pub fn with_errors(mut self, errors: Vec<FieldError>) -> Self {
        self.errors = errors;
        self
    }

    /// True when this answer has `code`.
    pub fn is(&self, code: Code) -> bool {
        self.code == code.as_str()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn codes_are_unique_and_have_an_error_status() {
        let words: HashSet<_> = Code::ALL.iter().map(|c| c.as_str()).collect();
        assert_eq!(words.len(), Code::ALL.len());
        assert!(Code::ALL.iter().all(|c| (400..600).contains(&c.status())));
    }

    #[test]
    fn the_document_has_the_members_of_rfc_9457() {
        let problem = Problem::rejected("labels[0]", "holds a space; use `a-z0-9._:/@+-`");
        let json = serde_json::to_value(&problem).unwrap();
        assert_eq!(json["type"], "urn:kici:problem:input.rejected");
        assert_eq!(json["status"], 422);
        assert_eq!(json["errors"][0]["field"], "labels[0]");
        assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
    }
}
