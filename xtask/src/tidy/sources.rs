//! Rust sources: their size, what must stand at the top of a crate, and what must not stand anywhere.

use std::path::Path;

use anyhow::Result;

use super::Tree;

/// Lines of a file without its tests; the rule of thumb is 500.
const MAX_LINES: usize = 600;
/// Lines of a program's `main.rs`: it parses, loads, builds, waits, and decides nothing.
const MAX_MAIN_LINES: usize = 60;

/// Words that mark unfinished work. Split, so that this file does not find itself.
const UNFINISHED: [&str; 5] = [
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("dbg", "!("),
];

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for path in tree.files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs")) {
        let text = tree.workspace.read(path)?;
        findings.extend(problems(path, &text).into_iter().map(|problem| format!("{}: {problem}", path.display())));
    }
    Ok(findings)
}

fn problems(path: &Path, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let lines = if is_test(path) { 0 } else { lines_without_tests(text) };
    if lines > MAX_LINES {
        problems.push(format!("{lines} lines without tests, more than {MAX_LINES}; split it by meaning"));
    }
    if path.starts_with("bins") && path.ends_with("src/main.rs") && lines > MAX_MAIN_LINES {
        problems.push(format!("{lines} lines, more than {MAX_MAIN_LINES}; a main decides nothing"));
    }
    if is_root(path) {
        if !path.starts_with("crates/sys") && !text.contains("#![forbid(unsafe_code)]") {
            problems.push("a crate other than kici-sys needs `#![forbid(unsafe_code)]`".into());
        }
        if !text.starts_with("//!") && !text.starts_with("#![doc") {
            problems.push("a crate begins with its documentation (`//!`)".into());
        }
    }
    for (number, line) in text.lines().enumerate() {
        if let Some(word) = UNFINISHED.iter().find(|word| line.contains(**word)) {
            problems.push(format!("line {}: `{word}`: finish it or open an issue", number + 1));
        }
    }
    problems
}

/// Whether this file is the root of a library or program.
fn is_root(path: &Path) -> bool {
    ["crates", "bins", "xtask"].iter().any(|top| path.starts_with(top))
        && (path.ends_with("src/lib.rs") || path.ends_with("src/main.rs"))
}

fn is_test(path: &Path) -> bool {
    let inside = |name| path.iter().any(|part| part == name);
    inside("tests")
        || inside("benches")
        || path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"))
}

/// Lines before a test module that ends the file.
fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.windows(2).position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod "));
    tests.unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "//! A crate.\n#![forbid(unsafe_code)]\n";

    fn of(path: &str, text: &str) -> Vec<String> {
        problems(Path::new(path), text)
    }

    #[test]
    fn sizes_count_no_tests() {
        let code = "fn f() {}\n".repeat(600);
        assert!(of("crates/x/src/a.rs", &format!("{code}#[cfg(test)]\nmod tests {{\n{code}}}\n")).is_empty());
        assert_eq!(of("crates/x/src/a.rs", &format!("{code}\n")).len(), 1);
        assert!(of("crates/x/tests/a.rs", &code.repeat(2)).is_empty());
        assert!(of("crates/x/src/a/tests.rs", &code.repeat(2)).is_empty());
        assert_eq!(of("bins/x/src/main.rs", &format!("{ROOT}{}", "fn f() {}\n".repeat(60))).len(), 1);
    }

    #[test]
    fn roots_forbid_unsafe_and_are_documented() {
        assert!(of("crates/x/src/lib.rs", ROOT).is_empty());
        assert_eq!(of("crates/x/src/lib.rs", "fn f() {}\n").len(), 2);
        assert!(of("crates/sys/src/lib.rs", "//! The only crate with unsafe code.\n").is_empty());
    }

    #[test]
    fn unfinished_work_is_found() {
        let line = concat!("    todo", "!(\"later\")");
        assert_eq!(
            of("crates/x/src/a.rs", line)[0],
            format!("line 1: `{}`: finish it or open an issue", UNFINISHED[0])
        );
    }
}
