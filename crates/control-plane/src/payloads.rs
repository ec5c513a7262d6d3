//! Bodies of deliveries: in the database until they are processed, in the object store until they expire.

use std::time::Duration;

use kici_api::problem::{Code, Problem};
use kici_blobs::{BlobError, Blobs};
use kici_engine::time::Ts;
use kici_store::Store;
use kici_store::model::{Delivery, DeliveryBody};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// Largest packed body: a body of the largest kind that does not compress, in base64.
const MAX_PACKED: u64 = 160 * 1024 * 1024;
/// How long an object store may fail before bodies are given up.
const STORAGE_PATIENCE: Duration = Duration::from_secs(3600);

/// Reads bodies from wherever they are.
#[derive(Clone)]
pub(crate) struct Payloads {
    pub(crate) store: Store,
    pub(crate) blobs: Blobs,
}

/// A body as it lies in the object store.
#[derive(Serialize, Deserialize)]
struct Kept {
    headers: Json,
    body: String,
}

impl Payloads {
    /// The body of a delivery.
    pub(crate) async fn body(&self, row: &Delivery) -> Result<DeliveryBody, Problem> {
        if let Some(body) = self.find(row).await? {
            return Ok(body);
        }
        // It may have been moved while it was looked for.
        let again = self.store.delivery_get(row.id).await.map_err(|error| unavailable(&error))?;
        match again {
            Some(moved) if moved.payload_key != row.payload_key || moved.payload_omitted != row.payload_omitted => {
                self.find(&moved).await?.ok_or_else(|| gone(row, "expired"))
            }
            _ => Err(gone(row, "expired")),
        }
    }

    /// The body of a delivery at the place that its row names.
    async fn find(&self, row: &Delivery) -> Result<Option<DeliveryBody>, Problem> {
        if let Some(reason) = &row.payload_omitted {
            return Err(gone(row, reason));
        }
        let Some(key) = &row.payload_key else {
            return self.store.delivery_body(row.id).await.map_err(|error| unavailable(&error));
        };
        match self.blobs.get(key, MAX_PACKED).await {
            Ok(bytes) => unpack(&bytes).map(Some).ok_or_else(Problem::internal),
            Err(BlobError::NotFound(_)) => Ok(None),
            Err(error) => Err(unavailable(&error)),
        }
    }

    /// Moves bodies of finished deliveries out of the database; returns how many. Those over `max_bytes` are not kept. What
    /// the object store does not take now stays where it is and is tried again for an hour.
    ///
    /// # Errors
    /// A text for the log when some could not be moved; the others were.
    pub(crate) async fn move_finished(&self, max_bytes: usize, limit: u32, now: Ts) -> Result<u64, String> {
        let finished = self.store.delivery_bodies_finished(limit).await.map_err(|e| e.to_string())?;
        let (mut moved, mut problem) = (0, None);
        for row in finished {
            let Some(at) = row.finished_at else { continue };
            let Some(body) = self.store.delivery_body(row.id).await.map_err(|e| e.to_string())? else { continue };
            let (key, omitted) = if body.body.len() > max_bytes {
                (None, Some("size_exceeded".to_owned()))
            } else {
                let date = row.received_at.to_datetime().format("%Y-%m-%d");
                let key = format!("event-log/{}/{date}/{}.zst", row.org, row.id.uuid());
                match self.blobs.put(&key, pack(&body).into()).await {
                    Ok(()) => (Some(key), None),
                    // Full disks heal; until then the database keeps the body.
                    Err(BlobError::Full(_)) => return Err("the object store is full".to_owned()),
                    Err(error @ BlobError::Storage { .. }) if now.since(at) < STORAGE_PATIENCE => {
                        problem = Some(error.to_string());
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!(%error, delivery = %row.id, "the body of a delivery cannot be kept");
                        (None, Some("storage_failed".to_owned()))
                    }
                }
            };
            moved +=
                u64::from(self.store.delivery_body_moved(row.id, at, key, omitted).await.map_err(|e| e.to_string())?);
        }
        problem.map_or(Ok(moved), Err)
    }
}

fn gone(row: &Delivery, why: &str) -> Problem {
    let why = match why {
        "size_exceeded" => "it is larger than event_log.max_payload_bytes (size_exceeded)",
        "storage_failed" => "the object store did not take it (storage_failed)",
        "expired" => "it is older than event_log.payload_days (expired)",
        other => other,
    };
    Problem::new(Code::Gone, format!("the body of delivery {} is not kept: {why}", row.id))
}

fn unavailable(error: &dyn std::error::Error) -> Problem {
    tracing::warn!(%error, "the body of a delivery cannot be read");
    Problem::unavailable("the body cannot be read now; try again", 5)
}

fn pack(body: &DeliveryBody) -> Vec<u8> {
    use base64::Engine as _;
    let kept =
        Kept { headers: body.headers.clone(), body: base64::engine::general_purpose::STANDARD.encode(&body.body) };
    // JSON of texts; compressing into memory cannot fail.
    zstd::encode_all(&*serde_json::to_vec(&kept).unwrap_or_default(), 3).unwrap_or_default()
}

fn unpack(bytes: &[u8]) -> Option<DeliveryBody> {
    use base64::Engine as _;
    let kept: Kept = serde_json::from_slice(&zstd::decode_all(bytes).ok()?).ok()?;
    let body = base64::engine::general_purpose::STANDARD.decode(kept.body).ok()?;
    Some(DeliveryBody { headers: kept.headers, body })
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::{DeliveryRowId, SourceId};
    use kici_engine::time::Clock as _;
    use kici_store::model::{DeliveryInserted, DeliveryOutcome, DeliveryStatus, NewDelivery};
    use kici_store::testing::{TestIds, TestStore};
    use serde_json::json;

    use super::*;

    const MAX: usize = 1000;

    fn payloads(test: &TestStore, dir: &std::path::Path) -> Payloads {
        Payloads { store: test.store.clone(), blobs: Blobs::local(dir).unwrap() }
    }

    fn new(id: &str, body: Vec<u8>) -> NewDelivery {
        NewDelivery {
            org: "default".to_owned(),
            source_id: SourceId::mint(&TestIds),
            delivery_id: id.to_owned(),
            event: "push".to_owned(),
            action: None,
            provider: "generic".to_owned(),
            channel: "direct".to_owned(),
            repo: None,
            git_ref: None,
            sha: None,
            request_id: "r".to_owned(),
            headers: json!({"content-type": "text/x-any"}),
            body,
            claimed_by: None,
        }
    }

    async fn insert(test: &TestStore, new: NewDelivery) -> DeliveryRowId {
        match test.store.delivery_insert(new).await.unwrap() {
            DeliveryInserted::Inserted(id) | DeliveryInserted::Reopened(id) => id,
            other => panic!("{other:?}"),
        }
    }

    async fn finish(test: &TestStore, id: DeliveryRowId, status: DeliveryStatus) {
        let outcome = DeliveryOutcome { status, error: None, note: None };
        assert!(test.store.delivery_finish(id, outcome).await.unwrap());
    }

    async fn row(test: &TestStore, id: DeliveryRowId) -> Delivery {
        test.store.delivery_get(id).await.unwrap().unwrap()
    }

    #[test]
    fn a_body_of_any_bytes_survives_packing() {
        let body = DeliveryBody { headers: json!({"a": "b"}), body: vec![0, 255, 10, 200] };
        assert_eq!(unpack(&pack(&body)), Some(body));
        assert_eq!(unpack(b"nonsense"), None);
    }

    /// R7.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_body_of_a_finished_delivery_moves_to_the_object_store_and_reads_as_it_came() {
        TestStore::each(|test| async move {
            let dir = tempfile::tempdir().unwrap();
            let payloads = payloads(&test, dir.path());
            let bytes = b"{\"zen\":\"\xff not UTF-8\"}".to_vec();
            let id = insert(&test, new("d1", bytes.clone())).await;
            let open = row(&test, id).await;
            assert_eq!(payloads.move_finished(MAX, 10, test.clock.now()).await, Ok(0), "it is still needed");
            finish(&test, id, DeliveryStatus::Processed).await;
            assert_eq!(payloads.move_finished(MAX, 10, test.clock.now()).await, Ok(1));
            assert_eq!(payloads.move_finished(MAX, 10, test.clock.now()).await, Ok(0));
            assert_eq!(test.store.delivery_body(id).await.unwrap(), None, "it left the database");
            let moved = row(&test, id).await;
            let key = moved.payload_key.clone().unwrap();
            let date = moved.received_at.to_datetime().format("%Y-%m-%d").to_string();
            assert_eq!(key, format!("event-log/default/{date}/{}.zst", id.uuid()));
            for seen in [&moved, &open] {
                // Also for a reader who looked at the row before.
                let body = payloads.body(seen).await.unwrap();
                assert_eq!((&body.body, body.headers["content-type"].as_str()), (&bytes, Some("text/x-any")));
            }
            payloads.blobs.delete(&key).await.unwrap();
            let gone = payloads.body(&moved).await.unwrap_err();
            assert_eq!(gone.status, 410);
            assert!(gone.detail.contains("event_log.payload_days"), "{}", gone.detail);
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_body_over_the_limit_is_dropped_once_it_is_processed_and_its_row_says_so() {
        TestStore::each(|test| async move {
            let dir = tempfile::tempdir().unwrap();
            let payloads = payloads(&test, dir.path());
            let (at_limit, over) =
                (insert(&test, new("a", vec![b'x'; MAX])), insert(&test, new("b", vec![b'x'; MAX + 1])));
            let (at_limit, over) = (at_limit.await, over.await);
            for id in [at_limit, over] {
                finish(&test, id, DeliveryStatus::Processed).await;
            }
            assert_eq!(payloads.move_finished(MAX, 10, test.clock.now()).await, Ok(2));
            assert!(row(&test, at_limit).await.payload_key.is_some());
            let left_out = row(&test, over).await;
            assert_eq!(
                (left_out.payload_key.as_deref(), left_out.payload_omitted.as_deref()),
                (None, Some("size_exceeded"))
            );
            assert_eq!(left_out.payload_bytes, MAX as u64 + 1);
            let gone = payloads.body(&left_out).await.unwrap_err();
            assert_eq!(gone.status, 410);
            assert!(gone.detail.contains("event_log.max_payload_bytes"), "{}", gone.detail);
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_the_object_store_does_not_take_waits_an_hour_and_is_dropped_then() {
        TestStore::each(|test| async move {
            let dir = tempfile::tempdir().unwrap();
            let payloads = payloads(&test, dir.path());
            // Nothing can be put below a file.
            std::fs::write(dir.path().join("event-log"), "").unwrap();
            let id = insert(&test, new("d1", b"{}".to_vec())).await;
            finish(&test, id, DeliveryStatus::Processed).await;
            let problem = payloads.move_finished(MAX, 10, test.clock.now()).await.unwrap_err();
            assert!(problem.contains("storage failed"), "{problem}");
            assert_eq!(payloads.body(&row(&test, id).await).await.unwrap().body, b"{}");
            test.clock.advance(STORAGE_PATIENCE - Duration::from_secs(1));
            payloads.move_finished(MAX, 10, test.clock.now()).await.unwrap_err();
            test.clock.advance(Duration::from_secs(1));
            assert_eq!(payloads.move_finished(MAX, 10, test.clock.now()).await, Ok(1));
            let left_out = row(&test, id).await;
            assert_eq!(left_out.payload_omitted.as_deref(), Some("storage_failed"));
            assert_eq!(left_out.status, DeliveryStatus::Processed, "what came of it stays");
            assert_eq!(payloads.body(&left_out).await.unwrap_err().status, 410);

            // One that heals in time loses nothing.
            let id = insert(&test, new("d2", b"{}".to_vec())).await;
            finish(&test, id, DeliveryStatus::Processed).await;
            payloads.move_finished(MAX, 10, test.clock.now()).await.unwrap_err();
            std::fs::remove_file(dir.path().join("event-log")).unwrap();
            assert_eq!(payloads.move_finished(MAX, 10, test.clock.now()).await, Ok(1));
            assert_eq!(payloads.body(&row(&test, id).await).await.unwrap().body, b"{}");
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_body_of_a_delivery_that_was_sent_again_while_the_old_one_was_moved_is_kept() {
        TestStore::each(|test| async move {
            let dir = tempfile::tempdir().unwrap();
            let payloads = payloads(&test, dir.path());
            let first = new("d1", b"old".to_vec());
            let id = insert(&test, first.clone()).await;
            finish(&test, id, DeliveryStatus::Failed).await;
            let listed = test.store.delivery_bodies_finished(10).await.unwrap().remove(0);
            assert_eq!(insert(&test, NewDelivery { body: b"new".to_vec(), ..first }).await, id);
            let at = listed.finished_at.unwrap();
            let moved = test.store.delivery_body_moved(id, at, Some("event-log/x".to_owned()), None).await.unwrap();
            assert!(!moved);
            assert_eq!(payloads.body(&row(&test, id).await).await.unwrap().body, b"new");
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_dead_letter_keeps_its_body_in_the_database_until_it_is_discarded() {
        TestStore::each(|test| async move {
            let dir = tempfile::tempdir().unwrap();
            let payloads = payloads(&test, dir.path());
            let id = insert(&test, new("d1", vec![b'x'; MAX + 1])).await;
            finish(&test, id, DeliveryStatus::Dead).await;
            assert_eq!(payloads.move_finished(MAX, 10, test.clock.now()).await, Ok(0), "a retry needs it");
            assert!(test.store.delivery_discard(id, "not wanted".to_owned()).await.unwrap());
            assert_eq!(payloads.move_finished(MAX, 10, test.clock.now()).await, Ok(1));
        })
        .await;
    }
}
