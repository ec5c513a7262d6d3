//! Canonical names of repositories: one repository has one name, however git or git-lfs writes it.

use std::fmt;

/// How a forge compares owners and names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Case {
    /// `Acme/App` and `acme/app` are one (GitHub, GitLab, Forgejo).
    Ignored,
    /// They are two (plain git servers).
    Significant,
}

/// A repository on a forge.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Repository {
    host: String,
    path: String,
}

/// A name that no repository has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RepositoryError {
    /// The host.
    #[error("the host is not a name or address with an optional port")]
    Host,
    /// The path.
    #[error("the path is not OWNER/NAME of letters, digits and . _ - + ~ @")]
    Path,
}

impl Repository {
    /// The repository that `protocol://host/path` names. `path` may have a leading `/` and the endings `/`, `.git` and
    /// `/info/lfs`; the usual port of the protocol is left out.
    ///
    /// # Errors
    /// [`RepositoryError`] for an empty path, for dot segments and for characters that no forge allows.
    pub fn parse(protocol: &str, host: &str, path: &str, case: Case) -> Result<Self, RepositoryError> {
        let host = canonical_host(protocol, host).ok_or(RepositoryError::Host)?;
        let path = canonical_path(path, case).ok_or(RepositoryError::Path)?;
        Ok(Self { host, path })
    }

    /// Host in lower case, with its port unless that is the usual one.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// `owner/name`; owners may have several parts.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Everything before the name; none at servers without owners.
    pub fn owner(&self) -> Option<&str> {
        self.path.rsplit_once('/').map(|(owner, _)| owner)
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.path)
    }
}

/// A host as it is compared: lower case, without the usual port of the protocol. None for what is no host.
pub fn canonical_host(protocol: &str, host: &str) -> Option<String> {
    let host = host.to_ascii_lowercase();
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => (name, Some(port)),
        Some((_, port)) if !port.ends_with(']') => return None,
        _ => (host.as_str(), None),
    };
    let address = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let legal = match address {
        Some(address) => !address.is_empty() && address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':'),
        None => {
            let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
            !name.is_empty() && !name.starts_with(['-', '.']) && name.bytes().all(fits)
        }
    };
    if !legal || host.len() > 255 {
        return None;
    }
    let usual = match protocol {
        "https" => Some("443"),
        "http" => Some("80"),
        _ => None,
    };
    Some(match port.filter(|port| Some(*port) != usual) {
        Some(port) => format!("{name}:{port}"),
        None => name.to_owned(),
    })
}

fn canonical_path(path: &str, case: Case) -> Option<String> {
    let mut rest = path.trim_start_matches('/');
    loop {
        let trimmed = rest.trim_end_matches('/');
        let shorter = trimmed.strip_suffix("/info/lfs").or(trimmed.strip_suffix(".git")).unwrap_or(trimmed);
        if shorter == rest {
            break;
        }
        rest = shorter;
    }
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"._-+~@".contains(&b);
    let part = |part: &str| !part.is_empty() && part != "." && part != ".." && part.bytes().all(legal);
    if rest.len() > 512 || !rest.split('/').all(part) {
        return None;
    }
    Some(match case {
        Case::Ignored => rest.to_ascii_lowercase(),
        Case::Significant => rest.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(host: &str, path: &str, case: Case) -> Option<String> {
        Repository::parse("https", host, path, case).ok().map(|repo| repo.to_string())
    }

    #[test]
    fn one_repository_has_one_name_however_it_is_written() {
        let forms = [
            "acme/app",
            "/acme/app",
            "acme/app/",
            "acme/app.git",
            "acme/app.git/",
            "acme/app.git/info/lfs",
            "acme/app/info/lfs/",
            "//Acme/App.git",
        ];
        for form in forms {
            for host in ["git.example", "GIT.example", "git.example:443"] {
                assert_eq!(name(host, form, Case::Ignored).as_deref(), Some("git.example/acme/app"), "{host} {form}");
            }
        }
        assert_eq!(name("h:8443", "Acme/App", Case::Significant).as_deref(), Some("h:8443/Acme/App"));
        assert_eq!(Repository::parse("http", "h:80", "a/b", Case::Ignored).unwrap().host(), "h");
        assert_eq!(name("[::1]:9", "a/b", Case::Ignored).as_deref(), Some("[::1]:9/a/b"));
        assert_eq!(Repository::parse("https", "h", "g/sub/n", Case::Ignored).unwrap().owner(), Some("g/sub"));
        assert_eq!(Repository::parse("https", "h", "n", Case::Ignored).unwrap().owner(), None);
    }

    #[test]
    fn what_names_no_repository_is_refused() {
        let paths = ["", "/", ".git", "a//b", "a/../b", "./a", "a/b c", "a/b?x", "a/%2e%2e", "a\\b", "a/b\n", "ä/b"];
        for path in paths {
            assert_eq!(name("h", path, Case::Ignored), None, "{path:?}");
        }
        for host in ["", "-h", ".h", "h:", "h:x", "user@h", "h/x", "h h", "[::1", "[x]", "h\n"] {
            assert_eq!(name(host, "a/b", Case::Ignored), None, "{host:?}");
        }
    }

    proptest! {
        #[test]
        fn canonical_names_are_fixed_points(host in "[A-Za-z0-9.:-]{1,20}", path in "[A-Za-z0-9._/-]{1,40}") {
            for case in [Case::Ignored, Case::Significant] {
                if let Ok(first) = Repository::parse("https", &host, &path, case) {
                    let again = Repository::parse("https", first.host(), first.path(), case);
                    prop_assert_eq!(again.as_ref(), Ok(&first));
                }
            }
        }

        #[test]
        fn nothing_makes_it_panic(protocol: String, host: String, path: String) {
            let _ = Repository::parse(&protocol, &host, &path, Case::Ignored);
        }
    }
}
