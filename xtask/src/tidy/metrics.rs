//! The catalogue of metrics is what the programs write: nothing more, nothing less.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use kici_engine::metrics::CATALOGUE;

use super::Tree;

const OWN: &str = "crates/engine/src/metrics.rs";

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let mut written = BTreeSet::new();
    for path in tree.files.iter().filter(|path| is_program(path)) {
        written.extend(names(&tree.workspace.read(path)?).map(str::to_owned));
    }
    let declared: BTreeSet<&str> = CATALOGUE.iter().map(|metric| metric.name).collect();
    let idle = declared.iter().filter(|name| !written.contains(**name));
    let stray = written.iter().filter(|name| !declared.contains(name.as_str()));
    let idle = idle.map(|name| format!("{OWN}: nothing writes `{name}`; write it, or take it out"));
    let stray = stray.map(|name| format!("`{name}` is not declared; add it to {OWN}"));
    Ok(idle.chain(stray).collect())
}

fn is_program(path: &Path) -> bool {
    let ours = path.starts_with("crates") || path.starts_with("bins");
    ours && path.components().any(|part| part.as_os_str() == "src")
        && path.extension().is_some_and(|extension| extension == "rs")
        && path != Path::new(OWN)
}

/// Texts of a source that are names of metrics.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let prefixes = ["kici_orch_", "kici_agent_"];
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    let quoted = text.split('"').skip(1);
    quoted.filter(move |word| {
        prefixes.iter().any(|prefix| word.len() > prefix.len() && word.starts_with(prefix)) && word.bytes().all(legal)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_quoted_names_count() {
        let text =
            r#"metrics::counter!("kici_orch_runs_total", "result" => x); format!("kici_agent_{}"); "kici_agent_""#;
        assert_eq!(names(text).collect::<Vec<_>>(), ["kici_orch_runs_total"]);
    }
}
