//! Rows of the tables that several modules read, and how they become plain values.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use diesel::prelude::*;
use kici_engine::concurrency::SlotAsk;
use kici_engine::event::Event;
use kici_engine::hosts::Fanout;
use kici_engine::ids::AgentId;
use kici_engine::lock::{Need, Selector};
use kici_engine::plan::JobKind;
use kici_engine::state::JobStatus;
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::backend::Db;
use super::schema::{dispatch_queue, job_needs, jobs, queue_selectors, runs, steps};
use crate::StoreError;
use crate::model::{Cursor, Job, NeedEdge, NewNeed, QueueRow, Run, Step};
use crate::types::{DbId, DbTs, Doc};

pub(crate) fn corrupt(what: &'static str, error: &dyn Display) -> StoreError {
    StoreError::Corrupt { what, detail: error.to_string() }
}

/// A stored word of one of the vocabularies.
pub(crate) fn word<T: FromStr<Err: Display>>(what: &'static str, text: &str) -> Result<T, StoreError> {
    text.parse().map_err(|error| corrupt(what, &error))
}

pub(crate) fn agent(text: String) -> Result<AgentId, StoreError> {
    AgentId::new(text).map_err(|error| corrupt("agent or instance id", &error))
}

pub(crate) fn agent_opt(text: Option<String>) -> Result<Option<AgentId>, StoreError> {
    text.map(agent).transpose()
}

/// A count, a size or an epoch: never negative, as only this crate writes them.
pub(crate) fn count(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

pub(crate) fn small(value: i64) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

pub(crate) fn big(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(crate) fn ts_opt(at: Option<DbTs>) -> Option<Ts> {
    at.map(Into::into)
}

pub(crate) fn db_ts(at: Option<Ts>) -> Option<DbTs> {
    at.map(Into::into)
}

/// Text that both databases take: PostgreSQL knows no NUL.
pub(crate) fn clean(text: &str) -> String {
    text.replace('\0', "\u{FFFD}")
}

pub(crate) fn clean_opt(text: Option<&str>) -> Option<String> {
    text.map(clean)
}

fn millis(value: Option<i64>) -> Option<Duration> {
    value.map(|ms| Duration::from_millis(count(ms)))
}

pub(crate) fn millis_of(value: Option<Duration>) -> Option<i64> {
    value.map(|duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX))
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = runs, check_for_backend(Db), treat_none_as_default_value = false)]
pub(crate) struct RunRow {
    pub(crate) id: DbId,
    pub(crate) org: String,
    pub(crate) source_id: DbId,
    pub(crate) delivery_row_id: Option<DbId>,
    pub(crate) dedup_key: String,
    pub(crate) repo: String,
    pub(crate) git_ref: Option<String>,
    pub(crate) sha: String,
    pub(crate) workflow_name: String,
    pub(crate) run_name: String,
    pub(crate) lock_digest: String,
    pub(crate) event: Doc<Event>,
    pub(crate) trigger_kind: String,
    pub(crate) status: String,
    pub(crate) failure_reason: Option<String>,
    pub(crate) failure_message: Option<String>,
    pub(crate) cancel_requested_at: Option<DbTs>,
    pub(crate) cancelled_by: Option<String>,
    pub(crate) attempt: i64,
    pub(crate) parent_run_id: Option<DbId>,
    pub(crate) inputs: Doc<BTreeMap<String, Json>>,
    pub(crate) request_id: String,
    pub(crate) chain_depth: i64,
    pub(crate) created_at: DbTs,
    pub(crate) started_at: Option<DbTs>,
    pub(crate) finished_at: Option<DbTs>,
    pub(crate) timeout_ms: Option<i64>,
    pub(crate) deadline: Option<DbTs>,
    pub(crate) concurrency: Option<Doc<SlotAsk>>,
    pub(crate) logs_expired_at: Option<DbTs>,
}

impl RunRow {
    pub(crate) fn read(self) -> Result<Run, StoreError> {
        Ok(Run {
            id: self.id.into(),
            org: self.org,
            source_id: self.source_id.into(),
            delivery_id: self.delivery_row_id.map(Into::into),
            dedup_key: self.dedup_key,
            repo: self.repo,
            git_ref: self.git_ref,
            sha: self.sha,
            workflow_name: self.workflow_name,
            run_name: self.run_name,
            lock_digest: self.lock_digest,
            event: self.event.0,
            trigger_kind: self.trigger_kind,
            status: word("run status", &self.status)?,
            failure_reason: self.failure_reason.map(|r| word("failure reason", &r)).transpose()?,
            failure_message: self.failure_message,
            cancel_requested_at: ts_opt(self.cancel_requested_at),
            cancelled_by: self.cancelled_by,
            attempt: small(self.attempt),
            parent_run_id: self.parent_run_id.map(Into::into),
            inputs: self.inputs.0,
            request_id: self.request_id,
            chain_depth: small(self.chain_depth),
            created_at: self.created_at.into(),
            started_at: ts_opt(self.started_at),
            finished_at: ts_opt(self.finished_at),
            timeout: millis(self.timeout_ms),
            deadline: ts_opt(self.deadline),
            concurrency: self.concurrency.map(|ask| ask.0),
            logs_expired_at: ts_opt(self.logs_expired_at),
        })
    }
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = jobs, check_for_backend(Db), treat_none_as_default_value = false)]
pub(crate) struct JobRow {
    pub(crate) id: DbId,
    pub(crate) run_id: DbId,
    pub(crate) name: String,
    pub(crate) base_name: String,
    pub(crate) job_index: i64,
    pub(crate) position: i64,
    pub(crate) variant_label: Option<String>,
    pub(crate) matrix: Option<Doc<BTreeMap<String, String>>>,
    pub(crate) display_name: String,
    pub(crate) status: String,
    pub(crate) needs_satisfied: bool,
    pub(crate) ready_at: Option<DbTs>,
    pub(crate) max_parallel: Option<i64>,
    pub(crate) fail_fast: bool,
    pub(crate) group_name: Option<String>,
    pub(crate) failure_reason: Option<String>,
    pub(crate) failure_class: Option<String>,
    pub(crate) failure_message: Option<String>,
    pub(crate) evidence: Option<Doc<Json>>,
    pub(crate) agent_id: Option<String>,
    pub(crate) dispatch_epoch: i64,
    pub(crate) attempt: i64,
    pub(crate) outputs: Doc<BTreeMap<String, String>>,
    pub(crate) routing_reason: Option<String>,
    pub(crate) log_bytes: i64,
    pub(crate) created_at: DbTs,
    pub(crate) started_at: Option<DbTs>,
    pub(crate) finished_at: Option<DbTs>,
    pub(crate) last_heartbeat_at: Option<DbTs>,
    pub(crate) timeout_ms: Option<i64>,
    pub(crate) cancel_deadline: Option<DbTs>,
    pub(crate) fanout: Option<Doc<Manner>>,
}

impl JobRow {
    pub(crate) fn read(self) -> Result<Job, StoreError> {
        Ok(Job {
            id: self.id.into(),
            run_id: self.run_id.into(),
            name: self.name,
            base_name: self.base_name,
            job_index: small(self.job_index),
            variant_label: self.variant_label,
            matrix: self.matrix.map(|m| m.0),
            display_name: self.display_name,
            status: word("job status", &self.status)?,
            needs_satisfied: self.needs_satisfied,
            ready_at: ts_opt(self.ready_at),
            max_parallel: self.max_parallel.map(small),
            fail_fast: self.fail_fast,
            group_name: self.group_name,
            failure_reason: self.failure_reason.map(|r| word("failure reason", &r)).transpose()?,
            failure_class: self.failure_class.map(|c| word("failure class", &c)).transpose()?,
            failure_message: self.failure_message,
            evidence: self.evidence.map(|e| e.0),
            agent_id: agent_opt(self.agent_id)?,
            dispatch_epoch: small(self.dispatch_epoch),
            attempt: small(self.attempt),
            outputs: self.outputs.0,
            routing_reason: self.routing_reason,
            log_bytes: count(self.log_bytes),
            created_at: self.created_at.into(),
            started_at: ts_opt(self.started_at),
            finished_at: ts_opt(self.finished_at),
            last_heartbeat_at: ts_opt(self.last_heartbeat_at),
            timeout: millis(self.timeout_ms),
            cancel_deadline: ts_opt(self.cancel_deadline),
            fanout: self.fanout.as_ref().and_then(|manner| manner.0.fanout()),
            kind: self.fanout.as_ref().and_then(|manner| manner.0.kind()),
        })
    }
}

/// What a job is besides steps that run somewhere: pinned to a host, or of a kind of its own, never both. One column of JSON.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(untagged)]
pub(crate) enum Manner {
    /// Its place in a fan-out over hosts.
    Fanout(Fanout),
    /// What it does.
    Kind {
        /// The kind.
        kind: JobKind,
    },
}

impl Manner {
    pub(crate) fn of(job: &Job) -> Option<Self> {
        let kind = job.kind.map(|kind| Self::Kind { kind });
        job.fanout.clone().map(Self::Fanout).or(kind)
    }

    fn fanout(&self) -> Option<Fanout> {
        match self {
            Self::Fanout(fanout) => Some(fanout.clone()),
            Self::Kind { .. } => None,
        }
    }

    fn kind(&self) -> Option<JobKind> {
        match self {
            Self::Fanout(_) => None,
            Self::Kind { kind } => Some(*kind),
        }
    }
}

/// The columns of a job that a settled change may touch; the others belong to claims and heartbeats.
#[derive(AsChangeset)]
#[diesel(table_name = jobs, treat_none_as_null = true)]
pub(crate) struct JobChange {
    status: &'static str,
    needs_satisfied: bool,
    ready_at: Option<DbTs>,
    group_name: Option<String>,
    failure_reason: Option<&'static str>,
    failure_class: Option<&'static str>,
    failure_message: Option<String>,
    evidence: Option<Doc<Json>>,
    outputs: Doc<BTreeMap<String, String>>,
    routing_reason: Option<String>,
    log_bytes: i64,
    attempt: i64,
    started_at: Option<DbTs>,
    finished_at: Option<DbTs>,
    cancel_deadline: Option<DbTs>,
}

impl JobChange {
    pub(crate) fn of(job: &Job) -> Self {
        Self {
            status: job.status.as_str(),
            needs_satisfied: job.needs_satisfied,
            ready_at: db_ts(job.ready_at),
            group_name: job.group_name.clone(),
            failure_reason: job.failure_reason.map(|reason| reason.as_str()),
            failure_class: job.failure_class.map(|class| class.as_str()),
            failure_message: clean_opt(job.failure_message.as_deref()),
            evidence: job.evidence.clone().map(Doc),
            outputs: Doc(job.outputs.clone()),
            routing_reason: job.routing_reason.clone(),
            log_bytes: big(job.log_bytes),
            attempt: job.attempt.into(),
            started_at: db_ts(job.started_at),
            finished_at: db_ts(job.finished_at),
            cancel_deadline: db_ts(job.cancel_deadline),
        }
    }
}

#[derive(Clone, Queryable, Selectable, Insertable)]
#[diesel(table_name = job_needs, check_for_backend(Db), treat_none_as_default_value = false)]
pub(crate) struct NeedRow {
    pub(crate) run_id: DbId,
    pub(crate) job_name: String,
    pub(crate) upstream_name: String,
    pub(crate) run_on: Doc<Vec<JobStatus>>,
    pub(crate) group_name: Option<String>,
    pub(crate) generator: Option<String>,
    pub(crate) resolved: bool,
}

impl NeedRow {
    pub(crate) fn read(self) -> NeedEdge {
        NeedEdge {
            job_name: self.job_name,
            need: Need { job: self.upstream_name, run_on: self.run_on.0, group: self.group_name },
            generator: self.generator,
            resolved: self.resolved,
        }
    }

    pub(crate) fn of(run: DbId, need: &NewNeed) -> Self {
        Self {
            run_id: run,
            job_name: need.job_name.clone(),
            upstream_name: need.upstream.clone(),
            run_on: Doc(need.run_on.clone()),
            group_name: need.group.clone(),
            generator: need.generator.clone(),
            resolved: need.resolved,
        }
    }
}

#[derive(Queryable, Selectable, Insertable, AsChangeset)]
#[diesel(table_name = steps, check_for_backend(Db), treat_none_as_default_value = false, treat_none_as_null = true)]
#[diesel(primary_key(job_id, epoch, step_key))]
pub(crate) struct StepRow {
    pub(crate) job_id: DbId,
    pub(crate) epoch: i64,
    pub(crate) step_key: String,
    pub(crate) ordinal: i64,
    pub(crate) name: String,
    pub(crate) status: String,
    pub(crate) exit_code: Option<i64>,
    pub(crate) message: Option<String>,
    pub(crate) outputs: Doc<BTreeMap<String, String>>,
    pub(crate) started_at: Option<DbTs>,
    pub(crate) finished_at: Option<DbTs>,
    pub(crate) log_bytes: i64,
    pub(crate) log_lines: i64,
    pub(crate) missing_bytes: i64,
    pub(crate) missing_lines: i64,
    pub(crate) failure_allowed: bool,
    pub(crate) summary: Option<String>,
    pub(crate) log_state: Option<String>,
    pub(crate) attempt: i64,
    pub(crate) check_result: Option<String>,
    pub(crate) drift: Option<String>,
    pub(crate) group_name: Option<String>,
}

impl StepRow {
    pub(crate) fn read(self) -> Result<Step, StoreError> {
        Ok(Step {
            job_id: self.job_id.into(),
            epoch: small(self.epoch),
            step_key: self.step_key,
            ordinal: small(self.ordinal),
            name: self.name,
            status: word("step status", &self.status)?,
            exit_code: self.exit_code.and_then(|code| i32::try_from(code).ok()),
            message: self.message,
            outputs: self.outputs.0,
            started_at: ts_opt(self.started_at),
            finished_at: ts_opt(self.finished_at),
            log_bytes: count(self.log_bytes),
            log_lines: count(self.log_lines),
            missing_bytes: count(self.missing_bytes),
            missing_lines: count(self.missing_lines),
            failure_allowed: self.failure_allowed,
            summary: self.summary,
            log_state: self.log_state.map(|s| word("log state", &s)).transpose()?,
            attempt: small(self.attempt),
            check: self.check_result.map(|s| word("check result", &s)).transpose()?,
            drift: self.drift,
            group: self.group_name,
        })
    }
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = dispatch_queue, check_for_backend(Db), treat_none_as_default_value = false)]
pub(crate) struct DispatchRow {
    pub(crate) id: DbId,
    pub(crate) run_id: DbId,
    pub(crate) workflow_name: String,
    pub(crate) job_name: String,
    pub(crate) status: String,
    pub(crate) priority: i64,
    pub(crate) selector_digest: String,
    pub(crate) created_at: DbTs,
    pub(crate) expires_at: Option<DbTs>,
    pub(crate) dispatched_at: Option<DbTs>,
    pub(crate) dispatch_attempts: i64,
    pub(crate) dispatch_epoch: i64,
    pub(crate) agent_id: Option<String>,
    pub(crate) owner_instance_id: Option<String>,
    pub(crate) ack_deadline: Option<DbTs>,
    pub(crate) ack_agent_id: Option<String>,
    pub(crate) acked_at: Option<DbTs>,
    pub(crate) started_at: Option<DbTs>,
    pub(crate) recovery_deadline: Option<DbTs>,
    pub(crate) recovery_agent_id: Option<String>,
    pub(crate) unroutable_since: Option<DbTs>,
    pub(crate) pinned_agent_id: Option<String>,
    pub(crate) finished_at: Option<DbTs>,
    pub(crate) last_provisioning_error: Option<String>,
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = queue_selectors, check_for_backend(Db))]
pub(crate) struct SelectorRow {
    pub(crate) digest: String,
    pub(crate) selector: Doc<Selector>,
    pub(crate) requires_machine_id: Option<String>,
    pub(crate) created_at: DbTs,
    pub(crate) pinned_agent_id: Option<String>,
}

impl DispatchRow {
    pub(crate) fn read(self, selector: &SelectorRow) -> Result<QueueRow, StoreError> {
        Ok(QueueRow {
            job_id: self.id.into(),
            run_id: self.run_id.into(),
            workflow_name: self.workflow_name,
            job_name: self.job_name,
            status: word("queue status", &self.status)?,
            priority: i16::try_from(self.priority).unwrap_or(0),
            selector_digest: self.selector_digest,
            selector: selector.selector.0.clone(),
            requires_machine_id: selector.requires_machine_id.clone(),
            created_at: self.created_at.into(),
            expires_at: ts_opt(self.expires_at),
            dispatched_at: ts_opt(self.dispatched_at),
            dispatch_attempts: small(self.dispatch_attempts),
            dispatch_epoch: small(self.dispatch_epoch),
            agent_id: agent_opt(self.agent_id)?,
            owner_instance_id: agent_opt(self.owner_instance_id)?,
            ack_deadline: ts_opt(self.ack_deadline),
            acked_at: ts_opt(self.acked_at),
            started_at: ts_opt(self.started_at),
            recovery_deadline: ts_opt(self.recovery_deadline),
            recovery_agent_id: agent_opt(self.recovery_agent_id)?,
            unroutable_since: ts_opt(self.unroutable_since),
            pinned_agent_id: agent_opt(self.pinned_agent_id)?,
            finished_at: ts_opt(self.finished_at),
            last_provisioning_error: self.last_provisioning_error,
        })
    }
}

/// Where the next page starts: none when this one is not full.
pub(crate) fn next<T>(items: &[T], limit: u32, cursor: impl Fn(&T) -> Cursor) -> Option<Cursor> {
    let full = items.len() >= usize::try_from(limit).unwrap_or(usize::MAX);
    if full { items.last().map(cursor) } else { None }
}
