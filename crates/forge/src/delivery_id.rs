//! Which delivery is it (R4)? The id is what makes a second copy of the same delivery harmless.

use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::headers::Headers;
use crate::normalise::generic;
use crate::source::{Source, SourceConfig};

/// Headers that carry an id, in order.
const HEADERS: [&str; 6] = [
    "x-github-delivery",
    "x-gitea-delivery",
    "x-gogs-delivery",
    "x-gitlab-event-uuid",
    "x-delivery-id",
    "x-request-id",
];

/// Longest id that is kept as it is; a longer one is replaced by its digest.
const MAX_LEN: usize = 200;

/// For a sender that gives no id and has no window of its own.
const DEFAULT_WINDOW: Duration = Duration::from_secs(300);

/// The id of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryId {
    /// The id, 1 to 200 characters.
    pub id: String,
    /// Set when the sender gave none and the id is the digest of event and body: an equal call counts as the same
    /// delivery only while the stored row is younger than this.
    pub window: Option<Duration>,
}

/// Finds the id of a delivery: the source's own key first, then the usual headers, then a digest of event and body.
pub fn delivery_id(source: &Source, headers: &Headers, event: &str, body: &[u8]) -> DeliveryId {
    let own = match &source.config {
        SourceConfig::Generic(config) => {
            config.idempotency_key_from.as_ref().and_then(|from| generic::extract_raw(from, headers, body))
        }
        SourceConfig::Github(_) | SourceConfig::Local(_) => None,
    };
    let given = own.or_else(|| {
        HEADERS.iter().filter_map(|name| headers.get(name)).map(str::trim).find(|v| !v.is_empty()).map(str::to_owned)
    });
    if let Some(id) = given {
        let plain = id.len() <= MAX_LEN && !id.starts_with("h:") && id.bytes().all(|b| b.is_ascii_graphic());
        let id = if plain { id } else { format!("d:{}", hex::encode(Sha256::digest(id.as_bytes()))) };
        return DeliveryId { id, window: None };
    }
    let mut digest = Sha256::new();
    digest.update(event.as_bytes());
    digest.update([0]);
    digest.update(body);
    let window = match &source.config {
        SourceConfig::Generic(config) => config.dedup_window(),
        SourceConfig::Github(_) | SourceConfig::Local(_) => DEFAULT_WINDOW,
    };
    DeliveryId { id: format!("h:{}", hex::encode(digest.finalize())), window: Some(window) }
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::SourceId;
    use uuid::Uuid;

    use super::*;
    use crate::source::{Extract, GenericConfig, Verification};

    fn source(key: Option<Extract>) -> Source {
        let config = GenericConfig { idempotency_key_from: key, ..GenericConfig::new(Verification::Bearer {}) };
        Source {
            id: SourceId::from_uuid(Uuid::nil()),
            org: "default".into(),
            name: "s".into(),
            version: 1,
            config: SourceConfig::Generic(Box::new(config)),
        }
    }

    #[test]
    fn the_first_known_header_wins() {
        let s = source(None);
        let all = HEADERS.map(|name| (name, name));
        for from in 0..HEADERS.len() {
            let headers = Headers::from_iter(all[from..].iter().copied());
            assert_eq!(delivery_id(&s, &headers, "push", b"{}").id, HEADERS[from]);
        }
        let blank = Headers::from_iter([("x-github-delivery", " "), ("x-request-id", "r")]);
        assert_eq!(delivery_id(&s, &blank, "push", b"{}").id, "r");
    }

    #[test]
    fn the_configured_key_comes_first() {
        let headers = Headers::from_iter([("x-github-delivery", "g"), ("idem", "i")]);
        let by_header = source(Some(Extract::Header("Idem".into())));
        assert_eq!(delivery_id(&by_header, &headers, "e", b"{}").id, "i");
        let by_path = source(Some(Extract::Path("$.id".into())));
        assert_eq!(delivery_id(&by_path, &headers, "e", br#"{"id": 42}"#).id, "42");
        assert_eq!(delivery_id(&by_path, &headers, "e", b"not json").id, "g");
    }

    #[test]
    fn without_an_id_the_digest_counts_for_a_while() {
        let s = source(None);
        let of = |event, body: &[u8]| delivery_id(&s, &Headers::default(), event, body);
        assert_eq!(of("a", b"b"), of("a", b"b"));
        assert_ne!(of("a", b"b").id, of("ab", b"").id);
        assert_eq!(of("a", b"b").window, Some(Duration::from_secs(300)));
    }

    #[test]
    fn strange_ids_cannot_pass_for_digests_or_break_a_column() {
        let s = source(None);
        for odd in ["h:00".to_owned(), "x".repeat(201), "a\tb".to_owned()] {
            let id = delivery_id(&s, &Headers::from_iter([("x-delivery-id", odd)]), "e", b"");
            assert!(id.id.starts_with("d:") && id.window.is_none(), "{id:?}");
        }
    }
}
