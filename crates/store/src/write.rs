//! Group commit: writes that are ready at the same time share one transaction.
//!
//! A write is a closure that may run more than once: alone it touches nothing but its connection. A batch that fails is
//! rolled back and its writes are run one by one, each repeated while it conflicts with other transactions.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::oneshot;

use crate::StoreError;
use crate::ctx::{Ctx, Shared};
use crate::notify::Topic;

/// Writes in one transaction, at most.
pub(crate) const BATCH: usize = 64;
/// Writes that may wait for one lane; more callers wait to enqueue.
pub(crate) const QUEUE: usize = 4096;
/// Runs of one write before its conflict is reported.
const ATTEMPTS: u32 = 8;

/// A write without its types.
pub(crate) trait Write<C>: Send {
    /// The name of the operation, for metrics.
    fn name(&self) -> &'static str;
    /// Runs it inside an open transaction and keeps the outcome.
    fn run<'a>(&'a mut self, conn: &'a mut C, shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<(), StoreError>>;
    /// What subscribers must be told once it is committed.
    fn topics(&self) -> &[Topic];
    /// Answers the caller with the kept outcome.
    fn committed(self: Box<Self>);
    /// Answers the caller with a fault.
    fn failed(self: Box<Self>, error: StoreError);
}

/// A write and where its answer goes.
pub(crate) struct Pending<F, R> {
    name: &'static str,
    run: F,
    kept: Option<R>,
    topics: Vec<Topic>,
    /// What it has read, for everybody once it is committed.
    ctx: Option<Ctx>,
    answer: oneshot::Sender<Result<R, StoreError>>,
}

impl<F, R> Pending<F, R> {
    pub(crate) fn new(name: &'static str, run: F) -> (Self, oneshot::Receiver<Result<R, StoreError>>) {
        let (answer, receiver) = oneshot::channel();
        (Self { name, run, kept: None, topics: Vec::new(), ctx: None, answer }, receiver)
    }
}

impl<C, F, R> Write<C> for Pending<F, R>
where
    C: Send,
    R: Send,
    F: for<'a> Fn(&'a mut C, &'a Ctx) -> BoxFuture<'a, Result<R, StoreError>> + Send,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn run<'a>(&'a mut self, conn: &'a mut C, shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<(), StoreError>> {
        let ctx = Ctx::new(shared);
        Box::pin(async move {
            self.kept = None;
            self.topics.clear();
            self.ctx = None;
            self.kept = Some((self.run)(conn, &ctx).await?);
            self.topics = ctx.topics();
            self.ctx = Some(ctx);
            Ok(())
        })
    }

    fn topics(&self) -> &[Topic] {
        &self.topics
    }

    fn committed(self: Box<Self>) {
        if let Some(ctx) = &self.ctx {
            ctx.share();
        }
        let outcome = self.kept.ok_or_else(|| StoreError::Db("a write was committed before it ran".to_owned()));
        // The caller may have gone away; the write stays.
        let _ = self.answer.send(outcome);
    }

    fn failed(self: Box<Self>, error: StoreError) {
        let _ = self.answer.send(Err(error));
    }
}

pub(crate) type BoxedWrite<C> = Box<dyn Write<C>>;

/// A connection that can bracket writes with a transaction.
pub(crate) trait Transact: Sized + Send {
    /// Begins a transaction that may write.
    fn begin(&mut self) -> BoxFuture<'_, Result<(), StoreError>>;
    /// Commits.
    fn commit(&mut self) -> BoxFuture<'_, Result<(), StoreError>>;
    /// Rolls back.
    fn rollback(&mut self) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// Runs `writes` in one transaction. On a fault nothing is written.
async fn together<C: Transact>(
    conn: &mut C,
    shared: &Arc<Shared>,
    writes: &mut [BoxedWrite<C>],
) -> Result<(), StoreError> {
    conn.begin().await?;
    let outcome = inside(conn, shared, writes).await;
    if outcome.is_err() {
        // Its own fault adds nothing: the connection is then replaced by its owner.
        let _ = conn.rollback().await;
    }
    outcome
}

async fn inside<C: Transact>(
    conn: &mut C,
    shared: &Arc<Shared>,
    writes: &mut [BoxedWrite<C>],
) -> Result<(), StoreError> {
    for write in writes.iter_mut() {
        write.run(conn, shared).await?;
    }
    conn.commit().await
}

fn topics<C>(writes: &[BoxedWrite<C>]) -> Vec<Topic> {
    let mut all: Vec<Topic> = Vec::new();
    for topic in writes.iter().flat_map(|write| write.topics()) {
        if !all.contains(topic) {
            all.push(*topic);
        }
    }
    all
}

/// Runs a batch and answers every caller; `pause` waits between two attempts, `publish` wakes subscribers after a
/// commit. Returns false when the connection is of no more use.
pub(crate) async fn process<C, P>(
    conn: &mut C,
    shared: &Arc<Shared>,
    mut batch: Vec<BoxedWrite<C>>,
    pause: P,
    publish: &(dyn Fn(Vec<Topic>) + Sync),
) -> bool
where
    C: Transact,
    P: AsyncFn(Duration),
{
    metrics::histogram!("kici_orch_db_write_batch_size").record(u32::try_from(batch.len()).unwrap_or(u32::MAX));
    if batch.len() > 1 && together(conn, shared, &mut batch).await.is_ok() {
        publish(topics(&batch));
        for write in batch {
            write.committed();
        }
        return true;
    }
    let mut usable = true;
    for write in batch {
        let mut one = [write];
        let outcome = alone(conn, shared, &mut one, &pause).await;
        let [write] = one;
        match outcome {
            Ok(()) => {
                publish(write.topics().to_vec());
                write.committed();
            }
            Err(error) => {
                usable &= !matches!(error, StoreError::Unavailable(_));
                write.failed(error);
            }
        }
    }
    usable
}

async fn alone<C, P>(
    conn: &mut C,
    shared: &Arc<Shared>,
    one: &mut [BoxedWrite<C>; 1],
    pause: &P,
) -> Result<(), StoreError>
where
    C: Transact,
    P: AsyncFn(Duration),
{
    let mut attempt = 1;
    loop {
        match together(conn, shared, one).await {
            Err(error) if error.is_conflict() && attempt < ATTEMPTS => {
                metrics::counter!("kici_orch_db_conflicts_total", "operation" => one[0].name()).increment(1);
                pause(jitter(shared, attempt)).await;
                attempt += 1;
            }
            outcome => return outcome,
        }
    }
}

/// Full jitter below 1, 2, 4 … 64 ms, from the low bits of a fresh id.
fn jitter(shared: &Arc<Shared>, attempt: u32) -> Duration {
    let ceiling = 1_000_u64 << attempt.min(6);
    let random = u64::try_from(shared.ids.uuid().as_u128() & u128::from(u32::MAX)).unwrap_or(0);
    Duration::from_micros(random % ceiling)
}
