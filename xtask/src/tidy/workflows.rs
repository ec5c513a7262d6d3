//! Our own workflow files and those of the examples compile without a remark.

use std::path::Path;

use anyhow::Result;
use kici_engine::compile::compile_file;
use kici_engine::diagnostic::render_short;

use super::Tree;

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for path in tree.files.iter().filter(|path| is_workflow(path)) {
        let compiled = compile_file(&path.to_string_lossy(), &tree.workspace.read(path)?);
        findings.extend(compiled.diagnostics.iter().map(render_short));
    }
    Ok(findings)
}

fn is_workflow(path: &Path) -> bool {
    path.parent().is_some_and(|folder| folder.ends_with(".kici/workflows"))
        && path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}
