//! Everything that must hold before a change is merged, cheapest first. The tests come last, so that a log ends with
//! their result.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::Instant;
use xshell::cmd;

use crate::workspace::Workspace;
use crate::{fuzz, generated, test, tidy};

type Check = fn(&Workspace) -> Result<()>;

const CHECKS: [(&str, Check); 6] = [
    ("format", format),
    ("tidy", tidy::run),
    ("clippy", clippy),
    ("documentation", documentation),
    ("generated files", generated::check),
    ("fuzz", fuzz::smoke),
];

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    // A missing database must fail here; on a developer's machine it may skip.
    workspace.shell.set_var("KICI_REQUIRE_PG", "1");
    let mut failed = Vec::new();
    for (name, check) in CHECKS {
        eprintln!("==> {name}");
        let start = Instant::now();
        let result = check(workspace);
        let took = seconds(start.elapsed());
        match result {
            Ok(()) => eprintln!("<== {name}: ok ({took})"),
            Err(error) => {
                eprintln!("<== {name}: FAILED ({took}): {error:#}");
                failed.push(name);
            }
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}; the tests were not run", failed.join(", "));
    }
    eprintln!("==> test");
    test::run(workspace, &[])
}

fn format(workspace: &Workspace) -> Result<()> {
    Ok(cmd!(workspace.shell, "cargo fmt --all -- --check").quiet().run()?)
}

fn clippy(workspace: &Workspace) -> Result<()> {
    Ok(cmd!(workspace.shell, "cargo clippy --quiet --locked --workspace --all-targets --all-features -- -D warnings")
        .quiet()
        .run()?)
}

fn documentation(workspace: &Workspace) -> Result<()> {
    Ok(cmd!(workspace.shell, "cargo doc --quiet --locked --workspace --no-deps --all-features")
        .env("RUSTDOCFLAGS", "-D warnings")
        .quiet()
        .run()?)
}

/// A duration for people: `8.4 s`, `3 min 12 s`.
pub(crate) fn seconds(duration: Duration) -> String {
    match duration.as_secs() {
        0..60 => format!("{:.1} s", duration.as_secs_f64()),
        whole => format!("{} min {:02} s", whole / 60, whole % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        assert_eq!(seconds(Duration::from_millis(8_440)), "8.4 s");
        assert_eq!(seconds(Duration::from_secs(192)), "3 min 12 s");
    }
}
