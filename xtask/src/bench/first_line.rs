//! `cargo xtask dev` as a person meets it: from its start to the first line that a step has printed.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tokio::time::Instant;

use super::measure::{Effort, Figures};
use super::stats::Samples;

/// Rounds of a full measurement.
const ROUNDS: usize = 20;
/// A line that the first step of `examples/hello` with output prints.
const LINE: &str = " is well formed";

/// With the look at what is built already, which cargo takes, and without it. The first round of each makes the data
/// directory and is not counted.
pub(super) async fn measure(root: &Path, binaries: &Path, effort: Effort) -> Result<Figures> {
    let mut figures = Vec::new();
    let ready = binaries.to_str().context("the directory of the programs is not UTF-8")?;
    for (key, how) in
        [("dev_first_line_p50_ms", &["--release"][..]), ("dev_first_line_ready_p50_ms", &["--binaries", ready][..])]
    {
        let directory = tempfile::Builder::new().prefix("kici-bench-dev").tempdir()?;
        let mut samples = Samples::default();
        for round in 0..=effort.of(ROUNDS) {
            let took = once(root, &directory.path().join("data"), how).await?;
            if round > 0 {
                samples.add(took);
            }
        }
        figures.push((key, samples.percentile(50)));
    }
    Ok(figures)
}

async fn once(root: &Path, data: &Path, how: &[&str]) -> Result<Duration> {
    let start = Instant::now();
    let mut child = Command::new(std::env::current_exe()?)
        .args(["dev", "--once", "--data"])
        .arg(data)
        .args(how)
        .current_dir(root)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    let (mut took, mut said) = (None, String::new());
    while let Some(line) = lines.next_line().await? {
        if took.is_none() && line.ends_with(LINE) {
            took = Some(start.elapsed());
        }
        said += &line;
        said.push('\n');
    }
    let output = child.wait_with_output().await?;
    anyhow::ensure!(
        output.status.success(),
        "cargo xtask dev ended with {}:\n{said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    took.with_context(|| format!("no step said anything:\n{said}"))
}
