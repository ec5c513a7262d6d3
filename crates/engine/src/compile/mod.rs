//! From workflow files to the lock model.
//!
//! One pass over the tree of a file finds everything that is wrong with it. Nothing is executed, nothing is read but the
//! text that is given.

mod hosts;
mod job;
pub(crate) mod keys;
mod matrix;
mod needs;
mod on;
mod scope;
mod step;
mod turns;
mod values;
mod walk;
mod workflow;

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use crate::diagnostic::Diagnostic;
use crate::lock::Workflow;
use crate::yaml::{self, Lines, Span};

use walk::Walk;
use workflow::Named;

/// Most diagnostics of one file.
pub const MAX_DIAGNOSTICS: usize = 50;
/// Changes when the same source compiles to another lock, so that its hash changes too.
const COMPILE_VERSION: u32 = 1;

/// What one file compiles to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Compiled {
    /// The workflows of the documents without errors, in file order.
    pub workflows: Vec<Workflow>,
    /// Everything that is wrong with the file, by position, at most [`MAX_DIAGNOSTICS`].
    pub diagnostics: Vec<Diagnostic>,
}

impl Compiled {
    /// Whether a document of the file cannot run.
    pub fn has_errors(&self) -> bool {
        self.diagnostics.iter().any(Diagnostic::is_error)
    }
}

/// What a set of files compiles to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompiledSet {
    /// Path and result of each file, in the order given.
    pub files: Vec<(String, Compiled)>,
}

impl CompiledSet {
    /// The workflows of all files.
    pub fn workflows(&self) -> impl Iterator<Item = &Workflow> {
        self.files.iter().flat_map(|(_, compiled)| &compiled.workflows)
    }

    /// The diagnostics of all files.
    pub fn diagnostics(&self) -> impl Iterator<Item = &Diagnostic> {
        self.files.iter().flat_map(|(_, compiled)| &compiled.diagnostics)
    }
}

/// Compiles one file. `path` counts from the root of the repository and only names things. Never panics; a document with
/// errors yields no workflow, the others of the file do.
pub fn compile_file(path: &str, source: &str) -> Compiled {
    let mut names = HashMap::new();
    compile(path, source, &mut names)
}

/// Compiles files of one repository, where the names of workflows must be unique. A fault in one file does not touch the
/// others: of two workflows with one name, the first stays.
pub fn compile_set(files: &[(String, String)]) -> CompiledSet {
    let mut names = HashMap::new();
    let files = files.iter().map(|(path, source)| (path.clone(), compile(path, source, &mut names))).collect();
    CompiledSet { files }
}

/// Where each name of a workflow is taken.
type Names = HashMap<String, String>;

fn compile(path: &str, source: &str, names: &mut Names) -> Compiled {
    let lines = Lines::new(source);
    let mut walk = Walk::new(path, &lines);
    let reading = yaml::read(source, yaml::Limits::default());
    let broken = !reading.faults.is_empty();
    for fault in reading.faults {
        let diagnostic = walk.fault(fault.kind.code(), fault.span, fault.message);
        if let Some(help) = fault.help {
            diagnostic.help(help);
        }
    }
    let documents: Vec<_> = reading.documents.iter().filter(|document| !document.root.is_null()).collect();
    if documents.is_empty() && !broken {
        walk.fault("K0101", Span::on_line(1, 1, 1), "the file holds no workflow")
            .expected(["a map with `on` and `jobs`"]);
    }
    let hash = content_hash(source);
    let mut workflows = Vec::new();
    for document in documents {
        let before = walk.errors;
        let named = walk.workflow(&document.root, stem(path), &hash);
        if let Some(named) = named.filter(|_| !document.faulty && walk.errors == before) {
            workflows.extend(unique(&mut walk, named, names));
        }
    }
    let mut diagnostics = walk.diagnostics;
    diagnostics.sort_by_key(|diagnostic| (diagnostic.line, diagnostic.col));
    // An anchor that is used twice would be reported twice.
    diagnostics.dedup_by(|a, b| a.code == b.code && a.range() == b.range() && a.message == b.message);
    diagnostics.truncate(MAX_DIAGNOSTICS);
    Compiled { workflows, diagnostics }
}

fn unique(walk: &mut Walk<'_>, named: Named, names: &mut Names) -> Option<Workflow> {
    let Named { workflow, place } = named;
    if let Some(other) = names.get(&workflow.name) {
        let message = format!("workflow `{}` is defined already in {other}", workflow.name);
        walk.fault("K0306", place, message).help("give it another `name`");
        return None;
    }
    names.insert(workflow.name.clone(), format!("{}:{}", walk.file, place.start.line));
    Some(workflow)
}

/// File name without folder and extension.
fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.strip_suffix(".yaml").or_else(|| name.strip_suffix(".yml")).unwrap_or(name)
}

/// Line ends do not count: a checkout on Windows must not look like another workflow.
fn content_hash(source: &str) -> String {
    let mut hasher = Sha256::new();
    hasher.update(format!("{COMPILE_VERSION}:"));
    for (index, line) in source.split("\r\n").enumerate() {
        if index > 0 {
            hasher.update("\n");
        }
        hasher.update(line);
    }
    hasher.update([0]);
    hex::encode(hasher.finalize())
}

/// `[A-Za-z_][A-Za-z0-9_]{0,63}`: usable as a field in expressions and as a part of a variable's name.
fn is_variable(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// `[a-z0-9][a-z0-9_-]{0,63}`.
fn is_job_name(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-'))
}

#[cfg(test)]
mod tests;
