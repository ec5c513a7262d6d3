//! Builds the first process of containers as a static program, which the library carries along.

#![allow(clippy::disallowed_methods, reason = "cargo tells build scripts by their environment")]

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=init");
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let program = PathBuf::from(variable("OUT_DIR")).join("kici-init");
    if variable("CARGO_CFG_TARGET_OS") != "linux" {
        // Engines elsewhere run Linux in a virtual machine, for which there is no program here.
        if let Err(error) = std::fs::write(&program, []) {
            panic!("{}: {error}", program.display());
        }
        return;
    }
    // By the compiler itself: the target of the workspace need not be one that links statically, and the program has no
    // dependencies.
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--edition", "2024", "--crate-name", "kici_init", "--crate-type", "bin"]);
    rustc.args(["--target", &variable("TARGET"), "-C", "target-feature=+crt-static"]);
    rustc.args(["-C", "opt-level=s", "-C", "panic=abort", "-C", "lto=fat", "-C", "strip=symbols"]);
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        rustc.args(["-C", &format!("linker={linker}")]);
    }
    rustc.arg("init/main.rs").arg("-o").arg(&program);
    match rustc.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("the first process of containers cannot be built: {status}"),
        Err(error) => panic!("the first process of containers cannot be built: {error}"),
    }
}
