//! From workflow files to the lock model.
//!
//! One pass over the tree of a file finds everything that is wrong with it. Nothing is executed, nothing is read but the
//! text that is given.

mod action;
mod cache;
mod composite;
mod container;
mod dynamic;
mod fragment;
mod git;
mod hooks;
mod hosts;
mod init;
mod job;
pub(crate) mod keys;
mod known;
mod matrix;
mod memo;
mod needs;
mod on;
mod protection;
mod scope;
mod step;
mod turns;
mod values;
mod walk;
mod workflow;

use std::collections::{BTreeSet, HashMap};

use sha2::{Digest, Sha256};

use crate::diagnostic::Diagnostic;
use crate::lock::Workflow;
use crate::yaml::{self, Lines, Span};

pub use composite::STEP_DIR;
pub use fragment::{FragmentError, compile_fragment};
pub(crate) use job::is_ref;

use composite::{Library, part_path};
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
    compile(path, source, &mut names, &Library::default())
}

/// Compiles files of one repository, where the names of workflows must be unique. A fault in one file does not touch the
/// others: of two workflows with one name, the first stays. Files below [`STEP_DIR`] are step files, which workflows use.
pub fn compile_set(files: &[(String, String)]) -> CompiledSet {
    let mut names = HashMap::new();
    let library = Library::new(files);
    let workflows = files.iter().filter(|(path, _)| part_path(path).is_none());
    let mut files: Vec<(String, Compiled)> =
        workflows.map(|(path, source)| (path.clone(), compile(path, source, &mut names, &library))).collect();
    let parts = library.finish().into_iter();
    files.extend(parts.map(|(path, diagnostics)| (path, Compiled { diagnostics, workflows: Vec::new() })));
    CompiledSet { files }
}

/// Where each name of a workflow is taken.
type Names = HashMap<String, String>;

fn compile(path: &str, source: &str, names: &mut Names, library: &Library) -> Compiled {
    let lines = Lines::new(source);
    let mut walk = Walk::new(path, &lines, library);
    let reading = yaml::read(source, yaml::Limits::default());
    let broken = !reading.faults.is_empty();
    walk.yaml_faults(reading.faults);
    let documents: Vec<_> = reading.documents.into_iter().filter(|document| !document.root.is_null()).collect();
    if documents.is_empty() && !broken {
        walk.fault("K0101", Span::on_line(1, 1, 1), "the file holds no workflow")
            .expected(["a map with `on` and `jobs`"]);
    }
    let hash = content_hash(source);
    let mut workflows = Vec::new();
    for mut document in documents {
        let before = walk.errors;
        walk.used.clear();
        // Keys that start with `x-` are free.
        if let yaml::Data::Map(entries) = &mut document.root.data {
            entries.retain(|entry| !entry.key.starts_with("x-"));
        }
        let named = walk.workflow(&document.root, stem(path), &hash);
        let parts = parts_hash(&hash, &walk.used, library);
        let named = named.map(|mut named| {
            named.workflow.content_hash = parts.unwrap_or(named.workflow.content_hash);
            named
        });
        if let Some(named) = named.filter(|_| !document.faulty && walk.errors == before) {
            workflows.extend(unique(&mut walk, named, names));
        }
    }
    let (diagnostics, _) = walk.finish();
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

/// The hash of a workflow that uses step files: its own and those of the files, sorted by path. None where it uses none.
fn parts_hash(own: &str, used: &BTreeSet<String>, library: &Library) -> Option<String> {
    if used.is_empty() {
        return None;
    }
    let mut hasher = Sha256::new();
    hasher.update(own);
    for path in used {
        let part = content_hash(library.source(path).unwrap_or_default());
        hasher.update(format!("\0{path}\0{part}"));
    }
    Some(hex::encode(hasher.finalize()))
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
