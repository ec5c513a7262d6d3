//! The steps of a job.

use std::collections::HashSet;

use crate::expr::Scope;
use crate::lock::{Action, ApprovalWhen, Composite, Group, SourceRef, Step};
use crate::yaml::{Data, Entry, Node};

use super::job::{Defaults, Place};
use super::keys;
use super::scope::{self, JobNames};
use super::walk::{Fields, Walk};

/// Most steps of one job.
const MAX_STEPS: usize = 256;

/// What the steps of a job share.
pub(super) struct Around<'a> {
    pub(super) place: &'a Place<'a>,
    pub(super) names: &'a JobNames,
    pub(super) job: &'a str,
}

impl Around<'_> {
    pub(super) fn scope(&self, key: &str, before: &[String]) -> Scope {
        scope::step(key, self.place.inputs, self.names, before)
    }

    /// For messages.
    pub(super) fn owner(&self) -> String {
        match self.job.strip_prefix(super::composite::STEP_DIR) {
            Some(file) => format!("step file `{file}`"),
            None => format!("job `{}`", self.job),
        }
    }

    /// For messages about the step at `index`.
    pub(super) fn step_owner(&self, index: usize) -> String {
        format!("step {} of {}", index + 1, self.owner())
    }

    fn defaults(&self) -> &Defaults {
        self.place.defaults
    }
}

/// The steps of a job as they are compiled.
#[derive(Default)]
pub(super) struct Steps {
    pub(super) steps: Vec<Step>,
    pub(super) groups: Vec<Group>,
    pub(super) composites: Vec<Composite>,
    /// Their ids in order.
    pub(super) ids: Vec<String>,
}

/// What a step may be; exactly one.
const ACTIONS: [&str; 5] = ["check", "emit", "parallel", "run", "wait_for"];
/// Keys that only make sense beside `check`.
const OF_CHECK: [&str; 3] = ["apply", "drift_exit_code", "when_in_sync"];

impl Walk<'_> {
    /// The steps of a job.
    pub(super) fn steps(&mut self, node: &Node, around: &Around<'_>) -> Steps {
        let mut done = Steps::default();
        let mut seen = HashSet::new();
        let items = self.list(node, "steps").unwrap_or_default();
        if items.is_empty() && matches!(node.data, Data::List(_)) {
            self.fault("K0205", node.span, format!("{} has no steps", around.owner())).expected(["at least one step"]);
        }
        if !self.bounded(flat_count(items), MAX_STEPS, "steps", node.span) {
            return done;
        }
        let mut index = 0;
        for (position, item) in items.iter().enumerate() {
            self.within(position.to_string(), |walk| match (raw(item, "parallel"), raw(item, "use")) {
                (Some(_), _) => walk.parallel(item, &mut index, &mut done, &mut seen, around),
                (None, Some(_)) => {
                    walk.use_step(item, &mut index, &mut done, around);
                    walk.take_id(item, &mut seen, &mut done.ids, around);
                }
                (None, None) => {
                    let step = walk.step(item, index, &done.ids, around);
                    index += 1;
                    walk.take_id(item, &mut seen, &mut done.ids, around);
                    done.steps.extend(step);
                }
            });
        }
        self.bounded(done.steps.len(), MAX_STEPS, "steps, with those of step files", node.span);
        done
    }

    fn take_id(&mut self, item: &Node, seen: &mut HashSet<String>, ids: &mut Vec<String>, around: &Around<'_>) {
        let Some(id) = declared_id(item) else { return };
        if seen.insert(id.to_owned()) {
            ids.push(id.to_owned());
        } else {
            let span = raw(item, "id").map_or(item.span, |node| node.span);
            self.fault("K0303", span, format!("step id `{id}` is used twice in {}", around.owner()));
        }
    }

    /// A step that is a group: its children stand in the list of steps and point to it.
    fn parallel(
        &mut self,
        node: &Node,
        index: &mut usize,
        done: &mut Steps,
        seen: &mut HashSet<String>,
        around: &Around<'_>,
    ) {
        let owner = around.step_owner(*index);
        let Some(fields) = self.fields(node, &keys::STEP, &owner) else { return };
        if let Data::Map(entries) = &node.data {
            for entry in entries.iter().filter(|entry| entry.key != "parallel" && keys::STEP.knows(&entry.key)) {
                self.beside_parallel(entry, &owner);
            }
        }
        let Some(entry) = fields.get("parallel") else { return };
        self.within("parallel", |walk| {
            let Some(fields) = walk.fields(&entry.value, &keys::PARALLEL, &format!("`parallel` of {owner}")) else {
                return;
            };
            let group = walk.group(&entry.value, fields);
            let Some(children) = fields.get("steps") else {
                walk.fault("K0101", entry.span, format!("`parallel` of {owner} has no `steps`"))
                    .expected(["`steps`, a list of steps"]);
                return;
            };
            let number = u32::try_from(done.groups.len()).unwrap_or(u32::MAX);
            done.groups.push(group);
            walk.within("steps", |walk| {
                let items = walk.list(&children.value, "steps").unwrap_or_default();
                if items.is_empty() && matches!(children.value.data, Data::List(_)) {
                    walk.fault("K0205", children.value.span, format!("`parallel` of {owner} has no steps"))
                        .expected(["at least one step"]);
                }
                // Siblings run at once: none can read what another one makes.
                let before = done.ids.clone();
                for (position, item) in items.iter().enumerate() {
                    let step = walk.within(position.to_string(), |walk| walk.step(item, *index, &before, around));
                    *index += 1;
                    walk.take_id(item, seen, &mut done.ids, around);
                    done.steps.extend(step.map(|step| Step { group: Some(number), ..step }));
                }
            });
        });
    }

    fn beside_parallel(&mut self, entry: &Entry, owner: &str) {
        let (code, message, help) = if ACTIONS.contains(&entry.key.as_str()) {
            (
                "K0103",
                format!("{owner} has both `parallel` and `{}`", entry.key),
                "a step does one thing; keep one of them",
            )
        } else {
            let message = format!("`{}` beside `parallel` in {owner} has no effect", entry.key);
            ("K0104", message, "put it on the steps of the group; `name` stands below `parallel`")
        };
        self.within(&entry.key, |walk| {
            walk.fault(code, entry.span, message).help(help);
        });
    }

    fn group(&mut self, node: &Node, fields: Fields<'_>) -> Group {
        let name = fields
            .get("name")
            .and_then(|entry| self.within("name", |walk| walk.fixed(&entry.value, "a name")).map(str::to_owned));
        let fail_fast =
            fields.get("fail_fast").and_then(|entry| self.within("fail_fast", |walk| walk.bool(&entry.value)));
        let max_parallel = fields
            .get("max_parallel")
            .and_then(|entry| self.within("max_parallel", |walk| walk.int(&entry.value, 1, MAX_STEPS as i64)))
            .and_then(|limit| u32::try_from(limit).ok());
        Group { name, source: self.source(node), fail_fast: fail_fast.unwrap_or(true), max_parallel }
    }

    pub(super) fn source(&self, node: &Node) -> SourceRef {
        SourceRef { file: self.file.to_owned(), line: node.span.start.line }
    }

    fn step(&mut self, node: &Node, index: usize, before: &[String], around: &Around<'_>) -> Option<Step> {
        if let Data::Scalar(..) = node.data {
            let run = self.script(node, "run")?;
            return Some(self.bare_step(node, run, around));
        }
        let owner = around.step_owner(index);
        if !matches!(node.data, Data::Map(_)) {
            self.mismatch("K0201", node, "a script or a map");
            return None;
        }
        let fields = self.fields(node, &keys::STEP, &owner)?;
        let (has_action, action) = self.action(node, fields, &owner, before, around);
        let mut step = self.bare_step(node, String::new(), around);
        if matches!(action, Some(Action::WaitFor(_))) {
            step.timeout_ms = None;
        }
        self.step_fields(&mut step, fields, before, around, &owner);
        if let Some(entry) = fields.get("retry") {
            step.retry = self.within("retry", |walk| walk.step_retry(&entry.value, &owner));
        }
        if let Some(entry) = fields.get("hooks") {
            let scope = around.scope("hooks", before);
            let hooks =
                self.within("hooks", |walk| walk.hooks(&entry.value, &keys::STEP_HOOKS, &owner, &scope, around));
            (step.on_cancel, step.cleanup) = (hooks.on_cancel, hooks.cleanup);
        }
        if !has_action {
            return None;
        }
        Some(Step { action: action?, ..step })
    }

    /// The keys that every kind of step has.
    fn step_fields(
        &mut self,
        step: &mut Step,
        fields: Fields<'_>,
        before: &[String],
        around: &Around<'_>,
        owner: &str,
    ) {
        if let Some(entry) = fields.get("id") {
            step.id = self.within("id", |walk| walk.step_id(&entry.value));
        }
        if let Some(entry) = fields.get("if") {
            let scope = around.scope("if", before);
            step.condition = self.within("if", |walk| walk.condition(&entry.value, &scope));
        }
        if let Some(entry) = fields.get("secrets") {
            step.secrets = self.within("secrets", |walk| walk.secrets(&entry.value));
        }
        if let Some(entry) = fields.get("approval") {
            let owner = around.owner();
            let owner = format!("a step of {owner}");
            step.approval = self.within("approval", |walk| walk.approval(&entry.value, &keys::STEP_APPROVAL, &owner));
            let on_drift = step.approval.as_ref().is_some_and(|approval| approval.when == ApprovalWhen::Drift);
            if on_drift && fields.get("check").is_none() {
                self.within("approval", |walk| {
                    walk.fault("K0104", entry.span, format!("`when: drift` in {owner} has no effect without `check`"));
                });
            }
        }
        if let Some(entry) = fields.get("continue_on_error") {
            step.continue_on_error =
                self.within("continue_on_error", |walk| walk.bool(&entry.value)).unwrap_or_default();
        }
        if let Some(entry) = fields.get("cache") {
            let scope = around.scope("cache", before);
            step.cache = self.within("cache", |walk| walk.caches(&entry.value, owner, &scope));
        }
        self.command_fields(step, fields, |key| around.scope(key, before));
    }

    /// The keys of everything that runs a script, hooks included.
    pub(super) fn command_fields(&mut self, step: &mut Step, fields: Fields<'_>, scope: impl Fn(&str) -> Scope) {
        if let Some(entry) = fields.get("name") {
            step.name = self.within("name", |walk| walk.agent_template(&entry.value, &scope("name")));
        }
        if let Some(entry) = fields.get("shell") {
            step.shell = self.within("shell", |walk| walk.shell(&entry.value));
        }
        if let Some(entry) = fields.get("env") {
            step.env = self.within("env", |walk| walk.env(&entry.value, &scope("env"), true));
        }
        if let Some(entry) = fields.get("working_directory") {
            let scope = scope("working_directory");
            step.working_directory = self.within("working_directory", |walk| walk.directory(&entry.value, &scope));
        }
        if let Some(entry) = fields.get("timeout") {
            step.timeout_ms = self.within("timeout", |walk| walk.duration(&entry.value));
        }
    }

    /// What the step does. The first is false when nothing says so, which then was reported.
    fn action(
        &mut self,
        node: &Node,
        fields: Fields<'_>,
        owner: &str,
        before: &[String],
        around: &Around<'_>,
    ) -> (bool, Option<Action>) {
        for key in ["parallel", "use"] {
            if let Some(entry) = fields.get(key) {
                self.within(key, |walk| {
                    walk.fault("K0103", entry.span, format!("{owner} is in a group and has `{key}`"))
                        .help("a group holds plain steps; list the steps in the outer group");
                });
                return (true, None);
            }
        }
        if let Some(entry) = fields.get("with") {
            self.within("with", |walk| {
                walk.fault("K0104", entry.span, format!("`with` in {owner} has no effect without `use`"));
            });
        }
        let mut present = ACTIONS.into_iter().filter_map(|key| fields.get(key));
        let Some(first) = present.next() else {
            self.no_action(node, fields, owner);
            return (false, None);
        };
        if let Some(second) = present.next() {
            let message = format!("{owner} has both `{}` and `{}`", first.key, second.key);
            self.within(&second.key, |walk| {
                walk.fault("K0103", second.span, message).help("a step does one thing; keep one of them");
            });
        }
        if first.key != "check" {
            for entry in OF_CHECK.into_iter().filter_map(|key| fields.get(key)) {
                self.without_check(entry, owner);
            }
        }
        let action = match first.key.as_str() {
            "check" => self.check(fields, first, owner),
            "wait_for" => self.wait_for(fields, first, owner, before, around),
            "emit" => self.emit(fields, first, owner, before, around),
            _ => self.within("run", |walk| walk.script(&first.value, "run")).map(Action::Run),
        };
        (true, action)
    }

    fn no_action(&mut self, node: &Node, fields: Fields<'_>, owner: &str) {
        let lone: Vec<&Entry> = OF_CHECK.into_iter().filter_map(|key| fields.get(key)).collect();
        for entry in &lone {
            self.without_check(entry, owner);
        }
        if lone.is_empty() && !means_run(node) {
            self.fault("K0101", node.span, format!("{owner} has no `run`")).expected([
                "`run`, a script",
                "`check` and `apply`",
                "`wait_for`",
                "`emit`",
                "`parallel`",
                "`use`",
            ]);
        }
    }

    fn without_check(&mut self, entry: &Entry, owner: &str) {
        self.within(&entry.key, |walk| {
            walk.fault("K0104", entry.span, format!("`{}` in {owner} has no effect without `check`", entry.key))
                .help("add `check`, the script that looks for drift");
        });
    }

    /// A step with the defaults of its workflow.
    pub(super) fn bare_step(&self, node: &Node, run: String, around: &Around<'_>) -> Step {
        let defaults = around.defaults();
        Step {
            shell: defaults.shell.clone(),
            working_directory: defaults.working_directory.clone(),
            timeout_ms: defaults.timeout_ms,
            ..Step::script(self.source(node), run)
        }
    }

    pub(super) fn step_id(&mut self, node: &Node) -> Option<String> {
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

/// A field as written, before its map is compiled.
fn raw<'n>(node: &'n Node, key: &str) -> Option<&'n Node> {
    let Data::Map(entries) = &node.data else { return None };
    entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
}

fn declared_id(node: &Node) -> Option<&str> {
    raw(node, "id").and_then(Node::text).filter(|id| !id.is_empty())
}

/// Steps with those of groups.
fn flat_count(items: &[Node]) -> usize {
    let of = |item: &Node| match raw(item, "parallel").and_then(|group| raw(group, "steps")).map(|steps| &steps.data) {
        Some(Data::List(children)) => children.len(),
        _ => 1,
    };
    items.iter().map(of).sum()
}

/// Whether the step has a word that was meant as `run`, which is reported: then a missing `run` is no further fault.
fn means_run(node: &Node) -> bool {
    let Data::Map(entries) = &node.data else { return false };
    entries.iter().any(|entry| keys::STEP.suggest(&entry.key) == Some("run"))
}
