//! The text form of a host selector, for a query or a command line.
//!
//! Terms are separated by commas or blanks and all must hold; `|` separates groups of which one must hold; `!` excludes
//! from all groups. A term is a label, a glob or `/regex/`, or one of `status=WORD`, `lifecycle=WORD` and
//! `property:KEY=VALUE`, which narrow the result whatever group they stand in (a label cannot hold `=`).

use serde_json::Value as Json;

use super::{Host, HostMatcher, HostSelector, HostStatus, Lifecycle, is_reserved_property};
use crate::labels::parse_term;

/// A selector of hosts with the conditions that only lists know.
#[derive(Clone, Debug, Default)]
pub struct HostQuery {
    /// The part that a fan-out knows too.
    pub selector: HostSelector,
    matcher: HostMatcher,
    status: Vec<HostStatus>,
    lifecycle: Vec<Lifecycle>,
    properties: Vec<(String, String)>,
}

/// A text that is no selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at character {position}: {problem}")]
pub struct QueryFault {
    /// The character where the faulty term begins, from 0.
    pub position: usize,
    /// What is wrong with it, and what to do.
    pub problem: String,
}

impl HostQuery {
    /// Reads the text form; an empty text means every host.
    ///
    /// # Errors
    /// [`QueryFault`] with the place.
    pub fn parse(text: &str) -> Result<Self, QueryFault> {
        let mut query = Self::default();
        let mut group = Vec::new();
        let mut groups = 0_usize;
        for token in tokens(text)? {
            let fault = |problem: String| QueryFault { position: token.position, problem };
            match token.text {
                "|" => {
                    groups += 1;
                    if group.is_empty() {
                        return Err(fault("nothing stands before `|`; name at least one label".to_owned()));
                    }
                    query.selector.include.push(std::mem::take(&mut group));
                }
                term if query.condition(term).map_err(fault)? => {}
                term => {
                    let term = parse_term(term).map_err(|error| fault(error.to_string()))?;
                    let list = if term.exclude { &mut query.selector.exclude } else { &mut group };
                    list.push(term.matcher);
                }
            }
        }
        if group.is_empty() && groups > 0 {
            let problem = "nothing stands after `|`; name at least one label".to_owned();
            return Err(QueryFault { position: text.chars().count(), problem });
        }
        if !group.is_empty() {
            query.selector.include.push(group);
        }
        query.matcher = HostMatcher::compile(&query.selector)
            .map_err(|error| QueryFault { position: 0, problem: error.to_string() })?;
        Ok(query)
    }

    /// True when it narrows by more than labels, which a fan-out cannot.
    pub fn has_conditions(&self) -> bool {
        !(self.status.is_empty() && self.lifecycle.is_empty() && self.properties.is_empty())
    }

    /// Reads `key=value`; false when the term is none.
    fn condition(&mut self, term: &str) -> Result<bool, String> {
        if term.starts_with(['/', '!']) {
            return Ok(false);
        }
        let Some((key, value)) = term.split_once('=') else { return Ok(false) };
        match key {
            "status" => self.status.push(value.parse().map_err(|_| words("status", HostStatus::ALL))?),
            "lifecycle" => self.lifecycle.push(value.parse().map_err(|_| words("lifecycle", Lifecycle::ALL))?),
            _ => match key.strip_prefix("property:") {
                Some(name) if is_reserved_property(name) => {
                    return Err(format!("property `{name}` is the system's and cannot be selected by"));
                }
                Some(name) if !name.is_empty() => self.properties.push((name.to_owned(), value.to_owned())),
                _ => return Err(format!("`{key}` is no condition; use `status=`, `lifecycle=` or `property:KEY=`")),
            },
        }
        Ok(true)
    }

    /// Whether the query means this host.
    pub fn matches(&self, host: &Host) -> bool {
        let holds = |(key, wanted): &(String, String)| host.properties.get(key).is_some_and(|v| shown(v) == *wanted);
        self.matcher.matches(&host.labels)
            && (self.status.is_empty() || self.status.contains(&host.status))
            && (self.lifecycle.is_empty() || self.lifecycle.contains(&host.lifecycle))
            && self.properties.iter().all(holds)
    }
}

fn words<T: ToString>(what: &str, all: &[T]) -> String {
    let all: Vec<String> = all.iter().map(|word| format!("`{}`", word.to_string())).collect();
    format!("not a word for `{what}`; use {}", all.join(" or "))
}

fn shown(value: &Json) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

struct Token<'a> {
    text: &'a str,
    position: usize,
}

fn push<'a>(out: &mut Vec<Token<'a>>, text: &'a str, position: usize) {
    if !text.is_empty() {
        out.push(Token { text, position });
    }
}

/// Takes the text apart. Separators inside `/…/`, `{…}` and `[…]` belong to the term.
fn tokens(text: &str) -> Result<Vec<Token<'_>>, QueryFault> {
    let mut out = Vec::new();
    let (mut start, mut start_char) = (0, 0);
    let (mut depth, mut regex, mut quoted) = (0_u32, false, false);
    for (at_char, (at, c)) in text.char_indices().enumerate() {
        let first = at == start || (at == start + 1 && text[start..].starts_with('!'));
        if std::mem::take(&mut quoted) {
            continue;
        }
        match c {
            '\\' if regex => quoted = true,
            '/' if regex => regex = !ends_term(&text[at + 1..]),
            _ if regex => {}
            '/' if first => regex = true,
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.saturating_sub(1),
            _ if depth > 0 => {}
            ',' | '|' => {
                push(&mut out, &text[start..at], start_char);
                if c == '|' {
                    out.push(Token { text: "|", position: at_char });
                }
                (start, start_char) = (at + 1, at_char + 1);
            }
            c if c.is_whitespace() => {
                push(&mut out, &text[start..at], start_char);
                (start, start_char) = (at + c.len_utf8(), at_char + 1);
            }
            _ => {}
        }
    }
    if regex {
        let problem = "the regular expression has no closing `/`".to_owned();
        return Err(QueryFault { position: start_char, problem });
    }
    push(&mut out, &text[start..text.len()], start_char);
    Ok(out)
}

/// A `/` closes a regular expression where a separator or nothing follows: labels themselves may hold `/`.
fn ends_term(rest: &str) -> bool {
    rest.chars().next().is_none_or(|next| next == ',' || next == '|' || next.is_whitespace())
}
