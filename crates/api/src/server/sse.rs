//! `GET /api/v1/stream`: live changes as Server-Sent Events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::stream::{self, Stream};
use http::HeaderMap;
use kici_access::Permission;
use kici_engine::ids::{JobId, RunId};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::ApiState;
use super::auth::Session;
use super::request::QueryOf;
use super::streams::Slot;
use crate::dto::logs::DEFAULT_LINES;
use crate::dto::stream::Change;
use crate::live::{Numbered, Received, Subscription};
use crate::ports::{Answer, Caller, JobRef, LogRequest, Ports, StepRef};
use crate::problem::{Code, FieldError, Problem};

/// Topics per stream.
const MAX_TOPICS: usize = 32;
const HEARTBEAT: Duration = Duration::from_secs(15);
/// The token is looked up again after this long.
const REAUTH: Duration = Duration::from_secs(60);

/// What to subscribe to.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StreamQuery {
    topics: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Topic {
    Runs,
    Run(RunId),
    Log { run: RunId, job: JobId, step: String },
    Agents,
    Dlq,
}

impl Topic {
    fn parse(text: &str) -> Result<Self, Problem> {
        let unknown = || {
            let detail =
                format!("`{text}` is not a topic; use runs, run:<id>, logs:<run>/<job>/<step key>, agents or dlq");
            Problem::new(Code::RequestInvalid, format!("topics: {detail}"))
                .with_errors(vec![FieldError::new("topics", detail)])
        };
        match text.split_once(':') {
            None => match text {
                "runs" => Ok(Self::Runs),
                "agents" => Ok(Self::Agents),
                "dlq" => Ok(Self::Dlq),
                _ => Err(unknown()),
            },
            Some(("run", id)) => id.parse().map(Self::Run).map_err(|_| unknown()),
            Some(("logs", path)) => {
                let mut parts = path.splitn(3, '/');
                let run = parts.next().and_then(|id| id.parse().ok());
                let job = parts.next().and_then(|id| id.parse().ok());
                match (run, job, parts.next()) {
                    (Some(run), Some(job), Some(step)) => Ok(Self::Log { run, job, step: step.to_owned() }),
                    _ => Err(unknown()),
                }
            }
            Some(_) => Err(unknown()),
        }
    }

    /// What kind it is, as a metric's label.
    const fn kind(&self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::Run(_) => "run",
            Self::Log { .. } => "logs",
            Self::Agents => "agents",
            Self::Dlq => "dlq",
        }
    }

    const fn permission(&self) -> Permission {
        match self {
            Self::Runs | Self::Run(_) | Self::Log { .. } => Permission::RunRead,
            Self::Agents => Permission::FleetRead,
            Self::Dlq => Permission::EventDlqRead,
        }
    }
}

/// One subscribed topic; for logs also the next line to send.
struct Subscribed {
    topic: Topic,
    next_seq: u64,
    ended: bool,
    _open: Open,
}

/// Counts a topic while it is open.
struct Open(&'static str);

impl Open {
    fn new(topic: &Topic) -> Self {
        metrics::gauge!("kici_orch_sse_clients", "topic" => topic.kind()).increment(1.0);
        Self(topic.kind())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        metrics::gauge!("kici_orch_sse_clients", "topic" => self.0).decrement(1.0);
    }
}

struct Feed {
    ports: Ports,
    caller: Caller,
    session: Session,
    topics: Vec<Subscribed>,
    changes: Subscription,
    out: VecDeque<Event>,
    last_id: u64,
    authorised_at: Instant,
    over: bool,
    _slot: Slot,
}

/// Live changes of the topics, as Server-Sent Events. `Last-Event-ID` resumes; a `gap` event asks for a fresh look.
#[utoipa::path(get, path = "/api/v1/stream", tag = "stream",
    params(("topics" = String, Query, description = "Comma separated: runs, run:<id>, logs:<run>/<job>/<step key>, agents, dlq."),
        ("last-event-id" = Option<String>, Header)),
    responses((status = 200, body = Change, content_type = "text/event-stream")))]
pub async fn stream(
    State(state): State<ApiState>,
    caller: Caller,
    session: Session,
    headers: HeaderMap,
    QueryOf(query): QueryOf<StreamQuery>,
) -> Answer<Sse<impl Stream<Item = Result<Event, Infallible>>>> {
    let names: Vec<&str> = query.topics.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if names.is_empty() || names.len() > MAX_TOPICS {
        let detail = format!("name 1 to {MAX_TOPICS} topics, comma separated");
        let code = if names.is_empty() { Code::RequestInvalid } else { Code::StreamLimit };
        return Err(Problem::new(code, format!("topics: {detail}")));
    }
    let after = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
    let changes = state.ports.live.subscribe(after);
    let mut topics = Vec::new();
    for name in names {
        topics.push(subscribe(&state.ports, &caller, Topic::parse(name)?).await?);
    }
    let feed = Feed {
        last_id: after.unwrap_or_else(|| state.ports.live.last_id()),
        _slot: state.slots.take(&caller)?,
        ports: state.ports,
        caller,
        session,
        topics,
        changes,
        out: VecDeque::new(),
        authorised_at: Instant::now(),
        over: false,
    };
    let events = stream::unfold(feed, |mut feed| async move { feed.next().await.map(|event| (Ok(event), feed)) });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)))
}

/// Checks that the caller may have the topic, and where its log stands.
async fn subscribe(ports: &Ports, caller: &Caller, topic: Topic) -> Result<Subscribed, Problem> {
    let permission = topic.permission();
    if !caller.role.has(permission) {
        let detail = format!("`{permission}` is needed and the role `{}` does not have it", caller.role);
        return Err(Problem::new(Code::Forbidden, detail));
    }
    let mut next_seq = 0;
    match &topic {
        Topic::Run(run) => drop(ports.runs.get(caller, *run).await?),
        Topic::Log { run, job, step } => {
            let steps = ports.runs.steps(caller, *run, Some(&JobRef::Id(*job)), None).await?;
            next_seq = steps.iter().find(|view| view.key == *step).map_or(0, |view| view.log.lines);
        }
        Topic::Agents | Topic::Dlq if caller.routing_key.is_some() => {
            return Err(Problem::new(
                Code::Forbidden,
                "this token is bound to one source; agents and dlq need one that is not",
            ));
        }
        Topic::Runs | Topic::Agents | Topic::Dlq => {}
    }
    let open = Open::new(&topic);
    Ok(Subscribed { topic, next_seq, ended: false, _open: open })
}

impl Feed {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.out.pop_front() {
                return Some(event);
            }
            if self.over {
                return None;
            }
            let received = tokio::time::timeout(HEARTBEAT, self.changes.recv()).await;
            if self.authorised_at.elapsed() >= REAUTH {
                self.authorised_at = Instant::now();
                if !self.session.stands().await {
                    self.push("session.ended", &json!({ "reason": "forbidden" }));
                    self.over = true;
                    continue;
                }
            }
            match received {
                Err(_) => {}
                Ok(Received::Change(change)) => self.change(&change).await,
                Ok(Received::Gap) => {
                    for subscribed in &self.topics {
                        metrics::counter!("kici_orch_sse_gaps_total", "topic" => subscribed.topic.kind()).increment(1);
                    }
                    self.push("gap", &json!({}));
                }
                Ok(Received::Closed) => self.over = true,
            }
        }
    }

    fn push(&mut self, name: &str, data: &serde_json::Value) {
        self.out.push_back(Event::default().id(self.last_id.to_string()).event(name).data(data.to_string()));
    }

    async fn change(&mut self, numbered: &Numbered) {
        self.last_id = numbered.id;
        let change = &*numbered.change;
        if self.topics.iter().any(|subscribed| self.shows(&subscribed.topic, change)) {
            let data = serde_json::to_value(change).unwrap_or_default();
            self.push(change.event_name(), &data);
        }
        if let Change::Log { run_id, job_id, epoch, step } = change {
            let ours =
                |s: &Subscribed| !s.ended && s.topic == Topic::Log { run: *run_id, job: *job_id, step: step.clone() };
            for index in (0..self.topics.len()).filter(|i| ours(&self.topics[*i])).collect::<Vec<_>>() {
                self.lines(index, *epoch).await;
            }
        }
    }

    /// Whether the change itself is an event of the topic.
    fn shows(&self, topic: &Topic, change: &Change) -> bool {
        match (topic, change) {
            (Topic::Runs, Change::Run { routing_key, .. }) => match routing_key {
                Some(key) => self.caller.sees(key),
                None => self.caller.routing_key.is_none(),
            },
            (
                Topic::Run(run),
                Change::Run { run_id, .. } | Change::Job { run_id, .. } | Change::Step { run_id, .. },
            ) => run == run_id,
            (Topic::Agents, Change::Agent { .. }) | (Topic::Dlq, Change::Dlq {}) => true,
            _ => false,
        }
    }

    /// Sends the new lines of a log; `log.end` after the last.
    async fn lines(&mut self, index: usize, epoch: u32) {
        let Topic::Log { run, job, step } = self.topics[index].topic.clone() else { return };
        let name = json!({ "run_id": run, "job_id": job, "epoch": epoch, "step": step });
        let request = LogRequest {
            run,
            job: JobRef::Id(job),
            epoch: Some(epoch),
            step: StepRef::Key(step),
            from_seq: self.topics[index].next_seq,
            limit: DEFAULT_LINES,
        };
        let end = match self.ports.runs.logs(&self.caller, &request).await {
            Ok(range) => {
                let more = range.lines.len() >= DEFAULT_LINES as usize;
                if !range.lines.is_empty() {
                    let data = json!({ "of": name, "from_seq": request.from_seq, "lines": range.lines, "more": more });
                    self.push("log.lines", &data);
                }
                self.topics[index].next_seq = range.next_seq;
                range.complete.then_some("completed")
            }
            Err(problem) if problem.is(Code::NotFound) => Some("not_found"),
            // The next change tries again.
            Err(_) => None,
        };
        if let Some(reason) = end {
            self.topics[index].ended = true;
            self.push("log.end", &json!({ "of": name, "reason": reason }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_are_read_or_refused_with_the_list() {
        let id = "0190f0c8-0000-7000-8000-000000000001";
        assert_eq!(Topic::parse("runs"), Ok(Topic::Runs));
        assert_eq!(Topic::parse(&format!("run:run_{id}")), id.parse().map(Topic::Run).map_err(|_| unreachable!()));
        assert!(matches!(Topic::parse(&format!("logs:{id}/{id}/step-main-0")), Ok(Topic::Log { .. })));
        for bad in ["run:", "logs:x/y/z", "run", "holds!", ""] {
            let detail = Topic::parse(bad).unwrap_err().detail;
            assert!(detail.contains("use runs, run:<id>"), "{detail}");
        }
    }
}
