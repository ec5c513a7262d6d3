//! The decision trace of a delivery: what `event explain` shows.

use kici_engine::compile::CompiledSet;
use kici_engine::diagnostic::Diagnostic;
use kici_engine::event::Event;
use kici_engine::trigger::WorkflowDecision;
use kici_forge::Skipped;
use serde::Serialize;
use serde_json::{Value as Json, json};

#[derive(Debug, Serialize)]
struct FileTrace {
    path: String,
    diagnostics: Vec<Diagnostic>,
}

/// A trace that is being written.
#[derive(Debug)]
pub(crate) struct Trace {
    event: Json,
    files: Vec<FileTrace>,
    skipped: Vec<Skipped>,
    workflows: Vec<WorkflowDecision>,
}

impl Trace {
    /// For an event; its payload stays with the delivery.
    pub(crate) fn new(event: &Event) -> Self {
        let mut shown = event.clone();
        shown.payload = Json::Null;
        let event = serde_json::to_value(shown).unwrap_or_default();
        Self { event, files: Vec::new(), skipped: Vec::new(), workflows: Vec::new() }
    }

    /// For a delivery that did not become an event.
    pub(crate) fn without_event(name: &str) -> Self {
        Self { event: json!({"raw_name": name}), files: Vec::new(), skipped: Vec::new(), workflows: Vec::new() }
    }

    pub(crate) fn files(&mut self, set: &CompiledSet) {
        for (path, file) in &set.files {
            if !file.diagnostics.is_empty() {
                self.files.push(FileTrace { path: path.clone(), diagnostics: file.diagnostics.clone() });
            }
        }
    }

    pub(crate) fn skipped_files(&mut self, skipped: &[Skipped]) {
        self.skipped.extend_from_slice(skipped);
    }

    pub(crate) fn workflow(&mut self, decision: WorkflowDecision) {
        self.workflows.push(decision);
    }

    pub(crate) fn into_json(self, note: Option<&str>) -> Json {
        json!({
            "event": self.event,
            "files": self.files,
            "skipped_files": self.skipped,
            "workflows": self.workflows,
            "note": note,
        })
    }
}
