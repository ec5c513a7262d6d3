//! Calls that an agent makes for a job next to its session.

use kici_engine::ids::{AgentId, SessionId};
use kici_protocol::{NOT_ASSIGNED, SESSION_ID_HEADER, common};
use kici_store::model::JobRef;
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::decide::violations::Ownership;
use crate::dispatcher::Dispatcher;
use crate::meters;
use crate::offer::read_ref;
use crate::register::bearer_hash;

/// An agent that makes a call for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Speaker {
    /// Who it is.
    pub agent: AgentId,
    /// The job that it names.
    pub job: JobRef,
    /// What the job is to it; never [`Ownership::Unknown`].
    pub standing: Ownership,
}

impl Dispatcher {
    /// The session that a call names, once the call has shown the token that the session began with: the id alone is no
    /// secret. Nothing is read from the database.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` without a session or with another token, `PERMISSION_DENIED` when the session is over.
    pub fn caller(&self, metadata: &MetadataMap) -> Result<SessionId, Status> {
        let value = metadata.get(SESSION_ID_HEADER).and_then(|value| value.to_str().ok());
        let text =
            value.ok_or_else(|| Status::unauthenticated(format!("the metadata `{SESSION_ID_HEADER}` is missing")))?;
        let session: SessionId =
            text.parse().map_err(|error| Status::unauthenticated(format!("{SESSION_ID_HEADER}: {error}")))?;
        let Some(identity) = self.registry.identity(session) else {
            return Err(Status::permission_denied(NOT_ASSIGNED));
        };
        match identity.token_hash {
            Some(hash) if bearer_hash(metadata).as_ref() != Some(&hash) => {
                tracing::warn!(agent = %identity.agent_id, "a call in the name of an agent did not bring its token");
                Err(Status::unauthenticated("the call does not bring the agent token that its session began with"))
            }
            _ => Ok(session),
        }
    }

    /// The agent of a session, the job that it speaks for, and whether it holds this job at this epoch. A claim to somebody
    /// else's job counts against the session.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a reference that is none, `UNAVAILABLE` when the owner cannot be told, `PERMISSION_DENIED` when the
    /// session is over.
    pub async fn speaks_for(&self, session: SessionId, job: Option<&common::JobRef>) -> Result<Speaker, Status> {
        let job = read_ref(job).map_err(Status::invalid_argument)?;
        let standing = self.owns(session, job).await;
        let (Some(link), Some((agent, _))) = (self.registry.link(session), self.session_agent(session)) else {
            return Err(Status::permission_denied(NOT_ASSIGNED));
        };
        match standing {
            Ownership::Unknown => return Err(Status::unavailable(NOT_ASSIGNED)),
            Ownership::NotOwned => {
                meters::ownership_violation("call");
                link.violates(standing);
            }
            Ownership::Owned | Ownership::StaleEpoch => {}
        }
        Ok(Speaker { agent, job, standing })
    }
}
