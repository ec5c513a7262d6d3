//! Fresh identifiers.

use kici_engine::ids::IdSource;
use uuid::Uuid;

/// Mints UUID version 7 (RFC 9562 section 5.7) from the wall clock and the kernel's randomness. Ids of one process rise.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemIds;

impl IdSource for SystemIds {
    #[allow(clippy::disallowed_methods, reason = "the one source of fresh ids")]
    fn uuid(&self) -> Uuid {
        Uuid::now_v7()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_rise() {
        let (a, b) = (SystemIds.uuid(), SystemIds.uuid());
        assert!(a < b);
        assert_eq!(a.get_version_num(), 7);
    }
}
