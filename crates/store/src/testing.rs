//! Stores for tests, on both databases.
//!
//! SQLite: a file in a temporary directory. PostgreSQL: one server for all test processes of this user, started by the
//! first and stopped 20 s after the last; each test gets a database copied from a migrated template.
//! `KICI_TEST_DATABASE_URL` names another server. Without server programs PostgreSQL is skipped, unless
//! `KICI_REQUIRE_PG=1` says that it must be there.

mod death;
mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use diesel::SqliteConnection;
use diesel::connection::{Connection as _, SimpleConnection as _};
use kici_engine::ids::{AgentId, IdSource, InstanceId};
use kici_engine::time::{Clock, ManualClock, Ts};
use uuid::Uuid;

pub use self::death::Death;

use crate::{Durability, Store, StoreConfig};

/// Ids that are unique among all processes and ascend within one.
#[derive(Debug, Default)]
pub struct TestIds;

impl IdSource for TestIds {
    fn uuid(&self) -> Uuid {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let high = (u128::from(n) << 80) | (0x7 << 76) | (u128::from(std::process::id()) << 32);
        Uuid::from_u128(high | (0b10 << 62) | u128::from(n & 0xffff_ffff))
    }
}

/// A migrated, empty store with a clock that stands still.
pub struct TestStore {
    /// The store, as instance `node-1`.
    pub store: Store,
    /// Its clock.
    pub clock: Arc<ManualClock>,
    url: String,
    directory: Option<tempfile::TempDir>,
}

impl TestStore {
    /// A store in a file.
    pub async fn sqlite() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let url = format!("sqlite:{}", directory.path().join("kici.db").display());
        Self::open(url, Some(directory), true).await
    }

    /// A store in a database of its own; none when there is no server.
    pub async fn postgres() -> Option<Self> {
        let url = server::database().await?;
        Some(Self::open(url, None, false).await)
    }

    async fn open(url: String, directory: Option<tempfile::TempDir>, migrate: bool) -> Self {
        let clock = Arc::new(ManualClock::new(Ts::from_micros(1_800_000_000_000_000)));
        let store = Store::open(config(&url, "node-1", clock.clone())).await.expect("the store opens");
        if migrate {
            store.migrate().await.expect("the store migrates");
        }
        Self { store, clock, url, directory }
    }

    /// Runs `body` on each database.
    pub async fn each<F, R>(body: F)
    where
        F: Fn(TestStore) -> R,
        R: Future<Output = ()>,
    {
        let mut sqlite = Self::sqlite().await;
        // A body that moves single fields of the store into a future would drop the directory too early.
        let directory = sqlite.directory.take();
        body(sqlite).await;
        drop(directory);
        if let Some(store) = Self::postgres().await {
            let url = store.url.clone();
            body(store).await;
            server::drop_database(&url).await;
        }
    }

    /// A second instance on the same database; PostgreSQL only.
    pub async fn sibling(&self, node: &str) -> Store {
        Store::open(config(&self.url, node, self.clock.clone())).await.expect("the store opens twice")
    }

    /// The same database for the next process, after the store of the last one was closed.
    pub async fn reopened(&self) -> Store {
        Store::open(config(&self.url, "node-1", self.clock.clone())).await.expect("the store opens again")
    }

    /// Runs a statement of a test's own, for rows that no operation makes.
    pub async fn sql(&self, text: &str) {
        if let Some(path) = self.url.strip_prefix("sqlite:") {
            let mut conn = SqliteConnection::establish(path).expect("the file opens");
            conn.batch_execute(text).expect("the statement runs");
        } else {
            server::execute_in(&self.url, text).await;
        }
    }

    /// The address of the database.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// How tests open a store.
pub fn config(url: &str, node: &str, clock: Arc<dyn Clock>) -> StoreConfig {
    StoreConfig {
        url: url.to_owned(),
        durability: Durability::Normal,
        pool_max: 4,
        node: instance(node),
        clock,
        ids: Arc::new(TestIds),
    }
}

/// An instance id.
pub fn instance(name: &str) -> InstanceId {
    agent(name)
}

/// An agent id.
pub fn agent(name: &str) -> AgentId {
    AgentId::new(name).expect("a legal name")
}
