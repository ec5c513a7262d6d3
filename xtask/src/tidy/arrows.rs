//! Crates import downwards only, and a few of them are the only door to something.
//!
//! Development dependencies are free: a test may bring up whatever it needs.

use anyhow::Result;

use super::Tree;

/// The layers, lowest first. Crates of one layer never import each other: the assembly passes a port.
const LAYERS: [&[&str]; 7] = [
    &["engine"],
    &["protocol", "convert"],
    &["forge", "access", "secrets", "blobs", "store", "containers", "sys", "telemetry"],
    &["approval", "scaler", "agent-packaging", "credential-helper", "runner"],
    &["events", "dispatch", "cluster"],
    &["api", "web"],
    &["control-plane"],
];

/// Crates that may import less than their layer allows: the crate, and all that it may import.
const NARROWED: [(&str, &[&str]); 5] = [
    ("api", &["engine", "access"]),
    ("orchestrator", &["engine", "sys", "telemetry", "control-plane"]),
    ("agent", &["engine", "protocol", "sys", "telemetry", "runner", "credential-helper", "agent-packaging"]),
    // The operator's program links no database.
    ("admin", &["engine", "convert", "access", "sys", "forge", "api", "runner", "agent-packaging"]),
    ("xtask", &["engine", "convert", "forge", "protocol", "access", "sys", "telemetry", "api"]),
];

/// Who may import the store. Everyone else states what it needs as a port.
const STORE_USERS: [&str; 4] = ["events", "dispatch", "cluster", "control-plane"];

/// Crates from outside that have one door: the crate, its only importers, and why.
const DOORS: [(&str, &[&str], &str); 8] = [
    ("cel", &["engine"], "expressions are the module engine::expr"),
    ("saphyr-parser", &["engine"], "the one YAML reader is engine::yaml"),
    ("diesel", &["store"], "the store is the only crate that knows SQL"),
    ("diesel-async", &["store"], "the store is the only crate that knows SQL"),
    ("libsqlite3-sys", &["store"], "the store is the only crate that knows SQL"),
    ("tokio-postgres", &["store"], "the store is the only crate that knows SQL"),
    ("object_store", &["blobs"], "objects are reached through blobs"),
    ("aes-gcm", &["secrets"], "sealing is in secrets"),
];

/// What the pure crate never imports: it has no clock, no I/O and no threads.
const IMPURE: [&str; 6] = ["tokio", "tonic", "axum", "reqwest", "hyper", "nix"];

pub(super) fn check(tree: &Tree<'_>) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for package in tree.metadata.members() {
        let from = short(&package.name);
        if rank(from).is_none() {
            findings.push(format!(
                "{} has no layer; give it one in tidy/arrows.rs and in docs/architecture.md",
                package.name
            ));
            continue;
        }
        for dependency in package.dependencies.iter().filter(|dependency| dependency.kind.as_deref() != Some("dev")) {
            if let Some(problem) = arrow(from, &dependency.name) {
                findings.push(format!("{} imports {}: {problem}", package.name, dependency.name));
            }
        }
    }
    Ok(findings)
}

/// What is wrong with `from` importing the package `name`.
fn arrow(from: &str, name: &str) -> Option<String> {
    if let Some((_, doors, why)) = DOORS.iter().find(|(outside, ..)| *outside == name) {
        return (!doors.contains(&from)).then(|| format!("only {} may, {why}", doors.join(", ")));
    }
    if from == "engine" && IMPURE.contains(&name) {
        return Some("the engine is pure".into());
    }
    let to = name.strip_prefix("kici-")?;
    if let Some((_, allowed)) = NARROWED.iter().find(|(crate_, _)| *crate_ == from) {
        return (!allowed.contains(&to)).then(|| format!("it may import only {}", allowed.join(", ")));
    }
    if to == "store" && !STORE_USERS.contains(&from) {
        return Some("state what you need as a trait in ports.rs; the assembly implements it over the store".into());
    }
    (rank(to) >= rank(from)).then(|| "arrows point down only; pass a port through the assembly".into())
}

/// The layer of a crate, counted from the bottom; programs are above all.
fn rank(name: &str) -> Option<usize> {
    if ["orchestrator", "agent", "admin", "xtask"].contains(&name) {
        return Some(LAYERS.len());
    }
    LAYERS.iter().position(|layer| layer.contains(&name))
}

fn short(name: &str) -> &str {
    name.strip_prefix("kici-").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::arrow;

    #[test]
    fn arrows_point_down() {
        for (from, to) in [
            ("dispatch", "kici-store"),
            ("control-plane", "kici-api"),
            ("runner", "kici-sys"),
            ("store", "kici-engine"),
            ("api", "kici-access"),
            ("orchestrator", "kici-control-plane"),
            ("engine", "serde"),
            ("store", "diesel"),
        ] {
            assert_eq!(arrow(from, to), None, "{from} -> {to}");
        }
    }

    #[test]
    fn other_arrows_are_named() {
        for (from, to) in [
            ("engine", "kici-protocol"),
            ("engine", "tokio"),
            ("events", "kici-dispatch"),
            ("store", "kici-sys"),
            ("runner", "kici-store"),
            ("runner", "kici-credential-helper"),
            ("credential-helper", "kici-store"),
            ("api", "kici-store"),
            ("api", "kici-telemetry"),
            ("admin", "kici-control-plane"),
            ("dispatch", "diesel"),
        ] {
            assert!(arrow(from, to).is_some(), "{from} -> {to}");
        }
    }
}
