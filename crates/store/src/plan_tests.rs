//! The plans of the statements that run all the time: each is caught as it is sent, and explained over a queue that holds
//! many ended rows and few others.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use diesel::connection::{Instrumentation, InstrumentationEvent, set_default_instrumentation};
use diesel::sql_types::Text;
use diesel::{Connection, QueryableByName, SqliteConnection, sql_query};
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use kici_engine::event::{Event, EventKind, ForkState};
use kici_engine::ids::{AgentId, JobId, RunId};
use uuid::Uuid;

use crate::Store;
use crate::model::{ClaimRequest, JobRef};
use crate::testing::{TestStore, agent};

static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn recorder() -> Option<Box<dyn Instrumentation>> {
    Some(Box::new(|event: InstrumentationEvent<'_>| {
        if let InstrumentationEvent::StartQuery { query, .. } = event {
            let text = query.to_string();
            let sql = text.split(" -- binds:").next().unwrap_or_default().trim().to_owned();
            SEEN.lock().unwrap_or_else(PoisonError::into_inner).push(sql);
        }
    }))
}

/// The statements on the queue since the last call.
fn caught() -> Vec<String> {
    let mut seen = std::mem::take(&mut *SEEN.lock().unwrap_or_else(PoisonError::into_inner));
    seen.retain(|sql| sql.contains("dispatch_queue") && !sql.starts_with("EXPLAIN"));
    seen
}

fn id(n: u32) -> Uuid {
    Uuid::from_u128(0x0000_0000_0000_7000_8000_0000_0000_0000 + u128::from(n))
}

const FIRST_RUN: u32 = 0xf0_0000;
const ROWS: u32 = 20_000;
/// Jobs of one run.
const JOBS: u32 = 10;

/// The run of a job.
fn run_of(job: u32) -> RunId {
    RunId::from_uuid(id(FIRST_RUN + job / JOBS))
}

fn event() -> String {
    let event = Event {
        kind: EventKind::Push,
        raw_name: "push".to_owned(),
        action: None,
        org: "default".to_owned(),
        routing_key: "local:x".to_owned(),
        provider: "local".to_owned(),
        source: "src".to_owned(),
        repo: None,
        git_ref: None,
        sha: None,
        target_branch: None,
        source_branch: None,
        base_sha: None,
        tag: None,
        default_branch: None,
        is_fork_pr: ForkState::No,
        pr_number: None,
        sender: kici_engine::event::Sender::default(),
        commit_message: None,
        inputs: Default::default(),
        requested_workflow: None,
        payload: serde_json::json!({}),
        check_mode: Default::default(),
        chain_depth: 0,
    };
    serde_json::to_string(&event).unwrap()
}

/// 2,000 runs of ten jobs each, for two selectors: 300 jobs wait, 50 are at agents, 10 of them out of contact, the others are
/// done. `series` makes the numbers up to one, `uuid` an id of a number.
fn rows(series: impl Fn(u32) -> String, uuid: impl Fn(&str) -> String, at: &str, flag: &str) -> String {
    let event = event();
    let (runs, jobs) = (series(ROWS / JOBS), series(ROWS));
    let (run, job) = (uuid(&format!("{FIRST_RUN} + n.i")), uuid("n.i"));
    let of_job = uuid(&format!("{FIRST_RUN} + n.i / {JOBS}"));
    let first = uuid(&FIRST_RUN.to_string());
    let run_columns = "id, org, source_id, dedup_key, repo, sha, workflow_name, run_name, lock_digest, event, \
         trigger_kind, status, attempt, inputs, request_id, chain_depth, created_at";
    let run_values = format!(
        "'default', {first}, 'k' || n.i, 'o/r', 'a', 'ci', 'ci', 'd', '{event}', 'push', \
         CASE WHEN n.i <= 35 THEN 'running' ELSE 'success' END, 1, '{{}}', 'r', 0, {at}"
    );
    format!(
        "INSERT INTO runs ({run_columns}) SELECT {first}, {run_values} FROM (SELECT 0 AS i) AS n; \
         INSERT INTO runs ({run_columns}) SELECT {run}, {run_values} FROM {runs}; \
         INSERT INTO queue_selectors (digest, selector, created_at) \
         VALUES ('x', '{{\"labels\":[]}}', {at}), ('y', '{{\"labels\":[]}}', {at}); \
         INSERT INTO jobs (id, run_id, name, base_name, job_index, position, display_name, status, needs_satisfied, \
             fail_fast, dispatch_epoch, attempt, outputs, log_bytes, created_at) \
         SELECT {job}, {of_job}, 'j' || n.i, 'j', 0, n.i, 'j', \
             CASE WHEN n.i <= 300 THEN 'queued' WHEN n.i <= 350 THEN 'running' ELSE 'success' END, \
             {flag}, {flag}, 1, 1, '{{}}', 0, {at} FROM {jobs}; \
         INSERT INTO dispatch_queue (id, run_id, workflow_name, job_name, status, priority, selector_digest, created_at, \
             dispatch_attempts, dispatch_epoch, agent_id, owner_instance_id) \
         SELECT id, run_id, 'ci', name, CASE WHEN position <= 300 THEN 'pending' WHEN position <= 340 THEN 'dispatched' \
             WHEN position <= 350 THEN 'recovering' ELSE 'completed' END, 0, \
             CASE WHEN position % 4 = 0 THEN 'x' ELSE 'y' END, created_at, 0, 1, 'a1', 'node-1' FROM jobs; \
         ANALYZE;"
    )
}

/// Each operation, and an index that one of its statements must use.
async fn hot(store: &Store, explain: impl AsyncFn(&str, &[&str], Vec<String>)) {
    let now = kici_engine::time::Ts::from_micros(1_800_000_000_000_000);
    let pending = ["dispatch_queue_pending_idx"];
    let held = ["dispatch_queue_held_idx"];
    let key = ["dispatch_queue_pkey", "sqlite_autoindex_dispatch_queue_1"];
    let a1: AgentId = agent("a1");
    let job = JobRef { run_id: run_of(310), job_id: JobId::from_uuid(id(310)), epoch: 1 };
    caught();
    macro_rules! hot {
        ($name:ident ($($arg:expr),*), $indexes:expr) => {{
            store.$name($($arg),*).await.unwrap();
            explain(stringify!($name), &$indexes, caught()).await;
        }};
    }
    let claim = ClaimRequest { agent_id: a1.clone(), digests: vec!["x".into()], limit: 5, except: Vec::new() };
    hot!(queue_claim(vec![claim]), ["dispatch_queue_pending_idx"]);
    hot!(queue_claim_by_id(JobId::from_uuid(id(200)), a1.clone()), key);
    hot!(queue_oldest_pending(500), pending);
    hot!(queue_pending_of(vec![JobId::from_uuid(id(201))]), [key[0], key[1], pending[0]]);
    hot!(queue_selectors_pending(), pending);
    hot!(queue_waiting(1000), pending);
    hot!(queue_counts(), [pending[0], held[0]]);
    hot!(queue_expired_acks(100), held);
    hot!(queue_expired_recoveries(100), held);
    hot!(queue_expired_pending(100), pending);
    hot!(queue_unstarted_since(now, 100), [held[0], key[0], key[1]]);
    hot!(jobs_stale(now, 100), [held[0], "jobs_running_idx"]);
    hot!(jobs_past_timeout(Duration::from_secs(1), 100), [held[0], key[0], key[1]]);
    hot!(queue_owned_by(a1.clone()), held);
    hot!(queue_owned_by_instances(vec![a1.clone()]), held);
    hot!(queue_ownership(job, a1.clone()), key);
    hot!(queue_ack_arm(job, a1.clone(), now), key);
    hot!(queue_ack(job, a1.clone()), key);
    hot!(job_start(job, a1.clone(), Default::default()), key);
    hot!(runs_idle(now, 100), ["dispatch_queue_run_idx"]);
}

fn judge(name: &str, indexes: &[&str], plans: &[(String, String)]) {
    assert!(!plans.is_empty(), "{name} asks nothing of the queue");
    for (sql, plan) in plans {
        let whole = |line: &str| {
            line.contains("Seq Scan on dispatch_queue")
                || (line.contains("SCAN dispatch_queue") && !line.contains("USING"))
        };
        assert!(!plan.lines().any(whole), "{name} reads the whole queue\n{sql}\n{plan}");
    }
    let used = plans.iter().any(|(_, plan)| indexes.iter().any(|index| plan.contains(index)));
    assert!(used, "{name} uses none of {indexes:?}\n{plans:#?}");
}

#[derive(QueryableByName)]
struct Plan {
    #[diesel(sql_type = Text)]
    detail: String,
}

#[derive(QueryableByName)]
struct PgPlan {
    #[diesel(sql_type = Text, column_name = "QUERY PLAN")]
    line: String,
}

#[tokio::test(flavor = "multi_thread")]
async fn no_hot_statement_reads_the_whole_queue_on_sqlite() {
    set_default_instrumentation(recorder).unwrap();
    let t = TestStore::sqlite().await;
    let series = |to: u32| {
        let numbers = format!("SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {to}");
        format!("(WITH RECURSIVE n(i) AS ({numbers}) SELECT i FROM n) AS n")
    };
    let uuid = |n: &str| format!("printf('00000000-0000-7000-8000-%012x', {n})");
    t.sql(&rows(series, uuid, "1800000000000000", "0")).await;
    // The statistics are read when a connection is opened.
    t.store.close().await;
    let store = t.reopened().await;
    hot(&store, async |name, indexes, statements| {
        let mut conn = SqliteConnection::establish(t.url().trim_start_matches("sqlite:")).unwrap();
        let mut plans = Vec::new();
        for sql in statements {
            let explain = sql_query(format!("EXPLAIN QUERY PLAN {sql}"));
            let plan = diesel::RunQueryDsl::load::<Plan>(explain, &mut conn).unwrap();
            plans.push((sql, plan.into_iter().map(|row| row.detail).collect::<Vec<_>>().join("\n")));
        }
        caught();
        judge(name, indexes, &plans);
    })
    .await;
}

/// How many values a statement takes.
fn values(sql: &str) -> usize {
    (1..).take_while(|n| sql.contains(&format!("${n}"))).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_hot_statement_reads_the_whole_queue_on_postgres() {
    set_default_instrumentation(recorder).unwrap();
    let Some(t) = TestStore::postgres().await else { return };
    let series = |to: u32| format!("generate_series(1, {to}) AS n(i)");
    let uuid = |n: &str| format!("('00000000-0000-7000-8000-' || lpad(to_hex({n}), 12, '0'))::uuid");
    t.sql(&rows(series, uuid, "to_timestamp(1800000000)", "false")).await;
    hot(&t.store, async |name, indexes, statements| {
        let mut conn = AsyncPgConnection::establish(t.url()).await.unwrap();
        conn.batch_execute("SET plan_cache_mode = force_generic_plan").await.unwrap();
        let mut plans = Vec::new();
        for (at, sql) in statements.into_iter().enumerate() {
            conn.batch_execute(&format!("PREPARE s{at} AS {sql}")).await.unwrap();
            let nulls = vec!["NULL"; values(&sql)].join(", ");
            let call = if nulls.is_empty() { format!("s{at}") } else { format!("s{at}({nulls})") };
            let explain = sql_query(format!("EXPLAIN EXECUTE {call}"));
            let plan = diesel_async::RunQueryDsl::load::<PgPlan>(explain, &mut conn).await.unwrap();
            plans.push((sql, plan.into_iter().map(|row| row.line).collect::<Vec<_>>().join("\n")));
        }
        caught();
        judge(name, indexes, &plans);
    })
    .await;
}
