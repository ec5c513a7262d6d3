//! `workflow convert`.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kici_convert::{Conversion, Dialect, Options, Outcome, convert, file_name};
use serde::Serialize;

use super::files::{FOLDER, unreadable};
use crate::args::Format;
use crate::exit::{Failure, VERDICT};
use crate::output::{Output, printable};

/// Turns workflows of other systems into KiCI's.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    /// The files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// What they are written in [default: seen from their names and keys]
    #[arg(long)]
    from: Option<From>,
    /// The folder to write to; without it one file is written to stdout and several are only reported
    #[arg(long, value_name = "FOLDER")]
    into: Option<PathBuf>,
    /// Write to .kici/workflows of this repository
    #[arg(long, value_name = "REPOSITORY", conflicts_with = "into")]
    repo: Option<PathBuf>,
    /// Replace files that are there
    #[arg(long)]
    force: bool,
    /// Label of jobs that ask for no machine
    #[arg(long, default_value = "default", value_name = "LABEL")]
    runs_on: String,
    /// Leave images and services out: steps run on the agent itself, which then needs no Docker or Podman
    #[arg(long)]
    no_containers: bool,
    /// Form of the report, which goes to stderr, or to stdout where no file does [default: text; json with --output json]
    #[arg(long)]
    report: Option<ReportForm>,
}

/// A language that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum From {
    /// GitHub Actions; also Forgejo and Gitea.
    Github,
    /// GitLab CI.
    Gitlab,
    /// Woodpecker CI.
    Woodpecker,
    /// Drone CI.
    Drone,
}

/// Form of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReportForm {
    /// For people.
    Text,
    /// A JSON document.
    Json,
}

#[derive(Serialize)]
struct Report {
    files: Vec<File>,
}

#[derive(Serialize)]
struct File {
    /// As given.
    source: String,
    /// What was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<String>,
    #[serde(flatten)]
    conversion: Conversion,
}

pub(super) fn run(out: &Output, arguments: &Convert) -> Result<u8, Failure> {
    let options = Options { runs_on: arguments.runs_on.clone(), containers: !arguments.no_containers };
    let dialect = arguments.from.map(|from| match from {
        From::Github => Dialect::Github,
        From::Gitlab => Dialect::Gitlab,
        From::Woodpecker => Dialect::Woodpecker,
        From::Drone => Dialect::Drone,
    });
    let folder = arguments.into.clone().or_else(|| arguments.repo.as_ref().map(|repo| repo.join(FOLDER)));
    let mut report = Report { files: Vec::new() };
    for path in &arguments.files {
        let text = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
        let name = path.display().to_string();
        let mut conversion = convert(&name, &String::from_utf8_lossy(&text), dialect, &options);
        let mut written = None;
        if let Some(folder) = &folder
            && let Some(text) = conversion.text.take()
        {
            let target = folder.join(file_name(&name));
            write(&target, &text, arguments.force)?;
            written = Some(target.display().to_string());
        }
        report.files.push(File { source: name, written, conversion });
    }
    let form =
        arguments.report.unwrap_or(if out.format == Format::Table { ReportForm::Text } else { ReportForm::Json });
    show(out, &report, form, folder.is_some())?;
    let refused = report.files.iter().any(|file| matches!(file.conversion.outcome, Outcome::Refused { .. }));
    Ok(if refused { VERDICT } else { 0 })
}

fn write(target: &Path, text: &str, force: bool) -> Result<(), Failure> {
    if target.exists() && !force {
        return Err(Failure::usage(format!("{} is there already; --force replaces it", target.display())));
    }
    if let Some(folder) = target.parent() {
        std::fs::create_dir_all(folder).map_err(|error| unreadable(folder, &error))?;
    }
    std::fs::write(target, text).map_err(|error| unreadable(target, &error))
}

fn show(out: &Output, report: &Report, form: ReportForm, wrote: bool) -> Result<(), Failure> {
    let text = match form {
        ReportForm::Json => serde_json::to_string_pretty(report).map_err(|error| Failure::other(error.to_string()))?,
        ReportForm::Text => report.files.iter().map(people).collect::<Vec<_>>().join("\n"),
    };
    let alone = match report.files.as_slice() {
        [one] if !wrote && form == ReportForm::Text => one.conversion.text.as_deref(),
        _ => None,
    };
    match alone {
        Some(workflow) => {
            out.say(text.trim_end());
            out.print(workflow.trim_end())
        }
        None => out.print(text.trim_end()),
    }
}

fn people(file: &File) -> String {
    let losses = &file.conversion.losses;
    let outcome = match &file.conversion.outcome {
        Outcome::Runs => "runs".to_owned(),
        Outcome::RunsWithLoss => {
            format!("runs with {} loss{}", losses.len(), if losses.len() == 1 { "" } else { "es" })
        }
        Outcome::Refused { reason } => format!("refused: {reason}"),
    };
    let written = file.written.as_ref().map(|path| format!(" -> {path}")).unwrap_or_default();
    let mut text =
        format!("{} ({}){written}: {}\n", printable(&file.source), file.conversion.dialect, printable(&outcome));
    for loss in losses {
        let line = format!("{}:{}:{}: {}: {}", file.source, loss.line, loss.column, loss.key, loss.reason);
        text.push_str(&format!("  {}\n", printable(&line)));
    }
    text
}
