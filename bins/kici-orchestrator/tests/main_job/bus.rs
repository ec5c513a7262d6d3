//! The internal bus over the real wire: steps emit, workflows start each other, and nothing is told twice.

use kici_api::dto::bus::{AddEventTrust, EmitEvent, EventFilter, EventView, RepoRef, TestEventTrust, TriggerSchedule};
use kici_api::dto::runs::{RunFilter, RunView};
use kici_api::page::PageQuery;
use kici_engine::state::{RunStatus, StepStatus};
use kici_store::testing::TestStore;
use serde_json::json;

use crate::stack::{Stack, until};

const PRODUCER: &str = r#"
name: producer
on: push
jobs:
  build:
    runs_on: default
    checkout: false
    outputs: { version: "${{ steps.v.outputs.version }}" }
    steps: [{ id: v, run: 'echo version=7 >> "$KICI_OUTPUT"' }]
  report:
    needs: build
    runs_on: default
    checkout: false
    steps:
      - { id: told, emit: { event: built, payload: { version: "${{ needs.build.outputs.version }}", level: high } } }
      - { run: 'echo "told as $ID"', env: { ID: "${{ steps.told.outputs.event_id }}" } }
"#;

const CONSUMER: &str = r#"
name: consumer
on: { event: { name: built, match: { "$.level": [high, low] } } }
jobs:
  take:
    runs_on: default
    checkout: false
    run: 'echo "$REPO got $VERSION"'
    env: { VERSION: "${{ event.payload.version }}", REPO: "${{ repo }}" }
"#;

const AFTER: &str = r#"
name: after
on: { workflow_complete: { workflow: consumer, status: success } }
jobs:
  tell: { runs_on: default, checkout: false, run: 'echo "ended $WHAT"', env: { WHAT: "${{ event.payload.workflow }}" } }
"#;

async fn events(stack: &Stack, name: &str) -> Vec<EventView> {
    let filter = EventFilter { name: Some(name.to_owned()), ..EventFilter::default() };
    let page = PageQuery { limit: Some(200), cursor: None };
    stack.client.events(&filter, &page).await.unwrap().items
}

async fn runs_of(stack: &Stack, workflow: &str) -> Vec<RunView> {
    let filter = RunFilter { workflow: Some(workflow.to_owned()), ..RunFilter::default() };
    let page = PageQuery { limit: Some(200), cursor: None };
    stack.client.runs(&filter, &page).await.unwrap().items
}

/// The first run of a workflow, once it is there.
async fn run_of(stack: &Stack, workflow: &str) -> RunView {
    until(&format!("a run of {workflow}"), async || runs_of(stack, workflow).await.pop()).await
}

async fn workflows_start_each_other(database: Option<String>) {
    let stack = Stack::start(database).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let files = [
        (".kici/workflows/producer.yaml", PRODUCER),
        (".kici/workflows/consumer.yaml", CONSUMER),
        (".kici/workflows/after.yaml", AFTER),
    ];
    let repository = stack.repository("app", &files).await;
    let producer = stack.push_one(&repository, "app").await;
    let ended = stack.ended(producer).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());

    let consumer = run_of(&stack, "consumer").await;
    assert_eq!(stack.ended(consumer.id).await.run.status, RunStatus::Success, "{}", stack.logs());
    assert_eq!(stack.log(consumer.id, "take").await, ["local/app got 7"]);
    let found = events(&stack, "built").await;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].run_id, found[0].run_ids.as_slice()), (Some(producer), &[consumer.id][..]));
    assert_eq!((found[0].status.as_str(), found[0].chain_depth), ("processed", 1));
    let told = format!("told as {}", found[0].id);
    assert!(stack.log(producer, "report").await.contains(&told));
    let detail = stack.client.event(found[0].id).await.unwrap();
    assert!(detail.trace.unwrap()["workflows"][0]["workflow"] == "consumer");
    assert_eq!(stack.client.event_payload(found[0].id).await.unwrap(), json!({"version": "7", "level": "high"}));

    let after = run_of(&stack, "after").await;
    assert_eq!(stack.ended(after.id).await.run.status, RunStatus::Success, "{}", stack.logs());
    assert_eq!(stack.log(after.id, "tell").await, ["ended consumer"]);
}

const BY_COMMAND: &str = r#"
name: command
on: push
jobs:
  tell:
    runs_on: default
    checkout: false
    steps:
      - |
        id=$(kici emit built --payload '{"level": "low", "version": "9"}')
        echo "told as $id"
        other=$(kici emit built --payload '{"level": "low", "version": "10"}' --target 'elsewhere/*' --target '!elsewhere/x')
        test "$other" != "$id"
        kici emit __built && exit 1 || echo "reserved: $?"
        kici emit "Not a name" && exit 1 || echo "no name: $?"
        kici emit built --payload '{' 2> said && exit 1 || echo "no document: $?"
        cat said
        kici emit && exit 1 || echo "no event: $?"
"#;

async fn a_script_emits_events(database: Option<String>) {
    let stack = Stack::start(database).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let files = [(".kici/workflows/command.yaml", BY_COMMAND), (".kici/workflows/consumer.yaml", CONSUMER)];
    let repository = stack.repository("app", &files).await;
    let run = stack.push_one(&repository, "app").await;
    let ended = stack.ended(run).await;
    let log = stack.log(run, "tell").await;
    assert_eq!(ended.run.status, RunStatus::Success, "{log:#?}\n{}", stack.logs());
    for line in ["reserved: 3", "no name: 3", "no document: 2", "no event: 2"] {
        assert!(log.iter().any(|said| said == line), "{line}: {log:#?}");
    }
    assert!(log.iter().any(|line| line.contains("--payload is not JSON")), "{log:#?}");

    let consumer = run_of(&stack, "consumer").await;
    assert_eq!(stack.ended(consumer.id).await.run.status, RunStatus::Success, "{}", stack.logs());
    assert_eq!(stack.log(consumer.id, "take").await, ["local/app got 9"]);
    let found = until("both events to be processed", async || {
        let found = events(&stack, "built").await;
        found.iter().all(|event| event.status == "processed").then_some(found)
    })
    .await;
    assert_eq!(found.len(), 2, "what was refused is not there: {found:#?}");
    let heard = found.iter().find(|event| !event.run_ids.is_empty()).unwrap();
    assert!(log.contains(&format!("told as {}", heard.id)), "{log:#?}");
    assert!(heard.job_id.is_some());
    let other = found.iter().find(|event| event.id != heard.id).unwrap();
    assert_eq!(other.run_ids, [], "it was for another repository");
    assert_eq!(runs_of(&stack, "consumer").await.len(), 1);
}

#[tokio::test]
async fn a_script_emits_events_by_a_command_on_sqlite() {
    a_script_emits_events(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_emits_events_by_a_command_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    a_script_emits_events(Some(database.url().to_owned())).await;
}

#[tokio::test]
async fn emitted_events_and_ends_of_runs_start_workflows_on_sqlite() {
    workflows_start_each_other(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn emitted_events_and_ends_of_runs_start_workflows_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    workflows_start_each_other(Some(database.url().to_owned())).await;
}

/// Emits `tick` over and over.
fn ticking(count: usize, go: &str) -> String {
    let mut text =
        "name: ticking\non: push\njobs:\n  tick:\n    runs_on: default\n    checkout: false\n    steps:\n".to_owned();
    for n in 0..count {
        text += &format!("      - {{ emit: {{ event: tick, payload: {{ n: {n} }} }} }}\n");
        if n == 0 {
            text += &format!("      - 'until [ -e {go} ]; do sleep 0.02; done'\n");
        }
    }
    text
}

async fn ticks_survive_deaths(database: Option<String>) {
    const TICKS: usize = 24;
    let mut stack = Stack::start(database).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[("KICI_AGENT_MAX_CONCURRENCY", "4")]).await;
    let go = stack.dir.path().join("go");
    let listener = "name: counted\non: { event: { name: tick } }\njobs: { a: { runs_on: default, checkout: false, run: 'true' } }\n";
    let ticking = ticking(TICKS, go.to_str().unwrap());
    let files = [(".kici/workflows/t.yaml", ticking.as_str()), (".kici/workflows/c.yaml", listener)];
    let repository = stack.repository("app", &files).await;
    let run = stack.push_one(&repository, "app").await;
    let address = stack.address.clone();
    until("the first event", async || events(&stack, "tick").await.pop()).await;
    // Dead while the steps go on, and again in the middle of what follows.
    stack.orchestrator.take().unwrap().kill();
    std::fs::write(&go, "").unwrap();
    stack.start_orchestrator(&address).await;
    for enough in [TICKS / 4, TICKS / 2] {
        until("more events", async || (events(&stack, "tick").await.len() >= enough).then_some(())).await;
        stack.orchestrator.take().unwrap().kill();
        stack.start_orchestrator(&address).await;
    }
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    until("all events to be delivered", async || {
        let found = events(&stack, "tick").await;
        (found.len() >= TICKS && found.iter().all(|event| event.status == "processed")).then_some(())
    })
    .await;
    let found = events(&stack, "tick").await;
    assert_eq!(found.len(), TICKS, "each event is stored once");
    assert!(found.iter().all(|event| event.run_ids.len() == 1), "{found:#?}");
    assert_eq!(runs_of(&stack, "counted").await.len(), TICKS, "and starts one run");
}

#[tokio::test]
async fn killing_the_orchestrator_while_steps_emit_delivers_each_event_exactly_once_on_sqlite() {
    ticks_survive_deaths(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killing_the_orchestrator_while_steps_emit_delivers_each_event_exactly_once_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    ticks_survive_deaths(Some(database.url().to_owned())).await;
}

#[tokio::test]
async fn workflows_that_start_each_other_stop_at_the_longest_chain_with_a_refused_event() {
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[("KICI_AGENT_MAX_CONCURRENCY", "2")]).await;
    let of = |name: &str, hears: &str, says: &str| {
        format!(
            "name: {name}\non: {{ event: {{ name: {hears} }} }}\njobs: {{ a: {{ runs_on: default, checkout: false, \
             steps: [{{ emit: {{ event: {says} }} }}] }} }}\n"
        )
    };
    let (ping, pong) = (of("ping", "to-ping", "to-pong"), of("pong", "to-pong", "to-ping"));
    let files = [(".kici/workflows/ping.yaml", ping.as_str()), (".kici/workflows/pong.yaml", pong.as_str())];
    let _repository = stack.repository("app", &files).await;
    let request = EmitEvent { name: "to-ping".to_owned(), ..EmitEvent::default() };
    stack.client.emit_event(&request, None).await.unwrap();
    let failed = until("the chain to end", async || {
        let filter = RunFilter { status: Some("failed".to_owned()), ..RunFilter::default() };
        stack.client.runs(&filter, &PageQuery::default()).await.ok()?.items.pop()
    })
    .await;
    let steps = stack.client.steps(failed.id, Some("a")).await.unwrap();
    assert_eq!(steps[0].status, StepStatus::Failed);
    let message = steps[0].message.clone().unwrap_or_default();
    assert!(message.contains("a chain of 11 events") && message.contains("events.max_chain_depth"), "{message}");
    let (ping, pong) = (runs_of(&stack, "ping").await.len(), runs_of(&stack, "pong").await.len());
    assert_eq!((ping, pong), (5, 5));
}

#[tokio::test]
async fn other_repositories_need_trust_and_operators_emit_redeliver_and_fire_schedules_by_hand() {
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let nightly = "name: nightly\non: { schedule: { cron: \"0 3 * * *\", timezone: Europe/Berlin } }\njobs: { a: { runs_on: default, checkout: false, run: 'true' } }\n";
    let _lib = stack.repository("lib", &[(".kici/workflows/n.yaml", nightly)]).await;
    let _app = stack.repository("app", &[(".kici/workflows/c.yaml", CONSUMER)]).await;
    let place = |name: &str| RepoRef { source: name.to_owned(), repo: format!("local/{name}") };
    let request = EmitEvent {
        name: "built".to_owned(),
        payload: Some(json!({"version": "8", "level": "low"})),
        source: Some("lib".to_owned()),
        ..EmitEvent::default()
    };
    let processed = async |id| {
        until("the event to be delivered", async || {
            let event = stack.client.event(id).await.ok()?.event;
            (event.status == "processed").then_some(event)
        })
        .await
    };
    let first = stack.client.emit_event(&request, Some("k1")).await.unwrap().event_id;
    assert_eq!(stack.client.emit_event(&request, Some("k1")).await.unwrap().event_id, first);
    let event = processed(first).await;
    assert!(event.run_ids.is_empty() && event.note.as_deref().unwrap().contains("untrusted_source"), "{event:?}");

    let asked = TestEventTrust { source: place("lib"), target: place("app"), event: "built".to_owned() };
    assert!(!stack.client.test_event_trust(&asked).await.unwrap().allowed);
    for (source, target, events, field) in [
        (place("lib"), place("lib"), None, "target"),
        (place("none"), place("app"), None, "source.source"),
        (RepoRef { source: "lib".to_owned(), repo: "local/x".to_owned() }, place("app"), None, "source.repo"),
        (place("lib"), place("app"), Some(vec!["/(/".to_owned()]), "events"),
    ] {
        let refused = stack.client.add_event_trust(&AddEventTrust { source, target, events }).await.unwrap_err();
        assert_eq!(refused.problem().unwrap().errors[0].field, field);
    }
    let trust = AddEventTrust { source: place("lib"), target: place("app"), events: Some(vec!["b*".to_owned()]) };
    let added = stack.client.add_event_trust(&trust).await.unwrap();
    assert!(stack.client.test_event_trust(&asked).await.unwrap().allowed);
    let second = stack.client.redeliver_event(first).await.unwrap().event_id;
    let event = processed(second).await;
    assert_eq!(event.run_ids.len(), 1, "{event:?}");
    let run = stack.ended(event.run_ids[0]).await;
    assert_eq!((run.run.status, run.run.repo.as_str()), (RunStatus::Success, "local/app"));
    stack.client.remove_event_trust(added.id).await.unwrap();
    assert!(!stack.client.test_event_trust(&asked).await.unwrap().allowed);
    let reserved = EmitEvent { name: "__schedule_fire".to_owned(), ..EmitEvent::default() };
    let refused = stack.client.emit_event(&reserved, None).await.unwrap_err();
    assert!(refused.to_string().contains("reserved"), "{refused}");

    let schedules = stack.client.schedules().await.unwrap().items;
    assert_eq!((schedules.len(), schedules[0].workflow.as_str()), (1, "nightly"));
    assert!(schedules[0].next_at.is_some() && schedules[0].last_fired_at.is_none(), "{schedules:?}");
    let id = schedules[0].registration_id;
    let fired = stack.client.trigger_schedule(id, &TriggerSchedule::default(), None).await.unwrap().event_id;
    let event = processed(fired).await;
    let run = stack.ended(event.run_ids[0]).await;
    assert_eq!((run.run.status, run.run.trigger.as_str()), (RunStatus::Success, "schedule"), "{}", stack.logs());
}
