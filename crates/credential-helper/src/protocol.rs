//! What git says to a credential helper and reads from it (gitcredentials(7), git-credential(1)).

use std::fmt;

use secrecy::{ExposeSecret, SecretString};
use zeroize::Zeroizing;

/// Most bytes that are read from git.
pub const MAX_INPUT_BYTES: usize = 64 * 1024;

/// What git asks of a helper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A credential, please.
    Get,
    /// This one worked. Nothing is ever stored.
    Store,
    /// This one did not.
    Erase,
}

impl Operation {
    /// The operation of this name; none for those that later versions of git may add.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "get" => Some(Self::Get),
            "store" => Some(Self::Store),
            "erase" => Some(Self::Erase),
            _ => None,
        }
    }
}

/// What a credential is needed for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// `https`.
    pub protocol: String,
    /// With its port where that is not the usual one.
    pub host: String,
    /// Empty unless `credential.useHttpPath` is set.
    pub path: String,
}

/// Reads `key=value` lines up to an empty line or the end. Unknown keys, lists (`wwwauth[]`) and lines without `=` are passed
/// over; of a repeated key the last counts. None when it is too long, or when a value that is used holds NUL or CR or is not
/// UTF-8: such a text may have been made by an attacker who controls a URL (CVE-2020-5260, CVE-2024-52006).
pub fn parse(input: &[u8]) -> Option<Query> {
    if input.len() > MAX_INPUT_BYTES {
        return None;
    }
    let mut query = Query::default();
    for line in input.split(|b| *b == b'\n') {
        if line.is_empty() {
            break;
        }
        if line.contains(&0) || line.contains(&b'\r') {
            return None;
        }
        let Some(at) = line.iter().position(|b| *b == b'=') else { continue };
        let field = match &line[..at] {
            b"protocol" => &mut query.protocol,
            b"host" => &mut query.host,
            b"path" => &mut query.path,
            _ => continue,
        };
        *field = std::str::from_utf8(&line[at + 1..]).ok()?.to_owned();
    }
    (!query.protocol.is_empty() && !query.host.is_empty()).then_some(query)
}

/// A credential as git reads it. `Debug` shows no part of the secret.
#[derive(Clone)]
pub struct Credential {
    /// User name.
    pub user: String,
    /// Password or token.
    pub secret: SecretString,
    /// When the secret ends, in seconds since 1970.
    pub expires_at: Option<u64>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

impl Credential {
    /// The lines for git. None when user or secret would break out of their lines.
    pub fn print(&self) -> Option<Zeroizing<String>> {
        let secret = self.secret.expose_secret();
        let breaks = |text: &str| text.contains(['\n', '\r', '\0']);
        if breaks(&self.user) || breaks(secret) || secret.is_empty() {
            return None;
        }
        // Reserved at once: a string that grows leaves copies behind.
        let mut text = Zeroizing::new(String::with_capacity(self.user.len() + secret.len() + 80));
        text.push_str("username=");
        text.push_str(&self.user);
        text.push_str("\npassword=");
        text.push_str(secret);
        if let Some(at) = self.expires_at {
            text.push_str(&format!("\npassword_expiry_utc={at}"));
        }
        text.push_str("\n\n");
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn query(protocol: &str, host: &str, path: &str) -> Option<Query> {
        Some(Query { protocol: protocol.into(), host: host.into(), path: path.into() })
    }

    #[test]
    fn queries_are_read_as_git_writes_them() {
        let long = [b"protocol=https\nhost=h\nx=".as_slice(), &vec![b'x'; MAX_INPUT_BYTES]].concat();
        let table: [(&[u8], Option<Query>); 14] = [
            (b"protocol=https\nhost=h\npath=a/b.git\n\n", query("https", "h", "a/b.git")),
            (b"protocol=https\nhost=h", query("https", "h", "")),
            (b"capability[]=authtype\nprotocol=https\nhost=h\nwwwauth[]=Basic realm=x\n", query("https", "h", "")),
            (b"nonsense\nprotocol=https\n=x\nhost=h=1\n", query("https", "h=1", "")),
            (b"protocol=http\nprotocol=https\nhost=h\n", query("https", "h", "")),
            (b"protocol=https\nhost=h\n\npath=late\n", query("https", "h", "")),
            (b"protocol=https\nhost=h\nusername=u\nunknown=\xff\n", query("https", "h", "")),
            (b"protocol=https\n", None),
            (b"", None),
            (b"\n", None),
            (b"protocol=https\r\nhost=h\r\n", None),
            (b"protocol=https\nhost=h\0\n", None),
            (b"protocol=https\nhost=\xff\n", None),
            (&long, None),
        ];
        for (input, expected) in table {
            assert_eq!(parse(input), expected, "{:?}", String::from_utf8_lossy(&input[..input.len().min(80)]));
        }
    }

    #[test]
    fn answers_are_lines_and_never_more_than_was_meant() {
        let credential =
            |user: &str, secret: &str, expires_at| Credential { user: user.into(), secret: secret.into(), expires_at };
        let printed = |c: Credential| c.print().map(|text| text.to_string());
        assert_eq!(printed(credential("u", "s", None)).unwrap(), "username=u\npassword=s\n\n");
        assert_eq!(
            printed(credential("u", "s", Some(7))).unwrap(),
            "username=u\npassword=s\npassword_expiry_utc=7\n\n"
        );
        for (user, secret) in [("u\nhost=evil", "s"), ("u", "s\nusername=x"), ("u", "s\0"), ("u\r", "s"), ("u", "")] {
            assert_eq!(printed(credential(user, secret, None)), None, "{user:?} {secret:?}");
        }
        assert!(!format!("{:?}", credential("user", "hush", None)).contains("hush"));
    }

    #[test]
    fn operations() {
        assert_eq!(Operation::parse("get"), Some(Operation::Get));
        for other in ["", "GET", "capability", "get ", "fill"] {
            assert_eq!(Operation::parse(other), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic_and_within_their_lines(input in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(query) = parse(&input) {
                for value in [query.protocol, query.host, query.path] {
                    prop_assert!(!value.contains(['\n', '\r', '\0']));
                }
            }
        }

        #[test]
        fn what_is_printed_reads_back_as_the_same_lines(user in "[^\n\r\0]{0,20}", secret in "[^\n\r\0]{1,20}") {
            let credential = Credential { user: user.clone(), secret: secret.clone().into(), expires_at: Some(1) };
            let text = credential.print().expect("printable").to_string();
            let expected = format!("username={user}\npassword={secret}\npassword_expiry_utc=1\n\n");
            prop_assert_eq!(text.lines().count(), 4);
            prop_assert_eq!(text, expected);
        }
    }
}
