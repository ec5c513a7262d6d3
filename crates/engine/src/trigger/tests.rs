use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::event::{ForkState, Sender};
use crate::lock::SourceRef;
use crate::pattern::Patterns;

fn event(kind: EventKind) -> Event {
    Event {
        kind,
        raw_name: kind.as_str().to_owned(),
        action: None,
        org: "default".into(),
        routing_key: "github:1".into(),
        provider: "github".into(),
        source: "forge".into(),
        repo: Some("acme/app".into()),
        git_ref: None,
        sha: Some("0".repeat(40)),
        target_branch: None,
        source_branch: None,
        base_sha: None,
        tag: None,
        default_branch: None,
        is_fork_pr: ForkState::No,
        pr_number: None,
        sender: Sender::default(),
        commit_message: None,
        inputs: BTreeMap::new(),
        requested_workflow: None,
        payload: json!(null),
        check_mode: Default::default(),
        chain_depth: 0,
    }
}

fn push(branch: &str) -> Event {
    Event { target_branch: Some(branch.into()), ..event(EventKind::Push) }
}

fn workflow(triggers: serde_json::Value) -> Workflow {
    Workflow {
        name: "ci".into(),
        description: None,
        run_name: None,
        source: SourceRef::default(),
        content_hash: String::new(),
        triggers: serde_json::from_value(triggers).unwrap(),
        condition: None,
        requires: Vec::new(),
        rules: Vec::new(),
        env: BTreeMap::new(),
        secrets: BTreeMap::new(),
        approval: None,
        timeout_ms: None,
        concurrency: None,
        for_generated: None,
        jobs: Vec::new(),
    }
}

fn matches(trigger: serde_json::Value, event: &Event) -> bool {
    matches!(match_workflow(&workflow(json!([trigger])), event, None).outcome, Outcome::Matched { .. })
}

fn with(kind: EventKind, action: &str, payload: serde_json::Value) -> Event {
    Event { action: Some(action.into()), payload, ..event(kind) }
}

#[test]
fn every_type_of_trigger_has_its_filters() {
    use EventKind::*;
    let pr = |action: &str| Event {
        target_branch: Some("main".into()),
        source_branch: Some("fix/a".into()),
        ..with(Pr, action, json!({}))
    };
    let tag = Event { tag: Some("v1".into()), git_ref: Some("refs/tags/v1".into()), ..event(Tag) };
    let note = with(Comment, "created", json!({"comment": {"body": "/deploy now"}, "issue": {"pull_request": {}}}));
    let review = with(Review, "submitted", json!({"review": {"state": "APPROVED"}}));
    let foreign = with(WorkflowRun, "completed", json!({"workflow_run": {"name": "Build", "conclusion": "failure"}}));
    let hook = Event { raw_name: "deployed".into(), ..with(Hook, "x", json!({"env": "prod", "n": [1, 2]})) };
    let emitted = Event { raw_name: "rescan".into(), ..with(KiciEvent, "x", json!({"scope": "all"})) };
    let done = with(JobComplete, "x", json!({"workflow": "ci", "job": "build", "status": "failed"}));
    let batch = with(WorkflowsFailedBatch, "x", json!({"workflows": ["ci", "docs"]}));
    let fired = with(Schedule, "x", json!({"cron": "0 3 * * *", "timezone": "UTC"}));
    let gone = Event { git_ref: Some("refs/heads/old".into()), ..event(Delete) };
    let born = with(Create, "x", json!({"ref_type": "tag", "ref": "v2"}));
    let own = Event { raw_name: "registration_updated".into(), ..event(Lifecycle) };
    let schedule =
        |cron: &str| json!({"type": "schedule", "cron": cron, "timezone": "UTC", "jitter_ms": 0, "catchup_ms": 0});
    let batch_of =
        |names: serde_json::Value| json!({"type": "workflows_failed_batch", "accumulate_ms": 1, "workflows": names});
    for (trigger, event, want) in [
        (json!({"type": "push", "branches": ["ma*"]}), &push("main"), true),
        (json!({"type": "push", "branches": ["dev"]}), &push("main"), false),
        (json!({"type": "push", "repos": ["acme/*", "!acme/app"]}), &push("main"), false),
        (json!({"type": "push"}), &tag, false),
        (json!({"type": "pr"}), &pr("opened"), true),
        (json!({"type": "pr"}), &pr("closed"), false),
        (json!({"type": "pr", "actions": ["closed"]}), &pr("closed"), true),
        (json!({"type": "pr", "source_branches": ["fix/*"]}), &pr("opened"), true),
        (json!({"type": "pr", "source_branches": ["*"]}), &with(Pr, "opened", json!({})), false),
        (json!({"type": "tag", "tags": ["v*", "!*-rc*"]}), &tag, true),
        (json!({"type": "comment", "target": "pr", "body": ["/^.deploy/"]}), &note, true),
        (json!({"type": "comment", "target": "issue"}), &note, false),
        (json!({"type": "comment", "actions": ["deleted"]}), &note, false),
        (json!({"type": "review", "states": ["approved"]}), &review, true),
        (json!({"type": "review_comment"}), &event(ReviewComment), true),
        (json!({"type": "release"}), &with(Release, "published", json!({})), true),
        (json!({"type": "release"}), &with(Release, "created", json!({})), false),
        (json!({"type": "dispatch", "types": ["go"]}), &with(Dispatch, "go", json!({})), true),
        (json!({"type": "dispatch", "types": ["go"]}), &with(Dispatch, "stop", json!({})), false),
        (json!({"type": "dispatch", "manual": true}), &event(Manual), true),
        (json!({"type": "dispatch"}), &event(Manual), true),
        (json!({"type": "dispatch", "types": ["go"]}), &event(Manual), false),
        (json!({"type": "dispatch", "manual": true}), &with(Dispatch, "go", json!({})), false),
        (json!({"type": "create", "ref_type": "tag", "refs": ["v*"]}), &born, true),
        (json!({"type": "delete", "ref_type": "tag"}), &gone, false),
        (json!({"type": "delete", "refs": ["old"]}), &gone, true),
        (json!({"type": "status", "contexts": ["ci/*"]}), &with(Status, "x", json!({"context": "ci/a"})), true),
        (json!({"type": "status", "states": ["failure"]}), &with(Status, "x", json!({"state": "success"})), false),
        (json!({"type": "workflow_run", "workflows": ["Build"], "conclusions": ["failure"]}), &foreign, true),
        (json!({"type": "workflow_run", "workflows": ["Test"]}), &foreign, false),
        (json!({"type": "fork"}), &event(Fork), true),
        (json!({"type": "star", "actions": ["created"]}), &with(Star, "deleted", json!({})), false),
        (json!({"type": "watch"}), &event(Watch), true),
        (json!({"type": "webhook", "events": ["push"]}), &push("main"), true),
        (json!({"type": "webhook", "events": ["deployed"]}), &hook, false),
        (json!({"type": "generic_webhook", "source": "forge", "match": {"$.env": ["prod"]}}), &hook, true),
        (json!({"type": "generic_webhook", "source": "forge", "not": {"$.n[*]": 2}}), &hook, false),
        (json!({"type": "generic_webhook", "source": "forge", "not": {"$.gone": 2}}), &hook, true),
        (json!({"type": "generic_webhook", "source": "forge", "match": {"$.gone": 2}}), &hook, false),
        (json!({"type": "generic_webhook", "source": "other"}), &hook, false),
        (json!({"type": "generic_webhook", "source": "forge", "events": ["built"]}), &hook, false),
        (json!({"type": "kici_event", "name": "rescan", "source": ["acme/*"]}), &emitted, true),
        (json!({"type": "kici_event", "name": "scan"}), &emitted, false),
        (json!({"type": "job_complete", "job": ["b*"], "status": ["failed"]}), &done, true),
        (json!({"type": "workflow_complete"}), &done, false),
        (batch_of(json!(["do*"])), &batch, true),
        (batch_of(json!(["x"])), &batch, false),
        (schedule("0 3 * * *"), &fired, true),
        (schedule("0 4 * * *"), &fired, false),
        (json!({"type": "lifecycle", "events": ["registration_updated"]}), &own, true),
        (json!({"type": "lifecycle", "events": ["job_failed"]}), &own, false),
    ] {
        assert_eq!(matches(trigger.clone(), event), want, "{trigger} on {}", event.kind);
    }
}

fn with_paths(files: Option<&ChangedFiles>) -> WorkflowDecision {
    let ci = workflow(json!([{"type": "push", "branches": ["main"], "paths": ["**", "!docs/**"]}]));
    match_workflow(&ci, &push("main"), files)
}

/// Acceptance 7 of workflows-and-events: no diff means a run with a note, a known empty diff means none.
#[test]
fn acceptance_7_unknown_files_run_and_known_none_does_not() {
    let unknown = ChangedFiles::Unavailable("the forge gives no diff".into());
    let Outcome::Matched { note: Some(note), .. } = with_paths(Some(&unknown)).outcome else { panic!("it must run") };
    assert_eq!(note, "path filter not evaluated: the forge gives no diff");
    assert_eq!(with_paths(Some(&ChangedFiles::Known(vec![]))).outcome, Outcome::NotMatched);
    assert_eq!(with_paths(Some(&ChangedFiles::Known(vec!["docs/a.md".into()]))).outcome, Outcome::NotMatched);
    let hit = ChangedFiles::Known(vec!["docs/a.md".into(), "src/a.rs".into()]);
    assert!(matches!(with_paths(Some(&hit)).outcome, Outcome::Matched { note: None, .. }));
}

/// Acceptance 8: a listing that was cut at 300 files, none of which is selected.
#[test]
fn acceptance_8_truncated_files_run_with_a_note() {
    let docs = ChangedFiles::Truncated((0..300).map(|n| format!("docs/{n}.md")).collect());
    let decision = with_paths(Some(&docs));
    let Outcome::Matched { note: Some(note), .. } = &decision.outcome else { panic!("it must run") };
    assert_eq!(note, "path filter not evaluated: the forge listed only the first 300 changed files");
    let last = decision.triggers[0].checks.last().unwrap();
    assert_eq!((last.check.as_str(), last.passed, last.note.as_ref()), ("paths", true, Some(note)));
    let hit = ChangedFiles::Truncated(vec!["src/a.rs".into()]);
    assert!(matches!(with_paths(Some(&hit)).outcome, Outcome::Matched { note: None, .. }));
}

#[test]
fn files_are_asked_for_only_when_they_decide() {
    assert_eq!(with_paths(None).outcome, Outcome::NeedsFiles);
    let ci = workflow(json!([
        {"type": "push", "branches": ["dev"], "paths": ["a"]},
        {"type": "push", "branches": ["main"]},
        {"type": "push", "paths": ["a"]},
    ]));
    let decision = match_workflow(&ci, &push("main"), None);
    assert_eq!(decision.outcome, Outcome::Matched { trigger: 1, kind: "push".into(), note: None });
    assert_eq!(match_workflow(&ci, &push("x"), None).outcome, Outcome::NeedsFiles);
}

#[test]
fn the_trace_tells_the_filter_that_said_no() {
    let ci = workflow(json!([{"type": "tag"}, {"type": "push", "branches": ["dev", "!x"]}]));
    let decision = match_workflow(&ci, &push("main"), None);
    assert_eq!(
        serde_json::to_value(&decision).unwrap(),
        json!({
            "workflow": "ci",
            "outcome": {"result": "not_matched"},
            "triggers": [
                {"trigger": 0, "kind": "tag", "matched": false, "checks": [
                    {"check": "event", "expected": "tag", "actual": "push", "passed": false}]},
                {"trigger": 1, "kind": "push", "matched": false, "checks": [
                    {"check": "event", "expected": "push", "actual": "push", "passed": true},
                    {"check": "branches", "expected": "dev, !x", "actual": "main", "passed": false}]},
            ],
        })
    );
}

#[test]
fn a_broken_foreign_lock_does_not_match_and_says_why() {
    let ci = workflow(json!([{"type": "push", "branches": ["/(?=a)/"]}]));
    let decision = match_workflow(&ci, &push("main"), None);
    assert_eq!(decision.outcome, Outcome::NotMatched);
    assert!(decision.triggers[0].checks[1].note.as_ref().unwrap().contains("look-around"));
    let error = validate(&ci.triggers[0]).unwrap_err().to_string();
    assert!(error.starts_with("push trigger, `branches`: pattern `/(?=a)/`:"), "{error}");
    let hook = workflow(json!([{"type": "generic_webhook", "source": "x", "not": {"$[": 1}}]));
    assert_eq!(validate(&hook.triggers[0]).unwrap_err().key, "not");
}

#[test]
fn one_workflow_may_be_asked_for() {
    let ci = workflow(json!([{"type": "dispatch", "manual": true}]));
    let asked = |name: &str| Event { requested_workflow: Some(name.into()), ..event(EventKind::Manual) };
    assert!(matches!(match_workflow(&ci, &asked("ci"), None).outcome, Outcome::Matched { .. }));
    assert_eq!(match_workflow(&ci, &asked("docs"), None).outcome, Outcome::NotMatched);
    assert!(manual_trigger(&ci).and_then(declared_inputs).is_some());
    assert!(manual_trigger(&workflow(json!([{"type": "dispatch", "types": ["x"]}]))).is_none());
}

#[test]
fn a_push_can_ask_to_be_skipped() {
    let said = |kind, text: &str| skip_ci(&Event { commit_message: Some(text.into()), ..event(kind) });
    assert_eq!(said(EventKind::Push, "docs\n\n[Skip CI]"), Some("[skip ci]"));
    assert_eq!(said(EventKind::Push, "skip ci"), None);
    assert_eq!(said(EventKind::Tag, "[skip ci]"), None);
}

#[test]
fn a_long_comment_is_cut_between_characters() {
    let body = format!("{}needle", "ä".repeat(40_000));
    let long = with(EventKind::Comment, "created", json!({"comment": {"body": body}}));
    assert!(!matches(json!({"type": "comment", "body": ["/needle/"]}), &long));
    assert!(matches(json!({"type": "comment", "body": ["/^ä/"]}), &long));
}

proptest! {
    /// The first trigger that matches by itself is the one that is recorded.
    #[test]
    fn the_first_match_wins(
        lists in proptest::collection::vec(proptest::collection::vec("!?[ab*]{1,2}", 0..3), 0..5),
        branch in "[ab]{1,2}",
    ) {
        let triggers: Vec<_> = lists.iter().map(|list| json!({"type": "push", "branches": list})).collect();
        let decision = match_workflow(&workflow(json!(triggers)), &push(&branch), None);
        let want = lists.iter().position(|list| Patterns::compile(list).unwrap().matches(&branch));
        let found = match decision.outcome {
            Outcome::Matched { trigger, .. } => Some(trigger),
            _ => None,
        };
        prop_assert_eq!(found, want);
        prop_assert_eq!(decision.triggers.len(), want.map_or(lists.len(), |at| at + 1));
    }
}
