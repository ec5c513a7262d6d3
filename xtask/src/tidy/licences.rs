//! Every package of the graph may be used under a licence that goes with Apache-2.0 (no GPL, AGPL or SSPL).

use anyhow::Result;

use super::Tree;

/// SPDX ids that we accept. Add one only after reading it.
const ALLOWED: [&str; 11] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for package in &tree.metadata.packages {
        let place = format!("{} {}", package.name, package.version);
        match package.license.as_deref().map(|expression| (expression, allows(expression))) {
            Some((_, Some(true))) => {}
            Some((expression, Some(false))) => {
                findings.push(format!(
                    "{place}: `{expression}` offers no licence of the list in tidy/licences.rs; use another crate"
                ));
            }
            Some((expression, None)) => findings.push(format!("{place}: `{expression}` is not an SPDX expression")),
            None => findings.push(format!("{place}: names no licence; use another crate")),
        }
    }
    Ok(findings)
}

/// Whether an SPDX expression can be met with allowed licences; `None` if it does not parse. `/` is the old way to
/// write `OR`.
fn allows(expression: &str) -> Option<bool> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = tokens.as_slice();
    let verdict = any(&mut rest)?;
    rest.is_empty().then_some(verdict)
}

/// `AND` binds tighter than `OR`.
fn any(rest: &mut &[&str]) -> Option<bool> {
    let mut verdict = all(rest)?;
    while take(rest, "OR") {
        verdict |= all(rest)?;
    }
    Some(verdict)
}

fn all(rest: &mut &[&str]) -> Option<bool> {
    let mut verdict = term(rest)?;
    while take(rest, "AND") {
        verdict &= term(rest)?;
    }
    Some(verdict)
}

fn term(rest: &mut &[&str]) -> Option<bool> {
    if take(rest, "(") {
        let verdict = any(rest)?;
        return take(rest, ")").then_some(verdict);
    }
    let (licence, tail) = rest.split_first()?;
    if ["OR", "AND", "WITH", ")"].contains(licence) {
        return None;
    }
    *rest = tail;
    if !take(rest, "WITH") {
        return Some(ALLOWED.contains(licence));
    }
    let (exception, tail) = rest.split_first()?;
    *rest = tail;
    // An exception only ever permits more than the licence alone.
    Some(ALLOWED.contains(licence) || ALLOWED.contains(&format!("{licence} WITH {exception}").as_str()))
}

fn take(rest: &mut &[&str], token: &str) -> bool {
    let found = rest.first() == Some(&token);
    if found {
        *rest = &rest[1..];
    }
    found
}

#[cfg(test)]
mod tests {
    use super::allows;

    #[test]
    fn expressions() {
        for (expression, expected) in [
            ("MIT", Some(true)),
            ("GPL-3.0-only", Some(false)),
            ("MIT OR GPL-3.0-only", Some(true)),
            ("MIT AND GPL-3.0-only", Some(false)),
            ("Unlicense/MIT", Some(true)),
            ("Apache-2.0 / MIT", Some(true)),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", Some(true)),
            ("(MIT OR Apache-2.0) AND AGPL-3.0", Some(false)),
            ("GPL-2.0 OR MIT AND ISC", Some(true)),
            ("GPL-2.0 OR MIT AND SSPL-1.0", Some(false)),
            ("Apache-2.0 WITH LLVM-exception OR GPL-2.0", Some(true)),
            ("GPL-2.0 WITH Classpath-exception-2.0", Some(false)),
            ("", None),
            ("MIT OR", None),
            ("(MIT", None),
            ("MIT ISC", None),
        ] {
            assert_eq!(allows(expression), expected, "{expression}");
        }
    }
}
