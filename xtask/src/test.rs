//! Runs every test on both databases, and sees to it that the machine can.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use nix::unistd::Uid;
use xshell::cmd;

use crate::engines;
use crate::workspace::Workspace;

/// A program that tests start, and the Debian package that brings it.
const PROGRAMS: [(&str, &str); 3] = [("git", "git"), ("bash", "bash"), ("bwrap", "bubblewrap")];
/// What tests of containers start or put into images.
const CONTAINERS: [(&str, &str); 5] = [
    ("dockerd", "docker.io"),
    ("podman", "podman"),
    ("runc", "runc"),
    ("iptables", "iptables"),
    ("busybox", "busybox-static"),
];
/// Names of services in networks of Podman; not in the path.
const NAMES: (&str, &str) = ("/usr/lib/podman/aardvark-dns", "aardvark-dns");

pub(crate) fn run(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    let shell = &workspace.shell;
    if prepare(workspace)? {
        // The server is there, so a test that cannot use it has found a fault, not a reason to skip.
        shell.set_var("KICI_REQUIRE_PG", "1");
    }
    let _engines = engines::start(workspace)?;
    if arguments.is_empty() {
        // Documentation tests first: a log then ends with the runner's summary.
        cmd!(shell, "cargo test --quiet --locked --workspace --all-features --doc").quiet().run()?;
    }
    let nextest = cmd!(shell, "cargo nextest --version").quiet().ignore_stdout().ignore_stderr().run().is_ok();
    let command = if nextest {
        let profile = if workspace.is_ci() { "ci" } else { "default" };
        cmd!(shell, "cargo nextest run --locked --workspace --all-features --profile {profile} {arguments...}")
    } else {
        eprintln!("note: cargo-nextest is not installed (`cargo install --locked cargo-nextest`); using cargo test");
        cmd!(shell, "cargo test --locked --workspace --all-features --all-targets {arguments...}")
    };
    command.quiet().run().context("tests failed")
}

/// Installs what tests need where that is possible. Answers whether PostgreSQL is there.
fn prepare(workspace: &Workspace) -> Result<bool> {
    // Elsewhere engines are named by their sockets, and their tests say so where they are not.
    let of_containers = CONTAINERS.iter().filter(|_| Uid::effective().is_root());
    let mut packages: Vec<&str> = PROGRAMS
        .iter()
        .chain(of_containers)
        .filter(|(program, _)| in_path(workspace, program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if Uid::effective().is_root() && !std::path::Path::new(NAMES.0).is_file() {
        packages.push(NAMES.1);
    }
    let postgres = has_postgres(workspace);
    if !postgres {
        packages.push("postgresql");
    }
    if packages.is_empty() {
        return Ok(true);
    }
    if Uid::effective().is_root() && in_path(workspace, "apt-get").is_some() {
        install(workspace, &packages)?;
        return Ok(has_postgres(workspace));
    }
    let missing = packages.join(", ");
    if workspace.is_ci() || packages != ["postgresql"] {
        bail!("missing on this machine: {missing}; on Debian: apt-get install {}", packages.join(" "));
    }
    eprintln!(
        "note: PostgreSQL is not installed, its tests are skipped. Install the server (on Debian `apt-get install \
         postgresql`) or set KICI_TEST_DATABASE_URL."
    );
    Ok(false)
}

fn install(workspace: &Workspace, packages: &[&str]) -> Result<()> {
    let shell = &workspace.shell;
    eprintln!("installing {}", packages.join(" "));
    let _environment = shell.push_env("DEBIAN_FRONTEND", "noninteractive");
    cmd!(shell, "apt-get -qq update").quiet().ignore_stdout().run().context("apt-get update failed")?;
    cmd!(shell, "apt-get -qq install -y --no-install-recommends {packages...}")
        .quiet()
        .ignore_stdout()
        .run()
        .with_context(|| format!("apt-get could not install {}", packages.join(" ")))
}

/// Whether tests find a server: one that is named, Debian's programs, or programs in the path.
fn has_postgres(workspace: &Workspace) -> bool {
    let debian = || {
        let versions = workspace.shell.read_dir("/usr/lib/postgresql").unwrap_or_default();
        versions.iter().any(|version| version.join("bin/initdb").is_file())
    };
    workspace.shell.var_os("KICI_TEST_DATABASE_URL").is_some() || debian() || in_path(workspace, "initdb").is_some()
}

/// The file that `program` names in the path.
fn in_path(workspace: &Workspace, program: &str) -> Option<PathBuf> {
    let path = workspace.shell.var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}
