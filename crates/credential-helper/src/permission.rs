//! What a token may do, as forges name it: `contents=write`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How far a permission goes. A higher level holds the lower ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Not at all.
    #[default]
    None,
    /// Look.
    Read,
    /// Change.
    Write,
    /// Everything.
    Admin,
}

impl Level {
    /// The word on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A text that is no permission.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("permission `{0}` is not NAME=read, NAME=write or NAME=admin with a name of a-z and _")]
pub struct PermissionError(String);

impl FromStr for Level {
    type Err = PermissionError;

    fn from_str(text: &str) -> Result<Self, PermissionError> {
        let all = [Self::None, Self::Read, Self::Write, Self::Admin];
        all.into_iter().find(|level| level.as_str() == text).ok_or_else(|| PermissionError(shown(text)))
    }
}

/// Permissions by name. Those that are not named are `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Permissions(BTreeMap<String, Level>);

/// What was asked for and not given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which permission.
    pub name: String,
    /// Asked for.
    pub requested: Level,
    /// Given.
    pub granted: Level,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={} (granted: {})", self.name, self.requested, self.granted)
    }
}

impl Permissions {
    /// Most permissions of one request.
    pub const MAX: usize = 32;

    /// `contents=read`: what git needs to fetch.
    pub fn fetch() -> Self {
        Self([("contents".to_owned(), Level::Read)].into())
    }

    /// `contents=write`: what git needs to push.
    pub fn push() -> Self {
        Self([("contents".to_owned(), Level::Write)].into())
    }

    /// Reads `NAME=LEVEL` pairs; of a repeated name the higher level counts.
    ///
    /// # Errors
    /// [`PermissionError`] for the first that is none, or for more than [`Permissions::MAX`].
    pub fn parse<S: AsRef<str>>(pairs: impl IntoIterator<Item = S>) -> Result<Self, PermissionError> {
        let mut all = Self::default();
        for pair in pairs {
            let pair = pair.as_ref();
            let (name, level) = pair.split_once('=').ok_or_else(|| PermissionError(shown(pair)))?;
            all.raise(name, level.parse()?)?;
        }
        Ok(all)
    }

    /// Names one permission, at least at this level.
    ///
    /// # Errors
    /// [`PermissionError`] when the name is none, or too many are named.
    pub fn raise(&mut self, name: &str, level: Level) -> Result<(), PermissionError> {
        let legal = (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        if !legal || (self.0.len() >= Self::MAX && !self.0.contains_key(name)) {
            return Err(PermissionError(shown(&format!("{name}={level}"))));
        }
        if level > Level::None {
            let held = self.0.entry(name.to_owned()).or_default();
            *held = level.max(*held);
        }
        Ok(())
    }

    /// The level of a permission.
    pub fn level(&self, name: &str) -> Level {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// The highest level of all.
    pub fn highest(&self) -> Level {
        self.0.values().copied().max().unwrap_or_default()
    }

    /// Whether anything can be changed with them.
    pub fn writes(&self) -> bool {
        self.highest() >= Level::Write
    }

    /// True when nothing is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// By name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Level)> {
        self.0.iter().map(|(name, level)| (name.as_str(), *level))
    }

    /// Both, each at its higher level.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut all = self.clone();
        for (name, level) in &other.0 {
            let held = all.0.entry(name.clone()).or_default();
            *held = (*level).max(*held);
        }
        all
    }

    /// What of these a grant does not hold.
    pub fn missing_in(&self, granted: &Self) -> Vec<Missing> {
        self.iter()
            .map(|(name, requested)| Missing { name: name.to_owned(), requested, granted: granted.level(name) })
            .filter(|missing| missing.granted < missing.requested)
            .collect()
    }
}

impl fmt::Display for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (name, level)) in self.iter().enumerate() {
            write!(f, "{}{name}={level}", if at == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Cut, and without what could act on a terminal.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(pairs: &[&str]) -> Permissions {
        Permissions::parse(pairs).expect("permissions")
    }

    #[test]
    fn a_higher_level_satisfies_a_lower_request_and_gaps_are_named() {
        let table = [
            (&["contents=write"][..], &["contents=write"][..], ""),
            (&["contents=read"], &["contents=admin"], ""),
            (&["contents=write"], &["contents=read"], "contents=write (granted: read)"),
            (
                &["contents=write", "workflows=write"],
                &["contents=write", "metadata=read"],
                "workflows=write (granted: none)",
            ),
        ];
        for (requested, granted, expected) in table {
            let missing: Vec<String> = of(requested).missing_in(&of(granted)).iter().map(Missing::to_string).collect();
            assert_eq!(missing.join(", "), expected);
        }
    }

    #[test]
    fn what_is_no_permission_is_refused() {
        let long = format!("{}=read", "a".repeat(65));
        for text in ["contents", "=read", "Contents=read", "contents=rw", "a-b=read", long.as_str(), "a=", "a\u{1b}=x"]
        {
            let error = Permissions::parse([text]).expect_err(text).to_string();
            assert!(!error.contains('\u{1b}'), "{error}");
        }
        let many: Vec<String> = (0..33_u8).map(|n| format!("{}=read", "a".repeat(usize::from(n) + 1))).collect();
        assert!(Permissions::parse(&many).is_err());
    }

    proptest! {
        #[test]
        fn a_union_misses_nothing_of_either(a in any_permissions(), b in any_permissions()) {
            let both = a.union(&b);
            prop_assert!(a.missing_in(&both).is_empty() && b.missing_in(&both).is_empty());
            prop_assert_eq!(both.highest(), a.highest().max(b.highest()));
            prop_assert_eq!(both.union(&a), both);
        }
    }

    fn any_permissions() -> impl Strategy<Value = Permissions> {
        let level = prop_oneof![Just(Level::Read), Just(Level::Write), Just(Level::Admin)];
        proptest::collection::btree_map("[a-c]", level, 0..4).prop_map(Permissions)
    }
}
