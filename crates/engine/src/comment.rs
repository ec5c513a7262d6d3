//! Commands in comments of pull requests: `/kici approve [run]` and `/kici reject [run]`.

use crate::event::{Event, EventKind};

/// What a command asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// To release what is held.
    Approve,
    /// To refuse it.
    Reject,
}

impl Verb {
    /// As it is written.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Approve => "approve",
            Self::Reject => "reject",
        }
    }
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command<'a> {
    /// What it asks for.
    pub verb: Verb,
    /// The run that it is about; all held ones of the pull request when left out.
    pub run: Option<&'a str>,
}

/// The commands of an event: those of a comment that was just written on a pull request. Edited comments count for nothing:
/// who edits is not always who wrote.
pub fn commands(event: &Event) -> Vec<Command<'_>> {
    let on_pull_request = event.payload.pointer("/issue/pull_request").is_some_and(|link| !link.is_null());
    if event.kind != EventKind::Comment || event.action.as_deref() != Some("created") || !on_pull_request {
        return Vec::new();
    }
    event.payload.pointer("/comment/body").and_then(|body| body.as_str()).map(parse).unwrap_or_default()
}

/// The commands of a text: lines of their own, outside fenced code; a quote is never one.
fn parse(text: &str) -> Vec<Command<'_>> {
    let mut fence: Option<&str> = None;
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        let mark = ["```", "~~~"].into_iter().find(|mark| line.starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) => found.extend(command(line)),
            (Some(_), _) => {}
        }
    }
    found
}

fn command(line: &str) -> Option<Command<'_>> {
    let mut words = line.split_whitespace();
    if words.next()? != "/kici" {
        return None;
    }
    let verb = words.next()?;
    let verb = [Verb::Approve, Verb::Reject].into_iter().find(|known| known.as_str().eq_ignore_ascii_case(verb))?;
    let run = words.next();
    // No id is longer.
    let fits = run.is_none_or(|run| run.len() <= 64) && words.next().is_none();
    fits.then_some(Command { verb, run })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_outside_code_and_quotes_are_commands() {
        let said = |text| -> Vec<String> {
            let all = parse(text);
            all.iter().map(|one| format!("{} {}", one.verb.as_str(), one.run.unwrap_or("all"))).collect()
        };
        for (text, expected) in [
            ("/kici approve", &["approve all"][..]),
            ("looks good\r\n  /kici APPROVE run_1\r\n", &["approve run_1"]),
            ("/kici reject\n/kici approve run_2", &["reject all", "approve run_2"]),
            ("/kici approved", &[]),
            ("/kiciapprove", &[]),
            ("/kici", &[]),
            ("/kici approve run_1 please", &[]),
            ("please /kici approve", &[]),
            ("> /kici approve", &[]),
            ("```\n/kici approve\n```", &[]),
            ("```sh\n~~~\n/kici approve\n```\n/kici reject", &["reject all"]),
            ("", &[]),
        ] {
            assert_eq!(said(text), expected, "{text:?}");
        }
    }
}
