//! Documents: links lead somewhere, and the index of `docs/` names every page.

use std::path::{Component, Path, PathBuf};

use anyhow::Result;

use super::Tree;

const INDEX: &str = "docs/README.md";

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    let mut pages = Vec::new();
    let mut indexed = Vec::new();
    for path in tree.files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "md")) {
        let base = path.parent().unwrap_or(Path::new(""));
        for (line, link) in links(&tree.workspace.read(path)?) {
            let target = normal(&base.join(&link));
            if !tree.workspace.root.join(&target).exists() {
                findings.push(format!("{}:{line}: the link `{link}` leads nowhere", path.display()));
            }
            if path == Path::new(INDEX) {
                indexed.push(target);
            }
        }
        if path.parent() == Some(Path::new("docs")) && path != Path::new(INDEX) {
            pages.push(path);
        }
    }
    for page in pages.into_iter().filter(|page| !indexed.contains(page)) {
        findings.push(format!("{INDEX} does not name {}", page.display()));
    }
    Ok(findings)
}

/// The local targets of inline links, with their line numbers. Code blocks do not count.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    let mut in_code = false;
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        for part in line.split("](").skip(1) {
            let Some(target) = part.split(')').next() else { continue };
            let file = target.split('#').next().unwrap_or_default();
            if !file.is_empty() && !file.contains("://") && !file.starts_with("mailto:") {
                links.push((number + 1, file.to_owned()));
            }
        }
    }
    links
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_links_are_found() {
        let text = "[a](b.md) [c](https://x.y/z) [d](e.md#f) [g](#h)\n```\n[no](code.md)\n```\n[i](../j)";
        assert_eq!(links(text), [(1, "b.md".into()), (1, "e.md".into()), (5, "../j".into())]);
        assert_eq!(normal(Path::new("docs/../examples/./hello")), Path::new("examples/hello"));
    }
}
