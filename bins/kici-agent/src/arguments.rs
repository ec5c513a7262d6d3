//! The command line: one flag per key of the configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use kici_runner::config::{Config, KEYS, Sources};

use crate::step;

/// The arguments of the agent. Where the program was called as the command line of steps, or as git's helper, that is done and
/// the error is how it ended.
pub fn called() -> Result<ArgMatches, ExitCode> {
    let name = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    if name.file_name().is_some_and(|name| name == "kici") {
        return Err(step::run_as_kici(std::env::args_os()));
    }
    if std::env::args_os().nth(1).is_some_and(|first| first == "credential-helper") {
        return Err(step::answer_git(std::env::args_os().skip(1)));
    }
    let matches = command().get_matches();
    match matches.subcommand() {
        Some(("step", arguments)) => Err(step::run(arguments)),
        _ => Ok(matches),
    }
}

/// What the program understands.
pub fn command() -> Command {
    let flags = KEYS.iter().filter(|key| !key.flag.is_empty());
    let flags = flags.map(|key| Arg::new(key.name).long(key.flag).help(key.about).global(true));
    Command::new("kici-agent")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Takes jobs from a KiCI orchestrator and runs them")
        .arg(Arg::new("config").long("config").help("configuration file (/etc/kici/agent.toml)").global(true))
        .args(flags)
        .subcommand(
            Command::new("doctor").about("Show what of the isolation of jobs is in force and what is missing").arg(
                Arg::new("output")
                    .long("output")
                    .value_name("FORMAT")
                    .value_parser(["table", "json"])
                    .default_value("table")
                    .help("form of the output"),
            ),
        )
        .subcommand(Command::new("run").about("Run the agent; the default"))
        .subcommand(step::helper_command())
        .subcommand(step::command().name("step").about("What steps ask of their agent; `kici` in the PATH of a job"))
        .subcommand(
            Command::new("config").about("Check the configuration and print it").subcommand(Command::new("check")),
        )
}

/// Where the settings are read from.
pub fn sources(arguments: &ArgMatches) -> Sources {
    let flag = |key: &str| arguments.get_one::<String>(key).cloned();
    let flags: BTreeMap<String, String> = KEYS
        .iter()
        .filter(|key| !key.flag.is_empty())
        .filter_map(|key| Some((key.name.to_owned(), flag(key.name)?)))
        .collect();
    Sources::from_process(flag("config").map(Into::into), flags)
}

/// Does what a verb other than `run` asks for; `None` when the agent is to run.
pub fn answer(arguments: &ArgMatches, config: &Config) -> Option<ExitCode> {
    match arguments.subcommand()? {
        ("config", _) => {
            print!("{}", config.describe());
            Some(ExitCode::SUCCESS)
        }
        ("doctor", own) => {
            Some(crate::doctor::run(config, own.get_one::<String>("output").is_some_and(|form| form == "json")))
        }
        _ => None,
    }
}
