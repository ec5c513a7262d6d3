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
use kici_store::model::{DeliveryInserted, DeliveryShed, NewDelivery};
use kici_store::{Store, StoreError};
use tokio::sync::{Semaphore, mpsc};

use crate::admission::{Admission, Shed};
use crate::planner::Work;
use crate::rate::Rates;
use crate::sources::{OpenSource, SourceBook};

/// Overflow deliveries stored at the same time.
const OVERFLOW_WRITES: usize = 16;
/// What waits longer to be stored as overflow is turned away without that, so that the overflow itself cannot pile up.
const OVERFLOW_WAIT: Duration = Duration::from_secs(1);
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
    /// The source calls more often than it may. 429.
    #[error(
        "the source has sent more than the {per_minute} calls a minute that it may (rate_limit_rpm); it was not kept"
    )]
    TooOften {
        /// Its limit.
        per_minute: u32,
        /// When there is room again.
        retry_after: Duration,
    },
    /// Too many calls at once. 429.
    #[error("too many deliveries at once; {}", if *.stored {
        "it is kept and will be processed when there is room; sending it again does no harm"
    } else {
        "it was not kept; send it again"
    })]
    Busy {
        /// It is kept as overflow.
        stored: bool,
    },
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
    admission: Arc<Admission>,
    overflow_rows: u32,
    overflow: Semaphore,
    rates: Rates,
    work: mpsc::Sender<(Work, Arc<OpenSource>)>,
}

impl Inbox {
    /// An inbox whose accepted deliveries go to `work`. What `admission` turns away is kept as overflow, as long as there
    /// are fewer than `overflow_rows` of it.
    pub fn new(
        store: Store,
        sources: SourceBook,
        instance: InstanceId,
        clock: Arc<dyn Clock>,
        admission: Arc<Admission>,
        overflow_rows: u32,
        work: mpsc::Sender<(Work, Arc<OpenSource>)>,
    ) -> Self {
        let overflow = Semaphore::new(OVERFLOW_WRITES);
        Self { store, sources, instance, clock, admission, overflow_rows, overflow, rates: Rates::default(), work }
    }

    /// Verifies and stores a call.
    ///
    /// # Errors
    /// [`Refusal`]; then nothing was stored.
    pub async fn accept(&self, call: Call) -> Result<Accepted, Refusal> {
        let source = self.source(&call.route).await?;
        self.accept_for(source, call).await
    }

    /// Verifies and stores a call whose source was looked up before its body was read.
    ///
    /// # Errors
    /// [`Refusal`]; then nothing was stored.
    pub async fn accept_for(&self, source: Arc<OpenSource>, call: Call) -> Result<Accepted, Refusal> {
        let limit = body_limit(&source);
        if call.body.len() > limit {
            return Err(Refusal::TooLarge { limit });
        }
        let source_name = source.source.name.clone();
        match verify(&source.source, &source.secrets.webhook, &call.headers, call.remote, &call.body) {
            Verified::Ok => {}
            Verified::BadSignature => {
                metrics::counter!("kici_orch_webhook_signature_failures_total", "source" => source_name).increment(1);
                return Err(Refusal::BadSignature);
            }
            Verified::Misconfigured(problem) => return Err(misconfigured(problem)),
        }
        metrics::counter!("kici_orch_webhooks_received_total", "source" => source_name).increment(1);
        // After the proof: nobody else can use up what a source may.
        if let SourceConfig::Generic(generic) = &source.source.config {
            let per_minute = generic.rate_limit_rpm;
            if let Err(retry_after) = self.rates.take(source.source.id, per_minute, self.clock.now()) {
                metrics::counter!("kici_orch_ingest_shed_total", "reason" => "source_rate").increment(1);
                return Err(Refusal::TooOften { per_minute, retry_after });
            }
        }
        match self.admission.enter(&source.source.org).await {
            Ok(_turn) => self.keep(call, source).await,
            Err(shed) => self.put_off(call, &source, shed).await,
        }
    }

    /// Keeps a call that got no turn as overflow, if there is room.
    async fn put_off(&self, call: Call, source: &OpenSource, shed: Shed) -> Result<Accepted, Refusal> {
        metrics::counter!("kici_orch_ingest_shed_total", "reason" => shed.as_str()).increment(1);
        let Ok(Ok(_write)) = tokio::time::timeout(OVERFLOW_WAIT, self.overflow.acquire()).await else {
            return Err(Refusal::Busy { stored: false });
        };
        let (new, _) = self.row(&call, source, &event_name(&source.source, &call.headers, &call.body));
        match self.store.delivery_shed(new, self.overflow_rows).await? {
            DeliveryShed::Known { id } => Ok(Accepted { id, duplicate: true }),
            DeliveryShed::Kept => {
                metrics::counter!("kici_orch_ingest_overflow_captured_total").increment(1);
                Err(Refusal::Busy { stored: true })
            }
            DeliveryShed::NoRoom => {
                metrics::counter!("kici_orch_ingest_overflow_dropped_total", "reason" => "cap_full").increment(1);
                Err(Refusal::Busy { stored: false })
            }
        }
    }

    /// Stores a call that needs no verification because this program made it.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn accept_own(&self, call: Call) -> Result<Accepted, Refusal> {
        let source = self.source(&call.route).await?;
        self.keep(call, source).await
    }

    /// The source that a call is for.
    ///
    /// # Errors
    /// [`Refusal`] when there is none that takes calls.
    pub async fn source(&self, route: &Route) -> Result<Arc<OpenSource>, Refusal> {
        let stored = match route {
            Route::Github { app } => self.store.source_by_routing_key(format!("github:{app}")).await?,
            Route::Named { org, source } => self.store.source_get(org.clone(), source.clone()).await?,
        };
        let stored = stored.filter(|source| source.enabled).ok_or(Refusal::UnknownSource)?;
        let open = self.sources.open(&stored).map_err(|error| misconfigured(error.to_string()))?;
        Ok(Arc::new(open))
    }

    async fn keep(&self, call: Call, source: Arc<OpenSource>) -> Result<Accepted, Refusal> {
        metrics::counter!("kici_orch_ingest_admitted_total").increment(1);
        let event = event_name(&source.source, &call.headers, &call.body);
        let (mut new, headers) = self.row(&call, &source, &event);
        // A place in the worker's queue is taken first: with one, the row is claimed by this process as it is written and
        // nobody else looks at it; without one, whoever has time takes it from the database.
        let place = self.work.try_reserve().ok();
        new.claimed_by = place.as_ref().filter(|_| call.body.len() <= INLINE_BODY).map(|_| self.instance.clone());
        let inline = new.claimed_by.is_some();
        let row = match self.store.delivery_insert(new).await? {
            DeliveryInserted::Duplicate { id, .. } => {
                metrics::counter!("kici_orch_dedup_hits_total").increment(1);
                return Ok(Accepted { id, duplicate: true });
            }
            DeliveryInserted::Inserted(row) | DeliveryInserted::Reopened(row) => row,
        };
        if let Some(place) = place.filter(|_| inline) {
            let org = source.source.org.clone();
            let body = call.body.to_vec();
            place.send((Work { id: row, org, event, request_id: call.request_id, headers, body }, source));
        }
        Ok(Accepted { id: row, duplicate: false })
    }

    /// The row of a call, claimed by nobody, and its headers without what is not stored.
    fn row(&self, call: &Call, source: &OpenSource, event: &str) -> (NewDelivery, Headers) {
        let source = &source.source;
        let id = delivery_id(source, &call.headers, event, &call.body);
        // A sender without ids: an equal call counts as the same delivery within one window of time only.
        let delivery_id = match id.window.map(|window| window.as_micros().max(1)) {
            None => id.id,
            Some(window) => {
                let bucket = u128::try_from(self.clock.now().as_micros()).unwrap_or(0) / window;
                format!("{}:{bucket}", id.id)
            }
        };
        let headers = call.headers.redacted(&source.strip_headers());
        let new = NewDelivery {
            org: source.org.clone(),
            source_id: source.id,
            delivery_id,
            event: event.to_owned(),
            action: action(source, &call.headers, &call.body),
            provider: source.config.kind().as_str().to_owned(),
            channel: "direct".to_owned(),
            repo: None,
            git_ref: None,
            sha: None,
            request_id: call.request_id.clone(),
            // Header names and values are texts, which always serialise.
            headers: serde_json::to_value(&headers).unwrap_or_default(),
            body: call.body.to_vec(),
            claimed_by: None,
        };
        (new, headers)
    }
}

fn misconfigured(problem: String) -> Refusal {
    metrics::counter!("kici_orch_webhook_pipeline_failures_total", "phase" => "source").increment(1);
    Refusal::Misconfigured(problem)
}

/// Longest body that a source takes, in bytes.
pub fn body_limit(source: &OpenSource) -> usize {
    match &source.source.config {
        SourceConfig::Generic(generic) => usize::try_from(generic.max_payload_bytes).unwrap_or(usize::MAX),
        // The listener's own limit applies.
        SourceConfig::Github(_) | SourceConfig::Local(_) => usize::MAX,
    }
}
