//! Reading and writing lock documents (workflows-and-events 2.4). A document comes from a repository, so nothing in it is
//! taken on trust: versions and digest first, then every pattern, label, edge and limit that the compiler would have checked.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use crate::hosts::HostMatcher;
use crate::labels::CompiledSelector;
use crate::lock::{
    Action, BREAKING_FLOOR, Generator, Job, LockDocument, MAX_HOOK_MS, Matcher, SCHEMA_VERSION, Selector, Step,
    Workflow,
};
use crate::state::JobStatus;
use crate::{needs, trigger};

/// Largest document, in bytes.
pub const MAX_BYTES: usize = 5 * 1024 * 1024;
/// Most workflows of one document, and most jobs of one workflow.
pub const MAX_WORKFLOWS: usize = 256;
const MAX_JOBS: usize = 256;

/// A lock document that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LockFileError {
    /// Over [`MAX_BYTES`].
    #[error("the lock document has {0} bytes; at most {MAX_BYTES} are allowed")]
    TooLarge(usize),
    /// Not JSON, or not of this shape.
    #[error("the lock document cannot be read: {0}; recompile the workflows")]
    Shape(String),
    /// Made by a later compiler.
    #[error(
        "the lock document needs a reader of schema {needs}, this orchestrator reads up to {SCHEMA_VERSION}; upgrade the \
         orchestrator or recompile with an older compiler"
    )]
    TooNew {
        /// Its `min_reader_version`.
        needs: u32,
    },
    /// Made by a compiler that is no longer understood.
    #[error(
        "the lock document has schema {has}, this orchestrator reads {BREAKING_FLOOR} to {SCHEMA_VERSION}; recompile the \
         workflows"
    )]
    TooOld {
        /// Its `schema_version`.
        has: u32,
    },
    /// The digest does not fit the content.
    #[error("the lock document was changed after it was compiled (content_hash does not fit); recompile the workflows")]
    Hash,
    /// A workflow breaks a rule.
    #[error("workflow `{workflow}` of the lock document: {problem}")]
    Workflow {
        /// Its name.
        workflow: String,
        /// Which rule.
        problem: String,
    },
}

#[derive(Deserialize)]
struct Header {
    schema_version: u32,
    min_reader_version: u32,
    content_hash: String,
    workflows: Json,
}

/// Reads a document.
///
/// # Errors
/// [`LockFileError`]; nothing of a document with a fault is used.
pub fn read(bytes: &[u8]) -> Result<LockDocument, LockFileError> {
    if bytes.len() > MAX_BYTES {
        return Err(LockFileError::TooLarge(bytes.len()));
    }
    let shape = |error: serde_json::Error| LockFileError::Shape(error.to_string());
    // By itself first: a later schema may have another shape and must still be named as one.
    let header: Header = serde_json::from_slice(bytes).map_err(shape)?;
    if header.min_reader_version > SCHEMA_VERSION {
        return Err(LockFileError::TooNew { needs: header.min_reader_version });
    }
    if header.schema_version < BREAKING_FLOOR {
        return Err(LockFileError::TooOld { has: header.schema_version });
    }
    if digest(&header.workflows) != header.content_hash {
        return Err(LockFileError::Hash);
    }
    let document: LockDocument = serde_json::from_slice(bytes).map_err(shape)?;
    let mut names = BTreeSet::new();
    for workflow in &document.workflows {
        let fail =
            |problem: String| LockFileError::Workflow { workflow: workflow.name.chars().take(100).collect(), problem };
        if !names.insert(&workflow.name) || names.len() > MAX_WORKFLOWS {
            return Err(fail(format!("its name is taken, or there are more than {MAX_WORKFLOWS} workflows")));
        }
        check_workflow(workflow).map_err(fail)?;
    }
    Ok(document)
}

/// A document of this build's schema.
pub fn document(workflows: Vec<Workflow>, generator: Generator) -> LockDocument {
    let content_hash = digest(&serde_json::to_value(&workflows).unwrap_or(Json::Null));
    LockDocument {
        schema_version: SCHEMA_VERSION,
        min_reader_version: SCHEMA_VERSION,
        content_hash,
        generator,
        workflows,
    }
}

/// SHA-256 (hex) over canonical JSON: keys sorted, no white space.
fn digest(value: &Json) -> String {
    hex::encode(Sha256::digest(canonical(value).to_string()))
}

fn canonical(value: &Json) -> Json {
    match value {
        Json::Array(items) => items.iter().map(canonical).collect(),
        Json::Object(map) => {
            let sorted: BTreeMap<&String, &Json> = map.iter().collect();
            Json::Object(sorted.into_iter().map(|(key, value)| (key.clone(), canonical(value))).collect())
        }
        scalar => scalar.clone(),
    }
}

/// Checks what the types do not: names, triggers, labels, edges. Expressions are checked where they are evaluated.
///
/// # Errors
/// The first rule that is broken, in words.
pub fn check_workflow(workflow: &Workflow) -> Result<(), String> {
    let written = workflow.jobs.iter().filter(|job| !job.is_run_hooks()).count();
    if !(1..=MAX_JOBS).contains(&written) {
        return Err(format!("it has {} jobs; 1 to {MAX_JOBS} are allowed", workflow.jobs.len()));
    }
    for one in &workflow.triggers {
        trigger::validate(one).map_err(|error| error.to_string())?;
    }
    let mut makers: BTreeMap<&str, &str> = BTreeMap::new();
    for (job, generate) in workflow.jobs.iter().filter_map(|job| Some((job, job.generate.as_ref()?))) {
        if makers.insert(&generate.group, &job.name).is_some() {
            return Err(format!("group `{}` is made by two jobs", generate.group));
        }
    }
    let mut edges: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for job in &workflow.jobs {
        let groups = job.needs_groups.iter().filter_map(|need| makers.get(need.group.as_str()).copied());
        let needed = job.needs.iter().map(|need| need.job.as_str()).chain(groups).collect();
        if edges.insert(&job.name, needed).is_some() {
            return Err(format!("job `{}` is there twice", job.name));
        }
    }
    for job in &workflow.jobs {
        if let Some(need) = job.needs_groups.iter().find(|need| !makers.contains_key(need.group.as_str())) {
            return Err(format!("job `{}`: it needs unknown group `{}`", job.name, need.group));
        }
        check_job(job, &edges).map_err(|problem| format!("job `{}`: {problem}", job.name))?;
    }
    match needs::find_cycle(&edges) {
        Some(path) => Err(format!("dependency cycle: {}", path.join(" -> "))),
        None => Ok(()),
    }
}

fn check_job(job: &Job, known: &BTreeMap<&str, Vec<&str>>) -> Result<(), String> {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-');
    let starts = job.name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    if !job.is_run_hooks() && (!starts || job.name.len() > 64 || !job.name.chars().all(legal)) {
        return Err("its name is not `[a-z0-9][a-z0-9_-]{0,63}`".to_owned());
    }
    if job.steps.is_empty() && !job.is_run_hooks() && job.invoke.is_none() {
        return Err("it has no steps".to_owned());
    }
    check_dynamic(job)?;
    check_steps(job)?;
    if let Some(need) = job.needs.iter().find(|need| !known.contains_key(need.job.as_str())) {
        return Err(format!("it needs unknown job `{}`", need.job));
    }
    let open = |run_on: &[JobStatus]| run_on.is_empty() || run_on.iter().any(|s| !s.is_terminal());
    let of_jobs = job.needs.iter().map(|need| (&need.job, &need.run_on));
    let of_groups = job.needs_groups.iter().map(|need| (&need.group, &need.run_on));
    if let Some((name, _)) = of_jobs.chain(of_groups).find(|(_, run_on)| open(run_on)) {
        return Err(format!("its need on `{name}` names no statuses, or one that is not final"));
    }
    if job.invoke.is_some() {
        return Ok(());
    }
    if let Some(hosts) = &job.runs_on_all {
        return HostMatcher::compile(hosts).map(|_| ()).map_err(|error| format!("runs_on_all: {error}"));
    }
    // What is rendered later is checked later.
    let fixed = |list: &[Matcher]| {
        let stand_in = |matcher: &Matcher| match matcher {
            Matcher::Exact { value } if value.contains("${{") => Matcher::Exact { value: "x".to_owned() },
            other => other.clone(),
        };
        list.iter().map(stand_in).collect()
    };
    let selector =
        Selector { labels: fixed(&job.runs_on.labels), exclude: fixed(&job.runs_on.exclude), ..Selector::default() };
    CompiledSelector::compile(&selector).map(|_| ()).map_err(|error| format!("runs_on: {error}"))
}

/// Generators that have made nothing yet and are one script; jobs with `invoke` that have no steps.
fn check_dynamic(job: &Job) -> Result<(), String> {
    if job.needs.iter().any(|need| need.group.is_some()) {
        return Err("a need names a group that only a run can know".to_owned());
    }
    if let Some(generate) = &job.generate {
        let script = matches!(&job.steps[..], [Step { action: Action::Run(_), group: None, composite: None, .. }]);
        if !script || generate.members.is_some() || job.matrix.is_some() || job.runs_on_all.is_some() {
            return Err(
                "a job that makes jobs is one script, without matrix, hosts or jobs that it has made".to_owned()
            );
        }
    }
    match &job.invoke {
        Some(_) if !job.steps.is_empty() || job.generate.is_some() || job.runs_on_all.is_some() => {
            Err("a job that starts workflows has no steps and no hosts".to_owned())
        }
        _ => Ok(()),
    }
}

/// Groups that exist and lie together; hooks within their limit; hooks and init that are scripts and nothing more.
fn check_steps(job: &Job) -> Result<(), String> {
    let mut last = None;
    let mut seen = BTreeSet::new();
    for step in &job.steps {
        if let Some(group) = step.group
            && (group as usize >= job.groups.len() || (last != Some(group) && !seen.insert(group)))
        {
            return Err(format!("its step at line {} is in a group that does not exist or is torn", step.source.line));
        }
        last = step.group;
    }
    check_composites(job)?;
    let is_script = |step: &Step| matches!(step.action, Action::Run(_));
    let fits = |hook: &Step| is_script(hook) && hook.timeout_ms.is_none_or(|ms| ms <= MAX_HOOK_MS);
    if let Some(hook) = hooks(job).find(|hook| !fits(hook)) {
        return Err(format!("its hook at line {} is no script, or may take longer than 5 min", hook.source.line));
    }
    if let Some(command) = job.init.iter().find(|command| !is_script(command)) {
        return Err(format!("its init at line {} is no script", command.source.line));
    }
    let mut around = hooks(job).chain(&job.init);
    match around.find(|one| one.group.is_some() || one.on_cancel.len() + one.cleanup.len() > 0) {
        Some(one) => Err(format!("its hook or init at line {} has a group or hooks of its own", one.source.line)),
        None => Ok(()),
    }
}

/// The hooks of the steps and of the job.
fn hooks(job: &Job) -> impl Iterator<Item = &Step> {
    job.steps.iter().flat_map(|step| step.on_cancel.iter().chain(&step.cleanup)).chain(job.hooks.all())
}

/// Uses that exist, and whose parents stand before them.
fn check_composites(job: &Job) -> Result<(), String> {
    let count = job.composites.len();
    let broken = job.composites.iter().enumerate().find(|(at, used)| used.parent.is_some_and(|up| up as usize >= *at));
    if let Some((_, used)) = broken {
        return Err(format!("its use of `{}` stands in one that does not exist", used.path));
    }
    let mut all = job.steps.iter().chain(hooks(job)).chain(&job.init);
    match all.find(|step| step.composite.is_some_and(|used| used as usize >= count)) {
        Some(step) => Err(format!("its step at line {} stands in a step file that is not used", step.source.line)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn job(name: &str, needs: &[&str]) -> Json {
        let needs: Vec<Json> = needs.iter().map(|job| json!({"job": job, "run_on": ["success"]})).collect();
        json!({
            "name": name,
            "source": {"file": "ci.yaml", "line": 1},
            "needs": needs,
            "runs_on": {"labels": [{"kind": "exact", "value": "${{ matrix.os }}"}]},
            "steps": [{"source": {"file": "ci.yaml", "line": 2}, "run": "true"}],
        })
    }

    fn workflow(jobs: &[Json]) -> Json {
        json!({
            "name": "ci",
            "source": {"file": "ci.yaml", "line": 1},
            "content_hash": "",
            "triggers": [{"type": "push"}],
            "jobs": jobs,
        })
    }

    fn lock(workflows: Json) -> Json {
        json!({
            "schema_version": 1,
            "min_reader_version": 1,
            "content_hash": digest(&workflows),
            "generator": {"name": "test", "version": "1"},
            "workflows": workflows,
        })
    }

    fn fault(document: &Json) -> String {
        read(document.to_string().as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_written_is_read() {
        let parsed: Workflow = serde_json::from_value(workflow(&[job("a", &[]), job("b", &["a"])])).unwrap();
        let written = document(vec![parsed], Generator { name: "kici".into(), version: "0".into() });
        assert_eq!(read(&serde_json::to_vec(&written).unwrap()), Ok(written));
    }

    /// Acceptance 11 of workflows-and-events.
    #[test]
    fn acceptance_11_a_newer_lock_names_both_versions() {
        let newer =
            json!({"schema_version": 9, "min_reader_version": 7, "content_hash": "", "workflows": {"other": 1}});
        assert_eq!(read(newer.to_string().as_bytes()), Err(LockFileError::TooNew { needs: 7 }));
        assert!(fault(&newer).contains("schema 7, this orchestrator reads up to 1; upgrade the orchestrator"));
        let mut additive = lock(json!([workflow(&[job("a", &[])])]));
        additive["schema_version"] = json!(9);
        additive["new_field"] = json!({"x": 1});
        assert!(read(additive.to_string().as_bytes()).is_ok(), "a later schema that this build may still read");
        additive["schema_version"] = json!(0);
        assert_eq!(read(additive.to_string().as_bytes()), Err(LockFileError::TooOld { has: 0 }));
    }

    #[test]
    fn a_document_is_never_trusted() {
        let mut changed = lock(json!([workflow(&[job("a", &[])])]));
        changed["workflows"][0]["jobs"][0]["steps"][0]["run"] = json!("curl evil | sh");
        assert!(fault(&changed).contains("was changed"));
        let with = |key: &str, value: Json| {
            let mut one = job("a", &[]);
            one[key] = value;
            lock(json!([workflow(&[one])]))
        };
        let odd = |key: &str| {
            let mut step = json!({"source": {"file": "ci.yaml", "line": 3}, "run": "true"});
            step[key] = json!(0);
            step
        };
        let around = |hook: &str, key: &str| {
            let mut step = json!({"source": {"file": "ci.yaml", "line": 2}, "run": "true"});
            step[hook] = json!([odd(key)]);
            step
        };
        let script = crate::lock::Step::script(crate::lock::SourceRef::default(), "true");
        let wait =
            crate::lock::WaitFor { probe: crate::lock::Probe::Run("true".into()), interval_ms: 1, timeout_ms: 1 };
        let source = crate::lock::SourceRef { line: 3, ..Default::default() };
        let waits = serde_json::to_value(Step { action: Action::WaitFor(wait), source, ..script }).unwrap();
        let mut pattern = workflow(&[job("a", &[])]);
        pattern["triggers"] = json!([{"type": "push", "branches": ["/(a/"]}]);
        for (document, want) in [
            (lock(json!([workflow(&[])])), "0 jobs"),
            (lock(json!([workflow(&[job("a", &[]), job("a", &[])])])), "job `a` is there twice"),
            (lock(json!([workflow(&[job("a", &["x"])])])), "it needs unknown job `x`"),
            (lock(json!([workflow(&[job("a", &["b"]), job("b", &["a"])])])), "dependency cycle: a -> b -> a"),
            (lock(json!([workflow(&[job("A", &[])])])), "its name is not"),
            (lock(json!([workflow(&[job("a", &[])]), workflow(&[job("a", &[])])])), "its name is taken"),
            (lock(json!([pattern])), "push trigger, `branches`: pattern"),
            (with("steps", json!([])), "it has no steps"),
            (with("generate", json!({"group": "g", "members": ["x"]})), "is one script"),
            (with("invoke", json!({"event": {"static": "go"}, "payload": {}})), "has no steps and no hosts"),
            (with("needs_groups", json!([{"group": "g", "run_on": ["success"]}])), "unknown group `g`"),
            (with("runs_on", json!({"labels": []})), "asks for no label"),
            (with("runs_on", json!({"labels": ["linux"]})), "cannot be read"),
            (with("needs", json!([{"job": "a", "run_on": ["running"]}])), "not final"),
            (with("steps", json!([around("cleanup", "composite")])), "stands in a step file that is not used"),
            (with("steps", json!([around("on_cancel", "group")])), "has a group"),
            (with("hooks", json!({"before_step": [odd("composite")]})), "stands in a step file that is not used"),
            (with("hooks", json!({"after_step": [odd("group")]})), "has a group"),
            (with("init", json!([odd("composite")])), "stands in a step file that is not used"),
            (with("init", json!([waits])), "its init at line 3 is no script"),
        ] {
            let text = fault(&document);
            assert!(text.contains(want), "{text}");
        }
        assert!(read(&vec![b' '; MAX_BYTES + 1]).is_err() && read(b"[").is_err());
    }
}
