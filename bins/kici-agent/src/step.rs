//! The command line of steps, `kici`: thin over the socket of the job.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use kici_credential_helper::client::{CallError, Connection};
use kici_credential_helper::permission::Permissions;
use kici_credential_helper::wire::git::{Secret, Want};
use kici_credential_helper::{helper, window};
use zeroize::Zeroizing;

/// Exit code of wrong arguments.
const USAGE: u8 = 2;
/// How long the orchestrator may take to make a token.
const TOKEN_LIMIT: Duration = Duration::from_secs(40);

/// How long an event may take to be stored, also while the orchestrator is away.
const EVENT_LIMIT: Duration = Duration::from_secs(600);

/// How long the agent, which is on this host, may take to note a value.
const MASK_LIMIT: Duration = Duration::from_secs(20);
/// Of standard input as a value to hide: more than the agent takes, so that it says so.
const MAX_MASK_BYTES: u64 = 64 * 1024;

/// What `kici` understands.
pub fn command() -> Command {
    let repo = Arg::new("repo").long("repo").value_name("OWNER/NAME").help("the repository; the job's own if left out");
    let permission = Arg::new("permission")
        .long("permission")
        .value_name("NAME=LEVEL")
        .action(ArgAction::Append)
        .help("what is needed, several times for several");
    let credential =
        Arg::new("credential").long("credential").value_name("NAME").help("a credential of git_credentials.named");
    let with_write = Command::new("with-write")
        .about("Run a command during which git may push (contents=write unless --permission says otherwise)")
        .args([repo.clone(), permission.clone(), credential.clone()])
        .arg(
            Arg::new("ttl")
                .long("ttl")
                .value_name("SECONDS")
                .value_parser(value_parser!(u64).range(1..=3600))
                .help("after which it ends in any case (600)"),
        )
        .arg(
            Arg::new("command").value_name("CMD").required(true).num_args(1..).last(true).help("the command, after --"),
        );
    let token = Command::new("token")
        .about("Print a token (contents=read unless --permission says otherwise)")
        .args([repo, permission, credential]);
    let git =
        Command::new("git").about("Credentials for git").subcommand_required(true).subcommands([with_write, token]);
    let emit = Command::new("emit")
        .about("Emit an event for other workflows and print its id")
        .arg(Arg::new("event").value_name("EVENT").required(true).help("its name"))
        .arg(Arg::new("payload").long("payload").value_name("JSON").default_value("{}").help("its document"))
        .arg(
            Arg::new("target")
                .long("target")
                .value_name("PATTERN")
                .action(ArgAction::Append)
                .help("only for these repositories, several times for several"),
        );
    let mask = Command::new("mask").about("Hide values in all output of the job from now on").arg(
        Arg::new("value")
            .value_name("VALUE")
            .num_args(0..)
            .help("several for several; standard input if left out, which no other process can see"),
    );
    Command::new("kici")
        .version(env!("CARGO_PKG_VERSION"))
        .about("What steps of a KiCI job can ask of their agent")
        .subcommand_required(true)
        .subcommands([emit, mask, git, crate::step_stash::cache(), crate::step_stash::artifact()])
}

/// Runs `kici` with arguments from `matches`.
pub fn run(matches: &ArgMatches) -> ExitCode {
    let Some(socket) = std::env::var_os("KICI_SOCK").map(PathBuf::from) else {
        eprintln!("kici: KICI_SOCK is not set: this is no step of a job at an agent");
        return ExitCode::FAILURE;
    };
    match matches.subcommand() {
        Some(("emit", arguments)) => emit(&socket, arguments),
        Some(("mask", arguments)) => mask(&socket, arguments),
        Some(("git", git)) => match git.subcommand() {
            Some(("with-write", arguments)) => with_write(&socket, arguments),
            Some(("token", arguments)) => token(&socket, arguments),
            _ => ExitCode::from(USAGE),
        },
        Some(("cache", cache)) => crate::step_stash::run_cache(&socket, cache),
        Some(("artifact", artifact)) => crate::step_stash::run_artifact(&socket, artifact),
        _ => ExitCode::from(USAGE),
    }
}

/// Runs `kici` with all of this process' arguments.
pub fn run_as_kici(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    match command().try_get_matches_from(arguments) {
        Ok(matches) => run(&matches),
        Err(error) => {
            // Help and versions are no errors; clap knows.
            let _ = error.print();
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE))
        }
    }
}

/// Answers git. Never fails and, whatever it is called with, never says anything else.
pub fn answer_git(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let Ok(matches) = helper_command().try_get_matches_from(arguments) else { return ExitCode::SUCCESS };
    let text = |name: &str| matches.get_one::<String>(name).map(String::as_str);
    if let (Some(socket), Some(operation)) = (text("socket"), text("operation")) {
        helper::run(Path::new(socket), operation, std::io::stdin(), std::io::stdout());
    }
    ExitCode::SUCCESS
}

/// The form in which git starts its helper; not for people.
pub fn helper_command() -> Command {
    Command::new("credential-helper")
        .hide(true)
        .arg(Arg::new("socket").long("socket").required(true))
        .arg(Arg::new("operation").required(true))
}

fn want(arguments: &ArgMatches) -> Result<Want, ExitCode> {
    let text = |name: &str| arguments.get_one::<String>(name).cloned();
    let pairs = arguments.get_many::<String>("permission").unwrap_or_default();
    let permissions = Permissions::parse(pairs).map_err(|error| {
        eprintln!("kici: {error}");
        ExitCode::from(USAGE)
    })?;
    let ttl_s = arguments.try_get_one::<u64>("ttl").ok().flatten().copied();
    Ok(Want { repo: text("repo"), permissions, credential: text("credential"), ttl_s })
}

fn with_write(socket: &Path, arguments: &ArgMatches) -> ExitCode {
    let want = match want(arguments) {
        Ok(want) => want,
        Err(code) => return code,
    };
    let command: Vec<String> = arguments.get_many::<String>("command").unwrap_or_default().cloned().collect();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("kici: {error}");
            return ExitCode::FAILURE;
        }
    };
    let say = |text: &str| eprintln!("kici: {text}");
    match runtime.block_on(window::with_write(socket, &want, &command, say)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("kici: {error}");
            ExitCode::from(error.exit())
        }
    }
}

fn emit(socket: &Path, arguments: &ArgMatches) -> ExitCode {
    let text = |name: &str| arguments.get_one::<String>(name).cloned().unwrap_or_default();
    let payload: serde_json::Value = match serde_json::from_str(&text("payload")) {
        Ok(payload) => payload,
        Err(error) => {
            eprintln!("kici: --payload is not JSON: {error}");
            return ExitCode::from(USAGE);
        }
    };
    let target: Vec<&String> = arguments.get_many::<String>("target").unwrap_or_default().collect();
    let body = serde_json::json!({"event": text("event"), "payload": payload, "target": target});
    let asked = Connection::open(socket).map_err(CallError::from);
    let asked = asked.and_then(|mut socket| socket.call::<serde_json::Value>("events.emit", &body, EVENT_LIMIT));
    match asked {
        Ok(stored) => match writeln!(std::io::stdout(), "{}", stored["event_id"].as_str().unwrap_or_default()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("kici: {error}");
            ExitCode::from(error.exit())
        }
    }
}

fn mask(socket: &Path, arguments: &ArgMatches) -> ExitCode {
    let mut values: Vec<String> = arguments.get_many::<String>("value").unwrap_or_default().cloned().collect();
    if values.is_empty() {
        let mut text = String::new();
        if let Err(error) = std::io::stdin().take(MAX_MASK_BYTES).read_to_string(&mut text) {
            eprintln!("kici: the value cannot be read: {error}");
            return ExitCode::FAILURE;
        }
        values.push(text.trim_end_matches('\n').to_owned());
    }
    let asked = Connection::open(socket).map_err(CallError::from);
    let body = serde_json::json!({ "values": values });
    match asked.and_then(|mut socket| socket.call::<serde_json::Value>("mask.add", &body, MASK_LIMIT)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kici: {error}");
            ExitCode::from(error.exit())
        }
    }
}

fn token(socket: &Path, arguments: &ArgMatches) -> ExitCode {
    let want = match want(arguments) {
        Ok(want) => want,
        Err(code) => return code,
    };
    let asked = || -> Result<Zeroizing<String>, CallError> {
        let found: Secret = Connection::open(socket)?.call("git.token", &want, TOKEN_LIMIT)?;
        Ok(Zeroizing::new(found.secret))
    };
    match asked() {
        Ok(secret) => match writeln!(std::io::stdout(), "{}", secret.as_str()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("kici: {error}");
            ExitCode::from(error.exit())
        }
    }
}
