//! Workflows that are easy to write down.

use std::collections::BTreeMap;

use kici_engine::event::Event;
use kici_engine::lock::{Checkout, Job, Matcher, Need, Selector, SourceRef, Step, Workflow};
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
        needs: def.needs.iter().map(|up| Need::on(*up, [JobStatus::Success])).collect(),
        checkout: Checkout { enabled: def.checkout, ..Checkout::default() },
        grace_period_ms: Some(100),
        steps: vec![Step::script(source(), "true")],
        ..Job::bare(def.name, source(), selector(def.label))
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
        secrets: BTreeMap::new(),
        approval: None,
        timeout_ms: None,
        concurrency: None,
        for_generated: None,
        jobs: jobs.collect(),
    }
}

pub fn selector(label: &str) -> Selector {
    Selector { labels: vec![Matcher::Exact { value: label.into() }], ..Selector::default() }
}

pub(super) fn event() -> Event {
    serde_json::from_value(serde_json::json!({
        "kind": "push", "raw_name": "push", "org": "default", "routing_key": "generic:default:1",
        "provider": "generic", "source": "s", "is_fork_pr": "no", "repo": "o/r", "ref": "refs/heads/main",
        "sha": "0123456789012345678901234567890123456789"
    }))
    .unwrap()
}
