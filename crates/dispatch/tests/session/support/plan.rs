//! Workflows that are easy to write down.

use std::collections::BTreeMap;

use kici_engine::event::Event;
use kici_engine::hosts::OnUnreachable;
use kici_engine::lock::{Artifacts, Checkout, Hooks, Job, Matcher, Need, Selector, SourceRef, Step, Workflow};
use kici_engine::state::JobStatus;

/// A job of a test workflow.
#[derive(Clone)]
pub struct JobDef {
    pub name: &'static str,
    pub needs: &'static [&'static str],
    pub label: &'static str,
    pub checkout: bool,
}

pub const fn job(name: &'static str) -> JobDef {
    JobDef { name, needs: &[], label: "default", checkout: false }
}

pub fn workflow(jobs: &[JobDef]) -> Workflow {
    let source = || SourceRef { file: ".kici/workflows/t.yaml".into(), line: 1 };
    let jobs = jobs.iter().map(|def| Job {
        name: def.name.into(),
        display_name: None,
        description: None,
        source: source(),
        needs: def.needs.iter().map(|up| Need { job: (*up).into(), run_on: vec![JobStatus::Success] }).collect(),
        runs_on: selector(def.label),
        runs_on_all: None,
        on_unreachable: OnUnreachable::Hold,
        include_uninitialized: false,
        matrix: None,
        max_parallel: None,
        fail_fast: false,
        condition: None,
        env: BTreeMap::new(),
        checkout: Checkout { enabled: def.checkout, depth: 1 },
        git_credentials: None,
        outputs: BTreeMap::new(),
        timeout_ms: None,
        grace_period_ms: Some(100),
        concurrency: None,
        retry: None,
        rules: Vec::new(),
        init: Vec::new(),
        cache: Vec::new(),
        artifacts: Artifacts::default(),
        steps: vec![Step::script(source(), "true")],
        groups: Vec::new(),
        composites: Vec::new(),
        hooks: Hooks::default(),
    });
    Workflow {
        name: "t".into(),
        description: None,
        run_name: None,
        source: source(),
        content_hash: "0".repeat(64),
        triggers: vec![],
        condition: None,
        requires: Vec::new(),
        rules: Vec::new(),
        env: BTreeMap::new(),
        timeout_ms: None,
        concurrency: None,
        jobs: jobs.collect(),
    }
}

pub fn selector(label: &str) -> Selector {
    Selector { labels: vec![Matcher::Exact { value: label.into() }], exclude: vec![] }
}

pub(super) fn event() -> Event {
    serde_json::from_value(serde_json::json!({
        "kind": "push", "raw_name": "push", "org": "default", "routing_key": "generic:default:1",
        "provider": "generic", "source": "s", "is_fork_pr": "no", "repo": "o/r", "ref": "refs/heads/main",
        "sha": "0123456789012345678901234567890123456789"
    }))
    .unwrap()
}
