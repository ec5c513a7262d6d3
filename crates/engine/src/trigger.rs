//! Which events start a workflow (workflows-and-events 3.3), with a trace that says why.

use serde::{Deserialize, Serialize};

use crate::event::{ChangedFiles, Event};
use crate::lock::Workflow;

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
pub fn match_workflow(workflow: &Workflow, event: &Event, files: Option<&ChangedFiles>) -> WorkflowDecision {
    let _ = (workflow, event, files);
    unimplemented!()
}

/// R15: the marker in the head commit's message that keeps a push from starting anything; none for other events.
pub fn skip_ci(event: &Event) -> Option<&'static str> {
    let _ = event;
    unimplemented!()
}
