//! Jobs that do not go to an agent when their needs are met: those that are held, and those that start other workflows.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use super::Activation;
use super::context::{rendered, slot};
use crate::event_name;
use crate::expr::{Context, Functions, Template};
use crate::lock::{Invoke, Job, Workflow};

/// Why a job must not run on this version: it asks for what is not there, and running it as if it had not asked would be wrong.
/// None: it asks for nothing of that kind.
pub fn held_back(workflow: &Workflow, job: &Job) -> Option<String> {
    let steps = || job.steps.iter().chain(job.hooks.all()).chain(&job.init);
    let mut asks: BTreeSet<&str> = BTreeSet::new();
    if !job.environments.is_empty() {
        asks.insert("`environment`");
    }
    if workflow.approval.is_some() || job.approval.is_some() || steps().any(|step| step.approval.is_some()) {
        asks.insert("`approval`");
    }
    if !workflow.secrets.is_empty() || !job.secrets.is_empty() || steps().any(|step| !step.secrets.is_empty()) {
        asks.insert("`secrets`");
    }
    let asks: Vec<&str> = asks.into_iter().collect();
    let named = match asks.as_slice() {
        [] => return None,
        [one] => (*one).to_owned(),
        [most @ .., last] => format!("{} and {last}", most.join(", ")),
    };
    Some(format!(
        "held: it asks for {named}, which this version cannot give yet; it never runs as if it had not asked. Cancel the run, \
         or take the keys out of the workflow"
    ))
}

/// What a job with `invoke` does.
pub(super) fn invocation(job: &Job, invoke: &Invoke, context: &Context) -> Result<Activation, String> {
    let event = rendered(&invoke.event, context).map_err(|error| format!("invoke.event: {error}"))?;
    event_name::check(&event).map_err(|error| format!("invoke.event: {error}"))?;
    let payload = document(&invoke.payload, context).map_err(|error| format!("invoke.payload: {error}"))?;
    let slot = slot(job.concurrency.as_ref(), context).map_err(|error| format!("concurrency: {error}"))?;
    Ok(Activation::Invoke { event, payload, slot })
}

/// A document with its templates rendered; one that is a single expression stands for its value.
fn document(json: &Json, context: &Context) -> Result<Json, String> {
    Ok(match json {
        Json::String(text) if text.contains("${{") => {
            let template = Template::parse(text).map_err(|error| error.to_string())?;
            let value = match template.sole() {
                Some(expr) => expr.eval_json(context, &Functions::default()),
                None => template.render(context, &Functions::default()).map(Json::String),
            };
            value.map_err(|error| error.to_string())?
        }
        Json::Array(items) => Json::Array(items.iter().map(|item| document(item, context)).collect::<Result<_, _>>()?),
        Json::Object(fields) => Json::Object(
            fields
                .iter()
                .map(|(name, field)| Ok((name.clone(), document(field, context)?)))
                .collect::<Result<_, String>>()?,
        ),
        plain => plain.clone(),
    })
}
