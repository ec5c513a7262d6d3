//! Taking events in.

use std::time::Duration;

use kici_engine::event_name::{self, EventNameError};
use kici_engine::ids::EventId;
use kici_engine::pattern::Patterns;
use kici_store::model::{Emitted, EventLimits, EventOrigin, NewEvent};
use kici_store::{Store, StoreError};
use serde_json::Value as Json;

/// Largest document of one event, as JSON.
pub const MAX_PAYLOAD_BYTES: usize = 256 * 1024;
/// Most patterns of repositories that one event is for.
pub const MAX_TARGETS: usize = 100;

/// An event that a step or a person emits.
#[derive(Clone, Debug, PartialEq)]
pub struct Emit {
    /// Where it comes from.
    pub origin: EventOrigin,
    /// Its name.
    pub name: String,
    /// Its document.
    pub payload: Json,
    /// Patterns of the repositories it is for; empty is all.
    pub target_repos: Vec<String>,
    /// Two with the same key are one.
    pub key: Option<String>,
    /// The request that brings it.
    pub request_id: String,
}

/// Why an event was not stored.
#[derive(Debug, thiserror::Error)]
pub enum EmitError {
    /// Its name.
    #[error(transparent)]
    Name(#[from] EventNameError),
    /// Its document.
    #[error("the payload of an event has {0} bytes of JSON; {MAX_PAYLOAD_BYTES} are allowed")]
    TooLarge(usize),
    /// Its document is none.
    #[error("the payload of an event must be JSON: {0}")]
    Payload(String),
    /// Whom it is for.
    #[error("`target.repos`: {0}")]
    Targets(String),
    /// The job.
    #[error("the job does not run here any more")]
    NotRunning,
    /// The chain.
    #[error(
        "a chain of {0} events: each event of this one led to the next; at most {1} are allowed (events.max_chain_depth). \
         Look for workflows that start each other"
    )]
    TooDeep(u32, u32),
    /// The rate.
    #[error("more than {most} events `{name}` in a minute from this source (events.rate_per_workflow_per_minute)")]
    TooMany {
        /// Its name.
        name: String,
        /// The limit.
        most: u32,
        /// When there is room again.
        after: Duration,
    },
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl EmitError {
    /// For metrics: one word.
    fn word(&self) -> &'static str {
        match self {
            Self::Name(_) => "name",
            Self::TooLarge(_) => "size",
            Self::Payload(_) => "payload",
            Self::Targets(_) => "targets",
            Self::NotRunning => "stale",
            Self::TooDeep(..) => "depth",
            Self::TooMany { .. } => "rate",
            Self::Store(_) => "store",
        }
    }
}

/// Stores events.
#[derive(Clone)]
pub struct Bus {
    store: Store,
    limits: EventLimits,
}

impl Bus {
    /// A bus with these limits.
    pub fn new(store: Store, limits: EventLimits) -> Self {
        store.limit_chains(limits.max_depth);
        Self { store, limits }
    }

    /// Checks and stores an event; it is durable when this returns. The second is true when it had been stored before.
    ///
    /// # Errors
    /// [`EmitError`]; then nothing was stored.
    pub async fn emit(&self, emit: Emit) -> Result<(EventId, bool), EmitError> {
        let name = emit.name.clone();
        let stored = self.store_checked(emit).await;
        match &stored {
            Ok((id, known)) if !known => tracing::info!(event = %id, name, "an event was emitted"),
            Ok(_) => {}
            Err(error) => {
                metrics::counter!("kici_orch_events_refused_total", "reason" => error.word()).increment(1);
                tracing::warn!(name = name.chars().take(128).collect::<String>(), %error, "an event was refused");
            }
        }
        stored
    }

    async fn store_checked(&self, emit: Emit) -> Result<(EventId, bool), EmitError> {
        event_name::check(&emit.name)?;
        // Values of JSON always serialise.
        let bytes = serde_json::to_vec(&emit.payload).map_or(0, |text| text.len());
        if bytes > MAX_PAYLOAD_BYTES {
            return Err(EmitError::TooLarge(bytes));
        }
        if emit.target_repos.len() > MAX_TARGETS {
            return Err(EmitError::Targets(format!("more than {MAX_TARGETS} patterns")));
        }
        Patterns::compile(&emit.target_repos).map_err(|error| EmitError::Targets(error.to_string()))?;
        let new = NewEvent {
            origin: emit.origin,
            name: emit.name.clone(),
            payload: emit.payload,
            target_repos: emit.target_repos,
            registration_id: None,
            emit_key: emit.key,
            request_id: emit.request_id,
        };
        match self.store.event_emit(new, self.limits).await? {
            Emitted::Stored(id) => Ok((id, false)),
            Emitted::Known(id) => Ok((id, true)),
            Emitted::NotRunning => Err(EmitError::NotRunning),
            Emitted::TooDeep(depth) => Err(EmitError::TooDeep(depth, self.limits.max_depth)),
            Emitted::TooMany(after) => {
                Err(EmitError::TooMany { name: emit.name, most: self.limits.per_minute.unwrap_or_default(), after })
            }
        }
    }
}
