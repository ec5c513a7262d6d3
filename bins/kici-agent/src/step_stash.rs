//! `kici cache` and `kici artifact`.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command};
use kici_credential_helper::client::{CallError, Connection};
use kici_credential_helper::wire::Code;
use kici_credential_helper::wire::stash::{ArtifactDownload, ArtifactUpload, CacheRestore, CacheSave, Done, Hit};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long an archive may be on its way, with all attempts.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

/// `cache restore|save`.
pub fn cache() -> Command {
    let key = Arg::new("key").long("key").value_name("KEY").required(true).help("what the entry is found by");
    let paths = Arg::new("path")
        .value_name("PATH")
        .required(true)
        .num_args(1..)
        .help("below the workspace, wherever you are, or below the home directory with ~/");
    let required = Arg::new("required")
        .long("required")
        .action(ArgAction::SetTrue)
        .help("fail when the store cannot be used; otherwise that is a warning");
    let restore_keys = Arg::new("restore-key")
        .long("restore-key")
        .value_name("PREFIX")
        .action(ArgAction::Append)
        .help("the beginning of keys that will do, several times for several");
    Command::new("cache")
        .about("Files that later jobs with the same key find again")
        .subcommand_required(true)
        .subcommands([
            Command::new("restore")
                .about("Replace PATHs by those of an entry; prints {\"hit\": …, \"matched_key\": …}")
                .args([key.clone(), restore_keys, required.clone(), paths.clone()]),
            Command::new("save").about("Keep PATHs under a key, unless it has an entry").args([key, required, paths]),
        ])
}

/// `artifact upload|download`.
pub fn artifact() -> Command {
    let name =
        Arg::new("name").value_name("NAME").required(true).help("unique in the run: letters, digits, `.`, `_`, `-`");
    let upload = Command::new("upload").about("Hand files of the workspace to other jobs and to people").args([
        name.clone(),
        Arg::new("path")
            .value_name("PATH")
            .required(true)
            .num_args(1..)
            .help("files, directories and globs below the workspace, wherever you are"),
        Arg::new("expire-in")
            .long("expire-in")
            .value_name("DAYS")
            .value_parser(clap::value_parser!(u64).range(1..=400))
            .help("days that it is kept; the orchestrator decides if left out"),
        Arg::new("allow-empty").long("allow-empty").action(ArgAction::SetTrue).help("it is fine when no file matches"),
    ]);
    let download = Command::new("download").about("Get the files of an artifact of this run").args([
        name,
        Arg::new("from").long("from").value_name("JOB").help("the job that must have made it"),
        Arg::new("path").long("path").value_name("DIR").help("below the workspace; the workspace itself if left out"),
    ]);
    Command::new("artifact")
        .about("Files that jobs of a run hand to others and to people")
        .subcommand_required(true)
        .subcommands([upload, download])
}

fn text(arguments: &ArgMatches, name: &str) -> Option<String> {
    arguments.get_one::<String>(name).cloned()
}

fn texts(arguments: &ArgMatches, name: &str) -> Vec<String> {
    arguments.get_many::<String>(name).unwrap_or_default().cloned().collect()
}

fn call<T: DeserializeOwned>(socket: &Path, verb: &str, body: &impl Serialize) -> Result<T, CallError> {
    Connection::open(socket)?.call(verb, body, LIMIT)
}

fn notes(notes: &[String]) {
    for note in notes {
        eprintln!("kici: {note}");
    }
}

/// The answer to a restore, for programs.
fn print(hit: bool, matched_key: Option<&str>) {
    // Nobody reads it: then it is not needed either.
    let _ = writeln!(std::io::stdout(), "{}", serde_json::json!({"hit": hit, "matched_key": matched_key}));
}

/// Runs `kici cache`.
pub fn run_cache(socket: &Path, matches: &ArgMatches) -> ExitCode {
    let Some((verb, arguments)) = matches.subcommand() else { return ExitCode::from(Code::Usage.exit()) };
    let key = text(arguments, "key").unwrap_or_default();
    let paths = texts(arguments, "path");
    let done = if verb == "restore" {
        let body = CacheRestore { key, paths, restore_keys: texts(arguments, "restore-key") };
        call::<Hit>(socket, "cache.restore", &body).map(|found| {
            notes(&found.notes);
            print(found.hit, found.matched_key.as_deref());
        })
    } else {
        call::<Done>(socket, "cache.save", &CacheSave { key, paths }).map(|done| {
            notes(&done.notes);
            if done.stored {
                eprintln!("kici: {} files, {} bytes packed", done.files, done.bytes);
            }
        })
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kici: {error}");
            // A cache makes things faster; that it does not work is no reason to fail.
            let usage = error.exit() == Code::Usage.exit();
            if !usage && !arguments.get_flag("required") {
                if verb == "restore" {
                    print(false, None);
                }
                return ExitCode::SUCCESS;
            }
            ExitCode::from(error.exit())
        }
    }
}

/// Runs `kici artifact`.
pub fn run_artifact(socket: &Path, matches: &ArgMatches) -> ExitCode {
    let Some((verb, arguments)) = matches.subcommand() else { return ExitCode::from(Code::Usage.exit()) };
    let name = text(arguments, "name").unwrap_or_default();
    let done = if verb == "upload" {
        let days = arguments.get_one::<u64>("expire-in").copied();
        let expire_in_ms = days.map(|days| days * 86_400_000);
        let body = ArtifactUpload { name, paths: texts(arguments, "path"), expire_in_ms };
        call::<Done>(socket, "artifact.upload", &body)
    } else {
        let body = ArtifactDownload { name, from: text(arguments, "from"), path: text(arguments, "path") };
        call::<Done>(socket, "artifact.download", &body)
    };
    match done {
        Ok(done) => {
            notes(&done.notes);
            if done.empty && !(verb == "upload" && arguments.get_flag("allow-empty")) {
                eprintln!("kici: no file matches; paths count from the workspace");
                return ExitCode::FAILURE;
            }
            eprintln!("kici: {} files, {} bytes", done.files, done.bytes);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("kici: {error}");
            ExitCode::from(error.exit())
        }
    }
}
