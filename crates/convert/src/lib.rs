//! From the workflow files of other CI systems to KiCI's, with a list of everything that does not come along.
//!
//! Pure: text in, text and report out. Every key of the source is either carried over or stands in [`Conversion::losses`]
//! with its place; [`source::Fields`] makes sure of that, since a key that nobody took reports itself. What is written
//! compiles: the engine's compiler has read it before it is handed out.
//!
//! What KiCI cannot do yet stands in one table, [`later::LATER`]; when a key arrives, its line there goes and the place that
//! asked for it writes the key.

#![forbid(unsafe_code)]

mod cel;
mod check;
mod containers;
mod github;
mod gitlab;
pub mod later;
pub mod source;
mod target;
mod variables;
mod woodpecker;

use std::fmt;
use std::str::FromStr;

use kici_engine::yaml::{self, Data, Document, FaultKind, Limits, Node};
use serde::Serialize;

use source::Report;

/// A language that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// GitHub Actions.
    Github,
    /// GitLab CI.
    Gitlab,
    /// Woodpecker CI.
    Woodpecker,
    /// Drone CI.
    Drone,
}

impl Dialect {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Github, Self::Gitlab, Self::Woodpecker, Self::Drone];

    /// Its name on a command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Github => "github",
            Self::Gitlab => "gitlab",
            Self::Woodpecker => "woodpecker",
            Self::Drone => "drone",
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Dialect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(Self::as_str).join(", ");
        Self::ALL.into_iter().find(|d| d.as_str() == text).ok_or_else(|| format!("`{text}` is not one of {}", known()))
    }
}

/// Something of the source that does not come along.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Loss {
    /// Line in the source, from 1.
    pub line: u32,
    /// Column in the source, from 1, in characters.
    pub column: u32,
    /// The keys that lead there.
    pub key: String,
    /// Why, and what to do.
    pub reason: String,
}

/// What became of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Outcome {
    /// Everything came along.
    Runs,
    /// It runs; [`Conversion::losses`] says what is missing.
    RunsWithLoss,
    /// Nothing was written.
    Refused {
        /// Why.
        reason: String,
    },
}

/// A file that was converted, or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Conversion {
    /// What it was read as.
    pub dialect: Dialect,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// The workflow file; none when it was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// What is missing, by place.
    pub losses: Vec<Loss>,
}

/// How to write what the source leaves open.
#[derive(Clone, Debug)]
pub struct Options {
    /// Label of jobs that ask for no machine.
    pub runs_on: String,
    /// Images come along; else steps run on the agent itself, and what that loses is listed.
    pub containers: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { runs_on: "default".to_owned(), containers: true }
    }
}

/// Foreign files are longer than ours and live from aliases.
const LIMITS: Limits = Limits { bytes: 2 * 1024 * 1024, depth: 64, expansion: 50 };

/// Converts one file. `path` tells the dialect where none is given, and names the workflow where the source does not.
/// Never panics.
pub fn convert(path: &str, text: &str, dialect: Option<Dialect>, options: &Options) -> Conversion {
    let reading = yaml::read(text, LIMITS);
    let dialect = dialect.unwrap_or_else(|| detect(path, text, &reading.documents));
    let report = Report::default();
    let refused = |reason: String, report: &Report| Conversion {
        dialect,
        outcome: Outcome::Refused { reason },
        text: None,
        losses: report.losses(),
    };
    // GitLab's `!reference` is a tag; elsewhere a tag is a fault of the source, as is everything else.
    let harmless = |kind: FaultKind| {
        matches!(kind, FaultKind::Tag | FaultKind::DuplicateKey)
            || (kind == FaultKind::Alias && dialect != Dialect::Gitlab)
    };
    if let Some(fault) = reading.faults.iter().find(|fault| !harmless(fault.kind)) {
        let place = fault.span.start;
        return refused(format!("line {}, column {}: {}", place.line, place.col, fault.message), &report);
    }
    let mut tags = Vec::new();
    for fault in &reading.faults {
        match fault.kind {
            FaultKind::Tag if dialect == Dialect::Gitlab && fault.message.contains("!reference") => {
                tags.push(fault.span.start);
            }
            _ => report.lose(fault.span.start, "", &fault.message),
        }
    }
    let name = name_of(path);
    let made = match dialect {
        Dialect::Github => github::convert(&reading.documents, &name, options, &report),
        Dialect::Gitlab => gitlab::convert(&reading.documents, &tags, &name, options, &report),
        Dialect::Woodpecker | Dialect::Drone => {
            woodpecker::convert(&reading.documents, dialect, &name, options, &report)
        }
    };
    let written = made.and_then(|workflow| check::settle(workflow, dialect, &report));
    match written {
        Ok(text) => {
            let losses = report.losses();
            let outcome = if losses.is_empty() { Outcome::Runs } else { Outcome::RunsWithLoss };
            Conversion { dialect, outcome, text: Some(text), losses }
        }
        Err(reason) => refused(reason, &report),
    }
}

/// The file that a converted workflow is written to: the stem of the source in characters that names may have.
pub fn file_name(path: &str) -> String {
    format!("{}.yaml", name_of(path))
}

fn name_of(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = file.trim_end_matches(".yaml").trim_end_matches(".yml").trim_start_matches('.');
    target::name(stem).unwrap_or_else(|| "converted".to_owned())
}

/// The dialect of a file: by its folder, else by keys that only one of them has.
fn detect(path: &str, text: &str, documents: &[Document]) -> Dialect {
    let folders: [(&str, Dialect); 6] = [
        (".github/", Dialect::Github),
        (".forgejo/", Dialect::Github),
        (".gitea/", Dialect::Github),
        ("woodpecker", Dialect::Woodpecker),
        ("gitlab-ci", Dialect::Gitlab),
        (".drone", Dialect::Drone),
    ];
    let root = documents.first().map(|document| &document.root);
    let has = |key: &str| match root.map(|node| &node.data) {
        Some(Data::Map(entries)) => entries.iter().any(|entry| entry.key == key),
        // What cannot be read still looks like something.
        _ => text.lines().any(|line| line.strip_prefix(key).is_some_and(|rest| rest.starts_with(':'))),
    };
    if has("kind") && has("steps") {
        return Dialect::Drone;
    }
    if has("jobs") && has("on") {
        return Dialect::Github;
    }
    if let Some((_, dialect)) = folders.iter().find(|(part, _)| path.contains(part)) {
        return *dialect;
    }
    if has("steps") || has("pipeline") { Dialect::Woodpecker } else { Dialect::Gitlab }
}

/// The root of the only document, or why there is none.
fn only<'a>(documents: &'a [Document], report: &Report) -> Result<&'a Node, String> {
    let (first, rest) = documents.split_first().ok_or("the file is empty")?;
    for other in rest {
        report.lose(other.root.span.start, "", "a second document of the file is not read");
    }
    match first.root.data {
        Data::Map(_) => Ok(&first.root),
        _ => Err("the file is not a map of keys".to_owned()),
    }
}
