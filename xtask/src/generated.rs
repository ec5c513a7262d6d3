//! Files that are written from the code and never by hand.
//!
//! A few are written here; the others belong to a test of the crate that knows their content: the test compares, and
//! with `UPDATE=1` it writes.

use std::path::Path;

use anyhow::{Result, bail};
use xshell::cmd;

use crate::workspace::Workspace;

/// What a file should contain.
type Produce = fn() -> Result<String>;

/// Files that are written here.
const OWN: &[(&str, Produce)] = &[];

/// Files that a test of a package keeps: the file, the package, the name of the test.
const KEPT_BY_TESTS: &[(&str, &str, &str)] = &[];

/// Writes every generated file.
pub(crate) fn write(workspace: &Workspace) -> Result<()> {
    for (file, produce) in OWN {
        let content = produce()?;
        if read(workspace, file) != content {
            workspace.shell.write_file(workspace.root.join(file), content)?;
            eprintln!("wrote {file}");
        }
    }
    for (file, package, test) in KEPT_BY_TESTS {
        let before = read(workspace, file);
        cmd!(workspace.shell, "cargo test --quiet --package {package} --all-features {test}")
            .env("UPDATE", "1")
            .quiet()
            .ignore_stdout()
            .run()?;
        if read(workspace, file) != before {
            eprintln!("wrote {file}");
        }
    }
    Ok(())
}

/// Fails if a file that is written here is not what the code says. The tests see to the others.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let mut stale = Vec::new();
    for (file, produce) in OWN {
        if read(workspace, file) != produce()? {
            stale.push(*file);
        }
    }
    for (file, ..) in KEPT_BY_TESTS {
        if !workspace.root.join(file).is_file() {
            stale.push(file);
        }
    }
    if !stale.is_empty() {
        bail!("{} not what the code says; run `cargo xtask gen` and commit the result", stale.join(", "));
    }
    Ok(())
}

/// The file as it is, empty if it is not there yet.
fn read(workspace: &Workspace, file: &str) -> String {
    workspace.read(Path::new(file)).unwrap_or_default()
}
