//! Bearer tokens: prefix, 64 lower-case hex digits of randomness, 6 hex digits of checksum.
//!
//! The checksum (the first three bytes of SHA-256 over all before it) tells a mistyped token from a revoked one without
//! asking the database. Stored are the SHA-256 of the whole and the first eight digits for display. The randomness is
//! 256 bits, so a fast hash is right.

use std::fmt;

use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

/// Who a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// An operator or a program that calls the REST interface.
    Admin,
    /// An agent.
    Agent,
    /// Whoever becomes one agent of a scaler: exchanged for a token, once.
    Claim,
}

impl TokenKind {
    /// What stands before the digits.
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Admin => "kici_admin_",
            Self::Agent => "kici_agent_",
            Self::Claim => "kici_claim_",
        }
    }
}

const RANDOM_DIGITS: usize = 64;
const CHECK_DIGITS: usize = 6;
const SHOWN_DIGITS: usize = 8;

/// Text that is not a token. Never holds the text itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Another kind of text.
    #[error("not a token of this program; tokens start with kici_admin_ or kici_agent_")]
    NotAToken,
    /// A token with a wrong length, digit or checksum.
    #[error("the token is mistyped or cut off; copy it again, all {0} characters")]
    Mistyped(usize),
}

/// A well-formed token. Whether it is known and not revoked, only the database can say.
#[derive(Clone)]
pub struct Token {
    kind: TokenKind,
    text: SecretString,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({}{}…)", self.kind.prefix(), self.display_prefix())
    }
}

impl Token {
    /// A fresh token. `random` fills the bytes, normally `getrandom::fill`.
    ///
    /// # Errors
    /// Whatever `random` returns.
    pub fn generate<E>(kind: TokenKind, random: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Self, E> {
        let mut bytes = [0u8; RANDOM_DIGITS / 2];
        random(&mut bytes)?;
        let mut text = format!("{}{}", kind.prefix(), hex::encode(bytes));
        text.push_str(&checksum(&text));
        Ok(Self { kind, text: SecretString::from(text) })
    }

    /// Reads a token.
    ///
    /// # Errors
    /// [`TokenError`], telling foreign text from a mistyped token.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        let kinds = [TokenKind::Admin, TokenKind::Agent, TokenKind::Claim];
        let kind = kinds.into_iter().find(|k| text.starts_with(k.prefix())).ok_or(TokenError::NotAToken)?;
        let length = kind.prefix().len() + RANDOM_DIGITS + CHECK_DIGITS;
        let mistyped = TokenError::Mistyped(length);
        let digits = &text.as_bytes()[kind.prefix().len()..];
        let lower_hex = |b: &u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != length || !digits.iter().all(lower_hex) {
            return Err(mistyped);
        }
        let (body, check) = text.split_at(length - CHECK_DIGITS);
        if checksum(body) != check {
            return Err(mistyped);
        }
        Ok(Self { kind, text: SecretString::from(text) })
    }

    /// Who it is for.
    pub const fn kind(&self) -> TokenKind {
        self.kind
    }

    /// The whole text, to be shown once or sent.
    pub const fn secret(&self) -> &SecretString {
        &self.text
    }

    /// SHA-256 of the whole in hex: what is stored and looked up.
    pub fn hash(&self) -> String {
        hex::encode(Sha256::digest(self.text.expose_secret().as_bytes()))
    }

    /// The first eight digits after the prefix: enough to recognise, useless to an attacker.
    pub fn display_prefix(&self) -> &str {
        let start = self.kind.prefix().len();
        &self.text.expose_secret()[start..start + SHOWN_DIGITS]
    }
}

fn checksum(body: &str) -> String {
    hex::encode(&Sha256::digest(body.as_bytes())[..CHECK_DIGITS / 2])
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn token(kind: TokenKind) -> Token {
        let fill = |bytes: &mut [u8]| {
            bytes.fill(0xab);
            Ok::<_, Infallible>(())
        };
        Token::generate(kind, fill).unwrap()
    }

    #[test]
    fn generated_tokens_parse() {
        for kind in [TokenKind::Admin, TokenKind::Agent, TokenKind::Claim] {
            let made = token(kind);
            let text = made.secret().expose_secret();
            assert_eq!(text.len(), kind.prefix().len() + 70);
            let read = Token::parse(&format!(" {text}\n")).unwrap();
            assert_eq!((read.kind(), read.hash(), read.display_prefix()), (kind, made.hash(), "abababab"));
            assert_eq!(made.hash().len(), 64);
            assert!(!format!("{made:?}").contains("ababababab"));
        }
        let fresh = |_: ()| Token::generate(TokenKind::Agent, getrandom::fill).unwrap().hash();
        assert_ne!(fresh(()), fresh(()));
    }

    #[test]
    fn mistyped_is_told_from_foreign() {
        let good = token(TokenKind::Agent).secret().expose_secret().to_owned();
        let mut swapped = good.clone();
        swapped.replace_range(20..21, "0");
        let mistyped = Err(TokenError::Mistyped(81));
        let table = [
            (swapped, mistyped),
            (good[..80].to_owned(), mistyped),
            (format!("{good}0"), mistyped),
            (good.to_uppercase(), Err(TokenError::NotAToken)),
            (good.replace("ab", "AB"), mistyped),
            (good.replacen("agent", "admin", 1), mistyped),
            (format!("kici_agent_{}", "ä".repeat(35)), mistyped),
            (String::new(), Err(TokenError::NotAToken)),
            ("ghp_x".to_owned(), Err(TokenError::NotAToken)),
        ];
        for (text, expected) in table {
            assert_eq!(Token::parse(&text).map(|t| t.kind()), expected, "{text}");
        }
    }
}
