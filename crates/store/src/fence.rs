//! Work that only the holder of a lease may do: each of its writes first makes sure, in its own transaction, that the lease is
//! still held in the same term. A process that was stopped for a while and goes on as if nothing had happened changes nothing.

tokio::task_local! {
    static FENCE: Fence;
}

/// A lease, and the term in which it is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Name of the lease.
    pub lease: String,
    /// Raised whenever the holder changes.
    pub term: i64,
}

/// Runs `work`; writes that it asks for fail with [`StoreError::Fenced`](crate::StoreError::Fenced) once another holder has had
/// the lease. Tasks that it spawns are not covered. On SQLite, where one process is alone, nothing is checked.
pub async fn fenced<F: Future>(fence: Fence, work: F) -> F::Output {
    FENCE.scope(fence, work).await
}

/// The fence of the task that asks.
pub(crate) fn current() -> Option<Fence> {
    FENCE.try_with(Clone::clone).ok()
}
