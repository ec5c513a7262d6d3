//! What tokens of operators may see, and databases of other versions.

use diesel::connection::SimpleConnection as _;
use diesel::{Connection as _, SqliteConnection};
use kici_access::Role;
use kici_api::client::ClientError;
use kici_api::dto::events::DeliveryFilter;
use kici_api::dto::tokens::CreateAdminToken;
use kici_engine::state::RunStatus;

use crate::stack::Stack;

fn status<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> u16 {
    answer.unwrap_err().problem().expect("a problem").status
}

fn token(routing_key: Option<String>) -> CreateAdminToken {
    CreateAdminToken { label: "t".into(), role: Role::Owner, routing_key, expires_in_s: None }
}

#[tokio::test]
async fn a_revoked_token_of_an_operator_is_401_at_once() {
    let stack = Stack::start(None).await;
    let made = stack.client.create_admin_token(&token(None)).await.unwrap();
    let client = stack.client_with(made.token.expose());
    client.sources().await.unwrap();
    stack.client.revoke_admin_token(made.id).await.unwrap();
    assert_eq!(status(client.sources().await), 401);
    assert_eq!(status(client.create_agent_token(&Default::default()).await), 401);
}

#[tokio::test]
async fn a_token_of_one_source_sees_nothing_of_another() {
    const WORKFLOW: &str = "on: push\njobs: { a: { runs_on: default, checkout: false, run: echo a } }\n";
    let stack = Stack::start(None).await;
    let agent_token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", agent_token.token.expose(), &[]).await;
    let mine = stack.repository("mine", &[(".kici/workflows/w.yaml", WORKFLOW)]).await;
    let theirs = stack.repository("theirs", &[(".kici/workflows/w.yaml", WORKFLOW)]).await;
    let my_delivery = stack.deliver(&mine, "mine").await;
    let their_delivery = stack.deliver(&theirs, "theirs").await;
    let (my_run, their_run) = (my_delivery.first_run_id.unwrap(), their_delivery.first_run_id.unwrap());
    assert_eq!(stack.ended(my_run).await.run.status, RunStatus::Success);
    let their_job = stack.ended(their_run).await.jobs[0].id;

    let key = stack.client.source("mine").await.unwrap().routing_key;
    let made = stack.client.create_admin_token(&token(Some(key))).await.unwrap();
    let scoped = stack.client_with(made.token.expose());
    let runs = scoped.runs(&Default::default(), &Default::default()).await.unwrap();
    assert_eq!(runs.items.iter().map(|run| run.id).collect::<Vec<_>>(), [my_run]);
    let sources = scoped.sources().await.unwrap();
    assert_eq!(sources.items.iter().map(|source| source.name.as_str()).collect::<Vec<_>>(), ["mine"]);
    let deliveries = scoped.deliveries(&DeliveryFilter::default(), &Default::default()).await.unwrap();
    assert_eq!(deliveries.items.iter().map(|one| one.id).collect::<Vec<_>>(), [my_delivery.id]);
    let queue = scoped.queue(&Default::default(), &Default::default()).await.unwrap();
    assert!(queue.items.iter().all(|row| row.run_id == my_run), "{queue:?}");
    scoped.run(my_run).await.unwrap();
    scoped.delivery_payload(my_delivery.id).await.unwrap();

    assert_eq!(status(scoped.run(their_run).await), 404);
    assert_eq!(status(scoped.steps(their_run, None).await), 404);
    assert_eq!(status(scoped.step_logs(their_run, "a", "step-0-0", &Default::default()).await), 404);
    assert_eq!(status(scoped.cancel_run(their_run, Default::default()).await), 404);
    assert_eq!(status(scoped.rerun(their_run, Default::default(), None).await), 404);
    assert_eq!(status(scoped.source("theirs").await), 404);
    assert_eq!(status(scoped.enable_source("theirs", false).await), 404);
    assert_eq!(status(scoped.delivery(their_delivery.id).await), 404);
    assert_eq!(status(scoped.delivery_payload(their_delivery.id).await), 404);
    assert_eq!(status(scoped.explain_delivery(their_delivery.id).await), 404);
    assert_eq!(status(scoped.redeliver(their_delivery.id).await), 404);
    assert_eq!(status(scoped.queue_entry(their_job).await), 404);
    assert_eq!(status(scoped.explain_queue(their_job).await), 404);
    let filter = DeliveryFilter { source: Some("theirs".into()), ..DeliveryFilter::default() };
    match scoped.deliveries(&filter, &Default::default()).await {
        Ok(page) => assert!(page.items.is_empty(), "{page:?}"),
        refused => assert_eq!(status(refused), 404),
    }
    // What belongs to the whole installation is not theirs to see.
    assert_eq!(status(scoped.agents(&Default::default()).await), 403);
    assert_eq!(status(scoped.admin_tokens().await), 403);
    assert_eq!(status(scoped.remove_source("theirs").await), 403);
    assert_eq!(status(scoped.create_admin_token(&token(None)).await), 403);
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_left_alone() {
    let mut stack = Stack::start(None).await;
    stack.orchestrator.take().unwrap().kill();
    let path = stack.data().join("db/kici.sqlite3");
    let change = |sql: &str| SqliteConnection::establish(path.to_str().unwrap()).unwrap().batch_execute(sql).unwrap();
    change("INSERT INTO __diesel_schema_migrations (version) VALUES ('20990101000000')");
    for (record, needs) in [
        ("", "an unknown version"),
        ("INSERT INTO schema_compat (migration, min_version) VALUES ('20990101000000', '99.1.0')", "99.1.0"),
    ] {
        change(record);
        let mut orchestrator = stack.spawn_orchestrator("127.0.0.1:0");
        assert_eq!(orchestrator.exit_code().await, Some(1), "{}", stack.logs());
        let logs = stack.logs();
        let said = logs.lines().filter(|line| line.contains("20990101000000")).collect::<Vec<_>>();
        let said = said.last().unwrap_or_else(|| panic!("{logs}"));
        assert!(said.contains(needs) && said.contains("install a newer version"), "{said}");
    }
    // A newer migration that allows this version beside it does not stop it.
    change("UPDATE schema_compat SET min_version = '0.1.0' WHERE migration = '20990101000000'");
    stack.start_orchestrator("127.0.0.1:0").await;
}
