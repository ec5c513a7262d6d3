//! A minute of chaos on each database.

use std::path::{Path, PathBuf};
use std::process::Command;

fn chaos(database: &str) {
    let xtask = PathBuf::from(env!("CARGO_BIN_EXE_xtask"));
    let binaries = xtask.parent().expect("a directory");
    for name in ["kici-orchestrator", "kici-agent"] {
        assert!(binaries.join(name).exists(), "{name} is missing; build it with `cargo build --workspace`");
    }
    let mut command = Command::new(&xtask);
    command.args(["chaos", "--seconds", "60", "--jobs", "140", "--agents", "6", "--database", database, "--binaries"]);
    command.arg(binaries);
    let output = command.output().expect("xtask");
    // A failing seed is at the head of what it says, and can be given again.
    let text = format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
}

#[test]
fn a_minute_of_chaos_on_sqlite_loses_nothing_and_runs_nothing_twice() {
    chaos("sqlite");
}

#[test]
#[allow(clippy::disallowed_methods, reason = "continuous integration says that the server must be there")]
fn a_minute_of_chaos_on_postgresql_loses_nothing_and_runs_nothing_twice() {
    if !Path::new("/usr/lib/postgresql").exists() && std::env::var("KICI_REQUIRE_PG").is_err() {
        eprintln!("skipped: PostgreSQL is not installed");
        return;
    }
    chaos("postgres");
}
