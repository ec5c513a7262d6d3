//! SQLite: one thread writes, a few connections read.
//!
//! The connections run their statements on the thread that asks, so every future of an operation is ready at its first
//! poll: the writer has a thread of its own, readers borrow one of the runtime's blocking threads.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sqlite::SqliteConnection;
use diesel_async::SimpleAsyncConnection;
use diesel_async::sync_connection_wrapper::SpawnBlocking;
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{Semaphore, mpsc};

use crate::StoreError;
use crate::compat;
use crate::ctx::{Ctx, Shared};
use crate::facade::Durability;
use crate::notify::{Notifier, Topic, Wakeup};
use crate::write::{self, BoxedWrite, Pending, Transact};

pub(crate) mod backend {
    pub(crate) type Conn =
        diesel_async::sync_connection_wrapper::SyncConnectionWrapper<diesel::sqlite::SqliteConnection, super::Inline>;
    pub(crate) type Db = diesel::sqlite::Sqlite;

    /// True when only one instance can use the database.
    pub(crate) const SINGLE_NODE: bool = true;

    /// Nothing to wait for: there is one writer, and its transactions begin by locking the database.
    pub(crate) async fn take_turn(_: &mut Conn, _: i64) -> diesel::QueryResult<()> {
        Ok(())
    }

    /// There is one node, and one clock.
    pub(crate) async fn lease_now(_: &mut Conn, ctx: &crate::ctx::Ctx) -> diesel::QueryResult<crate::types::DbTs> {
        Ok(ctx.now.into())
    }

    pub(crate) mod sql {
        pub(crate) use diesel::sql_types::{BigInt as Ts, Text as Id};
    }
}

/// Nothing to lock: whoever writes holds the only write lock.
macro_rules! lock_row {
    ($query:expr) => {
        $query
    };
}

/// As [`lock_row`].
macro_rules! skip_locked {
    ($query:expr) => {
        $query
    };
}

/// One `INSERT` per row, inside the transaction.
macro_rules! insert_all {
    ($conn:expr, $table:expr, $rows:expr) => {{
        for row in $rows {
            diesel::insert_into($table).values(row).execute($conn).await?;
        }
    }};
}

/// One after the other: there is no way to the database that could be saved.
macro_rules! at_once {
    ($conn:ident as $shared:ident; $($call:expr),+ $(,)?) => {
        async { diesel::QueryResult::Ok(($({ let $shared = &mut *$conn; $call.await? }),+)) }.await
    };
}

#[path = "shared/mod.rs"]
pub(crate) mod shared;

use backend::Conn;

const MIGRATIONS: EmbeddedMigrations = embed_migrations!("../../migrations/sqlite");

/// Runs what it is given at once, on the calling thread.
pub(crate) struct Inline;

impl SpawnBlocking for Inline {
    fn spawn_blocking<'a, R>(
        &mut self,
        task: impl FnOnce() -> R + Send + 'static,
    ) -> BoxFuture<'a, Result<R, Box<dyn std::error::Error + Send + Sync + 'static>>>
    where
        R: Send + 'static,
    {
        let outcome = task();
        std::future::ready(Ok(outcome)).boxed()
    }

    fn get_runtime() -> Self {
        Self
    }
}

/// The outcome of a future that is ready at its first poll.
fn ready<T>(future: impl Future<Output = T>) -> Result<T, StoreError> {
    future.now_or_never().ok_or_else(|| StoreError::Db("an operation waited for something else than SQLite".to_owned()))
}

impl Transact for Conn {
    fn begin(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        // Never deferred: a snapshot that has read cannot be upgraded while another one writes.
        async move { Ok(self.batch_execute("BEGIN IMMEDIATE").await?) }.boxed()
    }

    fn commit(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move { Ok(self.batch_execute("COMMIT").await?) }.boxed()
    }

    fn rollback(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async move { Ok(self.batch_execute("ROLLBACK").await?) }.boxed()
    }
}

/// The open database.
pub(crate) struct Sqlite {
    path: PathBuf,
    durability: Durability,
    shared: Arc<Shared>,
    writes: Mutex<Option<mpsc::Sender<BoxedWrite<Conn>>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    readers: Arc<Readers>,
    /// Held as long as the store is open: two programs never write one database.
    lock: File,
}

struct Readers {
    path: PathBuf,
    durability: Durability,
    permits: Semaphore,
    idle: Mutex<Vec<Conn>>,
}

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".to_owned())
}

fn establish(path: &Path, durability: Durability, reader: bool) -> Result<SqliteConnection, StoreError> {
    let url = path.to_str().ok_or_else(|| StoreError::Config("the path of the database is not UTF-8".to_owned()))?;
    let mut conn = SqliteConnection::establish(url)?;
    let synchronous = match durability {
        Durability::Full => "FULL",
        Durability::Normal => "NORMAL",
    };
    conn.batch_execute(&format!(
        "PRAGMA busy_timeout = 5000; PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous}; \
         PRAGMA foreign_keys = ON; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -16000; \
         PRAGMA journal_size_limit = 67108864;"
    ))?;
    if reader {
        conn.batch_execute("PRAGMA query_only = ON;")?;
    }
    Ok(conn)
}

fn take_lock(path: &Path) -> Result<File, StoreError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let name = PathBuf::from(name);
    let fault = |error: &dyn std::fmt::Display| StoreError::Config(format!("cannot lock {}: {error}", name.display()));
    let file = File::options().create(true).truncate(false).write(true).open(&name).map_err(|e| fault(&e))?;
    file.try_lock().map_err(|error| match error {
        std::fs::TryLockError::WouldBlock => StoreError::Config(format!(
            "{} is in use by another program; stop it first, or give this one its own data directory",
            path.display()
        )),
        std::fs::TryLockError::Error(error) => fault(&error),
    })?;
    Ok(file)
}

impl Sqlite {
    pub(crate) async fn open(
        path: PathBuf,
        durability: Durability,
        readers: usize,
        shared: Arc<Shared>,
        notifier: Notifier,
    ) -> Result<Self, StoreError> {
        let lock = take_lock(&path)?;
        let opened = path.clone();
        let conn = tokio::task::spawn_blocking(move || establish(&opened, durability, false))
            .await
            .map_err(|error| StoreError::Unavailable(error.to_string()))??;
        let (sender, receiver) = mpsc::channel(write::QUEUE);
        let writer = Writer { path: path.clone(), durability, shared: Arc::clone(&shared), notifier };
        let thread = std::thread::Builder::new()
            .name("kici-store".to_owned())
            .spawn(move || writer.run(Conn::new(conn), receiver))
            .map_err(|error| StoreError::Unavailable(error.to_string()))?;
        let readers = Arc::new(Readers {
            path: path.clone(),
            durability,
            permits: Semaphore::new(readers.max(1)),
            idle: Mutex::default(),
        });
        Ok(Self {
            path,
            durability,
            shared,
            writes: Mutex::new(Some(sender)),
            writer: Mutex::new(Some(thread)),
            readers,
            lock,
        })
    }

    pub(crate) async fn migrate(&self) -> Result<Vec<String>, StoreError> {
        let (path, durability) = (self.path.clone(), self.durability);
        tokio::task::spawn_blocking(move || {
            let mut conn = establish(&path, durability, false)?;
            check(&mut conn)?;
            let applied = conn.run_pending_migrations(MIGRATIONS).map_err(|e| compat::fault(&*e))?;
            Ok(applied.iter().map(ToString::to_string).collect())
        })
        .await
        .map_err(|error| StoreError::Unavailable(error.to_string()))?
    }

    pub(crate) async fn write<R, F>(&self, name: &'static str, run: F) -> Result<R, StoreError>
    where
        R: Send + 'static,
        F: for<'a> Fn(&'a mut Conn, &'a Ctx) -> BoxFuture<'a, Result<R, StoreError>> + Send + 'static,
    {
        let sender = self.writes.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(closed)?;
        let (pending, answer) = Pending::new(name, run);
        sender.send(Box::new(pending)).await.map_err(|_| closed())?;
        // Dropped before the answer is awaited, so that closing only waits for writes that are queued.
        drop(sender);
        answer.await.map_err(|_| closed())?
    }

    pub(crate) async fn read<R, F>(&self, run: F) -> Result<R, StoreError>
    where
        R: Send + 'static,
        F: for<'a> FnOnce(&'a mut Conn, &'a Ctx) -> BoxFuture<'a, Result<R, StoreError>> + Send + 'static,
    {
        let readers = Arc::clone(&self.readers);
        let _permit = readers.permits.acquire().await.map_err(|_| closed())?;
        let ctx = Ctx::new(&self.shared);
        let pool = Arc::clone(&self.readers);
        tokio::task::spawn_blocking(move || {
            let idle = pool.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut conn = match idle {
                Some(conn) => conn,
                None => Conn::new(establish(&pool.path, pool.durability, true)?),
            };
            let outcome = ready(run(&mut conn, &ctx))?;
            ctx.share();
            pool.idle.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
            outcome
        })
        .await
        .map_err(|error| StoreError::Unavailable(error.to_string()))?
    }

    pub(crate) async fn close(&self) {
        self.readers.permits.close();
        self.writes.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A writer that panicked has answered nobody; there is nothing left to do about it here.
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
        self.readers.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // The next program may have the file now, although somebody still holds this value. It is given back in any case
        // when the value goes.
        let _ = self.lock.unlock();
    }
}

fn check(conn: &mut SqliteConnection) -> Result<(), StoreError> {
    let applied = conn.applied_migrations().map_err(|e| compat::fault(&*e))?;
    let unknown = compat::unknown::<backend::Db>(&MIGRATIONS, &applied)?;
    if unknown.is_empty() {
        return Ok(());
    }
    let rows = shared::schema::schema_compat::table.load::<(String, String)>(conn)?;
    compat::judge(&unknown, &rows)
}

struct Writer {
    path: PathBuf,
    durability: Durability,
    shared: Arc<Shared>,
    notifier: Notifier,
}

impl Writer {
    fn run(self, mut conn: Conn, mut receiver: mpsc::Receiver<BoxedWrite<Conn>>) {
        while let Some(first) = receiver.blocking_recv() {
            let mut batch = vec![first];
            while batch.len() < write::BATCH {
                let Ok(next) = receiver.try_recv() else { break };
                batch.push(next);
            }
            if !self.process(&mut conn, batch) {
                self.reopen(&mut conn);
            }
        }
    }

    /// False when the connection must be replaced.
    fn process(&self, conn: &mut Conn, batch: Vec<BoxedWrite<Conn>>) -> bool {
        let pause = async |wait: Duration| std::thread::sleep(wait);
        let publish = |topics: Vec<Topic>| {
            for topic in topics {
                self.notifier.publish(Wakeup::Changed(topic));
            }
        };
        let work = std::panic::AssertUnwindSafe(|| ready(write::process(conn, &self.shared, batch, pause, &publish)));
        // A write that panics answers nobody and leaves a transaction open; the others go on with a new connection.
        matches!(std::panic::catch_unwind(work), Ok(Ok(true)))
    }

    fn reopen(&self, conn: &mut Conn) {
        match establish(&self.path, self.durability, false) {
            Ok(fresh) => *conn = Conn::new(fresh),
            Err(error) => tracing::error!(%error, "cannot reopen the database for writing"),
        }
    }
}
