//! The first process of a job's container, and the only program of ours in it. It links nothing but the standard library and is
//! linked statically, so that it runs in any image, also in an empty one.
//!
//! It starts commands when the agent asks for it, sends their output, and ends everything when it is told to or when the agent is
//! gone. Under every command stands a *keeper*: the same program as the child subreaper (prctl(2)) of what the command starts, so
//! that "all processes of this command" has an answer.

#[allow(dead_code, reason = "each side uses half of it")]
mod tar;
#[allow(dead_code, reason = "each side uses half of it")]
mod wire;

mod call;
mod files;
mod first;
mod keeper;
mod proc_fs;
mod sys;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    if std::path::Path::new(&name).file_name().is_some_and(|name| name == "kici") {
        return call::run(words.collect());
    }
    match words.next() {
        Some(word) if word == keeper::WORD => keeper::run(words.collect()),
        Some(word) if word == files::WORD => files::run(words.collect()),
        Some(word) if word == "credential-helper" => {
            call::run(std::iter::once(word).chain(words).collect());
            // git falls through to its own means, whatever went wrong.
            ExitCode::SUCCESS
        }
        None if std::process::id() == 1 => first::run(),
        _ => {
            eprintln!("kici-init: this program is the first process of a job's container and nothing else");
            ExitCode::from(2)
        }
    }
}
