//! Slots of concurrency groups.

use kici_engine::ids::{JobId, RunId};
use kici_engine::time::Ts;

use super::words;

words! {
    /// How a claim on a concurrency group stands.
    SlotStatus("slot status") {
        /// It waits for a slot.
        Queued = "queued",
        /// It has a slot.
        Active = "active",
        /// It had a slot and has ended.
        Completed = "completed",
        /// It ended without a slot.
        Cancelled = "cancelled",
    }
}

/// A claim on a concurrency group, with its place there.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// Its run.
    pub run_id: RunId,
    /// The job that claims; none when it is the run as a whole.
    pub job_id: Option<JobId>,
    /// Name of the group.
    pub group: String,
    /// How many may be active at once.
    pub max: u32,
    /// How it stands.
    pub status: SlotStatus,
    /// A newer run that wants its run to end.
    pub superseded_by: Option<RunId>,
    /// While it waits: its place in the queue, from 1.
    pub place: Option<u32>,
    /// While it waits: how many wait.
    pub waiting: u32,
    /// While it waits: the runs that have the slots.
    pub held_by: Vec<RunId>,
    /// When it came.
    pub created_at: Ts,
    /// When it got its slot.
    pub acquired_at: Option<Ts>,
    /// When it left.
    pub ended_at: Option<Ts>,
}

/// Something that a run has yet to learn of its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotNews {
    /// The run.
    pub run_id: RunId,
    /// A newer run wants it to end; otherwise it got a slot.
    pub superseded_by: Option<RunId>,
}

/// One that waits for a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotWait {
    /// Its run.
    pub run_id: RunId,
    /// The job that waits; none when it is the run as a whole.
    pub job_id: Option<JobId>,
    /// Name of the group.
    pub group: String,
}
