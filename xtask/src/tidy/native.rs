//! Rust and a C compiler are enough to build: no package of the graph asks for a library of the system.

use anyhow::Result;

use super::Tree;
use crate::workspace::Metadata;

/// What a package with native code may be.
enum Native {
    /// It brings the source of its library and compiles it, with these features and without those.
    Bundled { with: &'static [&'static str], without: &'static [&'static str] },
    /// It links nothing: it declares what the kernel offers, or `links` only keeps a second version out.
    Nothing,
    /// It is for a system or target that we do not build for; Linux builds leave it out.
    Elsewhere,
}

/// Packages that name a library to link (`links`) or a system interface (`*-sys`). Add one only after its build was tried on a
/// machine without the library.
const KNOWN: [(&str, Native); 13] = [
    ("core-foundation-sys", Native::Elsewhere),
    ("jni-sys", Native::Elsewhere),
    ("js-sys", Native::Elsewhere),
    ("libsqlite3-sys", Native::Bundled { with: &["bundled"], without: &["buildtime_bindgen"] }),
    ("linux-raw-sys", Native::Nothing),
    ("prettyplease", Native::Nothing),
    ("ring", Native::Bundled { with: &[], without: &[] }),
    ("security-framework-sys", Native::Elsewhere),
    ("sqlite-wasm-rs", Native::Elsewhere),
    ("wasm-bindgen-shared", Native::Elsewhere),
    ("web-sys", Native::Elsewhere),
    ("windows-sys", Native::Elsewhere),
    ("zstd-sys", Native::Bundled { with: &[], without: &["bindgen", "pkg-config"] }),
];

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let mut findings = judge(&tree.metadata);
    for (name, _) in &KNOWN {
        if !tree.metadata.packages.iter().any(|package| package.name == *name) {
            findings.push(format!("{name}: is not in the graph any more; take it off the list in tidy/native.rs"));
        }
    }
    Ok(findings)
}

fn judge(metadata: &Metadata) -> Vec<String> {
    let mut findings = Vec::new();
    let foreign = metadata.packages.iter().filter(|package| !metadata.workspace_members.contains(&package.id));
    for package in foreign.filter(|package| package.links.is_some() || package.name.ends_with("-sys")) {
        let place = format!("{} {}", package.name, package.version);
        let Some((_, native)) = KNOWN.iter().find(|(name, _)| *name == package.name) else {
            let library = package.links.as_deref().unwrap_or("a library of the system");
            findings.push(format!(
                "{place}: links {library}, and is not on the list in tidy/native.rs; use a crate in pure Rust, or one \
                 that brings its library"
            ));
            continue;
        };
        let Native::Bundled { with, without } = native else { continue };
        let node = metadata.resolve.nodes.iter().find(|node| node.id == package.id);
        let has = |feature: &&&str| node.is_some_and(|node| node.features.iter().any(|own| own == **feature));
        for missing in with.iter().filter(|feature| !has(feature)) {
            findings
                .push(format!("{place}: is built without its feature `{missing}`, so it wants the system's library"));
        }
        for wrong in without.iter().filter(has) {
            findings.push(format!("{place}: its feature `{wrong}` asks the system for more than a C compiler"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn metadata(packages: &[(&str, Option<&str>, &[&str])]) -> Metadata {
        let each = |(name, links, _): &(&str, Option<&str>, &[&str])| {
            json!({"id": name, "name": name, "version": "1.0.0", "license": null, "description": null, "links": links,
                "manifest_path": "/x/Cargo.toml", "dependencies": []})
        };
        let nodes = packages.iter().map(|(name, _, features)| json!({"id": name, "features": features}));
        let document = json!({
            "packages": packages.iter().map(each).collect::<Vec<_>>(),
            "workspace_members": ["kici-sys"],
            "resolve": {"nodes": nodes.collect::<Vec<_>>()},
        });
        serde_json::from_value(document).expect("metadata")
    }

    #[test]
    fn only_packages_that_bring_their_library_pass() {
        let good = metadata(&[
            ("kici-sys", None, &[]),
            ("serde", None, &[]),
            ("ring", Some("ring_core"), &[]),
            ("libsqlite3-sys", Some("sqlite3"), &["bundled", "min_sqlite_version_3_14_0"]),
            ("zstd-sys", Some("zstd"), &["std"]),
            ("windows-sys", None, &[]),
        ]);
        assert_eq!(judge(&good), Vec::<String>::new());
        let bad = metadata(&[
            ("pq-sys", Some("pq"), &[]),
            ("openssl-sys", None, &[]),
            ("libsqlite3-sys", Some("sqlite3"), &[]),
            ("zstd-sys", Some("zstd"), &["pkg-config"]),
        ]);
        let findings = judge(&bad);
        assert_eq!(findings.len(), 4, "{findings:?}");
        for (finding, words) in
            findings.iter().zip(["pq-sys 1.0.0: links pq", "openssl-sys", "`bundled`", "`pkg-config`"])
        {
            assert!(finding.contains(words), "{finding}");
        }
    }
}
