//! `cargo xtask chaos`: an installation of real processes under load, whose programs are killed, frozen and cut off at random.
//! Afterwards three witnesses are compared: the database, the logs, and a file that the steps themselves wrote. See
//! `docs/chaos.md`.

mod collect;
mod judge;
mod load;
mod plan;
mod process;
mod proxy;
mod site;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::Table;
use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use tokio::time::Instant;

use self::judge::Verdict;
use self::load::Workload;
use self::plan::{Fault, Timed, Weather};
use self::site::{RECOVERY, Site};
use crate::ci::seconds;
use crate::dev::{server, stack};
use crate::workspace::Workspace;

/// The faults end a little before the load does, and the load before the end of the given time.
const CALM: f64 = 0.9;
/// Problems that are explained with the way that the job took.
const EXPLAINED: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Database {
    Sqlite,
    Postgres,
    Both,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Which faults happen when; a failing one can be given again
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// How long there are faults
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u64).range(5..))]
    seconds: u64,
    /// Jobs, at least
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    jobs: usize,
    /// Agents; every second one may have two jobs
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=200))]
    agents: u64,
    /// On which database
    #[arg(long, value_name = "DATABASE", default_value = "both")]
    database: Database,
    /// Use release builds
    #[arg(long)]
    release: bool,
    /// Programs that are built already, instead of building them
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "release")]
    binaries: Option<PathBuf>,
    /// Keep the data directory of a good run as well
    #[arg(long)]
    keep: bool,
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<ExitCode> {
    let binaries = stack::binaries(workspace, options.binaries.as_deref(), options.release)?;
    server::install_crypto();
    let seed = match options.seed {
        Some(seed) => seed,
        // Short, so that it can be typed.
        None => getrandom::u64()? % 1_000_000,
    };
    println!("seed {seed}");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut results = Vec::new();
    for (database, with_postgres) in [(Database::Sqlite, false), (Database::Postgres, true)] {
        if options.database == database || options.database == Database::Both {
            let name = if with_postgres { "PostgreSQL" } else { "SQLite" };
            println!("== {name}");
            results.push((name, runtime.block_on(attempt(&binaries, options, seed, with_postgres))?));
        }
    }
    println!("{}", table(&results));
    let good = results.iter().all(|(_, result)| result.is_good());
    let verdict = if good { "nothing was lost" } else { "FAILED" };
    println!("seed {seed}: {verdict}");
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One run on one database.
struct Outcome {
    verdict: Verdict,
    kills: usize,
    freezes: usize,
    cuts: usize,
    pushes: usize,
    own_ends: u32,
    took: Duration,
}

impl Outcome {
    fn is_good(&self) -> bool {
        self.verdict.problems.is_empty() && self.own_ends == 0
    }
}

async fn attempt(binaries: &Path, options: &Options, seed: u64, with_postgres: bool) -> Result<Outcome> {
    let directory = tempfile::Builder::new().prefix("kici-chaos-").tempdir()?;
    // The database's own user must get through to its part.
    std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let path = directory.path().to_owned();
    let outcome = survive(binaries, &path, options, seed, with_postgres).await;
    let good = outcome.as_ref().is_ok_and(Outcome::is_good);
    if good && !options.keep {
        return outcome;
    }
    println!("everything is kept in {}", directory.keep().display());
    if let Ok(outcome) = &outcome {
        report(&path, &outcome.verdict)?;
    }
    outcome
}

async fn survive(
    binaries: &Path,
    directory: &Path,
    options: &Options,
    seed: u64,
    with_postgres: bool,
) -> Result<Outcome> {
    let agents = usize::try_from(options.agents)?;
    let length = Duration::from_secs(options.seconds);
    let load = Workload::of(options.jobs);
    let site = Site::start(binaries, directory, agents, with_postgres, &load).await?;
    let faults = plan::plan(seed, length.mul_f64(CALM), agents, with_postgres);
    let (kills, freezes, cuts) = count(&faults);
    let start = Instant::now();
    let (accepted, ()) = tokio::try_join!(load.send(&site, start, length.mul_f64(CALM)), site.suffer(faults, start))?;
    eprintln!("{:7.2} s  the faults are over", start.elapsed().as_secs_f64());
    // What is lost now is decided within the recovery window; then the rest of the work is done undisturbed.
    let limit = RECOVERY * 3 + Duration::from_secs(60) + length / 2;
    let quiet = collect::quiet(&site.server, &accepted, limit).await;
    eprintln!(
        "{:7.2} s  {}",
        start.elapsed().as_secs_f64(),
        if quiet { "all has ended" } else { "some have not ended" }
    );
    let collected = collect::collect(&site, &accepted).await.context("the end")?;
    let mut verdict = judge::judge(&collected.jobs, &collect::marks(directory)?, &collect::excuses(&site));
    verdict.lost += collected.missing;
    verdict.problems.extend(collected.problems.into_iter().map(|problem| (None, problem)));
    let own_ends = site.agents.iter().map(|agent| agent.own_ends()).sum();
    if site.orchestrator.own_ends() > 0 {
        println!("note: the orchestrator ended {} times by itself", site.orchestrator.own_ends());
    }
    site.stop().await;
    Ok(Outcome { verdict, kills, freezes, cuts, pushes: accepted.len(), own_ends, took: start.elapsed() })
}

fn count(faults: &[Timed]) -> (usize, usize, usize) {
    let count = |wanted: fn(&Fault) -> bool| faults.iter().filter(|(_, fault)| wanted(fault)).count();
    (
        count(|fault| matches!(fault, Fault::Kill(..))),
        count(|fault| matches!(fault, Fault::Freeze(..))),
        count(|fault| matches!(fault, Fault::Network { weather, .. } if !matches!(weather, Weather::Delay(_)))),
    )
}

fn report(directory: &Path, verdict: &Verdict) -> Result<()> {
    for (number, (job, problem)) in verdict.problems.iter().enumerate() {
        println!("PROBLEM {problem}");
        if let (Some(job), true) = (job, number < EXPLAINED) {
            for line in collect::explain(directory, job)? {
                println!("    {line}");
            }
        }
    }
    Ok(())
}

fn table(results: &[(&str, Outcome)]) -> Table {
    type Row = (&'static str, fn(&Outcome) -> String);
    const ROWS: [Row; 16] = [
        ("time", |o| seconds(o.took)),
        ("kill -9", |o| o.kills.to_string()),
        ("freezes", |o| o.freezes.to_string()),
        ("cuts and stalls", |o| o.cuts.to_string()),
        ("pushes accepted", |o| o.pushes.to_string()),
        ("jobs", |o| o.verdict.jobs.to_string()),
        ("  succeeded", |o| o.verdict.succeeded.to_string()),
        ("  lost with a killed agent", |o| o.verdict.excused.to_string()),
        ("  skipped after such a one", |o| o.verdict.skipped.to_string()),
        ("log lines", |o| o.verdict.lines.to_string()),
        ("LOST", |o| o.verdict.lost.to_string()),
        ("RUN TWICE", |o| o.verdict.double.to_string()),
        ("HUNG", |o| o.verdict.hung.to_string()),
        ("LINES LOST", |o| o.verdict.lines_lost.to_string()),
        ("LINES TWICE", |o| o.verdict.lines_doubled.to_string()),
        ("AGENTS THAT ENDED BY THEMSELVES", |o| o.own_ends.to_string()),
    ];
    let mut table = Table::new();
    let mut header = vec![String::new()];
    header.extend(results.iter().map(|(name, _)| (*name).to_owned()));
    table.load_style(UTF8_HORIZONTAL_ONLY).set_header(header);
    for (what, show) in ROWS {
        let mut row = vec![what.to_owned()];
        row.extend(results.iter().map(|(_, outcome)| show(outcome)));
        table.add_row(row);
    }
    table
}
