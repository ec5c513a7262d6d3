//! The measurements of one orchestrator.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kici_engine::time::Ts;
use kici_protocol::SESSION_ID_HEADER;
use kici_protocol::agent::log_chunk::Chunk;
use kici_protocol::agent::{LogChunk, LogData, LogOpen, LogSeal, StepKey};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;

use super::agent::{Agent, Seen};
use super::lines;
use super::node::{Node, Work, resident};
use super::stats::Samples;
use crate::dev::children::Program;

/// How much is done: a quick run shows that it works, a full one gives figures.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) quick: bool,
}

impl Effort {
    pub(crate) fn is_quick(self) -> bool {
        self.quick
    }

    pub(crate) fn of(self, full: usize) -> usize {
        if self.quick { full.div_ceil(20) } else { full }
    }

    /// Rounds of what gives one figure per round.
    pub(crate) fn rounds(self) -> usize {
        if self.quick { 1 } else { 5 }
    }
}

/// A figure and its unit is in the name of the row.
pub(crate) type Figures = Vec<(&'static str, f64)>;

/// Simulated agents of the throughput measurement.
pub(crate) const AGENTS: usize = 50;
/// Webhooks that are under way at once there.
pub(crate) const SENDERS: usize = 16;
/// Lines of a chunk.
const LINES_PER_CHUNK: usize = 640;

/// Webhooks at 50/s, each answered after it is durable.
pub(crate) async fn accept(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let mut calls = JoinSet::new();
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    for _ in 0..effort.of(1_000) {
        tick.tick().await;
        let node = node.clone();
        calls.spawn(async move {
            let start = Instant::now();
            node.push(Work::Nothing).await.map(|_| start.elapsed())
        });
    }
    let mut samples = Samples::default();
    while let Some(took) = calls.join_next().await {
        samples.add(took??);
    }
    Ok(vec![("accept_p50_ms", samples.percentile(50)), ("accept_p99_ms", samples.percentile(99))])
}

/// From the sending of a webhook to the offer at a simulated agent.
pub(crate) async fn offer(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let (mut agents, mut seen) = simulated(node, 1).await?;
    let mut samples = Samples::default();
    for _ in 0..effort.of(500) {
        let start = Instant::now();
        node.push(Work::One).await?;
        while let Seen::Offered(at) = next(&mut agents, &mut seen).await? {
            samples.add(at - start);
        }
    }
    Ok(vec![("offer_p50_ms", samples.percentile(50)), ("offer_p99_ms", samples.percentile(99))])
}

/// Jobs that 50 simulated agents are given and bring to a durable end: the median of some rounds.
pub(crate) async fn throughput(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let (mut agents, mut seen) = simulated(node, AGENTS).await?;
    let mut rounds = Vec::new();
    for _ in 0..effort.rounds() {
        rounds.push(round_of_jobs(node, effort, &mut agents, &mut seen).await?);
    }
    Ok(vec![("jobs_per_s", median(rounds)), ("orchestrator_loaded_mib", node.resident()?)])
}

/// Jobs per second from the first webhook to the last durable end.
pub(crate) async fn round_of_jobs(
    node: &Arc<Node>,
    effort: Effort,
    agents: &mut JoinSet<Result<()>>,
    seen: &mut mpsc::Receiver<Seen>,
) -> Result<f64> {
    let pushes = effort.of(200);
    let start = Instant::now();
    let mut senders = JoinSet::new();
    let sender = node.clone();
    senders.spawn(async move {
        let calls = stream::iter(0..pushes).map(|_| sender.push(Work::Many)).buffer_unordered(SENDERS);
        calls.try_for_each(|_| async { Ok(()) }).await
    });
    let mut left = pushes * Work::MANY_JOBS;
    while left > 0 {
        if matches!(next(agents, seen).await?, Seen::Done) {
            left -= 1;
        }
    }
    let took = start.elapsed();
    senders.join_next().await.context("the sender is gone")???;
    Ok((pushes * Work::MANY_JOBS) as f64 / took.as_secs_f64())
}

/// The real agent: from a webhook to the first instruction of a step, and to the end of a job with a checkout.
pub(crate) async fn real(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let agent = node.agent().await?;
    let mut planned = Samples::default();
    let mut granted = Samples::default();
    let mut first = Samples::default();
    let mut whole = Samples::default();
    for round in 0..effort.of(220) {
        let (received, detail) = end_to_end(node, Work::FirstInstruction).await?;
        let job = detail.jobs.first().context("the run has no job")?;
        let at = job.outputs.get("at").context("the step said no time")?;
        let (seconds, micros) = at.split_once('.').context("the step said something else than a time")?;
        let at = Ts::from_micros(seconds.parse::<i64>()? * 1_000_000 + micros.parse::<i64>()?);
        let (received_too, trivial) = end_to_end(node, Work::Trivial).await?;
        // The first rounds start the agent and fill caches.
        if round >= effort.of(20) {
            planned.add(job.ready_at.context("the job was never ready")?.since(received));
            granted.add(job.started_at.context("the job never started")?.since(received));
            first.add(at.since(received));
            whole.add(trivial.run.finished_at.context("the run has no end")?.since(received_too));
        }
    }
    let idle = idle(&agent).await?;
    agent.stop().await?;
    Ok(vec![
        ("planned_p50_ms", planned.percentile(50)),
        ("granted_p50_ms", granted.percentile(50)),
        ("first_instruction_p50_ms", first.percentile(50)),
        ("first_instruction_p99_ms", first.percentile(99)),
        ("trivial_job_p50_ms", whole.percentile(50)),
        ("trivial_job_p99_ms", whole.percentile(99)),
        ("agent_resident_mib", idle),
    ])
}

/// How long a run is left alone before anybody asks how it went.
const UNDISTURBED: Duration = Duration::from_millis(60);

async fn end_to_end(node: &Node, work: Work) -> Result<(Ts, kici_api::dto::runs::RunDetail)> {
    let delivery = node.push(work).await?;
    // All times are read from the records afterwards; asking for them meanwhile would be part of what is measured.
    tokio::time::sleep(UNDISTURBED).await;
    let decided = node.server.decided(delivery).await?;
    let run = decided.runs.first().with_context(|| format!("nothing ran: {:?}", decided.delivery))?.run_id;
    let detail = node.server.ended(run).await?;
    anyhow::ensure!(crate::dev::report::all_succeeded(std::slice::from_ref(&detail)), "a run failed: {detail:?}");
    Ok((decided.delivery.received_at, detail))
}

/// Log lines of one step through `StreamLogs`, until all are durable: the median of some rounds. Each round is read back
/// afterwards: a line that is lost, doubled, changed or in another place is an error.
pub(crate) async fn logs(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let mut agent = Agent::register(&node.server.url(), &node.agent_token().await?, "logger".into()).await?;
    let mut rounds = Vec::new();
    for _ in 0..effort.rounds() {
        rounds.push(round_of_lines(node, effort, &mut agent).await?);
    }
    Ok(vec![("log_lines_per_s", median(rounds))])
}

async fn round_of_lines(node: &Node, effort: Effort, agent: &mut Agent) -> Result<f64> {
    node.push(Work::One).await?;
    let job = agent.start_one().await?;
    let step = StepKey { kind: "step".into(), owner_index: 0, ordinal: 0 };
    agent.step(job.clone(), step.clone(), "running", (0, 0)).await?;
    let (chunks, outgoing) = mpsc::channel(64);
    let mut request = Request::new(ReceiverStream::new(outgoing));
    request.metadata_mut().insert("authorization", agent.token.clone());
    request.metadata_mut().insert(SESSION_ID_HEADER, agent.session.parse()?);
    chunks.send(LogChunk { chunk: Some(Chunk::Open(LogOpen { job: job.clone() })) }).await?;
    let mut acks = agent.gateway.clone().stream_logs(request).await?.into_inner();

    let count = effort.of(1_000);
    // Every line differs. They are made before the clock runs.
    let chunk = |number| lines::chunk(number * LINES_PER_CHUNK, LINES_PER_CHUNK);
    let data: Vec<bytes::Bytes> = (0..count).map(chunk).collect();
    let lines = (count * LINES_PER_CHUNK) as u64;
    let total: u64 = data.iter().map(|chunk| chunk.len() as u64).sum();
    let start = Instant::now();
    let mut sender = JoinSet::new();
    sender.spawn(async move {
        let mut offset = 0;
        for data in data {
            let next = offset + data.len() as u64;
            let chunk = LogData { step: Some(step.clone()), offset, data };
            chunks.send(LogChunk { chunk: Some(Chunk::Data(chunk)) }).await?;
            offset = next;
        }
        let seal = LogSeal { step: Some(step.clone()), offset: total, lines, ..LogSeal::default() };
        chunks.send(LogChunk { chunk: Some(Chunk::Seal(seal)) }).await?;
        anyhow::Ok((chunks, step))
    });
    let mut durable = None;
    while let Some(ack) = acks.message().await? {
        if ack.durable_offset >= total && durable.is_none() {
            durable = Some(start.elapsed());
        }
        if ack.sealed {
            break;
        }
    }
    let (_chunks, step) = sender.join_next().await.context("the sender is gone")???;
    agent.step(job.clone(), step, "success", (total, lines)).await?;
    agent.succeed(job.clone(), total).await?;
    agent.settled().await?;
    let took = durable.context("not every line was acknowledged")?;
    lines::read_back(&node.server, &job.context("a job without a name")?, lines).await?;
    Ok(lines as f64 / took.as_secs_f64())
}

/// Memory when nothing happens, and the time of a start on the database that all this left.
pub(crate) async fn process(node: &mut Node, effort: Effort) -> Result<Figures> {
    let mut starts = Samples::default();
    for _ in 0..effort.of(20) {
        starts.add(node.restart().await?);
    }
    tokio::time::sleep(SETTLE).await;
    Ok(vec![("start_p50_ms", starts.percentile(50)), ("orchestrator_resident_mib", node.resident()?)])
}

/// How long a process is left alone before its memory is looked at.
const SETTLE: Duration = Duration::from_secs(3);

pub(crate) fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds.get(rounds.len() / 2).copied().unwrap_or(f64::NAN)
}

async fn idle(program: &Program) -> Result<f64> {
    tokio::time::sleep(SETTLE).await;
    resident(program)
}

/// Registered agents at work, and what they see.
pub(crate) async fn simulated(node: &Node, count: usize) -> Result<(JoinSet<Result<()>>, mpsc::Receiver<Seen>)> {
    let token = node.agent_token().await?;
    let (sender, seen) = mpsc::channel(1_024);
    let mut agents = JoinSet::new();
    for number in 0..count {
        let mut agent = Agent::register(&node.server.url(), &token, format!("simulated-{number}")).await?;
        let sender = sender.clone();
        agents.spawn(async move { agent.work(&sender).await });
    }
    Ok((agents, seen))
}

/// What an agent sees next; an agent that ends ends the measurement.
pub(crate) async fn next(agents: &mut JoinSet<Result<()>>, seen: &mut mpsc::Receiver<Seen>) -> Result<Seen> {
    tokio::select! {
        seen = seen.recv() => seen.context("all agents are gone"),
        ended = agents.join_next() => {
            ended.context("there are no agents")???;
            anyhow::bail!("a simulated agent was sent away")
        }
    }
}
