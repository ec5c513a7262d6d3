//! A job whose needs are met: run, skip or fail, and what its agent gets.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::context::{agent_wants_payload, context, rendered};
use super::{Activation, JobRef, Scope, containers, gates};
use crate::expr::{self, Context, Functions};
use crate::hosts::{Fanout, Host, OnUnreachable, Reach, pinned_selector, reach};
use crate::jobspec::JobSpec;
use crate::labels::{CanonicalLabel, CompiledSelector, LabelSet};
use crate::lock::{Hooks, Job, MAX_HOOK_MS, Matcher, Rule, Selector, Stage, Step, Value, Workflow};
use crate::state::{FailureReason, JobStatus};

/// Decides what a job does whose needs are met: its condition, its host, then its labels, then its environment. A job that the
/// workflow does not have fails with a message. `host` is the host of a job that is pinned to one; none when it is not known
/// any more.
pub fn activate(scope: Scope<'_>, job: JobRef<'_>, host: Option<&Host>) -> Activation {
    match scope.workflow.jobs.get(job.job_index) {
        Some(definition) if definition.is_run_hooks() && run_hooks(definition, job).is_empty() => {
            Activation::Skip { reason: format!("the workflow has no hook for a run that ended as {}", ending(job)) }
        }
        Some(definition) => {
            let place = job.fanout.map(|fanout| Place { fanout, host });
            decide(scope.workflow, definition, &context_of(scope, job), place)
        }
        None => Activation::Fail { reason: FailureReason::DriftDropped, message: no_such_job(job) },
    }
}

/// Where a job of a fan-out runs.
pub(super) struct Place<'a> {
    fanout: &'a Fanout,
    host: Option<&'a Host>,
}

fn context_of(scope: Scope<'_>, job: JobRef<'_>) -> Context {
    let mut context = context(scope, job.matrix, job.needs);
    if let Some(fanout) = job.fanout {
        context.set("fanout", fanout.context());
    }
    context
}

/// The same with a context that is made already: it may hold a large payload.
pub(super) fn decide(workflow: &Workflow, job: &Job, context: &Context, place: Option<Place<'_>>) -> Activation {
    let fail = |message: String| Activation::Fail { reason: FailureReason::ExprError, message };
    if let Some(condition) = &job.condition {
        match expr::eval_bool(condition, context, &Functions::default()) {
            Ok(true) => {}
            Ok(false) => return Activation::Skip { reason: format!("`if` is false: {condition}") },
            Err(error) => return fail(format!("if: {error}")),
        }
    }
    match broken_rules(&job.rules, context) {
        Ok(None) => {}
        Ok(Some(reason)) => return Activation::Skip { reason },
        Err(message) => return fail(format!("rules: {message}")),
    }
    if let Some(verdict) = place.as_ref().and_then(|place| absent(place, job.on_unreachable)) {
        return verdict;
    }
    if let Some(reason) = gates::held_back(workflow, job) {
        return Activation::Hold { reason };
    }
    if let Some(invoke) = &job.invoke {
        return gates::invocation(job, invoke, context).unwrap_or_else(fail);
    }
    let labels = match (&job.runs_on_all, &place) {
        (Some(all), Some(place)) => {
            let unknown = LabelSet::new();
            pinned_selector(all, place.host.map_or(&unknown, |host| &host.labels))
        }
        _ => job.runs_on.clone(),
    };
    let selector = match render_selector(&labels, context) {
        Ok(selector) => selector,
        Err(message) => return fail(format!("runs_on: {message}")),
    };
    let pinned = place.map(|place| place.fanout.host.clone());
    let slot = match super::context::slot(job.concurrency.as_ref(), context) {
        Ok(slot) => slot,
        Err(message) => return fail(format!("concurrency: {message}")),
    };
    // Rendered again when the job is offered; a fault shows here, before it waits for an agent.
    match environment(workflow, job, context).and_then(|_| containers::rendered(job, context)) {
        Ok(_) => Activation::Enqueue { selector, pinned, slot },
        Err(message) => fail(message),
    }
}

/// What becomes of a job whose host cannot be reached, unless it waits.
fn absent(place: &Place<'_>, policy: OnUnreachable) -> Option<Activation> {
    let name = &place.fanout.host;
    let state = place.host.map_or("not known any more".to_owned(), |host| host.status.to_string());
    match reach(place.host.map(|host| (host.lifecycle, host.status)), policy) {
        Reach::Run | Reach::Hold => None,
        Reach::Skip => Some(Activation::Skip { reason: format!("host `{name}` is {state}") }),
        Reach::Fail => Some(Activation::Fail {
            reason: FailureReason::HostUnreachable,
            message: format!("host `{name}` is {state}, and `on_unreachable` is `fail`"),
        }),
    }
}

/// The rules that do not hold, as a reason for people; none when all hold.
pub(super) fn broken_rules(rules: &[Rule], context: &Context) -> Result<Option<String>, String> {
    let mut broken = Vec::new();
    for rule in rules {
        match expr::eval_bool(&rule.condition, context, &Functions::default()) {
            Ok(true) => {}
            Ok(false) => broken.push(rule.label.as_str()),
            Err(error) => return Err(format!("{}: {error}", rule.label)),
        }
    }
    Ok((!broken.is_empty()).then(|| format!("rule does not hold: {}", broken.join("; "))))
}

/// How the jobs ended that the job of a workflow's hooks needs, which are all others.
fn ending(job: JobRef<'_>) -> &'static str {
    if job.needs.values().any(|need| need.status.is_failure()) {
        "failed"
    } else if job.needs.values().any(|need| need.status == JobStatus::Cancelled) {
        "cancelled"
    } else {
        "success"
    }
}

/// The hooks of a workflow that fit the end of its run, as steps. What runs after a failure or a cancel never changes it.
fn run_hooks(definition: &Job, job: JobRef<'_>) -> Vec<Step> {
    let hooks = &definition.hooks;
    let (first, allowed) = match ending(job) {
        "success" => (&hooks.on_success, false),
        "failed" => (&hooks.on_failure, true),
        _ => (&hooks.on_cancel, true),
    };
    let step = |condition: &str, hook: &Step| Step {
        condition: Some(condition.to_owned()),
        continue_on_error: allowed,
        timeout_ms: Some(hook.timeout_ms.unwrap_or(MAX_HOOK_MS)),
        ..hook.clone()
    };
    let first = first.iter().map(|hook| step("!cancelled()", hook));
    first.chain(hooks.cleanup.iter().map(|hook| step("always()", hook))).collect()
}

fn no_such_job(job: JobRef<'_>) -> String {
    format!("job `{}` is not in the stored workflow (position {})", job.name, job.job_index)
}

/// Renders the labels, folds them and checks that the selector compiles.
fn render_selector(selector: &Selector, context: &Context) -> Result<Selector, String> {
    let render = |matcher: &Matcher| match matcher {
        Matcher::Exact { value } => {
            let text = expr::render(value, context, &Functions::default()).map_err(|error| error.to_string())?;
            let label = CanonicalLabel::parse(&text).map_err(|error| error.to_string())?;
            Ok(Matcher::Exact { value: label.as_str().to_owned() })
        }
        Matcher::Regex { .. } => Ok(matcher.clone()),
    };
    let all = |list: &[Matcher]| list.iter().map(render).collect::<Result<Vec<_>, String>>();
    let mut rendered =
        Selector { labels: all(&selector.labels)?, exclude: all(&selector.exclude)?, pick: selector.pick };
    // Equal selectors have equal text, whichever way they were written.
    for list in [&mut rendered.labels, &mut rendered.exclude] {
        list.sort_by(|a, b| sort_key(a).cmp(&sort_key(b)));
        list.dedup();
    }
    CompiledSelector::compile(&rendered).map_err(|error| error.to_string())?;
    Ok(rendered)
}

fn sort_key(matcher: &Matcher) -> (u8, &str) {
    match matcher {
        Matcher::Exact { value } => (0, value),
        Matcher::Regex { source } => (1, source),
    }
}

/// Workflow's environment under the job's, rendered as far as the orchestrator may.
fn environment(workflow: &Workflow, job: &Job, context: &Context) -> Result<BTreeMap<String, Value>, String> {
    let mut merged: BTreeMap<&String, &Value> = workflow.env.iter().collect();
    merged.extend(job.env.iter());
    let render = |(name, value): (&String, &Value)| {
        let done = match value {
            Value::Template { stage: Stage::Agent, .. } => value.clone(),
            _ => Value::fixed(rendered(value, context).map_err(|error| format!("env {name}: {error}"))?),
        };
        Ok((name.clone(), done))
    };
    merged.into_iter().map(render).collect()
}

/// What an agent gets for a job. The environment is rendered as far as the orchestrator may; the event's payload is left out
/// unless the agent's expressions look at it.
///
/// # Errors
/// A message for the job's row (reason `expr_error`) when a template cannot be rendered; [`activate`] finds the same before.
pub fn job_spec(scope: Scope<'_>, job: JobRef<'_>) -> Result<JobSpec, String> {
    let definition = scope.workflow.jobs.get(job.job_index).ok_or_else(|| no_such_job(job))?;
    let mut context = context_of(scope, job);
    let env = environment(scope.workflow, definition, &context)?;
    let (container, services) = containers::rendered(definition, &context)?;
    if !agent_wants_payload(scope.workflow, definition)
        && let Some(Json::Object(event)) = context.get_mut("event")
    {
        event.remove("payload");
    }
    let hooked = definition.is_run_hooks();
    Ok(JobSpec {
        workflow: scope.workflow.name.clone(),
        job: job.name.to_owned(),
        env,
        variables: variables(scope, job.matrix),
        steps: if hooked { run_hooks(definition, job) } else { definition.steps.clone() },
        init: definition.init.clone(),
        cache: definition.cache.clone(),
        artifacts: definition.artifacts.clone(),
        groups: definition.groups.clone(),
        composites: definition.composites.clone(),
        hooks: if hooked { Hooks::default() } else { definition.hooks.clone() },
        check_mode: scope.event.check_mode,
        outcome: hooked.then(|| ending(job).to_owned()),
        container,
        services,
        resources: definition.resources.clone(),
        outputs: definition.outputs.clone(),
        fanout: job.fanout.cloned(),
        context: context.into_inner(),
        generate: definition.generate.is_some(),
    })
}

/// Where the files of a job go in its workspace, and what is checked out instead of the run's commit; both empty where the job
/// says nothing.
///
/// # Errors
/// A message for the job's row (reason `expr_error`).
pub fn checkout_of(scope: Scope<'_>, job: JobRef<'_>) -> Result<(String, String), String> {
    let definition = scope.workflow.jobs.get(job.job_index).ok_or_else(|| no_such_job(job))?;
    let (path, git_ref) = (&definition.checkout.path, &definition.checkout.git_ref);
    if path.is_none() && git_ref.is_none() {
        return Ok((String::new(), String::new()));
    }
    let context = context_of(scope, job);
    let text = |key: &str, value: &Option<Value>| match value {
        None => Ok(String::new()),
        Some(value) => rendered(value, &context).map_err(|error| format!("checkout.{key}: {error}")),
    };
    let (path, git_ref) = (text("path", path)?, text("ref", git_ref)?);
    if path.starts_with('/') || path.split(['/', '\\']).any(|piece| piece == "..") {
        return Err(format!("checkout.path: `{path}` leaves the workspace"));
    }
    if !git_ref.is_empty() && !crate::compile::is_ref(&git_ref) {
        return Err(format!("checkout.ref: `{git_ref}` is not a branch, tag or commit"));
    }
    Ok((path, git_ref))
}

/// `MATRIX_<NAME>` and `INPUT_<NAME>`, so that scripts need no expressions.
fn variables(scope: Scope<'_>, matrix: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let matrix = matrix.iter().map(|(name, value)| (variable("MATRIX", name), value.clone()));
    matrix.chain(input_variables(&scope.event.inputs)).collect()
}

/// `INPUT_<NAME>` of validated inputs.
pub fn input_variables(inputs: &BTreeMap<String, Json>) -> impl Iterator<Item = (String, String)> {
    inputs.iter().map(|(name, value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        (variable("INPUT", name), text)
    })
}

fn variable(prefix: &str, name: &str) -> String {
    let upper = name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' });
    format!("{prefix}_{}", upper.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_have_names_that_a_shell_accepts() {
        assert_eq!(variable("MATRIX", "rust-version"), "MATRIX_RUST_VERSION");
        assert_eq!(variable("INPUT", "größe"), "INPUT_GR__E");
    }
}
