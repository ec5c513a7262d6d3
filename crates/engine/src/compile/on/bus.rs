//! Triggers on what KiCI itself tells: emitted events, ends of runs and jobs, schedules.

use std::collections::BTreeMap;

use crate::compile::keys;
use crate::compile::walk::{Fields, Walk};
use crate::cron::{Cron, CronError, MAX_CATCHUP, MAX_JITTER};
use crate::event_name;
use crate::inputs;
use crate::lock::Trigger;
use crate::state::{JobStatus, RunStatus};
use crate::trigger::all_inputs;
use crate::yaml::{Entry, Node};

use super::inputs::MAX_INPUTS;

/// How long failures are collected where nothing is said.
const DEFAULT_ACCUMULATE_MS: u64 = 5 * 60 * 1000;
/// Shortest and longest window.
const ACCUMULATE: std::ops::RangeInclusive<u64> = 10_000..=24 * 3600 * 1000;
const DEFAULT_CATCHUP_MS: u64 = 24 * 3600 * 1000;

impl Walk<'_> {
    pub(super) fn event(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::EVENT, "`on.event`")?;
        let (r#match, not) = self.match_and_not(fields);
        let source = self.again(node, "source");
        let Some(entry) = fields.get("name") else {
            self.lacks(node, "event", "name", "`name`, the name of an event that steps emit");
            return None;
        };
        let name = self.within("name", |walk| walk.event_name(&entry.value))?;
        Some(Trigger::KiciEvent { name, r#match, not, source })
    }

    /// The name of an event that steps may emit.
    pub(in crate::compile) fn event_name(&mut self, node: &Node) -> Option<String> {
        let name = self.fixed(node, "the name of an event")?;
        if let Err(error) = event_name::check(name) {
            self.fault("K0509", node.span, error.to_string());
            return None;
        }
        Some(name.to_owned())
    }

    pub(super) fn workflow_complete(&mut self, node: &Node) -> Option<Trigger> {
        let ends: Vec<&str> = RunStatus::ALL.iter().filter(|end| end.is_terminal()).map(|end| end.as_str()).collect();
        Some(Trigger::WorkflowComplete {
            workflow: self.filter(node, &keys::WORKFLOW_COMPLETE, "workflow_complete", "workflow")?,
            status: self.words(node, "status", &ends, &[]),
            source: self.again(node, "source"),
        })
    }

    pub(super) fn job_complete(&mut self, node: &Node) -> Option<Trigger> {
        let ends: Vec<&str> = JobStatus::terminal().map(JobStatus::as_str).collect();
        Some(Trigger::JobComplete {
            workflow: self.filter(node, &keys::JOB_COMPLETE, "job_complete", "workflow")?,
            job: self.again(node, "job"),
            status: self.words(node, "status", &ends, &[]),
            source: self.again(node, "source"),
        })
    }

    pub(super) fn failed_batch(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::FAILED_BATCH, "`on.workflows_failed_batch`")?;
        let workflows = self.again(node, "workflows");
        let accumulate_ms = match fields.get("accumulate") {
            Some(entry) => self.within("accumulate", |walk| {
                let value = walk.duration(&entry.value)?;
                if !ACCUMULATE.contains(&value) {
                    walk.fault("K0205", entry.value.span, "a window lasts from 10 s to 24 h");
                    return None;
                }
                Some(value)
            }),
            None => Some(DEFAULT_ACCUMULATE_MS),
        };
        Some(Trigger::WorkflowsFailedBatch { accumulate_ms: accumulate_ms?, workflows })
    }

    pub(super) fn lifecycle(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::LIFECYCLE, "`on.lifecycle`")?;
        if fields.get("events").is_none() {
            self.lacks(node, "lifecycle", "events", "`events`, a list of what is of interest");
            return None;
        }
        Some(Trigger::Lifecycle {
            events: self.words(node, "events", &event_name::LIFECYCLE, &event_name::LIFECYCLE),
            sources: self.again(node, "sources"),
        })
    }

    pub(super) fn schedule(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::SCHEDULE, "`on.schedule`")?;
        let zone = match fields.get("timezone") {
            Some(entry) => self.within("timezone", |walk| walk.fixed(&entry.value, "a time zone"))?,
            None => "UTC",
        };
        let jitter_ms = self.span_of(fields, "jitter", 0, MAX_JITTER);
        let catchup_ms = self.span_of(fields, "catchup", DEFAULT_CATCHUP_MS, MAX_CATCHUP);
        let inputs = match fields.get("inputs") {
            Some(entry) => self.within("inputs", |walk| walk.given_inputs(&entry.value)),
            None => BTreeMap::new(),
        };
        let Some(entry) = fields.get("cron") else {
            self.lacks(node, "schedule", "cron", "`cron`, for example \"0 3 * * *\"");
            return None;
        };
        let cron = self.within("cron", |walk| walk.fixed(&entry.value, "a cron pattern"))?;
        if let Err(error) = Cron::parse(cron, zone) {
            self.cron_fault(fields, entry, &error);
            return None;
        }
        let (cron, timezone) = (cron.to_owned(), zone.to_owned());
        Some(Trigger::Schedule { cron, timezone, inputs, jitter_ms: jitter_ms?, catchup_ms: catchup_ms? })
    }

    fn cron_fault(&mut self, fields: Fields<'_>, cron: &Entry, error: &CronError) {
        let (entry, code) = match (error, fields.get("timezone")) {
            (CronError::Zone(_), Some(entry)) => (entry, "K0508"),
            _ => (cron, "K0507"),
        };
        self.within(&entry.key, |walk| {
            walk.fault(code, entry.value.span, error.to_string());
        });
    }

    fn span_of(&mut self, fields: Fields<'_>, key: &str, default: u64, most: std::time::Duration) -> Option<u64> {
        let Some(entry) = fields.get(key) else { return Some(default) };
        let most = u64::try_from(most.as_millis()).unwrap_or(u64::MAX);
        self.within(key, |walk| {
            let value = walk.duration(&entry.value)?;
            if value > most {
                let hours = most / 3_600_000;
                walk.fault("K0205", entry.value.span, format!("`{key}` is at most {hours} h"));
                return None;
            }
            Some(value)
        })
    }

    /// What schedules give must fit what the workflow declares, if it declares inputs.
    pub(in crate::compile) fn scheduled_inputs(&mut self, node: &Node, triggers: &[Trigger]) {
        let declared = all_inputs(triggers);
        for trigger in triggers {
            let Trigger::Schedule { inputs, .. } = trigger else { continue };
            for error in inputs::scheduled(&declared, inputs).err().into_iter().flatten() {
                self.within("schedule", |walk| {
                    walk.fault("K0505", node.span, format!("`schedule`: {error}"));
                });
            }
        }
    }

    /// Values for the inputs that the workflow declares.
    fn given_inputs(&mut self, node: &Node) -> BTreeMap<String, String> {
        let entries = self.map(node).unwrap_or_default();
        if !self.bounded(entries.len(), MAX_INPUTS, "inputs", node.span) {
            return BTreeMap::new();
        }
        let mut given = BTreeMap::new();
        for entry in entries {
            let value = self.within(&entry.key, |walk| walk.fixed(&entry.value, "a value").map(str::to_owned));
            given.extend(value.map(|value| (entry.key.clone(), value)));
        }
        given
    }
}
