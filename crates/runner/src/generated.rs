//! Jobs that a step made on their way to the orchestrator: sent again until it has said what became of them.

use kici_protocol::agent::{ReportGeneratedRequest, report_generated_response};
use secrecy::SecretString;
use tokio::sync::watch;

use crate::key::JobKey;
use crate::ports::Generated;
use crate::session::Session;
use crate::unary::{NoAnswer, call};

/// Sends what the generator of a job wrote until it is kept or refused; waits while there is no session.
pub async fn send(
    job: JobKey,
    document: Vec<u8>,
    token: Option<&SecretString>,
    sessions: watch::Receiver<Option<Session>>,
) -> Generated {
    let request = ReportGeneratedRequest { job: Some(job.to_ref()), document };
    match call(job, request, token, sessions, async |client, request| client.report_generated(request).await).await {
        Ok(response) => match response.answer {
            Some(report_generated_response::Answer::Kept(kept)) => Generated::Kept(kept.jobs),
            Some(report_generated_response::Answer::Refused(refused)) => Generated::Refused(refused.reason),
            None => Generated::Refused("the orchestrator gave no answer that this agent knows".to_owned()),
        },
        Err(NoAnswer::Unknown) => Generated::Refused("this orchestrator takes no generated jobs; update it".to_owned()),
        Err(NoAnswer::Refused(why)) => Generated::Refused(why),
        Err(NoAnswer::Ending) => Generated::Refused("the agent ends".to_owned()),
    }
}
