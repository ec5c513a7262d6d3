//! PostgreSQL: a pool reads; each lane writes on a connection of its own, so that the rows of one run are touched by one
//! writer only.

use std::sync::Arc;
use std::time::Duration;

use diesel::pg::Pg as Db;
use diesel::prelude::*;
use diesel_async::pooled_connection::deadpool::Pool;
use diesel_async::pooled_connection::{AsyncDieselConnectionManager, ManagerConfig, PoolableConnection as _};
use diesel_async::{AsyncConnection, AsyncMigrationHarness, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::StoreError;
use crate::compat;
use crate::ctx::{Ctx, Shared};
use crate::facade::{Durability, Lane};
use crate::fence::Fence;
use crate::notify::{Notifier, Topic, Wakeup};
use crate::write::{self, BoxedWrite, Pending, Transact};

pub(crate) mod backend {
    pub(crate) type Conn = diesel_async::AsyncPgConnection;
    pub(crate) type Db = diesel::pg::Pg;

    /// True when only one instance can use the database.
    pub(crate) const SINGLE_NODE: bool = false;

    /// Waits for its turn among all transactions that name the same key, and keeps it until its end.
    pub(crate) async fn take_turn(conn: &mut Conn, key: i64) -> diesel::QueryResult<()> {
        let lock = diesel::sql_query("SELECT pg_advisory_xact_lock($1)").bind::<diesel::sql_types::BigInt, _>(key);
        diesel_async::RunQueryDsl::execute(lock, conn).await.map(drop)
    }

    /// Now, by the clock of the database: leases of several nodes are compared by one clock only.
    pub(crate) async fn lease_now(conn: &mut Conn, _: &crate::ctx::Ctx) -> diesel::QueryResult<crate::types::DbTs> {
        // Not `now()`, which stands still within a transaction.
        let now = diesel::dsl::sql::<diesel::sql_types::Timestamptz>("clock_timestamp()");
        diesel_async::RunQueryDsl::get_result(diesel::select(now), conn).await
    }

    pub(crate) mod sql {
        pub(crate) use diesel::sql_types::{Timestamptz as Ts, Uuid as Id};
    }
}

/// Locks the rows until the end of the transaction.
macro_rules! lock_row {
    ($query:expr) => {
        $query.for_update()
    };
}

/// Locks rows that nobody else has locked.
macro_rules! skip_locked {
    ($query:expr) => {
        $query.for_update().skip_locked()
    };
}

/// Rows of an `INSERT` whose statement is kept: its text is another one for each number of them.
const KEPT_ROWS: usize = 16;

/// One `INSERT` per 500 rows: each costs a round trip.
macro_rules! insert_all {
    ($conn:expr, $table:expr, $rows:expr) => {{
        for chunk in $rows.chunks(500) {
            let insert = diesel::insert_into($table).values(chunk);
            crate::pg::shared::kept::kept_if(chunk.len() <= crate::pg::KEPT_ROWS, insert).execute($conn).await?;
        }
    }};
}

/// Sends statements that do not depend on each other at once and waits for all of them: one round trip instead of one for each.
/// In which order they run is not said, since some may have to be prepared first: whatever takes a lock that others rely on
/// goes before. The error is that of one that failed.
macro_rules! at_once {
    ($conn:ident as $shared:ident; $($call:expr),+ $(,)?) => {{
        let connection: &Conn = $conn;
        futures::try_join!($(async { let $shared = &mut &*connection; $call.await }),+)
    }};
}

#[path = "shared/mod.rs"]
pub(crate) mod shared;

/// Fails unless the lease is held in this term, and keeps others from taking it until the transaction ends.
pub(crate) async fn check_fence(conn: &mut Conn, fence: Option<&Fence>) -> Result<(), StoreError> {
    use diesel::sql_types::{BigInt, Text};
    let Some(Fence { lease, term }) = fence else { return Ok(()) };
    let held = diesel::sql_query(
        "SELECT 1 FROM leases WHERE name = $1 AND term = $2 AND expires_at > clock_timestamp() FOR SHARE",
    );
    match held.bind::<Text, _>(lease).bind::<BigInt, _>(term).execute(conn).await? {
        0 => Err(StoreError::Fenced),
        _ => Ok(()),
    }
}

use backend::Conn;

const MIGRATIONS: EmbeddedMigrations = embed_migrations!("../../migrations/postgres");
/// Serialises migrations of nodes that start together; any fixed number.
const MIGRATION_LOCK: i64 = 0x6b69_6369;
/// The channel of all notifications.
const CHANNEL: &str = "kici";
/// Topics of one notification; PostgreSQL takes less than 8,000 bytes, and a topic has at most 40.
const MAX_WORDS: usize = 150;
/// Time between two announcements.
const ANNOUNCE_AGAIN: Duration = Duration::from_millis(5);
/// Commits whose announcement waits.
const ANNOUNCEMENTS: usize = 1_024;
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

impl Transact for Conn {
    fn begin(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move { Ok(self.batch_execute("BEGIN").await?) }.boxed()
    }

    fn commit(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move { Ok(self.batch_execute("COMMIT").await?) }.boxed()
    }

    fn rollback(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move { Ok(self.batch_execute("ROLLBACK").await?) }.boxed()
    }
}

/// How to connect.
#[derive(Clone)]
struct Address {
    url: String,
    settings: String,
}

impl Address {
    fn new(url: String, durability: Durability, shared: &Shared) -> Self {
        let commit = match durability {
            Durability::Full => "on",
            Durability::Normal => "off",
        };
        // An instance id holds no character that SQL could mistake.
        let settings = format!(
            "SET statement_timeout = '30s'; SET lock_timeout = '5s'; SET idle_in_transaction_session_timeout = '60s'; \
             SET synchronous_commit = {commit}; SET application_name = 'kici-orchestrator/{}'; SET timezone = 'UTC'",
            shared.node
        );
        Self { url, settings }
    }

    async fn connect(&self) -> Result<Conn, StoreError> {
        let connecting = async {
            let mut conn = AsyncPgConnection::establish(&self.url).await?;
            conn.batch_execute(&self.settings).await?;
            Ok(conn)
        };
        tokio::time::timeout(CONNECT_WITHIN, connecting)
            .await
            .map_err(|_| StoreError::Unavailable("no connection within 10 s".to_owned()))?
    }
}

/// The open database.
pub(crate) struct Postgres {
    address: Address,
    shared: Arc<Shared>,
    pool: Pool<Conn>,
    lanes: std::sync::Mutex<Vec<mpsc::Sender<BoxedWrite<Conn>>>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".to_owned())
}

impl Postgres {
    pub(crate) async fn open(
        url: String,
        durability: Durability,
        pool_max: usize,
        shared: Arc<Shared>,
        notifier: Notifier,
    ) -> Result<Self, StoreError> {
        let address = Address::new(url, durability, &shared);
        let pool = pool(&address, pool_max)?;
        // Told now rather than at the first operation.
        drop(address.connect().await?);
        let tasks = TaskTracker::new();
        let stop = CancellationToken::new();
        let mut lanes = Vec::new();
        let (announce, announced) = mpsc::channel(ANNOUNCEMENTS);
        // Nothing is written there that a crash could lose.
        let hurried = Address::new(address.url.clone(), Durability::Normal, &shared);
        tasks.spawn(announcements(hurried, shared.mark, announced));
        for _ in 0..Lane::COUNT {
            let (sender, receiver) = mpsc::channel(write::QUEUE);
            let writer = Writer {
                address: address.clone(),
                shared: Arc::clone(&shared),
                notifier: notifier.clone(),
                announce: announce.clone(),
            };
            tasks.spawn(writer.run(receiver));
            lanes.push(sender);
        }
        tasks.spawn(listen(address.clone(), Arc::clone(&shared), notifier, stop.clone()));
        tasks.close();
        Ok(Self { address, shared, pool, lanes: std::sync::Mutex::new(lanes), tasks, stop })
    }

    /// The harness blocks its thread: the runtime must have several, and whatever shares the caller's task must not wait
    /// for it, hence a task of its own.
    pub(crate) async fn migrate(&self) -> Result<Vec<String>, StoreError> {
        let task = self.tasks.spawn(Self::migrate_over(self.address.clone()));
        task.await.map_err(|error| StoreError::Unavailable(error.to_string()))?
    }

    async fn migrate_over(address: Address) -> Result<Vec<String>, StoreError> {
        let mut conn = address.connect().await?;
        conn.batch_execute("SET statement_timeout = 0; SET lock_timeout = 0").await?;
        diesel::sql_query("SELECT pg_advisory_lock($1)")
            .bind::<diesel::sql_types::BigInt, _>(MIGRATION_LOCK)
            .execute(&mut conn)
            .await?;
        let mut harness = AsyncMigrationHarness::new(conn);
        let applied = harness.applied_migrations().map_err(|e| compat::fault(&*e))?;
        let unknown = compat::unknown::<Db>(&MIGRATIONS, &applied)?;
        if !unknown.is_empty() {
            let mut conn = harness.into_inner();
            let rows = shared::schema::schema_compat::table.load::<(String, String)>(&mut conn).await?;
            compat::judge(&unknown, &rows)?;
            harness = AsyncMigrationHarness::new(conn);
        }
        let applied = harness.run_pending_migrations(MIGRATIONS).map_err(|e| compat::fault(&*e))?;
        // The advisory lock ends with the connection.
        Ok(applied.iter().map(ToString::to_string).collect())
    }

    pub(crate) async fn write<R, F>(&self, lane: Lane, name: &'static str, run: F) -> Result<R, StoreError>
    where
        R: Send + 'static,
        F: for<'a> Fn(&'a mut Conn, &'a Ctx) -> BoxFuture<'a, Result<R, StoreError>> + Send + 'static,
    {
        let sender = {
            let lanes = self.lanes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            lanes.get(lane.index()).cloned().ok_or_else(closed)?
        };
        let (pending, answer) = Pending::new(name, run);
        sender.send(Box::new(pending)).await.map_err(|_| closed())?;
        drop(sender);
        answer.await.map_err(|_| StoreError::Unavailable("the write was lost".to_owned()))?
    }

    pub(crate) async fn read<R, F>(&self, run: F) -> Result<R, StoreError>
    where
        F: for<'a> FnOnce(&'a mut Conn, &'a Ctx) -> BoxFuture<'a, Result<R, StoreError>> + Send,
    {
        let mut conn = self.pool.get().await.map_err(|error| StoreError::Unavailable(error.to_string()))?;
        let ctx = Ctx::new(&self.shared);
        let outcome = run(&mut conn, &ctx).await;
        ctx.share();
        outcome
    }

    pub(crate) async fn close(&self) {
        self.lanes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clear();
        self.stop.cancel();
        self.tasks.wait().await;
        self.pool.close();
    }
}

fn pool(address: &Address, max: usize) -> Result<Pool<Conn>, StoreError> {
    let mut config = ManagerConfig::default();
    config.recycling_method = diesel_async::pooled_connection::RecyclingMethod::Fast;
    let settings = address.clone();
    config.custom_setup = Box::new(move |_| {
        let address = settings.clone();
        async move {
            address.connect().await.map_err(|error| {
                let error = diesel::result::Error::QueryBuilderError(error.to_string().into());
                ConnectionError::CouldntSetupConfiguration(error)
            })
        }
        .boxed()
    });
    let manager = AsyncDieselConnectionManager::new_with_config(address.url.clone(), config);
    Pool::builder(manager)
        .max_size(max.max(1))
        .runtime(deadpool::Runtime::Tokio1)
        .wait_timeout(Some(CONNECT_WITHIN))
        .create_timeout(Some(CONNECT_WITHIN))
        .build()
        .map_err(|error| StoreError::Config(error.to_string()))
}

struct Writer {
    address: Address,
    shared: Arc<Shared>,
    notifier: Notifier,
    /// To the other instances.
    announce: mpsc::Sender<Vec<Topic>>,
}

impl Writer {
    async fn run(self, mut receiver: mpsc::Receiver<BoxedWrite<Conn>>) {
        let mut conn: Option<Conn> = None;
        let mut batch = Vec::new();
        while receiver.recv_many(&mut batch, write::BATCH).await > 0 {
            // A server that was restarted has closed it; a write that begins there would fail for nothing.
            let usable = conn.take().and_then(|mut conn| (!conn.is_broken()).then_some(conn));
            let mut open = match usable {
                Some(conn) => conn,
                None => match self.address.connect().await {
                    Ok(conn) => conn,
                    Err(error) => {
                        let text = error.to_string();
                        batch.drain(..).for_each(|write| write.failed(StoreError::Unavailable(text.clone())));
                        continue;
                    }
                },
            };
            let publish = |topics: Vec<Topic>| {
                for topic in &topics {
                    self.notifier.publish(Wakeup::Changed(*topic));
                }
                // Without room the others find out by polling.
                let _ = self.announce.try_send(topics);
            };
            let pause = async |wait: Duration| tokio::time::sleep(wait).await;
            let work = write::process(&mut open, &self.shared, std::mem::take(&mut batch), pause, &publish);
            // After a panic the connection is inside an unfinished transaction; the server rolls it back.
            if let Ok(true) = std::panic::AssertUnwindSafe(work).catch_unwind().await {
                conn = Some(open);
            }
        }
    }
}

/// Tells other instances what changed, after the commit and on a connection of its own: a transaction that notifies holds a
/// lock of the whole server from there to the end of its commit (PostgreSQL, `PreCommit_Notify`), and all writers would wait
/// for each other's disk. What is lost in a crash is found by polling.
async fn announcements(address: Address, mark: uuid::Uuid, mut receiver: mpsc::Receiver<Vec<Topic>>) {
    let mut conn: Option<Conn> = None;
    let mut batch = Vec::new();
    while receiver.recv_many(&mut batch, ANNOUNCEMENTS).await > 0 {
        let payload = payload(mark, std::mem::take(&mut batch).into_iter().flatten());
        if conn.as_mut().is_none_or(|conn| conn.is_broken()) {
            conn = address.connect().await.ok();
        }
        let Some(open) = &mut conn else { continue };
        // The payload is made of fixed words and ids: nothing that SQL could mistake.
        if open.batch_execute(&format!("SELECT pg_notify('{CHANNEL}', '{payload}')")).await.is_err() {
            conn = None;
        }
        // The first is told at once; of many in a row each would cost the server as much as a write.
        tokio::time::sleep(ANNOUNCE_AGAIN).await;
    }
}

fn payload(mark: uuid::Uuid, topics: impl Iterator<Item = Topic>) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in topics.map(|topic| Wakeup::Changed(topic).to_text()) {
        if !words.contains(&word) {
            words.push(word);
        }
        if words.len() > MAX_WORDS {
            words = vec![Wakeup::Missed.to_text()];
            break;
        }
    }
    format!("{mark} {}", words.join(","))
}

/// Carries notifications of other instances to this one's subscribers.
async fn listen(address: Address, shared: Arc<Shared>, notifier: Notifier, stop: CancellationToken) {
    let mut wait = Duration::from_secs(1);
    loop {
        let session = async {
            if let Ok(conn) = address.connect().await {
                wait = Duration::from_secs(1);
                follow(conn, &shared, &notifier).await;
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(60));
        };
        if stop.run_until_cancelled(session).await.is_none() {
            return;
        }
    }
}

async fn follow(mut conn: Conn, shared: &Shared, notifier: &Notifier) {
    if conn.batch_execute(&format!("LISTEN {CHANNEL}")).await.is_err() {
        return;
    }
    // What was sent before this connection listened is lost.
    notifier.publish(Wakeup::Missed);
    let own = shared.mark.to_string();
    let mut notifications = std::pin::pin!(conn.notifications_stream());
    while let Some(Ok(notification)) = notifications.next().await {
        match notification.payload.split_once(' ') {
            // Told after the commit already.
            Some((mark, _)) if mark == own => {}
            Some((_, words)) => {
                for word in words.split(',') {
                    notifier.publish(Wakeup::of_text(word));
                }
            }
            None => notifier.publish(Wakeup::Missed),
        }
    }
}
