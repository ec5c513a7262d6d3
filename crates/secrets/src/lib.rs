//! Sealing of secrets at rest.
//!
//! AES-256-GCM (NIST SP 800-38D) with a random 96-bit nonce per value. What a value is for ([`Purpose`]) is bound to it
//! as associated data, so that a sealed text copied to another row does not open there. Keys rotate: a [`Keyring`]
//! seals with its current key and opens with the previous one too.

#![forbid(unsafe_code)]

mod key;
mod sealer;

pub use key::{KeyError, Keyring, SealingKey};
pub use sealer::{Purpose, SealError, SealedBox, Sealer};
