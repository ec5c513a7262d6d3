//! The process between the first one and a command.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use crate::sys;

/// What the program is called with.
pub const WORD: &str = "keeper";
/// The command runs; its process id follows.
pub const STARTED: u8 = 1;
/// It does not; words follow.
pub const NOT_STARTED: u8 = 2;
/// It ended; its status follows.
pub const EXIT: u8 = 3;

/// The words of several commands as arguments: each with their count in front.
pub fn arguments(commands: &[Vec<OsString>]) -> Vec<OsString> {
    let words = commands
        .iter()
        .flat_map(|words| std::iter::once(OsString::from(words.len().to_string())).chain(words.iter().cloned()));
    std::iter::once(OsString::from(WORD)).chain(words).collect()
}

fn commands(words: Vec<OsString>) -> Vec<Vec<OsString>> {
    let mut words = words.into_iter();
    let mut all = Vec::new();
    while let Some(count) = words.next() {
        let count = count.to_str().and_then(|count| count.parse().ok()).unwrap_or(0);
        all.push(words.by_ref().take(count).collect());
    }
    all
}

/// Starts the first command whose program there is, tells on standard input, which is a socket, how it goes, and ends when
/// nothing is left below.
pub fn run(words: Vec<OsString>) -> ExitCode {
    sys::hide();
    sys::adopt_strays();
    sys::mind_children();
    let Ok(told) = std::io::stdin().as_fd().try_clone_to_owned() else { return ExitCode::FAILURE };
    let mut told = UnixStream::from(told);
    let mut tell = |tag: u8, bytes: &[u8]| {
        // Whoever listened is gone: then all of the container is.
        let _ = told.write_all(&[&[tag], bytes].concat());
    };
    let mut message = String::from("there is no command");
    let mut started = None;
    for words in commands(words) {
        let Some((program, arguments)) = words.split_first() else { continue };
        let spawned = Command::new(program).args(arguments).stdin(Stdio::null()).process_group(0).spawn();
        match spawned {
            Ok(child) => {
                started = i32::try_from(child.id()).ok();
                break;
            }
            Err(error) => {
                message = format!("cannot start `{}`: {error}", program.to_string_lossy());
                if error.kind() != ErrorKind::NotFound {
                    break;
                }
            }
        }
    }
    let Some(command) = started else {
        tell(NOT_STARTED, message.as_bytes());
        return ExitCode::FAILURE;
    };
    sys::close_output();
    tell(STARTED, &command.to_be_bytes());
    while let Some((pid, status)) = sys::wait_any() {
        if pid == command {
            tell(EXIT, &status.to_be_bytes());
        }
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_survive_the_way_through_arguments() {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let all = vec![words(&["bash", "-e", "2"]), words(&["sh"])];
        let arguments = arguments(&all);
        assert_eq!(arguments[0], WORD);
        assert_eq!(commands(arguments[1..].to_vec()), all);
    }
}
