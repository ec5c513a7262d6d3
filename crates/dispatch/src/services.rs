//! Calls that an agent makes for a job next to its session.

use kici_engine::ids::{AgentId, SessionId};
use kici_protocol::{NOT_ASSIGNED, common};
use kici_store::model::JobRef;
use tonic::Status;

use crate::decide::violations::Ownership;
use crate::dispatcher::Dispatcher;
use crate::offer::read_ref;

impl Dispatcher {
    /// The agent of a session and the job that it speaks for, once it is certain that it holds this job at this epoch.
    ///
    /// # Errors
    /// A status in one wording, whether the job is somebody else's, was taken away, or is none.
    pub async fn speaks_for(
        &self,
        session: SessionId,
        job: Option<&common::JobRef>,
    ) -> Result<(AgentId, JobRef), Status> {
        let job = read_ref(job).map_err(Status::invalid_argument)?;
        match (self.owns(session, job).await, self.session_agent(session)) {
            (Ownership::Owned, Some((agent, _))) => Ok((agent, job)),
            (Ownership::Unknown, _) => Err(Status::unavailable(NOT_ASSIGNED)),
            _ => Err(Status::permission_denied(NOT_ASSIGNED)),
        }
    }
}
