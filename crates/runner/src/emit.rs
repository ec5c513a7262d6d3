//! Events of steps on their way to the orchestrator: sent again until it has said what became of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kici_protocol::agent::{EmitEventRequest, emit_event_response};
use secrecy::SecretString;
use serde_json::Value as Json;
use tokio::sync::watch;

use crate::key::JobKey;
use crate::mask::Masker;
use crate::ports::{Emission, Emitted};
use crate::session::Session;
use crate::unary::{NoAnswer, call};

/// Where events that scripts emit with `kici emit` come from: no step has this number.
const BY_COMMAND: u32 = u32::MAX;

/// Takes events from the command `kici emit` of a job's scripts.
pub struct EventDesk {
    job: JobKey,
    token: Option<SecretString>,
    sessions: watch::Receiver<Option<Session>>,
    masker: Arc<Masker>,
    /// How many came so far: each is one of its own.
    next: AtomicU32,
}

impl EventDesk {
    /// The desk of a job.
    pub fn new(
        job: JobKey,
        token: Option<SecretString>,
        sessions: watch::Receiver<Option<Session>>,
        masker: Arc<Masker>,
    ) -> Self {
        Self { job, token, sessions, masker, next: AtomicU32::new(0) }
    }

    /// Emits an event; values that must not be shown do not leave this host. Waits while there is no session.
    pub async fn emit(&self, name: String, payload: Json, target_repos: Vec<String>) -> Emitted {
        let emission = Emission { step: 0, name, payload: self.masker.mask_json(payload), target_repos };
        let place = (BY_COMMAND, self.next.fetch_add(1, Ordering::Relaxed));
        send_from(self.job, place, emission, self.token.as_ref(), self.sessions.clone()).await
    }
}

/// Sends the event of a step until it is stored or refused; waits while there is no session.
pub async fn send(
    job: JobKey,
    emission: Emission,
    token: Option<&SecretString>,
    sessions: watch::Receiver<Option<Session>>,
) -> Emitted {
    // A job has at most 256 steps, each of which emits one event in its only attempt.
    let place = (u32::try_from(emission.step).unwrap_or(BY_COMMAND), 0);
    send_from(job, place, emission, token, sessions).await
}

async fn send_from(
    job: JobKey,
    (step_index, seq): (u32, u32),
    emission: Emission,
    token: Option<&SecretString>,
    sessions: watch::Receiver<Option<Session>>,
) -> Emitted {
    let request = EmitEventRequest {
        job: Some(job.to_ref()),
        step_index,
        attempt: 1,
        seq,
        name: emission.name,
        // Values of JSON always serialise.
        payload_json: serde_json::to_vec(&emission.payload).unwrap_or_default(),
        target_repos: emission.target_repos,
    };
    match call(job, request, token, sessions, async |client, request| client.emit_event(request).await).await {
        Ok(response) => match response.answer {
            Some(emit_event_response::Answer::EventId(id)) => Emitted::Stored(id),
            Some(emit_event_response::Answer::Refused(refused)) => Emitted::Refused(refused.reason),
            None => Emitted::Refused("the orchestrator gave no answer that this agent knows".to_owned()),
        },
        Err(NoAnswer::Unknown) => Emitted::Refused("this orchestrator takes no events; update it".to_owned()),
        Err(NoAnswer::Refused(why)) => Emitted::Refused(why),
        Err(NoAnswer::Ending) => Emitted::Refused("the agent ends".to_owned()),
    }
}
