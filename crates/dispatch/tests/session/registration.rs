//! Who may register, with which labels, and how that ends.

use crate::support::*;
use kici_dispatch::AgentAuth;
use kici_engine::state::QueueStatus;
use kici_protocol::agent::agent_frame::Frame as Up;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::*;
use kici_store::model::{AgentType, DeclaredHost, HostRemoved, NewAgentToken, TokenKind};
use sha2::{Digest, Sha256};

pub async fn new_token(world: &World, change: impl FnOnce(&mut NewAgentToken)) -> String {
    let token = format!("kici_agent_{}", world.ids.uuid());
    let mut new = NewAgentToken {
        token_hash: hex(&Sha256::digest(token.as_bytes())),
        token_prefix: "01900000".into(),
        label: None,
        labels: None,
        mandatory_labels: None,
        agent_type: AgentType::Static,
        kind: TokenKind::Static,
        bound_agent_id: None,
        created_by: "test".into(),
        expires_at: None,
    };
    change(&mut new);
    world.store.agent_token_create(new).await.unwrap();
    token
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_13_a_token_covers_its_labels_its_agent_and_its_host() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let scoped = new_token(&world, |token| token.labels = Some(vec!["default".into()])).await;
            let other = new_token(&world, |_| {}).await;
            let refused = |result: Result<Agent, String>| result.err();
            let with = |register: Register, token: String| {
                let world = &world;
                async move { Agent::with(world, register, &token).await }
            };
            let extra = register("a1", &["default", "gpu"]);
            assert_eq!(refused(with(extra, scoped.clone()).await).as_deref(), Some("UNAUTHORIZED"));
            let own = register("a1", &["default", "kici:os:windows", "kici:host:production"]);
            let mut agent = with(own, scoped.clone()).await.unwrap();
            assert!(agent.ack.labels.contains(&"kici:os:linux".to_owned()));
            assert!(agent.ack.labels.contains(&"kici:host:host-a1".to_owned()));
            assert!(!agent.ack.labels.iter().any(|label| label == "kici:host:production"));
            // The name, and the host, are taken by another token.
            assert_eq!(refused(with(register("a1", &[]), other.clone()).await).as_deref(), Some("UNAUTHORIZED"));
            let foreign = Register { hostname: "HOST-A1".into(), ..register("a2", &[]) };
            assert_eq!(refused(with(foreign, other.clone()).await).as_deref(), Some("UNAUTHORIZED"));
            // The same gates on the same session.
            agent.send(Up::Register(register("a1", &["default", "gpu"]))).await;
            assert_eq!(agent.goodbye().await, "UNAUTHORIZED");
            assert_eq!(
                refused(with(register("a3", &[]), "kici_agent_unknown".into()).await).as_deref(),
                Some("Unauthenticated")
            );
            assert_eq!(refused(with(register("a3", &[]), String::new()).await).as_deref(), Some("Unauthenticated"));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_14_a_bootstrap_token_lets_one_of_two_in() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let token = new_token(&world, |token| token.kind = TokenKind::Bootstrap).await;
            let (one, two) = tokio::join!(
                Agent::with(&world, register("a1", &["default"]), &token),
                Agent::with(&world, register("a2", &["default"]), &token)
            );
            assert_eq!(u8::from(one.is_ok()) + u8::from(two.is_ok()), 1);
            assert!(Agent::with(&world, register("a3", &["default"]), &token).await.is_err());
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_15_a_revoked_token_ends_its_sessions_at_once_and_by_the_sweep() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let token = new_token(&world, |_| {}).await;
            let mut agent = Agent::with(&world, register("a1", &["default"]), &token).await.unwrap();
            let id = world.store.agent_token_list().await.unwrap()[0].id;
            world.store.agent_token_revoke(id).await.unwrap();
            assert_eq!(agent.goodbye().await, "AUTH_REVOKED");
            world.wait(async || (world.dispatcher.close_token(id) == 0).then_some(())).await;
            let again = Agent::with(&world, register("a1", &["default"]), &token).await;
            assert_eq!(again.err().as_deref(), Some("Unauthenticated"));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_16_a_gated_agent_takes_only_jobs_that_name_its_label() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let gated = new_token(&world, |token| token.mandatory_labels = Some(vec!["gpu".into()])).await;
            let mut agent = Agent::with(&world, register("a1", &["default", "gpu"]), &gated).await.unwrap();
            let (_, plain) = world.create(&[job("build")]).await;
            // Again on the same session: the gate stays.
            agent.send(Up::Register(register("a1", &["default", "gpu"]))).await;
            assert!(matches!(agent.next().await, Down::RegisterAck(_)));
            let (_, gpu) = world.create(&[JobDef { label: "gpu", ..job("train") }]).await;
            let offered = agent.offer().await.job.unwrap();
            assert_eq!(job_ref(&offered).job_id, gpu[0]);
            assert!(agent.begin(&offered).await);
            let done = agent.update(&offered, "success", "").await;
            agent.settled(done).await;
            assert!(agent.quiet().await);
            let row = world.row(plain[0]).await;
            assert_eq!((row.status, row.dispatch_epoch), (QueueStatus::Pending, 0));
            let why = world.wait(async || world.job(plain[0]).await.routing_reason).await;
            assert!(why.contains("gpu"), "{why}");
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_declared_host_name_decides_the_label_and_keeps_others_off() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let declared = DeclaredHost {
                agent_id: instance("a1"),
                hostname: Some("db-1".into()),
                labels: None,
                properties: Default::default(),
                by: "test".into(),
            };
            assert!(world.dispatcher.declare_host(declared).await.unwrap().1);
            let (mine, other) = (new_token(&world, |_| {}).await, new_token(&world, |_| {}).await);
            let thief = Register { hostname: "DB-1".into(), ..register("a2", &[]) };
            assert_eq!(Agent::with(&world, thief, &other).await.err().as_deref(), Some("UNAUTHORIZED"));
            let agent = Agent::with(&world, register("a1", &[]), &mine).await.unwrap();
            assert!(agent.ack.labels.contains(&"kici:host:db-1".to_owned()), "{:?}", agent.ack.labels);
            assert!(!agent.ack.labels.iter().any(|label| label == "kici:host:host-a1"));
            let row = world
                .wait(async || world.store.roster_get(instance("a1")).await.unwrap().filter(|h| h.initialized()))
                .await;
            assert_eq!(world.dispatcher.host_status(&row), kici_engine::hosts::HostStatus::Ready);
            assert_eq!(world.dispatcher.remove_host(&instance("a1")).await.unwrap(), HostRemoved::Connected);
            agent.drop_connection();
            world
                .wait(async || {
                    let removed = world.dispatcher.remove_host(&instance("a1")).await.unwrap();
                    (removed == HostRemoved::Removed).then_some(())
                })
                .await;
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_15_a_revocation_whose_wake_up_is_lost_takes_effect_with_the_next_sweep() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            // A dispatcher that follows no wake-ups.
            let deaf = world.unstarted().await;
            let token = new_token(&deaf, |_| {}).await;
            let mut agent = Agent::with(&deaf, register("a1", &["default"]), &token).await.unwrap();
            let id = deaf.store.agent_token_list().await.unwrap()[0].id;
            assert!(deaf.store.agent_token_revoke(id).await.unwrap());
            assert!(!deaf.store.agent_token_revoke(id).await.unwrap(), "revoked twice");
            assert!(agent.quiet().await);
            assert_eq!(deaf.sweep("dispatch_tokens").await, 1);
            assert_eq!(agent.goodbye().await, "AUTH_REVOKED");
            deaf.dispatcher.stop().await;
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_ephemeral_token_refuses_newcomers_and_ends_its_session_once_that_is_idle() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let expires = world.clock.now().plus(std::time::Duration::from_millis(300));
            let token = new_token(&world, |token| {
                token.agent_type = AgentType::Ephemeral;
                token.bound_agent_id = Some(instance("a1"));
                token.expires_at = Some(expires);
            })
            .await;
            let mut agent = Agent::with(&world, register("a1", &["default"]), &token).await.unwrap();
            world.create(&[job("build")]).await;
            let build = agent.offer().await.job.unwrap();
            assert!(agent.begin(&build).await);
            world.wait(async || (world.clock.now() > expires).then_some(())).await;
            world.sweep("dispatch_tokens").await;
            assert!(agent.quiet().await, "a running job is never cut");
            assert!(Agent::with(&world, register("a1", &["default"]), &token).await.is_err());
            let done = agent.update(&build, "success", "").await;
            agent.settled(done).await;
            world.wait(async || world.dispatcher.agents()[0].jobs.is_empty().then_some(())).await;
            world.sweep("dispatch_tokens").await;
            assert_eq!(agent.goodbye().await, "AUTH_FAILED");
        },
    )
    .await;
}
