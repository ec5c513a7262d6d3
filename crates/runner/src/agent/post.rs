//! What of the outbox still waits for the orchestrator, in the order in which it was said, per delivery of a job.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kici_protocol::agent::{AgentFrame, NackCode};
use kici_protocol::common::JobRef;
use tokio::time::Instant;

/// A frame without an answer is sent again after this long.
const RESEND_AFTER: Duration = Duration::from_secs(15);
/// First and longest pause after a refusal.
const REFUSED_PAUSE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// The waiting frames of one delivery.
#[derive(Debug)]
pub struct Parcel {
    job: JobRef,
    records: VecDeque<Record>,
    /// The result of the job is among them, or was.
    complete: bool,
}

#[derive(Debug)]
struct Record {
    frame: AgentFrame,
    /// Number and time of its last sending in this session.
    sent: Option<(u64, Instant)>,
    not_before: Option<Instant>,
    refusals: u32,
}

/// What is to be done with the record on disk.
#[derive(Debug, PartialEq, Eq)]
pub enum Settled {
    /// All is acknowledged: delete it.
    Delete(String),
    /// The orchestrator will never take it: put it aside.
    Bury(String, String),
}

/// All parcels, by the name of their record on disk.
#[derive(Debug, Default)]
pub struct Post {
    parcels: BTreeMap<String, Parcel>,
}

impl Post {
    /// Adds frames that are on disk now. `complete` says that nothing of this delivery will follow.
    pub fn add(&mut self, file: &str, job: JobRef, frames: impl IntoIterator<Item = AgentFrame>, complete: bool) {
        let parcel =
            self.parcels.entry(file.to_owned()).or_insert(Parcel { job, records: VecDeque::new(), complete: false });
        let record = |frame| Record { frame, sent: None, not_before: None, refusals: 0 };
        parcel.records.extend(frames.into_iter().map(record));
        parcel.complete |= complete;
    }

    /// Forgets everything; the records on disk stay.
    pub fn clear(&mut self) {
        self.parcels.clear();
    }

    /// Drops one delivery; true when there was one.
    pub fn drop_parcel(&mut self, file: &str) -> bool {
        self.parcels.remove(file).is_some()
    }

    /// Whether something of a delivery waits.
    pub fn has(&self, file: &str) -> bool {
        self.parcels.contains_key(file)
    }

    /// Deliveries whose result waits.
    pub fn pending(&self) -> Vec<JobRef> {
        self.parcels.values().filter(|p| p.complete && !p.records.is_empty()).map(|p| p.job.clone()).collect()
    }

    /// Frames that wait.
    pub fn len(&self) -> usize {
        self.parcels.values().map(|parcel| parcel.records.len()).sum()
    }

    /// A new session: nothing of the old one's numbers counts.
    pub fn new_session(&mut self) {
        for record in self.parcels.values_mut().flat_map(|parcel| &mut parcel.records) {
            record.sent = None;
        }
    }

    /// Sends what is due through `send`, which numbers a frame or says that there is no room now.
    pub fn flush(&mut self, now: Instant, mut send: impl FnMut(&AgentFrame) -> Option<u64>) {
        for parcel in self.parcels.values_mut() {
            for record in &mut parcel.records {
                if record.sent.is_some_and(|(_, at)| now.duration_since(at) < RESEND_AFTER) {
                    continue;
                }
                if record.not_before.is_some_and(|at| now < at) {
                    // What follows must not overtake it.
                    break;
                }
                match send(&record.frame) {
                    Some(seq) => record.sent = Some((seq, now)),
                    None => return,
                }
            }
        }
    }

    /// Everything sent up to `seq` is settled.
    pub fn acked(&mut self, seq: u64) -> Vec<Settled> {
        for parcel in self.parcels.values_mut() {
            parcel.records.retain(|record| record.sent.is_none_or(|(sent, _)| sent > seq));
        }
        self.finished()
    }

    /// A frame was refused: some refusals are final, the others are tried again later.
    pub fn refused(&mut self, seq: u64, code: NackCode, detail: &str, retry: Duration, now: Instant) -> Vec<Settled> {
        let mut buried = Vec::new();
        for (file, parcel) in &mut self.parcels {
            let Some(at) = parcel.records.iter().position(|r| r.sent.is_some_and(|(sent, _)| sent == seq)) else {
                continue;
            };
            match code {
                NackCode::StaleEpoch => {
                    parcel.records.remove(at);
                }
                NackCode::Invalid | NackCode::TooLarge => {
                    parcel.records.remove(at);
                    buried.push(Settled::Bury(file.clone(), detail.to_owned()));
                }
                _ => {
                    let record = &mut parcel.records[at];
                    let pause = REFUSED_PAUSE.0 * 2_u32.saturating_pow(record.refusals.min(8));
                    record.sent = None;
                    record.refusals += 1;
                    record.not_before = Some(now + pause.min(REFUSED_PAUSE.1).max(retry));
                }
            }
        }
        for settled in &buried {
            if let Settled::Bury(file, _) = settled {
                self.parcels.remove(file);
            }
        }
        buried.extend(self.finished());
        buried
    }

    fn finished(&mut self) -> Vec<Settled> {
        let done = |parcel: &Parcel| parcel.complete && parcel.records.is_empty();
        let files: Vec<String> =
            self.parcels.iter().filter(|(_, parcel)| done(parcel)).map(|(file, _)| file.clone()).collect();
        files
            .into_iter()
            .map(|file| {
                self.parcels.remove(&file);
                Settled::Delete(file)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> AgentFrame {
        AgentFrame::default()
    }

    #[tokio::test(start_paused = true)]
    async fn frames_are_sent_in_order_again_and_settled_by_a_cumulative_ack() {
        let mut post = Post::default();
        post.add("a", JobRef::default(), [frame(), frame()], false);
        let mut seq = 1;
        let mut send = |_: &AgentFrame| {
            seq += 1;
            Some(seq)
        };
        post.flush(Instant::now(), &mut send);
        post.flush(Instant::now(), &mut send);
        assert!(post.acked(3).is_empty(), "the job has not ended");
        post.add("a", JobRef::default(), [frame()], true);
        assert_eq!((post.len(), post.pending().len()), (1, 1));
        post.flush(Instant::now(), &mut send);
        tokio::time::advance(RESEND_AFTER).await;
        post.flush(Instant::now(), &mut send);
        assert!(post.acked(4).is_empty());
        assert_eq!(post.acked(5), [Settled::Delete("a".into())]);
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_are_final_or_tried_again() {
        let mut post = Post::default();
        for file in ["busy", "invalid", "stale"] {
            post.add(file, JobRef::default(), [frame()], true);
        }
        let mut seq = 0;
        post.flush(Instant::now(), |_| {
            seq += 1;
            Some(seq)
        });
        let none = Duration::ZERO;
        assert!(post.refused(1, NackCode::Unavailable, "", none, Instant::now()).is_empty());
        let buried = post.refused(2, NackCode::Invalid, "why", none, Instant::now());
        assert_eq!(buried, [Settled::Bury("invalid".into(), "why".into())]);
        let gone = post.refused(3, NackCode::StaleEpoch, "", none, Instant::now());
        assert_eq!(gone, [Settled::Delete("stale".into())]);
        let mut sent = 0;
        post.flush(Instant::now(), |_| {
            sent += 1;
            Some(9)
        });
        assert_eq!(sent, 0);
        tokio::time::advance(Duration::from_secs(30)).await;
        post.flush(Instant::now(), |_| Some(9));
        assert_eq!(post.acked(9), [Settled::Delete("busy".into())]);
    }
}
