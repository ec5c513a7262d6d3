//! Deliveries that a forge could not bring to us: its log of failed deliveries is read, and what is not here is asked for
//! again (GitHub: "Redeliver a delivery for an app webhook").

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::SourceId;
use kici_engine::time::{Clock, Ts};
use kici_forge::{FailedDelivery, ForgeError};
use kici_store::model::{self, DeliveryFilter, Page};
use kici_store::{Store, StoreError};

use crate::sources::SourceBook;

/// How far back the first look of an installation goes.
const FIRST_LOOK: Duration = Duration::from_secs(3600);
/// A look begins this much before the last one ended: a forge's log may lag.
const OVERLAP: Duration = Duration::from_secs(300);

/// Looks for lost deliveries.
pub struct GapRepair {
    store: Store,
    sources: SourceBook,
    clock: Arc<dyn Clock>,
}

impl GapRepair {
    /// A repair over these parts.
    pub fn new(store: Store, sources: SourceBook, clock: Arc<dyn Clock>) -> Self {
        Self { store, sources, clock }
    }

    /// One look at every source that can be asked; returns how many deliveries were asked for again. A source that cannot
    /// be asked now is logged and does not keep the others from being asked.
    ///
    /// # Errors
    /// The database's.
    pub async fn run(&self) -> Result<usize, StoreError> {
        let mut count = 0;
        for stored in self.store.source_list(crate::DEFAULT_ORG.to_owned()).await? {
            if stored.enabled && stored.kind == model::SourceKind::Github {
                count += self.look(&stored).await?;
            }
        }
        Ok(count)
    }

    async fn look(&self, stored: &model::Source) -> Result<usize, StoreError> {
        let Ok(open) = self.sources.open(stored) else { return Ok(0) };
        if open.secrets.private_key.is_none() {
            // Without the App's key its log cannot be read; webhooks work all the same.
            return Ok(0);
        }
        let key = format!("gap_repair:{}", stored.id.uuid());
        let now = self.clock.now();
        let last = self.store.meta_get(key.clone()).await?.and_then(|text| Ts::parse_rfc3339(&text).ok());
        let since = last.unwrap_or(now.minus(FIRST_LOOK)).minus(OVERLAP);
        let asked = async {
            let forge = self.sources.forge(&open)?;
            let failed = forge.failed_deliveries(since).await?;
            Ok::<_, ForgeError>((forge, failed))
        };
        let (forge, failed) = match asked.await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(source = stored.name, %error, "the forge's log of deliveries cannot be read");
                return Ok(0);
            }
        };
        let mut count = 0;
        for lost in failed {
            if self.known(stored.id, &lost).await? {
                continue;
            }
            match forge.redeliver(&lost.id).await {
                Ok(()) => count += 1,
                Err(error) => {
                    tracing::warn!(source = stored.name, delivery = lost.guid, %error, "cannot be asked for again");
                    // The next look begins at the same place.
                    return Ok(count);
                }
            }
        }
        self.store.meta_set(key, now.to_string()).await?;
        Ok(count)
    }

    /// It arrived after all, by another attempt.
    async fn known(&self, source: SourceId, lost: &FailedDelivery) -> Result<bool, StoreError> {
        let filter = DeliveryFilter {
            source_id: Some(source),
            delivery_id: Some(lost.guid.clone()),
            ..DeliveryFilter::default()
        };
        let listed = self.store.delivery_list(filter, Page { limit: 10, after: None }).await?;
        Ok(listed.items.iter().any(|row| row.delivery_id == lost.guid))
    }
}
