//! A workflow: one document of a file.

use std::collections::BTreeMap;

use crate::lock::{
    ForGenerated, Job, MAX_RUN_HOOKS_MS, MAX_STEP_FILE_BYTES, Need, RUN_HOOKS_JOB, Requirement, Rule, SourceRef,
    Trigger, Value, Workflow,
};
use crate::state::JobStatus;
use crate::yaml::{Data, Entry, Node, Span};

use super::job::{Defaults, Place};
use super::keys;
use super::known::{Known, shown};
use super::needs::Needs;
use super::scope::{self, Inputs, JobNames};
use super::step::Around;
use super::walk::{Fields, Walk};

/// Most jobs of one workflow as written.
const MAX_JOBS: usize = 256;

/// A compiled document and the place of its name, for faults between documents.
pub(super) struct Named {
    pub(super) workflow: Workflow,
    pub(super) place: Span,
}

impl Walk<'_> {
    /// Compiles a document. `stem` is its name where it gives none.
    pub(super) fn workflow(&mut self, root: &Node, stem: &str, content_hash: &str) -> Option<Named> {
        let fields = self.fields(root, &keys::WORKFLOW, "the workflow")?;
        let (name, place) = self.workflow_name(fields, root, stem);
        let triggers = match fields.get("on") {
            Some(entry) => self.within("on", |walk| walk.triggers(&entry.value)),
            None => {
                self.fault("K0101", first_line(root), "the workflow has no `on`")
                    .expected(["`on`, what starts it"])
                    .help("for example `on: push`");
                Vec::new()
            }
        };
        if let Some(entry) = fields.get("on") {
            self.within("on", |walk| walk.scheduled_inputs(&entry.value, &triggers));
        }
        let inputs = declared_inputs(&triggers);
        let run_name = self.dispatch_text(fields, "run_name", &inputs);
        let condition = fields.get("if").and_then(|entry| {
            let scope = scope::workflow("if", &inputs);
            self.within("if", |walk| walk.condition(&entry.value, &scope))
        });
        let env = match fields.get("env") {
            Some(entry) => {
                let scope = scope::on_agent(scope::workflow("env", &inputs));
                self.within("env", |walk| walk.env(&entry.value, &scope, false))
            }
            None => BTreeMap::new(),
        };
        let defaults = match fields.get("defaults") {
            Some(entry) => self.within("defaults", |walk| walk.defaults(&entry.value, &inputs)),
            None => Defaults::default(),
        };
        let secrets = fields.get("secrets").map(|entry| self.within("secrets", |walk| walk.secrets(&entry.value)));
        let approval = fields.get("approval").and_then(|entry| {
            self.within("approval", |walk| walk.approval(&entry.value, &keys::APPROVAL, "the workflow"))
        });
        let timeout_ms =
            fields.get("timeout").and_then(|entry| self.within("timeout", |walk| walk.duration(&entry.value)));
        let concurrency = fields.get("concurrency").and_then(|entry| {
            let scope = scope::workflow("concurrency", &inputs);
            self.within("concurrency", |walk| walk.concurrency(&entry.value, &scope))
        });
        let description = self.description(fields);
        let (requires, rules) = self.conditions_of_run(fields, &inputs);
        let mut jobs = self.jobs(root, fields, &defaults, &inputs);
        if let Some(entry) = fields.get("hooks") {
            let job = self.within("hooks", |walk| walk.run_hooks(entry, &jobs, &defaults, &inputs));
            jobs.extend(job);
        }
        let makes = jobs.iter().any(|job| job.generate.is_some());
        self.unused_outputs(makes);
        let for_generated =
            makes.then(|| self.for_generated(&defaults, fields.get("jobs").map_or(root.span, |e| e.span)));
        let source = SourceRef { file: self.file.to_owned(), line: root.span.start.line };
        let content_hash = content_hash.to_owned();
        let workflow = Workflow {
            name: name?,
            description,
            run_name,
            source,
            content_hash,
            triggers,
            condition,
            requires,
            rules,
            env,
            secrets: secrets.unwrap_or_default(),
            approval,
            timeout_ms,
            concurrency,
            for_generated,
            jobs,
        };
        Some(Named { workflow, place })
    }

    fn conditions_of_run(&mut self, fields: Fields<'_>, inputs: &Inputs) -> (Vec<Requirement>, Vec<Rule>) {
        let requires = fields
            .get("requires")
            .map_or_else(Vec::new, |entry| self.within("requires", |walk| walk.requires(&entry.value)));
        let rules = fields.get("rules").map_or_else(Vec::new, |entry| {
            let scope = scope::workflow("rules", inputs);
            self.within("rules", |walk| walk.rules(&entry.value, "the workflow", &scope))
        });
        (requires, rules)
    }

    fn workflow_name(&mut self, fields: Fields<'_>, root: &Node, stem: &str) -> (Option<String>, Span) {
        let (name, place) = match fields.get("name") {
            Some(entry) => {
                let name = self.within("name", |walk| walk.fixed(&entry.value, "a name"));
                (name.map(str::to_owned), entry.value.span)
            }
            None => (Some(stem.to_owned()), first_line(root)),
        };
        let name = name.filter(|name| {
            let legal = is_workflow_name(name);
            if !legal {
                self.within("name", |walk| {
                    walk.fault(
                        "K0206",
                        place,
                        format!("`{}` is not a name for a workflow", crate::yaml::shorten(name)),
                    )
                    .expected(["up to 100 letters, digits, `_`, `-`, `.` and spaces, starting with a letter or digit"]);
                });
            }
            legal
        });
        (name, place)
    }

    fn dispatch_text(&mut self, fields: Fields<'_>, key: &str, inputs: &Inputs) -> Option<Value> {
        let entry = fields.get(key)?;
        let scope = scope::workflow(key, inputs);
        self.within(key, |walk| walk.template(&entry.value, &scope))
    }

    fn defaults(&mut self, node: &Node, inputs: &Inputs) -> Defaults {
        let mut defaults = Defaults::default();
        let Some(fields) = self.fields(node, &keys::DEFAULTS, "`defaults`") else { return defaults };
        if let Some(entry) = fields.get("runs_on") {
            let scope = scope::workflow("runs_on", inputs);
            defaults.runs_on = self.within("runs_on", |walk| walk.selector(&entry.value, &scope));
            defaults.broken_runs_on = defaults.runs_on.is_none();
        }
        if let Some(entry) = fields.get("shell") {
            defaults.shell = self.within("shell", |walk| walk.shell(&entry.value));
        }
        if let Some(entry) = fields.get("working_directory") {
            let scope = scope::on_agent(scope::workflow("working_directory", inputs));
            defaults.working_directory = self.within("working_directory", |walk| walk.directory(&entry.value, &scope));
        }
        if let Some(entry) = fields.get("timeout") {
            defaults.timeout_ms = self.within("timeout", |walk| walk.duration(&entry.value));
        }
        if let Some(entry) = fields.get("retry") {
            defaults.retry = self.within("retry", |walk| walk.retry(&entry.value));
        }
        if let Some(entry) = fields.get("env") {
            let scope = scope::on_agent(scope::workflow("env", inputs));
            defaults.env = self.within("env", |walk| walk.env(&entry.value, &scope, false));
        }
        if let Some(entry) = fields.get("container") {
            let scope = scope::workflow("container", inputs);
            defaults.container = self.within("container", |walk| walk.container(&entry.value, &scope));
        }
        defaults
    }

    fn jobs(&mut self, root: &Node, fields: Fields<'_>, defaults: &Defaults, inputs: &Inputs) -> Vec<Job> {
        let Some(entry) = fields.get("jobs") else {
            self.fault("K0101", first_line(root), "the workflow has no `jobs`").expected(["`jobs`, a map of jobs"]);
            return Vec::new();
        };
        self.within("jobs", |walk| {
            let entries = walk.map(&entry.value).unwrap_or_default();
            let is_map = matches!(entry.value.data, Data::Map(_));
            if is_map && !(1..=MAX_JOBS).contains(&entries.len()) {
                let message = format!("{} jobs, a workflow has 1 to {MAX_JOBS}", entries.len());
                walk.fault("K0704", entry.value.span, message);
                return Vec::new();
            }
            let known = Known::written(entries);
            let place = Place { defaults, inputs, known: &known, member: false };
            let mut jobs = Vec::new();
            let mut edges = BTreeMap::new();
            for entry in entries {
                walk.job_name(entry);
                let (needs, job) = walk.within(&entry.key, |walk| walk.job(entry, &place));
                edges.insert(entry.key.as_str(), needs);
                jobs.extend(job);
            }
            walk.cycles(&edges, entries, &known);
            jobs
        })
    }

    /// What generated jobs find. A step file that changes changes what they may become, so it counts as used.
    fn for_generated(&mut self, defaults: &Defaults, place: Span) -> ForGenerated {
        let step_files = self.library.files();
        let bytes: usize = step_files.values().map(String::len).sum();
        if bytes > MAX_STEP_FILE_BYTES {
            self.within("jobs", |walk| {
                let message = format!(
                    "the step files of the commit have {bytes} bytes; with a job that makes jobs at most \
                     {MAX_STEP_FILE_BYTES} are allowed"
                );
                walk.fault("K0704", place, message)
                    .help("generated jobs may use each of them, so a run keeps them all");
            });
        }
        self.used.extend(step_files.keys().cloned());
        let Defaults { runs_on: _, broken_runs_on: _, shell, working_directory, timeout_ms, env, container, retry } =
            defaults.clone();
        ForGenerated { shell, working_directory, timeout_ms, env, container, retry, step_files }
    }

    /// The job that runs the hooks of the workflow once all others ended.
    fn run_hooks(&mut self, entry: &Entry, jobs: &[Job], defaults: &Defaults, inputs: &Inputs) -> Option<Job> {
        let names = JobNames {
            matrix: Some(Vec::new()),
            hosts: false,
            needs: jobs.iter().map(|job| (job.name.clone(), shown(job))).collect(),
        };
        let known = Known::default();
        let place = Place { defaults, inputs, known: &known, member: false };
        let around = Around { place: &place, names: &names, job: RUN_HOOKS_JOB };
        let scope = around.scope("hooks", &[]);
        let hooks = self.hooks(&entry.value, &keys::RUN_HOOKS, "the workflow", &scope, &around);
        let Some(runs_on) = defaults.runs_on.clone() else {
            if !defaults.broken_runs_on {
                self.fault(
                    "K0101",
                    entry.span,
                    "the hooks of a workflow run in a job of their own, and no label says where",
                )
                .help("add `runs_on` under `defaults`, for example `defaults: { runs_on: default }`");
            }
            return None;
        };
        let all = || JobStatus::terminal().collect::<Vec<_>>();
        (!hooks.is_empty()).then(|| Job {
            display_name: Some(Value::fixed("hooks")),
            needs: jobs.iter().map(|job| Need::on(&job.name, all())).collect(),
            env: defaults.env.clone(),
            container: defaults.container.clone(),
            timeout_ms: Some(MAX_RUN_HOOKS_MS),
            hooks,
            ..Job::bare(RUN_HOOKS_JOB, SourceRef { file: self.file.to_owned(), line: entry.span.start.line }, runs_on)
        })
    }

    pub(super) fn job_name(&mut self, entry: &Entry) {
        let name = entry.key.as_str();
        if !super::is_job_name(name) {
            let repaired: String =
                name.to_ascii_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
            let suggestion = Some(repaired).filter(|name| super::is_job_name(name));
            self.fault("K0206", entry.span, format!("`{}` is not a name for a job", crate::yaml::shorten(name)))
                .expected(["up to 64 of a-z, 0-9, `_` and `-`, starting with a letter or digit"])
                .suggest(suggestion);
        }
    }

    fn cycles(&mut self, needs: &BTreeMap<&str, Needs>, entries: &[Entry], known: &Known) {
        let edges: BTreeMap<&str, Vec<&str>> =
            needs.iter().map(|(name, needs)| (*name, needs.upstream(known))).collect();
        self.cycle(&edges, |name| {
            entries.iter().find(|entry| entry.key == name).map_or_else(Span::default, needs_place)
        });
    }
}

/// Where a job says what it needs.
fn needs_place(job: &Entry) -> Span {
    match &job.value.data {
        Data::Map(entries) => entries.iter().find(|entry| entry.key == "needs").map_or(job.span, |entry| entry.span),
        _ => job.span,
    }
}

fn first_line(node: &Node) -> Span {
    let start = node.span.start;
    Span::on_line(start.line, start.col, 1)
}

pub(super) fn declared_inputs(triggers: &[Trigger]) -> Inputs {
    let mut names: Inputs = Vec::new();
    for trigger in triggers {
        match trigger {
            Trigger::Dispatch { inputs, .. } => names.extend(inputs.keys().cloned()),
            Trigger::Schedule { inputs, .. } => names.extend(inputs.keys().cloned()),
            _ => {}
        }
    }
    names
}

/// `[A-Za-z0-9][\w .-]{0,99}`.
fn is_workflow_name(name: &str) -> bool {
    name.chars().count() <= 100
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | ' ' | '.' | '-'))
}
