//! Rules of the house that the compiler does not check. Every rule collects all its findings; a finding names the
//! place and the remedy.

mod arrows;
mod documents;
mod licences;
mod manifests;
mod metrics;
mod migrations;
mod native;
mod sources;
mod workflows;

use anyhow::{Result, bail};

use crate::workspace::{Metadata, Workspace};

/// What the rules look at.
struct Tree<'a> {
    workspace: &'a Workspace,
    metadata: Metadata,
    files: Vec<std::path::PathBuf>,
}

type Rule = fn(&Tree<'_>) -> Result<Vec<String>>;

const RULES: [(&str, Rule); 9] = [
    ("licences", licences::check),
    ("native code", native::check),
    ("arrows", arrows::check),
    ("manifests", manifests::check),
    ("migrations", migrations::check),
    ("sources", sources::check),
    ("documents", documents::check),
    ("workflows", workflows::check),
    ("metrics", metrics::check),
];

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let tree = Tree { workspace, metadata: workspace.metadata()?, files: workspace.files()? };
    let mut count = 0;
    for (name, rule) in RULES {
        for finding in rule(&tree)? {
            eprintln!("tidy {name}: {finding}");
            count += 1;
        }
    }
    if count > 0 {
        bail!("{count} finding(s)");
    }
    Ok(())
}
