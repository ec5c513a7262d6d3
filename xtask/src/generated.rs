//! Files that are written from the code and never by hand.
//!
//! A few are written here; the others belong to a test of the crate that knows their content: the test compares, and
//! with `UPDATE=1` it writes.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, bail};
use kici_engine::metrics::{Kind, Service, of};
use kici_engine::schema::workflow_schema;
use xshell::cmd;

use crate::workspace::Workspace;

/// What a file should contain.
type Produce = fn() -> Result<String>;

/// Files that are written here.
const OWN: &[(&str, Produce)] = &[("docs/metrics.md", metrics), ("docs/schema/workflow.json", schema)];

/// Files that a test of a package keeps: the file, the package, a part of the test's name.
const KEPT_BY_TESTS: &[(&str, &str, &str)] = &[
    ("docs/openapi.json", "kici-api", "openapi"),
    ("docs/cli.md", "kici-admin", "docs"),
    ("docs/configuration-reference.md", "kici-control-plane", "reference_page"),
];

/// Writes every generated file.
pub(crate) fn write(workspace: &Workspace) -> Result<()> {
    for (file, produce) in OWN {
        let content = produce()?;
        if read(workspace, file) != content {
            // Folders that are missing are made.
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

/// The JSON Schema of workflow files, for editors.
fn schema() -> Result<String> {
    Ok(format!("{:#}\n", workflow_schema()))
}

/// The reference of metrics.
fn metrics() -> Result<String> {
    let mut text = String::from(
        "# Metrics\n\nWritten by `cargo xtask gen` from the catalogue in `kici-engine`; do not edit.\n\n\
         `GET /metrics` of the orchestrator and, where it has a port, of the agent. No label holds an id of a run or job, a \
         branch or a repository.\n",
    );
    for (service, title) in [(Service::Orchestrator, "Orchestrator"), (Service::Agent, "Agent")] {
        write!(text, "\n## {title}\n\n| name | kind | labels | unit | what |\n|---|---|---|---|---|\n")?;
        for metric in of(service) {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram => "histogram",
            };
            let labels = metric.labels.join(", ");
            writeln!(text, "| `{}` | {kind} | {labels} | {} | {} |", metric.name, metric.unit, metric.help)?;
        }
    }
    Ok(text)
}

/// The file as it is, empty if it is not there yet.
fn read(workspace: &Workspace, file: &str) -> String {
    workspace.read(Path::new(file)).unwrap_or_default()
}
