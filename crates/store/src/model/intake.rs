//! Sources, deliveries and registrations.

use kici_engine::ids::{DeliveryRowId, InstanceId, RegistrationId, RunId, SourceId};
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::{CreatedRun, NewRun, words};

words! {
    /// What a source is.
    SourceKind("source kind") {
        /// A GitHub App.
        Github = "github",
        /// Signed calls from anything.
        Generic = "generic",
        /// A repository on this host.
        Local = "local",
    }

    /// Status of a stored delivery.
    DeliveryStatus("delivery status") {
        /// Stored; waits for or is in processing.
        Received = "received",
        /// Done.
        Processed = "processed",
        /// No workflow files at the commit.
        LockfileMissing = "lockfile_missing",
        /// A lock document that cannot be read.
        LockfileCorrupt = "lockfile_corrupt",
        /// No run was made and a workflow file is invalid.
        WorkflowInvalid = "workflow_invalid",
        /// Nothing to do: unknown event, skip-ci, no repository.
        Skipped = "skipped",
        /// Failed for good; a person may retry it.
        Failed = "failed",
        /// Failed too often; in the dead letter queue.
        Dead = "dead",
        /// Kept as overflow: it was not taken for lack of capacity and waits for room.
        Shed = "shed",
    }
}

/// A source to be created.
#[derive(Clone, Debug)]
pub struct NewSource {
    /// Minted by the caller: the routing key may hold it.
    pub id: SourceId,
    /// Organisation.
    pub org: String,
    /// Unique in the organisation among the sources that are not removed.
    pub name: String,
    /// What it is.
    pub kind: SourceKind,
    /// Unique in the installation.
    pub routing_key: String,
    /// Settings without secrets.
    pub config: Json,
    /// Sealed secrets, never in clear.
    pub sealed_secrets: Option<String>,
    /// False: calls are refused.
    pub enabled: bool,
}

/// A stored source.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// Its id.
    pub id: SourceId,
    /// Organisation.
    pub org: String,
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: SourceKind,
    /// Unique in the installation.
    pub routing_key: String,
    /// Settings without secrets.
    pub config: Json,
    /// Sealed secrets, never in clear.
    pub sealed_secrets: Option<String>,
    /// False: calls are refused.
    pub enabled: bool,
    /// Removed; kept for the runs that name it.
    pub deleted_at: Option<Ts>,
    /// Raised by every change.
    pub version: i64,
    /// When it was created.
    pub created_at: Ts,
}

/// What to change in a source; `None` keeps.
#[derive(Clone, Debug, Default)]
pub struct SourceChange {
    /// New settings.
    pub config: Option<Json>,
    /// New sealed secrets.
    pub sealed_secrets: Option<String>,
    /// Switch it on or off.
    pub enabled: Option<bool>,
}

/// A verified delivery to be stored before it is answered.
#[derive(Clone, Debug)]
pub struct NewDelivery {
    /// Organisation.
    pub org: String,
    /// The source that received it.
    pub source_id: SourceId,
    /// The sender's own id of it; unique in the source.
    pub delivery_id: String,
    /// The sender's name of the event.
    pub event: String,
    /// The sender's action.
    pub action: Option<String>,
    /// `github`, `generic` or `local`.
    pub provider: String,
    /// How it came: `webhook`, `poll`, `api`.
    pub channel: String,
    /// `owner/name`, if it can be read before processing.
    pub repo: Option<String>,
    /// Full ref.
    pub git_ref: Option<String>,
    /// Commit.
    pub sha: Option<String>,
    /// The request that brought it.
    pub request_id: String,
    /// Request headers that processing needs; no credentials.
    pub headers: Json,
    /// The raw body; the store compresses it.
    pub body: Vec<u8>,
    /// Taken by this instance at once, so that no other one picks it up.
    pub claimed_by: Option<InstanceId>,
}

/// What became of [`NewDelivery`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryInserted {
    /// Stored.
    Inserted(DeliveryRowId),
    /// Known already, in this status; nothing changed.
    Duplicate {
        /// The row.
        id: DeliveryRowId,
        /// Its status.
        status: DeliveryStatus,
    },
    /// Known as failed, dead or shed: taken again, with the new body.
    Reopened(DeliveryRowId),
}

/// What became of a delivery that is kept as overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryShed {
    /// Stored, or stored as overflow before.
    Kept,
    /// It had been accepted before; nothing changed.
    Known {
        /// The row.
        id: DeliveryRowId,
    },
    /// There is no room; nothing changed.
    NoRoom,
}

/// What was taken from the overflow.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drained {
    /// Claimed by this instance, oldest first.
    pub claimed: Vec<Delivery>,
    /// Deliveries that had waited too long and are dead now.
    pub dropped: u64,
}

/// A stored delivery, without its body.
#[derive(Clone, Debug, PartialEq)]
pub struct Delivery {
    /// Its row.
    pub id: DeliveryRowId,
    /// Organisation.
    pub org: String,
    /// The source.
    pub source_id: SourceId,
    /// The sender's id.
    pub delivery_id: String,
    /// The sender's name of the event.
    pub event: String,
    /// The sender's action.
    pub action: Option<String>,
    /// `github`, `generic` or `local`.
    pub provider: String,
    /// How it came.
    pub channel: String,
    /// Its status.
    pub status: DeliveryStatus,
    /// Workflows that matched.
    pub matched_count: u32,
    /// `owner/name`.
    pub repo: Option<String>,
    /// Full ref.
    pub git_ref: Option<String>,
    /// Commit.
    pub sha: Option<String>,
    /// The first run it made.
    pub first_run_id: Option<RunId>,
    /// Why it failed.
    pub error: Option<String>,
    /// What happened, for people.
    pub note: Option<String>,
    /// Where the body lies once it left the database.
    pub payload_key: Option<String>,
    /// SHA-256 (hex) of the raw body.
    pub payload_sha256: String,
    /// Length of the raw body.
    pub payload_bytes: u64,
    /// Why the body is no longer kept: `size_exceeded`, `storage_failed`, `expired`.
    pub payload_omitted: Option<String>,
    /// Times processing was tried and failed.
    pub attempts: u32,
    /// The instance that processes it.
    pub claimed_by: Option<InstanceId>,
    /// Since when.
    pub claimed_at: Option<Ts>,
    /// Not before this.
    pub next_attempt_at: Option<Ts>,
    /// When it was stored.
    pub received_at: Ts,
    /// When it was finished.
    pub finished_at: Option<Ts>,
    /// The request that brought it.
    pub request_id: String,
    /// Claims in a row that came to no end, the one of now included: the process ended before the delivery did.
    pub claims: u32,
}

impl Delivery {
    /// After so many claims without an end a delivery is only taken while no other such one is in work.
    pub const SUSPECT: i64 = 2;

    /// It was taken alone, because it may be what ends processes.
    pub fn is_suspect(&self) -> bool {
        i64::from(self.claims) > Self::SUSPECT
    }
}

/// Headers and raw body of a delivery.
#[derive(Clone, Debug, PartialEq)]
pub struct DeliveryBody {
    /// Request headers.
    pub headers: Json,
    /// The raw body, decompressed.
    pub body: Vec<u8>,
}

/// Which deliveries to list.
#[derive(Clone, Debug, Default)]
pub struct DeliveryFilter {
    /// Of this source.
    pub source_id: Option<SourceId>,
    /// In one of these statuses; empty is all.
    pub statuses: Vec<DeliveryStatus>,
    /// Of this event.
    pub event: Option<String>,
    /// Of this repository.
    pub repo: Option<String>,
    /// Whose sender's id holds this text.
    pub delivery_id: Option<String>,
    /// Not older than this.
    pub from: Option<Ts>,
    /// Older than this.
    pub to: Option<Ts>,
}

/// How a delivery ended.
#[derive(Clone, Debug)]
pub struct DeliveryOutcome {
    /// A status other than `received`.
    pub status: DeliveryStatus,
    /// Why it failed.
    pub error: Option<String>,
    /// What happened, for people.
    pub note: Option<String>,
}

/// The result of processing one delivery: written in one transaction.
#[derive(Clone, Debug)]
pub struct ProcessedDelivery {
    /// The row.
    pub id: DeliveryRowId,
    /// How it ended.
    pub outcome: DeliveryOutcome,
    /// Workflows that matched.
    pub matched_count: u32,
    /// `owner/name`; fills the row where it was not known.
    pub repo: Option<String>,
    /// Full ref; likewise.
    pub git_ref: Option<String>,
    /// Commit; likewise.
    pub sha: Option<String>,
    /// The decision trace.
    pub trace: Option<Json>,
    /// The runs to create.
    pub runs: Vec<NewRun>,
    /// Replaces the registrations of a repository.
    pub registrations: Option<RegistrationSet>,
}

/// What [`ProcessedDelivery`] led to.
#[derive(Clone, Debug)]
pub struct Processed {
    /// False when the delivery had been finished before: nothing was written.
    pub applied: bool,
    /// In the order of `ProcessedDelivery::runs`.
    pub runs: Vec<CreatedRun>,
}

/// One workflow of a default branch that events without a commit can start.
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    /// Its id.
    pub id: RegistrationId,
    /// Organisation.
    pub org: String,
    /// Of the source.
    pub routing_key: String,
    /// The source.
    pub source_id: SourceId,
    /// `owner/name`.
    pub repo: String,
    /// Name of the workflow.
    pub workflow_name: String,
    /// Its lock document.
    pub lock_digest: String,
    /// The commit it was read at.
    pub sha: String,
    /// The branch it was read from.
    pub default_branch: Option<String>,
    /// The trigger types it has (`push`, `generic_webhook`, …).
    pub trigger_types: Vec<String>,
    /// False: never started through the registration.
    pub enabled: bool,
    /// Who disabled it.
    pub disabled_by: Option<String>,
    /// Last change.
    pub updated_at: Ts,
}

/// The workflows of a repository's default branch.
#[derive(Clone, Debug)]
pub struct RegistrationSet {
    /// Organisation.
    pub org: String,
    /// Of the source.
    pub routing_key: String,
    /// The source.
    pub source_id: SourceId,
    /// `owner/name`.
    pub repo: String,
    /// The commit.
    pub sha: String,
    /// The branch.
    pub default_branch: Option<String>,
    /// The workflows.
    pub workflows: Vec<RegisteredWorkflow>,
    /// Registrations of workflows that are not listed stay; else they are removed.
    pub keeps_others: bool,
    /// The commits that the repository's registrations were from when this was decided, sorted, each once. Where they are from
    /// others by now nothing is written (`Changed`). None writes in any case.
    pub seen: Option<Vec<String>>,
}

/// One entry of a [`RegistrationSet`].
#[derive(Clone, Debug)]
pub struct RegisteredWorkflow {
    /// Its name.
    pub name: String,
    /// Digest of the lock document.
    pub lock_digest: String,
    /// JSON of `kici_engine::lock::Workflow`.
    pub lock_json: Vec<u8>,
    /// The trigger types it has.
    pub trigger_types: Vec<String>,
}
