//! Claim codes over the wire: a real agent buys its token, runs a job, and a second one is turned away.

use kici_access::{Token, TokenKind};
use kici_protocol::agent::ClaimCredentialsRequest;
use kici_protocol::agent::agent_bootstrap_client::AgentBootstrapClient;
use kici_protocol::agent::claim_credentials_response::Result as Answer;
use secrecy::ExposeSecret;

use crate::stack::{Stack, until};

/// Stores a claim code as a scaler does. The file is opened beside the orchestrator: SQLite keeps the two apart.
fn issue(stack: &Stack, agent: &str) -> String {
    let code = Token::generate(TokenKind::Claim, getrandom::fill).unwrap();
    let labels = r#"["default","kici:agent:event"]"#;
    let url = format!("http://{}", stack.address);
    let (now, hour) = (1_700_000_000_000_000_i64, 4_000_000_000_000_000_i64);
    let sql = format!(
        "INSERT INTO scaler_claims (claim_hash, claim_prefix, agent_id, scaler_name, labels, mandatory_labels, \
         agent_token_ttl_ms, orchestrator_url, created_at, expires_at) \
         VALUES ('{}', '{}', '{agent}', 'cloud', '{labels}', '[]', 600000, '{url}', {now}, {hour})",
        code.hash(),
        code.display_prefix()
    );
    stack.sqlite(&sql);
    code.secret().expose_secret().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_was_given_a_claim_code_runs_a_job_and_a_second_one_with_it_ends() {
    let stack = Stack::start(None).await;
    let code = issue(&stack, "scaler-event-1");
    let workflow = "on: push\njobs: { a: { runs_on: kici:agent:event, checkout: false, run: echo hello } }\n";
    let repository = stack.repository("app", &[(".kici/workflows/w.yaml", workflow)]).await;
    let run = stack.push_one(&repository, "app").await;
    let settings = [("KICI_SCALER_CLAIM_CODE", code.as_str()), ("KICI_SCALER_MANAGED", "1")];
    let mut first = stack.spawn_claiming("scaler-event-1", &settings);
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, kici_engine::state::RunStatus::Success, "{}", stack.logs());
    assert_eq!(ended.jobs[0].agent_id.as_deref(), Some("scaler-event-1"));
    assert_eq!(first.exit_code().await, Some(0), "it ends without work: {}", stack.logs());
    let mut second = stack.spawn_claiming("second", &settings);
    assert_eq!(second.exit_code().await, Some(78), "{}", stack.logs());
    let noted = until("the refusal in the access log", async || {
        let log = stack.client.access_log(&Default::default(), &Default::default()).await.ok()?;
        log.items.into_iter().find(|entry| entry.action == "scaler_claim.redeem" && entry.outcome == "denied")
    })
    .await;
    assert_eq!(noted.error_message.as_deref(), Some("consumed"));
    assert!(!stack.logs().contains(&code), "the code is in no log");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_code_that_is_none_is_answered_without_a_token() {
    let stack = Stack::start(None).await;
    let mut client = AgentBootstrapClient::connect(format!("http://{}", stack.address)).await.unwrap();
    let answer = client.claim_credentials(ClaimCredentialsRequest { claim_code: "kici_claim_x".into() }).await.unwrap();
    assert_eq!(answer.into_inner().result, Some(Answer::ErrorReason("invalid".into())));
    let long = client.claim_credentials(ClaimCredentialsRequest { claim_code: "x".repeat(2000) }).await.unwrap_err();
    assert_eq!(long.code(), tonic::Code::OutOfRange, "{long:?}");
}
