//! The server side of `StreamLogs`: one call carries the log of one delivery of a job.

use std::collections::BTreeMap;

use kici_engine::ids::RunId;
use kici_protocol::agent::log_chunk::Chunk;
use kici_protocol::agent::{LogAck, LogChunk, LogData, LogSeal, StepKey};
use kici_store::model::JobRef;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::marks::SealMark;
use super::writer::LogStream;
use super::{LogAppender, LogError, LogKey, StepAck, StepFile};

/// Largest `LogData.data`. Agents send less; a larger one is an error of theirs, not a reason to buffer it.
const MAX_CHUNK_BYTES: usize = 1024 * 1024;
/// Steps of one job, pseudo-steps and hooks included; beyond it something is wrong with the sender. The compiler allows 256 steps
/// and 16 hooks of a kind. Around a step run `before_step`, `cleanup`, and `after_step` or `on_cancel`: 256 * (1 + 3 * 16) = 12544.
/// The checkout, 16 commands of `init`, and two kinds of hooks at the end of the job make 12593.
/// Each step and each command of `init` may restore and save 16 caches, and a job take and hand over 50 artifacts each way: 21321.
const MAX_STEPS: usize = 32_768;

/// The answer stream of a call.
pub type LogAcks = ReceiverStream<Result<LogAck, Status>>;

impl From<LogError> for Status {
    fn from(error: LogError) -> Self {
        match &error {
            // The agent comes back and resumes from what was acknowledged.
            LogError::Gap { .. } => Self::out_of_range(error.to_string()),
            LogError::Full => Self::resource_exhausted(error.to_string()),
            LogError::Io(_) | LogError::Closed => Self::unavailable(error.to_string()),
        }
    }
}

/// Reads the first chunk of a call, which names the job.
///
/// # Errors
/// `INVALID_ARGUMENT` when it is missing, is not a `LogOpen` or names no job.
pub async fn opened<S>(chunks: &mut S) -> Result<(LogKey, JobRef), Status>
where
    S: Stream<Item = Result<LogChunk, Status>> + Unpin,
{
    let first = chunks.next().await.ok_or_else(|| Status::invalid_argument("the call ended before LogOpen"))??;
    let Some(Chunk::Open(open)) = first.chunk else {
        return Err(Status::invalid_argument("the first chunk must be LogOpen"));
    };
    let job = open.job.ok_or_else(|| Status::invalid_argument("LogOpen.job is missing"))?;
    let bad = |error| Status::invalid_argument(format!("LogOpen.job: {error}"));
    let (run_id, job_id) = (job.run_id.parse().map_err(bad)?, job.job_id.parse().map_err(bad)?);
    let job = JobRef { run_id, job_id, epoch: job.dispatch_epoch };
    Ok((LogKey { job: job_id, epoch: job.epoch }, job))
}

/// Serves the rest of a call whose sender was found to own the job: stores what comes, answers with what is durable.
///
/// # Errors
/// The status of a [`LogError`] when the store cannot tell what it has.
pub async fn serve<S>(
    appender: &LogAppender,
    run: RunId,
    key: LogKey,
    chunks: S,
    tasks: &TaskTracker,
) -> Result<LogAcks, Status>
where
    S: Stream<Item = Result<LogChunk, Status>> + Send + Unpin + 'static,
{
    let (stream, known) = appender.stream(run, key).await?;
    let (answers, receiver) = mpsc::channel(64);
    tasks.spawn(async move {
        let mut steps = Steps::default();
        if let Err(status) = pump(stream, known, chunks, &answers, &mut steps).await {
            // The peer may be gone already; then there is nobody to tell.
            let _ = answers.send(Err(status)).await;
        }
    });
    Ok(ReceiverStream::new(receiver))
}

/// The wire keys of the steps seen in a call, by file name.
#[derive(Default)]
struct Steps(BTreeMap<StepFile, StepKey>);

impl Steps {
    fn file(&mut self, step: Option<StepKey>) -> Result<StepFile, Status> {
        let step = step.ok_or_else(|| Status::invalid_argument("the chunk names no step"))?;
        let file = StepFile::new(&step.kind, step.owner_index, step.ordinal)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        if self.0.len() >= MAX_STEPS && !self.0.contains_key(&file) {
            return Err(Status::invalid_argument(format!("more than {MAX_STEPS} steps in one job")));
        }
        self.0.entry(file.clone()).or_insert(step);
        Ok(file)
    }

    /// The acknowledgement of a step, under its wire key. A step of an earlier call is named from its file.
    fn ack(&self, file: &StepFile, ack: StepAck) -> LogAck {
        let step = self.0.get(file).cloned().unwrap_or_else(|| key_of_file(file));
        LogAck { step: Some(step), durable_offset: ack.durable, sealed: ack.sealed }
    }
}

/// `kind-owner-ordinal` back to its parts. File names are made by [`StepFile::new`] only, so the parts are there; the first `_`
/// stands for `:` in the kinds that have one.
fn key_of_file(file: &StepFile) -> StepKey {
    let mut parts = file.as_str().splitn(2, '-');
    let kind = parts.next().unwrap_or_default();
    let numbers = parts.next().unwrap_or_default();
    let (owner, ordinal) = numbers.rsplit_once('-').unwrap_or((numbers, "0"));
    let split = ["hook", "cache", "artifact"].into_iter().find_map(|first| {
        let rest = kind.strip_prefix(first)?.strip_prefix('_')?;
        Some(format!("{first}:{rest}"))
    });
    let kind = split.unwrap_or_else(|| kind.to_owned());
    StepKey { kind, owner_index: owner.parse().unwrap_or(-1), ordinal: ordinal.parse().unwrap_or(0) }
}

async fn pump<S>(
    stream: LogStream,
    known: BTreeMap<StepFile, StepAck>,
    mut chunks: S,
    answers: &mpsc::Sender<Result<LogAck, Status>>,
    steps: &mut Steps,
) -> Result<(), Status>
where
    S: Stream<Item = Result<LogChunk, Status>> + Unpin,
{
    for (file, ack) in &known {
        if answers.send(Ok(steps.ack(file, *ack))).await.is_err() {
            return Ok(());
        }
    }
    loop {
        tokio::select! {
            acked = stream.acknowledged() => {
                for (file, ack) in acked? {
                    if answers.send(Ok(steps.ack(&file, ack))).await.is_err() {
                        return Ok(());
                    }
                }
            }
            chunk = chunks.next() => match chunk {
                None => break,
                Some(chunk) => take(&stream, steps, chunk?).await?,
            },
        }
    }
    drain(&stream, answers, steps).await
}

/// After the sender has closed its side: answers what was still being written.
async fn drain(
    stream: &LogStream,
    answers: &mpsc::Sender<Result<LogAck, Status>>,
    steps: &Steps,
) -> Result<(), Status> {
    stream.settled().await?;
    while let Some(acked) = stream.acknowledged_now()? {
        for (file, ack) in acked {
            if answers.send(Ok(steps.ack(&file, ack))).await.is_err() {
                return Ok(());
            }
        }
    }
    Ok(())
}

async fn take(stream: &LogStream, steps: &mut Steps, chunk: LogChunk) -> Result<(), Status> {
    match chunk.chunk {
        Some(Chunk::Data(LogData { step, offset, data })) => {
            if data.len() > MAX_CHUNK_BYTES || data.last() != Some(&b'\n') {
                return Err(Status::invalid_argument("LogData.data must be whole lines of at most 1 MiB together"));
            }
            let file = steps.file(step)?;
            metrics::counter!("kici_orch_log_chunks_received_total", "source" => "local").increment(1);
            stream.append(file, offset, data).await?;
        }
        Some(Chunk::Seal(LogSeal { step, offset, lines, missing_bytes, missing_lines })) => {
            let file = steps.file(step)?;
            let mark = SealMark { bytes: offset, lines, missing_bytes, missing_lines, complete: true };
            stream.seal(file, mark).await?;
        }
        Some(Chunk::Open(_)) => return Err(Status::invalid_argument("LogOpen stands only at the start of a call")),
        // A kind of chunk that a newer agent knows; what it means cannot be stored.
        None => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_keys_survive_the_way_through_a_file_name() {
        for (kind, owner, ordinal) in [
            ("step", 0, 0),
            ("hook:on_cancel", -1, 3),
            ("checkout", -1, 0),
            ("cache:restore", 2, 1),
            ("artifact:upload", -1, 0),
        ] {
            let file = StepFile::new(kind, owner, ordinal).unwrap();
            assert_eq!(key_of_file(&file), StepKey { kind: kind.to_owned(), owner_index: owner, ordinal });
        }
    }
}
