//! `workflow compile`.

use std::path::{Path, PathBuf};

use clap::Args;
use kici_engine::lock::Generator;
use kici_engine::lockfile;
use kici_engine::repository::LOCK_FILE;

use super::files;
use crate::exit::{Failure, VERDICT};
use crate::output::Output;

/// Writes the lock document.
#[derive(Debug, Args)]
pub(crate) struct Compile {
    /// The repository
    #[arg(default_value = ".")]
    repo: PathBuf,
    /// The file to write, - for stdout [default: .kici/kici.lock.json of the repository]
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Write nothing; exit 2 when the file is not what would be written
    #[arg(long)]
    check: bool,
}

pub(super) fn run(out: &Output, compile: &Compile) -> Result<u8, Failure> {
    let set = files::compile(out, &compile.repo)?;
    files::all_valid(&set)?;
    let workflows: Vec<_> = set.workflows().cloned().collect();
    let count = workflows.len();
    let generator = Generator { name: "kici".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
    let document = lockfile::document(workflows, generator);
    let mut text = serde_json::to_string_pretty(&document).map_err(|error| Failure::other(error.to_string()))?;
    text.push('\n');
    // What an orchestrator would refuse must not be committed.
    lockfile::read(text.as_bytes()).map_err(|error| Failure::new(VERDICT, error.to_string()))?;
    let path = compile.file.clone().unwrap_or_else(|| compile.repo.join(LOCK_FILE));
    if path == Path::new("-") {
        out.print(text.trim_end())?;
        return Ok(0);
    }
    let present = std::fs::read(&path).ok();
    if present.as_deref() == Some(text.as_bytes()) {
        out.say(format!("{} is up to date", path.display()));
        return Ok(0);
    }
    if compile.check {
        let state = if present.is_some() { "is stale" } else { "does not exist" };
        let text = format!("{} {state}; write it with `kici-admin workflow compile`", path.display());
        return Err(Failure::new(VERDICT, text));
    }
    std::fs::write(&path, &text).map_err(|error| files::unreadable(&path, &error))?;
    out.say(format!("{} written: {count} workflow{}", path.display(), if count == 1 { "" } else { "s" }));
    Ok(0)
}
