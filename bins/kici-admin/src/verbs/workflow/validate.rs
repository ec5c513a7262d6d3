//! `workflow validate`.

use std::path::Path;

use clap::ValueEnum;
use kici_engine::compile::{CompiledSet, compile_set};
use kici_engine::diagnostic::{render_long, render_short, to_json};
use serde_json::json;

use super::files;
use crate::args::Format;
use crate::exit::{Failure, VERDICT};
use crate::output::Output;

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

pub(super) fn run(out: &Output, path: &Path, format: Option<DiagnosticFormat>) -> Result<u8, Failure> {
    let files = files::read(path)?;
    let set = compile_set(&files);
    let default = if out.format == Format::Table { DiagnosticFormat::Long } else { DiagnosticFormat::Json };
    match format.unwrap_or(default) {
        DiagnosticFormat::Json => json_report(out, &set)?,
        text => {
            for (path, compiled) in &set.files {
                let source = files::source_of(&files, path);
                for diagnostic in &compiled.diagnostics {
                    let rendered = match text {
                        DiagnosticFormat::Short => render_short(diagnostic),
                        _ => render_long(diagnostic, source, out.colour) + "\n",
                    };
                    out.print(rendered.trim_end_matches('\n'))?;
                }
            }
        }
    }
    let errors = set.files.iter().flat_map(|(_, file)| &file.diagnostics).filter(|d| d.is_error()).count();
    let workflows: usize = set.files.iter().map(|(_, file)| file.workflows.len()).sum();
    let counts = [(files.len(), "file"), (workflows, "workflow"), (errors, "error")];
    out.say(counts.map(|(count, word)| format!("{count} {word}{}", if count == 1 { "" } else { "s" })).join(", "));
    Ok(if errors == 0 { 0 } else { VERDICT })
}

fn json_report(out: &Output, set: &CompiledSet) -> Result<(), Failure> {
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
    out.print(&text)
}
