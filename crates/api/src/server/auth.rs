//! From a bearer token to a [`Caller`].

use std::net::{IpAddr, SocketAddr};

use axum::extract::{ConnectInfo, FromRequestParts};
use http::header;
use http::request::Parts;
use kici_access::{Permission, Token, TokenKind};

use super::ApiState;
use super::finish::RequestId;
use super::route::Guard;
use crate::ports::{Caller, Principal};
use crate::problem::{Code, Problem};

/// The authenticated request: long-lived answers ask it now and then whether the token still stands.
#[derive(Clone)]
pub struct Session {
    state: ApiState,
    token: Token,
    permission: Permission,
}

impl Session {
    /// False once the token was revoked, ended or lost the permission. An outage of the token store does not end a
    /// session.
    pub async fn stands(&self) -> bool {
        match self.state.ports.auth.authenticate(&self.token).await {
            Ok(principal) => principal.is_some_and(|p| p.role.has(self.permission)),
            Err(_) => true,
        }
    }
}

/// Who calls, and the session for long answers.
///
/// # Errors
/// 401 without a good token, 403 without the permission, 429 after five failures in a minute from one address, 503 when it
/// cannot be decided. A good token is never held up by the failures of others behind the same address.
pub(super) async fn authenticate(
    guard: &Guard,
    request: &Parts,
) -> Result<(Caller, Session), (Option<Caller>, Problem)> {
    let Guard { state, permission, .. } = guard;
    let permission = *permission;
    let refused = |problem| (None, problem);
    let token = bearer(request).map_err(|problem| refused(limited(state, request, problem)))?;
    let principal = state.ports.auth.authenticate(&token).await.map_err(refused)?;
    let Some(Principal { actor, role, routing_key }) = principal else {
        let problem =
            Problem::new(Code::AuthInvalid, "the token is unknown, has ended or was revoked; ask for a new one");
        return Err(refused(limited(state, request, problem)));
    };
    let request_id = request.extensions.get::<RequestId>().map(|id| id.0.clone()).unwrap_or_default();
    let caller = Caller { actor, role, routing_key, request_id };
    if !caller.role.has(permission) {
        let detail = format!("`{permission}` is needed and the role `{}` does not have it", caller.role);
        return Err((Some(caller), Problem::new(Code::Forbidden, detail)));
    }
    if caller.routing_key.is_some() && !guard.scoped {
        let detail = format!("this token is bound to one source; `{}` needs one that is not", guard.action);
        return Err((Some(caller), Problem::new(Code::Forbidden, detail)));
    }
    let session = Session { state: state.clone(), token, permission };
    Ok((caller, session))
}

fn bearer(request: &Parts) -> Result<Token, Problem> {
    let Some(value) = request.headers.get(header::AUTHORIZATION) else {
        return Err(Problem::new(Code::AuthMissing, "send `Authorization: Bearer kici_admin_…`"));
    };
    let invalid = |detail: String| Problem::new(Code::AuthInvalid, detail);
    let text = value.to_str().ok().and_then(|text| {
        let (scheme, token) = text.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token)
    });
    let text = text.ok_or_else(|| invalid("the header must read `Authorization: Bearer kici_admin_…`".to_owned()))?;
    let token = Token::parse(text).map_err(|error| invalid(error.to_string()))?;
    match token.kind() {
        TokenKind::Admin => Ok(token),
        TokenKind::Agent | TokenKind::Claim => {
            Err(invalid("this is an agent's token; the API takes those that start with kici_admin_".into()))
        }
    }
}

/// Counts a failed log-in; after too many the answer is 429.
fn limited(state: &ApiState, request: &Parts, problem: Problem) -> Problem {
    let Some(address) = peer(request) else { return problem };
    let now = state.clock.now();
    match state.limiter.check(address, now) {
        Err(limit) => {
            let seconds = u32::try_from(limit.retry_after.as_secs().max(1)).unwrap_or(u32::MAX);
            Problem { retry_after_s: Some(seconds), ..Problem::new(Code::AuthRateLimited, limit.to_string()) }
        }
        Ok(()) => {
            if problem.is(Code::AuthInvalid) {
                state.limiter.failed(address, now);
            }
            problem
        }
    }
}

fn peer(request: &Parts) -> Option<IpAddr> {
    request.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip())
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        parts.extensions.get::<Caller>().cloned().ok_or_else(|| Problem::new(Code::AuthMissing, "no caller"))
    }
}

impl<S: Sync> FromRequestParts<S> for Session {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        parts.extensions.get::<Session>().cloned().ok_or_else(|| Problem::new(Code::AuthMissing, "no session"))
    }
}
