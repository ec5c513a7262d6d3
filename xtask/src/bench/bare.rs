//! What running a job on a host costs: over the plain command, to end it, and to take in much output.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kici_api::dto::logs::{FollowEvent, FollowRequest};
use kici_api::dto::runs::RunDetail;
use kici_engine::ids::RunId;
use kici_engine::time::Clock;
use kici_sys::clock::SystemClock;
use tokio::time::Instant;

use super::measure::{Effort, Figures};
use super::node::{Node, Work, most_resident};
use super::stats::Samples;

/// Bytes of a line of the flood, with its end.
const FLOOD_LINE: usize = 64;
/// What a line of the flood begins with; ten digits of its number, from 1, follow.
const FLOOD_TEXT: &str = "the-quick-brown-fox-jumps-over-the-lazy-dog-and-so-on";
/// Lines of the flood: 1 GiB.
pub(super) const FLOOD_LINES: usize = 1 << 24;
/// Lines of a flood for a quick run.
pub(super) const TRICKLE_LINES: usize = 1 << 18;

/// Jobs on a real agent.
pub(crate) async fn bare(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let mut figures = super::measure::real(node, effort).await?;
    let agent = node.agent().await?;
    figures.extend(overhead(node, effort).await?);
    figures.extend(cancel(node, effort).await?);
    figures.extend(stubborn(node, effort).await?);
    agent.stop().await?;
    // By default the middle of so much is left out, and counted.
    let agent = node.agent_with(&[("KICI_MAX_LOG_SIZE_BYTES", "0".to_owned())]).await?;
    figures.extend(flood(node, effort).await?);
    figures.push(("flood_agent_mib", most_resident(&agent)?));
    agent.stop().await?;
    Ok(figures)
}

/// From the start permit to the end of a job without checkout, less what its only command takes by itself.
async fn overhead(node: &Node, effort: Effort) -> Result<Figures> {
    let (mut jobs, mut plain) = (Samples::default(), Samples::default());
    for round in 0..effort.of(110) {
        let detail = ended(node, Work::Plain).await?;
        let job = detail.jobs.first().context("the run has no job")?;
        let start = Instant::now();
        let mut command = tokio::process::Command::new("bash");
        command.args(["--noprofile", "--norc", "-eo", "pipefail", "-c", "true"]).stdout(Stdio::null());
        anyhow::ensure!(command.status().await?.success(), "bash does not run");
        // The first rounds start the agent and fill caches.
        if round >= effort.of(10) {
            plain.add(start.elapsed());
            let started = job.started_at.context("the job never started")?;
            jobs.add(job.finished_at.context("the job has no end")?.since(started));
        }
    }
    Ok(vec![("bare_overhead_p50_ms", jobs.percentile(50) - plain.percentile(50))])
}

/// From the request to cancel until a job is over whose step left its session and obeys SIGTERM: no process is left by then.
async fn cancel(node: &Node, effort: Effort) -> Result<Figures> {
    let mut samples = Samples::default();
    for _ in 0..effort.of(20) {
        let run = started(node, Work::Hang).await?;
        let asked = SystemClock.now();
        node.server.cancel(run).await?;
        let detail = node.server.ended(run).await?;
        let job = detail.jobs.first().context("the run has no job")?;
        samples.add(job.finished_at.context("the job has no end")?.since(asked));
    }
    Ok(vec![("cancel_p50_ms", samples.percentile(50)), ("cancel_p99_ms", samples.percentile(99))])
}

/// How long a job of [`Work::Stubborn`] has between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(1);

/// From the end of the grace until a job is over whose processes, one in a session of its own, ignore SIGTERM.
async fn stubborn(node: &Node, effort: Effort) -> Result<Figures> {
    let mut samples = Samples::default();
    for _ in 0..effort.of(20) {
        let run = started(node, Work::Stubborn).await?;
        let asked = SystemClock.now();
        node.server.cancel(run).await?;
        let detail = node.server.ended(run).await?;
        let job = detail.jobs.first().context("the run has no job")?;
        let took = job.finished_at.context("the job has no end")?.since(asked);
        samples.add(took.checked_sub(GRACE).context("the job was over before its grace")?);
    }
    Ok(vec![("killed_p50_ms", samples.percentile(50)), ("killed_p99_ms", samples.percentile(99))])
}

/// Much output of one step: every line comes back as it was written, in its order.
async fn flood(node: &Node, effort: Effort) -> Result<Figures> {
    let (work, lines_sent) =
        if effort.is_quick() { (Work::Trickle, TRICKLE_LINES) } else { (Work::Flood, FLOOD_LINES) };
    let bytes = lines_sent * FLOOD_LINE;
    let start = Instant::now();
    let run = started(node, work).await?;
    let detail = node.server.ended(run).await?;
    let took = start.elapsed();
    anyhow::ensure!(crate::dev::report::all_succeeded(std::slice::from_ref(&detail)), "a run failed: {detail:?}");
    let mut events = node.server.client().follow(run, FollowRequest::default());
    let mut next = 0;
    while let Some(event) = events.next().await {
        let FollowEvent::Lines { lines, .. } = event? else { continue };
        for line in lines {
            next += 1;
            let expected = format!("{FLOOD_TEXT}{next:010}");
            anyhow::ensure!(line.text == expected, "line {next} is `{}` instead of `{expected}`", line.text);
        }
    }
    anyhow::ensure!(next == lines_sent, "{next} lines of {lines_sent} came back");
    Ok(vec![("flood_mib_per_s", bytes as f64 / f64::from(1 << 20) / took.as_secs_f64())])
}

pub(super) async fn ended(node: &Node, work: Work) -> Result<RunDetail> {
    let run = started(node, work).await?;
    let detail = node.server.ended(run).await?;
    anyhow::ensure!(crate::dev::report::all_succeeded(std::slice::from_ref(&detail)), "a run failed: {detail:?}");
    Ok(detail)
}

/// A run whose job has started.
async fn started(node: &Node, work: Work) -> Result<RunId> {
    let delivery = node.push(work).await?;
    let decided = loop {
        let decided = node.server.decided(delivery).await?;
        if !decided.runs.is_empty() {
            break decided;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let run = decided.runs.first().context("nothing ran")?.run_id;
    loop {
        let detail = node.server.run(run).await?;
        if detail.jobs.first().is_some_and(|job| job.started_at.is_some()) {
            // The step itself starts a moment later.
            tokio::time::sleep(Duration::from_millis(100)).await;
            return Ok(run);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
