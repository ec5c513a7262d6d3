//! The connection to the orchestrator: found again with growing pauses, registered anew each time, watched by keep-alives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kici_protocol::MAX_MESSAGE_BYTES;
use kici_protocol::agent::agent_gateway_client::AgentGatewayClient;
use kici_protocol::agent::{
    AgentFrame, OrchestratorFrame, Register, RegisterAck, Retry, agent_frame, orchestrator_frame,
};
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use crate::config::Config;

/// Frames that may wait for the network.
const OUT_FRAMES: usize = 1_024;
/// The answer to Register must come in this time.
const REGISTER_LIMIT: Duration = Duration::from_secs(20);
/// Longest pause between two tries.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Longest pause while a job is held, so that a cut is over long before its recovery window.
const MAX_PAUSE_HOLDING: Duration = Duration::from_secs(5);
/// Exit code for what only an operator can mend (`EX_CONFIG` of sysexits.h).
pub const EXIT_CONFIG: u8 = 78;

/// The typed client.
pub type Client = AgentGatewayClient<Channel>;

/// A registered session.
#[derive(Clone, Debug)]
pub struct Session {
    /// For further calls on the same connection.
    pub client: Client,
    /// Its id at the orchestrator.
    pub id: String,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The peer closed it.
    Closed,
    /// A keep-alive was not answered: the peer may have noticed later than we did.
    Silent,
}

/// What the connection tells.
#[derive(Debug)]
pub enum LinkEvent {
    /// A connection stands; what to register with?
    NeedRegister(oneshot::Sender<Register>),
    /// Registered. Frames for the orchestrator go into `out`, numbered from 2.
    Up {
        /// The answer.
        ack: Box<RegisterAck>,
        /// To the orchestrator.
        out: mpsc::Sender<AgentFrame>,
        /// The session.
        session: Session,
    },
    /// A frame of the orchestrator.
    Frame(Box<OrchestratorFrame>),
    /// The session is over; a new one is tried.
    Down(Cut),
    /// There is no use in trying again.
    Refused {
        /// Why.
        message: String,
        /// What the program exits with.
        exit: u8,
    },
}

/// Adds the token to a call.
pub fn authorize<T>(request: &mut Request<T>, token: Option<&SecretString>) {
    let value = token.and_then(|token| MetadataValue::try_from(format!("Bearer {}", token.expose_secret())).ok());
    if let Some(mut value) = value {
        value.set_sensitive(true);
        request.metadata_mut().insert("authorization", value);
    }
}

/// Why a session ended, and what to do now.
enum End {
    Again(Cut),
    AtOnce,
    Never { message: String, exit: u8 },
}

/// Keeps a session until `stop`, or until there is no use in it. `holding` is true while jobs are held.
pub async fn keep(
    config: Arc<Config>,
    holding: Arc<AtomicBool>,
    events: mpsc::Sender<LinkEvent>,
    stop: CancellationToken,
) {
    let mut tries: u32 = 0;
    while !stop.is_cancelled() {
        let mut registered = false;
        let end = tokio::select! {
            end = one_session(&config, &events, &mut registered) => end,
            () = stop.cancelled() => return,
        };
        if registered {
            tries = 0;
        }
        let (cut, at_once) = match end {
            End::Never { message, exit } => {
                // The receiver may be gone already at a shutdown.
                let _ = events.send(LinkEvent::Refused { message, exit }).await;
                return;
            }
            End::Again(cut) => (cut, false),
            // Told to come back before it was ever let in, it would come back for ever.
            End::AtOnce => (Cut::Closed, registered),
        };
        if registered && events.send(LinkEvent::Down(cut)).await.is_err() {
            return;
        }
        if !at_once {
            let pause = pause(tries, holding.load(Ordering::Relaxed));
            tries = tries.saturating_add(1);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

/// How long to wait after so many tries.
pub(crate) fn pause(tries: u32, holding: bool) -> Duration {
    let mut byte = [0_u8; 1];
    // Without randomness all agents come back at once, which is no reason to stay away.
    let _ = getrandom::fill(&mut byte);
    let jitter = 1.0 + f64::from(byte[0]) / 510.0;
    let seconds = 1.5_f64.powi(i32::try_from(tries.min(20)).unwrap_or(20)) * jitter;
    Duration::from_secs_f64(seconds).min(if holding { MAX_PAUSE_HOLDING } else { MAX_PAUSE })
}

async fn one_session(config: &Config, events: &mpsc::Sender<LinkEvent>, registered: &mut bool) -> End {
    let channel = match connect(&config.orchestrator_url).await {
        Ok(channel) => channel,
        Err(error) => {
            tracing::warn!(url = config.orchestrator_url, error = chain(&error), "the orchestrator cannot be reached");
            return End::Again(Cut::Closed);
        }
    };
    let client = AgentGatewayClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let (out, frames) = mpsc::channel(OUT_FRAMES);
    let (ask, answer) = oneshot::channel();
    if events.send(LinkEvent::NeedRegister(ask)).await.is_err() {
        return End::Again(Cut::Closed);
    }
    let Ok(register) = answer.await else { return End::Again(Cut::Closed) };
    let first = AgentFrame { seq: 1, frame: Some(agent_frame::Frame::Register(register)) };
    if out.send(first).await.is_err() {
        return End::Again(Cut::Closed);
    }
    let mut request = Request::new(ReceiverStream::new(frames));
    authorize(&mut request, config.agent_token.as_ref());
    let mut inbound = match timeout(REGISTER_LIMIT, client.clone().session(request)).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return judge(&status),
        Err(_) => return End::Again(Cut::Silent),
    };
    let ack = match timeout(REGISTER_LIMIT, first_answer(&mut inbound)).await {
        Ok(Ok(ack)) => ack,
        Ok(Err(end)) => return end,
        Err(_) => return End::Again(Cut::Silent),
    };
    *registered = true;
    let session = Session { client, id: ack.session_id.clone() };
    if events.send(LinkEvent::Up { ack: Box::new(ack), out, session }).await.is_err() {
        return End::Again(Cut::Closed);
    }
    loop {
        match inbound.message().await {
            Ok(Some(frame)) => {
                if let Some(end) = goodbye(&frame) {
                    return end;
                }
                if events.send(LinkEvent::Frame(Box::new(frame))).await.is_err() {
                    return End::Again(Cut::Closed);
                }
            }
            Ok(None) => return End::Again(Cut::Closed),
            Err(status) => return judge(&status),
        }
    }
}

/// A connection to an orchestrator.
pub(crate) async fn connect(url: &str) -> Result<Channel, tonic::transport::Error> {
    let mut endpoint = Endpoint::from_shared(url.to_owned())?
        .connect_timeout(Duration::from_secs(5))
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true);
    if url.starts_with("https://") {
        endpoint = endpoint.tls_config(ClientTlsConfig::new().with_native_roots())?;
    }
    endpoint.connect().await
}

async fn first_answer(inbound: &mut Streaming<OrchestratorFrame>) -> Result<RegisterAck, End> {
    loop {
        let frame = match inbound.message().await {
            Ok(Some(frame)) => frame,
            Ok(None) => return Err(End::Again(Cut::Closed)),
            Err(status) => return Err(judge(&status)),
        };
        if let Some(end) = goodbye(&frame) {
            return Err(end);
        }
        match frame.frame {
            Some(orchestrator_frame::Frame::RegisterAck(ack)) => return Ok(ack),
            Some(orchestrator_frame::Frame::FrameNack(nack)) => {
                tracing::error!(detail = nack.detail, "the orchestrator refused the registration");
                return Err(End::Again(Cut::Closed));
            }
            // An acknowledgement of Register itself may come first.
            _ => {}
        }
    }
}

fn goodbye(frame: &OrchestratorFrame) -> Option<End> {
    let Some(orchestrator_frame::Frame::Goodbye(bye)) = &frame.frame else { return None };
    tracing::warn!(code = bye.code, message = bye.message, "the orchestrator closes the session");
    Some(match bye.retry() {
        Retry::Now => End::AtOnce,
        Retry::Unspecified | Retry::Backoff => End::Again(Cut::Closed),
        Retry::Never => {
            let exit = if bye.code.starts_with("AUTH") { EXIT_CONFIG } else { 1 };
            End::Never { message: format!("{}: {}", bye.code, bye.message), exit }
        }
    })
}

fn judge(status: &Status) -> End {
    match status.code() {
        Code::Unauthenticated => End::Never {
            message: format!("the orchestrator refuses the token: {}", status.message()),
            exit: EXIT_CONFIG,
        },
        Code::FailedPrecondition => End::Never {
            message: format!("the orchestrator refuses this agent: {}", status.message()),
            exit: EXIT_CONFIG,
        },
        code => {
            let why = chain(status);
            tracing::warn!(%code, why, "the session ended");
            End::Again(if why.contains("keep-alive") { Cut::Silent } else { Cut::Closed })
        }
    }
}

/// An error with its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
