//! From workflow files to the lock model.

use crate::diagnostic::Diagnostic;
use crate::lock::Workflow;

/// What one file compiles to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Compiled {
    /// The workflows of the documents without errors, in file order.
    pub workflows: Vec<Workflow>,
    /// Everything that is wrong with the file, by position, at most 50.
    pub diagnostics: Vec<Diagnostic>,
}

/// What a set of files compiles to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompiledSet {
    /// Path and result of each file, in the order given.
    pub files: Vec<(String, Compiled)>,
}

impl Compiled {
    /// Whether a document of the file cannot run.
    pub fn has_errors(&self) -> bool {
        self.diagnostics.iter().any(Diagnostic::is_error)
    }
}

/// Compiles one file. `path` counts from the root of the repository and only names things. Never panics; a document with
/// errors yields no workflow.
pub fn compile_file(path: &str, source: &str) -> Compiled {
    let _ = (path, source);
    Compiled::default()
}

/// Compiles files of one repository, where the names of workflows must be unique. A fault in one file does not touch the
/// others.
pub fn compile_set(files: &[(String, String)]) -> CompiledSet {
    CompiledSet { files: files.iter().map(|(path, source)| (path.clone(), compile_file(path, source))).collect() }
}
