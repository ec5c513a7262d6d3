//! Exit codes, and how failures are told.

use std::process::ExitCode;

use kici_api::client::ClientError;

/// Something failed.
pub(crate) const FAILED: u8 = 1;
/// A check's verdict is "fail", or a wait ended without its event.
pub(crate) const VERDICT: u8 = 2;
/// Not authenticated or not permitted.
pub(crate) const DENIED: u8 = 3;
/// It does not exist.
pub(crate) const NOT_FOUND: u8 = 4;
/// Refused by the present state.
pub(crate) const CONFLICT: u8 = 5;
/// The server cannot be reached, or cannot work now.
pub(crate) const UNREACHABLE: u8 = 6;
/// The input was rejected.
pub(crate) const REJECTED: u8 = 7;
/// Only a part of the result came.
pub(crate) const PARTIAL: u8 = 8;
/// The command line is wrong (`EX_USAGE` of sysexits.h).
pub(crate) const USAGE: u8 = 64;

/// Why a command ends early: an exit code and one line.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    text: String,
}

impl Failure {
    /// The command line asks for something impossible.
    pub fn usage(text: impl Into<String>) -> Self {
        Self { code: USAGE, text: text.into() }
    }

    /// Any other failure on our side.
    pub fn other(text: impl Into<String>) -> Self {
        Self { code: FAILED, text: text.into() }
    }

    /// With this exit code.
    pub fn new(code: u8, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// Tells it on stderr and gives the exit code.
    pub fn report(&self) -> ExitCode {
        eprintln!("error: {}", self.text);
        ExitCode::from(self.code)
    }
}

/// The server's words, unchanged.
impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self { code: code_of(&error), text: error.to_string() }
    }
}

/// A file or terminal of this machine.
impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::other(error.to_string())
    }
}

fn code_of(error: &ClientError) -> u8 {
    match error {
        ClientError::Refused(problem) => match problem.status {
            401 | 403 => DENIED,
            404 | 410 => NOT_FOUND,
            409 | 412 => CONFLICT,
            429 | 503 | 504 => UNREACHABLE,
            400..=499 => REJECTED,
            _ => FAILED,
        },
        ClientError::Unreachable { .. } | ClientError::Timeout { .. } => UNREACHABLE,
        ClientError::NotOurs { .. } | ClientError::Undecodable { .. } | ClientError::Setup(_) => FAILED,
    }
}

#[cfg(test)]
mod tests {
    use kici_api::problem::{Code, Problem};

    use super::*;

    #[test]
    fn every_code_of_the_server_has_its_exit_code() {
        for (code, expected) in [
            (Code::AuthMissing, DENIED),
            (Code::Forbidden, DENIED),
            (Code::AuthUnavailable, UNREACHABLE),
            (Code::AuthRateLimited, UNREACHABLE),
            (Code::NotFound, NOT_FOUND),
            (Code::Gone, NOT_FOUND),
            (Code::RunTerminal, CONFLICT),
            (Code::VersionMismatch, CONFLICT),
            (Code::RequestInvalid, REJECTED),
            (Code::InputRejected, REJECTED),
            (Code::CursorInvalid, REJECTED),
            (Code::RequestTooLarge, REJECTED),
            (Code::Unavailable, UNREACHABLE),
            (Code::Internal, FAILED),
        ] {
            let error = ClientError::Refused(Problem::new(code, "x"));
            assert_eq!(code_of(&error), expected, "{}", code.as_str());
        }
    }
}
