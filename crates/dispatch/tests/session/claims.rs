//! Claim codes: one token each, and an end with a reason.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use futures::future::join_all;
use kici_access::{Token, TokenKind};
use kici_dispatch::{AgentAuth, ClaimError, Credentials};
use kici_store::model::{AccessFilter, Claim, ClaimRefused, NewClaim, Page};
use secrecy::ExposeSecret;

use crate::support::*;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const NAME: &str = "scaler-event-0123456789abcdef";

async fn issued(world: &World, life: Duration) -> String {
    let code = Token::generate(TokenKind::Claim, getrandom::fill).unwrap();
    let claim = Claim {
        agent_id: instance(NAME),
        scaler_name: "cloud".into(),
        labels: vec!["linux".into(), "kici:agent:event".into(), "kici:scaler:cloud".into()],
        mandatory_labels: vec!["linux".into()],
        agent_token_ttl: Duration::from_secs(600),
        orchestrator_url: "http://127.0.0.1:4000".into(),
    };
    let new = NewClaim {
        claim_hash: code.hash(),
        claim_prefix: code.display_prefix().to_owned(),
        claim,
        expires_at: world.clock.now().plus(life),
    };
    world.store.claim_create(new).await.unwrap();
    code.secret().expose_secret().to_owned()
}

async fn redeem(world: &World, code: &str) -> Result<Credentials, ClaimRefused> {
    match world.dispatcher.redeem_claim(code, HERE).await {
        Ok(credentials) => Ok(credentials),
        Err(ClaimError::Refused(reason)) => Err(reason),
        Err(other) => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_20_of_two_that_bring_one_code_one_gets_the_token_and_the_other_is_told_and_noted() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let code = issued(&world, Duration::from_secs(300)).await;
            let answers = join_all((0..6).map(|_| redeem(&world, &code))).await;
            let mut bought: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
            let mine = bought.pop().expect("one gets it");
            assert!(bought.is_empty());
            assert!(answers.iter().filter_map(|a| a.as_ref().err()).all(|reason| *reason == ClaimRefused::Consumed));
            assert_eq!((mine.agent_id.as_str(), mine.labels.len()), (NAME, 3));
            let filter = AccessFilter { action: Some("scaler_claim.redeem".into()), ..AccessFilter::default() };
            let noted = world.store.access_log_list(filter, Page { after: None, limit: 20 }).await.unwrap().items;
            let outcomes = |outcome: &str| noted.iter().filter(|access| access.entry.outcome == outcome).count();
            assert_eq!((outcomes("allowed"), outcomes("denied")), (1, 5));
            assert!(noted.iter().all(|access| !code.contains(access.entry.target_id.as_deref().unwrap())
                || access.entry.target_id.as_ref().unwrap().len() == 8));

            // The token is for this agent and its labels, and facts about its host.
            let token = mine.agent_token.expose_secret();
            let with = async |name: &str, labels: &[&str]| Agent::with(&world, register(name, labels), token).await;
            let labels = ["linux", "kici:agent:event", "kici:scaler:cloud"];
            assert_eq!(with("scaler-event-1", &labels).await.err().unwrap(), "UNAUTHORIZED");
            assert_eq!(with(NAME, &["linux", "gpu"]).await.err().unwrap(), "UNAUTHORIZED");
            let agent = with(NAME, &[labels[0], labels[1], labels[2], "kici:host:x"]).await.unwrap();
            assert!(agent.ack.scaler_managed && agent.ack.labels.contains(&"kici:agent:event".to_owned()));
            assert!(!agent.ack.labels.contains(&"kici:host:x".to_owned()), "it is derived");
            let stored = world.store.agent_token_list().await.unwrap();
            assert_eq!(stored[0].mandatory_labels.as_deref(), Some(&["linux".to_owned()][..]));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_code_that_buys_nothing_says_why() {
    each(async |world| {
        let unknown = Token::generate(TokenKind::Claim, getrandom::fill).unwrap();
        assert_eq!(redeem(&world, unknown.secret().expose_secret()).await.unwrap_err(), ClaimRefused::Invalid);
        assert_eq!(redeem(&world, "kici_claim_short").await.unwrap_err(), ClaimRefused::Invalid);
        let agent = Token::generate(TokenKind::Agent, getrandom::fill).unwrap();
        assert_eq!(redeem(&world, agent.secret().expose_secret()).await.unwrap_err(), ClaimRefused::Invalid);
        let old = issued(&world, Duration::ZERO).await;
        assert_eq!(redeem(&world, &old).await.unwrap_err(), ClaimRefused::Expired);
        let revoked = issued(&world, Duration::from_secs(300)).await;
        world.store.claims_revoke(instance(NAME)).await.unwrap();
        assert_eq!(redeem(&world, &revoked).await.unwrap_err(), ClaimRefused::Revoked);
        assert!(world.store.agent_token_list().await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_tries_too_often_waits() {
    each(async |world| {
        for _ in 0..30 {
            assert_eq!(redeem(&world, "kici_claim_guess").await.unwrap_err(), ClaimRefused::Invalid);
        }
        let good = issued(&world, Duration::from_secs(300)).await;
        let limited = world.dispatcher.redeem_claim(&good, HERE).await.unwrap_err();
        assert!(matches!(limited, ClaimError::TooMany), "{limited}");
        let elsewhere = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        assert!(world.dispatcher.redeem_claim(&good, elsewhere).await.is_ok(), "the code was not touched");
    })
    .await;
}
