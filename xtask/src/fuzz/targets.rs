//! The readers, each with what it promises.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use kici_convert::{Dialect, Options, convert};
use kici_engine::compile::compile_file;
use kici_engine::condition::Condition;
use kici_engine::diagnostic::{render_long, render_short};
use kici_engine::event::{ChangedFiles, Event};
use kici_engine::expr::{self, Context, Functions, Template};
use kici_engine::ids::{RunId, SourceId};
use kici_engine::lock::{Generator, LockDocument, Workflow};
use kici_engine::lockfile;
use kici_engine::plan::{Fleet, JobRef, Planned, RunInfo, Scope, activate, job_spec, plan_run};
use kici_engine::repository::{RepositoryConfig, read_config, resolve};
use kici_engine::trigger::match_workflow;
use kici_forge::normalise::{Normalised, event_name, normalise};
use kici_forge::{GenericConfig, GithubConfig, Headers, LocalConfig, Source, SourceConfig};
use serde_json::{Value as Json, json};

use super::corpus::Corpus;

/// One reader.
pub(super) struct Target {
    pub(super) name: &'static str,
    pub(super) corpus: Corpus,
    /// Reads an input; an error is a broken promise.
    pub(super) run: fn(&[u8]) -> Result<()>,
}

pub(super) const TARGETS: &[Target] = &[
    Target { name: "yaml", corpus: Corpus::Workflows, run: yaml },
    Target { name: "lock", corpus: Corpus::Locks, run: lock },
    Target { name: "cel", corpus: Corpus::Expressions, run: cel },
    Target { name: "jsonpath", corpus: Corpus::Paths, run: jsonpath },
    Target { name: "webhook", corpus: Corpus::Webhooks, run: webhook },
    Target { name: "convert", corpus: Corpus::Foreign, run: convert_any },
];

/// A document of these workflows.
pub(super) fn document(workflows: Vec<Workflow>) -> LockDocument {
    lockfile::document(workflows, Generator { name: "fuzz".to_owned(), version: "0".to_owned() })
}

/// A workflow file: every fault has a place in it, and what compiles can be stored, read back, matched and planned.
fn yaml(bytes: &[u8]) -> Result<()> {
    let text = String::from_utf8_lossy(bytes);
    let _ = read_config(&text);
    let compiled = compile_file(".kici/workflows/a.yaml", &text);
    for fault in &compiled.diagnostics {
        render_long(fault, &text, false);
        render_short(fault);
        ensure!(fault.line >= 1 && fault.col >= 1, "a fault without a place: {fault:?}");
    }
    for workflow in &compiled.workflows {
        run_of(workflow);
    }
    let written = document(compiled.workflows);
    let read = lockfile::read(&serde_json::to_vec(&written)?);
    ensure!(read.as_ref() == Ok(&written), "what was compiled is not read back: {:?}", read.err());
    Ok(())
}

/// A lock document, as it stands and with an honest digest over damaged content.
fn lock(bytes: &[u8]) -> Result<()> {
    let _ = lockfile::read(bytes);
    let text = String::from_utf8_lossy(bytes);
    resolve(RepositoryConfig::default(), &Default::default(), Some(&text));
    let Ok(document_) = serde_json::from_slice::<LockDocument>(bytes) else { return Ok(()) };
    let Ok(read) = lockfile::read(&serde_json::to_vec(&document(document_.workflows))?) else { return Ok(()) };
    read.workflows.iter().for_each(run_of);
    Ok(())
}

/// From a workflow to what an agent gets. Faults are answers; only a panic is none.
fn run_of(workflow: &Workflow) {
    let event = event();
    match_workflow(workflow, &event, Some(&ChangedFiles::Known(vec!["src/a.rs".to_owned()])));
    let run =
        RunInfo { id: RunId::from_uuid(Default::default()), repo: "acme/app", git_ref: None, sha: "", attempt: 1 };
    let scope = Scope { workflow, event: &event, run };
    let Ok(Planned::Run(plan)) = plan_run(scope, &Fleet::default()) else { return };
    let needs = BTreeMap::new();
    for job in plan.jobs.iter().take(20) {
        let job = JobRef {
            name: &job.name,
            job_index: job.job_index,
            matrix: &job.matrix,
            fanout: job.fanout.as_ref(),
            needs: &needs,
        };
        activate(scope, job, None);
        let _ = job_spec(scope, job);
    }
}

fn event() -> Event {
    let mut event = kici_forge::normalise::blank(
        &source(SourceConfig::Local(LocalConfig::new("/r"))),
        kici_engine::event::EventKind::Push,
        "push",
    );
    event.target_branch = Some("main".to_owned());
    event.payload = json!({ "commits": [{ "message": "m" }] });
    event
}

fn source(config: SourceConfig) -> Source {
    Source { id: SourceId::from_uuid(Default::default()), org: "default".into(), name: "s".into(), version: 1, config }
}

/// An expression, and a template.
fn cel(bytes: &[u8]) -> Result<()> {
    let text = String::from_utf8_lossy(bytes);
    let context = Context::new()
        .with("event", json!({ "kind": "push", "payload": { "commits": [{ "message": "x" }], "n": 1.5 } }))
        .with("ref", "refs/heads/main")
        .with("branch", "main")
        .with("inputs", json!({ "n": 1 }))
        .with("matrix", json!({ "os": "a" }))
        .with("needs", json!({ "a": { "status": "success", "outputs": { "b": "c" } } }));
    let functions = Functions { outcome: Some(expr::Outcome::Success), hash_files: None };
    let _ = expr::eval_json(&text, &context, &functions);
    let _ = expr::eval_bool(&text, &context, &Functions::default());
    let _ = Template::parse(&text).map(|template| template.render(&context, &functions));
    Ok(())
}

/// A condition of a trigger: path, expectation, document.
fn jsonpath(bytes: &[u8]) -> Result<()> {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.splitn(3, '\n');
    let (path, expected, body) = (lines.next(), lines.next(), lines.next());
    let json = |text: Option<&str>| text.and_then(|text| serde_json::from_str::<Json>(text).ok()).unwrap_or(Json::Null);
    if let Ok(condition) = Condition::compile(path.unwrap_or_default(), &json(expected)) {
        condition.expectation();
        condition.evaluate(&json(body));
    }
    Ok(())
}

/// A delivery to each kind of source.
fn webhook(bytes: &[u8]) -> Result<()> {
    let at = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
    let name = String::from_utf8_lossy(&bytes[..at]).into_owned();
    let body = bytes.get(at + 1..).unwrap_or_default();
    let generic: GenericConfig = serde_json::from_value(json!({
        "verification": { "type": "hmac", "header": "x-sig" }, "action_from": { "path": "$.action" },
        "repo_from": { "path": "$.repository.full_name" }, "ref_from": { "path": "$.ref" },
    }))?;
    let configs = [
        SourceConfig::Github(GithubConfig::new(1)),
        SourceConfig::Generic(Box::new(generic)),
        SourceConfig::Local(LocalConfig::new("/r")),
    ];
    for config in configs {
        let source = source(config);
        for kind in ["application/json", "application/x-www-form-urlencoded"] {
            let headers = Headers::from_iter([
                ("x-github-event", name.as_str()),
                ("x-event-type", &name),
                ("content-type", kind),
            ]);
            event_name(&source, &headers, body);
            if let Ok(Normalised::Event(event)) = normalise(&source, &headers, body) {
                let stored = serde_json::to_vec(&event)?;
                ensure!(serde_json::from_slice::<Event>(&stored)? == *event, "the event is not read back");
            }
        }
    }
    Ok(())
}

/// A foreign workflow in each language: what is written compiles.
fn convert_any(bytes: &[u8]) -> Result<()> {
    let text = String::from_utf8_lossy(bytes);
    for dialect in Dialect::ALL {
        let made = convert("a.yml", &text, Some(dialect), &Options::default());
        if let Some(written) = made.text {
            let compiled = compile_file("a.yaml", &written);
            ensure!(!compiled.has_errors(), "{dialect}: what was written does not compile");
        }
    }
    Ok(())
}
