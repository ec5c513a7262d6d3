use std::fmt::Write as _;

use super::*;
use crate::diagnostic::{render_long, render_short};

mod accepted;
mod docs;
mod parts;
mod properties;
mod refused;
mod samples;

const FILE: &str = ".kici/workflows/ci.yaml";

fn short(source: &str) -> Vec<String> {
    compile_file(FILE, source).diagnostics.iter().map(render_short).collect()
}

/// The only workflow of a file without faults.
fn only(source: &str) -> Workflow {
    let compiled = compile_file(FILE, source);
    assert_eq!(short(source), Vec::<String>::new(), "{source}");
    let mut workflows = compiled.workflows;
    assert_eq!(workflows.len(), 1, "{source}");
    workflows.remove(0)
}
