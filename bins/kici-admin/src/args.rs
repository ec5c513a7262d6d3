//! The command line.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use serde_json::Value as Json;
use url::Url;

use crate::exit::Failure;
use crate::verbs::{
    agent, agent_token, artifact, audit, cache, event, event_trust, host, orchestrator, queue, run, schedule, source,
    token, workflow,
};

/// Operate a KiCI orchestrator.
///
/// Exit codes: 0 done, 1 failed, 2 a check failed or a wait ended without its event, 3 not authenticated or permitted,
/// 4 not found, 5 refused by the present state, 6 the server cannot be reached, 7 input rejected, 8 partial result,
/// 64 wrong command line.
#[derive(Debug, Parser)]
#[command(name = "kici-admin", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// The orchestrator [default: http://127.0.0.1:4000]
    #[arg(long, global = true, env = "KICI_ADMIN_URL", value_parser = address, help_heading = "Connection")]
    pub url: Option<Url>,
    /// Admin token; prefer --token-file, since other users can read a command line
    #[arg(long, global = true, env = "KICI_ADMIN_TOKEN", hide_env_values = true, help_heading = "Connection")]
    pub token: Option<String>,
    /// File that holds the admin token; goes before the variable KICI_ADMIN_TOKEN
    #[arg(long, global = true, help_heading = "Connection")]
    pub token_file: Option<PathBuf>,
    /// Data directory of the orchestrator on this machine, for its bootstrap token
    #[arg(long, global = true, env = "KICI_DATA_DIR", help_heading = "Connection")]
    pub data_dir: Option<PathBuf>,
    /// Section of ~/.config/kici/admin.toml with url, token_file and ca_file
    #[arg(long, global = true, env = "KICI_ADMIN_PROFILE", help_heading = "Connection")]
    pub profile: Option<String>,
    /// Certificates (PEM) to trust besides the platform's
    #[arg(long, global = true, help_heading = "Connection")]
    pub ca_file: Option<PathBuf>,
    /// Limit for one answer: 500ms, 30s, 2m
    #[arg(long, global = true, default_value = "30s", value_parser = duration, help_heading = "Connection")]
    pub timeout: Duration,
    /// Form of the output
    #[arg(short, long, global = true, default_value = "table", help_heading = "Output")]
    pub output: Format,
    /// The same as --output json
    #[arg(long, global = true, conflicts_with = "output", help_heading = "Output")]
    pub json: bool,
    /// No colours; also the variable NO_COLOR
    #[arg(long, global = true, env = "NO_COLOR", value_parser = clap::builder::FalseyValueParser::new(), help_heading = "Output")]
    pub no_color: bool,
    /// Absolute times in UTC
    #[arg(long, global = true, help_heading = "Output")]
    pub utc: bool,
    /// Only data and errors
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Output")]
    pub quiet: bool,
    /// Say which server and token are used
    #[arg(short, long, global = true, help_heading = "Output")]
    pub verbose: bool,
    /// Answer yes to every question
    #[arg(long, global = true, help_heading = "Output")]
    pub yes: bool,
}

/// Form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// One JSON document; JSON lines where the output goes on.
    Json,
    /// One YAML document.
    Yaml,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs: list, show, logs, cancel, repeat, start
    #[command(subcommand)]
    Run(run::Verb),
    /// Sources of events and commits
    #[command(subcommand)]
    Source(source::Verb),
    /// Tokens that agents register with
    #[command(subcommand)]
    AgentToken(agent_token::Verb),
    /// Tokens of operators and programs
    #[command(subcommand)]
    Token(token::Verb),
    /// Agents
    #[command(subcommand)]
    Agent(agent::Verb),
    /// Hosts that jobs can be sent to by name
    #[command(subcommand)]
    Host(host::Verb),
    /// The event log, the internal bus and the dead letters
    #[command(subcommand)]
    Event(event::Verb),
    /// Which repositories may start workflows of others by events
    #[command(subcommand)]
    EventTrust(event_trust::Verb),
    /// Times that start workflows
    #[command(subcommand)]
    Schedule(schedule::Verb),
    /// Workflows that events without a commit of their own can start
    #[command(subcommand)]
    Registration(schedule::Registration),
    /// Jobs that wait for an agent
    #[command(subcommand)]
    Queue(queue::Verb),
    /// Workflow files
    #[command(subcommand)]
    Workflow(workflow::Verb),
    /// The orchestrator itself
    #[command(subcommand)]
    Orchestrator(orchestrator::Verb),
    /// Who got, or was refused, which secret
    #[command(subcommand)]
    Audit(audit::Verb),
    /// Files that runs hand over
    #[command(subcommand)]
    Artifact(artifact::Verb),
    /// Caches of workflows
    #[command(subcommand)]
    Cache(cache::Verb),
    /// Check the orchestrator: 0 pass, 1 warn, 2 fail
    Diagnose,
    /// Print a completion script
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Which part of a list.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Paging {
    /// Items per page, 1 to 200 [default: 50]
    #[arg(long, value_parser = whole::<u32>)]
    pub limit: Option<u32>,
    /// Go on after a page: its next_cursor
    #[arg(long)]
    pub cursor: Option<String>,
    /// All pages
    #[arg(long, conflicts_with = "cursor")]
    pub all: bool,
}

/// A number and one of ms, s, m, h, d.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err("use a number with ms, s, m, h or d, for instance 30s".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "use a number with ms, s, m, h or d, for instance 30s".to_owned())?;
    number.checked_mul(milliseconds).map(Duration::from_millis).ok_or_else(|| "too long".to_owned())
}

/// A whole number.
pub(crate) fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "use a whole number".to_owned())
}

/// The address of a server.
pub(crate) fn address(text: &str) -> Result<Url, String> {
    const REMEDY: &str = "use an http or https URL, for instance http://127.0.0.1:4000";
    let url = Url::parse(text).map_err(|_| REMEDY.to_owned())?;
    if matches!(url.scheme(), "http" | "https") && url.has_host() { Ok(url) } else { Err(REMEDY.to_owned()) }
}

/// The command line. A token file may stand beside a token that comes from the variable, not beside one that was typed.
///
/// # Errors
/// What clap says of it.
pub(crate) fn parse() -> Result<Cli, clap::Error> {
    let matches = Cli::command().try_get_matches()?;
    if given(&matches, "token") && given(&matches, "token_file") {
        let problem = "the argument '--token-file' cannot be used with '--token'";
        return Err(Cli::command().error(clap::error::ErrorKind::ArgumentConflict, problem));
    }
    Cli::from_arg_matches(&matches)
}

/// Whether a global option stands on the command line, behind whichever word.
fn given(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
        || matches.subcommand().is_some_and(|(_, below)| given(below, id))
}

/// `KEY=VALUE`.
pub(crate) fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("use KEY=VALUE".to_owned()),
    }
}

/// `KEY=VALUE` arguments by key.
///
/// # Errors
/// When a key is given twice: which of the two is meant cannot be known.
pub(crate) fn distinct<'a>(flag: &str, given: &'a [(String, String)]) -> Result<BTreeMap<&'a str, &'a str>, Failure> {
    let mut all = BTreeMap::new();
    for (key, value) in given {
        if all.insert(key.as_str(), value.as_str()).is_some() {
            return Err(Failure::usage(format!("{flag} {key}=… is given twice; keep one")));
        }
    }
    Ok(all)
}

/// `KEY=VALUE` arguments by key: `true`, `false` and numbers as such, all else as text.
///
/// # Errors
/// When a key is given twice.
pub(crate) fn typed(flag: &str, given: &[(String, String)]) -> Result<BTreeMap<String, Json>, Failure> {
    let typed = |value: &str| match serde_json::from_str(value) {
        Ok(json @ (Json::Bool(_) | Json::Number(_))) => json,
        _ => Json::String(value.to_owned()),
    };
    Ok(distinct(flag, given)?.into_iter().map(|(key, value)| (key.to_owned(), typed(value))).collect())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn truth_and_numbers_are_typed_and_a_key_is_given_once() {
        for (text, expected) in [
            ("true", Json::from(true)),
            ("3", Json::from(3)),
            ("1.5", Json::from(1.5)),
            ("3x", Json::from("3x")),
            ("null", Json::from("null")),
            ("[1]", Json::from("[1]")),
            ("", Json::from("")),
        ] {
            let found = typed("--input", &[("key".to_owned(), text.to_owned())]).expect("one of each");
            assert_eq!(found["key"], expected, "{text}");
        }
        let twice = ["a", "b"].map(|value| ("key".to_owned(), value.to_owned()));
        assert!(typed("--input", &twice).is_err());
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "5", "s", "1w", "99999999999999999999s", "18446744073709551615d"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
