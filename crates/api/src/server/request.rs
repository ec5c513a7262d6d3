//! Extractors that answer with problem documents.

use std::fmt::Display;
use std::str::FromStr;

use axum::body::to_bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Uri, header};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::page::{DEFAULT_LIMIT, MAX_LIMIT, Page, PageRequest, Slice, decode_cursor, encode_cursor};
use crate::problem::{Code, FieldError, Problem};

/// Largest request body in bytes.
pub const MAX_BODY: usize = 1024 * 1024;

/// A JSON body. An empty one reads as `{}`.
pub(super) struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let is_json = content_type_is_json(request.headers());
        let bytes = read_body(request).await?;
        if bytes.is_empty() {
            return parse(b"{}").map(Self);
        }
        if !is_json {
            let detail = "the body must be JSON with `content-type: application/json`";
            return Err(Problem::new(Code::UnsupportedMediaType, detail));
        }
        parse(&bytes).map(Self)
    }
}

async fn read_body(request: Request) -> Result<Bytes, Problem> {
    let too_large = || Problem::new(Code::RequestTooLarge, format!("the body may have at most {MAX_BODY} bytes"));
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > MAX_BODY) {
        return Err(too_large());
    }
    to_bytes(request.into_body(), MAX_BODY).await.map_err(|error| {
        // axum hides the limit's error inside its own; anything else is a connection that broke.
        let limit = std::error::Error::source(&error).is_some_and(|cause| cause.to_string().contains("length limit"));
        if limit { too_large() } else { Problem::new(Code::RequestInvalid, "the body ended early") }
    })
}

fn content_type_is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = value.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if inner.is_syntax() || inner.is_eof() {
            return Problem::new(Code::RequestInvalid, format!("the body is not JSON: {inner}"));
        }
        field_problem(&path, &inner.to_string())
    })?;
    let end = reader.end();
    end.map_err(|error| Problem::new(Code::RequestInvalid, format!("the body is not one JSON document: {error}")))?;
    Ok(value)
}

/// serde says "unknown field `x`, expected …" without the path, or gives the path of a value that does not fit.
fn field_problem(path: &str, message: &str) -> Problem {
    let named = ["unknown field `", "missing field `"].iter().find_map(|start| {
        let rest = message.strip_prefix(start)?;
        rest.split_once('`').map(|(name, _)| name)
    });
    let field = match named {
        Some(name) if path == "." || path == "?" => name.to_owned(),
        Some(name) if path == name || path.ends_with(&format!(".{name}")) => path.to_owned(),
        Some(name) => format!("{path}.{name}"),
        None => path.to_owned(),
    };
    let detail = if field == "." || field == "?" { message.to_owned() } else { format!("{field}: {message}") };
    Problem::new(Code::RequestInvalid, detail).with_errors(vec![FieldError::new(field, message)])
}

/// The query of a route that is not a list.
pub(super) struct QueryOf<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for QueryOf<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        parse_query(parts.uri.query().unwrap_or_default()).map(Self)
    }
}

fn parse_query<T: DeserializeOwned>(query: &str) -> Result<T, Problem> {
    let uri: Uri =
        format!("/?{query}").parse().map_err(|_| Problem::new(Code::RequestInvalid, "the query is malformed"))?;
    Query::<T>::try_from_uri(&uri).map(|Query(value)| value).map_err(|rejection| {
        let text = rejection.body_text();
        let message = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
        // axum puts the path before the message: `status: unknown variant …`.
        match message.split_once(": ") {
            Some((path, inner)) if !path.contains(' ') => field_problem(path, inner),
            _ => field_problem(".", message),
        }
    })
}

/// The query of a list: its filters, and which page.
pub(super) struct Listing<F> {
    pub filter: F,
    pub page: PageRequest,
    key: String,
}

impl<F: DeserializeOwned + Serialize, S: Sync> FromRequestParts<S> for Listing<F> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let mut filters = form_urlencoded::Serializer::new(String::new());
        let (mut limit, mut cursor) = (None, None);
        for (name, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
            match &*name {
                "limit" => limit = Some(value.into_owned()),
                "cursor" => cursor = Some(value.into_owned()),
                _ => _ = filters.append_pair(&name, &value),
            }
        }
        let filter: F = parse_query(&filters.finish())?;
        let canonical = serde_json::to_string(&filter).map_err(|_| Problem::internal())?;
        let key = format!("{}?{canonical}", parts.uri.path());
        let limit = limit.map_or(Ok(DEFAULT_LIMIT), |text| page_limit(&text))?;
        let after = cursor.map(|text| decode_cursor(&text, &key)).transpose()?;
        Ok(Self { filter, page: PageRequest { limit, after }, key })
    }
}

fn page_limit(text: &str) -> Result<u32, Problem> {
    text.parse::<u32>().ok().filter(|n| (1..=MAX_LIMIT).contains(n)).ok_or_else(|| {
        let message = format!("must be a number from 1 to {MAX_LIMIT}");
        Problem::new(Code::RequestInvalid, format!("limit: {message}"))
            .with_errors(vec![FieldError::new("limit", message)])
    })
}

impl<F> Listing<F> {
    /// The document for a port's answer.
    pub fn finish<T>(&self, slice: Slice<T>) -> Page<T> {
        Page { items: slice.items, next_cursor: slice.next.map(|position| encode_cursor(position, &self.key)) }
    }
}

/// One path parameter that parses as `T`; text that does not is 404, since nothing has such a name.
pub(super) struct PathOf<T>(pub T);

impl<T, S> FromRequestParts<S> for PathOf<T>
where
    T: FromStr<Err: Display> + Send,
    S: Sync + Send,
{
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Path(text) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| Problem::internal())?;
        text.parse().map(Self).map_err(|error: T::Err| Problem::new(Code::NotFound, error.to_string()))
    }
}

/// The caller's `Idempotency-Key`.
pub(super) struct IdempotencyKey(pub Option<String>);

impl<S: Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let Some(value) = parts.headers.get("idempotency-key") else { return Ok(Self(None)) };
        let legal = |text: &&str| (1..=255).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        let text = value.to_str().ok().filter(legal).ok_or_else(|| {
            let message = "must be 1 to 255 printable ASCII characters without spaces";
            Problem::new(Code::RequestInvalid, format!("Idempotency-Key: {message}"))
        })?;
        Ok(Self(Some(text.to_owned())))
    }
}
