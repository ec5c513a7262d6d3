//! Bodies of deliveries: in the database until they are processed, in the object store until they expire.

use kici_api::problem::{Code, Problem};
use kici_blobs::{BlobError, Blobs};
use kici_store::Store;
use kici_store::model::{Delivery, DeliveryBody};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// Largest packed body: a body of the largest kind that does not compress, in base64.
const MAX_PACKED: u64 = 160 * 1024 * 1024;

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
        let gone =
            |why: &str| Problem::new(Code::Gone, format!("the body of delivery {} is no longer kept: {why}", row.id));
        let unavailable = || Problem::unavailable("the body cannot be read now; try again", 5);
        if let Some(reason) = &row.payload_omitted {
            return Err(gone(reason));
        }
        if let Some(key) = &row.payload_key {
            return match self.blobs.get(key, MAX_PACKED).await {
                Ok(bytes) => unpack(&bytes).ok_or_else(Problem::internal),
                Err(BlobError::NotFound(_)) => Err(gone("expired")),
                Err(error) => {
                    tracing::warn!(%error, key, "the body of a delivery cannot be read");
                    Err(unavailable())
                }
            };
        }
        match self.store.delivery_body(row.id).await {
            Ok(body) => body.ok_or_else(|| gone("expired")),
            Err(error) => {
                tracing::warn!(%error, "the body of a delivery cannot be read");
                Err(unavailable())
            }
        }
    }

    /// Moves bodies of finished deliveries out of the database; returns how many.
    ///
    /// # Errors
    /// A text for the log; what was moved stays moved.
    pub(crate) async fn move_finished(&self, max_bytes: usize, limit: u32) -> Result<usize, String> {
        let finished = self.store.delivery_bodies_finished(limit).await.map_err(|e| e.to_string())?;
        let mut moved = 0;
        for row in finished {
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
                    Err(error) => {
                        tracing::warn!(%error, delivery = %row.id, "the body of a delivery cannot be kept");
                        (None, Some("storage_failed".to_owned()))
                    }
                }
            };
            self.store.delivery_body_moved(row.id, key, omitted).await.map_err(|e| e.to_string())?;
            moved += 1;
        }
        Ok(moved)
    }
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
    use super::*;

    #[test]
    fn a_body_of_any_bytes_survives_packing() {
        let body = DeliveryBody { headers: serde_json::json!({"a": "b"}), body: vec![0, 255, 10, 200] };
        assert_eq!(unpack(&pack(&body)), Some(body));
        assert_eq!(unpack(b"nonsense"), None);
    }
}
