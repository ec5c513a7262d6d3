//! What each type of trigger asks of an event (R22, R23).

use super::checks::{Checked, Checks, Stop};
use crate::condition;
use crate::cron::Cron;
use crate::event::EventKind;
use crate::inputs;
use crate::lock::Trigger;
use crate::pattern::Patterns;

/// A comment is matched up to here, in bytes (R25).
const MAX_BODY_BYTES: usize = 64 * 1024;

/// The type of a trigger, as in the lock.
pub fn kind_name(trigger: &Trigger) -> &'static str {
    match trigger {
        Trigger::Push { .. } => "push",
        Trigger::Pr { .. } => "pr",
        Trigger::Tag { .. } => "tag",
        Trigger::Comment { .. } => "comment",
        Trigger::Review { .. } => "review",
        Trigger::ReviewComment { .. } => "review_comment",
        Trigger::Release { .. } => "release",
        Trigger::Dispatch { .. } => "dispatch",
        Trigger::Create { .. } => "create",
        Trigger::Delete { .. } => "delete",
        Trigger::Status { .. } => "status",
        Trigger::WorkflowRun { .. } => "workflow_run",
        Trigger::Fork {} => "fork",
        Trigger::Star { .. } => "star",
        Trigger::Watch { .. } => "watch",
        Trigger::Webhook { .. } => "webhook",
        Trigger::KiciEvent { .. } => "kici_event",
        Trigger::WorkflowComplete { .. } => "workflow_complete",
        Trigger::JobComplete { .. } => "job_complete",
        Trigger::WorkflowsFailedBatch { .. } => "workflows_failed_batch",
        Trigger::GenericWebhook { .. } => "generic_webhook",
        Trigger::Schedule { .. } => "schedule",
        Trigger::Lifecycle { .. } => "lifecycle",
    }
}

pub(super) fn evaluate(trigger: &Trigger, on: &mut Checks<'_>) -> Checked {
    let event = on.event;
    let action = event.action.as_deref();
    match trigger {
        Trigger::Push { branches, paths, repos } => {
            on.kind(EventKind::Push)?;
            on.patterns("branches", branches, event.target_branch.as_deref())?;
            on.patterns("repos", repos, event.repo.as_deref())?;
            on.paths(paths)
        }
        Trigger::Pr { actions, branches, source_branches, paths, repos } => {
            on.kind(EventKind::Pr)?;
            on.words_or("types", actions, &["opened", "synchronize", "reopened"], action)?;
            on.patterns("branches", branches, event.target_branch.as_deref())?;
            on.patterns("source_branches", source_branches, event.source_branch.as_deref())?;
            on.patterns("repos", repos, event.repo.as_deref())?;
            on.paths(paths)
        }
        Trigger::Tag { tags, repos } => {
            on.kind(EventKind::Tag)?;
            on.patterns("tags", tags, event.tag.as_deref())?;
            on.patterns("repos", repos, event.repo.as_deref())
        }
        Trigger::Comment { actions, target, body } => {
            on.kind(EventKind::Comment)?;
            on.words_or("types", actions, &["created"], action)?;
            comment(target.as_deref(), body, on)
        }
        Trigger::Review { actions, states } => {
            on.kind(EventKind::Review)?;
            on.words("types", actions, action)?;
            on.words("states", states, on.payload(&["/review/state"]))
        }
        Trigger::ReviewComment { actions } => simple(EventKind::ReviewComment, actions, on),
        Trigger::Release { actions } => {
            on.kind(EventKind::Release)?;
            on.words_or("types", actions, &["published"], action)
        }
        Trigger::Dispatch { types, manual, .. } => dispatch(types, *manual, on),
        Trigger::Create { ref_type, refs } => {
            on.kind(EventKind::Create)?;
            reference(ref_type.as_deref(), refs, on)
        }
        Trigger::Delete { ref_type, refs } => {
            on.kind(EventKind::Delete)?;
            reference(ref_type.as_deref(), refs, on)
        }
        Trigger::Status { contexts, states } => {
            on.kind(EventKind::Status)?;
            on.patterns("contexts", contexts, on.payload(&["/context"]))?;
            on.words("states", states, on.payload(&["/state"]))
        }
        Trigger::WorkflowRun { actions, workflows, conclusions } => {
            on.kind(EventKind::WorkflowRun)?;
            on.words("types", actions, action)?;
            on.patterns("workflows", workflows, on.payload(&["/workflow_run/name", "/workflow/name"]))?;
            on.words("conclusions", conclusions, on.payload(&["/workflow_run/conclusion"]))
        }
        Trigger::Fork {} => on.kind(EventKind::Fork),
        Trigger::Star { actions } => simple(EventKind::Star, actions, on),
        Trigger::Watch { actions } => simple(EventKind::Watch, actions, on),
        Trigger::Webhook { events, actions } => {
            on.fact("event", "an event of a forge", event.kind, is_forge_event(event.kind))?;
            // Unlike a list that filters, an empty list of names selects nothing.
            let named = events.contains(&event.raw_name);
            on.fact("events", events.join(", "), &event.raw_name, named)?;
            on.words("types", actions, action)
        }
        internal => evaluate_internal(internal, on),
    }
}

/// The triggers on events that do not come from a forge.
fn evaluate_internal(trigger: &Trigger, on: &mut Checks<'_>) -> Checked {
    let event = on.event;
    let repo = event.repo.as_deref();
    match trigger {
        Trigger::GenericWebhook { source, events, r#match, not } => {
            on.kind(EventKind::Hook)?;
            on.fact("source", source, &event.source, *source == event.source)?;
            if !events.is_empty() {
                let named = events.contains(&event.raw_name);
                on.fact("events", events.join(", "), &event.raw_name, named)?;
            }
            on.conditions(r#match, not)
        }
        Trigger::KiciEvent { name, r#match, not, source } => {
            on.kind(EventKind::KiciEvent)?;
            on.fact("name", name, &event.raw_name, *name == event.raw_name)?;
            on.patterns("source", source, repo)?;
            on.conditions(r#match, not)
        }
        Trigger::WorkflowComplete { workflow, status, source } => {
            on.kind(EventKind::WorkflowComplete)?;
            on.patterns("workflow", workflow, on.payload(&["/workflow"]))?;
            on.words("status", status, on.payload(&["/status"]))?;
            on.patterns("source", source, repo)
        }
        Trigger::JobComplete { workflow, job, status, source } => {
            on.kind(EventKind::JobComplete)?;
            on.patterns("workflow", workflow, on.payload(&["/workflow"]))?;
            on.patterns("job", job, on.payload(&["/job"]))?;
            on.words("status", status, on.payload(&["/status"]))?;
            on.patterns("source", source, repo)
        }
        Trigger::WorkflowsFailedBatch { workflows, .. } => {
            on.kind(EventKind::WorkflowsFailedBatch)?;
            let failed = event.payload.get("workflows").and_then(|list| list.as_array());
            let names: Vec<&str> = failed.into_iter().flatten().filter_map(|name| name.as_str()).collect();
            on.any_pattern("workflows", workflows, &names)
        }
        Trigger::Schedule { cron, timezone, .. } => {
            on.kind(EventKind::Schedule)?;
            let fired = |key| on.payload(&[key]).unwrap_or("absent");
            let (fired_cron, fired_zone) = (fired("/cron"), fired("/timezone"));
            on.fact("cron", cron, fired_cron, cron == fired_cron)?;
            on.fact("timezone", timezone, fired_zone, timezone == fired_zone)
        }
        Trigger::Lifecycle { events, sources } => {
            on.kind(EventKind::Lifecycle)?;
            let named = events.contains(&event.raw_name);
            on.fact("events", events.join(", "), &event.raw_name, named)?;
            on.patterns("sources", sources, repo)
        }
        _ => Err(Stop::No),
    }
}

fn simple(kind: EventKind, actions: &[String], on: &mut Checks<'_>) -> Checked {
    on.kind(kind)?;
    on.words("types", actions, on.event.action.as_deref())
}

/// A person may start `manual` triggers, and `dispatch` ones that ask for no type; the forge only the latter kind.
fn dispatch(types: &[String], manual: bool, on: &mut Checks<'_>) -> Checked {
    let kind = on.event.kind;
    if kind == EventKind::Manual {
        return on.fact("event", if manual { "manual" } else { "dispatch" }, kind, manual || types.is_empty());
    }
    let wanted = if manual { EventKind::Manual } else { EventKind::Dispatch };
    on.kind(wanted)?;
    on.words("types", types, on.event.action.as_deref())
}

fn comment(target: Option<&str>, body: &[String], on: &mut Checks<'_>) -> Checked {
    if let Some(target) = target {
        let payload = &on.event.payload;
        let of_pr = ["/issue/pull_request", "/pull_request", "/merge_request"]
            .iter()
            .any(|pointer| payload.pointer(pointer).is_some_and(serde_json::Value::is_object))
            || payload.get("is_pull").and_then(serde_json::Value::as_bool) == Some(true);
        let have = if of_pr { "pr" } else { "issue" };
        on.fact("target", target, have, target == have)?;
    }
    let text = on.payload(&["/comment/body", "/object_attributes/note"]).unwrap_or_default();
    let end = (0..=MAX_BODY_BYTES.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    on.patterns("body", body, Some(&text[..end]))
}

/// `ref_type` and `refs` of created and deleted refs. The kind follows from the full ref where there is one.
fn reference(ref_type: Option<&str>, refs: &[String], on: &mut Checks<'_>) -> Checked {
    let full = on.event.git_ref.as_deref();
    let (kind, name) = match full {
        Some(text) if text.starts_with("refs/tags/") => ("tag", text.strip_prefix("refs/tags/")),
        Some(text) if text.starts_with("refs/heads/") => ("branch", text.strip_prefix("refs/heads/")),
        other => (on.payload(&["/ref_type"]).unwrap_or("branch"), other.or_else(|| on.payload(&["/ref"]))),
    };
    if let Some(wanted) = ref_type {
        on.fact("ref_type", wanted, kind, wanted == kind)?;
    }
    on.patterns("refs", refs, name)
}

/// Events that come from a forge under a name of its own, which `webhook` triggers see.
fn is_forge_event(kind: EventKind) -> bool {
    use EventKind::*;
    !matches!(
        kind,
        Manual | Hook | KiciEvent | WorkflowComplete | JobComplete | WorkflowsFailedBatch | Schedule | Lifecycle
    )
}

/// A filter of a trigger that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{trigger} trigger, `{key}`: {problem}")]
pub struct TriggerError {
    /// Type of the trigger.
    pub trigger: &'static str,
    /// Key of the filter.
    pub key: &'static str,
    /// What is wrong with it.
    pub problem: String,
}

/// Checks every pattern, condition and input of a trigger. For locks that come from elsewhere (R25).
///
/// # Errors
/// The first filter that does not compile.
pub fn validate(trigger: &Trigger) -> Result<(), TriggerError> {
    let kind = kind_name(trigger);
    let fail = |key, problem: String| TriggerError { trigger: kind, key, problem };
    for (key, list) in pattern_lists(trigger) {
        Patterns::compile(list).map_err(|error| fail(key, error.to_string()))?;
    }
    match trigger {
        Trigger::KiciEvent { r#match, not, .. } | Trigger::GenericWebhook { r#match, not, .. } => {
            condition::compile_all(r#match).map_err(|error| fail("match", error.to_string()))?;
            condition::compile_all(not).map_err(|error| fail("not", error.to_string()))?;
        }
        Trigger::Schedule { cron, timezone, .. } => {
            Cron::parse(cron, timezone).map_err(|error| fail("cron", error.to_string()))?;
        }
        Trigger::Dispatch { inputs, .. } => {
            for (name, input) in inputs {
                inputs::check_declaration(name, input).map_err(|error| fail("inputs", error.to_string()))?;
            }
        }
        _ => {}
    }
    Ok(())
}

fn pattern_lists(trigger: &Trigger) -> Vec<(&'static str, &Vec<String>)> {
    match trigger {
        Trigger::Push { branches, paths, repos } => vec![("branches", branches), ("paths", paths), ("repos", repos)],
        Trigger::Pr { branches, source_branches, paths, repos, .. } => {
            vec![("branches", branches), ("source_branches", source_branches), ("paths", paths), ("repos", repos)]
        }
        Trigger::Tag { tags, repos } => vec![("tags", tags), ("repos", repos)],
        Trigger::Comment { body, .. } => vec![("body", body)],
        Trigger::Create { refs, .. } | Trigger::Delete { refs, .. } => vec![("refs", refs)],
        Trigger::Status { contexts, .. } => vec![("contexts", contexts)],
        Trigger::WorkflowRun { workflows, .. } | Trigger::WorkflowsFailedBatch { workflows, .. } => {
            vec![("workflows", workflows)]
        }
        Trigger::KiciEvent { source, .. } => vec![("source", source)],
        Trigger::WorkflowComplete { workflow, source, .. } => vec![("workflow", workflow), ("source", source)],
        Trigger::JobComplete { workflow, job, source, .. } => {
            vec![("workflow", workflow), ("job", job), ("source", source)]
        }
        Trigger::Lifecycle { sources, .. } => vec![("sources", sources)],
        _ => Vec::new(),
    }
}
