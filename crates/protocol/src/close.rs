//! Why a session is closed: one vocabulary for agents and peers, with the gRPC status that ends the stream and what
//! the client does next.

use crate::agent::{Goodbye, Retry};

/// Longest message of a [`Goodbye`], in bytes: oversized trailers break the close itself.
pub const MAX_GOODBYE_MESSAGE: usize = 512;

/// A reason to close a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// No `Register` came in time.
    AuthTimeout,
    /// The token is unknown, expired or of another kind.
    AuthFailed,
    /// The token was revoked while it was in use.
    AuthRevoked,
    /// The agent asked for an identity or labels its token does not cover.
    Unauthorized,
    /// A frame could not be read.
    InvalidMessage,
    /// No frame came for too long.
    HeartbeatTimeout,
    /// The protocol was broken: frames out of order, a flood, an unsupported version.
    Protocol,
    /// Something failed on the server.
    Internal,
    /// A job offer was not answered in time.
    DispatchAckTimeout,
    /// A newer session of the same agent took over.
    Superseded,
    /// Too many frames for jobs of others.
    OwnershipViolations,
    /// The server is stopping.
    GoingAway,
}

impl CloseReason {
    /// Every reason.
    pub const ALL: &'static [Self] = &[
        Self::AuthTimeout,
        Self::AuthFailed,
        Self::AuthRevoked,
        Self::Unauthorized,
        Self::InvalidMessage,
        Self::HeartbeatTimeout,
        Self::Protocol,
        Self::Internal,
        Self::DispatchAckTimeout,
        Self::Superseded,
        Self::OwnershipViolations,
        Self::GoingAway,
    ];

    /// The word in `Goodbye.code`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AuthTimeout => "AUTH_TIMEOUT",
            Self::AuthFailed => "AUTH_FAILED",
            Self::AuthRevoked => "AUTH_REVOKED",
            Self::Unauthorized => "UNAUTHORIZED",
            Self::InvalidMessage => "INVALID_MESSAGE",
            Self::HeartbeatTimeout => "HEARTBEAT_TIMEOUT",
            Self::Protocol => "PROTOCOL",
            Self::Internal => "INTERNAL",
            Self::DispatchAckTimeout => "DISPATCH_ACK_TIMEOUT",
            Self::Superseded => "SUPERSEDED",
            Self::OwnershipViolations => "OWNERSHIP_VIOLATIONS",
            Self::GoingAway => "GOING_AWAY",
        }
    }

    /// Reads a `Goodbye.code`; `None` for a word of a newer build.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == word)
    }

    /// The gRPC status code that ends the stream.
    pub const fn grpc_code(self) -> tonic::Code {
        match self {
            Self::AuthTimeout => tonic::Code::DeadlineExceeded,
            Self::AuthFailed | Self::AuthRevoked => tonic::Code::Unauthenticated,
            Self::Unauthorized => tonic::Code::PermissionDenied,
            Self::InvalidMessage => tonic::Code::InvalidArgument,
            Self::Protocol => tonic::Code::FailedPrecondition,
            Self::Internal => tonic::Code::Internal,
            Self::Superseded => tonic::Code::Aborted,
            Self::HeartbeatTimeout | Self::DispatchAckTimeout | Self::OwnershipViolations | Self::GoingAway => {
                tonic::Code::Unavailable
            }
        }
    }

    /// Whether the client comes back.
    pub const fn retry(self) -> Retry {
        match self {
            Self::AuthFailed | Self::AuthRevoked | Self::Unauthorized | Self::Superseded => Retry::Never,
            Self::GoingAway => Retry::Now,
            _ => Retry::Backoff,
        }
    }

    /// The last frame of the session, its message cut to [`MAX_GOODBYE_MESSAGE`] on a character boundary.
    pub fn goodbye(self, message: &str) -> Goodbye {
        let message = message[..message.floor_char_boundary(MAX_GOODBYE_MESSAGE)].to_owned();
        Goodbye { code: self.as_str().to_owned(), message, retry: self.retry().into() }
    }

    /// The status that ends the stream.
    pub fn status(self, message: &str) -> tonic::Status {
        let message = &message[..message.floor_char_boundary(MAX_GOODBYE_MESSAGE)];
        tonic::Status::new(self.grpc_code(), format!("{}: {message}", self.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back_and_messages_are_cut_on_a_character() {
        for reason in CloseReason::ALL {
            assert_eq!(CloseReason::parse(reason.as_str()), Some(*reason));
        }
        let goodbye = CloseReason::Protocol.goodbye(&"ä".repeat(400));
        assert!(goodbye.message.len() <= MAX_GOODBYE_MESSAGE && goodbye.message.chars().all(|c| c == 'ä'));
    }
}
