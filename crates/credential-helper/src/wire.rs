//! What is said over the socket of a job: one frame each way per call, a length (four bytes, big endian) and a JSON document.
//!
//! A call names a verb, `git.get`; the part before the dot names the [service](crate::server::Service) that answers it. New
//! verbs and new services need no change here.

use std::fmt;
use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use zeroize::Zeroizing;

/// Longest frame.
pub const MAX_FRAME_BYTES: usize = 1 << 20;
/// Longest path of a Unix socket (`sun_path` of unix(7), without its final NUL).
pub const MAX_PATH_BYTES: usize = 107;

/// A call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// `service.verb`.
    pub verb: String,
    /// Its arguments.
    #[serde(default)]
    pub body: Json,
}

/// The answer to a call.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It was done.
    Ok(Json),
    /// It was not.
    Error(Refusal),
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // It may hold a credential.
            Self::Ok(_) => f.write_str("Ok(..)"),
            Self::Error(refusal) => f.debug_tuple("Error").field(refusal).finish(),
        }
    }
}

/// Why a call was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// What kind of refusal it is.
    pub code: Code,
    /// For people, in one line.
    pub message: String,
}

/// The kinds of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The arguments are wrong.
    Usage,
    /// The job may not do this.
    Refused,
    /// It may work later.
    Unavailable,
    /// Anything else.
    #[serde(other)]
    Failed,
}

impl Code {
    /// What a command that met this refusal exits with.
    pub const fn exit(self) -> u8 {
        match self {
            Self::Usage => 2,
            Self::Refused => 3,
            Self::Unavailable | Self::Failed => 1,
        }
    }
}

impl Refusal {
    /// A refusal of this kind.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Reads the arguments of a call.
///
/// # Errors
/// A [`Refusal`] that names the field.
pub fn arguments<T: DeserializeOwned>(body: Json) -> Result<T, Refusal> {
    serde_json::from_value(body).map_err(|error| Refusal::new(Code::Usage, format!("the arguments are wrong: {error}")))
}

/// The bytes of a frame.
///
/// # Errors
/// When it is longer than [`MAX_FRAME_BYTES`].
pub fn encode(frame: &impl Serialize) -> io::Result<Zeroizing<Vec<u8>>> {
    // Reserved at once: what grows leaves copies of secrets behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(16 * 1024));
    bytes.extend_from_slice(&[0; 4]);
    serde_json::to_writer(&mut *bytes, frame)?;
    let length = u32::try_from(bytes.len() - 4).ok().filter(|length| *length as usize <= MAX_FRAME_BYTES);
    let length = length.ok_or_else(too_long)?;
    bytes[..4].copy_from_slice(&length.to_be_bytes());
    Ok(bytes)
}

/// The length that a frame's first four bytes announce.
///
/// # Errors
/// When it is more than [`MAX_FRAME_BYTES`].
pub fn length(head: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_be_bytes(head) as usize;
    if length > MAX_FRAME_BYTES { Err(too_long()) } else { Ok(length) }
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a frame has more than {MAX_FRAME_BYTES} bytes"))
}

/// Sends a frame.
///
/// # Errors
/// Those of the stream.
pub fn send(stream: &mut impl Write, frame: &impl Serialize) -> io::Result<()> {
    stream.write_all(&encode(frame)?)
}

/// Receives a frame.
///
/// # Errors
/// Those of the stream, and when it is no frame.
pub fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut head = [0; 4];
    stream.read_exact(&mut head)?;
    let mut bytes = Zeroizing::new(vec![0; length(head)?]);
    stream.read_exact(&mut bytes)?;
    // Without the text of the error: it may quote what it read.
    serde_json::from_slice(&bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the answer is not readable"))
}

pub mod stash;

/// The arguments and results of the verbs of `git`.
pub mod git {
    use super::{Deserialize, Serialize};
    use crate::permission::Permissions;

    /// `git.get` and `git.erase`: what git asks for.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Query {
        /// `https`.
        pub protocol: String,
        /// With its port.
        pub host: String,
        /// May be empty.
        #[serde(default)]
        pub path: String,
    }

    /// Result of `git.get` and `git.token`.
    #[derive(Clone, Serialize, Deserialize)]
    pub struct Secret {
        /// User name.
        pub user: String,
        /// Password or token.
        pub secret: String,
        /// When it ends, in seconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<u64>,
    }

    /// `git.token` and `git.open`: which repository, and what for.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Want {
        /// `owner/name`, `host/owner/name` or a URL; the job's own when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub repo: Option<String>,
        /// None is the verb's own default.
        #[serde(default)]
        pub permissions: Permissions,
        /// A named credential.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub credential: Option<String>,
        /// How long a window may stay open, in seconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub ttl_s: Option<u64>,
    }

    /// Result of `git.open`.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Window {
        /// Names the window.
        pub window: String,
        /// The repository it is for.
        pub repository: String,
        /// Something that people should know.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub note: Option<String>,
    }

    /// `git.close`.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Close {
        /// From [`Window::window`].
        pub window: String,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn frames_round_trip_and_bad_ones_are_errors() {
        let call = Call { verb: "git.get".into(), body: json!({"host": "h"}) };
        let mut bytes = Vec::new();
        send(&mut bytes, &call).unwrap();
        assert_eq!(receive::<Call>(&mut &bytes[..]).unwrap(), call);
        for cut in [0, 3, 4, bytes.len() - 1] {
            assert!(receive::<Call>(&mut &bytes[..cut]).is_err(), "{cut}");
        }
        assert!(receive::<Call>(&mut &[0xff; 64][..]).is_err());
        assert!(encode(&"x".repeat(MAX_FRAME_BYTES)).is_err());
        let error = receive::<Call>(&mut &b"\0\0\0\x06\"hush\""[..]).unwrap_err().to_string();
        assert!(!error.contains("hush"), "{error}");
    }

    #[test]
    fn codes_of_newer_versions_are_failures() {
        let refusal: Refusal = serde_json::from_value(json!({"code": "new", "message": "m"})).unwrap();
        assert_eq!((refusal.code, refusal.code.exit()), (Code::Failed, 1));
        assert_eq!([Code::Usage.exit(), Code::Refused.exit()], [2, 3]);
        assert!(!format!("{:?}", Reply::Ok(json!("hush"))).contains("hush"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_or_a_call(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = receive::<Call>(&mut &bytes[..]);
        }
    }
}
