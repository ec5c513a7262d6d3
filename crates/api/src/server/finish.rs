//! What every answer needs: a request id, errors as problem documents, and a floor under panics.

use std::any::Any;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use http::{HeaderName, HeaderValue, Method, StatusCode, header};
use kici_engine::ids::IdSource;
use tokio::time::Instant;
use tower_http::catch_panic::CatchPanicLayer;

use crate::problem::{Code, Problem};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The id of the request, in the request's extensions. A caller's `x-request-id` is taken over when it is 1 to 128 of
/// `A-Za-z0-9._-`; else one is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId(pub String);

/// Adds request ids, problem documents, answers for unknown paths and methods, and the panic handler to `router`.
pub fn finish(router: Router, ids: Arc<dyn IdSource>) -> Router {
    router
        .fallback(|| async { Problem::new(Code::NotFound, "nothing is served here; the API begins with /api/v1") })
        .method_not_allowed_fallback(|| async {
            Problem::new(Code::MethodNotAllowed, "this path does not answer to this method; see /api/v1/openapi.json")
        })
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(ids, around))
}

/// Marks the answer of a panic, so that [`around`] can log it with what it knows of the request.
#[derive(Clone)]
struct Panicked(String);

fn panicked(cause: Box<dyn Any + Send>) -> Response {
    let text =
        cause.downcast_ref::<&str>().map(|s| (*s).to_owned()).or_else(|| cause.downcast_ref::<String>().cloned());
    let mut response = Problem::internal().into_response();
    response.extensions_mut().insert(Panicked(text.unwrap_or_else(|| "no text".to_owned())));
    response
}

/// The answer as a problem; [`finish`] writes the body once it knows the request's id.
impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == 401 {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

async fn around(State(ids): State<Arc<dyn IdSource>>, mut request: Request, next: Next) -> Response {
    let id = request_id(&request, ids.as_ref());
    let route = request.extensions().get::<MatchedPath>().map(|m| m.as_str().to_owned());
    let method = request.method().clone();
    let began = Instant::now();
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    if let Some(Panicked(text)) = response.extensions_mut().remove::<Panicked>() {
        let route = route.as_deref().unwrap_or("-");
        tracing::error!(%method, route, request_id = %id, panic = %text, "a request handler panicked");
    }
    if let Some(mut problem) = response.extensions_mut().remove::<Problem>() {
        problem.request_id.clone_from(&id);
        let status = response.status();
        let headers = std::mem::take(response.headers_mut());
        response = (status, Json(problem)).into_response();
        // The empty answer's length would contradict the document's.
        let kept = headers.iter().filter(|(name, _)| **name != header::CONTENT_LENGTH);
        response.headers_mut().extend(kept.map(|(name, value)| (name.clone(), value.clone())));
        let problem_json = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, problem_json);
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    measure(route, &method, response.status(), began);
    response
}

/// Counts an answer under its route's pattern, so that ids and made-up paths and methods add no series.
fn measure(route: Option<String>, method: &Method, status: StatusCode, began: Instant) {
    let route = route.unwrap_or_else(|| "other".to_owned());
    let method = match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        _ => "other",
    };
    let code = status.as_u16().to_string();
    metrics::histogram!("kici_orch_http_request_duration_seconds", "route" => route.clone())
        .record(began.elapsed().as_secs_f64());
    metrics::counter!("kici_orch_http_requests_total", "route" => route, "method" => method, "code" => code)
        .increment(1);
}

fn request_id(request: &Request, ids: &dyn IdSource) -> String {
    let legal = |id: &&str| {
        (1..=128).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    };
    let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok()).filter(legal);
    given.map_or_else(|| format!("req_{}", ids.uuid().simple()), str::to_owned)
}
