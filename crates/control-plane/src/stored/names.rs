//! What objects are called: by where they belong, for people who look at the object store. The tables are what is asked.

use kici_engine::cache::CacheScope;
use kici_engine::ids::{RunId, UploadId};
use kici_store::model::CacheSpace;
use sha2::{Digest, Sha256};

/// Characters of a name that stay readable.
const READABLE: usize = 60;

/// Objects of a cache, without the number of the attempt.
pub(super) fn of_cache(space: &CacheSpace, key: &str, id: UploadId) -> String {
    let repo = segment(&format!("{}/{}", space.source_id.uuid(), space.repo), &space.repo);
    let scope = match space.scope {
        CacheScope::Shared => "shared".to_owned(),
        CacheScope::Isolated => format!("iso/{}", space.run_id.uuid()),
    };
    format!("cache/{}/{repo}/{scope}/{}.{}", segment(&space.org, &space.org), segment(key, key), id.uuid().simple())
}

/// Objects of an artifact, without the number of the attempt.
pub(super) fn of_artifact(run: RunId, name: &str, id: UploadId) -> String {
    format!("artifacts/{}/{}.{}", run.uuid(), segment(name, name), id.uuid().simple())
}

/// `shown` with its special characters replaced, and a digest of `exact`: many texts look alike after that.
fn segment(exact: &str, shown: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '_' };
    let readable: String = shown.chars().take(READABLE).map(plain).collect();
    format!("{}-{}", readable.trim_start_matches('.'), &hex::encode(Sha256::digest(exact))[..16])
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::SourceId;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn names_that_look_alike_stay_apart_and_none_is_a_path() {
        let id = UploadId::from_uuid(Uuid::from_u128(1));
        let run = RunId::from_uuid(Uuid::from_u128(2));
        let space = |repo: &str, source| CacheSpace {
            org: "default".to_owned(),
            source_id: SourceId::from_uuid(Uuid::from_u128(source)),
            repo: repo.to_owned(),
            scope: CacheScope::Shared,
            run_id: run,
        };
        let names = [
            of_cache(&space("a/b", 1), "k", id),
            of_cache(&space("a_b", 1), "k", id),
            of_cache(&space("a/b", 2), "k", id),
            of_cache(&space("a/b", 1), "k/", id),
            of_cache(&space("a/b", 1), "..", id),
            of_cache(&CacheSpace { scope: CacheScope::Isolated, ..space("a/b", 1) }, "k", id),
            of_artifact(run, "...x", id),
        ];
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{name}");
            assert!(name.split('/').all(|part| !part.is_empty() && !part.starts_with('.')), "{name}");
            assert!(name.len() < 300, "{name}");
        }
    }
}
