//! Faults of the layers below as the answers a caller sees.

use kici_api::problem::{Code, Problem};
use kici_dispatch::DispatchError;
use kici_events::{ManualError, Refusal};
use kici_forge::ForgeError;
use kici_store::StoreError;

/// A fault of the store. What is not the caller's doing is logged here and answered without its cause.
pub(super) fn store(error: StoreError) -> Problem {
    match error {
        StoreError::NotFound { what } => Problem::not_found(format!("this {what}")),
        StoreError::Exists { .. } => Problem::new(Code::Exists, error.to_string()),
        StoreError::Changed { .. } => Problem::new(Code::VersionMismatch, error.to_string()),
        StoreError::Conflict(_) | StoreError::Unavailable(_) | StoreError::Full(_) | StoreError::Fenced => {
            tracing::warn!(%error, "the database does not answer as it should");
            Problem::unavailable("the database does not answer now; try again", 2)
        }
        StoreError::Corrupt { .. } | StoreError::SchemaTooNew { .. } | StoreError::Config(_) | StoreError::Db(_) => {
            tracing::error!(%error, "the database failed");
            Problem::internal()
        }
    }
}

/// A fault of the dispatcher.
pub(super) fn dispatch(error: DispatchError) -> Problem {
    match error {
        DispatchError::Store(error) => store(error),
        DispatchError::NoSuchRun => Problem::not_found("this run"),
        DispatchError::NoSuchJob => Problem::not_found("this job in the queue"),
        DispatchError::NoSuchAgent => Problem::not_found("this connected agent"),
        DispatchError::AlreadyTerminal(_) => Problem::new(Code::RunTerminal, error.to_string()),
    }
}

/// A fault of a forge; what it says is meant for operators.
pub(super) fn forge(error: &ForgeError) -> Problem {
    match error {
        ForgeError::NotFound { .. } => Problem::new(Code::NotFound, error.to_string()),
        ForgeError::Misconfigured { .. }
        | ForgeError::NoRepository(_)
        | ForgeError::Refused { .. }
        | ForgeError::Unsupported { .. } => Problem::new(Code::Conflict, error.to_string()),
        ForgeError::RateLimited { .. } | ForgeError::Unavailable { .. } => Problem::unavailable(error.to_string(), 10),
    }
}

/// Why a run was not started by hand.
pub(super) fn manual(error: ManualError) -> Problem {
    use kici_api::problem::FieldError;
    match error {
        ManualError::RepoNeeded(_) => Problem::rejected("repo", error.to_string()),
        ManualError::UnknownWorkflow { .. } => Problem::rejected("workflow", error.to_string()),
        ManualError::NotManual(_) => Problem::new(Code::NoManualTrigger, error.to_string()),
        ManualError::Inputs(errors) => Problem::rejected_fields(
            errors.iter().map(|e| FieldError::new(format!("inputs.{}", e.field), e.message.clone())).collect(),
        ),
        ManualError::Invalid(_) | ManualError::Declined(_) | ManualError::Plan(_) => {
            Problem::new(Code::Conflict, error.to_string())
        }
        ManualError::Forge(error) => forge(&error),
        ManualError::Store(error) => store(error),
    }
}

/// Why a delivery of our own making was not stored.
pub(super) fn refusal(error: Refusal) -> Problem {
    match error {
        Refusal::UnknownSource => Problem::new(Code::Conflict, "the source is disabled; enable it first"),
        Refusal::Unavailable(error) => store(error),
        Refusal::Misconfigured(_) | Refusal::BadSignature => Problem::new(Code::Conflict, error.to_string()),
        Refusal::TooLarge { .. } => Problem::new(Code::RequestTooLarge, error.to_string()),
        Refusal::TooOften { .. } => Problem::new(Code::IngestRate, error.to_string()),
        Refusal::Busy { .. } => Problem::unavailable(error.to_string(), 5),
    }
}
