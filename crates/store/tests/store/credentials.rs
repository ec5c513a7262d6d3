//! What jobs declare for git, and the audit log of secrets.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::{JobId, RunId};
use kici_engine::lock::{CredentialMaterial, GitAccess, GitCredentials, Material, NamedCredential};
use kici_engine::state::JobStatus;
use kici_engine::time::Clock as _;
use kici_store::model::*;
use kici_store::testing::{TestIds, TestStore};
use serde_json::json;

use crate::fixtures::{Plan, entry, result, start};

fn declared() -> GitCredentials {
    let text = |text: &str| Material::Value(text.to_owned());
    let bot = NamedCredential {
        host: Some("git.example".to_owned()),
        repos: vec!["team/*".to_owned()],
        material: CredentialMaterial::Basic { user: text("bot"), token: text("s3cret") },
    };
    GitCredentials {
        repos: vec!["acme/*".to_owned()],
        access: GitAccess::Write,
        named: [("bot".to_owned(), bot)].into(),
        default: Some("bot".to_owned()),
        ..GitCredentials::default()
    }
}

/// Declares for every job that becomes ready.
#[derive(Debug)]
struct Declares;

impl Activate for Declares {
    fn activate(&self, _: &ReadyJob) -> Activation {
        Activation::Enqueue(QueueEntry { git_credentials: Some(Box::new(declared())), ..entry("default") })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_job_declares_is_there_as_soon_as_its_queue_row_is() {
    TestStore::each(|t| async move {
        let first = JobStart::Queued(QueueEntry { git_credentials: Some(Box::new(declared())), ..entry("default") });
        let plan =
            Plan::new("k").with("a", "a", |job| job.start = first).job("b").needs("b", "a", &[JobStatus::Success]);
        let run = t.store.run_create(plan.queued("plain").run(), None, Arc::new(Declares)).await.unwrap().run_id;
        let jobs = t.store.jobs_of_run(run).await.unwrap();
        let of = async |at: usize| t.store.job_git_credentials(jobs[at].id).await.unwrap();
        assert_eq!((of(0).await, of(1).await, of(2).await), (Some(declared()), None, None));
        let a = start(&t, "a1").await;
        let done = t.store.job_finish(result(&a, JobStatus::Success), Arc::new(Declares)).await.unwrap();
        assert!(matches!(done, JobFinished::Applied(_)), "{done:?}");
        assert_eq!(of(1).await, Some(declared()));
        assert!(!format!("{:?}", of(1).await).contains("s3cret"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_log_is_listed_by_filter_and_page_and_outlives_its_runs() {
    TestStore::each(|t| async move {
        let (run, job) = (RunId::mint(&TestIds), JobId::mint(&TestIds));
        let new = |n: u32, outcome: &str| NewSecretAudit {
            org: "default".to_owned(),
            actor_type: "agent".to_owned(),
            actor_id: format!("a{n}"),
            role: None,
            action: "git_credential.mint".to_owned(),
            scope: Some("git.example/acme/app\u{0}".to_owned()),
            key: None,
            context_name: None,
            run_id: (n > 0).then_some(run),
            job_id: Some(job),
            outcome: outcome.to_owned(),
            metadata: Some(json!({"n": n})),
        };
        for (n, outcome) in [(0, "allowed"), (1, "denied"), (2, "allowed")] {
            t.store.secret_audit_insert(new(n, outcome)).await.unwrap();
            t.clock.advance(Duration::from_secs(1));
        }
        let list = async |filter: SecretAuditFilter, limit| {
            t.store.secret_audit_list(filter, Page { limit, after: None }).await.unwrap()
        };
        let names = |listed: &Listed<SecretAudit>| {
            listed.items.iter().map(|row| row.entry.actor_id.clone()).collect::<Vec<_>>()
        };
        let first = list(SecretAuditFilter::default(), 2).await;
        assert_eq!(names(&first), ["a2", "a1"]);
        assert_eq!(first.items[0].entry.metadata, Some(json!({"n": 2})));
        let page = Page { limit: 2, after: first.next };
        let rest = t.store.secret_audit_list(SecretAuditFilter::default(), page).await.unwrap();
        assert_eq!((names(&rest), rest.next), (vec!["a0".to_owned()], None));
        let of_run = SecretAuditFilter { run_id: Some(run), outcome: Some("denied".into()), ..Default::default() };
        assert_eq!(names(&list(of_run, 9).await), ["a1"]);
        assert_eq!(t.store.secret_audit_prune(t.clock.now().minus(Duration::from_secs(2)), 9).await.unwrap(), 1);
        assert_eq!(names(&list(SecretAuditFilter::default(), 9).await), ["a2", "a1"]);
        let bad = t.store.secret_audit_insert(new(3, "maybe")).await;
        assert!(bad.is_err());
    })
    .await;
}
