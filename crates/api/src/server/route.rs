//! One route: its path, the permission it needs, and what the access log calls it. The table of all routes is the one
//! place that says so; the router, the OpenAPI document and the tests read it.

use axum::Router;
use axum::extract::{FromRequestParts, RawPathParams, Request, State};
use axum::handler::Handler;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter, on};
use http::{HeaderMap, Method};
use kici_access::{AccessEntry, AccessSource, Action, Outcome, Permission, TargetType};

use super::{ApiState, auth};
use crate::ports::Caller;
use crate::problem::Problem;

/// One route under `/api/v1`.
#[derive(Clone)]
pub struct Route {
    /// The method.
    pub method: Method,
    /// The path with `{parameters}`, `/api/v1` included.
    pub path: &'static str,
    /// What it needs, and what the access log calls it; none for the few that are open to everybody.
    pub access: Option<(Permission, Action)>,
    /// The kind of thing named by the first path parameter.
    pub target: Option<TargetType>,
    /// Whether a token that is bound to one source may use it.
    pub scoped: bool,
    handler: MethodRouter<ApiState>,
}

impl Route {
    /// A route for installation-wide tokens that needs `permission`.
    pub(super) fn new<H, T>(
        method: Method,
        path: &'static str,
        permission: Permission,
        action: Action,
        handler: H,
    ) -> Self
    where
        H: Handler<T, ApiState>,
        T: 'static,
    {
        Self { access: Some((permission, action)), ..Self::open(method, path, handler) }
    }

    /// A route that asks for no token.
    pub(super) fn open<H, T>(method: Method, path: &'static str, handler: H) -> Self
    where
        H: Handler<T, ApiState>,
        T: 'static,
    {
        let filter = MethodFilter::try_from(method.clone()).unwrap_or(MethodFilter::GET);
        Self { method, path, access: None, target: None, scoped: false, handler: on(filter, handler) }
    }

    /// Its first path parameter names a `target`.
    pub(super) fn on(self, target: TargetType) -> Self {
        Self { target: Some(target), ..self }
    }

    /// Tokens that are bound to one source may use it; the port keeps them to their rows.
    pub(super) fn scoped(self) -> Self {
        Self { scoped: true, ..self }
    }

    /// Adds it to `router` behind its permission check.
    pub(super) fn mount(self, router: Router<ApiState>, state: &ApiState) -> Router<ApiState> {
        let path = self.path;
        let handler = match self.access {
            None => self.handler,
            Some((permission, action)) => {
                let handler = self.handler.clone();
                let guard =
                    Guard { state: state.clone(), target: self.target, scoped: self.scoped, permission, action };
                handler.route_layer(from_fn_with_state(guard, guarded))
            }
        };
        router.route(path, handler)
    }
}

/// What stands before a handler.
#[derive(Clone)]
pub(super) struct Guard {
    pub state: ApiState,
    pub target: Option<TargetType>,
    pub scoped: bool,
    pub permission: Permission,
    pub action: Action,
}

async fn guarded(State(guard): State<Guard>, request: Request, next: Next) -> Result<Response, Problem> {
    let (mut parts, body) = request.into_parts();
    let target = match guard.target {
        Some(kind) => {
            let params = RawPathParams::from_request_parts(&mut parts, &guard.state).await.ok();
            params.and_then(|params| params.iter().next().map(|(_, value)| (kind, value.to_owned())))
        }
        None => None,
    };
    let source = access_source(&parts.headers);
    let record = |caller: &Caller, outcome, error_message| {
        let entry = AccessEntry {
            org: None,
            actor: caller.actor.clone(),
            action: guard.action,
            source,
            outcome,
            target,
            request_id: Some(caller.request_id.clone()),
            routing_key: caller.routing_key.clone(),
            error_message,
            created_at: guard.state.clock.now(),
        };
        if guard.state.recorder.wants(&entry) {
            guard.state.ports.access_log.record(entry);
        }
    };
    let (caller, session) = match auth::authenticate(&guard, &parts).await {
        Ok(authenticated) => authenticated,
        Err((caller, problem)) => {
            if let Some(caller) = caller {
                record(&caller, Outcome::Denied, Some(problem.detail.clone()));
            }
            return Err(problem);
        }
    };
    parts.extensions.insert(caller.clone());
    parts.extensions.insert(session);
    let response = next.run(Request::from_parts(parts, body)).await;
    match response.extensions().get::<Problem>() {
        None => record(&caller, Outcome::Allowed, None),
        Some(problem) => {
            let outcome = if problem.status == 403 { Outcome::Denied } else { Outcome::Error };
            record(&caller, outcome, Some(problem.detail.clone()));
        }
    }
    Ok(response)
}

/// `kici-admin` says who it is, so that the log can tell the CLI from other programs.
fn access_source(headers: &HeaderMap) -> AccessSource {
    let agent = headers.get(http::header::USER_AGENT).and_then(|value| value.to_str().ok());
    if agent.is_some_and(|text| text.starts_with("kici-admin/")) {
        AccessSource::AdminCli
    } else {
        AccessSource::AdminHttp
    }
}
