//! Jobs that a generator wrote: a JSON document with `jobs`, a list of jobs in the words of a workflow file, each with its
//! `name`. The same walk judges them as judges a file; a fault lies at the line of the generator, its path says which job and
//! key.

mod json;

use std::collections::BTreeSet;

use crate::diagnostic::{Diagnostic, render_short};
use crate::hosts::HostSelector;
use crate::labels::{AgentFacts, CanonicalLabel, CompiledSelector, eligible};
use crate::lock::{
    Composite, ForGenerated, Generate, Group, Hooks, Job, MAX_GENERATED_BYTES, MAX_GENERATED_JOBS, Matcher, Selector,
    SourceRef, Value, Workflow,
};
use crate::yaml::{Data, Entry, Lines, Node, Span};

use super::composite::Library;
use super::job::{Defaults, Place};
use super::keys;
use super::known::Known;
use super::walk::Walk;
use super::workflow::declared_inputs;

/// A document of a generator that cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum FragmentError {
    /// Over [`MAX_GENERATED_BYTES`].
    #[error("the document in $KICI_JOBS has {0} bytes; at most {MAX_GENERATED_BYTES} are allowed")]
    TooLarge(usize),
    /// Not JSON.
    #[error("the document in $KICI_JOBS is not JSON: {0}; write {{\"jobs\": […]}}")]
    Json(String),
    /// What is wrong with its jobs, by place; at most [`super::MAX_DIAGNOSTICS`].
    #[error("{}", summary(.0))]
    Jobs(Vec<Diagnostic>),
    /// The job that wrote it is no generator.
    #[error("job `{0}` has no `generate`")]
    NoGenerator(String),
}

/// How many faults a message names.
const SHOWN: usize = 5;

fn summary(faults: &[Diagnostic]) -> String {
    let named = faults.iter().take(SHOWN).map(|fault| {
        let line = render_short(fault);
        // The place is that of the generator for all of them.
        let text = line.split_once("error[").map_or(line.as_str(), |(_, rest)| rest);
        format!("{}: [{text}", fault.path)
    });
    let more = faults.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!("the document in $KICI_JOBS: {}{more}", named.collect::<Vec<_>>().join("; "))
}

/// Compiles the document that the generator `job` of `workflow` wrote. What its jobs need is looked up among them and the jobs
/// of the workflow; see [`crate::plan::merge`] for what follows.
///
/// # Errors
/// [`FragmentError`]; then none of the jobs may be used.
pub fn compile_fragment(workflow: &Workflow, job: usize, document: &[u8]) -> Result<Vec<Job>, FragmentError> {
    if document.len() > MAX_GENERATED_BYTES {
        return Err(FragmentError::TooLarge(document.len()));
    }
    let found = workflow.jobs.get(job).and_then(|job| Some((job, job.generate.as_ref()?)));
    let Some((generator, generate)) = found else {
        let name = workflow.jobs.get(job).map(|job| job.name.clone());
        return Err(FragmentError::NoGenerator(name.unwrap_or_else(|| job.to_string())));
    };
    let source = &generator.source;
    let span = Span::on_line(source.line, 1, 1);
    let root = json::read(document, span).map_err(FragmentError::Json)?;
    let files: Vec<(String, String)> = workflow.for_generated.iter().flat_map(|had| had.step_files.clone()).collect();
    let (lines, library) = (Lines::new(""), Library::new(&files));
    let mut walk = Walk::new(&source.file, &lines, &library);
    let jobs = walk.fragment(&root, workflow, generator, generate);
    let failed = walk.errors > 0;
    let (diagnostics, _) = walk.finish();
    if failed {
        let faults = diagnostics.into_iter().filter(Diagnostic::is_error).collect();
        return Err(FragmentError::Jobs(faults));
    }
    Ok(jobs.into_iter().map(|job| placed(job, source)).collect())
}

/// The job with every line that of its generator, but for what stands in step files.
fn placed(mut job: Job, source: &SourceRef) -> Job {
    job.source = source.clone();
    let own = |used: &&mut Composite| used.parent.is_none();
    job.composites.iter_mut().filter(own).for_each(|used| used.source = source.clone());
    let Hooks { on_success, on_failure, on_cancel, cleanup, before_step, after_step } = &mut job.hooks;
    let lists = [&mut job.init, &mut job.steps, on_success, on_failure, on_cancel, cleanup, before_step, after_step];
    for step in lists.into_iter().flatten().filter(|step| step.composite.is_none()) {
        for hook in step.on_cancel.iter_mut().chain(&mut step.cleanup) {
            hook.source = source.clone();
        }
        step.source = source.clone();
    }
    let in_file = |group: &&mut Group| group.source.file == source.file;
    job.groups.iter_mut().filter(in_file).for_each(|group| group.source = source.clone());
    job
}

impl Walk<'_> {
    fn fragment(&mut self, root: &Node, workflow: &Workflow, generator: &Job, generate: &Generate) -> Vec<Job> {
        let Some(fields) = self.fields(root, &keys::FRAGMENT, "the document in $KICI_JOBS") else { return Vec::new() };
        let Some(entry) = fields.get("jobs") else {
            self.fault("K0101", root.span, "the document in $KICI_JOBS has no `jobs`")
                .expected(["`jobs`, a list of jobs"]);
            return Vec::new();
        };
        self.within("jobs", |walk| {
            let items = walk.list(&entry.value, "jobs").unwrap_or_default();
            if !walk.bounded(items.len(), MAX_GENERATED_JOBS, "generated jobs", entry.span) {
                return Vec::new();
            }
            let named =
                |(index, item): (usize, &Node)| walk.within(index.to_string(), |walk| walk.named(item, workflow));
            let entries: Vec<Entry> = items.iter().enumerate().filter_map(named).collect();
            walk.twice(&entries);
            let mut known = Known::compiled(workflow);
            known.add_written(&entries);
            let defaults = inherited(workflow, generator);
            let inputs = declared_inputs(&workflow.triggers);
            let place = Place { defaults: &defaults, inputs: &inputs, known: &known, member: true };
            let mut jobs = Vec::new();
            for entry in &entries {
                walk.job_name(entry);
                let job = walk.within(&entry.key, |walk| {
                    let (_, job) = walk.job(entry, &place);
                    let job = job?;
                    walk.allowed_only(&job, generate, generator, entry.span);
                    Some(job)
                });
                jobs.extend(job);
            }
            jobs
        })
    }

    /// A job of the list as an entry of a map of jobs: its `name` is its key.
    fn named(&mut self, node: &Node, workflow: &Workflow) -> Option<Entry> {
        let entries = self.map(node)?;
        let Some(name) = entries.iter().find(|entry| entry.key == "name") else {
            self.fault("K0101", node.span, "the job has no `name`").expected(["`name`, unique in the run"]);
            return None;
        };
        let key = self.within("name", |walk| walk.fixed(&name.value, "a name").map(str::to_owned))?;
        if workflow.jobs.iter().any(|job| job.name == key) {
            let message = format!("`{}` is the name of another job of the run", crate::yaml::shorten(&key));
            self.within("name", |walk| {
                walk.fault("K0304", name.span, message);
            });
        }
        let kept = entries.iter().filter(|entry| entry.key != "name").cloned().collect();
        Some(Entry { key, span: node.span, value: Node { span: node.span, data: Data::Map(kept) } })
    }

    fn twice(&mut self, entries: &[Entry]) {
        let mut seen = BTreeSet::new();
        for entry in entries.iter().filter(|entry| !seen.insert(entry.key.as_str())) {
            let message = format!("two jobs have the name `{}`", crate::yaml::shorten(&entry.key));
            self.fault("K0304", entry.span, message);
        }
    }

    /// Refuses what the workflow does not allow to generated jobs.
    fn allowed_only(&mut self, job: &Job, generate: &Generate, generator: &Job, span: Span) {
        let allow = &generate.allow;
        for name in &job.environments.names {
            let (Value::Static { r#static: text } | Value::Template { template: text, .. }) = name;
            let fixed = matches!(name, Value::Static { .. });
            if !fixed || !allow.environments.contains(text) {
                self.outside("environment", text, "allow.environments", fixed, span);
            }
        }
        let of_steps = job.steps.iter().chain(job.hooks.all()).chain(&job.init).flat_map(|step| step.secrets.values());
        let wanted: BTreeSet<&String> = job.secrets.values().chain(of_steps).collect();
        for secret in wanted.into_iter().filter(|secret| !allow.secrets.contains(secret)) {
            self.outside("secrets", secret, "allow.secrets", true, span);
        }
        let own = &generator.runs_on.labels;
        let asked = |selector: &HostSelector| selector.include.iter().flatten().cloned().collect::<Vec<_>>();
        let (key, matchers) = match &job.runs_on_all {
            Some(hosts) => ("runs_on_all", asked(hosts)),
            // Where its generator runs, whatever is allowed besides.
            None if job.runs_on.labels == *own => return,
            None => ("runs_on", job.runs_on.labels.clone()),
        };
        let labels = allow.runs_on.as_ref().unwrap_or(own);
        for matcher in matchers {
            let text = match &matcher {
                Matcher::Exact { value } => value.as_str(),
                Matcher::Regex { source } => source.as_str(),
            };
            let fixed = !text.contains("${{");
            if !fixed || !covered(&matcher, labels) {
                self.outside(key, text, "allow.runs_on", fixed, span);
            }
        }
        if job.invoke.is_none() && job.runs_on_all.is_none() && job.runs_on.labels.is_empty() {
            self.outside(key, "no label", "allow.runs_on", true, span);
        }
    }

    fn outside(&mut self, key: &str, what: &str, list: &str, fixed: bool, span: Span) {
        let what = crate::yaml::shorten(what).to_string();
        self.within(key, |walk| {
            if fixed {
                walk.fault("K0605", span, format!("`{what}` is not allowed to generated jobs"))
                    .help(format!("add it to `{list}` of the generator, in the workflow"));
            } else {
                walk.fault("K0605", span, format!("`{what}` must be written out in a generated job"))
                    .help("what it asks for is judged before any expression is evaluated");
            }
        });
    }
}

/// What generated jobs have where they say nothing: what other jobs of the workflow have, and they run where their generator
/// does.
fn inherited(workflow: &Workflow, generator: &Job) -> Defaults {
    let runs_on = (generator.runs_on != Selector::default()).then(|| generator.runs_on.clone());
    let ForGenerated { shell, working_directory, timeout_ms, env, container, retry, step_files: _ } =
        workflow.for_generated.clone().unwrap_or_default();
    Defaults { runs_on, broken_runs_on: false, shell, working_directory, timeout_ms, env, container, retry }
}

/// Whether an allowed label says as much as this one, or more.
fn covered(wanted: &Matcher, allowed: &[Matcher]) -> bool {
    allowed.iter().any(|one| match (wanted, one) {
        (Matcher::Exact { value }, Matcher::Regex { .. }) => {
            let selector = Selector { labels: vec![one.clone()], ..Selector::default() };
            let agent =
                CanonicalLabel::parse(value).map(|label| AgentFacts { labels: [label].into(), ..Default::default() });
            agent.is_ok_and(|agent| {
                CompiledSelector::compile(&selector).is_ok_and(|compiled| eligible(&compiled, None, &agent).is_ok())
            })
        }
        (wanted, one) => wanted == one,
    })
}

#[cfg(test)]
mod tests;
