//! Moves finished logs from segments into the object store. Idempotent: a segment is removed only after its sealed form is
//! durable, and sealing twice gives the same object.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kici_blobs::{BlobError, Blobs};
use kici_engine::ids::JobId;
use kici_engine::time::{Clock, Ts};
use kici_store::model::{Job, JobRef};
use kici_store::{Store, StoreError};
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::marks::{SealMark, delivery_dir, read_mark, step_files, write_mark};
use super::reader::object_key;
use super::segment::segment_path;
use super::{LogAppender, LogKey};

/// How long after the end of a job its agent may still bring the rest of the log.
const LATE: Duration = Duration::from_secs(600);

/// A log that could not be sealed this time; the next pass tries again.
#[derive(Debug, thiserror::Error)]
enum SealError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Blob(#[from] BlobError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Seals logs.
pub(crate) struct LogSealer {
    root: PathBuf,
    appender: LogAppender,
    store: Store,
    blobs: Blobs,
    clock: Arc<dyn Clock>,
}

impl LogSealer {
    /// Seals what lies below `root`.
    pub(crate) fn new(root: PathBuf, appender: LogAppender, store: Store, blobs: Blobs, clock: Arc<dyn Clock>) -> Self {
        Self { root, appender, store, blobs, clock }
    }

    /// Seals steps soon after their agents have said that they are complete.
    pub(crate) async fn follow(&self, stop: CancellationToken) {
        let mut sealed = self.appender.sealed();
        loop {
            let first = tokio::select! {
                () = stop.cancelled() => return,
                first = sealed.recv() => first,
            };
            let mut keys = HashSet::new();
            match first {
                Ok(key) => keys.extend([key]),
                // What was missed is found by the timer.
                Err(RecvError::Lagged(_)) => continue,
                Err(RecvError::Closed) => return,
            }
            while let Ok(key) = sealed.try_recv() {
                keys.insert(key);
            }
            for key in keys {
                self.seal_one(key).await;
            }
        }
    }

    /// Looks at everything that lies below the root.
    pub(crate) async fn seal_all(&self) {
        match self.deliveries() {
            Ok(keys) => {
                for key in keys {
                    self.seal_one(key).await;
                }
            }
            Err(error) => tracing::warn!(%error, "the directory of live logs cannot be read"),
        }
    }

    async fn seal_one(&self, key: LogKey) {
        if let Err(error) = self.seal(key).await {
            tracing::warn!(job = %key.job, epoch = key.epoch, %error, "a log cannot be sealed yet");
        }
    }

    /// The deliveries that have a directory.
    fn deliveries(&self) -> io::Result<Vec<LogKey>> {
        let mut keys = Vec::new();
        for job in fs::read_dir(&self.root)? {
            let job = job?;
            let Ok(uuid) = job.file_name().to_string_lossy().parse::<Uuid>() else { continue };
            for epoch in fs::read_dir(job.path())? {
                if let Ok(epoch) = epoch?.file_name().to_string_lossy().parse() {
                    keys.push(LogKey { job: JobId::from_uuid(uuid), epoch });
                }
            }
        }
        Ok(keys)
    }

    async fn seal(&self, key: LogKey) -> Result<(), SealError> {
        let dir = delivery_dir(&self.root, key);
        let Some(job) = self.store.job_get(key.job).await? else {
            // The run was removed by retention; nobody can read its logs any more.
            return self.remove(key, &dir).await;
        };
        let late = self.ended(&job, key.epoch).await?.is_some_and(|at| self.clock.now().since(at) > LATE);
        let mut sizes = Vec::new();
        for (step, name) in step_files(&dir)? {
            let segment = segment_path(&dir, step.as_str());
            if !name.ends_with(".seg") {
                continue;
            }
            let mark = match read_mark(&dir, &step) {
                Some(mark) => mark,
                None if late => self.give_up(key, &dir, &step, &job).await?,
                None => continue,
            };
            let object = object_key(job.run_id, key, &step);
            if self.is_sealed(&object, fs::metadata(&segment)?.len()).await? {
                // An agent that did not hear that its log is sealed sent it again, which made the file anew.
                self.appender.forget(key).await;
                fs::remove_file(&segment)?;
                continue;
            }
            let index = self.blobs.seal_log(&object, &segment).await?;
            sizes.push((step.as_str().to_owned(), mark.bytes, index.lines));
        }
        if !sizes.is_empty() {
            let job_ref = JobRef { run_id: job.run_id, job_id: key.job, epoch: key.epoch };
            let done: Vec<String> = sizes.iter().map(|(step, ..)| step.clone()).collect();
            self.store.steps_sealed(job_ref, sizes).await?;
            self.appender.forget(key).await;
            for step in done {
                fs::remove_file(dir.join(format!("{step}.seg")))?;
            }
        }
        if late {
            self.remove(key, &dir).await?;
        }
        Ok(())
    }

    /// Whether the object holds more than a segment of `bytes` does: what is sealed is never replaced by less.
    async fn is_sealed(&self, object: &kici_blobs::log::LogKey, bytes: u64) -> Result<bool, SealError> {
        match self.blobs.log_index(object).await {
            Ok(index) => Ok(index.bytes > bytes),
            Err(BlobError::NotFound(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// When a delivery of a job ended. The agent of an earlier one may still bring what its steps said.
    async fn ended(&self, job: &Job, epoch: u32) -> Result<Option<Ts>, SealError> {
        if epoch >= job.dispatch_epoch {
            return Ok(job.finished_at);
        }
        let history = self.store.dispatch_history(job.id).await?;
        let of_delivery = history.iter().find(|record| record.epoch == epoch);
        Ok(of_delivery.map_or(job.finished_at, |record| Some(record.ended_at.unwrap_or(record.dispatched_at))))
    }

    /// Closes a log whose agent will not bring the rest.
    async fn give_up(
        &self,
        key: LogKey,
        dir: &std::path::Path,
        step: &super::StepFile,
        job: &Job,
    ) -> Result<SealMark, SealError> {
        // Nothing may be appended after the size is taken.
        self.appender.forget(key).await;
        let bytes = fs::metadata(segment_path(dir, step.as_str()))?.len();
        let mark = SealMark { bytes, lines: 0, missing_bytes: 0, missing_lines: 0, complete: false };
        write_mark(dir, step, mark)?;
        metrics::counter!("kici_orch_log_gap_total", "source" => "agent_lost").increment(1);
        tracing::warn!(job = %job.id, step = %step, bytes, "the agent did not bring the end of this log");
        Ok(mark)
    }

    async fn remove(&self, key: LogKey, dir: &std::path::Path) -> Result<(), SealError> {
        self.appender.forget(key).await;
        fs::remove_dir_all(dir)?;
        if let Some(job) = dir.parent() {
            // Another epoch may be left in it.
            let _ = fs::remove_dir(job);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::RunId;
    use kici_engine::time::ManualClock;
    use kici_store::testing::TestStore;

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_sealed_log_is_never_replaced_by_a_shorter_one() {
        let stored = TestStore::sqlite().await;
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::local(&dir.path().join("objects")).unwrap();
        let (appender, _thread) = LogAppender::start(dir.path().join("logs")).unwrap();
        let clock: Arc<dyn Clock> = Arc::new(ManualClock::new(Ts::from_micros(1)));
        let sealer = LogSealer::new(dir.path().join("logs"), appender, stored.store.clone(), blobs.clone(), clock);
        let key = LogKey { job: JobId::from_uuid(Uuid::from_u128(1)), epoch: 1 };
        let step = super::super::StepFile::new("step", 0, 0).unwrap();
        let object = object_key(RunId::from_uuid(Uuid::from_u128(2)), key, &step);
        assert!(!sealer.is_sealed(&object, 0).await.unwrap());
        let segment = dir.path().join("segment");
        fs::write(&segment, "1 o a\n").unwrap();
        blobs.seal_log(&object, &segment).await.unwrap();
        assert!(sealer.is_sealed(&object, 0).await.unwrap(), "an empty file came behind it");
        assert!(!sealer.is_sealed(&object, 6).await.unwrap(), "the same once more does no harm");
    }
}
