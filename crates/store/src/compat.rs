//! Which schemas this version may run on.
//!
//! Each migration records in `schema_compat` the oldest version that may run beside it. A migration that this version
//! does not know is a warning when that record allows it, and refuses the database otherwise.

use std::collections::BTreeSet;

use diesel::backend::Backend;
use diesel::migration::{Migration, MigrationSource, MigrationVersion};
use diesel_migrations::EmbeddedMigrations;

use crate::StoreError;

const OURS: &str = env!("CARGO_PKG_VERSION");

pub(crate) fn fault(error: &(dyn std::error::Error + Send + Sync)) -> StoreError {
    StoreError::Db(format!("migration: {error}"))
}

/// Applied migrations that are not among ours.
pub(crate) fn unknown<DB: Backend>(
    ours: &EmbeddedMigrations,
    applied: &[MigrationVersion<'static>],
) -> Result<Vec<String>, StoreError> {
    let ours: Vec<Box<dyn Migration<DB>>> = ours.migrations().map_err(|e| fault(&*e))?;
    let ours: BTreeSet<String> = ours.iter().map(|m| m.name().version().to_string()).collect();
    Ok(applied.iter().map(ToString::to_string).filter(|version| !ours.contains(version)).collect())
}

/// Judges unknown migrations by their records `(migration, min_version)`.
pub(crate) fn judge(unknown: &[String], records: &[(String, String)]) -> Result<(), StoreError> {
    for migration in unknown {
        let needs = records.iter().find(|(name, _)| name == migration).map(|(_, needs)| needs.as_str());
        if needs.is_none_or(|needs| number(needs) > number(OURS)) {
            return Err(StoreError::SchemaTooNew {
                migration: migration.clone(),
                needs: needs.unwrap_or("an unknown version").to_owned(),
                ours: OURS,
            });
        }
        tracing::warn!(migration, "the database has a migration of a newer version, which allows this one");
    }
    Ok(())
}

/// A version as numbers; what is not a number counts as larger than any.
fn number(version: &str) -> Vec<u64> {
    version.split(['.', '-']).take(3).map(|part| part.parse().unwrap_or(u64::MAX)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_migration_is_allowed_by_its_record_only() {
        let unknown = ["20990101000000".to_owned()];
        let record = |needs: &str| [(unknown[0].clone(), needs.to_owned())];
        assert!(judge(&unknown, &record("0.0.9")).is_ok());
        assert!(judge(&unknown, &record(OURS)).is_ok());
        assert!(judge(&unknown, &record("99.0.0")).is_err());
        assert!(judge(&unknown, &record("next")).is_err());
        let error = judge(&unknown, &[]).unwrap_err().to_string();
        assert!(error.contains("20990101000000") && error.contains(OURS), "{error}");
    }
}
