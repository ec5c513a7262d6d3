//! Events of steps on their way to the orchestrator: sent again until it has said what became of them.

use std::time::Duration;

use kici_protocol::SESSION_ID_HEADER;
use kici_protocol::agent::{EmitEventRequest, emit_event_response};
use secrecy::SecretString;
use tokio::sync::watch;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request};

use crate::key::JobKey;
use crate::ports::{Emission, Emitted};
use crate::session::{Session, authorize};

/// Before the same session is asked again.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest wait for one answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// A new session may know its jobs a little later; after so many refusals in a row the job is not this agent's any more.
const MAX_REFUSALS: u32 = 20;

/// Sends one event of a job until it is stored or refused; waits while there is no session.
pub async fn send(
    job: JobKey,
    emission: Emission,
    token: Option<&SecretString>,
    mut sessions: watch::Receiver<Option<Session>>,
) -> Emitted {
    let request = EmitEventRequest {
        job: Some(job.to_ref()),
        // A job has at most 256 steps, each of which emits one event in its only attempt.
        step_index: u32::try_from(emission.step).unwrap_or(u32::MAX),
        attempt: 1,
        seq: 0,
        name: emission.name,
        // Values of JSON always serialise.
        payload_json: serde_json::to_vec(&emission.payload).unwrap_or_default(),
        target_repos: emission.target_repos,
    };
    let mut refusals = 0;
    loop {
        let Ok(session) = sessions.wait_for(Option::is_some).await.map(|session| session.clone()) else {
            return Emitted::Refused("the agent ends".to_owned());
        };
        let Some(mut session) = session else { continue };
        let mut call = Request::new(request.clone());
        authorize(&mut call, token);
        if let Ok(id) = MetadataValue::try_from(session.id.as_str()) {
            call.metadata_mut().insert(SESSION_ID_HEADER, id);
        }
        match tokio::time::timeout(ANSWER_LIMIT, session.client.emit_event(call)).await {
            Ok(Ok(response)) => match response.into_inner().answer {
                Some(emit_event_response::Answer::EventId(id)) => return Emitted::Stored(id),
                Some(emit_event_response::Answer::Refused(refused)) => return Emitted::Refused(refused.reason),
                None => return Emitted::Refused("the orchestrator gave no answer that this agent knows".to_owned()),
            },
            Ok(Err(status)) => match status.code() {
                Code::Unimplemented => {
                    return Emitted::Refused("this orchestrator takes no events; update it".to_owned());
                }
                Code::InvalidArgument | Code::ResourceExhausted => {
                    return Emitted::Refused(status.message().to_owned());
                }
                Code::PermissionDenied if refusals >= MAX_REFUSALS => {
                    return Emitted::Refused(status.message().to_owned());
                }
                code => {
                    refusals += u32::from(code == Code::PermissionDenied);
                    tracing::debug!(%job, %code, message = status.message(), "an event is sent again");
                }
            },
            Err(_) => tracing::debug!(%job, "no answer to an event; it is sent again"),
        }
        // A call that failed often means a broken session: wait for the next one, but not for ever.
        let id = session.id;
        let changed = sessions.wait_for(|now| now.as_ref().is_none_or(|now| now.id != id));
        if let Ok(Err(_)) = tokio::time::timeout(PAUSE, changed).await {
            return Emitted::Refused("the agent ends".to_owned());
        }
    }
}
