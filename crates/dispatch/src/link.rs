//! The way to one agent: a bounded queue of frames, the cumulative acknowledgement, and the close.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::Stream;
use kici_engine::ids::SessionId;
use kici_protocol::NOT_ASSIGNED;
use kici_protocol::agent::orchestrator_frame::Frame;
use kici_protocol::agent::{FrameAck, OrchestratorFrame};
use kici_protocol::close::CloseReason;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::decide::settle::{OutOfOrder, Settled};
use crate::decide::violations::{Ownership, Violations};

/// Frames that wait for a slow agent. Senders wait beyond that; a session that does not read is ended by the keep-alive.
const QUEUE: usize = 256;

/// What a session answers with.
pub type SessionStream = Pin<Box<dyn Stream<Item = Result<OrchestratorFrame, Status>> + Send>>;

/// The session is over; nothing can be sent any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session has ended")]
pub(crate) struct SessionEnded;

#[derive(Debug)]
struct Shared {
    session_id: SessionId,
    began: Instant,
    violations: Mutex<Violations>,
    settled: Mutex<Settled>,
    ack_due: Notify,
    closing: CancellationToken,
    reason: Mutex<Option<(CloseReason, String)>>,
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    frames: mpsc::Sender<Box<Frame>>,
    shared: Arc<Shared>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// A link and the stream that carries its frames.
    pub fn new(session_id: SessionId) -> (Self, SessionStream) {
        let (frames, queue) = mpsc::channel(QUEUE);
        let shared = Arc::new(Shared {
            session_id,
            began: Instant::now(),
            violations: Mutex::default(),
            settled: Mutex::default(),
            ack_due: Notify::new(),
            closing: CancellationToken::new(),
            reason: Mutex::default(),
        });
        let outbound = Outbound { queue, shared: shared.clone(), seq: 0, ack: None, end: End::Open };
        let stream = futures::stream::unfold(outbound, Outbound::next);
        (Self { frames, shared }, Box::pin(stream))
    }

    /// The session this link belongs to.
    pub fn session_id(&self) -> SessionId {
        self.shared.session_id
    }

    /// Queues a frame; waits while the agent is slow.
    pub async fn send(&self, frame: Frame) -> Result<(), SessionEnded> {
        tokio::select! {
            biased;
            () = self.shared.closing.cancelled() => Err(SessionEnded),
            sent = self.frames.send(Box::new(frame)) => sent.map_err(|_| SessionEnded),
        }
    }

    /// Queues a frame at once; fails when the session is over or its queue is full.
    pub fn try_send(&self, frame: Frame) -> Result<(), SessionEnded> {
        if self.shared.closing.is_cancelled() {
            return Err(SessionEnded);
        }
        self.frames.try_send(Box::new(frame)).map_err(|_| SessionEnded)
    }

    /// Ends the session. The first reason counts.
    pub fn close(&self, reason: CloseReason, message: impl Into<String>) {
        lock(&self.shared.reason).get_or_insert_with(|| (reason, message.into()));
        self.shared.closing.cancel();
    }

    /// Counts what was found of a claim to a job, made in the session or next to it. True when that ended the session.
    pub fn violates(&self, verdict: Ownership) -> bool {
        let over = lock(&self.shared.violations).record(self.shared.began.elapsed(), verdict);
        if over {
            self.close(CloseReason::OwnershipViolations, NOT_ASSIGNED);
        }
        over
    }

    /// The session ended from the other side.
    pub fn ended(&self) {
        self.shared.closing.cancel();
    }

    /// Cancelled once the session is closed.
    pub fn closing(&self) -> CancellationToken {
        self.shared.closing.clone()
    }

    /// Resolves once the session is closed.
    pub async fn closed(&self) {
        self.shared.closing.cancelled().await;
    }

    /// Takes in the number of the next frame from the agent.
    pub fn opened(&self, seq: u64) -> Result<(), OutOfOrder> {
        lock(&self.shared.settled).open(seq)
    }

    /// A frame is committed or refused.
    pub fn settle(&self, seq: u64) {
        if lock(&self.shared.settled).settle(seq) {
            self.shared.ack_due.notify_one();
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum End {
    Open,
    SaidGoodbye(CloseReason, String),
    Over,
}

struct Outbound {
    queue: mpsc::Receiver<Box<Frame>>,
    shared: Arc<Shared>,
    seq: u64,
    /// An acknowledgement that goes out behind so many queued frames.
    ack: Option<(u64, usize)>,
    end: End,
}

impl Outbound {
    fn frame(&mut self, frame: Frame) -> OrchestratorFrame {
        self.seq += 1;
        OrchestratorFrame { seq: self.seq, frame: Some(frame) }
    }

    async fn next(mut self) -> Option<(Result<OrchestratorFrame, Status>, Self)> {
        match std::mem::replace(&mut self.end, End::Over) {
            End::Over => return None,
            End::SaidGoodbye(reason, message) => return Some((Err(reason.status(&message)), self)),
            End::Open => self.end = End::Open,
        }
        loop {
            if let Some((up_to_seq, 0)) = self.ack {
                self.ack = None;
                let frame = self.frame(Frame::FrameAck(FrameAck { up_to_seq }));
                return Some((Ok(frame), self));
            }
            tokio::select! {
                biased;
                () = self.shared.closing.cancelled() => return self.goodbye(),
                Some(frame) = self.queue.recv() => {
                    if let Some((_, before)) = &mut self.ack {
                        *before -= 1;
                    }
                    let frame = self.frame(*frame);
                    return Some((Ok(frame), self));
                }
                () = self.shared.ack_due.notified(), if self.ack.is_none() => self.announce(),
            }
        }
    }

    /// A refusal is queued before its frame counts as settled: what is in the queue after the look at what is settled goes out
    /// first. The other way round an agent would take a refused result for one that was taken, and forget it.
    fn announce(&mut self) {
        let up_to_seq = lock(&self.shared.settled).announce();
        self.ack = up_to_seq.map(|up_to_seq| (up_to_seq, self.queue.len()));
    }

    /// What was queued before the close goes out first: an agent that asked gets its answer.
    fn goodbye(mut self) -> Option<(Result<OrchestratorFrame, Status>, Self)> {
        if let Ok(frame) = self.queue.try_recv() {
            let frame = self.frame(*frame);
            return Some((Ok(frame), self));
        }
        let (reason, message) = lock(&self.shared.reason).clone()?;
        let frame = self.frame(Frame::Goodbye(reason.goodbye(&message)));
        self.end = End::SaidGoodbye(reason, message);
        Some((Ok(frame), self))
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use kici_protocol::agent::{AgentDrain, FrameNack};
    use uuid::Uuid;

    use super::*;

    fn nack(seq: u64) -> Frame {
        Frame::FrameNack(FrameNack { seq, ..FrameNack::default() })
    }

    #[tokio::test]
    async fn a_refusal_that_comes_during_the_look_precedes_the_acknowledgement_that_covers_it() {
        let (frames, queue) = mpsc::channel(QUEUE);
        let (link, _) = Link::new(SessionId::from_uuid(Uuid::from_u128(1)));
        let link = Link { frames, ..link };
        let mut outbound = Outbound { queue, shared: link.shared.clone(), seq: 0, ack: None, end: End::Open };
        for seq in 1..=3 {
            link.opened(seq).unwrap();
        }
        link.settle(1);
        // The stream has found its queue empty and is about to acknowledge the first frame.
        link.send(nack(2)).await.unwrap();
        link.settle(2);
        outbound.announce();
        // This one is not covered: it may go out behind.
        link.send(nack(3)).await.unwrap();
        link.settle(3);
        let mut seen = Vec::new();
        for _ in 0..4 {
            let (frame, next) = outbound.next().await.unwrap();
            outbound = next;
            seen.push(frame.unwrap().frame.unwrap());
        }
        let ack = |up_to_seq| Frame::FrameAck(FrameAck { up_to_seq });
        assert_eq!(seen, [nack(2), ack(2), nack(3), ack(3)]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn whoever_refuses_and_settles_beside_others_is_heard_before_the_acknowledgement() {
        const FRAMES: u64 = 20_000;
        let (link, mut stream) = Link::new(SessionId::from_uuid(Uuid::from_u128(1)));
        for seq in 1..=FRAMES {
            link.opened(seq).unwrap();
        }
        let tasks = tokio_util::task::TaskTracker::new();
        for task in 0..4 {
            let link = link.clone();
            tasks.spawn(async move {
                for seq in (1..=FRAMES).filter(|seq| seq % 4 == task) {
                    if seq % 3 == 0 {
                        link.send(nack(seq)).await.unwrap();
                    }
                    link.settle(seq);
                }
            });
        }
        let (mut acked, mut refused) = (0, 0);
        while acked < FRAMES {
            match stream.next().await.unwrap().unwrap().frame {
                Some(Frame::FrameAck(ack)) => acked = ack.up_to_seq,
                Some(Frame::FrameNack(nack)) => {
                    assert!(nack.seq > acked, "{} was acknowledged with {acked} and then refused", nack.seq);
                    refused += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(refused, FRAMES / 3);
    }

    #[tokio::test]
    async fn acks_are_merged_and_goodbye_is_the_last_frame() {
        let (link, mut stream) = Link::new(SessionId::from_uuid(Uuid::from_u128(1)));
        for seq in 1..=3 {
            link.opened(seq).unwrap();
        }
        link.settle(2);
        link.send(Frame::AgentDrain(AgentDrain { drain: true })).await.unwrap();
        link.settle(1);
        link.settle(3);
        let first = stream.next().await.unwrap().unwrap();
        assert!(matches!(first.frame, Some(Frame::AgentDrain(_))));
        let second = stream.next().await.unwrap().unwrap();
        assert_eq!(second.frame, Some(Frame::FrameAck(FrameAck { up_to_seq: 3 })));
        assert_eq!(second.seq, 2);
        link.close(CloseReason::Superseded, "newer");
        link.close(CloseReason::Internal, "later");
        let Some(Frame::Goodbye(goodbye)) = stream.next().await.unwrap().unwrap().frame else { panic!("goodbye") };
        assert_eq!(goodbye.code, "SUPERSEDED");
        assert_eq!(stream.next().await.unwrap().unwrap_err().code(), tonic::Code::Aborted);
        assert!(stream.next().await.is_none());
        assert_eq!(link.send(Frame::AgentDrain(AgentDrain { drain: true })).await, Err(SessionEnded));
    }
}
