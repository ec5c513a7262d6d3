//! The command line: one flag per key of the configuration.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use kici_runner::config::{Config, KEYS, Sources};

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
