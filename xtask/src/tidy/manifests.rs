//! Manifests: one version and one feature set per dependency, lints everywhere, a sentence of description, and what a
//! crate needs that is published by itself.

use anyhow::{Context, Result};
use toml::{Table, Value};

use super::Tree;

/// Crates that others use alone: each has a README and a runnable example.
const PUBLISHED: [&str; 6] = ["engine", "protocol", "scaler", "approval", "agent-packaging", "credential-helper"];

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for package in tree.metadata.members() {
        let path = &package.manifest_path;
        let text = tree.workspace.read(path)?;
        let manifest: Table = text.parse().with_context(|| format!("{} is not TOML", path.display()))?;
        let mut problems = problems(&manifest);
        if package.description.as_deref().unwrap_or_default().trim().is_empty() {
            problems.push("has no description".into());
        }
        if PUBLISHED.iter().any(|name| package.name == format!("kici-{name}")) {
            if !package.directory().join("README.md").is_file() {
                problems.push("is published by itself and has no README.md".into());
            }
            if !package.directory().join("examples").is_dir() {
                problems.push("is published by itself and has no example".into());
            }
        }
        findings.extend(problems.into_iter().map(|problem| format!("{}: {problem}", package.name)));
    }
    Ok(findings)
}

fn problems(manifest: &Table) -> Vec<String> {
    let mut problems = Vec::new();
    for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
        for (name, value) in manifest.get(section).and_then(Value::as_table).into_iter().flatten() {
            if !inherited(value) {
                problems.push(format!(
                    "[{section}] {name} has its own version; write `{name}.workspace = true` and the version in the root manifest"
                ));
            }
        }
    }
    if !manifest.get("lints").is_some_and(inherited) {
        problems.push("does not take the workspace lints; add `[lints] workspace = true`".into());
    }
    problems
}

fn inherited(value: &Value) -> bool {
    value.get("workspace").and_then(Value::as_bool) == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_live_in_the_root_manifest() {
        let manifest: Table = "
            [lints]
            workspace = true
            [dependencies]
            good.workspace = true
            also-good = { workspace = true, features = ['x'] }
            bad = '1.0'
            [dev-dependencies]
            worse = { version = '2' }
        "
        .parse()
        .unwrap();
        let problems = problems(&manifest);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("[dependencies] bad"));
        assert!(problems[1].starts_with("[dev-dependencies] worse"));
    }
}
