//! One route: its path, the permission it needs, and what the access log calls it. The table of all routes is the one
//! place that says so; the router, the OpenAPI document and the tests read it.

use axum::Router;
use axum::extract::{FromRequestParts, RawPathParams, Request, State};
use axum::handler::Handler;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter, on};
use http::{HeaderMap, Method};
use kici_access::Permission;

use super::{ApiState, auth};
use crate::ports::{AccessOutcome, AccessRecord, Caller};
use crate::problem::Problem;

/// The kind of thing that a route acts on, as the access log calls it.
pub type Target = &'static str;

/// One route under `/api/v1`.
#[derive(Clone)]
pub struct Route {
    /// The method.
    pub method: Method,
    /// The path with `{parameters}`, `/api/v1` included.
    pub path: &'static str,
    /// What it needs; none for the few that are open to everybody.
    pub permission: Option<Permission>,
    /// What the access log calls it.
    pub action: &'static str,
    /// The kind of thing named by the first path parameter.
    pub target: Option<Target>,
    /// Whether a token that is bound to one source may use it.
    pub scoped: bool,
    handler: MethodRouter<ApiState>,
}

impl Route {
    /// A route for installation-wide tokens that needs `permission`.
    pub(super) fn new<H, T>(method: Method, path: &'static str, permission: Permission, action: &'static str, handler: H) -> Self
    where
        H: Handler<T, ApiState>,
        T: 'static,
    {
        Self { permission: Some(permission), ..Self::open(method, path, action, handler) }
    }

    /// A route that asks for no token.
    pub(super) fn open<H, T>(method: Method, path: &'static str, action: &'static str, handler: H) -> Self
    where
        H: Handler<T, ApiState>,
        T: 'static,
    {
        let filter = MethodFilter::try_from(method.clone()).unwrap_or(MethodFilter::GET);
        Self { method, path, permission: None, action, target: None, scoped: false, handler: on(filter, handler) }
    }

    /// Its first path parameter names a `target`.
    pub(super) fn on(self, target: Target) -> Self {
        Self { target: Some(target), ..self }
    }

    /// Tokens that are bound to one source may use it; the port keeps them to their rows.
    pub(super) fn scoped(self) -> Self {
        Self { scoped: true, ..self }
    }

    /// Adds it to `router` behind its permission check.
    pub(super) fn mount(self, router: Router<ApiState>, state: &ApiState) -> Router<ApiState> {
        let path = self.path;
        let handler = match self.permission {
            None => self.handler,
            Some(permission) => {
                let handler = self.handler.clone();
                let guard = Guard { state: state.clone(), route: self, permission };
                handler.route_layer(from_fn_with_state(guard, guarded))
            }
        };
        router.route(path, handler)
    }
}

#[derive(Clone)]
struct Guard {
    state: ApiState,
    route: Route,
    permission: Permission,
}

async fn guarded(State(guard): State<Guard>, request: Request, next: Next) -> Result<Response, Problem> {
    let Guard { state, route, permission } = &guard;
    let (mut parts, body) = request.into_parts();
    let target = match route.target {
        Some(_) => RawPathParams::from_request_parts(&mut parts, state).await.ok(),
        None => None,
    };
    let target_id = target.and_then(|params| params.iter().next().map(|(_, value)| value.to_owned()));
    let from_cli = is_cli(&parts.headers);
    let mut request = Request::from_parts(parts, body);
    let record = |caller: &Caller, outcome, error| {
        state.ports.access_log.record(AccessRecord {
            actor: caller.actor.clone(),
            action: route.action,
            from_cli,
            outcome,
            target_type: route.target,
            target_id,
            request_id: caller.request_id.clone(),
            routing_key: caller.routing_key.clone(),
            error,
        });
    };
    let (caller, session) = match auth::authenticate(state, route, *permission, &request).await {
        Ok(authenticated) => authenticated,
        Err((caller, problem)) => {
            if let Some(caller) = caller {
                record(&caller, AccessOutcome::Denied, Some(problem.detail.clone()));
            }
            return Err(problem);
        }
    };
    request.extensions_mut().insert(caller.clone());
    request.extensions_mut().insert(session);
    let response = next.run(request).await;
    match response.extensions().get::<Problem>() {
        None => record(&caller, AccessOutcome::Allowed, None),
        Some(problem) if problem.status == 403 => {
            record(&caller, AccessOutcome::Denied, Some(problem.detail.clone()));
        }
        Some(problem) => record(&caller, AccessOutcome::Error, Some(problem.detail.clone())),
    }
    Ok(response)
}

/// `kici-admin` says who it is, so that the log can tell the CLI from other programs.
fn is_cli(headers: &HeaderMap) -> bool {
    let agent = headers.get(http::header::USER_AGENT).and_then(|value| value.to_str().ok());
    agent.is_some_and(|text| text.starts_with("kici-admin/"))
}
