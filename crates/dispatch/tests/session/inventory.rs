//! What jobs may ask about hosts.

use kici_dispatch::AgentAuth;
use kici_engine::hosts::{HostMatcher, HostQuery, targets};
use kici_protocol::agent::{
    GetHostRequest, QueryInventoryRequest, QueryInventoryResponse, Register, RequestRebootRequest,
};
use kici_protocol::common::JobRef;
use kici_store::model::{DeclaredHost, TokenKind};
use serde_json::json;
use tonic::{Code, Status};

use crate::registration::new_token;
use crate::support::*;

/// Known hosts, and a job that was started on the first.
async fn fleet(world: &World) -> (Vec<Agent>, JobRef) {
    let labels: [(&str, &[&str]); 4] =
        [("a1", &["default", "web"]), ("a2", &["web", "eu-1"]), ("a3", &["web", "eu-2"]), ("db-1", &["db", "eu-1"])];
    let mut agents = Vec::new();
    for (name, labels) in labels {
        let properties = [("rack".to_owned(), "7".to_owned())].into();
        let register = Register { properties, ..register(name, labels) };
        agents.push(Agent::with(world, register, "").await.unwrap());
    }
    // The roster is written behind the answer.
    world.wait(async || (world.store.roster_list().await.unwrap().len() == 4).then_some(())).await;
    world.create(&[job("build")]).await;
    let held = agents[0].offer().await.job.unwrap();
    assert!(agents[0].begin(&held).await);
    (agents, held)
}

async fn query(world: &World, agent: &Agent, request: QueryInventoryRequest) -> Result<QueryInventoryResponse, Status> {
    world.dispatcher.query_inventory(agent.session_id(), &request).await
}

fn names(found: &QueryInventoryResponse) -> Vec<&str> {
    found.hosts.iter().map(|host| host.agent_id.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_a_list_and_a_fan_out_mean_the_same_hosts_by_the_same_selector() {
    each(async |world| {
        let (agents, job) = fleet(&world).await;
        let corpus =
            ["", "web", "web eu-*", "web eu-1 | db", "eu-* !eu-2", "/^eu-[12]$/ web", "nothing", "kici:os:linux db"];
        for selector in corpus {
            let request =
                QueryInventoryRequest { job: Some(job.clone()), selector: selector.into(), ..Default::default() };
            let called = query(&world, &agents[0], request).await.unwrap();
            let roster = world.store.roster_list().await.unwrap();
            let hosts: Vec<_> = roster.iter().map(|host| world.dispatcher.host(host)).collect();
            let parsed = HostQuery::parse(selector).unwrap();
            let matcher = HostMatcher::compile(&parsed.selector).unwrap();
            let fanned: Vec<_> =
                targets(&matcher, false, &hosts).into_iter().map(|host| host.agent_id.as_str()).collect();
            let listed: Vec<_> =
                hosts.iter().filter(|host| parsed.matches(host)).map(|host| host.agent_id.as_str()).collect();
            assert_eq!(names(&called), fanned, "{selector}");
            assert_eq!(listed, fanned, "{selector}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_inventory_comes_in_pages_and_leads_to_no_host() {
    each(async |world| {
        let (agents, job) = fleet(&world).await;
        assert!(world.dispatcher.record_staged_version(&instance("a2"), "1.4.0").await.unwrap());
        assert!(!world.dispatcher.record_staged_version(&instance("a9"), "1.4.0").await.unwrap());
        let page = async |cursor: &str| {
            let (job, cursor) = (Some(job.clone()), cursor.to_owned());
            query(&world, &agents[0], QueryInventoryRequest { job, limit: 3, cursor, ..Default::default() })
                .await
                .unwrap()
        };
        let first = page("").await;
        assert_eq!((names(&first), first.next_cursor.as_str()), (vec!["a1", "a2", "a3"], "a3"));
        let last = page(&first.next_cursor).await;
        assert_eq!((names(&last), last.next_cursor.as_str()), (vec!["db-1"], ""));
        let get = async |name: &str| {
            let request = GetHostRequest { job: Some(job.clone()), agent_id: name.into() };
            world.dispatcher.get_host(agents[0].session_id(), &request).await
        };
        let host = get("a2").await.unwrap();
        assert_eq!(
            (host.status.as_str(), host.lifecycle_class.as_str(), host.platform.as_str()),
            ("ready", "static", "linux")
        );
        assert!(host.labels.contains(&"eu-1".to_owned()) && host.last_seen_us > 0);
        let shown = serde_json::to_string(&host.properties).unwrap();
        assert_eq!(shown, r#"{"rack":"7"}"#, "nothing of the system's");
        let stored = world.store.roster_get(instance("a2")).await.unwrap().unwrap();
        assert_eq!(stored.properties["kici:staged-agent-version"], json!("1.4.0"));
        assert_eq!(stored.properties["rack"], json!(7), "the others stay");
        assert_eq!(get("a9").await.unwrap_err().code(), Code::NotFound);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_registers_with_never_says_which_version_was_staged() {
    each(async |world| {
        let declared = DeclaredHost {
            agent_id: instance("a1"),
            hostname: None,
            labels: None,
            properties: Default::default(),
            by: "alice".into(),
        };
        world.dispatcher.declare_host(declared).await.unwrap();
        world.dispatcher.record_staged_version(&instance("a1"), "1.4.0").await.unwrap();
        let properties = [("KICI:Staged-Agent-Version".to_owned(), "9".to_owned())].into();
        Agent::with(&world, Register { properties, version: "2.0.0".into(), ..register("a1", &[]) }, "").await.unwrap();
        let host = world
            .wait(async || world.store.roster_get(instance("a1")).await.unwrap().filter(|host| host.version.is_some()))
            .await;
        assert_eq!(host.properties["kici:staged-agent-version"], json!("1.4.0"));
        assert_eq!(host.version.as_deref(), Some("2.0.0"), "the two are told apart");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_started_job_of_the_session_asks_and_a_bad_selector_is_shown_its_place() {
    each(async |world| {
        let (agents, job) = fleet(&world).await;
        let ask = async |agent: &Agent, selector: &str| {
            let (job, selector) = (Some(job.clone()), selector.to_owned());
            query(&world, agent, QueryInventoryRequest { job, selector, ..Default::default() }).await
        };
        assert_eq!(ask(&agents[1], "").await.unwrap_err().code(), Code::PermissionDenied);
        let bad = ask(&agents[0], "web status=broken").await.unwrap_err();
        assert_eq!(bad.code(), Code::InvalidArgument);
        assert!(bad.message().starts_with("selector: at character 4: "), "{}", bad.message());
        let long = ask(&agents[0], &"x".repeat(5000)).await.unwrap_err();
        assert_eq!(long.code(), Code::InvalidArgument);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_on_an_agent_of_a_scaler_looks_at_hosts_and_restarts_none() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let token = new_token(&world, |token| token.kind = TokenKind::Scaler).await;
            let mut agent = Agent::with(&world, register("s1", &["default"]), &token).await.unwrap();
            world.create(&[job("build")]).await;
            let held = agent.offer().await.job.unwrap();
            assert!(agent.begin(&held).await);
            let request = QueryInventoryRequest { job: Some(held.clone()), ..Default::default() };
            assert!(query(&world, &agent, request).await.is_ok());
            let request = RequestRebootRequest { job: Some(held), ..Default::default() };
            let refused = world.dispatcher.job_asks_reboot(agent.session_id(), &request).await.unwrap_err();
            assert_eq!(refused.code(), Code::PermissionDenied);
            assert_eq!(refused.message(), "host.request_reboot needs the role `write` and this agent has `read`");
        },
    )
    .await;
}
