//! Tokens, hosts, instances, leases, the access log, the outbox, migrations.

use std::collections::BTreeMap;
use std::time::Duration;

use kici_engine::time::Clock;
use kici_store::model::*;
use kici_store::testing::{TestStore, agent, config, instance};
use kici_store::{Fence, Store, StoreError, Topic, Wakeup, fenced};

fn token(hash: &str) -> NewAgentToken {
    NewAgentToken {
        token_hash: hash.to_owned(),
        token_prefix: "01234567".to_owned(),
        label: Some("builders".to_owned()),
        labels: Some(vec!["default".to_owned()]),
        mandatory_labels: None,
        agent_type: AgentType::Static,
        kind: TokenKind::Bootstrap,
        bound_agent_id: Some(agent("a1")),
        created_by: "alice".to_owned(),
        expires_at: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_tokens_are_found_by_hash_consumed_once_and_revoked_with_a_wakeup() {
    TestStore::each(|t| async move {
        let made = t.store.agent_token_create(token("h1")).await.unwrap();
        assert!(matches!(t.store.agent_token_create(token("h1")).await.unwrap_err(), StoreError::Exists { .. }));
        assert_eq!(t.store.agent_token_by_hash("h1".to_owned()).await.unwrap(), Some(made.clone()));
        assert_eq!(t.store.agent_token_by_hash("h2".to_owned()).await.unwrap(), None);
        assert!(t.store.agent_token_consume(made.id).await.unwrap());
        assert!(!t.store.agent_token_consume(made.id).await.unwrap());
        t.store.agent_token_touch(vec![(made.id, t.clock.now())]).await.unwrap();
        let mut wakeups = t.store.subscribe(|topic| *topic == Topic::Revocations);
        assert!(t.store.agent_token_revoke(made.id).await.unwrap());
        while wakeups.next().await != Some(Wakeup::Changed(Topic::Revocations)) {}
        let listed = t.store.agent_token_list().await.unwrap().remove(0);
        let now = Some(t.clock.now());
        assert_eq!((listed.revoked_at, listed.consumed_at, listed.last_seen_at), (now, now, now));
        let ephemeral = NewAgentToken { agent_type: AgentType::Ephemeral, expires_at: now, ..token("h3") };
        let ephemeral = t.store.agent_token_create(ephemeral).await.unwrap();
        t.clock.advance(Duration::from_secs(1));
        assert!(!t.store.agent_token_revoke(made.id).await.unwrap(), "revoked already");
        let in_use = vec![ephemeral.id];
        assert!(t.store.agent_token_reap(t.clock.now(), in_use).await.unwrap().is_empty());
        assert_eq!(t.store.agent_token_reap(t.clock.now(), Vec::new()).await.unwrap(), [ephemeral.id]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_tokens_and_the_access_log_round_trip() {
    TestStore::each(|t| async move {
        let new = NewAdminToken {
            token_hash: "h".to_owned(),
            token_prefix: "89abcdef".to_owned(),
            label: "bootstrap".to_owned(),
            role: Role::Owner,
            routing_key: None,
            created_by: "system".to_owned(),
            expires_at: Some(t.clock.now()),
        };
        let made = t.store.admin_token_create(new).await.unwrap();
        t.store.admin_token_touch(vec![(made.id, t.clock.now())]).await.unwrap();
        assert!(t.store.admin_token_revoke(made.id).await.unwrap());
        let found = t.store.admin_token_by_hash("h".to_owned()).await.unwrap().unwrap();
        assert_eq!(found, AdminToken { revoked_at: Some(t.clock.now()), last_used_at: Some(t.clock.now()), ..made });
        assert_eq!(t.store.admin_token_list().await.unwrap(), [found]);

        let entry = |action: &str| NewAccess {
            org: None,
            actor_type: "api_key".to_owned(),
            actor_id: "bootstrap".to_owned(),
            actor_meta: Some(serde_json::json!({ "ip": "127.0.0.1" })),
            action: action.to_owned(),
            source: "admin_http".to_owned(),
            outcome: "allowed".to_owned(),
            target_type: Some("run".to_owned()),
            target_id: Some("r1".to_owned()),
            request_id: None,
            routing_key: None,
            error_message: None,
        };
        t.store.access_log_insert(vec![entry("run.cancel"), entry("run.rerun")]).await.unwrap();
        let filter = AccessFilter { action: Some("run.rerun".to_owned()), ..AccessFilter::default() };
        let listed = t.store.access_log_list(filter, Page::default()).await.unwrap();
        assert_eq!(listed.items.len(), 1);
        assert_eq!(listed.items[0].entry.actor_meta.as_ref().unwrap()["ip"], "127.0.0.1");
    })
    .await;
}

fn host(properties: &[(&str, &str)]) -> RosterEntry {
    RosterEntry {
        agent_id: agent("a1"),
        token_id: None,
        lifecycle: AgentType::Ephemeral,
        scaler_managed: false,
        labels: vec!["default".to_owned()],
        hostname: Some("h".to_owned()),
        platform: Some("linux".to_owned()),
        arch: None,
        version: None,
        machine_id: None,
        boot_id: None,
        keeps_running: false,
        properties: properties.iter().map(|(k, v)| ((*k).to_owned(), serde_json::json!(v))).collect(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_roster_merges_properties_and_reaps_ephemeral_hosts_that_are_gone() {
    TestStore::each(|t| async move {
        let first = t.store.roster_upsert(host(&[("a", "1"), ("b", "1")])).await.unwrap();
        t.clock.advance(Duration::from_secs(60));
        let second = t.store.roster_upsert(host(&[("b", "2")])).await.unwrap();
        assert_eq!((second.created_at, second.last_seen), (first.created_at, Some(t.clock.now())));
        let expected = BTreeMap::from([("a".to_owned(), "1".into()), ("b".to_owned(), "2".into())]);
        assert_eq!(second.properties, expected);
        t.store.roster_seen(vec![(agent("a1"), t.clock.now())]).await.unwrap();
        let later = t.clock.now().plus(Duration::from_secs(1));
        assert!(t.store.roster_reap(later).await.unwrap().is_empty(), "connected");
        t.store.roster_disconnected(agent("a1")).await.unwrap();
        assert_eq!(t.store.roster_get(agent("a1")).await.unwrap().unwrap().connected_instance_id, None);
        assert_eq!(t.store.roster_reap(later).await.unwrap(), [agent("a1")]);
        assert!(t.store.roster_list().await.unwrap().is_empty());
    })
    .await;
}

fn declared(labels: Option<&[&str]>) -> DeclaredHost {
    DeclaredHost {
        agent_id: agent("a1"),
        hostname: Some("db-1".to_owned()),
        labels: labels.map(|labels| labels.iter().map(|label| (*label).to_owned()).collect()),
        properties: BTreeMap::from([("rack".to_owned(), 3.into()), ("gone".to_owned(), "x".into())]),
        by: "api_key:1".to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_declared_host_keeps_what_is_left_out_and_is_static_for_good() {
    TestStore::each(|t| async move {
        let (first, created) = t.store.roster_declare(declared(Some(&["role:db"]))).await.unwrap();
        assert!(created && !first.initialized());
        let labels: Vec<String> = first.effective_labels().iter().map(ToString::to_string).collect();
        assert_eq!(labels, ["kici:host:db-1", "role:db"], "the declared ones, until the agent registers");

        // The agent merges in: its labels count now, the declared name stays, an ephemeral token makes no difference.
        let seen = t.store.roster_upsert(host(&[("gone", "by agent")])).await.unwrap();
        assert_eq!((seen.hostname.as_deref(), seen.lifecycle), (Some("db-1"), AgentType::Static));
        let labels: Vec<String> = seen.effective_labels().iter().map(ToString::to_string).collect();
        assert_eq!(labels, ["default"]);
        assert_eq!(seen.declared_labels, Some(vec!["role:db".to_owned()]));
        assert_eq!(seen.properties["gone"], "by agent", "the agent's own win");

        let change = DeclaredHost {
            hostname: None,
            properties: BTreeMap::from([("gone".to_owned(), serde_json::Value::Null)]),
            ..declared(None)
        };
        let (second, created) = t.store.roster_declare(change).await.unwrap();
        assert!(!created);
        assert_eq!(second.properties, BTreeMap::from([("rack".to_owned(), 3.into())]));
        assert_eq!(second.declared_labels, seen.declared_labels);
        assert_eq!((second.connected_instance_id, second.last_seen), (seen.connected_instance_id, seen.last_seen));

        assert_eq!(t.store.roster_remove(agent("a1")).await.unwrap(), HostRemoved::Connected);
        t.store.roster_disconnected(agent("a1")).await.unwrap();
        t.clock.advance(Duration::from_secs(86_400));
        assert!(t.store.roster_reap(t.clock.now()).await.unwrap().is_empty(), "static");
        assert_eq!(t.store.roster_remove(agent("a1")).await.unwrap(), HostRemoved::Removed);
        assert_eq!(t.store.roster_remove(agent("a1")).await.unwrap(), HostRemoved::NotFound);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_never_sets_the_systems_properties() {
    TestStore::each(|t| async move {
        let operator = DeclaredHost {
            properties: BTreeMap::from([("kici:staged-agent-version".to_owned(), "1".into())]),
            ..declared(None)
        };
        t.store.roster_declare(operator).await.unwrap();
        let seen =
            t.store.roster_upsert(host(&[("KICI:staged-agent-version", "9"), ("kici:x", "9"), ("own", "1")])).await;
        let kept: Vec<(String, serde_json::Value)> = seen.unwrap().properties.into_iter().collect();
        let names: Vec<&str> = kept.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["kici:staged-agent-version", "own"]);
        assert_eq!(kept[0].1, "1");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_of_a_dead_instance_can_be_removed_and_reaped() {
    TestStore::each(|t| async move {
        if t.store.backend() == "sqlite" {
            return;
        }
        let other = t.sibling("node-2").await;
        let entry = Instance {
            instance_id: instance("node-2"),
            incarnation: uuid::Uuid::from_u128(2),
            role: "coordinator".to_owned(),
            address: None,
            version: "0.1.0".to_owned(),
            started_at: t.clock.now(),
            last_seen_at: t.clock.now(),
            draining: false,
        };
        other.instance_heartbeat(entry).await.unwrap();
        other.roster_upsert(host(&[])).await.unwrap();
        let later = t.clock.now().plus(Duration::from_secs(3600));
        assert!(t.store.roster_reap(later).await.unwrap().is_empty(), "its instance lives");
        assert_eq!(t.store.roster_remove(agent("a1")).await.unwrap(), HostRemoved::Connected);
        t.clock.advance(Duration::from_secs(121));
        assert_eq!(t.store.roster_reap(later).await.unwrap(), [agent("a1")]);
        other.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_instances_and_the_outbox_round_trip() {
    TestStore::each(|t| async move {
        let id = t.store.cluster_id().await.unwrap();
        assert_eq!(t.store.cluster_id().await.unwrap(), id);
        assert_eq!(t.store.meta_get("x".to_owned()).await.unwrap(), None);
        for value in ["1", "2"] {
            t.store.meta_set("x".to_owned(), value.to_owned()).await.unwrap();
        }
        assert_eq!(t.store.meta_get("x".to_owned()).await.unwrap().as_deref(), Some("2"));

        let me = Instance {
            instance_id: instance("node-1"),
            incarnation: id,
            role: "coordinator".to_owned(),
            address: None,
            version: "0.1.0".to_owned(),
            started_at: t.clock.now(),
            last_seen_at: t.clock.now(),
            draining: false,
        };
        t.store.instance_heartbeat(me.clone()).await.unwrap();
        t.store.instance_heartbeat(Instance { draining: true, ..me.clone() }).await.unwrap();
        assert_eq!(t.store.instance_list().await.unwrap(), [Instance { draining: true, ..me }]);
        t.store.instance_remove(instance("node-1")).await.unwrap();

        let item = t.store.outbox_put("blob_delete".to_owned(), serde_json::json!({ "key": "k" })).await.unwrap();
        let kinds = vec!["blob_delete".to_owned()];
        let hide = Duration::from_secs(60);
        let taken = t.store.outbox_take(kinds.clone(), 10, hide).await.unwrap();
        assert_eq!((taken[0].id, taken[0].attempts), (item, 1));
        assert!(t.store.outbox_take(kinds.clone(), 10, hide).await.unwrap().is_empty());
        t.clock.advance(hide);
        assert_eq!(t.store.outbox_take(kinds.clone(), 10, hide).await.unwrap()[0].attempts, 2);
        t.store.outbox_done(item).await.unwrap();
        t.clock.advance(hide);
        assert!(t.store.outbox_take(kinds, 10, hide).await.unwrap().is_empty());
    })
    .await;
}

const LEASE: &str = "leader";

async fn ask(store: &Store) -> LeaseAnswer {
    store.lease_acquire(LEASE.to_owned(), Duration::from_secs(10)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_has_one_holder_and_a_higher_term_after_each_change() {
    TestStore::each(|t| async move {
        assert_eq!(ask(&t.store).await, LeaseAnswer::Held { term: 1 });
        assert_eq!(ask(&t.store).await, LeaseAnswer::Held { term: 1 });
        if t.store.backend() == "sqlite" {
            return;
        }
        let other = t.sibling("node-2").await;
        assert!(matches!(ask(&other).await, LeaseAnswer::Other { .. }));
        // Nodes whose clocks differ agree: only that of the database counts.
        t.clock.advance(Duration::from_secs(3600));
        assert!(matches!(ask(&other).await, LeaseAnswer::Other { .. }));
        t.sql("UPDATE leases SET expires_at = now()").await;
        assert_eq!(ask(&other).await, LeaseAnswer::Held { term: 2 });
        other.lease_release(LEASE.to_owned()).await.unwrap();
        assert_eq!(ask(&t.store).await, LeaseAnswer::Held { term: 3 });
        // Another start of the same instance is another holder, and so is one that let the lease run out.
        let restarted = t.sibling("node-1").await;
        assert!(matches!(ask(&restarted).await, LeaseAnswer::Other { .. }));
        restarted.lease_release(LEASE.to_owned()).await.unwrap();
        assert!(matches!(ask(&restarted).await, LeaseAnswer::Other { .. }));
        t.sql("UPDATE leases SET expires_at = now()").await;
        assert_eq!(ask(&t.store).await, LeaseAnswer::Held { term: 4 });
        other.close().await;
        restarted.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_lost_its_lease_changes_nothing() {
    let Some(t) = TestStore::postgres().await else { return };
    let LeaseAnswer::Held { term } = ask(&t.store).await else { panic!("nobody else wants it") };
    let fence = Fence { lease: LEASE.to_owned(), term };
    let write = async || t.store.meta_set("swept".to_owned(), "by the first".to_owned()).await;
    fenced(fence.clone(), write()).await.unwrap();
    let other = t.sibling("node-2").await;
    t.sql("UPDATE leases SET expires_at = now()").await;
    assert!(matches!(fenced(fence.clone(), write()).await, Err(StoreError::Fenced)), "nobody has it");
    assert_eq!(ask(&other).await, LeaseAnswer::Held { term: term + 1 });
    other.meta_set("swept".to_owned(), "by the second".to_owned()).await.unwrap();
    assert!(matches!(fenced(fence, write()).await, Err(StoreError::Fenced)), "another one has it");
    assert_eq!(t.store.meta_get("swept".to_owned()).await.unwrap().as_deref(), Some("by the second"));
    // What needs no lease goes on.
    write().await.unwrap();
    other.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrating_twice_does_nothing_and_two_at_once_do_it_once() {
    TestStore::each(|t| async move {
        let (one, two) = tokio::join!(t.store.migrate(), t.store.migrate());
        assert!(one.unwrap().is_empty() && two.unwrap().is_empty());
        t.store.ping().await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_sqlite_file_has_one_program_and_a_closed_store_says_so() {
    let t = TestStore::sqlite().await;
    let again = Store::open(config(t.url(), "node-2", t.clock.clone())).await.map(drop).unwrap_err();
    assert!(again.to_string().contains("in use by another program"), "{again}");
    t.store.close().await;
    assert!(matches!(t.store.ping().await.unwrap_err(), StoreError::Unavailable(_)));
    assert!(matches!(t.store.cluster_id().await.unwrap_err(), StoreError::Unavailable(_)));
    let wrong = Store::open(config("mysql://u:secret@h/db", "n", t.clock.clone())).await.map(drop).unwrap_err();
    assert!(!wrong.to_string().contains("secret"), "{wrong}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wakeup_reaches_the_other_instance() {
    let Some(t) = TestStore::postgres().await else { return };
    let other = t.sibling("node-2").await;
    let mut wakeups = other.subscribe(|topic| *topic == Topic::Queue);
    // Its listener is connected once this arrives.
    assert_eq!(wakeups.next().await, Some(Wakeup::Missed));
    crate::fixtures::Plan::new("k").queued("a").create(&t).await;
    assert_eq!(wakeups.next().await, Some(Wakeup::Changed(Topic::Queue)));
    other.close().await;
}
