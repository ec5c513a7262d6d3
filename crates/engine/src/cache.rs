//! Rules of caches and artifacts: which keys, names and paths there are, whose cache a job reads and writes, and what goes when
//! there is too much. Checked by the compiler, the agent and the orchestrator alike, since none of them believes the others.

use std::fmt;

use crate::event::ForkState;
use crate::state::words;
use crate::time::Ts;

/// Longest key of a cache, in bytes.
pub const MAX_KEY_BYTES: usize = 512;
/// Most caches of one job, one step or one command of `init`.
pub const MAX_CACHES: usize = 16;
/// Most paths of one cache or artifact.
pub const MAX_PATHS: usize = 64;
/// Most `restore_keys` of one cache.
pub const MAX_RESTORE_KEYS: usize = 16;
/// Most entries of `artifacts.upload`, and of `artifacts.download`, of one job.
pub const MAX_ARTIFACTS: usize = 50;
/// Longest path, in bytes.
const MAX_PATH_BYTES: usize = 1024;

words! {
    /// Whose entries of a repository's cache are meant.
    CacheScope("cache scope") {
        /// Of every trusted run of the repository.
        Shared = "shared",
        /// Of one run whose code is not trusted; gone with it.
        Isolated = "isolated",
    }
}

impl CacheScope {
    /// Where a run writes: code of a fork, or of a pull request of which that is not known, never writes what others read.
    pub fn written_by(fork: ForkState) -> Self {
        if fork == ForkState::No { Self::Shared } else { Self::Isolated }
    }

    /// Where a run that writes here reads, first its own.
    pub const fn readable(self) -> &'static [Self] {
        match self {
            Self::Shared => &[Self::Shared],
            Self::Isolated => &[Self::Isolated, Self::Shared],
        }
    }
}

/// A text that is no key, name or path. The message follows the text in messages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadText(pub String);

fn bad(text: impl Into<String>) -> BadText {
    BadText(text.into())
}

/// Checks the key of a cache, or the prefix of one.
///
/// # Errors
/// [`BadText`] when it is empty, longer than [`MAX_KEY_BYTES`] or holds control characters.
pub fn check_key(key: &str) -> Result<(), BadText> {
    match key {
        "" => Err(bad("the key is empty")),
        key if key.len() > MAX_KEY_BYTES => {
            Err(bad(format!("the key has {} bytes, at most {MAX_KEY_BYTES} are allowed", key.len())))
        }
        key if key.contains(char::is_control) => Err(bad("the key holds line breaks or other control characters")),
        _ => Ok(()),
    }
}

/// Checks the name of an artifact: 1 to 128 of `A-Za-z0-9._-`, not only dots. It becomes a file name.
///
/// # Errors
/// [`BadText`].
pub fn check_artifact_name(name: &str) -> Result<(), BadText> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let plain = (1..=128).contains(&name.len()) && name.bytes().all(legal) && !name.bytes().all(|b| b == b'.');
    if plain { Ok(()) } else { Err(bad("a name has 1 to 128 letters, digits, `.`, `_` and `-`, and not only dots")) }
}

/// What a path starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Root {
    /// The workspace of the job.
    Workspace,
    /// The home directory of its steps, written `~/`.
    Home,
}

impl Root {
    /// The first part of the names in an archive.
    pub const fn anchor(self) -> &'static str {
        match self {
            Self::Workspace => "__repo__",
            Self::Home => "__home__",
        }
    }
}

/// A path below one of the roots, never the root itself: parts without `.` and `..` between slashes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CachePath {
    /// What it starts from.
    pub root: Root,
    /// Its parts.
    pub path: String,
}

impl CachePath {
    /// Reads `target`, `./a/b/` or `~/.cargo/registry`.
    ///
    /// # Errors
    /// [`BadText`] for paths that are absolute, climb by `..`, name a whole root, hold wildcards or are no text of one line.
    pub fn parse(text: &str) -> Result<Self, BadText> {
        let (root, rest) = match text.strip_prefix("~/") {
            Some(rest) => (Root::Home, rest),
            None if text == "~" => (Root::Home, ""),
            None => (Root::Workspace, text),
        };
        if text.starts_with('~') && root == Root::Workspace {
            return Err(bad("`~` stands for the home directory of the steps only as `~/…`"));
        }
        if rest.contains(['*', '?', '[', '{']) {
            return Err(bad("a cache has plain paths; name the directory instead of a pattern"));
        }
        let path = below(rest)?;
        if path.is_empty() {
            return Err(bad("a cache never replaces the whole workspace or home directory; name what is in it"));
        }
        Ok(Self { root, path })
    }

    /// Whether `other` is this path or below it.
    pub fn holds(&self, other: &Self) -> bool {
        let rest = other.path.strip_prefix(self.path.as_str());
        self.root == other.root && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

impl fmt::Display for CachePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.root == Root::Home {
            f.write_str("~/")?;
        }
        f.write_str(&self.path)
    }
}

/// A path below a directory in its one form: no `.`, no doubled or final slash. Empty for the directory itself.
///
/// # Errors
/// [`BadText`] for paths that are absolute, climb by `..`, are too long or hold control characters.
pub fn below(text: &str) -> Result<String, BadText> {
    if text.len() > MAX_PATH_BYTES {
        return Err(bad(format!("the path has more than {MAX_PATH_BYTES} bytes")));
    }
    if text.contains(char::is_control) {
        return Err(bad("the path holds line breaks or other control characters"));
    }
    if text.starts_with('/') {
        return Err(bad("the path is absolute; paths count from the workspace, or from the home directory with `~/`"));
    }
    let mut parts = Vec::new();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err(bad("the path climbs by `..`")),
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

/// Reads a path or glob of an artifact, below the workspace: `target/app`, `dist/**/*.whl`.
///
/// # Errors
/// [`BadText`], also for a glob that cannot be used.
pub fn artifact_pattern(text: &str) -> Result<String, BadText> {
    if text.starts_with('~') {
        return Err(bad("artifacts come from the workspace, not from the home directory; copy the files first"));
    }
    let pattern = below(text)?;
    if pattern.is_empty() {
        return Err(bad("name files or directories of the workspace; `**` is all of them"));
    }
    globset::Glob::new(&pattern).map_err(|error| bad(error.to_string()))?;
    Ok(pattern)
}

/// An entry of a cache, as far as eviction looks at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Bytes.
    pub size: u64,
    /// Whose it is.
    pub scope: CacheScope,
    /// When it was last read, or saved.
    pub last_read: Ts,
}

/// Which entries go so that the rest fits into `quota` bytes, as positions in `entries`: first those of untrusted runs, so that
/// they never displace what trusted ones read, then whatever was not read for longest.
pub fn evict(entries: &[Stored], quota: u64) -> Vec<usize> {
    let mut total: u64 = entries.iter().map(|entry| entry.size).sum();
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|at| (entries[*at].scope == CacheScope::Shared, entries[*at].last_read));
    let mut gone = Vec::new();
    for at in order {
        if total <= quota {
            break;
        }
        total -= entries[at].size;
        gone.push(at);
    }
    gone
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_stay_below_their_root_in_one_form() {
        let table = [
            ("target", Some("target")),
            ("./a//b/./c/", Some("a/b/c")),
            ("~/.cargo/registry", Some("~/.cargo/registry")),
            ("..a/b..", Some("..a/b..")),
            ("a/../b", None),
            ("..", None),
            ("~/../x", None),
            ("~/x/../../y", None),
            ("/etc", None),
            ("~//etc", None),
            ("~", None),
            ("~/", None),
            ("~root/x", None),
            (".", None),
            ("", None),
            ("a*", None),
            ("a\nb", None),
            ("a\0b", None),
        ];
        for (text, expected) in table {
            assert_eq!(CachePath::parse(text).ok().map(|path| path.to_string()).as_deref(), expected, "{text:?}");
        }
        let path = |text: &str| CachePath::parse(text).unwrap();
        assert!(path("a/b").holds(&path("a/b/c")) && path("a/b").holds(&path("a/b")));
        assert!(!path("a/b").holds(&path("a/bc")) && !path("a/b").holds(&path("~/a/b/c")));
    }

    #[test]
    fn names_of_artifacts_are_file_names() {
        for name in ["bin", "a.b_c-1", "...x", &"n".repeat(128)] {
            assert!(check_artifact_name(name).is_ok(), "{name}");
        }
        for name in ["", ".", "..", "...", "a/b", "a b", "ä", "a\0", "../x", &"n".repeat(129)] {
            assert!(check_artifact_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn patterns_of_artifacts_stay_in_the_workspace() {
        for (text, expected) in [
            ("./target/app", Some("target/app")),
            ("dist/**/*.whl", Some("dist/**/*.whl")),
            ("**", Some("**")),
            (".", None),
            ("~/x", None),
            ("/abs", None),
            ("a/../../b", None),
            ("a[", None),
        ] {
            assert_eq!(artifact_pattern(text).ok().as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn only_what_is_known_to_be_trusted_writes_what_is_shared() {
        assert_eq!(CacheScope::written_by(ForkState::No), CacheScope::Shared);
        for fork in [ForkState::Yes, ForkState::Unknown] {
            let scope = CacheScope::written_by(fork);
            assert_eq!(
                (scope, scope.readable()),
                (CacheScope::Isolated, [CacheScope::Isolated, CacheScope::Shared].as_slice())
            );
        }
    }

    #[test]
    fn keys_are_one_line() {
        assert!(check_key("cargo-é x").is_ok() && check_key(&"k".repeat(512)).is_ok());
        for key in ["", "a\nb", "a\0", &"k".repeat(513)] {
            assert!(check_key(key).is_err(), "{key:?}");
        }
    }

    proptest! {
        #[test]
        fn eviction_keeps_the_quota_takes_no_more_than_needed_and_untrusted_entries_first(
            sizes in proptest::collection::vec((0u64..100, any::<bool>(), 0i64..50), 0..20),
            quota in 0u64..500,
        ) {
            let scope = |shared| if shared { CacheScope::Shared } else { CacheScope::Isolated };
            let entries: Vec<Stored> = sizes
                .iter()
                .map(|(size, shared, at)| Stored { size: *size, scope: scope(*shared), last_read: Ts::from_micros(*at) })
                .collect();
            let gone = evict(&entries, quota);
            let left = |gone: &[usize]| -> u64 {
                entries.iter().enumerate().filter(|(at, _)| !gone.contains(at)).map(|(_, entry)| entry.size).sum()
            };
            prop_assert!(left(&gone) <= quota);
            if let Some((_, before)) = gone.split_last() {
                prop_assert!(left(before) > quota);
            }
            let shared_gone = gone.iter().any(|at| entries[*at].scope == CacheScope::Shared);
            let isolated_left = entries.iter().enumerate().any(|(at, entry)| {
                entry.scope == CacheScope::Isolated && !gone.contains(&at)
            });
            prop_assert!(!(shared_gone && isolated_left));
        }
    }
}
