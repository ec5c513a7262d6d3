//! Claim codes, provisioning errors and the system's properties of hosts.

use std::time::Duration;

use futures::future::join_all;
use kici_engine::time::Clock;
use kici_store::StoreError;
use kici_store::model::*;
use kici_store::testing::{TestStore, agent};

use crate::fixtures::{Plan, claim};

fn new(t: &TestStore, hash: &str, name: &str) -> NewClaim {
    NewClaim {
        claim_hash: hash.to_owned(),
        claim_prefix: "0123456789ab".to_owned(),
        claim: Claim {
            agent_id: agent(name),
            scaler_name: "cloud".to_owned(),
            labels: vec!["linux".to_owned(), "kici:agent:event".to_owned()],
            mandatory_labels: vec!["linux".to_owned()],
            agent_token_ttl: Duration::from_secs(600),
            orchestrator_url: "http://127.0.0.1:4000".to_owned(),
        },
        expires_at: t.clock.now().plus(Duration::from_secs(300)),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_code_buys_one_token_and_says_why_it_buys_no_other() {
    TestStore::each(|t| async move {
        let redeem = |hash: &str| t.store.claim_redeem(hash.to_owned(), "10.0.0.7".to_owned());
        let refused = Redeemed::Refused;
        for (hash, name) in [("h1", "scaler-event-1"), ("h2", "scaler-event-2"), ("h3", "scaler-event-3")] {
            t.store.claim_create(new(&t, hash, name)).await.unwrap();
        }
        let again = t.store.claim_create(new(&t, "h1", "scaler-event-9")).await.unwrap_err();
        assert!(matches!(again, StoreError::Exists { .. }), "{again}");
        let answers = join_all((0..8).map(|_| redeem("h1"))).await;
        let bought: Vec<_> =
            answers.into_iter().map(Result::unwrap).filter(|a| matches!(a, Redeemed::Claim(_))).collect();
        assert_eq!(bought, [Redeemed::Claim(new(&t, "h1", "scaler-event-1").claim)]);
        assert_eq!(redeem("h1").await.unwrap(), refused(ClaimRefused::Consumed));
        assert_eq!(redeem("h9").await.unwrap(), refused(ClaimRefused::Invalid));
        assert_eq!(t.store.claims_revoke(agent("scaler-event-2")).await.unwrap(), 1);
        assert_eq!(t.store.claims_revoke(agent("scaler-event-1")).await.unwrap(), 0, "it is used up");
        assert_eq!(redeem("h2").await.unwrap(), refused(ClaimRefused::Revoked));
        t.clock.advance(Duration::from_secs(300));
        assert_eq!(redeem("h3").await.unwrap(), refused(ClaimRefused::Expired));
        assert_eq!(t.store.claims_reap(t.clock.now()).await.unwrap(), 0);
        assert_eq!(t.store.claims_reap(t.clock.now().plus(Duration::from_secs(1))).await.unwrap(), 3);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provisioning_error_stays_with_the_row_until_it_is_handed_over() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").queued("b").create(&t).await;
        let set = |error: Option<&str>| t.store.queue_provisioning_set(vec![(run.ready[0], error.map(str::to_owned))]);
        let error = async || t.store.queue_get(run.ready[0]).await.unwrap().unwrap().last_provisioning_error;
        set(Some("no such image")).await.unwrap();
        assert_eq!(error().await.as_deref(), Some("no such image"));
        assert_eq!(t.store.queue_oldest_pending(1).await.unwrap()[0].job_id, run.ready[0]);
        let of = t.store.queue_pending_of(run.ready.clone()).await.unwrap();
        assert_eq!(of.iter().map(|row| row.job_id).collect::<Vec<_>>(), run.ready);
        assert_eq!(claim(&t, "a1", 1).await[0].job_ref.job_id, run.ready[0]);
        assert_eq!(error().await, None);
        set(Some("too late")).await.unwrap();
        assert_eq!(error().await, None);
        assert_eq!(t.store.queue_pending_of(run.ready.clone()).await.unwrap().len(), 1);
    })
    .await;
}
