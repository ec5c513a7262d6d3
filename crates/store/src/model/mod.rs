//! The plain values that go in and out of the store. They know nothing of the database.

mod bus;
mod claims;
mod credentials;
mod dynamic;
mod fleet;
mod intake;
mod new_run;
mod queue;
mod roster;
mod runs;
mod slots;
mod stored;

pub use bus::*;
pub use claims::*;
pub use credentials::*;
pub use dynamic::*;
pub use fleet::*;
pub use intake::*;
pub use new_run::*;
pub use queue::*;
pub use roster::*;
pub use runs::*;
pub use slots::*;
pub use stored::*;

use kici_engine::ids::{JobId, RunId};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Enums that are words in the database and in JSON, as `kici_engine::state` has them.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident ($what:literal) { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The word that stands for this value.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = kici_engine::state::UnknownWord;

            fn from_str(text: &str) -> Result<Self, kici_engine::state::UnknownWord> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(kici_engine::state::UnknownWord {
                        text: text.chars().take(80).collect(),
                        what: $what,
                        expected: [$($word,)*].join(", "),
                    }),
                }
            }
        }
    )*};
}
pub(crate) use words;

/// One delivery of one job. Every change that an agent asks for names it; another epoch is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct JobRef {
    /// The run.
    pub run_id: RunId,
    /// The job.
    pub job_id: JobId,
    /// Incremented by every claim.
    pub epoch: u32,
}

/// A place in a list that is sorted newest first: the creation time and id of the last row shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Creation time of that row.
    pub at: Ts,
    /// Its id, without prefix.
    pub id: Uuid,
}

/// Which part of a list is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// At most so many rows; the store allows up to 500.
    pub limit: u32,
    /// Rows older than this one; none starts at the newest.
    pub after: Option<Cursor>,
}

impl Default for Page {
    fn default() -> Self {
        Self { limit: 50, after: None }
    }
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed<T> {
    /// The rows, newest first.
    pub items: Vec<T>,
    /// Where the next page starts; none at the end.
    pub next: Option<Cursor>,
}
