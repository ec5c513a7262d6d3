//! Faults in workflow files, and how people and programs see them.
//!
//! Families of codes: K00 YAML syntax, K01 keys, K02 types, K03 references, K04 expressions, K05 triggers and patterns,
//! K06 security, K07 limits; W are warnings.

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use serde::{Deserialize, Serialize};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The workflow does not run.
    Error,
    /// It runs, but perhaps not as meant.
    Warning,
}

impl Severity {
    fn word(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// A replacement that would repair the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fix {
    /// What to replace.
    pub range: Range,
    /// With what.
    pub text: String,
}

/// A part of a file; lines and columns count from 1, columns in characters, the end is exclusive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// First line.
    pub line: u32,
    /// First column.
    pub col: u32,
    /// Last line.
    pub end_line: u32,
    /// Column after the last.
    pub end_col: u32,
}

/// One fault. Names from the file stand in backticks in `message`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnostic {
    /// `K0102` and the like; stable.
    pub code: String,
    /// Error or warning.
    pub severity: Severity,
    /// Path from the root of the repository.
    pub file: String,
    /// First line, from 1.
    pub line: u32,
    /// First column, from 1, in characters.
    pub col: u32,
    /// Last line.
    pub end_line: u32,
    /// Column after the last.
    pub end_col: u32,
    /// The keys that lead there, `jobs.build.runs-on`.
    pub path: String,
    /// What is wrong.
    pub message: String,
    /// What would be right here: keys, values or a form.
    pub expected: Vec<String>,
    /// The likely intention, as it would be written.
    pub suggestion: Option<String>,
    /// What to do instead, in words.
    pub help: Option<String>,
    /// The repair, where there is only one.
    pub fix: Option<Fix>,
}

impl Diagnostic {
    /// The part of the file that it is about.
    pub fn range(&self) -> Range {
        Range { line: self.line, col: self.col, end_line: self.end_line, end_col: self.end_col }
    }

    /// Whether the workflow cannot run.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

/// For people at a terminal: several lines with the source. `source` is the text of the file.
pub fn render_long(diagnostic: &Diagnostic, source: &str, colour: bool) -> String {
    let level = match diagnostic.severity {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
    };
    let label = label(diagnostic);
    let span = byte_span(diagnostic, source);
    let snippet = Snippet::source(source)
        .path(diagnostic.file.as_str())
        .annotation(AnnotationKind::Primary.span(span).label(label.as_deref()));
    let title = level.primary_title(diagnostic.message.as_str()).id(diagnostic.code.as_str());
    let mut group: Group<'_> = title.element(snippet);
    if let Some(suggestion) = &diagnostic.suggestion {
        let aside = if dashed(diagnostic, suggestion) { " (KiCI keys use underscores)" } else { "" };
        group = group.element(Level::HELP.message(format!("did you mean {}?{aside}", quoted(suggestion, '`'))));
    }
    if let Some(help) = &diagnostic.help {
        group = group.element(Level::HELP.message(help.as_str()));
    }
    let renderer = if colour { Renderer::styled() } else { Renderer::plain() };
    renderer.render(&[group])
}

/// For logs and annotations: one line.
pub fn render_short(diagnostic: &Diagnostic) -> String {
    let Diagnostic { file, line, col, code, .. } = diagnostic;
    let severity = diagnostic.severity.word();
    let mut text = format!("{file}:{line}:{col}: {severity}[{code}]: {}", diagnostic.message.replace('`', "'"));
    match (&diagnostic.suggestion, label(diagnostic)) {
        (Some(suggestion), _) => text.push_str(&format!("; did you mean {}?", quoted(suggestion, '\''))),
        (None, Some(expected)) => text.push_str(&format!("; {}", expected.replace('`', "'"))),
        (None, None) => {}
    }
    if let Some(help) = &diagnostic.help {
        text.push_str(&format!("; {}", help.replace('`', "'")));
    }
    text
}

/// For programs.
pub fn to_json(diagnostic: &Diagnostic) -> serde_json::Value {
    // Strings, numbers and options only: this cannot fail.
    serde_json::to_value(diagnostic).unwrap_or_default()
}

fn dashed(diagnostic: &Diagnostic, suggestion: &str) -> bool {
    diagnostic.code == "K0102" && diagnostic.message.contains(&suggestion.replace('_', "-")) && suggestion.contains('_')
}

/// A suggestion that brings its own quotes keeps them.
fn quoted(text: &str, quote: char) -> String {
    if text.starts_with('"') { text.to_owned() } else { format!("{quote}{text}{quote}") }
}

/// One thing, or the first five of many with their number.
fn label(diagnostic: &Diagnostic) -> Option<String> {
    const SHOWN: usize = 5;
    let unit = if diagnostic.code == "K0102" { "keys" } else { "in all" };
    match diagnostic.expected.as_slice() {
        [] => None,
        [one] => Some(format!("expected {one}")),
        many if many.len() <= SHOWN + 1 => Some(format!("expected one of: {}", many.join(", "))),
        many => Some(format!("expected one of: {}, … ({} {unit})", many[..SHOWN].join(", "), many.len())),
    }
}

/// The first line of the range, in bytes: a fault in a long block is shown at its start.
fn byte_span(diagnostic: &Diagnostic, source: &str) -> std::ops::Range<usize> {
    let start: usize =
        source.split_inclusive('\n').take(diagnostic.line.saturating_sub(1) as usize).map(str::len).sum();
    let line = source.get(start..).unwrap_or_default().lines().next().unwrap_or_default();
    let byte_of = |col: u32| {
        let column = col.saturating_sub(1) as usize;
        start + line.char_indices().nth(column).map_or(line.len(), |(byte, _)| byte)
    };
    let from = byte_of(diagnostic.col);
    let to = if diagnostic.end_line > diagnostic.line { start + line.len() } else { byte_of(diagnostic.end_col) };
    from..to.max(from)
}

#[cfg(test)]
mod tests;
