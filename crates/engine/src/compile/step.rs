//! The steps of a job.

use std::collections::HashSet;

use crate::expr::Scope;
use crate::lock::{Shell, SourceRef, Step, Value};
use crate::yaml::{Data, Node};

use super::job::{Defaults, Place};
use super::keys;
use super::scope::{self, JobNames};
use super::walk::Walk;

/// Most steps of one job.
const MAX_STEPS: usize = 256;

/// What the steps of a job share.
pub(super) struct Around<'a> {
    pub(super) place: &'a Place<'a>,
    pub(super) names: &'a JobNames,
    pub(super) job: &'a str,
}

impl Around<'_> {
    fn scope(&self, key: &str, before: &[String]) -> Scope {
        scope::step(key, self.place.inputs, self.names, before)
    }

    fn defaults(&self) -> &Defaults {
        self.place.defaults
    }
}

impl Walk<'_> {
    /// The steps, and their ids in order.
    pub(super) fn steps(&mut self, node: &Node, around: &Around<'_>) -> (Vec<Step>, Vec<String>) {
        let (mut steps, mut ids) = (Vec::new(), Vec::new());
        let mut seen = HashSet::new();
        let items = self.list(node, "steps").unwrap_or_default();
        if items.is_empty() && matches!(node.data, Data::List(_)) {
            self.fault("K0205", node.span, format!("job `{}` has no steps", around.job))
                .expected(["at least one step"]);
        }
        if items.len() > MAX_STEPS {
            self.fault("K0704", node.span, format!("{} steps, at most {MAX_STEPS} are allowed", items.len()));
        }
        for (index, item) in items.iter().enumerate() {
            let step = self.within(index.to_string(), |walk| walk.step(item, index, &ids, around));
            if let Some(id) = declared_id(item) {
                if seen.insert(id.to_owned()) {
                    ids.push(id.to_owned());
                } else {
                    let span = id_node(item).map_or(item.span, |node| node.span);
                    self.fault("K0303", span, format!("step id `{id}` is used twice in job `{}`", around.job));
                }
            }
            steps.extend(step);
        }
        (steps, ids)
    }

    fn step(&mut self, node: &Node, index: usize, before: &[String], around: &Around<'_>) -> Option<Step> {
        if let Data::Scalar(..) = node.data {
            let run = self.script(node, "run")?;
            return Some(self.bare_step(node, run, around));
        }
        let owner = format!("step {} of job `{}`", index + 1, around.job);
        if !matches!(node.data, Data::Map(_)) {
            self.mismatch("K0201", node, "a script or a map");
            return None;
        }
        let fields = self.fields(node, &keys::STEP, &owner)?;
        let Some(entry) = fields.get("run") else {
            if !has_planned_action(node) {
                self.fault("K0101", node.span, format!("{owner} has no `run`")).expected(["`run`, a script"]);
            }
            return None;
        };
        let run = self.within("run", |walk| walk.script(&entry.value, "run"));
        let mut step = self.bare_step(node, String::new(), around);
        if let Some(entry) = fields.get("id") {
            step.id = self.within("id", |walk| walk.step_id(&entry.value));
        }
        if let Some(entry) = fields.get("name") {
            let scope = around.scope("name", before);
            step.name = self.within("name", |walk| walk.agent_template(&entry.value, &scope));
        }
        if let Some(entry) = fields.get("shell") {
            step.shell = self.within("shell", |walk| walk.shell(&entry.value));
        }
        if let Some(entry) = fields.get("env") {
            let scope = around.scope("env", before);
            step.env = self.within("env", |walk| walk.env(&entry.value, &scope, true));
        }
        if let Some(entry) = fields.get("if") {
            let scope = around.scope("if", before);
            step.condition = self.within("if", |walk| walk.condition(&entry.value, &scope));
        }
        if let Some(entry) = fields.get("working_directory") {
            let scope = around.scope("working_directory", before);
            step.working_directory = self.within("working_directory", |walk| walk.directory(&entry.value, &scope));
        }
        if let Some(entry) = fields.get("timeout") {
            step.timeout_ms = self.within("timeout", |walk| walk.duration(&entry.value));
        }
        if let Some(entry) = fields.get("continue_on_error") {
            step.continue_on_error =
                self.within("continue_on_error", |walk| walk.bool(&entry.value)).unwrap_or_default();
        }
        Some(Step { run: run?, ..step })
    }

    /// A step with the defaults of its workflow.
    pub(super) fn bare_step(&self, node: &Node, run: String, around: &Around<'_>) -> Step {
        let defaults = around.defaults();
        let (shell, working_directory): (Option<Shell>, Option<Value>) =
            (defaults.shell.clone(), defaults.working_directory.clone());
        Step {
            id: None,
            name: None,
            source: SourceRef { file: self.file.to_owned(), line: node.span.start.line },
            run,
            shell,
            working_directory,
            env: Default::default(),
            condition: None,
            continue_on_error: false,
            timeout_ms: defaults.timeout_ms,
        }
    }

    fn step_id(&mut self, node: &Node) -> Option<String> {
        let id = self.fixed(node, "an id")?;
        let legal = id.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
            && id.len() <= 64;
        if !legal {
            self.fault("K0206", node.span, format!("`{}` is not an id", crate::yaml::shorten(id)))
                .expected(["up to 64 letters, digits, `_` and `-`, starting with a letter"]);
            return None;
        }
        Some(id.to_owned())
    }
}

fn id_node(node: &Node) -> Option<&Node> {
    let Data::Map(entries) = &node.data else { return None };
    entries.iter().find(|entry| entry.key == "id").map(|entry| &entry.value)
}

fn declared_id(node: &Node) -> Option<&str> {
    id_node(node).and_then(Node::text).filter(|id| !id.is_empty())
}

/// Whether the step does something that is refused anyway: then a missing `run` is no further fault.
fn has_planned_action(node: &Node) -> bool {
    const ACTIONS: [&str; 6] = ["check", "apply", "emit", "wait_for", "parallel", "use"];
    let Data::Map(entries) = &node.data else { return false };
    entries.iter().any(|entry| ACTIONS.contains(&entry.key.as_str()) || keys::STEP.suggest(&entry.key) == Some("run"))
}
