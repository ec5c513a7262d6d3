//! Compiles workflow files: prints what is wrong with them, or the lock document as JSON.
//!
//! `cargo run -p kici-engine --example compile -- .kici/workflows/ci.yaml`

use std::process::ExitCode;

use kici_engine::compile::compile_set;
use kici_engine::diagnostic::render_long;

fn main() -> ExitCode {
    let mut files = Vec::new();
    for path in std::env::args().skip(1) {
        match std::fs::read_to_string(&path) {
            Ok(source) => files.push((path, source)),
            Err(error) => {
                eprintln!("{path}: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    let set = compile_set(&files);
    for ((_, source), (_, compiled)) in files.iter().zip(&set.files) {
        for diagnostic in &compiled.diagnostics {
            eprintln!("{}\n", render_long(diagnostic, source, false));
        }
    }
    if set.files.iter().any(|(_, compiled)| compiled.has_errors()) {
        return ExitCode::FAILURE;
    }
    for workflow in set.workflows() {
        match serde_json::to_string_pretty(workflow) {
            Ok(json) => println!("{json}"),
            Err(error) => eprintln!("{}: {error}", workflow.name),
        }
    }
    ExitCode::SUCCESS
}
