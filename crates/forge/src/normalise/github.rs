//! GitHub's webhooks. <https://docs.github.com/en/webhooks/webhook-events-and-payloads>

use std::collections::BTreeMap;

use kici_engine::event::{Event, EventKind, ForkState, Sender};
use serde_json::Value as Json;

use super::body::{at, document, text};
use super::{BodyError, Normalised, blank, set_pushed_ref};
use crate::headers::Headers;
use crate::source::Source;

/// Events without a trigger of their own: `webhook` triggers see them. GitHub's list of 2025 without those that
/// [`kind_of`] names.
const OTHERS: &[&str] = &[
    "branch_protection_configuration",
    "branch_protection_rule",
    "check_run",
    "check_suite",
    "code_scanning_alert",
    "commit_comment",
    "custom_property",
    "custom_property_values",
    "dependabot_alert",
    "deploy_key",
    "deployment",
    "deployment_protection_rule",
    "deployment_review",
    "deployment_status",
    "discussion",
    "discussion_comment",
    "github_app_authorization",
    "gollum",
    "installation",
    "installation_repositories",
    "installation_target",
    "issue_dependencies",
    "issue_type",
    "issues",
    "label",
    "marketplace_purchase",
    "member",
    "membership",
    "merge_group",
    "meta",
    "milestone",
    "org_block",
    "organization",
    "package",
    "page_build",
    "personal_access_token_request",
    "project",
    "project_card",
    "project_column",
    "projects_v2",
    "projects_v2_item",
    "projects_v2_status_update",
    "public",
    "pull_request_review_thread",
    "registry_package",
    "repository",
    "repository_advisory",
    "repository_import",
    "repository_ruleset",
    "repository_vulnerability_alert",
    "secret_scanning_alert",
    "secret_scanning_alert_location",
    "secret_scanning_scan",
    "security_advisory",
    "security_and_analysis",
    "sponsorship",
    "sub_issues",
    "team",
    "team_add",
    "workflow_dispatch",
    "workflow_job",
];

fn kind_of(name: &str) -> Option<EventKind> {
    Some(match name {
        "push" => EventKind::Push,
        "pull_request" => EventKind::Pr,
        "issue_comment" => EventKind::Comment,
        "pull_request_review" => EventKind::Review,
        "pull_request_review_comment" => EventKind::ReviewComment,
        "release" => EventKind::Release,
        "repository_dispatch" => EventKind::Dispatch,
        "create" => EventKind::Create,
        "delete" => EventKind::Delete,
        "status" => EventKind::Status,
        "workflow_run" => EventKind::WorkflowRun,
        "fork" => EventKind::Fork,
        "star" => EventKind::Star,
        "watch" => EventKind::Watch,
        other if OTHERS.contains(&other) => EventKind::Other,
        _ => return None,
    })
}

pub(super) fn normalise(source: &Source, headers: &Headers, raw: &[u8]) -> Result<Normalised, BodyError> {
    let Some(name) = headers.get("x-github-event") else {
        return Ok(Normalised::Ignored("no x-github-event header".to_owned()));
    };
    let payload = document(headers, raw)?;
    if name == "ping" {
        return Ok(Normalised::Ignored("ping: GitHub checks that the address answers".to_owned()));
    }
    let Some(kind) = kind_of(name) else {
        return Ok(Normalised::Ignored(format!("unknown GitHub event `{name}`")));
    };
    let mut event = blank(source, kind, name);
    common(&mut event, &payload);
    let ignored = match kind {
        EventKind::Push => push(&mut event, &payload)?,
        EventKind::Pr | EventKind::Review | EventKind::ReviewComment => {
            pull_request(&mut event, &payload)?;
            None
        }
        EventKind::Create | EventKind::Delete => {
            named_ref(&mut event, &payload)?;
            None
        }
        _ => {
            details(&mut event, &payload)?;
            None
        }
    };
    if let Some(reason) = ignored {
        return Ok(Normalised::Ignored(reason));
    }
    event.payload = payload;
    Ok(Normalised::Event(Box::new(event)))
}

fn owned(payload: &Json, path: &str) -> Option<String> {
    text(payload, path).map(str::to_owned)
}

fn required(event: &Event, payload: &Json, field: &'static str) -> Result<String, BodyError> {
    owned(payload, field).ok_or_else(|| BodyError::Missing { event: event.raw_name.clone(), field })
}

fn common(event: &mut Event, payload: &Json) {
    event.action = owned(payload, "action");
    event.repo = owned(payload, "repository.full_name");
    event.default_branch =
        owned(payload, "repository.default_branch").or_else(|| owned(payload, "repository.master_branch"));
    let id = at(payload, "sender.id").and_then(Json::as_u64);
    event.sender = Sender { username: owned(payload, "sender.login"), user_id: id.map(|id| id.to_string()) };
}

fn push(event: &mut Event, payload: &Json) -> Result<Option<String>, BodyError> {
    let git_ref = required(event, payload, "ref")?;
    let after = required(event, payload, "after")?;
    let before = owned(payload, "before");
    if let Some(reason) = set_pushed_ref(event, &git_ref, before.as_deref(), &after) {
        return Ok(Some(reason));
    }
    event.commit_message = owned(payload, "head_commit.message");
    // For an annotated tag `after` is the tag object; what is built is the commit.
    if event.kind == EventKind::Tag
        && let Some(commit) = owned(payload, "head_commit.id")
    {
        event.sha = Some(commit);
    }
    Ok(None)
}

fn pull_request(event: &mut Event, payload: &Json) -> Result<(), BodyError> {
    let number = at(payload, "pull_request.number").and_then(Json::as_u64);
    let number = number.ok_or(BodyError::Missing { event: event.raw_name.clone(), field: "pull_request.number" })?;
    event.pr_number = Some(number);
    // The base repository has this ref also for commits of a fork.
    event.git_ref = Some(format!("refs/pull/{number}/head"));
    event.sha = Some(required(event, payload, "pull_request.head.sha")?);
    event.source_branch = owned(payload, "pull_request.head.ref");
    event.target_branch = Some(required(event, payload, "pull_request.base.ref")?);
    event.base_sha = owned(payload, "pull_request.base.sha");
    event.is_fork_pr = fork_state(payload, "pull_request.head.repo.id", "pull_request.base.repo.id");
    Ok(())
}

/// Compares repository ids. A repository that is gone (`head.repo` null) is unknown, and unknown counts as a fork.
fn fork_state(payload: &Json, head: &str, base: &str) -> ForkState {
    match (at(payload, head).and_then(Json::as_u64), at(payload, base).and_then(Json::as_u64)) {
        (Some(head), Some(base)) if head == base => ForkState::No,
        (Some(_), Some(_)) => ForkState::Yes,
        _ => ForkState::Unknown,
    }
}

fn named_ref(event: &mut Event, payload: &Json) -> Result<(), BodyError> {
    let name = required(event, payload, "ref")?;
    match required(event, payload, "ref_type")?.as_str() {
        "tag" => {
            event.git_ref = Some(format!("refs/tags/{name}"));
            event.tag = Some(name);
        }
        "branch" => {
            event.git_ref = Some(format!("refs/heads/{name}"));
            event.target_branch = Some(name);
        }
        // `repository` in payloads of 2013 and before: nothing to name.
        _ => {}
    }
    Ok(())
}

fn set_branch(event: &mut Event, branch: Option<String>) {
    event.git_ref = branch.as_ref().map(|b| format!("refs/heads/{b}"));
    event.target_branch = branch;
}

fn details(event: &mut Event, payload: &Json) -> Result<(), BodyError> {
    match event.raw_name.as_str() {
        "issue_comment" => {
            event.pr_number = at(payload, "issue.number").and_then(Json::as_u64);
            if at(payload, "issue.pull_request").is_some() {
                event.is_fork_pr = ForkState::Unknown;
            }
        }
        "release" => {
            let tag = required(event, payload, "release.tag_name")?;
            event.git_ref = Some(format!("refs/tags/{tag}"));
            event.tag = Some(tag);
        }
        "repository_dispatch" => {
            set_branch(event, owned(payload, "branch").or_else(|| event.default_branch.clone()));
            event.inputs = object(at(payload, "client_payload"));
        }
        "workflow_dispatch" => {
            let git_ref = owned(payload, "ref");
            let branch = git_ref.as_deref().and_then(|r| r.strip_prefix("refs/heads/"));
            event.target_branch = branch.map(str::to_owned);
            event.git_ref = git_ref;
            event.inputs = object(at(payload, "inputs"));
        }
        "status" => {
            event.sha = Some(required(event, payload, "sha")?);
            event.commit_message = owned(payload, "commit.commit.message");
            let branches = at(payload, "branches").and_then(Json::as_array);
            if let Some([only]) = branches.map(Vec::as_slice) {
                set_branch(event, owned(only, "name"));
            }
        }
        "workflow_run" => run_of(event, payload, "workflow_run"),
        "check_run" => {
            run_of(event, payload, "check_run");
            if event.target_branch.is_none() {
                set_branch(event, owned(payload, "check_run.check_suite.head_branch"));
            }
        }
        "check_suite" => run_of(event, payload, "check_suite"),
        "merge_group" => {
            event.sha = owned(payload, "merge_group.head_sha");
            event.base_sha = owned(payload, "merge_group.base_sha");
            event.git_ref = owned(payload, "merge_group.head_ref");
            let base = owned(payload, "merge_group.base_ref");
            event.target_branch = base.map(|b| b.strip_prefix("refs/heads/").map_or(b.clone(), str::to_owned));
            event.commit_message = owned(payload, "merge_group.head_commit.message");
        }
        _ => {}
    }
    Ok(())
}

fn run_of(event: &mut Event, payload: &Json, key: &str) {
    event.sha = owned(payload, &format!("{key}.head_sha"));
    set_branch(event, owned(payload, &format!("{key}.head_branch")));
    event.commit_message = owned(payload, &format!("{key}.head_commit.message"));
    if at(payload, &format!("{key}.head_repository")).is_some() {
        event.is_fork_pr = fork_state(payload, &format!("{key}.head_repository.id"), "repository.id");
    }
}

fn object(json: Option<&Json>) -> BTreeMap<String, Json> {
    let fields = json.and_then(Json::as_object).into_iter().flatten();
    fields.map(|(name, value)| (name.clone(), value.clone())).collect()
}
