//! One control session: authentication, frames in, acknowledgements out, and its end.
//!
//! Frames of one job are applied in order; those of different jobs do not wait for each other. A frame is settled once it
//! is committed or refused, and `FrameAck` follows cumulatively.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt};
use kici_engine::ids::{AgentId, SessionId};
use kici_protocol::agent::agent_frame::Frame as Up;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::{AgentFrame, AgentStatus, FrameNack, NackCode, Register};
use kici_protocol::close::CloseReason;
use kici_store::model::JobRef;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::decide::gates::{Refused, TokenFacts};
use crate::decide::rate::{Meter, Rate};
use crate::dispatcher::Dispatcher;
use crate::frames::{JobFrame, read};
use crate::link::{Link, SessionStream};
use crate::offer::millis;
use crate::registry::slots::Report;

/// Frames of one session that wait for the database; reading stops beyond that.
const MAX_OPEN: usize = 512;
/// Jobs whose ownership the database confirmed, remembered per session.
pub(crate) const MAX_ACCEPTED: usize = 1024;

/// A frame of a job that waits for its turn.
pub(crate) struct Queued {
    pub seq: u64,
    pub frame: JobFrame,
    _permit: OwnedSemaphorePermit,
}

/// What the tasks of one session share.
pub(crate) struct Session {
    pub link: Link,
    pub agent_id: AgentId,
    pub began: Instant,
    pub accepted: Mutex<HashSet<JobRef>>,
    lanes: Mutex<HashMap<JobRef, VecDeque<Queued>>>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub fn id(&self) -> SessionId {
        self.link.session_id()
    }

    /// Refuses a frame; its number counts as settled.
    pub async fn nack(&self, seq: u64, code: NackCode, detail: impl Into<String>, retry_after_ms: u64) {
        let nack = FrameNack { seq, code: code.into(), detail: detail.into(), retry_after_ms };
        // The refusal precedes the acknowledgement that covers it. If the session is over, neither matters.
        let _ = self.link.send(Down::FrameNack(nack)).await;
        self.link.settle(seq);
    }

    /// Queues a frame of a job. True when the caller must start a task for the job.
    fn enqueue(&self, job: JobRef, queued: Queued) -> bool {
        let mut lanes = lock(&self.lanes);
        if let Some(lane) = lanes.get_mut(&job) {
            lane.push_back(queued);
            return false;
        }
        lanes.insert(job, VecDeque::from([queued]));
        true
    }

    /// All frames of a job that wait. None: there are none, and the job's task ends.
    pub fn take(&self, job: JobRef) -> Option<VecDeque<Queued>> {
        let mut lanes = lock(&self.lanes);
        let lane = lanes.get_mut(&job)?;
        if lane.is_empty() {
            lanes.remove(&job);
            return None;
        }
        Some(std::mem::take(lane))
    }
}

impl Dispatcher {
    /// Serves one control session: checks the token, then answers with the stream of frames for the agent.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` for a bad token, `UNAVAILABLE` when it cannot be checked or this instance stops.
    pub async fn session<S>(self: &Arc<Self>, metadata: &MetadataMap, inbound: S) -> Result<SessionStream, Status>
    where
        S: Stream<Item = Result<AgentFrame, Status>> + Send + Unpin + 'static,
    {
        if self.stopping.is_cancelled() {
            return Err(CloseReason::GoingAway.status("the orchestrator stops; come back"));
        }
        let token = self.authenticate(metadata).await?;
        let (link, stream) = Link::new(SessionId::mint(self.ids.as_ref()));
        let this = self.clone();
        self.tasks.spawn(async move { this.serve(link, inbound, token).await });
        Ok(stream)
    }

    async fn serve<S>(self: Arc<Self>, link: Link, mut inbound: S, token: Option<TokenFacts>)
    where
        S: Stream<Item = Result<AgentFrame, Status>> + Send + Unpin,
    {
        let Some((seq, register)) = self.first_frame(&link, &mut inbound).await else { return };
        if let Err(refused) = self.register(&link, &register, token.as_ref()).await {
            return self.refuse_session(&link, &register, &refused);
        }
        link.settle(seq);
        // `register` accepted the name, so it parses.
        let Ok(agent_id) = AgentId::new(register.agent_id) else { return };
        let session = Arc::new(Session {
            link: link.clone(),
            agent_id,
            began: Instant::now(),
            accepted: Mutex::default(),
            lanes: Mutex::default(),
        });
        self.read_frames(&session, &mut inbound, token.as_ref()).await;
        link.ended();
        self.session_over(link.session_id(), None).await;
    }

    async fn first_frame<S>(&self, link: &Link, inbound: &mut S) -> Option<(u64, Register)>
    where
        S: Stream<Item = Result<AgentFrame, Status>> + Send + Unpin,
    {
        let first = tokio::select! {
            () = self.stopping.cancelled() => {
                link.close(CloseReason::GoingAway, "the orchestrator stops; come back");
                return None;
            }
            first = timeout(self.config.register_timeout, inbound.next()) => first,
        };
        match first {
            Err(_) => {
                link.close(CloseReason::AuthTimeout, "no Register came in time");
                None
            }
            Ok(Some(Ok(AgentFrame { seq, frame: Some(Up::Register(register)) }))) => match link.opened(seq) {
                Ok(()) => Some((seq, register)),
                Err(error) => {
                    link.close(CloseReason::Protocol, error.to_string());
                    None
                }
            },
            Ok(Some(Ok(_))) => {
                link.close(CloseReason::Protocol, "the first frame must be Register");
                None
            }
            Ok(_) => {
                link.ended();
                None
            }
        }
    }

    fn refuse_session(&self, link: &Link, register: &Register, refused: &Refused) {
        tracing::warn!(
            agent = register.agent_id,
            reason = refused.reason.as_str(),
            message = refused.message,
            "a registration was refused"
        );
        link.close(refused.reason, refused.message.clone());
    }

    async fn read_frames<S>(self: &Arc<Self>, session: &Arc<Session>, inbound: &mut S, token: Option<&TokenFacts>)
    where
        S: Stream<Item = Result<AgentFrame, Status>> + Send + Unpin,
    {
        let open = Arc::new(Semaphore::new(MAX_OPEN));
        let mut meter = Meter::new(self.config.rate);
        loop {
            let permit = tokio::select! {
                () = session.link.closed() => return,
                // The semaphore is never closed.
                permit = open.clone().acquire_owned() => match permit { Ok(permit) => permit, Err(_) => return },
            };
            let frame = tokio::select! {
                () = session.link.closed() => return,
                frame = inbound.next() => frame,
            };
            let frame = match frame {
                Some(Ok(frame)) => frame,
                Some(Err(status)) if is_unreadable(&status) => {
                    return session.link.close(CloseReason::InvalidMessage, "a frame could not be read");
                }
                Some(Err(_)) | None => return,
            };
            if let Err(error) = session.link.opened(frame.seq) {
                return session.link.close(CloseReason::Protocol, error.to_string());
            }
            self.registry.seen(session.id());
            self.take_frame(session, frame, permit, &mut meter, token).await;
        }
    }

    async fn take_frame(
        self: &Arc<Self>,
        session: &Arc<Session>,
        frame: AgentFrame,
        permit: OwnedSemaphorePermit,
        meter: &mut Meter,
        token: Option<&TokenFacts>,
    ) {
        let seq = frame.seq;
        let size = prost::Message::encoded_len(&frame);
        // A frame of a newer build is passed over.
        let Some(frame) = frame.frame else { return session.link.settle(seq) };
        let frame = match frame {
            Up::Heartbeat(_) => return session.link.settle(seq),
            Up::FrameNack(nack) => {
                tracing::warn!(agent = %session.agent_id, refused = nack.seq, detail = nack.detail, "the agent refused a frame");
                return session.link.settle(seq);
            }
            Up::AgentStatus(status) => {
                self.agent_status(session, status);
                return session.link.settle(seq);
            }
            Up::Register(register) => {
                match self.register_again(&session.link, &register, token).await {
                    Ok(()) => session.link.settle(seq),
                    Err(refused) => self.refuse_session(&session.link, &register, &refused),
                }
                return;
            }
            of_job => of_job,
        };
        let (job, frame) = match read(frame) {
            Ok(read) => read,
            Err(problem) => return session.nack(seq, NackCode::Invalid, problem, 0).await,
        };
        if !self.exempt(session, job, &frame) {
            match meter.take(session.began.elapsed(), size) {
                Rate::Within => {}
                Rate::Over { retry_after } => {
                    let wait = millis(retry_after).max(1);
                    return session.nack(seq, NackCode::RateLimited, "the session sends too much", wait).await;
                }
                Rate::Flood => {
                    return session.link.close(CloseReason::Protocol, "the session sent too much for too long");
                }
            }
        }
        // A sign of life of a job that is held here needs no look at the database and no turn.
        if matches!(frame, JobFrame::Heartbeat) && self.registry.beat(session.id(), job, self.clock.now()) {
            return session.link.settle(seq);
        }
        if session.enqueue(job, Queued { seq, frame, _permit: permit }) {
            let this = self.clone();
            let session = session.clone();
            self.tasks.spawn(async move { this.apply_frames(&session, job).await });
        }
    }

    /// Heartbeats, answers, results, and the request to start a job that is held: an agent that works must never be kept
    /// from saying so.
    fn exempt(&self, session: &Session, job: JobRef, frame: &JobFrame) -> bool {
        match frame {
            JobFrame::Heartbeat | JobFrame::Ack | JobFrame::Reject { .. } | JobFrame::Finished(_) => true,
            JobFrame::Start => {
                self.registry.with_job(session.id(), job, |tracked| !tracked.started).unwrap_or_default()
            }
            JobFrame::Step(step) => step.status.is_terminal(),
            JobFrame::Cancelling { .. } | JobFrame::CancelAnswer(_) => false,
        }
    }

    fn agent_status(&self, session: &Session, status: AgentStatus) {
        let report = Report {
            active_jobs: status.active_jobs,
            draining: status.draining,
            resetting: status.resetting,
            degraded: status.degraded.iter().take(10).map(|text| text.chars().take(200).collect()).collect(),
        };
        if let Some(held) = self.registry.status(session.id(), report) {
            tracing::debug!(agent = %session.agent_id, held, reported = status.active_jobs, "the agent counts its jobs otherwise");
        }
        self.wake();
    }
}

fn is_unreadable(status: &Status) -> bool {
    matches!(status.code(), tonic::Code::Internal | tonic::Code::OutOfRange | tonic::Code::InvalidArgument)
        && std::error::Error::source(status).is_none()
}
