//! `workflow`: works on files, without a server.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};
use kici_engine::compile::{CompiledSet, compile_set};
use kici_engine::diagnostic::{render_long, render_short, to_json};
use kici_engine::schema::workflow_schema;
use serde_json::json;

use super::Context;
use crate::args::Format;
use crate::exit::{Failure, VERDICT};

/// Where a repository keeps its workflows.
const FOLDER: &str = ".kici/workflows";
/// Where it keeps the steps that they use, beside that folder.
const STEPS: &str = "steps";

/// Workflow files.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Check workflow files; exit 2 when one has errors
    Validate {
        /// A file, a folder of them, or a repository
        #[arg(default_value = ".")]
        path: PathBuf,
        /// Form of the diagnostics [default: long; json with --output json]
        #[arg(long)]
        format: Option<DiagnosticFormat>,
    },
    /// Print the JSON Schema of workflow files, for editors
    Schema,
}

/// Form of diagnostics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DiagnosticFormat {
    /// With the lines they are about.
    Long,
    /// One line each.
    Short,
    /// A JSON document.
    Json,
}

/// Runs the command.
pub(crate) fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    match verb {
        Verb::Schema => {
            let schema = serde_json::to_string_pretty(&workflow_schema());
            context.out.print(&schema.map_err(|error| Failure::other(error.to_string()))?)?;
            Ok(0)
        }
        Verb::Validate { path, format } => validate(context, &path, format),
    }
}

fn validate(context: &Context, path: &Path, format: Option<DiagnosticFormat>) -> Result<u8, Failure> {
    let files = read(path)?;
    let set = compile_set(&files);
    let default = if context.out.format == Format::Table { DiagnosticFormat::Long } else { DiagnosticFormat::Json };
    match format.unwrap_or(default) {
        DiagnosticFormat::Json => json_report(context, &set)?,
        text => {
            for (path, compiled) in &set.files {
                let source = files.iter().find(|(file, _)| file == path).map_or("", |(_, source)| source.as_str());
                for diagnostic in &compiled.diagnostics {
                    let rendered = match text {
                        DiagnosticFormat::Short => render_short(diagnostic),
                        _ => render_long(diagnostic, source, context.out.colour) + "\n",
                    };
                    context.out.print(rendered.trim_end_matches('\n'))?;
                }
            }
        }
    }
    let errors = set.files.iter().flat_map(|(_, file)| &file.diagnostics).filter(|d| d.is_error()).count();
    let workflows: usize = set.files.iter().map(|(_, file)| file.workflows.len()).sum();
    let counts = [(files.len(), "file"), (workflows, "workflow"), (errors, "error")];
    context
        .out
        .say(counts.map(|(count, word)| format!("{count} {word}{}", if count == 1 { "" } else { "s" })).join(", "));
    Ok(if errors == 0 { 0 } else { VERDICT })
}

fn json_report(context: &Context, set: &CompiledSet) -> Result<(), Failure> {
    let files = set.files.iter().map(|(path, compiled)| {
        json!({
            "path": path,
            "workflows": compiled.workflows.iter().map(|workflow| &workflow.name).collect::<Vec<_>>(),
            "diagnostics": compiled.diagnostics.iter().map(to_json).collect::<Vec<_>>(),
        })
    });
    let valid = !set.files.iter().any(|(_, file)| file.has_errors());
    let report = json!({ "valid": valid, "files": files.collect::<Vec<_>>() });
    let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::other(error.to_string()))?;
    context.out.print(&text)
}

/// The files of a folder that may be YAML, by name.
fn yaml_files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let unreadable = |error: std::io::Error| Failure::usage(format!("{}: {error}", folder.display()));
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.path();
        if file.is_file() && file.extension().is_some_and(|end| end == "yaml" || end == "yml") {
            paths.push(file);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Path and text of the files that `path` stands for, by name.
fn read(path: &Path) -> Result<Vec<(String, String)>, Failure> {
    let unreadable = |path: &Path, error: &std::io::Error| Failure::usage(format!("{}: {error}", path.display()));
    let meta = fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    let mut paths = Vec::new();
    if meta.is_dir() {
        let inner = path.join(FOLDER);
        let folder = if inner.is_dir() { inner } else { path.to_owned() };
        paths = yaml_files(&folder)?;
        if paths.is_empty() {
            let text = format!("{} holds no .yaml or .yml file; workflows live in {FOLDER}", folder.display());
            return Err(Failure::usage(text));
        }
    } else {
        paths.push(path.to_owned());
    }
    let folder = paths.first().and_then(|file| file.parent()).filter(|folder| folder.ends_with(FOLDER));
    if let Some(steps) = folder.and_then(Path::parent).map(|kici| kici.join(STEPS)).filter(|steps| steps.is_dir()) {
        paths.extend(yaml_files(&steps)?);
    }
    let read = |file: &PathBuf| {
        let text = fs::read(file).map_err(|error| unreadable(file, &error))?;
        // The compiler names what is wrong with other bytes by position.
        Ok((file.display().to_string(), String::from_utf8_lossy(&text).into_owned()))
    };
    paths.iter().map(read).collect()
}
