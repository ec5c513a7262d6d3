//! What every part of the compiler uses: reading typed values from the tree, and recording what is wrong.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use crate::diagnostic::{Diagnostic, Fix, Severity};
use crate::expr::Expr;
use crate::yaml::{Core, Data, Entry, Lines, Node, Span, Style};
use crate::{duration, yaml};

use super::composite::Library;
use super::keys::{KeySet, nearest, way_out};

/// One file while it is compiled.
pub(super) struct Walk<'a> {
    pub(super) file: &'a str,
    pub(super) lines: &'a Lines<'a>,
    pub(super) diagnostics: Vec<Diagnostic>,
    /// Errors, also those beyond what is kept.
    pub(super) errors: usize,
    /// Errors and warnings, also those beyond what is kept.
    pub(super) found: usize,
    /// The step files that it may use.
    pub(super) library: &'a Library,
    /// Those that it uses, and those that they use.
    pub(super) used: BTreeSet<String>,
    /// How deep the deepest of them is nested.
    pub(super) deepest: usize,
    /// Outputs that jobs declare: job, name, where.
    pub(super) outputs: Vec<(String, String, Span)>,
    /// Outputs that expressions read: job and name, empty for all of them.
    reads: HashSet<(String, String)>,
    path: Vec<String>,
}

/// How many faults are kept: more than are shown, since they are sorted by place afterwards, and few enough that a hostile
/// file costs neither memory nor time.
const MAX_KEPT: usize = 20 * super::MAX_DIAGNOSTICS;

/// A diagnostic under construction.
pub(super) struct Fault<'w> {
    diagnostic: Option<&'w mut Diagnostic>,
    errors: &'w mut usize,
}

impl Fault<'_> {
    fn edit(mut self, change: impl FnOnce(&mut Diagnostic)) -> Self {
        if let Some(diagnostic) = self.diagnostic.as_deref_mut() {
            change(diagnostic);
        }
        self
    }

    pub(super) fn expected<T: Into<String>>(self, expected: impl IntoIterator<Item = T>) -> Self {
        self.edit(|diagnostic| diagnostic.expected = expected.into_iter().map(Into::into).collect())
    }

    /// What was probably meant.
    pub(super) fn suggest<T: Into<String>>(self, suggestion: Option<T>) -> Self {
        self.edit(|diagnostic| diagnostic.suggestion = suggestion.map(Into::into))
    }

    /// What was probably meant; writing it in place of the range repairs the file.
    pub(super) fn replace<T: Into<String>>(self, suggestion: Option<T>) -> Self {
        self.edit(|diagnostic| {
            diagnostic.suggestion = suggestion.map(Into::into);
            diagnostic.fix = diagnostic.suggestion.clone().map(|text| Fix { range: diagnostic.range(), text });
        })
    }

    pub(super) fn help(self, help: impl Into<String>) -> Self {
        self.edit(|diagnostic| diagnostic.help = Some(help.into()))
    }

    pub(super) fn warning(self) -> Self {
        *self.errors -= 1;
        self.edit(|diagnostic| diagnostic.severity = Severity::Warning)
    }
}

/// The entries of a map whose keys were checked.
#[derive(Clone, Copy)]
pub(super) struct Fields<'n> {
    entries: &'n [Entry],
}

impl<'n> Fields<'n> {
    pub(super) fn get(&self, key: &str) -> Option<&'n Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }
}

impl<'a> Walk<'a> {
    pub(super) fn new(file: &'a str, lines: &'a Lines<'a>, library: &'a Library) -> Self {
        Self {
            file,
            lines,
            diagnostics: Vec::new(),
            errors: 0,
            found: 0,
            library,
            used: BTreeSet::new(),
            deepest: 0,
            outputs: Vec::new(),
            reads: HashSet::new(),
            path: Vec::new(),
        }
    }

    /// Remembers which outputs of other jobs an expression reads.
    pub(super) fn reads(&mut self, expr: &Expr) {
        for read in expr.references().iter().filter(|read| read.root == "needs") {
            let word = |at: usize| read.path.get(at).cloned().unwrap_or_default();
            match read.path.get(1).map(String::as_str) {
                Some("status" | "summary") => {}
                // Any of them may be read host by host.
                Some("by_host") => drop(self.reads.insert((word(0), String::new()))),
                _ => drop(self.reads.insert((word(0), word(2)))),
            }
        }
    }

    /// Warns of outputs that nothing reads, once all jobs of a workflow are compiled. `open`: generated jobs may read them.
    pub(super) fn unused_outputs(&mut self, open: bool) {
        let outputs = std::mem::take(&mut self.outputs);
        let reads = std::mem::take(&mut self.reads);
        let any = |job: &str, name: &str| reads.contains(&(job.to_owned(), name.to_owned()));
        for (job, name, span) in outputs {
            if !(open || any(&job, &name) || any(&job, "") || any("", "")) {
                self.within("jobs", |walk| {
                    walk.fault("W0307", span, format!("no job reads output `{name}` of job `{job}`"))
                        .help(format!("a job that needs it reads it as `needs.{job}.outputs.{name}`"))
                        .warning();
                });
            }
        }
    }

    /// What the reader of YAML found.
    pub(super) fn yaml_faults(&mut self, faults: Vec<yaml::Fault>) {
        for fault in faults {
            let diagnostic = self.fault(fault.kind.code(), fault.span, fault.message);
            if let Some(help) = fault.help {
                diagnostic.help(help);
            }
        }
    }

    /// What was found, by place, and the step files that were used.
    pub(super) fn finish(self) -> (Vec<Diagnostic>, BTreeSet<String>) {
        let mut diagnostics = self.diagnostics;
        diagnostics.sort_by_key(|diagnostic| (diagnostic.line, diagnostic.col));
        // An anchor that is used twice would be reported twice.
        diagnostics.dedup_by(|a, b| a.code == b.code && a.range() == b.range() && a.message == b.message);
        diagnostics.truncate(super::MAX_DIAGNOSTICS);
        (diagnostics, self.used)
    }

    /// Runs `work` with a key added to the path of the faults that it finds.
    pub(super) fn within<T>(&mut self, key: impl Into<String>, work: impl FnOnce(&mut Self) -> T) -> T {
        self.path.push(key.into());
        let result = work(self);
        self.path.pop();
        result
    }

    pub(super) fn fault(&mut self, code: &str, span: Span, message: impl Into<String>) -> Fault<'_> {
        self.found += 1;
        self.errors += 1;
        if self.full() {
            return Fault { diagnostic: None, errors: &mut self.errors };
        }
        self.diagnostics.push(Diagnostic {
            code: code.to_owned(),
            severity: Severity::Error,
            file: self.file.to_owned(),
            line: span.start.line,
            col: span.start.col,
            end_line: span.end.line,
            end_col: span.end.col,
            path: self.path.join("."),
            message: message.into(),
            expected: Vec::new(),
            suggestion: None,
            help: None,
            fix: None,
        });
        Fault { diagnostic: self.diagnostics.last_mut(), errors: &mut self.errors }
    }

    /// Whether enough faults are kept: then looking for what was meant is wasted.
    pub(super) fn full(&self) -> bool {
        self.diagnostics.len() >= MAX_KEPT
    }

    /// Refuses more than `most` of something, before any of it is read.
    pub(super) fn bounded(&mut self, count: usize, most: usize, what: &str, span: Span) -> bool {
        if count > most {
            self.fault("K0704", span, format!("{count} {what}, at most {most} are allowed"));
        }
        count <= most
    }

    /// A fault of type: `expected a list, found integer 3`.
    pub(super) fn mismatch(&mut self, code: &str, node: &Node, expected: &str) -> Fault<'_> {
        self.fault(code, node.span, format!("expected {expected}, found {}", node.describe()))
    }

    /// A map with known keys. `owner` is for messages: `job `build``.
    pub(super) fn fields<'n>(&mut self, node: &'n Node, keys: &KeySet, owner: &str) -> Option<Fields<'n>> {
        let entries = self.map(node)?;
        for entry in entries {
            let key = entry.key.as_str();
            if keys.accepted.contains(&key) {
                continue;
            }
            if keys.planned.contains(&key) {
                self.within(key, |walk| {
                    let fault = walk.fault("K0108", entry.span, format!("key `{key}` in {owner} is not supported yet"));
                    if let Some(way) = way_out(key) {
                        fault.help(way);
                    }
                });
                continue;
            }
            let suggestion = if self.full() { None } else { keys.suggest(key) };
            self.within(key, |walk| {
                let message = format!("unknown key `{}` in {owner}", yaml::shorten(key));
                walk.fault("K0102", entry.span, message).expected(keys.accepted.iter().copied()).replace(suggestion);
            });
        }
        Some(Fields { entries })
    }

    /// A map with free keys.
    pub(super) fn map<'n>(&mut self, node: &'n Node) -> Option<&'n [Entry]> {
        match &node.data {
            Data::Map(entries) => Some(entries),
            _ => {
                self.mismatch("K0201", node, "a map");
                None
            }
        }
    }

    pub(super) fn list<'n>(&mut self, node: &'n Node, of: &str) -> Option<&'n [Node]> {
        match &node.data {
            Data::List(items) => Some(items),
            _ => {
                self.mismatch("K0201", node, &format!("a list of {of}"));
                None
            }
        }
    }

    /// One thing or a list of them.
    pub(super) fn one_or_list<'n>(&mut self, node: &'n Node, of: &str) -> Option<&'n [Node]> {
        match &node.data {
            Data::List(items) => Some(items),
            Data::Scalar(..) if !node.is_null() => Some(std::slice::from_ref(node)),
            _ => {
                self.mismatch("K0201", node, &format!("{of} or a list of them"));
                None
            }
        }
    }

    /// Any scalar but null, as written: `3.10` and `true` are texts where a text is due.
    pub(super) fn text<'n>(&mut self, node: &'n Node, what: &str) -> Option<&'n str> {
        match node.text() {
            Some(text) if !node.is_null() => Some(text),
            _ => {
                self.mismatch("K0202", node, what);
                None
            }
        }
    }

    /// A text without expressions.
    pub(super) fn fixed<'n>(&mut self, node: &'n Node, what: &str) -> Option<&'n str> {
        let text = self.text(node, what)?;
        if text.contains("${{") {
            let span = self.part(node, text.find("${{").unwrap_or(0), 3);
            self.fault("K0405", span, "expressions are not allowed here").expected([what]);
            return None;
        }
        Some(text)
    }

    /// A text that is one of some words.
    pub(super) fn word<'n>(&mut self, node: &'n Node, words: &[&str]) -> Option<&'n str> {
        let text = self.fixed(node, "a word")?;
        if words.contains(&text) {
            return Some(text);
        }
        let suggestion = nearest(text, words.iter().copied());
        self.fault("K0204", node.span, format!("`{}` is not allowed here", yaml::shorten(text)))
            .expected(words.iter().copied())
            .replace(suggestion);
        None
    }

    pub(super) fn bool(&mut self, node: &Node) -> Option<bool> {
        if let Some(Core::Bool(value)) = node.core() {
            return Some(value);
        }
        let suggestion = match node.text().map(str::to_ascii_lowercase).as_deref() {
            Some("yes" | "on" | "true" | "1") => Some("true"),
            Some("no" | "off" | "false" | "0") => Some("false"),
            _ => None,
        };
        self.mismatch("K0202", node, "true or false").replace(suggestion);
        None
    }

    pub(super) fn int(&mut self, node: &Node, min: i64, max: i64) -> Option<i64> {
        match node.core() {
            Some(Core::Int(value)) if (min..=max).contains(&value) => Some(value),
            Some(Core::Int(_)) => {
                self.mismatch("K0205", node, &format!("a whole number from {min} to {max}"));
                None
            }
            _ => {
                self.mismatch("K0202", node, "a whole number");
                None
            }
        }
    }

    /// A duration in milliseconds.
    pub(super) fn duration(&mut self, node: &Node) -> Option<u64> {
        let parsed = match (node.core(), node.text()) {
            (Some(Core::Str), Some(text)) => duration::parse(text),
            _ => Err(duration::DurationError::Syntax),
        };
        match parsed {
            Ok(value) => Some(millis(value)),
            Err(duration::DurationError::Syntax) => {
                let suggestion = node.text().and_then(duration::suggest).map(|text| format!("\"{text}\""));
                self.mismatch("K0203", node, "a duration such as \"30m\"").replace(suggestion);
                None
            }
            Err(error) => {
                self.fault("K0205", node.span, error.to_string());
                None
            }
        }
    }

    /// The place of `length` bytes at `offset` in the text of a scalar. In quotes and blocks the text and its source
    /// differ, so the piece is searched for; if it cannot be found the whole scalar is meant.
    pub(super) fn part(&self, node: &Node, offset: usize, length: usize) -> Span {
        let Data::Scalar(text, style) = &node.data else { return node.span };
        let source = self.lines.text(node.span);
        let start = self.lines.byte(node.span.start);
        let length = length.max(1);
        if *style == Style::Plain && source == text {
            return self.span(start + offset, length);
        }
        let Some(piece) = text.get(offset..(offset + length).min(text.len())).filter(|piece| !piece.is_empty()) else {
            return node.span;
        };
        let nth = text.match_indices(piece).take_while(|(at, _)| *at < offset).count();
        match source.match_indices(piece).nth(nth) {
            Some((at, _)) => self.span(start + at, length),
            None => node.span,
        }
    }

    fn span(&self, byte: usize, length: usize) -> Span {
        let start = self.lines.pos(byte);
        let end = self.lines.pos(byte + length);
        if end.line == start.line { Span { start, end } } else { Span::on_line(start.line, start.col, 1) }
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    // At most a year, see `duration::MAX`.
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
