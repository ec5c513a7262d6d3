//! Intake: verify over the raw bytes, store, answer. Nothing is written before verification succeeds, and nothing is
//! answered as accepted before it is durable.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kici_engine::ids::{DeliveryRowId, InstanceId};
use kici_engine::time::Clock;
use kici_forge::delivery_id::delivery_id;
use kici_forge::normalise::{action, event_name};
use kici_forge::verify::{Verified, verify};
use kici_forge::{Headers, SourceConfig};
use kici_store::model::{DeliveryInserted, NewDelivery};
use kici_store::{Store, StoreError};
use tokio::sync::{Semaphore, mpsc};

use crate::planner::Work;
use crate::sources::{OpenSource, SourceBook};

/// How long a request may wait for its turn.
const ADMISSION_WAIT: Duration = Duration::from_secs(3);
/// Bodies up to this size go to the worker in memory; larger ones are read back from the database.
const INLINE_BODY: usize = 64 * 1024;

/// Which source a call is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// `POST /webhooks/github/{app}`.
    Github {
        /// The numeric id of the App.
        app: u64,
    },
    /// `POST /webhooks/{org}/{source}`.
    Named {
        /// Organisation.
        org: String,
        /// Name of the source.
        source: String,
    },
}

/// A call as it came in.
#[derive(Clone, Debug)]
pub struct Call {
    /// Which source it is for.
    pub route: Route,
    /// Its headers.
    pub headers: Headers,
    /// The caller's address.
    pub remote: Option<IpAddr>,
    /// The raw body.
    pub body: Bytes,
    /// Name of this request in logs and answers.
    pub request_id: String,
}

/// A call that was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its row.
    pub id: DeliveryRowId,
    /// The same delivery was stored before; nothing was done.
    pub duplicate: bool,
}

/// Why a call was not stored.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No such source, or it is disabled. 404.
    #[error("there is no such source, or it is disabled")]
    UnknownSource,
    /// The signature is missing or wrong. 401.
    #[error("the signature of the delivery is missing or does not match the source's secret")]
    BadSignature,
    /// The source cannot verify anything. 500, and an alert.
    #[error("the source cannot take deliveries: {0}")]
    Misconfigured(String),
    /// The body is over the source's limit. 413.
    #[error("the body is larger than the {limit} bytes that this source takes")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// Too many calls at once. 429.
    #[error("too many deliveries at once; send it again")]
    Busy,
    /// The database cannot take it now. 503.
    #[error("the delivery cannot be stored now: {0}")]
    Unavailable(#[from] StoreError),
}

/// Takes calls in.
pub struct Inbox {
    store: Store,
    sources: SourceBook,
    instance: InstanceId,
    clock: Arc<dyn Clock>,
    turns: Semaphore,
    work: mpsc::Sender<(Work, Arc<OpenSource>)>,
}

impl Inbox {
    /// An inbox whose accepted deliveries go to `work`; at most `max_in_flight` calls are answered at the same time.
    pub fn new(
        store: Store,
        sources: SourceBook,
        instance: InstanceId,
        clock: Arc<dyn Clock>,
        max_in_flight: usize,
        work: mpsc::Sender<(Work, Arc<OpenSource>)>,
    ) -> Self {
        Self { store, sources, instance, clock, turns: Semaphore::new(max_in_flight), work }
    }

    /// Verifies and stores a call.
    ///
    /// # Errors
    /// [`Refusal`]; then nothing was stored.
    pub async fn accept(&self, call: Call) -> Result<Accepted, Refusal> {
        let turn = tokio::time::timeout(ADMISSION_WAIT, self.turns.acquire()).await;
        let Ok(Ok(_turn)) = turn else { return Err(Refusal::Busy) };
        let source = self.source(&call.route).await?;
        let limit = body_limit(&source.source.config);
        if call.body.len() > limit {
            return Err(Refusal::TooLarge { limit });
        }
        match verify(&source.source, &source.secrets.webhook, &call.headers, call.remote, &call.body) {
            Verified::Ok => {}
            Verified::BadSignature => return Err(Refusal::BadSignature),
            Verified::Misconfigured(problem) => return Err(Refusal::Misconfigured(problem)),
        }
        self.keep(call, source).await
    }

    /// Stores a call that needs no verification because this program made it.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn accept_own(&self, call: Call) -> Result<Accepted, Refusal> {
        let source = self.source(&call.route).await?;
        self.keep(call, source).await
    }

    async fn source(&self, route: &Route) -> Result<Arc<OpenSource>, Refusal> {
        let stored = match route {
            Route::Github { app } => self.store.source_by_routing_key(format!("github:{app}")).await?,
            Route::Named { org, source } => self.store.source_get(org.clone(), source.clone()).await?,
        };
        let stored = stored.filter(|source| source.enabled).ok_or(Refusal::UnknownSource)?;
        let open = self.sources.open(&stored).map_err(|error| Refusal::Misconfigured(error.to_string()))?;
        Ok(Arc::new(open))
    }

    async fn keep(&self, call: Call, source: Arc<OpenSource>) -> Result<Accepted, Refusal> {
        let event = event_name(&source.source, &call.headers, &call.body);
        let id = delivery_id(&source.source, &call.headers, &event, &call.body);
        // A sender without ids: an equal call counts as the same delivery within one window of time only.
        let delivery = match id.window.map(|window| window.as_micros().max(1)) {
            None => id.id,
            Some(window) => {
                let bucket = u128::try_from(self.clock.now().as_micros()).unwrap_or(0) / window;
                format!("{}:{bucket}", id.id)
            }
        };
        // A place in the worker's queue is taken first: with one, the row is claimed by this process as it is written and
        // nobody else looks at it; without one, whoever has time takes it from the database.
        let place = self.work.try_reserve().ok();
        let headers = call.headers.redacted(source.source.strip_headers());
        let new = NewDelivery {
            org: source.source.org.clone(),
            source_id: source.source.id,
            delivery_id: delivery,
            event: event.clone(),
            action: action(&source.source, &call.headers, &call.body),
            provider: provider(&source.source.config).to_owned(),
            channel: "direct".to_owned(),
            repo: None,
            git_ref: None,
            sha: None,
            request_id: call.request_id.clone(),
            // Header names and values are texts, which always serialise.
            headers: serde_json::to_value(&headers).unwrap_or_default(),
            body: call.body.to_vec(),
            claimed_by: place.as_ref().filter(|_| call.body.len() <= INLINE_BODY).map(|_| self.instance.clone()),
        };
        let inline = new.claimed_by.is_some();
        let row = match self.store.delivery_insert(new).await? {
            DeliveryInserted::Duplicate { id, .. } => return Ok(Accepted { id, duplicate: true }),
            DeliveryInserted::Inserted(row) | DeliveryInserted::Reopened(row) => row,
        };
        if let Some(place) = place.filter(|_| inline) {
            let org = source.source.org.clone();
            let body = call.body.to_vec();
            place.send((Work { id: row, org, event, request_id: call.request_id, headers, body }, source));
        }
        Ok(Accepted { id: row, duplicate: false })
    }
}

fn body_limit(config: &SourceConfig) -> usize {
    match config {
        SourceConfig::Generic(generic) => usize::try_from(generic.max_payload_bytes).unwrap_or(usize::MAX),
        // The listener's own limit applies.
        SourceConfig::Github(_) | SourceConfig::Local(_) => usize::MAX,
    }
}

fn provider(config: &SourceConfig) -> &'static str {
    match config {
        SourceConfig::Github(_) => "github",
        SourceConfig::Generic(_) => "generic",
        SourceConfig::Local(_) => "local",
    }
}
