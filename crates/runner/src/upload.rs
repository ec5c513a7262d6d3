//! Sends the logs of one job through `StreamLogs` and starts again where the orchestrator stopped, as often as it takes.

use std::sync::Arc;
use std::time::Duration;

use kici_protocol::SESSION_ID_HEADER;
use kici_protocol::agent::{LogAck, LogChunk, LogData, LogOpen, LogSeal, log_chunk};
use secrecy::SecretString;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status, Streaming};

use crate::key::JobKey;
use crate::session::{Session, authorize};
use crate::spool::{Next, Spool};

/// Bytes of one chunk.
const CHUNK_BYTES: usize = 256 * 1024;
/// Unacknowledged bytes that may be on their way.
const IN_FLIGHT_BYTES: u64 = 8 * 1024 * 1024;
/// Chunks that may wait for the network.
const CHUNKS: usize = 8;
/// Before a broken stream is tried again on the same session; longer with each refusal.
const PAUSE: Duration = Duration::from_millis(500);

/// Refusals in a row after which the logs of a settled job are given up.
const MAX_REFUSALS: u32 = 10;

/// How one stream ended.
enum End {
    /// Everything is sealed.
    Done,
    /// To be tried again.
    Broken,
    /// The orchestrator does not want the logs of this job.
    Unwanted,
}

/// Sends until everything is sealed, then deletes the spool. `over` is true once the orchestrator has settled the result of the
/// job: from then on repeated refusals end it too.
pub async fn run(
    spool: Arc<Spool>,
    job: JobKey,
    token: Option<SecretString>,
    mut sessions: watch::Receiver<Option<Session>>,
    over: watch::Receiver<bool>,
) {
    let mut refusals = 0;
    loop {
        while spool.is_empty() {
            if matches!(spool.next(CHUNK_BYTES, IN_FLIGHT_BYTES), Ok(Next::Done)) {
                return spool.delete();
            }
            spool.more().await;
        }
        let session = match sessions.wait_for(Option::is_some).await {
            Ok(session) => session.clone(),
            Err(_) => return,
        };
        let Some(session) = session else { continue };
        let id = session.id.clone();
        match stream(&spool, job, token.as_ref(), session).await {
            Ok(End::Done) => return spool.delete(),
            Ok(End::Unwanted) => {
                refusals += 1;
                if *over.borrow() && refusals >= MAX_REFUSALS {
                    tracing::warn!(%job, "the orchestrator does not take the rest of the log; dropped");
                    return spool.delete();
                }
            }
            Ok(End::Broken) => refusals = 0,
            Err(error) => tracing::error!(%job, %error, "the spool cannot be read; trying again"),
        }
        // A broken stream often means a broken session: wait for the next one, but not for ever.
        let changed = sessions.wait_for(|now| now.as_ref().is_none_or(|now| now.id != id));
        if let Ok(Err(_)) = tokio::time::timeout(PAUSE * (refusals + 1), changed).await {
            return;
        }
    }
}

async fn stream(spool: &Spool, job: JobKey, token: Option<&SecretString>, session: Session) -> std::io::Result<End> {
    let (out, chunks) = mpsc::channel(CHUNKS);
    let open = log_chunk::Chunk::Open(LogOpen { job: Some(job.to_ref()) });
    // The channel is new and has room.
    let _ = out.send(LogChunk { chunk: Some(open) }).await;
    let mut request = Request::new(ReceiverStream::new(chunks));
    authorize(&mut request, token);
    if let Ok(id) = MetadataValue::try_from(session.id.as_str()) {
        request.metadata_mut().insert(SESSION_ID_HEADER, id);
    }
    let mut client = session.client;
    let mut acks = match client.stream_logs(request).await {
        Ok(response) => response.into_inner(),
        Err(status) => return Ok(judge(&status)),
    };
    spool.rewind();
    loop {
        let chunk = match spool.next(CHUNK_BYTES, IN_FLIGHT_BYTES)? {
            Next::Data(step, offset, data) => {
                log_chunk::Chunk::Data(LogData { step: Some(step), offset, data: data.into() })
            }
            Next::Seal(step, seal) => log_chunk::Chunk::Seal(LogSeal {
                step: Some(step),
                offset: seal.offset,
                lines: seal.lines,
                missing_bytes: seal.missing_bytes,
                missing_lines: seal.missing_lines,
            }),
            Next::Done => return Ok(End::Done),
            Next::Wait => {
                tokio::select! {
                    ack = acks.message() => if let Some(end) = take(spool, ack) { return Ok(end) },
                    () = spool.more() => {}
                }
                continue;
            }
        };
        if let Some(end) = send(spool, &out, chunk, &mut acks).await {
            return Ok(end);
        }
    }
}

/// Hands a chunk to the network and takes acknowledgements while it has no room.
async fn send(
    spool: &Spool,
    out: &mpsc::Sender<LogChunk>,
    chunk: log_chunk::Chunk,
    acks: &mut Streaming<LogAck>,
) -> Option<End> {
    let send = out.send(LogChunk { chunk: Some(chunk) });
    tokio::pin!(send);
    loop {
        tokio::select! {
            sent = &mut send => return sent.is_err().then_some(End::Broken),
            ack = acks.message() => if let Some(end) = take(spool, ack) { return Some(end) },
        }
    }
}

fn take(spool: &Spool, ack: Result<Option<LogAck>, Status>) -> Option<End> {
    match ack {
        Ok(Some(ack)) => {
            if let Some(step) = &ack.step {
                spool.ack(step, ack.durable_offset, ack.sealed);
            }
            None
        }
        Ok(None) => Some(End::Broken),
        Err(status) => Some(judge(&status)),
    }
}

fn judge(status: &Status) -> End {
    tracing::debug!(code = %status.code(), message = status.message(), "a log stream ended");
    match status.code() {
        Code::NotFound | Code::PermissionDenied | Code::FailedPrecondition | Code::Aborted => End::Unwanted,
        _ => End::Broken,
    }
}
