//! Waits for the end, then reads what became of every push.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::StreamExt;
use kici_api::dto::logs::{FollowEvent, FollowRequest};
use kici_api::dto::runs::{JobView, RunDetail, RunFilter, RunView};
use kici_api::page::PageQuery;
use kici_engine::ids::RunId;
use kici_engine::state::JobStatus;
use tokio::time::{Instant, sleep, timeout};

use super::judge::{Excuses, Job, Mark};
use super::load::{Accepted, Workload};
use super::site::Site;
use crate::dev::server::Server;

/// How often the open runs are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Limit of reading the logs of one run; its lines are there or will never be.
const LOGS: Duration = Duration::from_secs(90);
/// Runs read at the same time.
const PARALLEL: usize = 8;

/// What an agent logs when it ends its jobs for want of contact.
const FENCED: &str = "the lease is lost";

/// What became of the pushes.
pub(super) struct Collected {
    pub(super) jobs: Vec<Job>,
    /// Pushes that were accepted and did not become all of their runs, and logs that have no end.
    pub(super) problems: Vec<String>,
    pub(super) missing: usize,
}

/// Waits until no run is open; false when some still are at the limit.
pub(super) async fn quiet(server: &Server, accepted: &[Accepted], limit: Duration) -> bool {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        // It may just be starting.
        if is_quiet(server, accepted).await.unwrap_or(false) {
            return true;
        }
        sleep(LOOK).await;
    }
    false
}

async fn is_quiet(server: &Server, accepted: &[Accepted]) -> Result<bool> {
    let filter = RunFilter { status: Some("pending,running,held,cancelling".into()), ..RunFilter::default() };
    if !server.client().runs(&filter, &PageQuery::default()).await?.items.is_empty() {
        return Ok(false);
    }
    for push in accepted.iter().rev() {
        if server.client().delivery(push.id).await?.finished_at.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reads everything.
pub(super) async fn collect(site: &Site, accepted: &[Accepted]) -> Result<Collected> {
    let mut out = Collected { jobs: Vec::new(), problems: Vec::new(), missing: 0 };
    let mut runs = Vec::new();
    for push in accepted {
        let filter = RunFilter { delivery: Some(push.id), ..RunFilter::default() };
        let of_push = site.server.client().runs(&filter, &PageQuery::default()).await.context("runs")?.items;
        if of_push.len() != Workload::workflows() {
            out.missing += Workload::workflows().abs_diff(of_push.len());
            out.problems.push(format!("delivery {} became {} runs", push.id, of_push.len()));
        }
        runs.extend(of_push);
    }
    let mut each = futures::stream::iter(runs.iter().map(|run| read(&site.server, run))).buffer_unordered(PARALLEL);
    while let Some(read) = each.next().await {
        let (jobs, problem) = read?;
        out.jobs.extend(jobs);
        out.problems.extend(problem);
    }
    let expected = accepted.len() * Workload::per_push();
    if out.jobs.len() != expected {
        out.missing += expected.abs_diff(out.jobs.len());
        out.problems.push(format!("{} jobs exist, {expected} were asked for", out.jobs.len()));
    }
    Ok(out)
}

type Lines = BTreeMap<String, BTreeMap<(u32, usize), Vec<String>>>;

async fn read(server: &Server, run: &RunView) -> Result<(Vec<Job>, Option<String>)> {
    let detail = server.client().run(run.id).await.context("a run")?;
    let mut lines = Lines::new();
    let problem = match timeout(LOGS, follow(server, run.id, &mut lines)).await {
        Ok(result) => result.err().map(|error| format!("the logs of run {} cannot be read: {error:#}", run.id)),
        Err(_) => Some(format!("the logs of run {} have no end", run.id)),
    };
    let jobs = detail.jobs.iter().map(|job| fact(&detail, job, &mut lines)).collect::<Result<_>>()?;
    Ok((jobs, problem))
}

async fn follow(server: &Server, run: RunId, lines: &mut Lines) -> Result<()> {
    let mut events = server.client().follow(run, FollowRequest { follow: true, ..FollowRequest::default() });
    while let Some(event) = events.next().await {
        let FollowEvent::Lines { job_id, epoch, step, lines: more } = event? else { continue };
        // `step-<index>-<ordinal>`; other steps are the agent's own.
        let Some(index) = step.strip_prefix("step-").and_then(|rest| rest.split('-').next()?.parse().ok()) else {
            continue;
        };
        let of_job = lines.entry(job_id.uuid().to_string()).or_default();
        of_job.entry((epoch, index)).or_default().extend(more.into_iter().map(|line| line.text));
    }
    Ok(())
}

fn fact(run: &RunDetail, job: &JobView, lines: &mut Lines) -> Result<Job> {
    let id = job.id.uuid().to_string();
    let workflow = &run.run.workflow;
    let expected = Workload::expected(workflow, &job.base_name);
    let expected = expected.with_context(|| format!("{workflow}/{} is not of the workload", job.base_name))?;
    let needs = |base: &String| run.jobs.iter().any(|other| other.base_name == *base && !is_success(other));
    Ok(Job {
        lines: lines.remove(&id).unwrap_or_default(),
        id,
        name: format!("{workflow}/{}", job.name),
        run: run.run.id.to_string(),
        status: job.status,
        failure: job.failure.as_ref().map(|f| (f.reason, f.class, f.message.clone().unwrap_or_default())),
        agent: job.agent_id.clone(),
        epoch: job.epoch,
        started_at: job.started_at,
        finished_at: job.finished_at,
        expected,
        unmet: job.needs.iter().any(|need| needs(&need.job)),
    })
}

fn is_success(job: &JobView) -> bool {
    job.status == JobStatus::Success
}

/// What the steps wrote.
pub(super) fn marks(directory: &Path) -> Result<Vec<Mark>> {
    let text = fs::read_to_string(directory.join("judge"))?;
    text.lines().map(|line| Mark::read(line).with_context(|| format!("the judge's file holds `{line}`"))).collect()
}

/// What may excuse lost jobs.
pub(super) fn excuses(site: &Site) -> Excuses {
    let fenced = |log: &Path| fs::read_to_string(log).is_ok_and(|text| text.contains(FENCED));
    let fenced: BTreeSet<String> =
        site.agents.iter().filter(|agent| fenced(&agent.log)).map(|agent| agent.name.clone()).collect();
    Excuses { kills: site.kills(), fenced }
}

/// The lines of all programs' logs that speak of a job: the way that it took.
pub(super) fn explain(directory: &Path, job: &str) -> Result<Vec<String>> {
    /// More would not be read.
    const MOST: usize = 60;
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() && (name == "judge" || name.ends_with(".log")) {
            // A killed program may have torn a line.
            let text = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
            found.extend(text.lines().filter(|line| line.contains(job)).map(|line| format!("{name}: {line}")));
        }
    }
    found.truncate(MOST);
    Ok(found)
}
