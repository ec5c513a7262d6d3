//! What expressions see at dispatch, and which of it they ask for.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::{Needs, Scope};
use crate::concurrency::{MAX_GROUP_CHARS, SlotAsk};
use crate::expr::{Context, Expr, ExprError, Functions, Part, Template};
use crate::lock::{Action, Cache, Concurrency, Job, Matcher, Matrix, Stage, Step, Value, Workflow};

/// What expressions see at dispatch: `event`, `repo`, `ref`, `sha`, `branch`, `inputs`, `vars`, `matrix`, `needs`, `run`.
/// `repo`, `ref`, `sha` and `branch` are those of the code that runs; what the event tells of is under `event`.
/// What the event lacks is the empty text, never an unknown name; within `event` it is absent, for `has()`.
/// The payload is there if the workflow reads it.
pub fn context(scope: Scope<'_>, matrix: &BTreeMap<String, String>, needs: &Needs) -> Context {
    let event = scope.event;
    let mut shown = if wants_payload(scope.workflow) { json(event) } else { json(&event.without_payload()) };
    // An event without a document has an empty one, so that `has(event.payload.x)` is false and no fault.
    if let Some(payload @ Json::Null) = shown.get_mut("payload") {
        *payload = json!({});
    }
    let text = |value: Option<&str>| Json::from(value.unwrap_or_default());
    Context::new()
        .with("event", shown)
        .with("repo", scope.run.repo)
        .with("ref", text(scope.run.git_ref))
        .with("sha", scope.run.sha)
        .with("branch", text(scope.branch()))
        .with("inputs", json(&event.inputs))
        .with("vars", json!({}))
        .with("matrix", json(matrix))
        .with("needs", json(needs))
        .with(
            "run",
            json!({"id": scope.run.id.to_string(), "attempt": scope.run.attempt, "check_mode": event.check_mode}),
        )
}

/// A plain value as JSON; the types given here have string keys and no fallible parts.
pub(super) fn json(value: &impl Serialize) -> Json {
    serde_json::to_value(value).unwrap_or(Json::Null)
}

/// A value rendered with what is known now.
pub(super) fn rendered(value: &Value, context: &Context) -> Result<String, ExprError> {
    match value {
        Value::Static { r#static } => Ok(r#static.clone()),
        Value::Template { template, .. } => crate::expr::render(template, context, &Functions::default()),
    }
}

/// The slot that is asked for, its group rendered.
pub(super) fn slot(wanted: Option<&Concurrency>, context: &Context) -> Result<Option<SlotAsk>, String> {
    let Some(wanted) = wanted else { return Ok(None) };
    let text = rendered(&wanted.group, context).map_err(|error| error.to_string())?;
    let group = text.trim();
    let length = group.chars().count();
    if !(1..=MAX_GROUP_CHARS).contains(&length) || group.contains(char::is_control) {
        return Err(format!(
            "the group's name has {length} characters; 1 to {MAX_GROUP_CHARS} printable ones are allowed"
        ));
    }
    let (max, cancel_in_progress) = (wanted.max.max(1), wanted.cancel_in_progress);
    Ok(Some(SlotAsk { group: group.to_owned(), max, cancel_in_progress }))
}

/// True when an expression of the workflow may look at `event.payload`; only then it must be loaded for planning, activation
/// and offers.
pub fn wants_payload(workflow: &Workflow) -> bool {
    let rules = workflow.rules.iter().map(|rule| &rule.condition);
    let group = workflow.concurrency.iter().map(|concurrency| &concurrency.group);
    // What generated jobs will read is not known yet.
    if workflow.jobs.iter().any(|job| job.generate.as_ref().is_some_and(|generate| generate.members.is_none())) {
        return true;
    }
    let values = workflow.run_name.iter().chain(workflow.env.values()).chain(group);
    workflow.condition.iter().chain(rules).any(|text| expr_wants(text))
        || values.into_iter().any(value_wants)
        || workflow.jobs.iter().any(|job| dispatch_wants(job) || agent_wants(job))
}

/// Whether what the agent evaluates for a job may look at `event.payload`.
pub(super) fn agent_wants_payload(workflow: &Workflow, job: &Job) -> bool {
    let inherited = workflow.env.values().chain(job.env.values());
    inherited.filter(|value| matches!(value, Value::Template { stage: Stage::Agent, .. })).any(value_wants)
        || agent_wants(job)
}

fn dispatch_wants(job: &Job) -> bool {
    let matchers = job.runs_on.labels.iter().chain(&job.runs_on.exclude);
    let labels = matchers.filter_map(|matcher| match matcher {
        Matcher::Exact { value } => Some(value),
        Matcher::Regex { .. } => None,
    });
    job.condition.iter().chain(job.rules.iter().map(|rule| &rule.condition)).any(|text| expr_wants(text))
        || matches!(&job.matrix, Some(Matrix::Expr(text)) if template_wants(text) || expr_wants(text))
        || labels.into_iter().any(|text| template_wants(text))
        || job.display_name.iter().chain(job.env.values()).any(value_wants)
        || job.concurrency.iter().any(|concurrency| value_wants(&concurrency.group))
        || super::containers::values(job).any(value_wants)
        || job.environments.names.iter().chain(&job.environments.url).any(value_wants)
        || job.checkout.path.iter().chain(&job.checkout.git_ref).any(value_wants)
        || job
            .invoke
            .iter()
            .any(|invoke| value_wants(&invoke.event) || invoke.templates().into_iter().any(template_wants))
}

fn agent_wants(job: &Job) -> bool {
    let cached = job.cache.iter().flat_map(Cache::values);
    job.outputs.values().chain(cached).chain(job.artifacts.values()).any(value_wants)
        || job.composites.iter().any(|used| {
            used.condition.iter().any(|text| expr_wants(text))
                || used.with.values().chain(used.env.values()).chain(used.outputs.values()).any(value_wants)
        })
        || job.hooks.all().chain(&job.init).flat_map(Step::values).any(value_wants)
        || job
            .steps
            .iter()
            .any(|step| step.condition.iter().any(|text| expr_wants(text)) || step.values().any(value_wants))
        || job.steps.iter().any(|step| match &step.action {
            Action::Emit(emit) => emit.templates().into_iter().any(template_wants),
            _ => false,
        })
}

fn value_wants(value: &Value) -> bool {
    matches!(value, Value::Template { template, .. } if template_wants(template))
}

fn template_wants(text: &str) -> bool {
    // Parsing is for the few texts that mention it at all.
    text.contains("event")
        && Template::parse(text).is_ok_and(|template| {
            template.parts().iter().any(|part| matches!(part, Part::Expr { expr, .. } if reads_payload(expr)))
        })
}

fn expr_wants(text: &str) -> bool {
    text.contains("event") && Expr::parse(text).is_ok_and(|expr| reads_payload(&expr))
}

fn reads_payload(expr: &Expr) -> bool {
    expr.references().iter().any(|read| read.root == "event" && read.path.first().is_none_or(|key| key == "payload"))
}
