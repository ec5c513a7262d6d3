//! The one task that writes the outbox: it takes what is ready, syncs once per job, and hands it on to be sent.

use std::sync::Arc;
use std::time::Duration;

use kici_protocol::agent::AgentFrame;
use tokio::sync::mpsc;

use crate::job::Posting;
use crate::key::JobKey;
use crate::outbox::Outbox;

/// Words taken at once.
const BATCH: usize = 64;

/// How long words that are not a result wait for company.
const GATHER: Duration = Duration::from_millis(2);

/// Words of one job that are on disk, or at least tried to be.
#[derive(Debug)]
pub struct Kept {
    /// Of which job.
    pub job: JobKey,
    /// The words.
    pub frames: Vec<AgentFrame>,
    /// The result is among them.
    pub last: bool,
    /// Why they are only as safe as this process.
    pub unsafe_because: Option<String>,
}

/// Writes until nobody says anything any more. Which outbox is written to may change with the cluster.
pub async fn run(
    mut postings: mpsc::Receiver<Posting>,
    outbox: Arc<std::sync::Mutex<Option<Arc<Outbox>>>>,
    kept: mpsc::Sender<Kept>,
) {
    let mut batch = Vec::with_capacity(BATCH);
    while postings.recv_many(&mut batch, BATCH).await > 0 {
        if !batch.iter().any(|posting| posting.last) {
            // The result often follows the last step at once: one sync serves both.
            let more = postings.recv_many(&mut batch, BATCH);
            // Nothing came: what is there goes alone.
            let _ = tokio::time::timeout(GATHER, more).await;
        }
        let mut told = Vec::new();
        let mut parcels: Vec<Kept> = Vec::new();
        for posting in batch.drain(..) {
            let frame = AgentFrame { seq: 0, frame: Some(posting.frame) };
            told.extend(posting.kept);
            match parcels.iter_mut().find(|parcel| parcel.job == posting.job) {
                Some(parcel) => {
                    parcel.frames.push(frame);
                    parcel.last |= posting.last;
                }
                None => parcels.push(Kept {
                    job: posting.job,
                    frames: vec![frame],
                    last: posting.last,
                    unsafe_because: None,
                }),
            }
        }
        let target = outbox.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let written = tokio::task::spawn_blocking(move || {
            for parcel in &mut parcels {
                let result = match &target {
                    Some(outbox) => outbox.append(&parcel.job.file_name(), &parcel.frames),
                    None => Err(std::io::Error::other("there is no outbox before the first registration")),
                };
                parcel.unsafe_because = result.err().map(|error| error.to_string());
            }
            parcels
        });
        let Ok(parcels) = written.await else { return };
        for parcel in parcels {
            if kept.send(parcel).await.is_err() {
                return;
            }
        }
        for tell in told {
            // The job may be gone.
            let _ = tell.send(());
        }
    }
}
