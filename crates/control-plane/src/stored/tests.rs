//! The calls and the doors together, over both databases.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use kici_blobs::Blobs;
use kici_dispatch::{Ownership, Speaker};
use kici_engine::event::{Event, EventKind, ForkState};
use kici_engine::ids::{JobId, RunId, SourceId};
use kici_engine::lock::{Matcher, Selector};
use kici_protocol::agent::*;
use kici_store::model::{
    Activate, Activation, CacheFilter, ClaimRequest, JobRef, JobStart, NewJob, NewRun, Page, QueueEntry, ReadyJob,
};
use kici_store::testing::{TestIds, TestStore, agent};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use tonic::Code;
use tower::ServiceExt as _;
use zeroize::Zeroizing;

use super::*;

#[derive(Debug)]
struct Never;

impl Activate for Never {
    fn activate(&self, _: &ReadyJob) -> Activation {
        Activation::Skip { reason: "not in these tests".to_owned() }
    }
}

struct Site<'a> {
    t: &'a TestStore,
    stored: Stored,
    router: Router,
    _dir: TempDir,
}

fn event(fork: ForkState) -> Event {
    serde_json::from_value(serde_json::json!({
        "kind": EventKind::Push, "raw_name": "push", "org": "default", "routing_key": "local:x", "provider": "local",
        "source": "src", "repo": "o/r", "is_fork_pr": fork, "sender": {}, "inputs": {}, "payload": null,
        "chain_depth": 0,
    }))
    .unwrap()
}

impl<'a> Site<'a> {
    fn new(t: &'a TestStore) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::local(dir.path()).unwrap();
        let clock: Arc<dyn Clock> = t.clock.clone();
        let signer = Arc::new(Signer::new(Zeroizing::new([3; 32])));
        let config = StoredConfig {
            cache_quota: 10_000,
            cache_ttl: Duration::from_secs(60),
            artifact_bytes: 1000,
            artifacts_per_run: 2,
            artifact_quota: 10_000,
            artifact_ttl: Some(Duration::from_secs(60)),
        };
        let stored = Stored {
            store: t.store.clone(),
            blobs: blobs.clone(),
            clock: clock.clone(),
            ids: Arc::new(TestIds),
            signer: signer.clone(),
            config,
            counts: Counts::default(),
        };
        let router = kici_api::server::finish(
            super::router(Transfers::new(t.store.clone(), blobs, clock, signer)),
            Arc::new(TestIds),
        );
        Self { t, stored, router, _dir: dir }
    }

    /// A job of a fresh run that an agent holds.
    async fn job(&self, name: &str, fork: ForkState) -> Speaker {
        let labels = vec![Matcher::Exact { value: name.to_owned() }];
        let selector = Selector { labels, ..Selector::default() };
        let entry = QueueEntry {
            selector,
            requires_machine_id: None,
            expires_at: None,
            priority: 0,
            pinned_agent_id: None,
            slot: None,
            git_credentials: None,
        };
        let job = NewJob {
            id: JobId::mint(&TestIds),
            name: name.to_owned(),
            base_name: name.to_owned(),
            job_index: 0,
            variant_label: None,
            matrix: None,
            fanout: None,
            display_name: name.to_owned(),
            max_parallel: None,
            fail_fast: false,
            timeout: None,
            kind: None,
            start: JobStart::Queued(entry),
        };
        let run = NewRun {
            id: RunId::mint(&TestIds),
            org: "default".to_owned(),
            source_id: SourceId::from_uuid(uuid::Uuid::from_u128(5)),
            delivery_id: None,
            dedup_key: name.to_owned(),
            repo: "o/r".to_owned(),
            git_ref: None,
            sha: "a".repeat(40),
            workflow_name: "ci".to_owned(),
            run_name: "ci".to_owned(),
            lock_digest: "d".to_owned(),
            lock_json: b"{}".to_vec(),
            event: event(fork),
            trigger_kind: "push".to_owned(),
            inputs: Default::default(),
            request_id: "r".to_owned(),
            chain_depth: 0,
            timeout: None,
            concurrency: None,
            attempt: 1,
            parent_run_id: None,
            jobs: vec![job],
            needs: Vec::new(),
        };
        self.t.store.run_create(run, None, Arc::new(Never)).await.unwrap();
        let agent = agent(&format!("agent-{name}"));
        let pending = self.t.store.queue_selectors_pending().await.unwrap();
        let digests = pending.into_iter().map(|selector| selector.digest).collect();
        let request = ClaimRequest { agent_id: agent.clone(), digests, limit: 1, except: Vec::new() };
        let claimed = self.t.store.queue_claim(vec![request]).await.unwrap().pop().unwrap();
        Speaker { agent, job: claimed.job_ref, standing: Ownership::Owned }
    }

    async fn ask(&self, method: &str, url: &str, range: Option<&str>, body: Vec<u8>) -> (StatusCode, Vec<u8>) {
        let mut request = Request::builder().method(method).uri(url);
        if let Some(range) = range {
            request = request.header("range", range);
        }
        let response = self.router.clone().oneshot(request.body(Body::from(body)).unwrap()).await.unwrap();
        let status = response.status();
        (status, response.into_body().collect().await.unwrap().to_bytes().to_vec())
    }

    /// Saves and gives the address that it was sent to.
    async fn save(&self, speaker: &Speaker, key: &str, bytes: &[u8]) -> String {
        let begin = CacheBeginSaveRequest { job: None, key: key.to_owned() };
        let upload = self.stored.cache_begin(speaker, begin).await.unwrap().upload.unwrap();
        assert_eq!(self.ask("PUT", &upload.url, None, bytes.to_vec()).await.0, StatusCode::NO_CONTENT);
        let sha256 = hex::encode(Sha256::digest(bytes));
        let commit = CacheCommitSaveRequest { job: None, upload_id: upload.upload_id, key: key.to_owned(), sha256 };
        let done = self.stored.cache_commit(speaker, commit).await.unwrap();
        assert_eq!((done.already_exists, done.size), (false, bytes.len() as u64));
        upload.url
    }

    async fn found(&self, speaker: &Speaker, key: &str) -> Option<StoredArchive> {
        let request = CacheRestoreRequest { job: None, key: key.to_owned(), restore_keys: Vec::new() };
        self.stored.cache_restore(speaker, request).await.unwrap().hit.and_then(|hit| hit.archive)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_go_in_and_out_by_addresses_that_are_good_for_one_thing_and_a_while() {
    TestStore::each(|t| async move {
        let site = Site::new(&t);
        let speaker = site.job("a", ForkState::No).await;
        let sent = site.save(&speaker, "k", b"0123456789").await;
        let archive = site.found(&speaker, "k").await.unwrap();
        assert_eq!((archive.size, archive.sha256), (10, hex::encode(Sha256::digest(b"0123456789"))));
        assert_eq!(site.ask("GET", &archive.url, None, Vec::new()).await, (StatusCode::OK, b"0123456789".to_vec()));
        let part = site.ask("GET", &archive.url, Some("bytes=3-5"), Vec::new()).await;
        assert_eq!(part, (StatusCode::PARTIAL_CONTENT, b"345".to_vec()));
        assert_eq!(site.ask("GET", &archive.url, Some("bytes=10-"), Vec::new()).await.0, 416);
        // The upload is over: its address changes nothing any more.
        assert_eq!(site.ask("PUT", &sent, None, b"evil".to_vec()).await.0, StatusCode::GONE);
        let path = archive.url.split('?').next().unwrap();
        for url in [
            path.to_owned(),
            format!("{path}?expires=99999999999&signature=00"),
            archive.url.replace("expires=", "expires=9"),
            archive.url.replacen("/shared/", "/iso/", 1),
        ] {
            assert_eq!(site.ask("GET", &url, None, Vec::new()).await.0, StatusCode::UNAUTHORIZED, "{url}");
        }
        assert_eq!(site.ask("PUT", &archive.url, None, Vec::new()).await.0, StatusCode::METHOD_NOT_ALLOWED);
        t.clock.advance(Duration::from_secs(15 * 60 + 1));
        assert_eq!(site.ask("GET", &archive.url, None, Vec::new()).await.0, StatusCode::GONE);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_is_too_large_or_not_what_was_sent_is_not_kept() {
    TestStore::each(|t| async move {
        let site = Site::new(&t);
        let speaker = site.job("a", ForkState::No).await;
        let begin = ArtifactBeginRequest { job: None, name: "bin".to_owned(), expire_in_ms: 0 };
        let upload = site.stored.artifact_begin(&speaker, begin).await.unwrap().upload.unwrap();
        assert_eq!(upload.max_bytes, 1000);
        assert_eq!(site.ask("PUT", &upload.url, None, vec![0; 1001]).await.0, StatusCode::PAYLOAD_TOO_LARGE);
        let commit = |sha256: String| ArtifactCommitRequest {
            job: None,
            upload_id: upload.upload_id.clone(),
            name: "bin".to_owned(),
            sha256,
        };
        let code =
            async |sha256: String| site.stored.artifact_commit(&speaker, commit(sha256)).await.unwrap_err().code();
        assert_eq!(code("0".repeat(64)).await, Code::FailedPrecondition);
        assert_eq!(site.ask("PUT", &upload.url, None, vec![7; 999]).await.0, StatusCode::NO_CONTENT);
        assert_eq!(code("0".repeat(64)).await, Code::DataLoss);
        assert_eq!(code("nonsense".to_owned()).await, Code::InvalidArgument);
        let sha256 = hex::encode(Sha256::digest(vec![7; 999]));
        assert_eq!(site.stored.artifact_commit(&speaker, commit(sha256)).await.unwrap().size, 999);
        for name in ["", "..", "a/b", "a b"] {
            let begin = ArtifactBeginRequest { job: None, name: name.to_owned(), expire_in_ms: 0 };
            let error = site.stored.artifact_begin(&speaker, begin).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{name}");
        }
        let download = |name: &str, from: &str| ArtifactDownloadRequest {
            job: None,
            name: name.to_owned(),
            from: from.to_owned(),
        };
        let found = site.stored.artifact_download(&speaker, download("bin", "a")).await.unwrap().archive.unwrap();
        assert_eq!(site.ask("GET", &found.url, None, Vec::new()).await.1.len(), 999);
        for (name, from) in [("bin", "other"), ("none", "")] {
            let error = site.stored.artifact_download(&speaker, download(name, from)).await.unwrap_err();
            assert_eq!(error.code(), Code::NotFound);
        }
        let other = site.job("b", ForkState::No).await;
        let error = site.stored.artifact_download(&other, download("bin", "")).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "artifacts are of their run");
    })
    .await;
}

/// Field complaint 56, and the second half of acceptance 22: a request names neither organisation, repository, scope nor run; the
/// rows of the job decide.
#[tokio::test(flavor = "multi_thread")]
async fn complaint_56_what_a_fork_writes_no_trusted_run_reads_and_what_is_not_held_is_refused() {
    TestStore::each(|t| async move {
        let site = Site::new(&t);
        let trusted = site.job("t", ForkState::No).await;
        for (name, fork) in [("f", ForkState::Yes), ("u", ForkState::Unknown)] {
            let fork = site.job(name, fork).await;
            site.save(&fork, name, b"poison").await;
            assert!(site.found(&fork, name).await.is_some(), "its own");
            assert!(site.found(&trusted, name).await.is_none(), "{name}");
        }
        site.save(&trusted, "good", b"clean").await;
        let other = site.job("o", ForkState::Yes).await;
        assert!(site.found(&other, "good").await.is_some() && site.found(&other, "f").await.is_none());
        let listed = t.store.cache_list(CacheFilter::default(), Page::default()).await.unwrap().items;
        assert_eq!(listed.iter().filter(|entry| entry.run_id.is_some()).count(), 2);

        for (what, speaker) in [
            ("another agent", Speaker { agent: agent("thief"), ..trusted.clone() }),
            ("a stale epoch", Speaker { job: JobRef { epoch: 9, ..trusted.job }, ..trusted.clone() }),
            ("another run", Speaker { job: JobRef { run_id: other.job.run_id, ..trusted.job }, ..trusted.clone() }),
            ("not the session's", Speaker { standing: Ownership::NotOwned, ..trusted.clone() }),
            ("an old one", Speaker { standing: Ownership::StaleEpoch, ..trusted.clone() }),
        ] {
            let request = CacheRestoreRequest { job: None, key: "good".to_owned(), restore_keys: Vec::new() };
            let error = site.stored.cache_restore(&speaker, request).await.unwrap_err();
            assert_eq!(
                (error.code(), error.message()),
                (Code::PermissionDenied, kici_protocol::NOT_ASSIGNED),
                "{what}"
            );
            let begin = CacheBeginSaveRequest { job: None, key: "x".to_owned() };
            assert_eq!(site.stored.cache_begin(&speaker, begin).await.unwrap_err().code(), Code::PermissionDenied);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_entries_and_artifacts_go_with_their_objects_and_an_entry_without_an_object_is_a_miss() {
    TestStore::each(|t| async move {
        let site = Site::new(&t);
        let speaker = site.job("a", ForkState::No).await;
        site.save(&speaker, "old", b"old").await;
        t.clock.advance(Duration::from_secs(40));
        site.save(&speaker, "young", b"young").await;
        let objects = async || site.stored.blobs.list("cache", 10).await.unwrap().len();
        t.clock.advance(Duration::from_secs(30));
        assert_eq!(site.stored.sweep().await.unwrap(), 1);
        assert_eq!((site.stored.delete_objects().await.unwrap(), objects().await), (1, 1));
        assert!(site.found(&speaker, "old").await.is_none());
        let left = site.stored.blobs.list("cache", 10).await.unwrap().remove(0);
        site.stored.blobs.delete(&left.key).await.unwrap();
        assert!(site.found(&speaker, "young").await.is_none());
        // And is no hindrance to the next save.
        site.save(&speaker, "young", b"again").await;
        assert_eq!(site.stored.counts.both(), (0, 2));
    })
    .await;
}
