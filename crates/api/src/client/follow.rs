//! Following a run's logs over any number of connections: no line twice, no line missing.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use kici_engine::ids::{JobId, RunId};
use reqwest::Method;

use super::{Client, ClientError};
use crate::dto::logs::{EndReason, FollowEvent, FollowRequest, LogPosition};

/// The server shows a sign of life every 15 s.
const SILENCE: Duration = Duration::from_secs(45);
/// Longest line of the answer: a full range of long log lines.
const MAX_LINE: usize = 256 * 1024 * 1024;

/// What a status event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Run,
    Job(JobId),
    Step(JobId, u32, String),
}

/// The events of a run. Call [`Follow::next`] until it gives nothing.
pub struct Follow {
    client: Client,
    run: RunId,
    request: FollowRequest,
    body: Option<BoxStream<'static, Result<Bytes, reqwest::Error>>>,
    buffer: BytesMut,
    ready: VecDeque<FollowEvent>,
    next_seq: BTreeMap<(JobId, u32, String), u64>,
    told: HashMap<Subject, FollowEvent>,
    over: bool,
}

impl Client {
    /// Follows the logs of a run. Lost connections are made again, for about a minute.
    pub fn follow(&self, run: RunId, request: FollowRequest) -> Follow {
        let position = |p: &LogPosition| ((p.job_id, p.epoch, p.step.clone()), p.next_seq);
        Follow {
            client: self.clone(),
            run,
            next_seq: request.positions.iter().map(position).collect(),
            request,
            body: None,
            buffer: BytesMut::new(),
            ready: VecDeque::new(),
            told: HashMap::new(),
            over: false,
        }
    }
}

impl Follow {
    /// The next event; `None` after [`FollowEvent::End`] or an error.
    ///
    /// # Errors
    /// [`ClientError`] when the server refuses, or cannot be reached for about a minute.
    pub async fn next(&mut self) -> Option<Result<FollowEvent, ClientError>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.over |= matches!(event, FollowEvent::End { .. });
                return Some(Ok(event));
            }
            if self.over {
                return None;
            }
            if let Err(error) = self.fill().await {
                self.over = true;
                return Some(Err(error));
            }
        }
    }

    /// Reads on; a broken connection is dropped, so that the next call makes a new one.
    async fn fill(&mut self) -> Result<(), ClientError> {
        if self.body.is_none() {
            self.connect().await?;
        }
        let Some(body) = &mut self.body else { return Ok(()) };
        match tokio::time::timeout(SILENCE, body.next()).await {
            Ok(Some(Ok(chunk))) => self.take(&chunk),
            _ => {
                self.body = None;
                self.buffer.clear();
                Ok(())
            }
        }
    }

    async fn connect(&mut self) -> Result<(), ClientError> {
        let positions = self.next_seq.iter().map(|((job_id, epoch, step), next_seq)| LogPosition {
            job_id: *job_id,
            epoch: *epoch,
            step: step.clone(),
            next_seq: *next_seq,
        });
        let request = FollowRequest { positions: positions.collect(), ..self.request.clone() };
        let run = self.run.to_string();
        let connect = || async {
            let call = self.client.request(Method::POST, &["api", "v1", "runs", &run, "logs", "follow"]);
            self.client.send(call.json(&request)).await
        };
        let delays = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(100))
            .with_max_delay(Duration::from_secs(5))
            .with_max_times(18);
        let response = connect.retry(delays).when(ClientError::is_transient).await?;
        self.body = Some(response.bytes_stream().boxed());
        Ok(())
    }

    fn take(&mut self, chunk: &[u8]) -> Result<(), ClientError> {
        self.buffer.extend_from_slice(chunk);
        while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line = self.buffer.split_to(end + 1);
            let event =
                serde_json::from_slice(&line).map_err(|error| ClientError::Undecodable { cause: error.to_string() })?;
            self.event(event);
        }
        if self.buffer.len() > MAX_LINE {
            return Err(ClientError::Undecodable { cause: "a line of the answer has no end".to_owned() });
        }
        Ok(())
    }

    /// Passes an event on, unless an earlier connection brought it already.
    fn event(&mut self, event: FollowEvent) {
        let subject = match &event {
            FollowEvent::Lines { .. } => return self.lines(event),
            FollowEvent::End { reason: EndReason::Shutdown, .. } => {
                self.body = None;
                return;
            }
            FollowEvent::Alive {} => return,
            FollowEvent::End { .. } => return self.ready.push_back(event),
            FollowEvent::Run { .. } => Subject::Run,
            FollowEvent::Job { job_id, .. } => Subject::Job(*job_id),
            FollowEvent::Step { job_id, epoch, step, .. } => Subject::Step(*job_id, *epoch, step.clone()),
        };
        if self.told.get(&subject) != Some(&event) {
            self.told.insert(subject, event.clone());
            self.ready.push_back(event);
        }
    }

    fn lines(&mut self, event: FollowEvent) {
        let FollowEvent::Lines { job_id, epoch, step, mut lines } = event else { return };
        let next = self.next_seq.entry((job_id, epoch, step.clone())).or_default();
        lines.retain(|line| line.seq >= *next);
        if let Some(last) = lines.last() {
            *next = last.seq + 1;
            self.ready.push_back(FollowEvent::Lines { job_id, epoch, step, lines });
        }
    }
}
