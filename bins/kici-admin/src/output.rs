//! What goes to stdout (data) and to stderr (prose).

use std::fmt::Write as _;
use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table};
use kici_api::page::Page;
use kici_engine::time::Ts;
use serde::Serialize;

use crate::args::{Format, Global, duration};
use crate::exit::Failure;

/// How this command speaks.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    /// The form of data.
    pub format: Format,
    /// Colours on stdout.
    pub colour: bool,
    quiet: bool,
    yes: bool,
    utc: bool,
    now: Ts,
}

/// One column of a table: its title and how an item shows in it.
pub(crate) type Column<'a, T> = (&'a str, Box<dyn Fn(&T) -> Cell + 'a>);

impl Output {
    /// From the options and what stdout is.
    pub fn new(global: &Global) -> Self {
        Self {
            format: if global.json { Format::Json } else { global.output },
            colour: !global.no_color && io::stdout().is_terminal(),
            quiet: global.quiet,
            yes: global.yes,
            utc: global.utc,
            now: now(),
        }
    }

    /// Prose for people.
    pub fn say(&self, text: impl AsRef<str>) {
        if !self.quiet {
            eprintln!("{}", text.as_ref());
        }
    }

    /// One document; `people` draws the form for people.
    pub fn document<T: Serialize>(&self, document: &T, people: impl FnOnce(&Self) -> String) -> Result<(), Failure> {
        let unserialisable = |error: String| Failure::other(format!("the answer cannot be printed: {error}"));
        let text = match self.format {
            Format::Table => people(self),
            Format::Json => serde_json::to_string_pretty(document).map_err(|e| unserialisable(e.to_string()))?,
            Format::Yaml => serde_yaml_ng::to_string(document).map_err(|e| unserialisable(e.to_string()))?,
        };
        self.print(text.trim_end())
    }

    /// One line of data as JSON.
    pub fn json_line<T: Serialize>(&self, document: &T) -> Result<(), Failure> {
        self.print(&serde_json::to_string(document).map_err(|error| Failure::other(error.to_string()))?)
    }

    /// A line of data. A reader that went away ends the program quietly, like other filters.
    pub fn print(&self, text: &str) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
            result => Ok(result?),
        }
    }

    /// A page of a list.
    pub fn page<T: Serialize>(&self, page: &Page<T>, nothing: &str, columns: &[Column<'_, T>]) -> Result<(), Failure> {
        if self.format == Format::Table && page.items.is_empty() {
            self.say(nothing);
            return Ok(());
        }
        self.document(page, |out| out.table(&page.items, columns))?;
        if let Some(cursor) = page.next_cursor.as_ref().filter(|_| self.format == Format::Table) {
            self.say(format!("more: --cursor {cursor}, or --all"));
        }
        Ok(())
    }

    /// Rows under titles.
    pub fn table<T>(&self, items: &[T], columns: &[Column<'_, T>]) -> String {
        let mut table = Table::new();
        table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
        if !self.colour {
            // A terminal without colours still has a width.
            let width = table.width();
            table.force_no_tty();
            if let Some(width) = width {
                table.set_width(width);
            }
        }
        table.set_header(columns.iter().map(|(title, _)| Cell::new(title).add_attribute(Attribute::Bold)));
        for item in items {
            table.add_row(columns.iter().map(|(_, cell)| cell(item)));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }

    /// A time: how long ago, or absolute with `--utc`.
    pub fn time(&self, at: Option<Ts>) -> String {
        match at {
            None => "-".to_owned(),
            Some(at) if self.utc => at.to_datetime().format("%Y-%m-%d %H:%M:%SZ").to_string(),
            Some(at) if at > self.now => format!("in {}", span(at.since(self.now))),
            Some(at) => format!("{} ago", span(self.now.since(at))),
        }
    }

    /// How long something took, or has taken until now.
    pub fn took(&self, from: Option<Ts>, to: Option<Ts>) -> String {
        from.map_or_else(|| "-".to_owned(), |from| span(to.unwrap_or(self.now).since(from)))
    }

    /// An instant from RFC 3339 or from an age such as `2h`.
    pub fn instant(&self, text: &str) -> Result<Ts, Failure> {
        if let Ok(age) = duration(text) {
            return Ok(self.now.minus(age));
        }
        Ts::parse_rfc3339(text).map_err(|_| {
            Failure::usage(format!("`{text}` is no time; use 2026-01-31T12:00:00Z, or an age such as 2h or 7d"))
        })
    }

    /// Asks before something that cannot be undone.
    ///
    /// # Errors
    /// Exit code 64 when nobody can be asked and `--yes` is missing, 1 when the answer is no.
    pub fn confirm(&self, effect: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !io::stdin().is_terminal() {
            return Err(Failure::usage(format!("{effect} Not a terminal: say --yes to do it.")));
        }
        eprint!("{effect} Go on? [y/N] ");
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer)?;
        if matches!(answer.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err(Failure::other("not done")) }
    }
}

/// The wall clock, for "3m ago".
#[allow(clippy::disallowed_methods, reason = "the one reader of the clock in this program; only for display")]
fn now() -> Ts {
    Ts::from_datetime(chrono::Utc::now())
}

/// A duration in its largest two units.
pub(crate) fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{}ms", duration.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// Plain text.
pub(crate) fn text(value: impl ToString) -> Cell {
    Cell::new(printable(&value.to_string()))
}

/// Text or `-`.
pub(crate) fn optional<T: ToString>(value: Option<&T>) -> Cell {
    value.map_or_else(|| Cell::new("-"), |value| text(value.to_string()))
}

/// A status in its colour.
pub(crate) fn status(word: &str) -> Cell {
    let cell = Cell::new(word);
    match colour(word) {
        Some(colour) => cell.fg(colour),
        None => cell,
    }
}

fn colour(word: &str) -> Option<Color> {
    match word {
        "success" | "ready" | "processed" | "pass" | "completed" | "yes" => Some(Color::Green),
        "failed" | "dead" | "fail" | "timed_out_stale" | "unroutable" | "drift_dropped" | "unreachable"
        | "workflow_invalid" | "expired" => Some(Color::Red),
        "running" | "dispatched" => Some(Color::Cyan),
        "cancelled" | "cancelling" | "recovering" | "warn" | "draining" | "held" | "waiting" => Some(Color::Yellow),
        "skipped" | "stale" | "pending" | "queued" => Some(Color::DarkGrey),
        _ => None,
    }
}

/// Names come from repositories and forges: control characters would reach the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// `key  value` lines for one thing.
pub(crate) fn fields(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    rows.iter().filter(|(_, value)| !value.is_empty()).fold(String::new(), |mut out, (name, value)| {
        // Writing to a string does not fail.
        _ = writeln!(out, "{name:width$}  {}", printable(value));
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_show_two_units() {
        for (seconds, expected) in [(5, "5s"), (65, "1m05s"), (3_700, "1h01m"), (90_000, "1d01h")] {
            assert_eq!(span(Duration::from_secs(seconds)), expected);
        }
        assert_eq!(span(Duration::from_millis(12)), "12ms");
    }

    #[test]
    fn foreign_text_cannot_steer_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb"), "a\u{fffd}[2Jb");
    }
}
