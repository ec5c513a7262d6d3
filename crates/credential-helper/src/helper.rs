//! The program that git runs as its credential helper. Whatever goes wrong, it says nothing and exits with 0: git then goes on
//! to an ordinary message about a failed authentication.

use std::io::{Read, Write};
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::time::Duration;

use serde_json::Value as Json;
use zeroize::Zeroizing;

use crate::client::Connection;
use crate::protocol::{self, Credential, MAX_INPUT_BYTES, Operation};
use crate::wire::git::{Query, Secret};

/// How long the agent may take to answer.
pub const LIMIT: Duration = Duration::from_secs(10);

/// Answers one operation of git over the socket of the job. Never fails and never panics; installs a hook that keeps panics of
/// this process quiet.
pub fn run(socket: &Path, operation: &str, input: impl Read, mut output: impl Write) {
    panic::set_hook(Box::new(|_| {}));
    let answered = panic::catch_unwind(AssertUnwindSafe(|| answer(socket, operation, input)));
    if let Ok(Some(text)) = answered {
        // git reads the whole answer or, without one, goes on by itself.
        let _ = output.write_all(text.as_bytes()).and_then(|()| output.flush());
    }
}

fn answer(socket: &Path, operation: &str, input: impl Read) -> Option<Zeroizing<String>> {
    let operation = Operation::parse(operation)?;
    // Also the password that git gives back with `store` and `erase` is in here.
    let mut text = Zeroizing::new(Vec::with_capacity(MAX_INPUT_BYTES + 1));
    input.take(MAX_INPUT_BYTES as u64 + 1).read_to_end(&mut text).ok()?;
    let query = protocol::parse(&text)?;
    let query = Query { protocol: query.protocol, host: query.host, path: query.path };
    match operation {
        Operation::Store => None,
        Operation::Erase => {
            let _: Json = Connection::open(socket).ok()?.call("git.erase", &query, LIMIT).ok()?;
            None
        }
        Operation::Get => {
            let found: Secret = Connection::open(socket).ok()?.call("git.get", &query, LIMIT).ok()?;
            Credential { user: found.user, secret: found.secret.into(), expires_at: found.expires_at }.print()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::wire::{self, Call, Reply};

    fn said(socket: &Path, operation: &str, input: &[u8]) -> String {
        let mut output = Vec::new();
        run(socket, operation, input, &mut output);
        String::from_utf8(output).expect("UTF-8")
    }

    const INPUT: &[u8] = b"protocol=https\nhost=h\npath=a/b\n\n";

    /// An agent that gives the bytes of `reply` to the first caller.
    fn agent(dir: &Path, reply: Vec<u8>) -> std::path::PathBuf {
        let path = dir.join("s");
        let listener = UnixListener::bind(&path).expect("bound");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a caller");
            let call: Call = wire::receive(&mut stream).expect("a call");
            assert_eq!(call.verb, "git.get");
            let _ = stream.write_all(&reply);
        });
        path
    }

    #[test]
    fn every_failure_is_silence() {
        let dir = tempfile::tempdir().unwrap();
        let nobody = dir.path().join("nobody");
        let input: [&[u8]; 4] = [INPUT, b"", b"\xff\xfe", b"protocol=https\r\nhost=h\n"];
        for operation in ["get", "store", "erase", "capability", ""] {
            for input in input {
                assert_eq!(said(&nobody, operation, input), "", "{operation}");
            }
        }
        let frame = |reply: &Reply| wire::encode(reply).unwrap().to_vec();
        let refused = Reply::Error(wire::Refusal::new(wire::Code::Refused, "no"));
        let odd = Reply::Ok(serde_json::json!({"user": "u\nhost=evil", "secret": "s"}));
        let replies =
            [frame(&refused), frame(&odd), frame(&Reply::Ok(Json::Null)), Vec::new(), b"\xff\xff\xff\xff".to_vec()];
        for (n, reply) in replies.into_iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            assert_eq!(said(&agent(dir.path(), reply), "get", INPUT), "", "{n}");
        }
    }

    #[test]
    fn a_credential_is_printed() {
        let dir = tempfile::tempdir().unwrap();
        let reply = Reply::Ok(serde_json::json!({"user": "u", "secret": "s", "expires_at": 9}));
        let socket = agent(dir.path(), wire::encode(&reply).unwrap().to_vec());
        assert_eq!(said(&socket, "get", INPUT), "username=u\npassword=s\npassword_expiry_utc=9\n\n");
    }
}
