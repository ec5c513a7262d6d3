//! Caches, artifacts and uploads.

use std::time::Duration;

use kici_engine::cache::CacheScope;
use kici_engine::ids::{IdSource as _, SourceId, UploadId};
use kici_engine::state::JobStatus;
use kici_engine::time::Clock as _;
use kici_store::model::*;
use kici_store::testing::{TestIds, TestStore, agent};

use crate::fixtures::{Plan, finish, start};

const LIMITS: UploadLimits = UploadLimits { max_bytes: 1000, quota_bytes: 1000, per_run: 2, open: 4 };

fn sha(n: u8) -> String {
    format!("{n:02x}").repeat(32)
}

/// A running job, and where it reads and writes.
async fn running(t: &TestStore, key: &str, name: &str, scope: CacheScope) -> (ClaimedJob, CacheSpace) {
    Plan::new(key).queued(name).create(t).await;
    let job = start(t, &format!("agent-{key}")).await;
    let space = CacheSpace {
        org: "default".to_owned(),
        source_id: SourceId::from_uuid(uuid::Uuid::from_u128(7)),
        repo: "o/r".to_owned(),
        scope,
        run_id: job.job_ref.run_id,
    };
    (job, space)
}

fn new(job: &ClaimedJob, space: &CacheSpace, kind: UploadKind, name: &str) -> NewUpload {
    let id = UploadId::from_uuid(TestIds.uuid());
    NewUpload {
        id,
        kind,
        job: job.job_ref,
        agent_id: job.agent_id.clone(),
        space: space.clone(),
        name: name.to_owned(),
        keep_until: None,
        blob_prefix: format!("b/{}", id.uuid()),
        limits: LIMITS,
    }
}

fn commit(upload: &NewUpload, sha256: String) -> CommitUpload {
    CommitUpload {
        id: upload.id,
        kind: upload.kind,
        job: upload.job,
        agent_id: upload.agent_id.clone(),
        space: upload.space.clone(),
        name: upload.name.clone(),
        sha256,
        limits: upload.limits,
    }
}

/// Begins, receives and commits.
async fn stored(t: &TestStore, upload: &NewUpload, content: u8, size: u64) -> Committed {
    assert_eq!(t.store.upload_begin(upload.clone()).await.unwrap(), UploadBegun::Open);
    let taken = t.store.upload_take(upload.id, 9).await.unwrap().unwrap();
    assert!(t.store.upload_received(upload.id, taken.attempts, sha(content), size).await.unwrap());
    t.store.upload_commit(commit(upload, sha(content))).await.unwrap()
}

/// Objects that are due to be deleted, and forgets them.
async fn deleted(t: &TestStore) -> usize {
    let due = t.store.outbox_take(vec!["blob.delete".to_owned()], 100, Duration::from_secs(1)).await.unwrap();
    for item in &due {
        assert!(item.payload["key"].as_str().unwrap().starts_with("b/"));
        t.store.outbox_done(item.id).await.unwrap();
    }
    due.len()
}

async fn find(t: &TestStore, space: &CacheSpace, key: &str, prefixes: &[&str]) -> Option<String> {
    let prefixes = prefixes.iter().map(|prefix| (*prefix).to_owned()).collect();
    t.store.cache_find(space.clone(), key.to_owned(), prefixes).await.unwrap().map(|found| found.key)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_save_stays_and_prefixes_find_the_newest() {
    TestStore::each(|t| async move {
        let (job, space) = running(&t, "a", "a", CacheScope::Shared).await;
        let one = new(&job, &space, UploadKind::Cache, "cargo-1");
        assert_eq!(stored(&t, &one, 1, 10).await, Committed::Stored { size: 10 });
        // Said again, since the answer may have been lost.
        assert_eq!(t.store.upload_commit(commit(&one, sha(1))).await.unwrap(), Committed::Stored { size: 10 });
        let again = new(&job, &space, UploadKind::Cache, "cargo-1");
        assert_eq!(t.store.upload_begin(again).await.unwrap(), UploadBegun::Exists);
        t.clock.advance(Duration::from_secs(1));
        stored(&t, &new(&job, &space, UploadKind::Cache, "cargo-2"), 2, 10).await;
        stored(&t, &new(&job, &space, UploadKind::Cache, "Cargo-3%_"), 3, 10).await;
        assert_eq!(find(&t, &space, "cargo-1", &[]).await.as_deref(), Some("cargo-1"));
        assert_eq!(find(&t, &space, "cargo-9", &["npm-", "cargo-"]).await.as_deref(), Some("cargo-2"));
        // Prefixes are text, with their case, not patterns.
        assert_eq!(find(&t, &space, "x", &["CARGO-", "cargo_", "%"]).await, None);
        assert_eq!(find(&t, &space, "x", &["Cargo-3%"]).await.as_deref(), Some("Cargo-3%_"));
        let other = CacheSpace { repo: "o/other".to_owned(), ..space.clone() };
        let forge = CacheSpace { source_id: SourceId::from_uuid(uuid::Uuid::from_u128(8)), ..space };
        assert_eq!(
            (find(&t, &other, "cargo-1", &["c"]).await, find(&t, &forge, "cargo-1", &["c"]).await),
            (None, None)
        );
    })
    .await;
}

/// Acceptance 22 of the agent's specification.
#[tokio::test(flavor = "multi_thread")]
async fn acceptance_22_two_runs_that_save_one_key_at_once_make_one_entry_and_both_succeed() {
    TestStore::each(|t| async move {
        let (first, space) = running(&t, "a", "a", CacheScope::Shared).await;
        let (second, other) = running(&t, "b", "b", CacheScope::Shared).await;
        let uploads = [new(&first, &space, UploadKind::Cache, "k"), new(&second, &other, UploadKind::Cache, "k")];
        for (n, upload) in (1..).zip(&uploads) {
            assert_eq!(t.store.upload_begin(upload.clone()).await.unwrap(), UploadBegun::Open);
            t.store.upload_take(upload.id, 9).await.unwrap().unwrap();
            assert!(t.store.upload_received(upload.id, 1, sha(n), 10).await.unwrap());
        }
        let commits = (1..).zip(&uploads).map(|(n, upload)| t.store.upload_commit(commit(upload, sha(n))));
        let mut ends = futures::future::join_all(commits).await.into_iter().map(Result::unwrap).collect::<Vec<_>>();
        ends.sort_by_key(|end| *end == Committed::Exists);
        assert_eq!(ends, [Committed::Stored { size: 10 }, Committed::Exists]);
        let entries = t.store.cache_list(CacheFilter::default(), Page::default()).await.unwrap().items;
        assert_eq!((entries.len(), deleted(&t).await), (1, 1), "the loser's object goes");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_untrusted_run_writes_is_read_by_nobody_else() {
    TestStore::each(|t| async move {
        let (trusted, shared) = running(&t, "t", "t", CacheScope::Shared).await;
        let (fork, isolated) = running(&t, "f", "f", CacheScope::Isolated).await;
        let (_, other_fork) = running(&t, "g", "g", CacheScope::Isolated).await;
        stored(&t, &new(&fork, &isolated, UploadKind::Cache, "k"), 1, 10).await;
        assert_eq!(find(&t, &isolated, "k", &[]).await.as_deref(), Some("k"));
        assert_eq!((find(&t, &shared, "k", &["k"]).await, find(&t, &other_fork, "k", &["k"]).await), (None, None));
        // A trusted one may still save the key, and all may read that.
        assert_eq!(
            stored(&t, &new(&trusted, &shared, UploadKind::Cache, "k"), 1, 20).await,
            Committed::Stored { size: 20 }
        );
        assert_eq!(deleted(&t).await, 0, "equal content in another space is another object");
        assert_eq!(find(&t, &other_fork, "k", &[]).await.as_deref(), Some("k"));
        let own = t.store.cache_find(isolated, "k".to_owned(), Vec::new()).await.unwrap().unwrap();
        assert_eq!(own.size, 10, "its own first");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_of_a_job_that_was_taken_away_or_is_over_are_refused() {
    TestStore::each(|t| async move {
        let (job, space) = running(&t, "a", "a", CacheScope::Shared).await;
        let upload = new(&job, &space, UploadKind::Cache, "k");
        assert_eq!(t.store.upload_begin(upload.clone()).await.unwrap(), UploadBegun::Open);
        t.store.upload_take(upload.id, 9).await.unwrap().unwrap();
        assert!(t.store.upload_received(upload.id, 1, sha(1), 10).await.unwrap());
        assert_eq!(t.store.upload_commit(commit(&upload, sha(2))).await.unwrap(), Committed::Mismatch);
        for (other, what) in [
            (CommitUpload { agent_id: agent("thief"), ..commit(&upload, sha(1)) }, "another agent"),
            (CommitUpload { job: JobRef { epoch: 9, ..upload.job }, ..commit(&upload, sha(1)) }, "another epoch"),
        ] {
            assert_eq!(t.store.upload_commit(other).await.unwrap(), Committed::NotHeld, "{what}");
        }
        let stale = NewUpload { job: JobRef { epoch: 9, ..upload.job }, ..new(&job, &space, UploadKind::Cache, "l") };
        assert_eq!(t.store.upload_begin(stale).await.unwrap(), UploadBegun::NotHeld);
        finish(&t, &job, JobStatus::Success).await;
        assert_eq!(t.store.upload_commit(commit(&upload, sha(1))).await.unwrap(), Committed::NotHeld);
        assert!(t.store.cache_list(CacheFilter::default(), Page::default()).await.unwrap().items.is_empty());
        // What it left goes once it is old.
        assert_eq!(t.store.uploads_abandon(t.clock.now(), 9).await.unwrap(), 0);
        t.clock.advance(Duration::from_secs(1));
        assert_eq!(t.store.uploads_abandon(t.clock.now(), 9).await.unwrap(), 1);
        assert_eq!((deleted(&t).await, t.store.upload_take(upload.id, 9).await.unwrap()), (1, None));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_has_an_object_of_its_own_and_only_the_received_one_is_kept() {
    TestStore::each(|t| async move {
        let (job, space) = running(&t, "a", "a", CacheScope::Shared).await;
        let upload = new(&job, &space, UploadKind::Cache, "k");
        t.store.upload_begin(upload.clone()).await.unwrap();
        assert_eq!(t.store.upload_commit(commit(&upload, sha(1))).await.unwrap(), Committed::NotReceived);
        let keys: Vec<String> = {
            let mut keys = Vec::new();
            for _ in 0..3 {
                keys.push(t.store.upload_take(upload.id, 3).await.unwrap().unwrap().blob_key);
            }
            keys
        };
        assert_eq!(t.store.upload_take(upload.id, 3).await.unwrap(), None, "no more attempts");
        assert!(t.store.upload_received(upload.id, 2, sha(1), 10).await.unwrap());
        assert!(!t.store.upload_received(upload.id, 1, sha(2), 10).await.unwrap(), "never back to an earlier one");
        assert_eq!(t.store.upload_commit(commit(&upload, sha(1))).await.unwrap(), Committed::Stored { size: 10 });
        assert!(!t.store.upload_received(upload.id, 3, sha(2), 10).await.unwrap(), "it is over");
        let found = t.store.cache_find(space, "k".to_owned(), Vec::new()).await.unwrap().unwrap();
        assert_eq!((found.blob_key, deleted(&t).await), (keys[1].clone(), 2));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_quota_evicts_untrusted_entries_first_then_the_least_read_and_never_uploads() {
    TestStore::each(|t| async move {
        let (job, shared) = running(&t, "t", "t", CacheScope::Shared).await;
        let (fork, isolated) = running(&t, "f", "f", CacheScope::Isolated).await;
        for (n, key) in [(1, "old"), (2, "mid")] {
            stored(&t, &new(&job, &shared, UploadKind::Cache, key), n, 300).await;
            t.clock.advance(Duration::from_secs(1));
        }
        stored(&t, &new(&fork, &isolated, UploadKind::Cache, "fork"), 3, 300).await;
        let open = new(&job, &shared, UploadKind::Cache, "open");
        t.store.upload_begin(open.clone()).await.unwrap();
        t.store.upload_take(open.id, 9).await.unwrap().unwrap();
        t.store.upload_received(open.id, 1, sha(9), 900).await.unwrap();
        let keys = async || {
            let listed = t.store.cache_list(CacheFilter::default(), Page::default()).await.unwrap().items;
            let mut keys: Vec<String> = listed.into_iter().map(|entry| entry.key).collect();
            keys.sort();
            keys.join(" ")
        };
        t.clock.advance(Duration::from_secs(1));
        stored(&t, &new(&job, &shared, UploadKind::Cache, "new"), 4, 300).await;
        assert_eq!(keys().await, "mid new old");
        // What was read last stays longest.
        let old = t.store.cache_find(shared.clone(), "old".to_owned(), Vec::new()).await.unwrap().unwrap();
        t.clock.advance(Duration::from_secs(1));
        t.store.cache_read(old.id).await.unwrap();
        stored(&t, &new(&job, &shared, UploadKind::Cache, "more"), 5, 300).await;
        assert_eq!(keys().await, "more new old");
        assert_eq!(deleted(&t).await, 2);
        assert_eq!(t.store.upload_commit(commit(&open, sha(9))).await.unwrap(), Committed::Stored { size: 900 });
        assert_eq!(keys().await, "open");
        let totals = t.store.cache_totals(CacheFilter::default()).await.unwrap();
        assert_eq!((totals.entries, totals.bytes), (1, 900));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_content_is_kept_once_and_goes_with_its_last_entry() {
    TestStore::each(|t| async move {
        let (job, space) = running(&t, "a", "a", CacheScope::Shared).await;
        for key in ["one", "two"] {
            stored(&t, &new(&job, &space, UploadKind::Cache, key), 1, 10).await;
        }
        assert_eq!(deleted(&t).await, 1, "the second copy");
        let delete = async |key: &str| {
            let filter = CacheFilter { key: Some(key.to_owned()), ..CacheFilter::default() };
            t.store.cache_delete(filter, 9).await.unwrap().len()
        };
        assert_eq!((delete("one").await, deleted(&t).await), (1, 0));
        assert_eq!(find(&t, &space, "two", &[]).await.as_deref(), Some("two"));
        t.clock.advance(Duration::from_secs(60));
        assert_eq!(t.store.cache_expire(t.clock.now().minus(Duration::from_secs(61)), 9).await.unwrap(), 0);
        assert_eq!(t.store.cache_expire(t.clock.now(), 9).await.unwrap(), 1);
        assert_eq!((deleted(&t).await, delete("two").await), (1, 0));
        let gone = new(&job, &space, UploadKind::Cache, "gone");
        stored(&t, &gone, 2, 10).await;
        let found = t.store.cache_find(space.clone(), "gone".to_owned(), Vec::new()).await.unwrap().unwrap();
        t.store.cache_forget(found.id).await.unwrap();
        assert_eq!((find(&t, &space, "gone", &[]).await, deleted(&t).await), (None, 1));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn artifacts_are_unique_in_their_run_bounded_and_expire() {
    TestStore::each(|t| async move {
        let (job, space) = running(&t, "a", "a", CacheScope::Shared).await;
        let keep_until = Some(t.clock.now().plus(Duration::from_secs(10)));
        let short = NewUpload { keep_until, ..new(&job, &space, UploadKind::Artifact, "short") };
        assert_eq!(stored(&t, &short, 1, 400).await, Committed::Stored { size: 400 });
        assert_eq!(t.store.upload_commit(commit(&short, sha(1))).await.unwrap(), Committed::Stored { size: 400 });
        let twice = new(&job, &space, UploadKind::Artifact, "short");
        assert_eq!(t.store.upload_begin(twice).await.unwrap(), UploadBegun::Exists);
        stored(&t, &new(&job, &space, UploadKind::Artifact, "long"), 2, 400).await;
        let third = new(&job, &space, UploadKind::Artifact, "third");
        assert_eq!(t.store.upload_begin(third).await.unwrap(), UploadBegun::Full, "two of a run");
        let names = async || {
            let listed = t.store.artifact_list(job.job_ref.run_id).await.unwrap();
            listed.into_iter().map(|one| one.name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names().await, "long short");
        // Another run's limits are its own, the organisation's are shared.
        let (other, their) = running(&t, "b", "b", CacheScope::Isolated).await;
        assert_eq!(stored(&t, &new(&other, &their, UploadKind::Artifact, "x"), 3, 300).await, Committed::Full);
        assert!(t.store.artifact_find(other.job_ref.run_id, "short".to_owned()).await.unwrap().is_none());
        t.clock.advance(Duration::from_secs(11));
        assert_eq!(names().await, "long");
        assert_eq!(t.store.artifact_expire(9).await.unwrap(), 1);
        assert_eq!(deleted(&t).await, 2, "the refused one and the expired one");
        assert_eq!(t.store.artifact_totals().await.unwrap().bytes, 400);
    })
    .await;
}
