//! What the engine of steps needs from whoever runs it.

use std::collections::BTreeMap;

use async_trait::async_trait;
use kici_engine::check::CheckResult;
use kici_engine::state::StepStatus;
use kici_engine::time::Ts;
use kici_protocol::agent::StepKey;
use kici_sys::process::ProcessId;
use serde_json::Value as Json;

use crate::spool::Seal;

/// Hears how a job goes.
#[async_trait]
pub trait Reporter: Send + Sync {
    /// A step has a new status. Reports of one step come in order.
    async fn step(&self, report: StepReport);

    /// A step emits an event. Comes back once it is stored or refused, however long that takes: a connection that is gone is
    /// waited for. The same step and number give the same event.
    async fn emit(&self, emission: Emission) -> Emitted;

    /// The generator of the job wrote this document of jobs. Comes back once it is kept or refused, as `emit`.
    async fn generated(&self, document: Vec<u8>) -> Generated;

    /// A process tree was started; noted down so that it can be ended after a crash of the agent.
    fn tree(&self, keeper: ProcessId);
}

/// An event that a step emits.
#[derive(Clone, Debug, PartialEq)]
pub struct Emission {
    /// Index of the step.
    pub step: usize,
    /// Its name.
    pub name: String,
    /// Its document.
    pub payload: Json,
    /// Patterns of the repositories it is for; empty is all.
    pub target_repos: Vec<String>,
}

/// What became of an [`Emission`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Emitted {
    /// It is stored, under this id.
    Stored(String),
    /// It was not stored, and why.
    Refused(String),
    /// There is nobody who would take it, and why.
    Nowhere(&'static str),
}

/// What became of the jobs that a generator wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Generated {
    /// So many are kept, and join the run once the job has ended well.
    Kept(u32),
    /// They cannot be used, and why.
    Refused(String),
}

/// The status of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Which.
    pub key: StepKey,
    /// Its name for people.
    pub name: String,
    /// Its status.
    pub status: StepStatus,
    /// Since when.
    pub at: Ts,
    /// Exit code of its command, once it ended by itself.
    pub exit_code: Option<i32>,
    /// Why it did not succeed, in one line.
    pub message: String,
    /// Its outputs.
    pub outputs: BTreeMap<String, String>,
    /// Its log, once it is ended.
    pub log: Seal,
    /// It failed and the job goes on.
    pub failure_allowed: bool,
    /// Markdown that it wrote.
    pub summary: String,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// The group it belongs to.
    pub group: String,
    /// What its check found, or that it has none.
    pub check: Option<CheckResult>,
    /// What differs.
    pub drift: String,
}

impl StepReport {
    /// A status without anything else.
    pub fn new(key: StepKey, name: impl Into<String>, status: StepStatus, at: Ts) -> Self {
        Self {
            key,
            name: name.into(),
            status,
            at,
            exit_code: None,
            message: String::new(),
            outputs: BTreeMap::new(),
            log: Seal::default(),
            failure_allowed: false,
            summary: String::new(),
            attempt: 1,
            group: String::new(),
            check: None,
            drift: String::new(),
        }
    }
}
