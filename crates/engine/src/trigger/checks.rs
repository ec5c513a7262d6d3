//! The filters that triggers are made of. Each records what it asked and what it found, and stops the trigger when it does
//! not hold.

use std::fmt::Display;

use super::TraceEntry;
use crate::condition::{self, Found};
use crate::event::{ChangedFiles, Event, EventKind};
use crate::lock;
use crate::pattern::Patterns;

/// Longest text of a trace entry, in characters.
const MAX_TEXT: usize = 200;

/// Why a trigger stops.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// It does not match.
    No,
    /// The changed files decide and are not there.
    NeedsFiles,
}

pub(super) type Checked = Result<(), Stop>;

pub(super) struct Checks<'a> {
    pub(super) event: &'a Event,
    files: Option<&'a ChangedFiles>,
    entries: Vec<TraceEntry>,
    note: Option<String>,
}

impl<'a> Checks<'a> {
    pub(super) fn new(event: &'a Event, files: Option<&'a ChangedFiles>) -> Self {
        Self { event, files, entries: Vec::new(), note: None }
    }

    pub(super) fn finish(self) -> (Vec<TraceEntry>, Option<String>) {
        (self.entries, self.note)
    }

    fn record(&mut self, check: &str, expected: impl Display, actual: impl Display, passed: bool) -> Checked {
        self.entries.push(TraceEntry {
            check: check.to_owned(),
            expected: cut(expected),
            actual: cut(actual),
            passed,
            note: None,
        });
        if passed { Ok(()) } else { Err(Stop::No) }
    }

    fn annotate(&mut self, note: String) {
        if let Some(entry) = self.entries.last_mut() {
            entry.note = Some(note);
        }
    }

    /// Something that a lock should not hold: the trigger does not match, the trace says why.
    fn broken(&mut self, check: &str, problem: impl Display) -> Stop {
        let _ = self.record(check, "a usable filter", "none", false);
        self.annotate(cut(problem));
        Stop::No
    }

    pub(super) fn kind(&mut self, wanted: EventKind) -> Checked {
        let kind = self.event.kind;
        self.record("event", wanted, kind, kind == wanted)
    }

    /// A condition that is computed elsewhere.
    pub(super) fn fact(&mut self, check: &str, expected: impl Display, actual: impl Display, passed: bool) -> Checked {
        self.record(check, expected, actual, passed)
    }

    /// One of a list of words. An empty list does not filter.
    pub(super) fn words(&mut self, check: &str, wanted: &[String], actual: Option<&str>) -> Checked {
        if wanted.is_empty() {
            return Ok(());
        }
        let hit = actual.is_some_and(|have| wanted.iter().any(|want| want.eq_ignore_ascii_case(have)));
        self.record(check, wanted.join(", "), actual.unwrap_or("absent"), hit)
    }

    /// Like [`words`](Self::words), with what an empty list stands for.
    pub(super) fn words_or(&mut self, check: &str, wanted: &[String], default: &[&str], have: Option<&str>) -> Checked {
        let default: Vec<String> = default.iter().map(|word| (*word).to_owned()).collect();
        self.words(check, if wanted.is_empty() { &default } else { wanted }, have)
    }

    /// A pattern list (R20). An empty list does not filter; what is absent does not match.
    pub(super) fn patterns(&mut self, check: &str, list: &[String], actual: Option<&str>) -> Checked {
        if list.is_empty() {
            return Ok(());
        }
        let patterns = Patterns::compile(list).map_err(|error| self.broken(check, error))?;
        let hit = actual.is_some_and(|text| patterns.matches(text));
        self.record(check, list.join(", "), actual.unwrap_or("absent"), hit)
    }

    /// A pattern list over several texts, one of which must be selected.
    pub(super) fn any_pattern(&mut self, check: &str, list: &[String], actual: &[&str]) -> Checked {
        if list.is_empty() {
            return Ok(());
        }
        let patterns = Patterns::compile(list).map_err(|error| self.broken(check, error))?;
        self.record(check, list.join(", "), sample(actual), patterns.match_any(actual))
    }

    /// Changed files (R21). Unknown files count as a match: better a run too many than one that silently does not happen.
    pub(super) fn paths(&mut self, list: &[String]) -> Checked {
        if list.is_empty() {
            return Ok(());
        }
        let patterns = Patterns::compile(list).map_err(|error| self.broken("paths", error))?;
        let expected = list.join(", ");
        let doubt = match self.files {
            None => {
                let _ = self.record("paths", expected, "not fetched yet", false);
                return Err(Stop::NeedsFiles);
            }
            Some(ChangedFiles::Known(files)) => {
                return self.record("paths", expected, sample(files), patterns.match_any(files));
            }
            Some(ChangedFiles::Truncated(files)) if patterns.match_any(files) => {
                return self.record("paths", expected, sample(files), true);
            }
            Some(ChangedFiles::Truncated(files)) => {
                format!("the forge listed only the first {} changed files", files.len())
            }
            Some(ChangedFiles::Unavailable(reason)) => reason.clone(),
        };
        let note = cut(format_args!("path filter not evaluated: {doubt}"));
        self.record("paths", expected, "not known", true)?;
        self.annotate(note.clone());
        self.note = Some(note);
        Ok(())
    }

    /// `match` and `not` (R24) over the payload: all of the first hold, none of the second. A document that is too large for a
    /// path is a no in both.
    pub(super) fn conditions(&mut self, all: &lock::Conditions, none: &lock::Conditions) -> Checked {
        for (check, map, wanted) in [("match", all, true), ("not", none, false)] {
            let compiled = condition::compile_all(map).map_err(|error| self.broken(check, error))?;
            for one in compiled {
                let expected = format!("{} is {}", one.path(), one.expectation());
                match one.evaluate(&self.event.payload) {
                    Found::Holds { actual } => self.record(check, expected, actual, wanted)?,
                    Found::Fails { actual } => self.record(check, expected, actual, !wanted)?,
                    Found::TooLarge => {
                        let _ = self.record(check, expected, "not evaluated", false);
                        self.annotate(
                            "the payload is too large for this path; name the place without wildcards".into(),
                        );
                        return Err(Stop::No);
                    }
                }
            }
        }
        Ok(())
    }

    /// A text in the payload by JSON pointer (RFC 6901); the first that is there.
    pub(super) fn payload(&self, pointers: &[&str]) -> Option<&'a str> {
        pointers.iter().find_map(|pointer| self.event.payload.pointer(pointer)?.as_str())
    }
}

fn cut(text: impl Display) -> String {
    let text = text.to_string();
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn sample<S: AsRef<str>>(list: &[S]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<&str> = list.iter().take(SHOWN).map(AsRef::as_ref).collect();
    match list.len() {
        0 => "none".to_owned(),
        n if n > SHOWN => format!("{} and {} more", shown.join(", "), n - SHOWN),
        _ => shown.join(", "),
    }
}
