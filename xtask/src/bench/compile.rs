//! The time to compile a workflow file.

use std::fmt::Write;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use kici_engine::compile::{compile_file, compile_set};
use tokio::time::Instant;

use super::measure::{Effort, Figures};
use super::stats::Samples;

/// A file of 200 lines with what files have: needs, a matrix, expressions, multi-line scripts.
fn workflow() -> Result<String> {
    let mut text =
        String::from("name: large\non:\n  push: { branches: [main, 'release/**'] }\n  pull_request: {}\njobs:\n");
    for number in 0..13 {
        let needs = if number == 0 { "[]".to_owned() } else { format!("[job-{}]", number - 1) };
        write!(
            text,
            "  job-{number}:\n    runs_on: [linux, 'gpu-*']\n    needs: {needs}\n    if: branch == 'main' || event.kind == 'push'\n    \
             matrix: {{ os: [a, b], db: [x, y] }}\n    env:\n      NAME: '${{{{ matrix.os }}}}-${{{{ matrix.db }}}}'\n    \
             steps:\n      - id: build\n        name: build\n        run: |\n          make\n          make install\n      - make test\n      - make package\n"
        )?;
    }
    Ok(text)
}

pub(crate) fn measure(effort: Effort) -> Result<Figures> {
    let text = workflow()?;
    let compiled = compile_file("large.yaml", &text);
    ensure!(compiled.diagnostics.is_empty(), "the file does not compile: {:?}", compiled.diagnostics);
    let mut samples = Samples::default();
    for _ in 0..if effort.quick { 50 } else { 1_000 } {
        let start = Instant::now();
        black_box(compile_file("large.yaml", black_box(&text)));
        samples.add(start.elapsed());
    }
    let many = if effort.quick { 50 } else { 1_000 };
    let name = |n: usize| text.replacen("name: large", &format!("name: large-{n}"), 1);
    let files: Vec<(String, String)> = (0..many).map(|n| (format!(".kici/workflows/{n}.yaml"), name(n))).collect();
    let start = Instant::now();
    let set = compile_set(black_box(&files));
    let took = start.elapsed();
    ensure!(set.workflows().count() == many, "not all of them compile");
    Ok(vec![
        ("compile_p50_ms", samples.percentile(50)),
        ("compile_lines", text.lines().count() as f64),
        ("compile_1000_s", took.as_secs_f64() * 1_000.0 / many as f64),
    ])
}

/// The time of the whole command on one file, as somebody waits for it.
pub(crate) fn validate(admin: &Path, effort: Effort) -> Result<Figures> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("large.yaml");
    std::fs::write(&file, workflow()?)?;
    let mut samples = Samples::default();
    for _ in 0..if effort.quick { 5 } else { 100 } {
        let start = Instant::now();
        let done = Command::new(admin).args(["workflow", "validate"]).arg(&file).output()?;
        samples.add(start.elapsed());
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    Ok(vec![("validate_p50_ms", samples.percentile(50))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_what_it_claims_to_be() {
        let text = workflow().unwrap();
        assert_eq!(text.lines().count(), 200);
        assert_eq!(compile_file("large.yaml", &text).diagnostics, []);
    }
}
