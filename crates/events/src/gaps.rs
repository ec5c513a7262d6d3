//! Deliveries that a forge could not bring to us: its log of failed deliveries is read, and what is not here is asked for
//! again (GitHub: "Redeliver a delivery for an app webhook").

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::SourceId;
use kici_engine::time::{Clock, Ts};
use kici_forge::{FailedDelivery, Forge, ForgeError};
use kici_store::model;
use kici_store::{Store, StoreError};
use tokio::sync::Mutex;

use crate::sources::SourceBook;

/// How far back the first look of an installation goes.
const FIRST_LOOK: Duration = Duration::from_secs(3600);
/// A look begins this much before the last one ended: a forge's log may lag.
const OVERLAP: Duration = Duration::from_secs(300);
/// Deliveries of a source that are asked for in one look.
const PER_LOOK: usize = 100;
/// Pause before a delivery that did not arrive is asked for again; it doubles.
const PAUSE: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(6 * 3600);
/// GitHub delivers nothing again that is older.
const GIVE_UP: Duration = Duration::from_secs(3 * 86_400);
/// Ids that the database is asked for at once.
const BATCH: usize = 500;

/// What one look at all sources came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Deliveries that were asked for.
    pub asked: usize,
    /// What kept it from asking for all; the next look goes on there.
    pub problems: Vec<String>,
}

/// A delivery that did not arrive.
#[derive(Clone, Debug)]
struct Lost {
    /// Its newest attempt.
    attempt: FailedDelivery,
    /// When it was seen first.
    since: Ts,
    /// How often it was asked for.
    asks: u32,
    /// Not to be asked for before this.
    next: Ts,
    /// It cannot be had again; kept as long as the log may still name it.
    dead: bool,
}

/// What is known of a source's log. The database holds only up to where nothing is lost, for the next process.
#[derive(Debug)]
struct Log {
    /// It was read up to here.
    until: Ts,
    /// By the sender's id.
    lost: BTreeMap<String, Lost>,
}

/// Looks for lost deliveries.
pub struct GapRepair {
    store: Store,
    sources: SourceBook,
    clock: Arc<dyn Clock>,
    logs: Mutex<HashMap<SourceId, Log>>,
}

impl GapRepair {
    /// A repair over these parts.
    pub fn new(store: Store, sources: SourceBook, clock: Arc<dyn Clock>) -> Self {
        Self { store, sources, clock, logs: Mutex::default() }
    }

    /// One look at every source that can be asked. A source that cannot be asked now does not keep the others from being
    /// asked.
    ///
    /// # Errors
    /// The database's.
    pub async fn run(&self) -> Result<Repaired, StoreError> {
        let mut repaired = Repaired::default();
        let mut logs = self.logs.lock().await;
        let sources = self.store.source_list(crate::DEFAULT_ORG.to_owned()).await?;
        logs.retain(|id, _| sources.iter().any(|source| source.id == *id));
        for stored in sources {
            if !stored.enabled || stored.kind != model::SourceKind::Github {
                continue;
            }
            let key = format!("gap_repair:{}", stored.id.uuid());
            let log = match logs.entry(stored.id) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => entry.insert(self.begin(&key).await?),
            };
            if let Err(problem) = self.look(&stored, log, &mut repaired.asked).await? {
                tracing::warn!(source = stored.name, problem, "lost deliveries are not all asked for");
                repaired.problems.push(format!("source {}: {problem}", stored.name));
            }
            let open = log.lost.values().filter(|lost| !lost.dead).map(|lost| lost.since);
            let settled = open.min().unwrap_or(log.until).min(log.until);
            self.store.meta_set(key, settled.to_string()).await?;
        }
        Ok(repaired)
    }

    async fn begin(&self, key: &str) -> Result<Log, StoreError> {
        let now = self.clock.now();
        let last = self.store.meta_get(key.to_owned()).await?.and_then(|text| Ts::parse_rfc3339(&text).ok());
        let until = last.unwrap_or(now.minus(FIRST_LOOK)).max(now.minus(GIVE_UP));
        Ok(Log { until, lost: BTreeMap::new() })
    }

    /// Reads what is new in the log of a source and asks for what is due. The inner error is the forge's.
    async fn look(
        &self,
        stored: &model::Source,
        log: &mut Log,
        asked: &mut usize,
    ) -> Result<Result<(), String>, StoreError> {
        let Ok(open) = self.sources.open(stored) else { return Ok(Ok(())) };
        if open.secrets.private_key.is_none() {
            // Without the App's key its log cannot be read; webhooks work all the same.
            return Ok(Ok(()));
        }
        let now = self.clock.now();
        let read = async {
            let forge = self.sources.forge(&open)?;
            let failed = forge.failed_deliveries(log.until.minus(OVERLAP)).await?;
            Ok::<_, ForgeError>((forge, failed))
        };
        let (forge, failed) = match read.await {
            Ok(found) => found,
            Err(error) => return Ok(Err(format!("the forge's log of deliveries cannot be read: {error}"))),
        };
        log.until = now;
        for attempt in failed {
            let new = Lost { since: attempt.at, asks: 0, next: now, dead: false, attempt: attempt.clone() };
            let lost = log.lost.entry(attempt.guid.clone()).or_insert(new);
            if attempt.at > lost.attempt.at {
                lost.attempt = attempt;
            }
        }
        self.forget_known(stored.id, log).await?;
        log.lost.retain(|guid, lost| {
            if lost.dead {
                return now.since(lost.attempt.at) < 2 * OVERLAP;
            }
            let keep = now.since(lost.since) < GIVE_UP;
            if !keep {
                tracing::error!(source = stored.name, delivery = guid, "did not arrive in three days and is given up");
            }
            keep
        });
        Ok(ask(&*forge, log, now, asked).await)
    }

    /// Some arrived after all, by another attempt.
    async fn forget_known(&self, source: SourceId, log: &mut Log) -> Result<(), StoreError> {
        let ids: Vec<String> = log.lost.keys().cloned().collect();
        for some in ids.chunks(BATCH) {
            let known: HashSet<String> =
                self.store.deliveries_known(source, some.to_vec()).await?.into_iter().collect();
            log.lost.retain(|guid, _| !known.contains(guid));
        }
        Ok(())
    }
}

/// Asks for what is due, oldest first, until the forge does not answer.
async fn ask(forge: &dyn Forge, log: &mut Log, now: Ts, asked: &mut usize) -> Result<(), String> {
    let due = log.lost.iter().filter(|(_, lost)| !lost.dead && lost.next <= now);
    let mut due: Vec<(Ts, String)> = due.map(|(guid, lost)| (lost.since, guid.clone())).collect();
    due.sort_unstable();
    for (_, guid) in due.into_iter().take(PER_LOOK) {
        let Some(lost) = log.lost.get_mut(&guid) else { continue };
        match forge.redeliver(&lost.attempt.id).await {
            Ok(()) => {
                lost.next = now.plus(PAUSE.saturating_mul(1 << lost.asks.min(12)).min(PAUSE_MAX));
                lost.asks += 1;
                *asked += 1;
            }
            // The forge does not have it any more, or does not deliver it again.
            Err(error @ ForgeError::NotFound { .. }) => {
                tracing::error!(delivery = guid, %error, "a delivery that did not arrive cannot be had again");
                lost.dead = true;
            }
            Err(error) => return Err(format!("delivery {guid} cannot be asked for again: {error}")),
        }
    }
    Ok(())
}
