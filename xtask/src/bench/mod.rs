//! `cargo xtask bench`: what the promises of speed and size are worth on this machine. Release builds, real sockets,
//! durability on; the load comes from the same machine.

mod agent;
mod bare;
mod compile;
mod container;
mod first_line;
mod lines;
mod measure;
mod node;
pub(crate) mod postgres;
mod scale;
mod stats;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::{Args, ValueEnum};
use comfy_table::Table;
use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use serde_json::json;
use xshell::cmd;

use self::measure::{Effort, Figures};
use self::node::Node;
use self::postgres::Postgres;
use crate::dev::{server, stack};
use crate::workspace::Workspace;

/// A row of the result: the key, what it is, and the goal with its direction.
const ROWS: &[(&str, &str, &str)] = &[
    ("accept_p50_ms", "webhook accepted at 50/s, p50 (ms)", "<= 5"),
    ("accept_p99_ms", "webhook accepted at 50/s, p99 (ms)", "<= 25"),
    ("offer_p50_ms", "webhook to offer at the agent, p50 (ms)", ""),
    ("offer_p99_ms", "webhook to offer at the agent, p99 (ms)", ""),
    ("planned_p50_ms", "webhook to planned run, p50 (ms)", ""),
    ("granted_p50_ms", "webhook to start permit, p50 (ms)", ""),
    ("first_instruction_p50_ms", "webhook to first instruction, p50 (ms)", "<= 8"),
    ("first_instruction_p99_ms", "webhook to first instruction, p99 (ms)", "<= 30"),
    ("trivial_job_p50_ms", "trivial job with checkout, p50 (ms)", "<= 50"),
    ("trivial_job_p99_ms", "trivial job with checkout, p99 (ms)", ""),
    ("bare_overhead_p50_ms", "job without checkout over its plain command, p50 (ms)", "<= 25"),
    ("container_overhead_p50_ms", "job in a container over its plain command, warm image, p50 (ms)", "<= 350"),
    ("container_overhead_p99_ms", "job in a container over its plain command, warm image, p99 (ms)", ""),
    ("cancel_p50_ms", "cancel to no process left, p50 (ms)", "<= 100"),
    ("cancel_p99_ms", "cancel to no process left, p99 (ms)", ""),
    ("killed_p50_ms", "end of the grace to no process left, SIGTERM ignored, p50 (ms)", "<= 100"),
    ("killed_p99_ms", "end of the grace to no process left, p99 (ms)", ""),
    ("flood_mib_per_s", "1 GiB of output of one step, through the agent (MiB/s)", ""),
    ("flood_agent_mib", "agent resident at most, with 1 GiB of output (MiB)", "<= 64"),
    ("jobs_per_s", "jobs done, 50 simulated agents (1/s)", ">= 300"),
    ("log_lines_per_s", "log lines durable (1/s)", ">= 200000"),
    ("orchestrator_resident_mib", "orchestrator resident, idle (MiB)", "<= 40"),
    ("orchestrator_loaded_mib", "orchestrator resident, at the end of the load (MiB)", ""),
    ("agent_resident_mib", "agent resident, idle (MiB)", "<= 15"),
    ("start_p50_ms", "start to ready, p50 (ms)", "<= 200"),
    ("dev_first_line_p50_ms", "cargo xtask dev to the first line of a step, warm build, p50 (ms)", "<= 1000"),
    ("dev_first_line_ready_p50_ms", "the same without cargo's look at the build, p50 (ms)", ""),
    ("compile_p50_ms", "compile a file of 200 lines, p50 (ms)", "<= 2"),
    ("compile_lines", "lines of that file", ""),
    ("compile_1000_s", "compile 1,000 such files on one core (s)", "<= 1.5"),
    ("idle_1000_writes_per_s", "commits with 1,000 idle agents (1/s)", "<= 1"),
    ("idle_1000_mib", "orchestrator resident with them (MiB)", ""),
    ("idle_1000_cpu_percent", "processor time of one core with them (%)", ""),
    ("idle_10000_writes_per_s", "commits with 10,000 idle agents (1/s)", ""),
    ("idle_10000_mib", "orchestrator resident with them (MiB)", "<= 600"),
    ("idle_10000_cpu_percent", "processor time of one core with them (%)", "<= 15"),
    ("claim_of_100000_p50_ms", "free agent to next offer, 100,000 jobs queued, p50 (ms)", ""),
    ("claim_of_100000_p99_ms", "free agent to next offer, 100,000 jobs queued, p99 (ms)", "<= 10"),
    ("snapshot_before_jobs_per_s", "jobs done before a snapshot is held (1/s)", ""),
    ("snapshot_jobs_per_s", "jobs done after it was held for 5 minutes (1/s)", ""),
    ("snapshot_ratio", "the second over the first", ">= 0.9"),
    ("validate_p50_ms", "kici-admin workflow validate of one such file, p50 (ms)", "<= 20"),
];

/// Limit of one part of the measurements.
const LIMIT: Duration = Duration::from_secs(900);

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Latencies, throughput, logs, sizes, compiler
    Standard,
    /// Jobs on a host: latencies, overhead, cancel, much output
    Bare,
    /// Jobs in containers, with Docker
    Container,
    /// 1,000 and 10,000 idle agents
    Fleet,
    /// Claims while 100,000 jobs wait
    Backlog,
    /// Throughput while an old snapshot is held for 5 minutes (PostgreSQL)
    Snapshot,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Backend {
    Sqlite,
    Postgres,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Measure one database only
    #[arg(long, value_name = "DATABASE")]
    only: Option<Backend>,
    /// What is measured
    #[arg(long, value_name = "PART", value_delimiter = ',', default_value = "standard")]
    part: Vec<Part>,
    /// A twentieth of the work: shows that everything works, the figures mean little
    #[arg(long)]
    quick: bool,
    /// Where the figures are written as JSON
    #[arg(long, value_name = "FILE", default_value = "target/bench.json")]
    output: PathBuf,
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    if cfg!(debug_assertions) {
        // The load and the compiler are measured too, so this program must be a release build itself.
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        return Ok(cmd!(workspace.shell, "cargo run --quiet --release --package xtask -- {arguments...}")
            .quiet()
            .run()?);
    }
    let binaries = stack::build(workspace, true)?;
    cmd!(workspace.shell, "cargo build --quiet --locked --release -p kici-admin").quiet().run()?;
    server::install_crypto();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let effort = Effort { quick: options.quick };
    let engine = match options.part.contains(&Part::Container) {
        true => Some(container::engine(workspace)?),
        false => None,
    };
    let host = engine.as_ref().map(|(_, host)| host.as_str());
    let mut results: BTreeMap<Backend, Figures> = BTreeMap::new();
    let mut failed = 0;
    for backend in [Backend::Sqlite, Backend::Postgres] {
        for part in options.part.iter().filter(|_| options.only.is_none_or(|only| only == backend)) {
            match runtime.block_on(measure(&workspace.root, &binaries, backend, *part, effort, host)) {
                Ok(figures) => results.entry(backend).or_default().extend(figures),
                // Minutes of work of the other parts are not thrown away.
                Err(error) => {
                    eprintln!("error: {}: {error:#}", name(backend));
                    failed += 1;
                }
            }
        }
    }
    println!("{}", table(&results));
    let document = document(workspace, &results)?;
    let output = workspace.root.join(&options.output);
    workspace.shell.write_file(&output, format!("{document:#}\n"))?;
    println!("written to {}", output.display());
    anyhow::ensure!(failed == 0, "{failed} part(s) could not be measured");
    Ok(())
}

async fn measure(
    root: &std::path::Path,
    binaries: &std::path::Path,
    backend: Backend,
    part: Part,
    effort: Effort,
    engine: Option<&str>,
) -> Result<Figures> {
    match part {
        Part::Standard => {
            let mut figures = standard(binaries, backend, effort).await?;
            // It always runs on SQLite.
            if backend == Backend::Sqlite {
                figures.extend(limited("xtask dev", first_line::measure(root, binaries, effort)).await?);
            }
            Ok(figures)
        }
        Part::Bare => alone(binaries, backend, effort, "bare jobs", bare::bare).await,
        Part::Container => {
            let host = engine.context("there is no engine")?;
            let part = async |node: &Arc<Node>, effort| container::container(node, effort, host).await;
            alone(binaries, backend, effort, "containers", part).await
        }
        Part::Fleet => alone(binaries, backend, effort, "fleet", scale::fleet).await,
        Part::Backlog => alone(binaries, backend, effort, "backlog", scale::backlog).await,
        Part::Snapshot => alone(binaries, backend, effort, "snapshot", scale::snapshot).await,
    }
}

/// One measurement on an orchestrator of its own.
async fn alone(
    binaries: &std::path::Path,
    backend: Backend,
    effort: Effort,
    name: &'static str,
    part: impl AsyncFn(&Arc<Node>, Effort) -> Result<Figures>,
) -> Result<Figures> {
    let node = Arc::new(start(binaries, backend).await?);
    let figures = limited(name, part(&node, effort)).await.with_context(|| node.said())?;
    Arc::into_inner(node).ok_or_else(|| anyhow!("a call is still under way"))?.stop().await?;
    Ok(figures)
}

async fn start(binaries: &std::path::Path, backend: Backend) -> Result<Node> {
    let postgres = match backend {
        Backend::Sqlite => None,
        Backend::Postgres => Some(Postgres::start().await?),
    };
    Node::start(binaries, postgres).await
}

async fn standard(binaries: &std::path::Path, backend: Backend, effort: Effort) -> Result<Figures> {
    let node = Arc::new(start(binaries, backend).await?);
    let mut figures = load(&node, effort).await.with_context(|| node.said())?;
    figures.extend(compile::validate(&binaries.join("kici-admin"), effort)?);
    let mut node = Arc::into_inner(node).ok_or_else(|| anyhow!("a call is still under way"))?;
    figures.extend(limited("process", measure::process(&mut node, effort)).await.with_context(|| node.said())?);
    node.stop().await?;
    Ok(figures)
}

/// Everything that one running orchestrator shows.
async fn load(node: &Arc<Node>, effort: Effort) -> Result<Figures> {
    let mut figures = compile::measure(effort)?;
    figures.extend(limited("webhooks", measure::accept(node, effort)).await?);
    figures.extend(limited("offers", measure::offer(node, effort)).await?);
    figures.extend(limited("real agent", measure::real(node, effort)).await?);
    figures.extend(limited("throughput", measure::throughput(node, effort)).await?);
    figures.extend(limited("logs", measure::logs(node, effort)).await?);
    Ok(figures)
}

/// What hangs is an error with a name, not a program that says nothing.
async fn limited(name: &'static str, part: impl Future<Output = Result<Figures>>) -> Result<Figures> {
    eprintln!("{name}");
    let figures = tokio::time::timeout(LIMIT, part).await;
    figures.with_context(|| format!("{name}: no result within {} s", LIMIT.as_secs()))?.context(name)
}

fn table(results: &BTreeMap<Backend, Figures>) -> Table {
    let mut table = Table::new();
    let mut header = vec!["what".to_owned(), "goal".to_owned()];
    header.extend(results.keys().map(|backend| name(*backend).to_owned()));
    table.load_style(UTF8_HORIZONTAL_ONLY).set_header(header);
    for (key, what, goal) in ROWS.iter().copied() {
        let mut row = vec![what.to_owned(), goal.to_owned()];
        row.extend(results.values().map(|figures| figure(figures, key).map_or_else(|| "-".into(), show)));
        table.add_row(row);
    }
    table
}

fn document(workspace: &Workspace, results: &BTreeMap<Backend, Figures>) -> Result<serde_json::Value> {
    let commit = cmd!(workspace.shell, "git rev-parse HEAD").quiet().read()?;
    let cpus = std::thread::available_parallelism()?;
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let rows = ROWS.iter().map(|&(key, what, goal)| {
        let values: serde_json::Map<_, _> = results
            .iter()
            .filter_map(|(backend, figures)| Some((name(*backend).to_owned(), figure(figures, key)?.into())))
            .collect();
        json!({ "key": key, "what": what, "goal": goal, "values": values })
    });
    Ok(json!({
        "commit": commit,
        "machine": { "cpus": cpus, "model": model.map(|(_, model)| model) },
        "results": rows.collect::<Vec<_>>(),
    }))
}

fn figure(figures: &Figures, key: &str) -> Option<f64> {
    figures.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
}

fn show(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

fn name(backend: Backend) -> &'static str {
    match backend {
        Backend::Sqlite => "SQLite",
        Backend::Postgres => "PostgreSQL",
    }
}
