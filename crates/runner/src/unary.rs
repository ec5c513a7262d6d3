//! Calls of a job next to the session: sent again until the orchestrator has answered, over whichever session there is.

use std::time::Duration;

use kici_protocol::SESSION_ID_HEADER;
use secrecy::SecretString;
use tokio::sync::watch;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Response, Status};

use crate::key::JobKey;
use crate::session::{Client, Session, authorize};

/// Before the same session is asked again.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest wait for one answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// A new session may know its jobs a little later; after so many refusals in a row the job is not this agent's any more.
const MAX_REFUSALS: u32 = 20;

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// The orchestrator does not know the call.
    Unknown,
    /// It refused it for good, and why.
    Refused(String),
    /// The agent ends.
    Ending,
}

/// Makes one call until it is answered; waits while there is no session.
pub(crate) async fn call<Q, A, F>(
    job: JobKey,
    request: Q,
    token: Option<&SecretString>,
    mut sessions: watch::Receiver<Option<Session>>,
    make: F,
) -> Result<A, NoAnswer>
where
    Q: Clone,
    F: AsyncFn(&mut Client, Request<Q>) -> Result<Response<A>, Status>,
{
    let mut refusals = 0;
    loop {
        let Ok(session) = sessions.wait_for(Option::is_some).await.map(|session| session.clone()) else {
            return Err(NoAnswer::Ending);
        };
        let Some(mut session) = session else { continue };
        let mut call = Request::new(request.clone());
        authorize(&mut call, token);
        if let Ok(id) = MetadataValue::try_from(session.id.as_str()) {
            call.metadata_mut().insert(SESSION_ID_HEADER, id);
        }
        match tokio::time::timeout(ANSWER_LIMIT, make(&mut session.client, call)).await {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => match status.code() {
                Code::Unimplemented => return Err(NoAnswer::Unknown),
                Code::InvalidArgument | Code::ResourceExhausted => {
                    return Err(NoAnswer::Refused(status.message().to_owned()));
                }
                Code::PermissionDenied if refusals >= MAX_REFUSALS => {
                    return Err(NoAnswer::Refused(status.message().to_owned()));
                }
                code => {
                    refusals += u32::from(code == Code::PermissionDenied);
                    tracing::debug!(%job, %code, message = status.message(), "a call is made again");
                }
            },
            Err(_) => tracing::debug!(%job, "no answer to a call; it is made again"),
        }
        // A call that failed often means a broken session: wait for the next one, but not for ever.
        let id = session.id;
        let changed = sessions.wait_for(|now| now.as_ref().is_none_or(|now| now.id != id));
        if let Ok(Err(_)) = tokio::time::timeout(PAUSE, changed).await {
            return Err(NoAnswer::Ending);
        }
    }
}
