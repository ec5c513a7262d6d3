//! Write windows: for a while, credentials for one repository may do more than read.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::permission::Permissions;
use crate::repository::Repository;

/// How long a window stays open that nobody closes.
pub const DEFAULT_TTL: Duration = Duration::from_secs(600);
/// The longest that may be asked for.
pub const MAX_TTL: Duration = Duration::from_secs(3600);

/// Names a grant; 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantId(pub [u8; 16]);

impl fmt::Debug for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GrantId({self})")
    }
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl FromStr for GrantId {
    type Err = hex::FromHexError;

    fn from_str(text: &str) -> Result<Self, hex::FromHexError> {
        let mut id = [0; 16];
        hex::decode_to_slice(text, &mut id)?;
        Ok(Self(id))
    }
}

/// An instant on two clocks. The monotonic one stands still while the machine sleeps and the wall clock can be set: a grant is
/// over as soon as either says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Since any fixed point.
    pub monotonic: Duration,
    /// Since 1970.
    pub wall: Duration,
}

impl Moment {
    fn plus(self, ttl: Duration) -> Self {
        Self { monotonic: self.monotonic.saturating_add(ttl), wall: self.wall.saturating_add(ttl) }
    }

    fn reached(self, end: Self) -> bool {
        self.monotonic >= end.monotonic || self.wall >= end.wall
    }
}

/// A window that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Its name.
    pub id: GrantId,
    /// The repository it is for, and no other.
    pub repository: Repository,
    /// What it allows.
    pub permissions: Permissions,
    /// The named credential that it uses; none is the one that applies by itself.
    pub credential: Option<String>,
    expires_at: Moment,
}

/// What the open windows of one repository allow together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// The windows, oldest first.
    pub grants: Vec<GrantId>,
    /// Their permissions together.
    pub permissions: Permissions,
    /// The credential of the newest window.
    pub credential: Option<String>,
}

/// The windows of one job. Every look first drops what has expired, so that it is neither found nor counted.
#[derive(Debug, Default)]
pub struct GrantTable {
    /// Oldest first.
    grants: Vec<Grant>,
}

impl GrantTable {
    /// Opens a window. `ttl` is cut to [`MAX_TTL`].
    pub fn add(
        &mut self,
        id: GrantId,
        repository: Repository,
        permissions: Permissions,
        credential: Option<String>,
        ttl: Duration,
        now: Moment,
    ) {
        self.reap(now);
        let expires_at = now.plus(ttl.min(MAX_TTL));
        self.grants.push(Grant { id, repository, permissions, credential, expires_at });
    }

    /// Closes a window. None when it is not open (any more).
    pub fn revoke(&mut self, id: GrantId) -> Option<Grant> {
        let at = self.grants.iter().position(|grant| grant.id == id)?;
        Some(self.grants.remove(at))
    }

    /// What is allowed for a repository beyond reading; none when no window is open for it. Windows of another credential than
    /// the newest one's do not count.
    pub fn lookup(&mut self, repository: &Repository, now: Moment) -> Option<Allowed> {
        self.reap(now);
        let of_repository = || self.grants.iter().filter(|grant| grant.repository == *repository);
        let credential = of_repository().next_back()?.credential.clone();
        let mut allowed = Allowed { grants: Vec::new(), permissions: Permissions::default(), credential };
        for grant in of_repository().filter(|grant| grant.credential == allowed.credential) {
            allowed.grants.push(grant.id);
            allowed.permissions = allowed.permissions.union(&grant.permissions);
        }
        Some(allowed)
    }

    /// How many windows are open.
    pub fn size(&mut self, now: Moment) -> usize {
        self.reap(now);
        self.grants.len()
    }

    /// Drops and returns the windows that are over.
    pub fn reap(&mut self, now: Moment) -> Vec<Grant> {
        self.grants.extract_if(.., |grant| now.reached(grant.expires_at)).collect()
    }

    /// Closes all.
    pub fn clear(&mut self) -> Vec<Grant> {
        std::mem::take(&mut self.grants)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::repository::Case;

    fn at(seconds: u64) -> Moment {
        Moment { monotonic: Duration::from_secs(seconds), wall: Duration::from_secs(1_000_000 + seconds) }
    }

    fn repo(name: &str) -> Repository {
        Repository::parse("https", "h", &format!("acme/{name}"), Case::Ignored).expect("a repository")
    }

    fn id(n: u8) -> GrantId {
        GrantId([n; 16])
    }

    fn add(table: &mut GrantTable, n: u8, name: &str, permission: &str, ttl: u64, now: u64) {
        let permissions = Permissions::parse([permission]).expect("a permission");
        table.add(id(n), repo(name), permissions, None, Duration::from_secs(ttl), at(now));
    }

    #[test]
    fn a_grant_is_for_one_repository_and_over_when_it_expires() {
        let mut table = GrantTable::default();
        add(&mut table, 1, "a", "contents=write", 600, 0);
        assert_eq!(table.lookup(&repo("a"), at(599)).unwrap().permissions, Permissions::push());
        assert_eq!(table.lookup(&repo("b"), at(1)), None);
        assert_eq!(table.lookup(&repo("a"), at(600)), None);
        assert_eq!(table.size(at(600)), 0);
    }

    #[test]
    fn either_clock_ends_a_grant() {
        for late in
            [Moment { wall: Duration::from_secs(1), ..at(600) }, Moment { monotonic: Duration::ZERO, ..at(600) }]
        {
            let mut table = GrantTable::default();
            add(&mut table, 1, "a", "contents=write", 600, 0);
            assert_eq!(table.size(late), 0, "{late:?}");
        }
    }

    #[test]
    fn several_grants_add_up_and_a_revoke_takes_one_away_once() {
        let mut table = GrantTable::default();
        add(&mut table, 1, "a", "contents=write", 600, 0);
        add(&mut table, 2, "a", "workflows=write", 600, 1);
        let both = table.lookup(&repo("a"), at(2)).unwrap();
        assert_eq!((both.permissions.to_string().as_str(), both.grants.len()), ("contents=write, workflows=write", 2));
        assert_eq!(table.revoke(id(1)).unwrap().id, id(1));
        assert_eq!(table.revoke(id(1)), None);
        assert_eq!(table.lookup(&repo("a"), at(2)).unwrap().permissions.to_string(), "workflows=write");
    }

    #[test]
    fn the_longest_window_is_an_hour() {
        let mut table = GrantTable::default();
        add(&mut table, 1, "a", "contents=write", u64::MAX, 0);
        assert_eq!((table.size(at(3599)), table.size(at(3600))), (1, 0));
    }

    #[test]
    fn the_newest_window_decides_on_the_credential() {
        let mut table = GrantTable::default();
        add(&mut table, 1, "a", "contents=write", 600, 0);
        let other = Permissions::parse(["packages=write"]).unwrap();
        table.add(id(2), repo("a"), other.clone(), Some("bot".into()), DEFAULT_TTL, at(1));
        let allowed = table.lookup(&repo("a"), at(2)).unwrap();
        assert_eq!((allowed.credential.as_deref(), allowed.permissions), (Some("bot"), other));
        table.revoke(id(2));
        assert_eq!(table.lookup(&repo("a"), at(2)).unwrap().credential, None);
    }

    #[test]
    fn ids_round_trip() {
        assert_eq!(id(7).to_string().parse(), Ok(id(7)));
        assert!("7".parse::<GrantId>().is_err());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Add { repo: u8, ttl: u64 },
        Revoke(usize),
        Wait(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..3_u8, 1..50_u64).prop_map(|(repo, ttl)| Step::Add { repo, ttl }),
            (0..8_usize).prop_map(Step::Revoke),
            (1..30_u64).prop_map(Step::Wait),
        ];
        proptest::collection::vec(step, 0..40)
    }

    proptest! {
        #[test]
        fn the_table_agrees_with_a_plain_list(steps in steps()) {
            let (mut table, mut model, mut now) = (GrantTable::default(), Vec::<(u8, u8, u64)>::new(), 0);
            for (n, step) in steps.into_iter().enumerate() {
                let n = u8::try_from(n).expect("at most 40");
                match step {
                    Step::Add { repo: r, ttl } => {
                        add(&mut table, n, &r.to_string(), "contents=write", ttl, now);
                        model.push((n, r, now + ttl));
                    }
                    Step::Revoke(at) => if at < model.len() {
                        let (gone, _, end) = model.remove(at);
                        prop_assert_eq!(table.revoke(id(gone)).is_some(), end > now);
                    },
                    Step::Wait(seconds) => now += seconds,
                }
                model.retain(|(_, _, end)| *end > now);
                prop_assert_eq!(table.size(at(now)), model.len());
                for r in 0..3_u8 {
                    let expected: Vec<GrantId> = model.iter().filter(|m| m.1 == r).map(|m| id(m.0)).collect();
                    let found = table.lookup(&repo(&r.to_string()), at(now)).map_or_else(Vec::new, |a| a.grants);
                    prop_assert_eq!(found, expected);
                }
            }
        }
    }
}
