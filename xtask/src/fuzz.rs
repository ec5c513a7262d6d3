//! Feeds damaged input to everything that reads what strangers write. Stable Rust and no network: inputs are mutations of a
//! corpus, made from a seed, so that a finding can be repeated.
//!
//! A finding is a panic, an input that takes longer than [`SLOW`], or a broken promise (a lock document that we wrote and do
//! not read). The input of a finding, and of a crash that takes the process down, is kept in `target/fuzz/`.

mod corpus;
mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use tokio::time::Instant;

use crate::workspace::Workspace;
use mutate::Random;
use targets::{TARGETS, Target};

/// No input of at most [`MAX_BYTES`] may take longer; a debug build on a busy machine has room.
const SLOW: Duration = Duration::from_secs(5);
/// Largest input.
const MAX_BYTES: usize = 64 * 1024;
/// What the smoke run of CI takes altogether.
const SMOKE: Duration = Duration::from_secs(30);

#[derive(Args)]
pub(crate) struct Options {
    /// Only these: yaml, lock, cel, jsonpath, webhook, convert
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Makes the same inputs again
    #[arg(long)]
    seed: Option<u64>,
    /// Reads this input once instead, to repeat a finding
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let chosen = choose(&options.targets)?;
    if let Some(path) = &options.input {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        for target in chosen {
            eprintln!("{}: {}", target.name, path.display());
            (target.run)(&bytes)?;
        }
        return Ok(());
    }
    let seed = match options.seed {
        Some(seed) => seed,
        None => {
            let mut bytes = [0; 8];
            getrandom::fill(&mut bytes)?;
            u64::from_le_bytes(bytes)
        }
    };
    campaign(workspace, &chosen, Duration::from_secs(options.seconds), seed)
}

/// A short run of every target, as a check.
pub(crate) fn smoke(workspace: &Workspace) -> Result<()> {
    let chosen = choose(&[])?;
    let each = SMOKE / u32::try_from(chosen.len()).unwrap_or(1);
    campaign(workspace, &chosen, each, 1)
}

fn choose(names: &[String]) -> Result<Vec<&'static Target>> {
    if names.is_empty() {
        return Ok(TARGETS.iter().collect());
    }
    let find = |name: &String| {
        let known = || TARGETS.iter().map(|target| target.name).collect::<Vec<_>>().join(", ");
        TARGETS
            .iter()
            .find(|target| target.name == name)
            .with_context(|| format!("no target `{name}`; there are: {}", known()))
    };
    names.iter().map(find).collect()
}

fn campaign(workspace: &Workspace, targets: &[&Target], each: Duration, seed: u64) -> Result<()> {
    let folder = workspace.root.join("target/fuzz");
    std::fs::create_dir_all(&folder)?;
    // A finding is told once, with its input; not by every panic on the way.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let results: Vec<Result<u64>> =
        targets.iter().map(|target| one(workspace, target, each, seed, &folder.join(target.name))).collect();
    std::panic::set_hook(hook);
    let mut failed = Vec::new();
    for (target, result) in targets.iter().zip(results) {
        match result {
            Ok(count) => eprintln!("{}: {count} inputs, seed {seed}, nothing found", target.name),
            Err(error) => {
                eprintln!("{}: {error:#}", target.name);
                failed.push(target.name);
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { bail!("found something: {}", failed.join(", ")) }
}

/// Runs one target and says how many inputs it read.
fn one(workspace: &Workspace, target: &Target, each: Duration, seed: u64, file: &std::path::Path) -> Result<u64> {
    let corpus = corpus::of(workspace, target.corpus)?;
    let mut random = Random::new(seed);
    let end = Instant::now() + each;
    let mut count = 0;
    // The corpus itself first: it must pass, or the mutations start from nothing.
    while count < corpus.len() as u64 || Instant::now() < end {
        let input = match corpus.get(usize::try_from(count).unwrap_or(usize::MAX)) {
            Some(whole) => whole.clone(),
            None => mutate::mutated(&corpus, &mut random, MAX_BYTES),
        };
        // On disk before it is read: a crash leaves it there.
        std::fs::write(file, &input)?;
        let start = Instant::now();
        let problem = match catch_unwind(AssertUnwindSafe(|| (target.run)(&input))) {
            Ok(Ok(())) => (start.elapsed() > SLOW).then(|| format!("took {:?}", start.elapsed())),
            Ok(Err(error)) => Some(format!("{error:#}")),
            Err(panic) => Some(format!("panic: {}", words(&*panic))),
        };
        if let Some(problem) = problem {
            bail!("{problem}; seed {seed}, input {count} in {}", file.display());
        }
        count += 1;
    }
    std::fs::remove_file(file)?;
    Ok(count)
}

fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no words".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_reads_its_corpus_and_some_mutations_of_it() {
        let workspace = Workspace::find().unwrap();
        for target in TARGETS {
            let corpus = corpus::of(&workspace, target.corpus).unwrap();
            assert!(!corpus.is_empty(), "{}", target.name);
            corpus.iter().for_each(|input| (target.run)(input).unwrap());
            let mut random = Random::new(7);
            for _ in 0..50 {
                (target.run)(&mutate::mutated(&corpus, &mut random, 4096)).unwrap();
            }
        }
    }

    #[test]
    fn unknown_targets_are_named() {
        let error = choose(&["yml".to_owned()]).err().unwrap().to_string();
        assert!(error.contains("no target `yml`; there are: yaml, lock"), "{error}");
    }
}
