//! The measurements that need a fleet, a backlog or a long time; asked for by `--part`.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::agent::{Agent, Seen};
use super::measure::{Effort, Figures, SENDERS, median, next, round_of_jobs, simulated};
use super::node::{Node, Work};
use super::stats::Samples;

/// Agents that are connected and have nothing to do.
const IDLE_FEW: usize = 1_000;
const IDLE_MANY: usize = 10_000;
/// How long they are watched.
const WATCH: Duration = Duration::from_secs(60);
/// How often an agent without work gives a sign of life: what the orchestrator asks for.
const HEARTBEAT: Duration = Duration::from_secs(30);
/// Jobs that wait while claims are measured.
const BACKLOG: usize = 100_000;
/// How long an old snapshot is held open.
const SNAPSHOT: Duration = Duration::from_secs(300);

/// What connected agents cost that do nothing: writes, memory, processor.
pub(crate) async fn fleet(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let token = node.agent_token().await?;
    let mut agents = JoinSet::new();
    let mut connected = 0;
    let mut figures = Vec::new();
    for (count, keys) in [
        (effort.of(IDLE_FEW), ["idle_1000_writes_per_s", "idle_1000_mib", "idle_1000_cpu_percent"]),
        (effort.of(IDLE_MANY), ["idle_10000_writes_per_s", "idle_10000_mib", "idle_10000_cpu_percent"]),
    ] {
        let url = node.server.url();
        let more: Vec<Agent> = stream::iter(connected..count)
            .map(|number| Agent::register(&url, &token, format!("idle-{number}")))
            .buffer_unordered(SENDERS)
            .try_collect()
            .await?;
        for mut agent in more {
            agents.spawn(async move { agent.idle(HEARTBEAT).await });
        }
        connected = count;
        // Registrations are over and every agent has given its first sign of life.
        tokio::time::sleep(HEARTBEAT).await;
        let (writes, cpu, start) = (node.commits().await?, node.cpu()?, Instant::now());
        tokio::select! {
            () = tokio::time::sleep(WATCH) => {}
            ended = agents.join_next() => {
                ended.context("there are no agents")???;
                bail!("an idle agent was sent away")
            }
        }
        let took = start.elapsed().as_secs_f64();
        let written = node.commits().await? - writes;
        let busy = node.cpu()? - cpu;
        let values = [written / took, node.resident()?, busy.as_secs_f64() / took * 100.0];
        figures.extend(keys.into_iter().zip(values));
    }
    Ok(figures)
}

/// How long an agent that has become free waits for its next job while very many jobs wait.
pub(crate) async fn backlog(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let pushes = effort.of(BACKLOG) / Work::MANY_JOBS;
    let calls = stream::iter(0..pushes).map(|_| node.push(Work::Many)).buffer_unordered(SENDERS);
    calls.try_for_each(|_| async { Ok(()) }).await?;
    while node.queued().await? < (pushes * Work::MANY_JOBS) as f64 {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let (mut agents, mut seen) = simulated(node, 1).await?;
    let mut samples = Samples::default();
    let mut free: Option<Instant> = None;
    let wanted = effort.of(1_000);
    for done in 0.. {
        match next(&mut agents, &mut seen).await? {
            Seen::Offered(at) => samples.extend(free.take().map(|free| at - free)),
            Seen::Done => free = Some(Instant::now()),
        }
        if done >= 2 * wanted {
            break;
        }
    }
    Ok(vec![("claim_of_100000_p50_ms", samples.percentile(50)), ("claim_of_100000_p99_ms", samples.percentile(99))])
}

/// Jobs per second while another connection holds an old snapshot, which keeps PostgreSQL from removing dead rows.
pub(crate) async fn snapshot(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let Some(url) = node.postgres_url() else { return Ok(Figures::new()) };
    let (mut agents, mut seen) = simulated(node, super::measure::AGENTS).await?;
    let mut before = Vec::new();
    for _ in 0..effort.rounds() {
        before.push(round_of_jobs(node, effort, &mut agents, &mut seen).await?);
    }
    let held = if effort.quick { SNAPSHOT / 20 } else { SNAPSHOT };
    let mut holder = hold(&url, held)?;
    let start = Instant::now();
    let mut during = Vec::new();
    while start.elapsed() < held {
        during.push(round_of_jobs(node, effort, &mut agents, &mut seen).await?);
    }
    holder.kill().await?;
    let last = during.split_off(during.len().saturating_sub(effort.rounds()));
    let (before, last) = (median(before), median(last));
    Ok(vec![("snapshot_before_jobs_per_s", before), ("snapshot_jobs_per_s", last), ("snapshot_ratio", last / before)])
}

fn hold(url: &str, long: Duration) -> Result<tokio::process::Child> {
    let text = format!(
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM jobs; SELECT pg_sleep({});",
        long.as_secs() + 60
    );
    let bin = super::postgres::programs().context("PostgreSQL is not installed")?;
    let mut psql = Command::new(bin.join("psql"));
    psql.args(["--no-psqlrc", "--quiet", "--dbname", url, "--command", &text]);
    Ok(psql.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true).spawn()?)
}

impl Agent {
    /// Gives signs of life until the session ends, which it should not.
    async fn idle(&mut self, every: Duration) -> Result<()> {
        let mut beat = tokio::time::interval(every);
        loop {
            tokio::select! {
                _ = beat.tick() => self.heartbeat().await?,
                frame = self.answers.message() => {
                    if let Some(Down::Goodbye(goodbye)) = frame?.context("the session ended")?.frame {
                        bail!("the session was closed: {goodbye:?}");
                    }
                },
            }
        }
    }
}
