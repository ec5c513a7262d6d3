//! A simulated agent: it speaks the real protocol and only skips the steps.

use anyhow::{Context, Result, bail};
use kici_protocol::agent::agent_gateway_client::AgentGatewayClient;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::{
    AgentFrame, Heartbeat, JobAck, JobUpdate, Register, StepKey, StepUpdate, agent_frame::Frame,
};
use kici_protocol::common::JobRef;
use kici_protocol::{MAX_MESSAGE_BYTES, PROTOCOL_VERSION};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Request, Streaming};

/// Frames that may wait to be sent.
const OUTGOING: usize = 256;

/// The label that only simulated agents offer.
pub(crate) const LABEL: &str = "simulated";

/// Something that happened to a job, and when this process saw it.
pub(crate) enum Seen {
    /// It was offered.
    Offered(Instant),
    /// Its result is durable.
    Done,
}

/// A registered agent.
pub(crate) struct Agent {
    pub(crate) gateway: AgentGatewayClient<Channel>,
    pub(crate) token: MetadataValue<Ascii>,
    pub(crate) session: String,
    frames: mpsc::Sender<AgentFrame>,
    pub(super) answers: Streaming<kici_protocol::agent::OrchestratorFrame>,
    seq: u64,
    /// Number of the last terminal frame that is not acknowledged yet.
    terminal: Vec<u64>,
}

impl Agent {
    /// Connects and registers.
    pub(crate) async fn register(url: &str, token: &str, id: String) -> Result<Self> {
        let gateway = AgentGatewayClient::connect(url.to_owned()).await?;
        let mut gateway =
            gateway.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES);
        let token: MetadataValue<Ascii> = format!("Bearer {token}").parse()?;
        let (frames, outgoing) = mpsc::channel(OUTGOING);
        let register = Register {
            agent_id: id,
            labels: vec![LABEL.into()],
            platform: std::env::consts::OS.into(),
            arch: std::env::consts::ARCH.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            max_concurrency: 1,
            protocol_version: PROTOCOL_VERSION,
            hostname: "bench".into(),
            cpu_count: 1,
            // The repository is a directory, so only agents of this machine are given its jobs.
            machine_id: kici_sys::host::machine_id().unwrap_or_default(),
            ..Register::default()
        };
        frames.send(AgentFrame { seq: 1, frame: Some(Frame::Register(register)) }).await?;
        let mut request = Request::new(ReceiverStream::new(outgoing));
        request.metadata_mut().insert("authorization", token.clone());
        let mut answers = gateway.session(request).await?.into_inner();
        let session = loop {
            match answers.message().await?.context("the session ended before it began")?.frame {
                Some(Down::RegisterAck(ack)) => break ack.session_id,
                Some(Down::FrameAck(_)) => {}
                other => bail!("the agent was not accepted: {other:?}"),
            }
        };
        Ok(Self { gateway, token, session, frames, answers, seq: 1, terminal: Vec::new() })
    }

    /// Takes jobs and lets each succeed at once, until the session ends.
    pub(crate) async fn work(&mut self, seen: &mpsc::Sender<Seen>) -> Result<()> {
        while let Some(frame) = self.answers.message().await? {
            match frame.frame {
                Some(Down::JobOffer(offer)) => {
                    seen.send(Seen::Offered(Instant::now())).await?;
                    self.accept(offer.job).await?;
                }
                Some(Down::StartGranted(granted)) => self.succeed(granted.job, 0).await?,
                Some(Down::FrameAck(ack)) => {
                    for _ in self.terminal.extract_if(.., |seq| *seq <= ack.up_to_seq) {
                        seen.send(Seen::Done).await?;
                    }
                }
                Some(Down::FrameNack(nack)) => bail!("a frame was refused: {nack:?}"),
                Some(Down::Goodbye(goodbye)) => bail!("the session was closed: {goodbye:?}"),
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes one job up to its start.
    pub(crate) async fn start_one(&mut self) -> Result<Option<JobRef>> {
        while let Some(frame) = self.answers.message().await? {
            match frame.frame {
                Some(Down::JobOffer(offer)) => self.accept(offer.job).await?,
                Some(Down::StartGranted(granted)) => return Ok(granted.job),
                Some(Down::FrameNack(nack)) => bail!("a frame was refused: {nack:?}"),
                _ => {}
            }
        }
        bail!("the session ended")
    }

    /// Waits until the result of the one job is durable.
    pub(crate) async fn settled(&mut self) -> Result<()> {
        while let Some(frame) = self.answers.message().await? {
            if let Some(Down::FrameAck(ack)) = frame.frame {
                self.terminal.retain(|seq| *seq > ack.up_to_seq);
                if self.terminal.is_empty() {
                    return Ok(());
                }
            }
        }
        bail!("the session ended")
    }

    async fn accept(&mut self, job: Option<JobRef>) -> Result<()> {
        self.send(Frame::JobAck(JobAck { job: job.clone() })).await?;
        self.send(Frame::JobUpdate(JobUpdate { job, state: "running".into(), ..JobUpdate::default() })).await
    }

    /// Reports a step's state.
    pub(crate) async fn step(
        &mut self,
        job: Option<JobRef>,
        step: StepKey,
        state: &str,
        log: (u64, u64),
    ) -> Result<()> {
        let (log_bytes, log_lines) = log;
        let update = StepUpdate {
            job,
            step: Some(step),
            name: "bench".into(),
            state: state.into(),
            log_bytes,
            log_lines,
            ..StepUpdate::default()
        };
        self.send(Frame::StepUpdate(update)).await
    }

    /// Reports success.
    pub(crate) async fn succeed(&mut self, job: Option<JobRef>, log_bytes: u64) -> Result<()> {
        let update = JobUpdate { job, state: "success".into(), log_bytes, ..JobUpdate::default() };
        self.send(Frame::JobUpdate(update)).await?;
        self.terminal.push(self.seq);
        Ok(())
    }

    /// A sign of life.
    pub(super) async fn heartbeat(&mut self) -> Result<()> {
        self.send(Frame::Heartbeat(Heartbeat::default())).await
    }

    async fn send(&mut self, frame: Frame) -> Result<()> {
        self.seq += 1;
        Ok(self.frames.send(AgentFrame { seq: self.seq, frame: Some(frame) }).await?)
    }
}
