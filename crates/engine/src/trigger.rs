//! Which events start a workflow (workflows-and-events 3.3), with a trace that says why.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::event::{ChangedFiles, Event, EventKind};
use crate::inputs::{self, InputError};
use crate::lock::{Input, Trigger, Workflow};

mod checks;
mod kinds;

pub use kinds::{TriggerError, kind_name, validate};

/// One filter of one trigger, for the decision trace (R18).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceEntry {
    /// Which filter: `event`, `branches`, `paths`, …
    pub check: String,
    /// What it asks for.
    pub expected: String,
    /// What the event has.
    pub actual: String,
    /// Whether it holds.
    pub passed: bool,
    /// What else there is to know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// What became of one trigger. Evaluation stops at the first filter that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriggerTrace {
    /// Position among the workflow's triggers.
    pub trigger: usize,
    /// Its type, as in the lock.
    pub kind: String,
    /// Whether it matched.
    pub matched: bool,
    /// Its filters, in the order of evaluation.
    pub checks: Vec<TraceEntry>,
}

/// What a workflow does with an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Outcome {
    /// It runs; the first trigger that matched is recorded.
    Matched {
        /// Position among the workflow's triggers.
        trigger: usize,
        /// Its type.
        kind: String,
        /// For the run: why a filter was taken as met though it could not be evaluated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        note: Option<String>,
    },
    /// No trigger matches.
    NotMatched,
    /// It depends on the changed files, which were not supplied: fetch them and ask again.
    NeedsFiles,
}

/// The decision on one workflow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowDecision {
    /// Name of the workflow.
    pub workflow: String,
    /// What it does.
    pub outcome: Outcome,
    /// Its triggers up to the one that decided.
    pub triggers: Vec<TriggerTrace>,
}

/// Matches a workflow against an event. The first matching trigger in declaration order wins. `files` may be left out until
/// the answer is [`Outcome::NeedsFiles`], so that they are fetched only when they decide (R14).
///
/// A trigger with a pattern that does not compile, which only a lock of another program can hold, does not match and says so
/// in the trace.
pub fn match_workflow(workflow: &Workflow, event: &Event, files: Option<&ChangedFiles>) -> WorkflowDecision {
    let mut triggers = Vec::new();
    let decision = |outcome, triggers| WorkflowDecision { workflow: workflow.name.clone(), outcome, triggers };
    if let Some(asked) = event.requested_workflow.as_deref().filter(|asked| *asked != workflow.name) {
        let check = TraceEntry {
            check: "workflow".to_owned(),
            expected: workflow.name.clone(),
            actual: asked.to_owned(),
            passed: false,
            note: Some("the event asks for one workflow by name".to_owned()),
        };
        triggers.push(TriggerTrace { trigger: 0, kind: "workflow".to_owned(), matched: false, checks: vec![check] });
        return decision(Outcome::NotMatched, triggers);
    }
    for (at, trigger) in workflow.triggers.iter().enumerate() {
        let mut checks = checks::Checks::new(event, files);
        let verdict = kinds::evaluate(trigger, &mut checks);
        let (entries, note) = checks.finish();
        let kind = kind_name(trigger).to_owned();
        let matched = verdict.is_ok();
        triggers.push(TriggerTrace { trigger: at, kind: kind.clone(), matched, checks: entries });
        match verdict {
            Ok(()) => return decision(Outcome::Matched { trigger: at, kind, note }, triggers),
            Err(checks::Stop::NeedsFiles) => return decision(Outcome::NeedsFiles, triggers),
            Err(checks::Stop::No) => {}
        }
    }
    decision(Outcome::NotMatched, triggers)
}

/// R15: the marker in the head commit's message that keeps a push from starting anything; none for other events. The caller
/// asks only where the repository has not switched it off.
pub fn skip_ci(event: &Event) -> Option<&'static str> {
    if event.kind != EventKind::Push {
        return None;
    }
    let message = event.commit_message.as_deref()?.to_ascii_lowercase();
    ["[skip ci]", "[ci skip]", "[skip kici]"].into_iter().find(|marker| message.contains(marker))
}

/// The inputs that a trigger declares for whoever starts the run; none where it takes none.
pub fn declared_inputs(trigger: &Trigger) -> Option<&BTreeMap<String, Input>> {
    match trigger {
        Trigger::Dispatch { inputs, .. } => Some(inputs),
        _ => None,
    }
}

/// All inputs that triggers declare; of two declarations of one name the first counts.
pub fn all_inputs(triggers: &[Trigger]) -> BTreeMap<String, Input> {
    let mut all = BTreeMap::new();
    for trigger in triggers {
        if let Trigger::Dispatch { inputs, .. } = trigger {
            for (name, input) in inputs {
                all.entry(name.clone()).or_insert_with(|| input.clone());
            }
        }
    }
    all
}

/// The inputs of a run that a trigger of a workflow starts with an event, checked against their declaration (R26). An event
/// that a person made has been checked before.
///
/// # Errors
/// What does not fit.
pub fn run_inputs(
    workflow: &Workflow,
    trigger: usize,
    event: &Event,
) -> Result<BTreeMap<String, Json>, Vec<InputError>> {
    match (event.kind, workflow.triggers.get(trigger)) {
        (EventKind::Schedule, Some(Trigger::Schedule { inputs, .. })) => {
            inputs::scheduled(&all_inputs(&workflow.triggers), inputs)
        }
        (EventKind::Dispatch, Some(Trigger::Dispatch { inputs, .. })) => inputs::dispatched(inputs, &event.inputs),
        (EventKind::Manual, _) => Ok(event.inputs.clone()),
        _ => Ok(BTreeMap::new()),
    }
}

/// The trigger by which a workflow may be started by hand (R70): its first `manual` one, else its first `dispatch` without
/// types. None: it cannot be.
pub fn manual_trigger(workflow: &Workflow) -> Option<&Trigger> {
    let by_hand = |trigger: &&Trigger| matches!(trigger, Trigger::Dispatch { manual: true, .. });
    let dispatch = |trigger: &&Trigger| matches!(trigger, Trigger::Dispatch { types, .. } if types.is_empty());
    workflow.triggers.iter().find(by_hand).or_else(|| workflow.triggers.iter().find(dispatch))
}

#[cfg(test)]
mod tests;
